"""Measure DGL: its loader with 0 to 2 workers, features prefetched or indexed; its sampler."""

import torch
from serve import BATCH_SIZE, FANOUTS, arrays, serve

from gcnzc.interop.dgl import import_dgl

dgl = import_dgl()


def make(folder):
    """Return the measured configurations by name, and versions."""
    indptr, indices, features = arrays(folder)
    # int64, since DGL corrupts the blocks of int32 graphs
    sources = torch.from_numpy(indices).long()
    graph = dgl.graph(("csc", (torch.from_numpy(indptr), sources, [])))
    assert graph.idtype == torch.int64
    features = torch.from_numpy(features)
    graph.ndata["features"] = features

    def load(workers, prefetched):
        prefetch = ["features"] if prefetched else None
        sampler = dgl.dataloading.NeighborSampler(FANOUTS, prefetch_node_feats=prefetch)

        def batches(seeds):
            loader = dgl.dataloading.DataLoader(
                graph,
                torch.from_numpy(seeds),
                sampler,
                batch_size=BATCH_SIZE,
                num_workers=workers,
            )
            for nodes, _, blocks in loader:
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
    versions = {"dgl": dgl.__version__, "torch": torch.__version__}
    return configurations | {"sampling": sample}, versions


serve(make)
