"""The heterogeneous graph of a folder as a PyG `HeteroData`, for loaders with PyG's signature."""

from pathlib import Path

import numpy as np
import torch
from serve import BATCH_SIZE
from torch_geometric.data import HeteroData

FANOUTS = [15, 10]  # from the seeds outward
SEED_TYPE = "paper"


def build_data(folder):
    """Return the graph of bench/loading/hetero.py."""
    data = HeteroData()
    for path in sorted(Path(folder).glob("*.npy")):
        names = path.stem.split(".")
        if len(names) == 2:
            data[names[0]][names[1]] = torch.from_numpy(np.load(path))
        elif len(names) == 3:
            data[tuple(names)].edge_index = torch.from_numpy(np.load(path))
    return data


def configurations(NeighborLoader, prepare, data, kinds, **options):
    """Return functions of seeds that yield the sizes of minibatches, by name.

    Args:
        NeighborLoader: the class of the loader.
        prepare: function of the data and the name of its times, which returns arguments that the
            loaders have in common, so that the edges are sorted once.
        data: from `build_data`.
        kinds: some of "uniform" and "temporal".
        options: by the suffix of the name, the arguments of the loader.
    """
    found = {}
    for kind in kinds:
        # without times, the rows of times are not gathered
        own, time_attr = (data, "time") if kind == "temporal" else (without_times(data), None)
        common = {"time_attr": time_attr, **prepare(own, time_attr)}
        for suffix, arguments in options.items():
            found[f"{kind}, {suffix}"] = batches_of(NeighborLoader, own, common | arguments)
    return found


def batches_of(NeighborLoader, data, arguments):
    """Return a function of seeds that yields the sizes of minibatches."""

    def batches(seeds):
        nodes = (SEED_TYPE, torch.from_numpy(seeds))
        loader = NeighborLoader(data, FANOUTS, nodes, batch_size=BATCH_SIZE, **arguments)
        for batch in loader:
            assert batch[SEED_TYPE].x.shape == (
                batch[SEED_TYPE].num_nodes,
                data[SEED_TYPE].x.shape[1],
            )
            yield batch.num_nodes, batch.num_edges

    return batches


def without_times(data):
    """Return the graph without the attribute `time`, whose rows need not be gathered then."""
    found = HeteroData()
    for store in (*data.node_stores, *data.edge_stores):
        for name, value in store.items():
            if name != "time":
                found[store._key][name] = value
    return found
