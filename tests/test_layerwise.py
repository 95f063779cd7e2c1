"""Outputs for all nodes, layer by layer, against dense formulas and against blocks."""

import pytest
import torch
from by_hand import BY_HAND, MODELS, dense, made, random_graph
from torch.nn import functional

from gcnzc import layerwise
from gcnzc.graph import Graph
from gcnzc.layerwise import inference
from gcnzc.sampler import Sampler
from gcnzc.table import FeatureTable


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [(7, 5, 3), (3, 8, 4)])
def test_inference_equals_the_formula(name, sizes):
    graph = random_graph()
    model = made(name, *sizes).eval()
    x = torch.randn(graph.num_nodes, sizes[0]).double()
    expected = BY_HAND[name](model, dense(graph), x)
    found = inference(model, graph, FeatureTable(x), batch_nodes=16)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", MODELS)
def test_inference_equals_blocks_with_all_neighbours(name):
    graph = random_graph(400, 3000)
    model = made(name, 20, 16, 5).float().eval()
    x = torch.randn(400, 20)
    batch = Sampler(graph, [-1, -1, -1]).sample(torch.arange(400), epoch=0)
    expected = model(batch.blocks, x[batch.nodes])
    found = inference(model, graph, FeatureTable(x), batch_nodes=64)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("in_features", [3, 30])
def test_inference_for_some_nodes(name, in_features):
    """Nodes in any order, twice too; and hidden rows only of what they depend on."""
    # a chain, of which the last nodes need little
    graph = Graph.from_edges(torch.arange(99), torch.arange(1, 100), 100)
    model = made(name, in_features, 8, 4)
    x = torch.randn(100, in_features).double()
    nodes = torch.tensor([40, 7, 40, 99, 0], dtype=torch.int32)
    whole = inference(model, graph, FeatureTable(x))
    seen = []
    found = inference(
        model, graph, FeatureTable(x), nodes=nodes, progress=lambda *step: seen.append(step)
    )
    torch.testing.assert_close(found, whole[nodes.long()])
    hidden = [{40, 7, 99, 0, 39, 6, 98}, {40, 7, 99, 0, 39, 6, 98, 38, 5, 97}]
    assert seen[-1] == (5 + len(hidden[0]) + len(hidden[1]),) * 2


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["half", "sparse", "rows apart", "codes"])
@pytest.mark.parametrize("in_features", [3, 30])
@pytest.mark.parametrize("some", [False, True])
def test_inference_reads_any_table(name, kind, in_features, some):
    graph = random_graph()
    model = made(name, in_features, 8, 4).float()
    x = torch.randint(-2, 3, (60, in_features)).float()
    rows = {
        "half": x.half(),
        "rows apart": torch.cat([x, torch.full((60, 3), torch.nan)], 1)[:, :in_features],
    }.get(kind)
    if kind == "sparse":
        at = x.nonzero(as_tuple=True)
        offsets = torch.bincount(at[0], minlength=60).cumsum(0)
        rows = torch.sparse_csr_tensor(
            functional.pad(offsets, (1, 0)), at[1], x[at], x.shape, check_invariants=True
        )
    table = FeatureTable.quantized(x) if kind == "codes" else FeatureTable(rows)
    # of whole numbers from -2 to 2 other kinds keep all
    x = table.gather(torch.arange(60)).float()
    nodes = torch.tensor([3, 50, 59]) if some else None
    expected = inference(model, graph, FeatureTable(x), nodes=nodes)
    found = inference(model, graph, table, nodes=nodes, batch_nodes=7)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("in_features", [3, 30])
@pytest.mark.parametrize("some", [False, True])
def test_inference_gathers_for_a_device_as_it_reads_in_place(name, in_features, some, monkeypatch):
    """What runs for a GPU, on the CPU."""
    graph = random_graph()
    model = made(name, in_features, 8, 4)
    table = FeatureTable(torch.randn(60, in_features).double())
    nodes = torch.tensor([3, 50, 59]) if some else None
    expected = inference(model, graph, table, nodes=nodes)
    set_up = layerwise._LayerOfAll.__init__

    def never_direct(self, *arguments):
        set_up(self, *arguments)
        self.is_direct = False

    monkeypatch.setattr(layerwise._LayerOfAll, "__init__", never_direct)
    found = inference(model, graph, table, nodes=nodes, batch_nodes=7)
    torch.testing.assert_close(found, expected)


def test_inference_cuts_ranges_by_edges_too(monkeypatch):
    graph = random_graph()
    model = made("gat", 5, 4, 3)
    table = FeatureTable(torch.randn(60, 5).double())
    expected = inference(model, graph, table)
    monkeypatch.setattr(layerwise, "BATCH_EDGES", 20)
    steps = []
    found = inference(model, graph, table, progress=lambda *step: steps.append(step))
    torch.testing.assert_close(found, expected)
    assert len(steps) >= 3 * graph.num_edges / (20 + int(graph.in_degrees().max()))
    assert steps[-1] == (180, 180)


def test_inference_leaves_the_mode_as_it_was():
    graph, model = random_graph(), made("sage", 5, 4, 3, dropout=0.9)
    table = FeatureTable(torch.randn(60, 5).double())
    model.train()
    first = inference(model, graph, table)
    assert model.training
    assert torch.equal(inference(model.eval(), graph, table), first)
    assert not model.training


def test_says_what_does_not_fit():
    graph, model = random_graph(), made("sage", 5, 4, 3)
    table = FeatureTable(torch.randn(60, 5).double())
    with pytest.raises(ValueError, match="features of 6 columns for a model of 5\n\nhint:"):
        inference(model, graph, FeatureTable(torch.randn(60, 6)))
    with pytest.raises(ValueError, match="59 rows of features for a graph of 60 nodes\n\nhint:"):
        inference(model, graph, FeatureTable(torch.randn(59, 5)))
    with pytest.raises(ValueError, match="60, but the graph has 60 nodes"):
        inference(model, graph, table, nodes=torch.tensor([60]))
