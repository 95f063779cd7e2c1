"""Import PyG; the only module that does."""

import warnings
from typing import Any

INSTALL = "pip install 'torch-geometric>=2.6'"


def import_pyg() -> Any:
    """The module `torch_geometric`, with its parts `data`, `loader` and `sampler`.

    What PyG warns of while it is imported is not shown.

    Raises:
        RuntimeError: PyG is not installed, or does not import.
    """
    try:
        with warnings.catch_warnings():
            # of what PyG itself uses of torch
            warnings.simplefilter("ignore")
            import torch_geometric
            import torch_geometric.data
            import torch_geometric.loader
            import torch_geometric.sampler
    except (ImportError, OSError) as error:
        raise RuntimeError(f"PyG does not import: {error}\n\nhint: {INSTALL}") from error
    return torch_geometric
