"""`finalize` ends with equal parameters, or with the same error on all ranks."""

import copy
import inspect
from collections.abc import Generator
from typing import get_origin

import pytest
import torch
from optim.kinds import KINDS, LOCAL, ZERO_ONE_LOCAL
from torch import nn

import gcnzc.optim
from gcnzc.exchange import Group, lockstep
from gcnzc.optim import DistributedOptimizer

WORLD_SIZE = 3
(ZERO_ONE,) = ZERO_ONE_LOCAL.values()


def train(model, optimizer, steps, change):
    """Take steps with random gradients, and return the error of `finalize`."""
    rank = optimizer.group.rank
    generator = torch.Generator().manual_seed(rank)
    yield from optimizer.broadcast_model_algorithm()
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 0.1
        with torch.no_grad():
            change(model, optimizer, step, rank)
        yield from optimizer.algorithm()
    try:
        yield from optimizer.finalize_algorithm()
    except ValueError as error:
        return str(error)
    return ""


def errors_of(make, steps, change):
    """The errors of `finalize` on all ranks, and whether the ranks have the same parameters."""
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    models = [copy.deepcopy(model) for _ in range(WORLD_SIZE)]
    optimizers = [make(each, Group(rank, WORLD_SIZE)) for rank, each in enumerate(models)]
    pairs = zip(models, optimizers, strict=True)
    errors = lockstep([train(*pair, steps, change) for pair in pairs]).results
    vectors = [nn.utils.parameters_to_vector(each.parameters()) for each in models]
    return errors, all(torch.equal(vectors[0], each) for each in vectors)


def edit_rank_1(model, optimizer, step, rank):
    if step == 3 and rank == 1:
        model.weight += 1


@pytest.mark.parametrize("steps", [8, 9, 10, 11, 12])
def test_an_edit_before_local_steps_of_0_1_adam_is_an_error(steps):
    """Some of these runs end in sync, others between two synchronizations."""
    errors, _ = errors_of(ZERO_ONE, steps, edit_rank_1)
    expected = "parameters differ between ranks: group 0, parameter 0 of rank 0 is not that of rank"
    assert all(error.startswith(expected) for error in errors), errors


@pytest.mark.parametrize("steps", [9, 10, 11])
def test_a_failed_synchronization_of_0_1_adam_is_an_error(steps):
    is_changed = []

    def spoil_update(model, optimizer, step, rank):
        if step == steps - 1 and rank == 1 and optimizer.accumulated is not None:
            optimizer.accumulated[0] = torch.nan
            is_changed.append(step)

    errors, are_equal = errors_of(ZERO_ONE, steps, spoil_update)
    if is_changed and not are_equal:
        assert len(set(errors)) == 1
        assert errors[0].startswith("the last synchronization failed, so the ranks have different ")
        assert "rank 1 has 1" in errors[0]
    assert bool(errors[0]) == (not are_equal)
    # step 9 discards the update, because it exchanges gradients
    assert is_changed or steps == 9


@pytest.mark.parametrize("name", LOCAL)
def test_a_failed_last_synchronization_is_an_error_on_all_ranks(name):
    def set_infinite(model, optimizer, step, rank):
        if step == 5:
            model.bias[0] = torch.inf

    errors, are_equal = errors_of(LOCAL[name], 10, set_infinite)
    # without a mean, these continue from a finite anchor
    assert are_equal == name.startswith(("co2", "diloco quorum", "fedglomo"))
    if are_equal:
        assert errors == [""] * WORLD_SIZE
        return
    expected = "the last synchronization failed, so the ranks have different parameters: no rank's "
    assert all(error.startswith(expected) for error in errors), errors


@pytest.mark.parametrize("name", KINDS)
def test_without_a_fault_the_parameters_are_equal(name):
    errors, are_equal = errors_of(KINDS[name], 10, lambda *_: None)
    assert errors == [""] * WORLD_SIZE
    assert are_equal


# parts of `algorithm` that the base classes call, and subclasses define
PARTS = {
    *("take_step", "update", "finish", "mean", "mean_gradients", "mean_uncompressed"),
    *("clip_gradients", "find_due", "exchange", "compute", "apply", "gather"),
    *("sum_common", "mean_parameters", "gossip", "average_pair"),
    *("begin_rounds", "finish_round", "take_part", "neighbor_mean", "mean_of_members"),
}
OPTIMIZERS = [
    each
    for each in vars(gcnzc.optim).values()
    if isinstance(each, type) and issubclass(each, DistributedOptimizer)
]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_generators_of_optimizers_are_named_algorithms_so_that_other_methods_act(kind):
    generators = {
        name
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
        and get_origin(inspect.signature(method).return_annotation) is Generator
    }
    assert "finalize_algorithm" in generators
    assert {name for name in generators - PARTS if not name.endswith("algorithm")} == set()
