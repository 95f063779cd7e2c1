"""PyG's graph of a folder, its loader with torch-sparse's sampler, and its versions."""

import numpy as np
import torch
import torch_geometric
import torch_sparse
from serve import BATCH_SIZE, FANOUTS, arrays
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader

VERSIONS = {
    "torch_geometric": torch_geometric.__version__,
    "torch_sparse": torch_sparse.__version__,
    "torch": torch.__version__,
}


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
