"""Measure gcnzc: its loader with one to three threads, and its sampler."""

import torch
from serve import BATCH_SIZE, FANOUTS, arrays, serve

import gcnzc
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.loader.loader import Loader
from gcnzc.sampling.neighbor import Sampler


def make(folder):
    """Return the measured configurations by name, and versions."""
    indptr, indices, features = arrays(folder)
    graph, table = Graph(indptr, indices, check=False), FeatureTable(torch.from_numpy(features))
    sampler = Sampler(graph, FANOUTS)

    def sizes(batch):
        return len(batch.nodes), sum(block.num_edges for block in batch.blocks)

    def load(threads):
        def batches(seeds):
            ids = torch.from_numpy(seeds)
            loader = Loader(
                graph,
                table,
                ids,
                FANOUTS,
                BATCH_SIZE,
                shuffle=False,
                threads=threads,
                sampler=sampler,
            )
            for batch in loader:
                assert batch.x.shape == (len(batch.nodes), table.num_columns)
                yield sizes(batch)

        return batches

    def sample(seeds):
        for ids in torch.from_numpy(seeds).split(BATCH_SIZE):
            yield sizes(sampler.sample(ids, epoch=0))

    configurations = {f"loader, {threads} threads": load(threads) for threads in (1, 2, 3)}
    versions = {"gcnzc": gcnzc.__version__, "torch": torch.__version__}
    return configurations | {"sampling": sample}, versions


serve(make)
