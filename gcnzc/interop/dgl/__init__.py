"""Drop-in loader for DGL, and DGL's neighbour sampler for `gcnzc.Loader`.

Importing this package does not import DGL; using its functions and classes does. Other names are
those of `dgl.dataloading`, unchanged, such as its samplers.
"""

import sys
from typing import Any

from gcnzc.interop.dgl.dgl_sampler import DglSampler
from gcnzc.interop.dgl.importing import graphbolt_works, import_dgl
from gcnzc.interop.dgl.loader import DataLoader, EdgeDataLoader, NodeDataLoader

__all__ = [
    "DataLoader",
    "DglSampler",
    "EdgeDataLoader",
    "NodeDataLoader",
    "graphbolt_works",
    "import_dgl",
]


def __getattr__(name: str) -> Any:
    """Return a name of `dgl.dataloading` that this package does not define."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        dgl = import_dgl()
    except ImportError as error:
        # `from ... import` would replace an AttributeError, and `hasattr` needs one
        if sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {error}") from error
    return getattr(dgl.dataloading, name)
