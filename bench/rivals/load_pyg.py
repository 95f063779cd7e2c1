"""Measure PyG: its loader with 0 to 2 workers."""

from pyg_system import VERSIONS, build_data, build_loader
from serve import serve


def make(folder):
    """Return the measured configurations by name, and versions."""
    data = build_data(folder)

    def load(workers):
        def batches(seeds):
            for batch in build_loader(data, seeds, workers):
                assert batch.x.shape == (batch.num_nodes, data.num_features)
                yield batch.num_nodes, batch.num_edges

        return batches

    return {f"loader, {workers} workers": load(workers) for workers in (0, 1, 2)}, VERSIONS


serve(make)
