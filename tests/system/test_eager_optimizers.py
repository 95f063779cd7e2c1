"""Torch's optimizers without the import of torch.compile's tracer."""

import json

import pytest
import torch

from tests.programs import output_of
from tests.tiny_graph import tiny

OPTIMIZERS = {
    "adam": (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}


def trained(name):
    """Parameters after three steps, the second from a restored state, the last with a closure."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(3, 2), torch.rand(5, 3)
    kind, options = OPTIMIZERS[name]
    optimizer = kind(model.parameters(), **options)

    def loss():
        optimizer.zero_grad()
        result = model(x).square().sum()
        result.backward()
        return result

    loss()
    optimizer.step()
    restored = kind(model.parameters(), **options)
    restored.load_state_dict(optimizer.state_dict())
    optimizer = restored
    loss()
    optimizer.step()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    optimizer.step(loss)
    return [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.processes
def test_steps_are_equal_bit_for_bit():
    text = """
import json, sys
from gcnzc.system.eager_optimizers import skip_compiler_import
from tests.system.test_eager_optimizers import OPTIMIZERS, trained
assert "torch._dynamo" not in sys.modules
skip_compiler_import()
results = {name: trained(name) for name in OPTIMIZERS}
assert "torch._dynamo" not in sys.modules
print(json.dumps(results))
"""
    assert json.loads(output_of("-c", text)) == {name: trained(name) for name in OPTIMIZERS}


@pytest.mark.processes
def test_training_does_not_import_the_tracer(tmp_path):
    text = """
import sys
from gcnzc.cli import main
assert main() == 0
print("torch._dynamo" in sys.modules)
"""
    graph = tiny().write(tmp_path / "graph")
    words = ["train", str(graph), "--epochs", "1", "--hidden", "4"]
    printed = output_of("-c", text, *words, "--out", tmp_path / "run")
    assert printed.splitlines()[-1] == "False"
