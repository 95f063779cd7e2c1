"""Drop-in loaders for PyG, and feature tables as a PyG `FeatureStore`.

Importing this package imports PyG, and raises an ImportError if PyG is not installed.
"""

from gcnzc.interop.pyg.feature_store import TableStore
from gcnzc.interop.pyg.hetero_link_loader import HeteroLinkNeighborLoader
from gcnzc.interop.pyg.hetero_node_loader import HeteroNeighborLoader
from gcnzc.interop.pyg.link_loader import LinkNeighborLoader
from gcnzc.interop.pyg.node_loader import NeighborLoader

__all__ = [
    "HeteroLinkNeighborLoader",
    "HeteroNeighborLoader",
    "LinkNeighborLoader",
    "NeighborLoader",
    "TableStore",
]
