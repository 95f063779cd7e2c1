"""Measure training steps of DGL: its loader with 0 and 1 worker, and its layers.

With 0 workers also with the memory allocation of `gcnzc train`.
"""

from itertools import pairwise

import torch
from dgl_system import VERSIONS, build_graph, build_loader, dgl, nn
from serve import FANOUTS, serve
from steps import CLASSES, DROPOUT, HEADS, HIDDEN, KEPT, KINDS, labels, train
from torch.nn.functional import dropout, elu, relu

from gcnzc.system.malloc import freed_memory


class Model(torch.nn.Module):
    """Three layers of a kind, as in DGL's examples."""

    def __init__(self, kind, columns):
        super().__init__()
        sizes = list(pairwise([columns, HIDDEN, HIDDEN, CLASSES]))
        options = {"allow_zero_in_degree": True}
        if kind == "gat":
            layers = [nn.GATConv(a, b // HEADS, HEADS, **options) for a, b in sizes[:-1]]
            layers.append(nn.GATConv(*sizes[-1], 1, **options))
        elif kind == "gcn":
            layers = [nn.GraphConv(a, b, **options) for a, b in sizes]
        else:
            layers = [nn.SAGEConv(a, b, "mean") for a, b in sizes]
        self.layers = torch.nn.ModuleList(layers)
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
    graph = build_graph(folder)
    y, columns = labels(graph.num_nodes()), graph.ndata["features"].shape[1]
    sampler = dgl.dataloading.NeighborSampler(FANOUTS, prefetch_node_feats=["features"])

    def steps(kind, workers, kept=False):
        def batches(seeds):
            torch.manual_seed(0)
            with freed_memory(kept=kept):
                yield from train(
                    Model(kind, columns),
                    (
                        (
                            (blocks, blocks[0].srcdata["features"]),
                            y[ids],
                            (len(nodes), sum(block.num_edges() for block in blocks)),
                        )
                        for nodes, ids, blocks in build_loader(graph, seeds, sampler, workers)
                    ),
                )

        return batches

    configurations = {
        f"{kind}, {workers} workers": steps(kind, workers) for kind in KINDS for workers in (0, 1)
    }
    for kind in KINDS:
        configurations[f"{kind}, 0 workers, {KEPT}"] = steps(kind, 0, kept=True)
    return configurations, VERSIONS


serve(make)
