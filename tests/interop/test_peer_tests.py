"""PyG's and DGL's own tests pass with our loaders, and the plugin that swaps the loaders works.

The libraries' tests are not in this repository. GCNZC_PYG_CHECKOUT and GCNZC_DGL_CHECKOUT name
checkouts of their repositories, of the tags that bench/robustness/peer_tests.py names.
"""

import importlib.util
import os
from pathlib import Path

import pytest

from bench.robustness import peer_tests

PYG, DGL = (importlib.util.find_spec(name) is not None for name in ("torch_geometric", "dgl"))
# what the loaders refuse
REFUSED: dict[str, tuple[str, ...]] = {
    "pyg": (),
    "dgl": ("graphs with several types", "ClusterGCNSampler", "SAINTSampler", "ShaDowKHopSampler"),
}

OF_PYG = """
import os
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader
from torch_geometric.testing import onlyNeighborSampler, withPackage
from torch_geometric.typing import WITH_PYG_LIB

DATA = Data(x=torch.rand(4, 2), edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]))

@onlyNeighborSampler
def test_passes():
    assert NeighborLoader.__module__.startswith("gcnzc.")
    assert len(list(NeighborLoader(DATA, [2], batch_size=2))) == 2

@withPackage("pyg_lib")
def test_of_links_passes():
    assert WITH_PYG_LIB
    assert len(list(LinkNeighborLoader(DATA, [2], batch_size=3))) == 1

@withPackage("pyg_lib", "torch_sparse")
def test_is_skipped():
    NeighborLoader(DATA, [2])

def test_is_rejected():
    with pytest.raises(ValueError, match="hops"):
        NeighborLoader((None, None), [2])

def test_fails():
    NeighborLoader(DATA, [2])
    raise ValueError("this test does not support NeighborLoader\\n\\nhint: none")

def test_constructs_none():
    pass
"""

OF_DGL = """
import dgl
import torch
import torch.multiprocessing as mp

def load(rank, graph):
    sampler = dgl.dataloading.NeighborSampler([2])
    loader = dgl.dataloading.DataLoader(graph, torch.arange(4), sampler)
    assert type(loader).__module__.startswith("gcnzc.")

def test_passes_in_another_process():
    mp.spawn(load, args=(dgl.graph(([0, 1, 2], [1, 2, 3])),), nprocs=1)
"""


@pytest.mark.processes
@pytest.mark.skipif(not PYG, reason="PyG is not installed")
def test_the_plugin_distinguishes_outcomes(tmp_path):
    found = run(tmp_path, "pyg", OF_PYG)
    assert {name: outcome["outcome"] for name, outcome in found.items()} == {
        "test_passes": "passed",
        "test_of_links_passes": "passed",
        "test_is_skipped": "skipped",
        "test_is_rejected": "rejected",
        "test_fails": "failed",
    }
    assert found["test_is_rejected"]["reason"] == "a tuple that is not a pair of stores"
    assert found["test_fails"]["reason"].startswith("ValueError: this test does not support")


@pytest.mark.processes
@pytest.mark.skipif(not DGL, reason="DGL is not installed")
def test_the_plugin_swaps_loaders_in_spawned_processes(tmp_path):
    (outcome,) = run(tmp_path, "dgl", OF_DGL).values()
    assert (outcome["outcome"], outcome["loaders"]) == ("passed", 1), outcome["reason"]


def run(folder, peer, text):
    file = folder / f"test_of_{peer}.py"
    file.write_text(text)
    outcomes = peer_tests.run_tests(peer, "gcnzc", folder, [file.name])
    return {outcome["test"].split("::")[1]: outcome for outcome in outcomes}


@pytest.mark.parametrize("peer", ["pyg", "dgl"])
@pytest.mark.slow
def test_no_test_of_the_libraries_fails(peer):
    variable = f"GCNZC_{peer.upper()}_CHECKOUT"
    if variable not in os.environ:
        pytest.skip(f"{variable} names no checkout")
    outcomes = peer_tests.run_tests(peer, "gcnzc", Path(os.environ[variable]))
    assert sum(outcome["outcome"] == "passed" for outcome in outcomes) > 10
    for outcome in outcomes:
        assert outcome["outcome"] != "failed", outcome
        if outcome["outcome"] == "rejected":
            assert any(word in outcome["reason"] for word in REFUSED[peer]), outcome
