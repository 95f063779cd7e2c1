"""Measure training steps of PyG: its loader with 0 and 1 worker, its models and torch's Adam."""

import numpy as np
import torch
import torch_geometric
import torch_sparse
from serve import (
    BATCH_SIZE,
    CLASSES,
    DROPOUT,
    FANOUTS,
    HEADS,
    HIDDEN,
    LEARNING_RATE,
    arrays,
    labels,
    serve,
)
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GAT, GCN, GraphSAGE


def make(folder):
    """Return the measured configurations by name, and versions."""
    indptr, indices, features = arrays(folder)
    targets = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    edges = torch.from_numpy(np.stack([indices.astype(np.int64), targets]))
    x, y = torch.from_numpy(features), labels(len(features))
    data = Data(x=x, y=y, edge_index=edges, num_nodes=len(features))

    def train(kind, workers):
        def batches(seeds):
            torch.manual_seed(0)
            options = {"heads": HEADS, "act": "elu"} if kind == "gat" else {}
            options["dropout"] = DROPOUT
            model_class = {"sage": GraphSAGE, "gcn": GCN, "gat": GAT}[kind]
            model = model_class(features.shape[1], HIDDEN, 3, CLASSES, **options)
            optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
            loader = NeighborLoader(
                data,
                FANOUTS[::-1],
                input_nodes=torch.from_numpy(seeds),
                batch_size=BATCH_SIZE,
                num_workers=workers,
                is_sorted=True,
            )
            for batch in loader:
                optimizer.zero_grad()
                logits = model(batch.x, batch.edge_index)[: batch.batch_size]
                cross_entropy(logits, batch.y[: batch.batch_size]).backward()
                optimizer.step()
                yield batch.num_nodes, batch.num_edges

        return batches

    versions = {
        "torch_geometric": torch_geometric.__version__,
        "torch_sparse": torch_sparse.__version__,
        "torch": torch.__version__,
    }
    configurations = {
        f"{kind}, {workers} workers": train(kind, workers)
        for kind in ("sage", "gcn", "gat")
        for workers in (0, 1)
    }
    return configurations, versions


serve(make)
