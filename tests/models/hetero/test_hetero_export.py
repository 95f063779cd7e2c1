"""Exported heterogeneous models, as programs of torch that take any minibatch."""

import io
import itertools

import numpy as np
import pytest
import torch
from hetero_graphs import pyg_sampler
from slow_cases import mark_slow

from gcnzc.graph import Graph
from gcnzc.models import HGT, RGAT, RGCN, HeteroSAGE
from gcnzc.models.export import export_arguments, export_model
from gcnzc.sampling import build_full_hetero_blocks, build_hetero_blocks

SIZES = {"a": 20, "b": 13, "c": 7, "d": 5}
COLUMNS = {"a": 3, "b": 5, "c": 2, "d": 4}


@pytest.fixture(scope="module")
def graph():
    """No edge type goes into c, one goes into d, and one edge type has no edges."""
    random = np.random.default_rng(0)
    ends = {("a", "x", "b"): 50, ("b", "y", "a"): 40, ("c", "x", "a"): 9, ("a", "z", "d"): 15}
    edges = {
        key: {"edge_index": random.integers(0, [[SIZES[key[0]]], [SIZES[key[2]]]], (2, count))}
        for key, count in (ends | {("c", "w", "b"): 0}).items()
    }
    return Graph.from_arrays({name: {"num_nodes": n} for name, n in SIZES.items()}, edges)


CASES = {
    "rgcn": (RGCN, {"norm": "batch", "residual": True, "num_bases": 2}),
    "rgcn_without_own_rows": (RGCN, {"root_weight": False, "num_layers": 1}),
    "sage": (HeteroSAGE, {"norm": "layer", "output_linear": True, "activation": "elu"}),
    "rgat": (RGAT, {"heads": 2, "residual": False, "norm": "batch"}),
    "rgat_of_one_edge_type": (RGAT, {"heads": 2, "num_layers": 1}),
    "hgt": (HGT, {"heads": 2, "num_layers": 1}),
}


@pytest.mark.parametrize("case", mark_slow(zip(CASES), lambda case: case in ("rgcn", "sage")))
def test_a_program_computes_what_the_model_does(case, graph):
    kind, options = CASES[case]
    num_layers = options.get("num_layers", 2)
    torch.manual_seed(0)
    target = {"sage": ["b", "d"], "hgt": ["b", "d"], "rgat_of_one_edge_type": "d"}.get(case, "b")
    model = kind(graph.metadata(), COLUMNS, 8, 3, target, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            # also biases, which begin at zero
            parameter.add_(0.1 * torch.randn_like(parameter))
        for norm in model.norms.modules():
            if isinstance(norm, torch.nn.BatchNorm1d):
                norm.running_mean.normal_()
                norm.running_var.uniform_(0.5, 2)
    model.eval()
    file = io.BytesIO()
    torch.export.save(export_model(model), file)
    file.seek(0)
    run = torch.export.load(file).module()
    x = {name: torch.randn(SIZES[name], COLUMNS[name]) for name in SIZES}
    batches = [(build_full_hetero_blocks(graph, num_layers), x)]
    samplers = [pyg_sampler(graph, [3, 2][:num_layers], once=once) for once in (True, False)]
    minibatches = itertools.product(
        samplers, ({"b": [0], "d": [0]}, {"b": range(6), "d": range(5)})
    )
    # seeds without neighbours
    for sampler, seeds in (
        *minibatches,
        (pyg_sampler(graph, [0] * num_layers), {"b": [2], "d": [2]}),
    ):
        batch = sampler.sample(seeds, epoch=0)
        rows = {name: x[name][ids] for name, ids in batch.nodes.items()}
        batches.append((build_hetero_blocks(batch), rows))
    for blocks, rows in batches:
        with torch.no_grad():
            expected = model(blocks, rows)
            found = run(*export_arguments(model, blocks, rows))
        assert isinstance(found, dict) == isinstance(expected, dict)
        if not isinstance(found, dict):
            expected, found = {target: expected}, {target: found}
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5)


def test_unsupported_models_are_rejected(graph):
    with pytest.raises(TypeError, match="model is a Linear"):
        export_model(torch.nn.Linear(1, 1))
    metadata = ["a", "b__c", "c"], [("a", "r__b", "c"), ("a__r", "b", "c")]
    metadata[0].append("a__r")
    model = RGCN(metadata, dict.fromkeys(metadata[0], 2), 4, 2, "c", num_layers=1)
    with pytest.raises(ValueError, match="two edge types have the name 'a__r__b__c'"):
        export_model(model)


def test_outputs_of_layers_are_checked(graph):
    model = RGCN(graph.metadata(), COLUMNS, 8, 3, "b", num_layers=2).eval()
    blocks = build_full_hetero_blocks(graph, 2)
    x = {name: torch.ones(SIZES[name], COLUMNS[name]) for name in SIZES}
    assert model.layer_types(1) == ["a", "b", "c"]
    assert model.layer_types(2) == ["b"]
    assert torch.equal(model.layer_outputs(blocks, x, "b"), model(blocks, x))
    assert model.layer_outputs(blocks[:1], x, "c").shape == (7, 8)
    for given, name, message in (
        (blocks, "a", "layer 2 does not compute node type 'a'"),
        ([*blocks, blocks[0]], "b", "3 blocks for a model of 2 layers"),
        ([], "b", "0 blocks for a model of 2 layers"),
    ):
        with pytest.raises(ValueError, match=message):
            model.layer_outputs(given, x, name)
