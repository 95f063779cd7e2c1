"""Models equal dense computations of their formulas."""

import pytest
import torch
from by_hand import MODELS, made, parameters, random_graph

from gcnzc.features.table import FeatureTable
from gcnzc.models import gnn
from gcnzc.sampling.neighbor import Sampler


@pytest.mark.parametrize(
    ("model", "count"),
    [
        # OGB's table: ogbn-products with SAGE, GCN, GAT; ogbn-arxiv with SAGE
        (lambda: gnn.SAGE(100, 256, 47), 206_895),
        (lambda: gnn.GCN(100, 256, 47), 103_727),
        (lambda: gnn.GAT(100, 128, 47), 751_574),
        (lambda: gnn.SAGE(128, 256, 40, norm="batch"), 218_664),
    ],
)
def test_has_as_many_parameters_as_in_ogb(model, count):
    assert parameters(model()) == count


def test_cora_recipe_of_gat_has_the_parameters_of_the_paper():
    model = gnn.GAT(1433, 8, 7, 2, heads=8, output_heads=1, skip=False)
    assert parameters(model) == 1433 * 64 + 3 * 64 + 64 * 7 + 3 * 7


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
