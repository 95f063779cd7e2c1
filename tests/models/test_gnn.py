"""Sizes, dropout, modes, degrees and self loops of models on one node type, and their errors."""

import pytest
import torch
from by_hand import MODELS, made, parameters, random_graph

from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.models import gnn
from gcnzc.sampling.neighbor import Sampler
from gcnzc.train.inference import inference


@pytest.mark.parametrize(
    ("model", "count"),
    [
        # OGB's table: ogbn-products with SAGE, GCN, GAT; ogbn-arxiv with SAGE
        (lambda: gnn.SAGE(100, 256, 47), 206_895),
        (lambda: gnn.GCN(100, 256, 47), 103_727),
        (lambda: gnn.GAT(100, 128, 47), 751_574),
        (lambda: gnn.SAGE(128, 256, 40, norm="batch"), 218_664),
        # the paper's model for Cora
        (
            lambda: gnn.GAT(1433, 8, 7, 2, heads=8, output_heads=1, skip=False),
            1433 * 64 + 3 * 64 + 64 * 7 + 3 * 7,
        ),
    ],
)
def test_has_as_many_parameters_as_in_ogb_and_papers(model, count):
    assert parameters(model()) == count


def test_dropout_is_for_training_only():
    graph = random_graph()
    options = {"dropout": 0.5, "input_dropout": 0.5, "attention_dropout": 0.5}
    model = made("gat", 8, 8, 3, **options)
    batch = Sampler(graph, [-1] * 3).sample(torch.arange(60), epoch=0)
    x = torch.randn(60, 8).double()[batch.nodes]
    model.eval()
    assert torch.equal(model(batch.blocks, x), model(batch.blocks, x))
    for name in options:
        other = made("gat", 8, 8, 3, **{key: 0.5 * (key == name) for key in options})
        assert not torch.equal(other(batch.blocks, x), other(batch.blocks, x)), name


@pytest.mark.parametrize("name", MODELS)
def test_inference_mode_changes_neither_outputs_nor_later_training(name):
    graph = random_graph()
    model = made(name, 5, 4, 3)
    sampler, seeds = Sampler(graph, [3, 3, 3]), torch.arange(5)
    batch = sampler.sample(seeds, epoch=0)
    x = torch.randn(graph.num_nodes, 5).double()
    model.eval()
    expected = model(batch.blocks, x[batch.nodes])
    with torch.inference_mode():
        assert torch.equal(model(batch.blocks, x[batch.nodes]), expected)
        inside = sampler.sample(seeds, epoch=0)
        assert torch.equal(model(inside.blocks, x[inside.nodes]), expected)
    model(batch.blocks, x[batch.nodes]).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_gcn_scales_sampled_sums_to_all_neighbours():
    """Of equal neighbours any sample gives what all give."""
    graph = Graph.from_edges(torch.arange(1, 21), torch.zeros(20, dtype=torch.int64), 21)
    model = made("gcn", 5, 8, 3, num_layers=1)
    x = torch.randn(1, 5).double().expand(21, 5).contiguous()
    x[0] = 7
    whole = inference(model, graph, FeatureTable(x), nodes=torch.tensor([0]))
    batch = Sampler(graph, [4]).sample(torch.tensor([0]), epoch=0)
    assert batch.blocks[0].num_edges == 4
    torch.testing.assert_close(model(batch.blocks, x[batch.nodes]), whole)


def test_self_loops_of_sage_are_those_of_the_graph():
    """The layer includes each node in the mean, as PyG's does on a graph with self loops."""
    plain = random_graph()
    looped = Graph.from_edges(*plain.coo(), plain.num_nodes, self_loops="add")
    model = made("sage", 6, 4, 3, self_loops=True)
    other = made("sage", 6, 4, 3)
    other.load_state_dict(model.state_dict())
    x = torch.randn(plain.num_nodes, 6).double()
    expected = inference(other, looped, FeatureTable(x))
    torch.testing.assert_close(inference(model, plain, FeatureTable(x)), expected)
    batch = Sampler(plain, [-1] * len(model.layers)).sample(torch.arange(20), epoch=0)
    rows = x[batch.nodes].requires_grad_()
    out = model.eval()(batch.blocks, rows)
    torch.testing.assert_close(out, expected[:20])
    out.square().sum().backward()
    assert rows.grad.isfinite().all()
    with pytest.raises(TypeError, match="self_loops"):
        made("gcn", 6, 4, 3, self_loops=True)


def test_errors_state_what_does_not_match():
    graph, model = random_graph(), gnn.SAGE(5, 4, 3, 2)
    table = FeatureTable(torch.randn(60, 5))
    batch = Sampler(graph, [3, 3, 3]).sample(torch.arange(5), epoch=0)
    x = table.gather(batch.nodes)
    with pytest.raises(ValueError, match="3 blocks for a model of 2 layers"):
        model(batch.blocks, x)
    with pytest.raises(ValueError, match="6 columns, but the model expects 5\n\nhint:"):
        model(batch.blocks[:2], torch.randn(len(x), 6))
    with pytest.raises(ValueError, match=r"4 rows of features for a first block of \d+ sources"):
        model(batch.blocks[:2], x[:4])
    wrong = {"num_layers": 0, "input_dropout": 1.0, "attention_dropout": -0.1, "heads": 0}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=rf"{name} is {value}.*\n\nhint:"):
            gnn.GAT(5, 4, 3, **{name: value})
