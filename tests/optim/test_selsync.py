"""SelSync: its choice of the steps that synchronize, against an independent reference."""

import math

import pytest
import torch
from optim import teams
from torch import nn

from gcnzc.exchange import Group, lockstep
from gcnzc.optim import SelSync


def reference(world_size, steps, threshold, window, decay=0.01, lr=0.05):
    """SelSync with SGD, written without the library, and whether each step synchronized."""
    models = [teams.Everything() for _ in range(world_size)]
    squares = [[] for _ in range(world_size)]
    synchronized = []

    def smoothed(values):
        weights = [(1 - decay) ** (1 + age) for age in range(len(values))]
        return sum(w * v for w, v in zip(weights, reversed(values), strict=True)) / sum(weights)

    for step, rows in enumerate(teams.batches(steps), 1):
        is_due = step <= window
        for rank, model in enumerate(models):
            share = teams.share_of(rows, Group(rank, world_size))
            model.zero_grad()
            teams.loss_of(model, share).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            before = smoothed(squares[rank][-window:]) if squares[rank] else 0.0
            squares[rank].append(sum(float(each.square().sum()) for each in gradients))
            after = smoothed(squares[rank][-window:])
            is_due |= not before or abs(after - before) / before >= threshold
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= lr * len(share) * world_size / len(rows) * parameter.grad
        synchronized.append(is_due)
        if is_due:
            mean = teams.mean_of(models)
            for model in models:
                nn.utils.vector_to_parameters(mean.clone(), list(model.parameters()))
    return models, synchronized


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_it_equals_an_independent_reference(world_size):
    # some steps of `batches` are above the threshold and some below
    options = {"threshold": 0.3, "window": 4}
    expected, synchronized = reference(world_size, 30, **options)
    models, optimizers = teams.team(world_size, teams.around(SelSync, **options))
    if world_size > 1:
        # otherwise the reference would not test the choice
        assert 4 < sum(synchronized) < 29
        assert not all(synchronized[4:])
    for step, is_due in enumerate(synchronized):
        teams.train(models, optimizers, step + 1, step)
        assert teams.all_equal(models) == (is_due or world_size == 1)
    for model, other in zip(models, expected, strict=True):
        torch.testing.assert_close(
            teams.vector_of(model), teams.vector_of(other), rtol=1e-9, atol=1e-11
        )
    if world_size > 1:
        assert all(each.num_exchanges == sum(synchronized) for each in optimizers)
        assert optimizers[0].local_share == pytest.approx(1 - sum(synchronized) / 30)


def test_one_rank_is_sufficient_to_synchronize_all():
    models, optimizers = teams.team(3, teams.around(SelSync, threshold=50.0, window=2))
    teams.train(models, optimizers, 4)
    assert not teams.all_equal(models)
    with torch.no_grad():
        # the gradients of one rank grow
        models[1].tied.bias.mul_(0).add_(1e3)
        models[1].first.weight.mul_(30)
    teams.train(models, optimizers, 5, 4)
    assert teams.all_equal(models)
    changes = [each.change for each in optimizers]
    assert changes[1] >= 50 > max(changes[0], changes[2])


def test_a_rank_with_a_gradient_that_is_not_finite_requests_a_mean():
    models, optimizers = teams.team(3, teams.around(SelSync, threshold=1e6, window=1), teams.adamw)
    teams.train(models, optimizers, 3)
    assert not teams.all_equal(models)

    def bad_step(model, optimizer):
        optimizer.zero_grad()
        teams.loss_of(model, teams.batches(4)[3]).backward()
        if optimizer.group.rank == 1:
            model.rare.grad = torch.full_like(model.rare, math.nan)
        yield from optimizer.algorithm()

    lockstep(teams.of_ranks(bad_step, models, optimizers))
    assert teams.all_equal(models)
    assert teams.vector_of(models[0]).isfinite().all()
    assert [each.skipped for each in optimizers] == [0, 1, 0]
