"""DGL's graph of a folder, its loader and its versions."""

import torch
from serve import BATCH_SIZE, arrays

from gcnzc.interop.dgl import import_dgl

dgl = import_dgl()
nn = dgl.nn
VERSIONS = {"dgl": dgl.__version__, "torch": torch.__version__}


def build_graph(folder):
    """Return the graph of a folder with its features in `ndata`."""
    indptr, indices, features = arrays(folder)
    # int64, since DGL corrupts the blocks of int32 graphs
    sources = torch.from_numpy(indices).long()
    graph = dgl.graph(("csc", (torch.from_numpy(indptr), sources, [])))
    assert graph.idtype == torch.int64
    graph.ndata["features"] = torch.from_numpy(features)
    return graph


def build_loader(graph, seeds, sampler, workers):
    """Return DGL's loader."""
    ids = torch.from_numpy(seeds)
    return dgl.dataloading.DataLoader(
        graph, ids, sampler, batch_size=BATCH_SIZE, num_workers=workers
    )
