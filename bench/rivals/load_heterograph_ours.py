"""Measure gcnzc's drop-in loader of heterographs with one to three threads."""

import torch
from dgl_system import VERSIONS
from heterograph_system import build_heterograph, build_sampler, sizes_of
from serve import BATCH_SIZE, serve

import gcnzc
from gcnzc.interop.dgl import DataLoader


def make(folder):
    """Return the measured configurations by name, and versions."""
    graph, seed_type = build_heterograph(folder)
    sampler = build_sampler(graph)

    def load(threads):
        def batches(seeds):
            ids = {seed_type: torch.from_numpy(seeds)}
            loader = DataLoader(graph, ids, sampler, batch_size=BATCH_SIZE, threads=threads)
            for minibatch in loader:
                yield sizes_of(graph, minibatch)

        return batches

    # kept, since a loader's copy of the edges is shared with the next loader only while it is used
    make.loader = DataLoader(graph, {seed_type: torch.arange(1)}, sampler)
    configurations = {f"loader, {threads} threads": load(threads) for threads in (1, 2, 3)}
    return configurations, VERSIONS | {"gcnzc": gcnzc.__version__}


serve(make)
