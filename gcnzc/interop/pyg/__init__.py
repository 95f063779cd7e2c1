"""Drop-in loaders for PyG, and tables and graphs as PyG stores.

Importing this package imports PyG, and raises an ImportError if PyG is not installed.
"""

from gcnzc.interop.pyg.feature_store import TableStore
from gcnzc.interop.pyg.hetero_link_loader import HeteroLinkNeighborLoader
from gcnzc.interop.pyg.hetero_node_loader import HeteroNeighborLoader
from gcnzc.interop.pyg.link_loader import LinkNeighborLoader
from gcnzc.interop.pyg.node_loader import NeighborLoader
from gcnzc.interop.pyg.stores import HeteroFeatureStore, HeteroGraphStore, as_stores

__all__ = [
    "HeteroFeatureStore",
    "HeteroGraphStore",
    "HeteroLinkNeighborLoader",
    "HeteroNeighborLoader",
    "LinkNeighborLoader",
    "NeighborLoader",
    "TableStore",
    "as_stores",
]
