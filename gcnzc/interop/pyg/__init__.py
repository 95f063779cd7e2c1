"""Drop-in loaders for PyG, and tables of features as a PyG `FeatureStore`.

Importing this imports PyG, and is a RuntimeError where there is none.
"""

from gcnzc.interop.pyg.feature_store import TableStore
from gcnzc.interop.pyg.link_loader import LinkNeighborLoader
from gcnzc.interop.pyg.node_loader import NeighborLoader

__all__ = ["LinkNeighborLoader", "NeighborLoader", "TableStore"]
