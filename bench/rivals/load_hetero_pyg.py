"""Measure PyG's loader of a heterogeneous graph with 0 to 2 workers."""

import torch_geometric.typing
from hetero_system import FANOUTS, build_data, configurations
from minibatches import versions
from serve import serve
from torch_geometric.loader import NeighborLoader
from torch_geometric.sampler import NeighborSampler


def prepare(data, time_attr):
    """Return the sampler; the edges of the folder are sorted."""
    sampler = NeighborSampler(data, FANOUTS, time_attr=time_attr, is_sorted=True)
    return {"neighbor_sampler": sampler}


def make(folder):
    """Return the measured configurations by name, and versions."""
    kinds = ["uniform", "temporal"] if torch_geometric.typing.WITH_PYG_LIB else ["uniform"]
    options = {f"{workers} workers": {"num_workers": workers} for workers in (0, 1, 2)}
    return configurations(NeighborLoader, prepare, build_data(folder), kinds, **options), versions()


serve(make)
