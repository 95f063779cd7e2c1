"""Measure DGL's loader of heterographs with 0 to 2 workers, and with its fused sampler or not."""

import torch
from dgl_system import VERSIONS, dgl
from heterograph_system import build_heterograph, build_sampler, sizes_of
from serve import BATCH_SIZE, serve


def make(folder):
    """Return the measured configurations by name, and versions."""
    graph, seed_type = build_heterograph(folder)

    def load(workers, fused):
        sampler = build_sampler(graph, fused=fused)

        def batches(seeds):
            loader = dgl.dataloading.DataLoader(
                graph,
                {seed_type: torch.from_numpy(seeds)},
                sampler,
                batch_size=BATCH_SIZE,
                num_workers=workers,
            )
            for minibatch in loader:
                yield sizes_of(graph, minibatch)

        return batches

    configurations = {f"loader, {workers} workers": load(workers, True) for workers in (0, 1, 2)}
    return configurations | {"loader, 0 workers, not fused": load(0, False)}, VERSIONS


serve(make)
