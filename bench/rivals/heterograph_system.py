"""A heterogeneous DGL graph of a folder of `bench.loading.heterograph`, and its sampler."""

import json
from pathlib import Path

import numpy as np
import torch
from dgl_system import dgl

FANOUTS = [10, 15]  # input layer first


def build_heterograph(folder):
    """Return the graph with features in the node data "feat", and the type of the seeds."""
    folder = Path(folder)
    meta = json.loads((folder / "meta.json").read_text())

    def read(name):
        return torch.from_numpy(np.load(folder / f"{name}.npy"))

    edges = {
        tuple(each): (read(f"{each[1]}_src"), read(f"{each[1]}_dst")) for each in meta["edges"]
    }
    graph = dgl.heterograph(edges, num_nodes_dict=meta["nodes"])
    for kind in graph.ntypes:
        graph.nodes[kind].data["feat"] = read(f"{kind}_features")
    # as DGL advises before training, so that no loader creates formats while it is timed
    graph.create_formats_()
    return graph, meta["seeds"]


def build_sampler(graph, **options):
    """Return DGL's sampler, which prefetches the features of all types."""
    features = {kind: ["feat"] for kind in graph.ntypes}
    return dgl.dataloading.NeighborSampler(FANOUTS, prefetch_node_feats=features, **options)


def sizes_of(graph, minibatch):
    """Return the numbers of nodes and edges of a minibatch, whose features are there."""
    nodes, _, blocks = minibatch
    for kind in graph.ntypes:
        rows = blocks[0].srcnodes[kind].data["feat"]
        assert len(rows) == len(nodes[kind])
    return sum(map(len, nodes.values())), sum(block.num_edges() for block in blocks)
