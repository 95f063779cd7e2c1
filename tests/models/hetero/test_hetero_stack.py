"""Properties of all models on heterogeneous blocks, and their errors."""

import pytest
import torch
from hetero_graphs import pyg_sampler
from typed_dense import (
    ABOUT,
    AUTHOR,
    CITES,
    COLUMNS,
    FIELD,
    NEVER,
    PAPER,
    SIZES,
    WRITES,
    academic,
    features,
    randomize,
)

from gcnzc.models.hetero import HGT, RGAT, RGCN, HeteroSAGE
from gcnzc.sampling import build_full_hetero_blocks, build_hetero_blocks

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}


def hgt(*sizes, residual=False, output_linear=True, **options):
    """HGT always has a gated residual and a projection of the outputs."""
    return HGT(*sizes, **options)


MODELS = {
    "rgcn": RGCN,
    "bases": lambda *sizes, **options: RGCN(*sizes, num_bases=2, **options),
    "sage": HeteroSAGE,
    "rgat": RGAT,
    "hgt": hgt,
}
each_model = pytest.mark.parametrize("name", MODELS)


def make(name, graph, target=PAPER, **options):
    options = {"dropout": 0.0, "num_layers": 2} | options
    return randomize(MODELS[name](graph.metadata(), COLUMNS, 8, 4, target, **options))


def rows_of(batch, x):
    return {name: x[name][ids] for name, ids in batch.nodes.items()}


@each_model
@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("options", [{}, {"disjoint": True}])
def test_minibatches_with_all_neighbours_equal_full_batch(name, once, options):
    graph, x = academic(), features()
    model = make(name, graph, norm="layer", residual=True, output_linear=True, num_layers=3)
    full = model(build_full_hetero_blocks(graph, 3), x)
    ids = torch.tensor([22, 3, 4, 0])
    sampler = pyg_sampler(graph, [-1] * 3, once=once, **options)
    batch = sampler.sample((PAPER, ids), epoch=0)
    out = model(build_hetero_blocks(batch), rows_of(batch, x))
    torch.testing.assert_close(out, full[ids], **TOLERANCE)


