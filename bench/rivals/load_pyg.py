"""Measure PyG: its loader with 0 to 2 workers, with torch-sparse's sampler."""

import numpy as np
import torch
import torch_geometric
import torch_sparse
from serve import BATCH_SIZE, FANOUTS, arrays, serve
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader


def make(folder):
    """Return the measured configurations by name, and versions."""
    indptr, indices, features = arrays(folder)
    targets = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    edges = torch.from_numpy(np.stack([indices.astype(np.int64), targets]))
    data = Data(x=torch.from_numpy(features), edge_index=edges, num_nodes=len(features))

    def load(workers):
        def batches(seeds):
            loader = NeighborLoader(
                data,
                FANOUTS[::-1],
                input_nodes=torch.from_numpy(seeds),
                batch_size=BATCH_SIZE,
                num_workers=workers,
                is_sorted=True,
            )
            for batch in loader:
                assert batch.x.shape == (batch.num_nodes, features.shape[1])
                yield batch.num_nodes, batch.num_edges

        return batches

    versions = {
        "torch_geometric": torch_geometric.__version__,
        "torch_sparse": torch_sparse.__version__,
        "torch": torch.__version__,
    }
    return {f"loader, {workers} workers": load(workers) for workers in (0, 1, 2)}, versions


serve(make)
