"""Drop-in loader for DGL, and DGL's neighbour sampler for `gcnzc.Loader`.

Importing this package does not import DGL; using its functions and classes does.
"""

from gcnzc.interop.dgl.dgl_sampler import DglSampler
from gcnzc.interop.dgl.importing import graphbolt_works, import_dgl
from gcnzc.interop.dgl.loader import DataLoader

__all__ = ["DataLoader", "DglSampler", "graphbolt_works", "import_dgl"]
