"""Measure the loaders of graphs without types, of the gcnzc on PYTHONPATH."""

import numpy as np
import torch
from serve import BATCH_SIZE, FANOUTS, arrays, serve
from torch_geometric.data import Data

import gcnzc
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.interop.pyg import NeighborLoader
from gcnzc.loader.loader import Loader
from gcnzc.sampling.neighbor import Sampler

THREADS = 2


def make(folder):
    """Return the measured configurations by name, and versions."""
    indptr, indices, features = arrays(folder)
    graph, table = Graph(indptr, indices, check=False), FeatureTable(torch.from_numpy(features))
    sampler = Sampler(graph, FANOUTS)
    targets = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    edges = torch.from_numpy(np.stack([indices.astype(np.int64), targets]))
    data = Data(x=table.rows, edge_index=edges)
    # loaders of one graph share it while one of them exists
    kept = NeighborLoader(data, FANOUTS[::-1], is_sorted=True)

    def sample(seeds):
        for ids in torch.from_numpy(seeds).split(BATCH_SIZE):
            batch = sampler.sample(ids, epoch=0)
            yield len(batch.nodes), sum(block.num_edges for block in batch.blocks)

    def load(seeds):
        options = {"shuffle": False, "threads": THREADS, "sampler": sampler}
        ids = torch.from_numpy(seeds)
        for batch in Loader(graph, table, ids, FANOUTS, BATCH_SIZE, **options):
            yield len(batch.nodes), sum(block.num_edges for block in batch.blocks)

    def load_pyg(seeds):
        options = {"batch_size": BATCH_SIZE, "threads": THREADS, "is_sorted": True}
        ids = torch.from_numpy(seeds)
        for batch in NeighborLoader(kept.data, FANOUTS[::-1], ids, **options):
            yield batch.num_nodes, batch.num_edges

    found = {"Sampler": sample, "Loader": load, "pyg.NeighborLoader": load_pyg}
    return found, {"gcnzc": gcnzc.__file__}


serve(make)
