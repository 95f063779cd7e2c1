"""Parameters whose shape, dtype or device changes after the construction of their optimizer."""

import copy

import pytest
import torch
from optim.kinds import KINDS
from torch import nn

from gcnzc.exchange import Group, lockstep


def steps(model, optimizer, edit, number):
    """The algorithm of some steps, with an edit of the model before the last one."""
    for step in range(number):
        if step == number - 1:
            edit(model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        yield from optimizer.algorithm()


def train(kind, edit, world_size=2, edited=1):
    torch.manual_seed(0)
    models = [copy.deepcopy(nn.Linear(3, 2)) for _ in range(world_size)]
    lockstep(
        [
            steps(
                model,
                KINDS[kind](model, Group(rank, world_size)),
                edit if rank == edited else lambda _: None,
                6,
            )
            for rank, model in enumerate(models)
        ]
    )


def shorten(model):
    model.bias.grad = None
    model.bias.data = torch.zeros(3)


def widen(model):
    model.weight.grad = None
    model.weight.data = model.weight.data.double()


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_of_another_shape_is_named(kind):
    expected = (
        r"^group 0, parameter 1 is \(3,\) torch.float32 on cpu now, but was \(2,\) torch.float32 "
        r"on cpu when \w+ was constructed\n\nhint: "
    )
    with pytest.raises(ValueError, match=expected):
        train(kind, shorten)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_of_another_dtype_is_named(kind, world_size):
    expected = r"^group 0, parameter 0 is \(2, 3\) torch.float64 on cpu now, but was .*float32"
    with pytest.raises(ValueError, match=expected):
        train(kind, widen, world_size, world_size - 1)


def test_other_errors_stay_as_they_are():
    model = nn.Linear(3, 2)
    optimizer = KINDS["averaged"](model, Group())

    def fail(*_):
        raise RuntimeError("of the optimizer")

    optimizer.inner.step = fail
    model(torch.ones(3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"^of the optimizer$"):
        optimizer.step()
