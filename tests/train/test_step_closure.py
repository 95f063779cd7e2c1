"""Runs whose optimizer computes several gradients of a minibatch in one step."""

import pytest
import torch
from training import lines, planted

from gcnzc.optim import Averaged, FedGLOMO
from gcnzc.train import run
from gcnzc.train.config import TrainConfig
from gcnzc.train.training_step import StepClosure


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    graph = planted(tmp_path_factory, 1000, 6000, 24, 4)
    options = {"fanouts": (5,), "layers": 1, "hidden": 16, "batch_size": 50, "dropout": 0.2}
    return TrainConfig(data=graph, epochs=3, lr=0.3, **options)


def train_with(monkeypatch, config, folder, wrap):
    """Train with an optimizer around SGD, and return the lines of the epochs."""

    def build(config, model, group, steps, signals, **options):
        inner = torch.optim.SGD(model.parameters(), config.lr)
        return wrap(inner, group, signals=signals, module=model)

    monkeypatch.setattr(run, "build_method", build)
    found = run.train(config, folder)
    return found, lines(folder)


def glomo(**options):
    return lambda inner, group, **others: FedGLOMO(inner, group, compress=None, **options, **others)


def test_a_run_learns_with_several_gradients_in_a_step(config, tmp_path, monkeypatch):
    calls = []
    compute = StepClosure.__call__
    monkeypatch.setattr(StepClosure, "__call__", lambda self: calls.append(self) or compute(self))
    found, lines = train_with(monkeypatch, config, tmp_path / "run", glomo(local_steps=3))
    assert found["test_accuracy"] > 0.6
    assert [line["seeds"] for line in lines] == [lines[0]["seeds"]] * 3
    steps = sum(-(-line["seeds"] // config.batch_size) for line in lines)
    assert len(set(calls)) == steps
    # the first round takes 1, 2 and 2 gradients, the others 2, 4 and 4
    counts = [calls.count(each) for each in dict.fromkeys(calls)]
    assert counts == [1, 2, 2, *([2, 4, 4] * steps)[: steps - 3]]


def test_a_single_gradient_is_that_of_sgd(config, tmp_path, monkeypatch):
    _, lines = train_with(
        monkeypatch,
        config,
        tmp_path / "run",
        glomo(local_steps=1, round_weight=1, local_momentum=0),
    )
    _, expected = train_with(monkeypatch, config, tmp_path / "other", Averaged)
    for own, other in zip(lines, expected, strict=True):
        # also the random numbers of dropout
        assert own["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert own["seeds"] == other["seeds"]
