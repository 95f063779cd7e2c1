"""Drop-in loaders for PyG, and tables and graphs as PyG stores.

Importing this package imports PyG, and raises an ImportError if PyG is not installed. Other names
are those of `torch_geometric.loader`, unchanged, such as `ClusterLoader`. The module `sampler` has
the replacement of `torch_geometric.sampler.NeighborSampler`.
"""

from typing import Any

from gcnzc.interop.pyg.importing import import_pyg
from gcnzc.interop.pyg.loader import LinkNeighborLoader, NeighborLoader
from gcnzc.interop.pyg.stores import HeteroFeatureStore, HeteroGraphStore, TableStore, as_stores

__all__ = [
    "HeteroFeatureStore",
    "HeteroGraphStore",
    "LinkNeighborLoader",
    "NeighborLoader",
    "TableStore",
    "as_stores",
]


def __getattr__(name: str) -> Any:
    """Return a name of `torch_geometric.loader` that this package does not define."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_pyg().loader, name)
