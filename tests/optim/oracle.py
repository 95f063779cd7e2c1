"""Trajectories that DeepSpeed 0.19.6 wrote down, and the same gradients given to our optimizers."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gcnzc.exchange import Group, lockstep

FOLDER = Path(__file__).parents[3] / "shared" / "fixtures"


def fixture(name: str) -> dict[str, Any]:
    """A recorded trajectory; without the folder of them a test skips, but not in CI.

    Args:
        name: "onebitadam", "onebitlamb" or "zerooneadam", all of two workers.
    """
    file = FOLDER / f"golden_{name}_w2.json"
    if not file.exists():
        if os.environ.get("CI"):
            pytest.fail(f"no file {file}, which CI must have")
        pytest.skip(f"no recorded trajectory at {file}")
    return json.loads(file.read_text())


def lengths(recorded: dict[str, Any]) -> tuple[int, ...]:
    """Elements of each parameter."""
    return tuple(len(values) for values in recorded["init"])


def parameters(recorded: dict[str, Any]) -> list[nn.Parameter]:
    """As they were at the start."""
    pairs = zip(recorded["init"], recorded["shapes"], strict=True)
    return [nn.Parameter(torch.tensor(values).view(shape)) for values, shape in pairs]


def followed(
    recorded: dict[str, Any], make: Callable[[list[nn.Parameter], Group], Any], first: int = 1
) -> Iterator[tuple[int, list[Any], float]]:
    """Train the recorded workers in lockstep on the recorded gradients.

    Args:
        recorded: what `fixture` gave.
        make: an optimizer of these parameters for a worker.
        first: steps of the recording that are passed over. DeepSpeed's first call counts as a step
            and changes nothing, so one is passed over and `optimizer.steps` set to it.

    Yields:
        The index of each step, the optimizers after it, and the largest difference of an element
        of any worker's parameters to the recorded one.
    """
    world_size, gradients = recorded["world"], recorded["grads_rank_step_param"]
    models = [parameters(recorded) for _ in range(world_size)]
    optimizers = [make(model, Group(rank, world_size)) for rank, model in enumerate(models)]
    for optimizer in optimizers:
        optimizer.steps = first
    for step in range(first, len(gradients[0])):
        for model, of_worker in zip(models, gradients, strict=True):
            for parameter, values in zip(model, of_worker[step], strict=True):
                parameter.grad = torch.tensor(values).view(parameter.shape)
        lockstep([optimizer.algorithm() for optimizer in optimizers])
        yield (
            step,
            optimizers,
            _largest_difference(models, recorded["params_rank_step_param"], step),
        )


def _largest_difference(models: list[list[nn.Parameter]], expected: Any, step: int) -> float:
    return max(
        float((parameter.detach().view(-1) - torch.tensor(values)).abs().max())
        for model, of_worker in zip(models, expected, strict=True)
        for parameter, values in zip(model, of_worker[step], strict=True)
    )
