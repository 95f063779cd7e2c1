"""Import PyG. Other modules get it from here."""

import warnings
from typing import Any

INSTALL = "pip install 'torch-geometric>=2.6'"


def import_pyg() -> Any:
    """Import `torch_geometric`, with its modules `data`, `loader` and `sampler`.

    Warnings during the import are suppressed.

    Raises:
        ImportError: PyG is not installed, or its import fails.
    """
    try:
        with warnings.catch_warnings():
            # PyG itself uses deprecated functions of torch
            warnings.simplefilter("ignore")
            import torch_geometric
            import torch_geometric.data
            import torch_geometric.loader
            import torch_geometric.sampler
    except (ImportError, OSError) as error:
        raise ImportError(f"the import of PyG failed: {error}\n\nhint: {INSTALL}") from error
    return torch_geometric
