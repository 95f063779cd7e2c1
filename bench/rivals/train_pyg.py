"""Measure training steps of PyG: its loader with 0 and 1 worker, and its models."""

import torch
from pyg_system import VERSIONS, build_data, build_loader
from serve import serve
from steps import CLASSES, DROPOUT, HEADS, HIDDEN, KINDS, LAYERS, labels, train
from torch_geometric.nn import GAT, GCN, GraphSAGE


def make(folder):
    """Return the measured configurations by name, and versions."""
    data = build_data(folder)
    data.y = labels(data.num_nodes)

    def steps(kind, workers):
        def batches(seeds):
            torch.manual_seed(0)
            options = {"heads": HEADS, "act": "elu"} if kind == "gat" else {}
            model_class = {"sage": GraphSAGE, "gcn": GCN, "gat": GAT}[kind]
            sizes = (data.num_features, HIDDEN, LAYERS, CLASSES)
            model = model_class(*sizes, dropout=DROPOUT, **options)
            return train(
                model,
                (
                    (
                        (batch.x, batch.edge_index),
                        batch.y[: batch.batch_size],
                        (batch.num_nodes, batch.num_edges),
                    )
                    for batch in build_loader(data, seeds, workers)
                ),
            )

        return batches

    configurations = {
        f"{kind}, {workers} workers": steps(kind, workers) for kind in KINDS for workers in (0, 1)
    }
    return configurations, VERSIONS


serve(make)
