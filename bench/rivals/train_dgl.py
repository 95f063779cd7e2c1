"""Measure training steps of DGL: its loader with 0 and 1 worker, its layers and torch's Adam."""

from itertools import pairwise

import torch
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
from torch.nn.functional import cross_entropy, dropout, elu, relu

from gcnzc.interop.dgl import import_dgl

dgl = import_dgl()
from dgl.nn import GATConv, GraphConv, SAGEConv  # noqa: E402


class Model(torch.nn.Module):
    """Three layers of a kind, as in DGL's examples."""

    def __init__(self, kind, columns):
        super().__init__()
        widths = [columns, HIDDEN, HIDDEN, CLASSES]
        sizes = list(pairwise(widths))
        if kind == "gat":
            self.layers = torch.nn.ModuleList(
                GATConv(a, b // HEADS, HEADS, allow_zero_in_degree=True) for a, b in sizes[:-1]
            )
            self.layers.append(GATConv(*sizes[-1], 1, allow_zero_in_degree=True))
        elif kind == "gcn":
            self.layers = torch.nn.ModuleList(
                GraphConv(a, b, allow_zero_in_degree=True) for a, b in sizes
            )
        else:
            self.layers = torch.nn.ModuleList(SAGEConv(a, b, "mean") for a, b in sizes)
        self.activate = elu if kind == "gat" else relu

    def forward(self, blocks, x):
        """Return the logits of the seeds."""
        for layer, block in zip(self.layers, blocks, strict=True):
            x = layer(block, x).flatten(1)
            if layer is not self.layers[-1]:
                x = dropout(self.activate(x), DROPOUT)
        return x


def make(folder):
    """Return the measured configurations by name, and versions."""
    indptr, indices, features = arrays(folder)
    # int64, since DGL corrupts the blocks of int32 graphs
    sources = torch.from_numpy(indices).long()
    graph = dgl.graph(("csc", (torch.from_numpy(indptr), sources, [])))
    graph.ndata["features"] = torch.from_numpy(features)
    y = labels(len(features))
    sampler = dgl.dataloading.NeighborSampler(FANOUTS, prefetch_node_feats=["features"])

    def train(kind, workers):
        def batches(seeds):
            torch.manual_seed(0)
            model = Model(kind, features.shape[1])
            optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
            loader = dgl.dataloading.DataLoader(
                graph,
                torch.from_numpy(seeds),
                sampler,
                batch_size=BATCH_SIZE,
                num_workers=workers,
            )
            for nodes, ids, blocks in loader:
                optimizer.zero_grad()
                logits = model(blocks, blocks[0].srcdata["features"])
                cross_entropy(logits, y[ids]).backward()
                optimizer.step()
                yield len(nodes), sum(block.num_edges() for block in blocks)

        return batches

    versions = {"dgl": dgl.__version__, "torch": torch.__version__}
    configurations = {
        f"{kind}, {workers} workers": train(kind, workers)
        for kind in ("sage", "gcn", "gat")
        for workers in (0, 1)
    }
    return configurations, versions


serve(make)