@each_model
def test_gradients_of_minibatches_equal_full_batch(name):
    graph, ids = academic(), torch.tensor([22, 3, 4, 0])
    model = make(name, graph)
    found = []
    x = {each: rows.requires_grad_() for each, rows in features().items()}
    batch = pyg_sampler(graph, [-1, -1]).sample((PAPER, ids), epoch=0)
    for out in (
        model(build_full_hetero_blocks(graph, 2, targets=[PAPER]), x)[ids],
        model(build_hetero_blocks(batch), rows_of(batch, x)),
    ):
        for tensor in (*x.values(), *model.parameters()):
            tensor.grad = None
        out.sin().sum().backward()
        found.append([each.grad for each in (*x.values(), *model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)


@each_model
def test_outputs_of_several_types_are_those_of_each(name):
    graph, x = academic(), features()
    model = make(name, graph, target=(PAPER, AUTHOR), output_linear=True)
    whole = model(build_full_hetero_blocks(graph, 2), x)
    assert {name: out.shape for name, out in whole.items()} == {
        name: (SIZES[name], 4) for name in (PAPER, AUTHOR)
    }
    seeds = {AUTHOR: torch.tensor([4, 1]), PAPER: torch.tensor([7])}
    batch = pyg_sampler(graph, [-1, -1]).sample(seeds, epoch=0)
    found = model(build_hetero_blocks(batch), rows_of(batch, x))
    for kind, ids in seeds.items():
        torch.testing.assert_close(found[kind], whole[kind][ids], **TOLERANCE)


@each_model
def test_edge_types_without_edges_and_types_without_sources(name):
    graph, x = academic(NEVER, ABOUT), features()
    model = make(name, graph)
    batch = pyg_sampler(graph, [-1, -1]).sample((PAPER, torch.tensor([22, 1])), epoch=0)
    rows = rows_of(batch, x)
    assert not len(rows[AUTHOR])
    out = model(build_hetero_blocks(batch), rows)
    assert out.isfinite().all()
    del rows[AUTHOR]
    assert torch.equal(model(build_hetero_blocks(batch), rows), out)
    out.sum().backward()
    assert all(each.grad is not None for each in model.parameters())


@each_model
def test_dropout_is_reproducible_and_only_in_training(name):
    graph, x = academic(), features()
    model = make(name, graph, dropout=0.5, input_dropout=0.3)
    blocks = build_full_hetero_blocks(graph, 2)
    outs = []
    for _ in range(2):
        torch.manual_seed(5)
        outs.append(model.train()(blocks, x))
    assert torch.equal(*outs)
    assert not torch.equal(model(blocks, x), outs[0])
    model.eval()
    assert torch.equal(model(blocks, x), model(blocks, x))


@each_model
def test_parameters_are_reset_by_torchs_random_numbers(name):
    states = []
    for model in (make(name, academic(), norm="batch"), make(name, academic(), norm="batch")):
        for parameter in model.parameters():
            parameter.data.uniform_()
        torch.manual_seed(5)
        model.reset_parameters()
        states.append(model.state_dict())
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key


def test_types_that_no_output_needs_have_no_features():
    graph, x = academic(), features()
    model, blocks = make("rgcn", graph, FIELD, num_layers=1), build_full_hetero_blocks(graph, 1)
    out = model(blocks, x)
    del x[AUTHOR]
    assert torch.equal(model(blocks, x), out)


def test_types_without_projection_are_read_as_they_are():
    graph, x = academic(), features()
    columns = COLUMNS | {AUTHOR: 8}
    plain = randomize(RGCN(graph.metadata(), columns, 8, 4, PAPER, dropout=0.0))
    model = RGCN(graph.metadata(), columns, 8, 4, PAPER, dropout=0.0, input_linear=[PAPER, FIELD])
    author = graph.node_types.index(AUTHOR)
    linear = plain.input_linears[author]
    found = model.double().load_state_dict(plain.state_dict(), strict=False)
    assert found.missing_keys == []
    assert {key.rpartition(".")[0] for key in found.unexpected_keys} == {f"input_linears.{author}"}
    rows = torch.randn(SIZES[AUTHOR], 8).double()
    blocks = build_full_hetero_blocks(graph, 2)
    expected = plain(blocks, x | {AUTHOR: rows})
    out = model(blocks, x | {AUTHOR: linear(rows)})
    torch.testing.assert_close(out, expected, **TOLERANCE)


BAD_MODELS = {
    "unknown target": ({"target": "venue"}, "target has the node type 'venue'"),
    "no targets": ({"target": ()}, "target has no node types"),
    "missing columns": ({"in_features": {PAPER: 7, FIELD: 4}}, "no columns of node type 'author'"),
    "unknown columns": ({"in_features": COLUMNS | {"venue": 3}}, "node type 'venue'"),
    "zero columns": ({"in_features": COLUMNS | {PAPER: 0}}, r"in_features\['paper'\] is 0"),
    "norm": ({"norm": "group"}, "norm"),
    "dropout": ({"dropout": 1.0}, "dropout"),
    "hidden": ({"hidden": 0}, "hidden is 0"),
    "layers": ({"num_layers": 0}, "num_layers is 0"),
    "activation": ({"activation": "tanh"}, "activation"),
    "bases": ({"num_bases": 0}, "num_bases is 0"),
    "not projected": ({"input_linear": [PAPER, FIELD]}, r"in_features\['author'\] is 3"),
    "unknown projection": ({"input_linear": ["venue"]}, "input_linear has the node type 'venue'"),
    "edge type": ({"metadata": (["a"], [("a", "to", "b")])}, "edge type"),
    "twice": ({"metadata": (["a", "a"], [])}, "twice"),
    "no metadata": ({"metadata": 5}, r"metadata is 5\n\nhint: graph.metadata\(\)"),
    "a projection": ({"input_linear": PAPER}, "input_linear is 'paper', not a list"),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_bad_options_are_errors(case):
    options, message = BAD_MODELS[case]
    good = {"metadata": academic().metadata(), "in_features": COLUMNS, "target": PAPER}
    good |= {"hidden": 8, "num_classes": 4}
    with pytest.raises((TypeError, ValueError), match=message):
        RGCN(**(good | options))


def test_bad_inputs_are_errors():
    graph, x = academic(), features()
    model, blocks = make("rgcn", graph), build_full_hetero_blocks(graph, 2)
    batch = pyg_sampler(graph, [2, 2]).sample((PAPER, [1, 2]), epoch=0)
    for given, features_given, message in (
        (blocks, {name: x[name] for name in (PAPER, FIELD)}, "no features of node type 'author'"),
        (blocks, x | {AUTHOR: x[AUTHOR][:, :2]}, r"x\['author'\] has shape \(17, 2\)"),
        (blocks, x | {AUTHOR: x[AUTHOR][1:]}, r"x\['author'\] has shape \(16, 3\)"),
        (blocks, x[PAPER], "x is a tensor"),
        (blocks[:1], x, "1 blocks for a model of 2 layers"),
        (build_full_hetero_blocks(academic(WRITES, CITES), 2), x, "other metadata"),
        (build_hetero_blocks(batch)[::-1], x, "destinations"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            model(given, features_given)
