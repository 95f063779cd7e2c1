"""The loader of the whole graph yields one batch per epoch, without copies where it can."""

import copy

import numpy as np
import pytest
import torch
from by_hand import random_graph
from torch.nn.functional import cross_entropy

from gcnzc import FeatureTable, FullBatchLoader, Graph
from gcnzc.kernels.aggregate import gat
from gcnzc.kernels.structure import transpose
from gcnzc.models import gnn

SEEDS = torch.tensor([3, 17, 40, 41, 58])


@pytest.fixture(scope="module")
def graph() -> Graph:
    torch.manual_seed(0)
    return random_graph()


@pytest.fixture(scope="module")
def table() -> FeatureTable:
    return FeatureTable(torch.rand(60, 8))


LABELS = torch.arange(60) % 3


def test_each_epoch_has_the_same_batch_of_all_seeds(graph, table):
    loader = FullBatchLoader(graph, table, SEEDS, 2, LABELS)
    assert len(loader) == 1
    batches = []
    for epoch in range(3):
        assert loader.epoch == epoch
        batches += loader
    assert len(batches) == 3
    # a copy builds its own
    (copied,) = copy.copy(loader)
    assert copied.x is not batches[0].x
    assert torch.equal(copied.x, batches[0].x)
    for batch in batches:
        assert torch.equal(batch.seeds, SEEDS)
        assert torch.equal(batch.items, SEEDS)
        assert torch.equal(batch.x, table.rows[batch.nodes])
        assert torch.equal(batch.y, LABELS[SEEDS])
        assert batch.x is batches[0].x
        assert batch.blocks is batches[0].blocks is loader.batch.blocks
    # the time to build it counts once
    assert batches[0].times.keys() == {"sample_s", "gather_s"}
    assert not batches[1].times
    assert not batches[1].spans


def test_all_nodes_use_the_rows_of_the_table_in_place(graph, table):
    batch = FullBatchLoader(graph, table, None, 2, LABELS).batch
    assert torch.equal(batch.nodes, torch.arange(60))
    assert batch.x is table.rows
    assert batch.blocks[0].indices.data_ptr() == graph.indices.data_ptr()
    assert torch.equal(batch.y, LABELS)
    # unless they must be converted
    double = FullBatchLoader(graph, table, None, 2, dtype=torch.float64).batch
    assert torch.equal(double.x, table.rows.double())
    assert double.y is None


@pytest.mark.parametrize("name", ["SAGE", "GCN", "GIN", "GAT", "GATv2"])
def test_nothing_is_built_again_in_later_steps(name, graph, table, monkeypatch):
    loader = FullBatchLoader(graph, table, SEEDS, 2, LABELS)
    calls = []
    for module, function in ((transpose, "_transpose"), (gat, "_add_self_loops")):
        built = getattr(module, function)
        monkeypatch.setattr(
            module, function, lambda *args, built=built: [calls.append(1), built(*args)]
        )
    model = getattr(gnn, name)(8, 4, 3, 2)
    counts = []
    for _ in range(3):
        for batch in loader:
            cross_entropy(model(batch.blocks, batch.x), batch.y).backward()
        counts.append(len(calls))
    assert counts[0] > 0
    assert counts == [counts[0]] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seeds": [1, 1]}, "seed 1 occurs twice"),
        ({"labels": np.zeros(59)}, r"labels of shape \(59,\) for 60 nodes"),
        ({"table": FeatureTable(torch.ones(59, 2))}, "the table has 59 rows"),
        ({"dtype": torch.int32}, "dtype is torch.int32\n\nhint: torch.float32"),
        ({"device": "meta"}, "device meta: batches go to cpu or cuda"),
    ],
)
def test_arguments_that_do_not_fit_are_rejected(arguments, message, graph, table):
    valid = {"graph": graph, "table": table, "seeds": SEEDS, "num_layers": 2}
    with pytest.raises(ValueError, match=message):
        FullBatchLoader(**(valid | arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("seeds", [None, SEEDS])
def test_a_batch_on_a_gpu_equals_that_on_the_cpu(where, seeds, graph, table):
    rows = table if where == "host" else table.to("cuda")
    batch = FullBatchLoader(graph, rows, seeds, 2, LABELS, device="cuda").batch
    expected = FullBatchLoader(graph, table, seeds, 2, LABELS).batch
    for name in ("x", "y", "nodes"):
        assert getattr(batch, name).device.type == "cuda"
        assert torch.equal(getattr(batch, name).cpu(), getattr(expected, name))
    for one, other in zip(batch.blocks, expected.blocks, strict=True):
        assert torch.equal(one.indptr.cpu(), other.indptr)
        assert torch.equal(one.indices.cpu(), other.indices)
