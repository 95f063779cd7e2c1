"""PyG's graph of a folder, its loader, and versions.

PyG samples with pyg-lib where that is installed, and otherwise with torch-sparse.
"""

import numpy as np
import torch
from minibatches import versions
from serve import BATCH_SIZE, FANOUTS, arrays
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader

VERSIONS = versions()


def build_data(folder):
    """Return the graph of a folder with its features."""
    indptr, indices, features = arrays(folder)
    targets = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    edges = torch.from_numpy(np.stack([indices.astype(np.int64), targets]))
    return Data(x=torch.from_numpy(features), edge_index=edges, num_nodes=len(features))


def build_loader(data, seeds, workers):
    """Return PyG's loader."""
    return NeighborLoader(
        data,
        FANOUTS[::-1],
        input_nodes=torch.from_numpy(seeds),
        batch_size=BATCH_SIZE,
        num_workers=workers,
        is_sorted=True,
    )
