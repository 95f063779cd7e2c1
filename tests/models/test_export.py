"""Exported models compute what the models compute, without gcnzc's kernels."""

import pytest
import torch
from by_hand import random_graph
from slow_cases import mark_slow

from gcnzc import models
from gcnzc.graph.graph import Graph
from gcnzc.models.export import export_arguments, export_model, needs_degrees
from gcnzc.sampling.neighbor import Sampler

DEEP = {"residual": True, "input_linear": True, "output_linear": True}
PRE_NORM = DEEP | {"norm": "layer", "pre_norm": True, "jumping": "cat"}
PRE_ACTIVATION = DEEP | {"norm": "batch", "pre_activation": True}
CASES = {
    "sage": lambda: models.SAGE(5, 8, 3),
    "sage loops": lambda: models.SAGE(30, 8, 3, norm="batch", self_loops=True),
    "gcn": lambda: models.GCN(5, 8, 3, activation="elu"),
    "gcn deep": lambda: models.GCN(5, 8, 3, **PRE_NORM),
    "sage pre-activation": lambda: models.SAGE(5, 8, 3, **PRE_ACTIVATION),
    "gin": lambda: models.GIN(30, 8, 3),
    "gat": lambda: models.GAT(5, 8, 3, heads=2),
    "gat narrow": lambda: models.GAT(40, 4, 3, heads=2, skip=False),
    "gatv2": lambda: models.GATv2(5, 8, 3, heads=2, activation="relu"),
}


# an aggregation, attention, and the options that change what is exported
QUICK = ("sage pre-activation", "gcn deep", "gat narrow")


@pytest.mark.parametrize("name", mark_slow(zip(CASES), lambda name: name not in QUICK))
def test_an_exported_model_equals_the_model_for_any_sizes(name, tmp_path):
    torch.manual_seed(0)
    model = CASES[name]().train()
    program = export_model(model)
    assert model.training
    model.eval()
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    assert "gcnzc" not in str(program.graph_module.code)
    # with self loops, which attention ignores
    src, dst = random_graph(200, 2000).coo()
    loops = torch.arange(0, 150, 3)
    graph = Graph.from_edges(torch.cat([src, loops]), torch.cat([dst, loops]), 200)
    alone = int((graph.in_degrees() == 0).nonzero()[0])
    for seeds, fanouts in (
        ((3,), [3, 2, 2]),
        ((alone,), [2, 2, 2]),
        (range(100), [5, 5, 5]),
        (range(9), [-1, -1, -1]),
    ):
        batch = Sampler(graph, fanouts).sample(torch.tensor(seeds), epoch=0)
        x = torch.randn(len(batch.nodes), model.in_features)
        expected = model(batch.blocks, x)
        arguments = export_arguments(model, batch.blocks, x)
        assert bool(arguments[3]) == needs_degrees(model)
        torch.testing.assert_close(loaded(*arguments), expected, rtol=1e-4, atol=1e-5)


def test_other_modules_and_activations_are_rejected():
    with pytest.raises(TypeError, match="model"):
        export_model(torch.nn.Linear(3, 3))
    model = models.SAGE(5, 8, 3)
    model.activate = lambda x, p, seed: torch.nn.functional.elu(x, alpha=0.5)
    with pytest.raises(ValueError, match="neither ReLU nor ELU"):
        export_model(model)
