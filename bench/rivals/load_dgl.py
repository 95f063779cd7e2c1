"""Measure DGL: its loader with 0 to 2 workers, features prefetched or indexed; its sampler."""

import torch
from dgl_system import VERSIONS, build_graph, build_loader, dgl
from serve import BATCH_SIZE, FANOUTS, serve


def make(folder):
    """Return the measured configurations by name, and versions."""
    graph = build_graph(folder)
    features = graph.ndata["features"]

    def load(workers, prefetched):
        prefetch = ["features"] if prefetched else None
        sampler = dgl.dataloading.NeighborSampler(FANOUTS, prefetch_node_feats=prefetch)

        def batches(seeds):
            for nodes, _, blocks in build_loader(graph, seeds, sampler, workers):
                x = blocks[0].srcdata["features"] if prefetched else features[nodes]
                assert x.shape == (len(nodes), features.shape[1])
                yield len(nodes), sum(block.num_edges() for block in blocks)

        return batches

    plain = dgl.dataloading.NeighborSampler(FANOUTS)

    def sample(seeds):
        for ids in torch.from_numpy(seeds).split(BATCH_SIZE):
            nodes, _, blocks = plain.sample(graph, ids)
            yield len(nodes), sum(block.num_edges() for block in blocks)

    configurations = {
        f"loader, {workers} workers, features {'prefetched' if prefetched else 'indexed'}": load(
            workers, prefetched
        )
        for workers in (0, 1, 2)
        for prefetched in (True, False)
    }
    return configurations | {"sampling": sample}, VERSIONS


serve(make)
