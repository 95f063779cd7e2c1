"""Loaders that take the place of PyG's, and tables of features as a PyG `FeatureStore`.

Importing this imports PyG, and is a RuntimeError where there is none.
"""

from gcnzc.interop.pyg_link import LinkNeighborLoader
from gcnzc.interop.pyg_loader import NeighborLoader
from gcnzc.interop.pyg_store import TableStore

__all__ = ["LinkNeighborLoader", "NeighborLoader", "TableStore"]
