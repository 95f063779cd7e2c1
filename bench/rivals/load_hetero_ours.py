"""Measure gcnzc's loader of a heterogeneous graph with one to three threads."""

from hetero_system import FANOUTS, SEED_TYPE, build_data, configurations
from serve import serve

import gcnzc
from gcnzc.interop.pyg import NeighborLoader

# loaders of one graph share it while one of them exists
loaders = []


def prepare(data, time_attr):
    """Keep a loader, so that the others share its sorted graph."""
    loaders.append(NeighborLoader(data, FANOUTS, SEED_TYPE, time_attr=time_attr))
    return {}


def make(folder):
    """Return the measured configurations by name, and versions."""
    options = {f"{threads} threads": {"threads": threads} for threads in (1, 2, 3)}
    kinds = ["uniform", "temporal"]
    found = configurations(NeighborLoader, prepare, build_data(folder), kinds, **options)
    return found, {"gcnzc": gcnzc.__version__}


serve(make)
