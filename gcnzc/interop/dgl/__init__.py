"""Drop-in loader for DGL, and DGL's sampler as an alternative engine.

Importing this does not import DGL; what is used from it does.
"""

from gcnzc.interop.dgl.importing import graphbolt_works, import_dgl
from gcnzc.interop.dgl.loader import DataLoader
from gcnzc.interop.dgl.native_sampler import DglSampler

__all__ = ["DataLoader", "DglSampler", "graphbolt_works", "import_dgl"]
