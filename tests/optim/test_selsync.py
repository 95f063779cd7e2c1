import math

import pytest
import torch
from collective_sizes import lockstep_by
from optim.local import (
    adamw,
    all_equal,
    mean_of,
    sent_by_step,
    sgd,
    team,
    train,
    vector_of,
)
from optim.models import Everything, batches, loss_of
from torch import nn

from gcnzc.compress import Dense
from gcnzc.exchange import lockstep
from gcnzc.optim import LocalSGD, SelSync

# some steps of `batches` are above it and some below
THRESHOLD = 0.3


def make(**options):
    return lambda inner, group: SelSync(inner, group, **options)


def shares(world_size, steps):
    for rows in batches(steps):
        yield [
            rows[len(rows) * rank // world_size : len(rows) * (rank + 1) // world_size]
            for rank in range(world_size)
        ]


def reference(world_size, steps, threshold, window, decay=0.01, lr=0.05):
    """SelSync with SGD, written without the library, and whether each step synchronized."""
    models = [Everything() for _ in range(world_size)]
    squares = [[] for _ in range(world_size)]
    synchronized = []

    def smoothed(values):
        weights = [(1 - decay) ** (1 + age) for age in range(len(values))]
        return sum(w * v for w, v in zip(weights, reversed(values), strict=True)) / sum(weights)

    for step, rows in enumerate(shares(world_size, steps), 1):
        is_due = step <= window
        for rank, model in enumerate(models):
            model.zero_grad()
            loss_of(model, rows[rank]).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            before = smoothed(squares[rank][-window:]) if squares[rank] else 0.0
            squares[rank].append(sum(float(each.square().sum()) for each in gradients))
            after = smoothed(squares[rank][-window:])
            is_due |= not before or abs(after - before) / before >= threshold
            weight = len(rows[rank]) * world_size / sum(map(len, rows))
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= lr * weight * parameter.grad
        synchronized.append(is_due)
        if is_due:
            mean = mean_of(models)
            for model in models:
                nn.utils.vector_to_parameters(mean.clone(), list(model.parameters()))
    return models, synchronized


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_it_equals_an_independent_reference(world_size):
    options = {"threshold": THRESHOLD, "window": 4}
    expected, synchronized = reference(world_size, 30, **options)
    models, optimizers = team(world_size, make(**options))
    if world_size > 1:
        # otherwise the reference would not test the choice
        assert 4 < sum(synchronized) < 29
        assert not all(synchronized[4:])
    for step, is_due in enumerate(synchronized):
        train(models, optimizers, step + 1, step)
        assert all_equal(models) == (is_due or world_size == 1)
    for model, other in zip(models, expected, strict=True):
        torch.testing.assert_close(vector_of(model), vector_of(other), rtol=1e-9, atol=1e-11)
    if world_size > 1:
        assert all(each.num_exchanges == sum(synchronized) for each in optimizers)
        assert optimizers[0].local_share == pytest.approx(1 - sum(synchronized) / 30)


def test_an_infinite_threshold_sends_only_votes_after_the_window():
    models, optimizers = team(4, make(threshold=math.inf, window=3), adamw)
    train(models, optimizers, 3)
    assert all_equal(models)
    found = train(models, optimizers, 10, 3)
    assert not all_equal(models)
    assert [each.num_exchanges for each in optimizers] == [3] * 4
    for ledger in found.ledgers:
        # a sum of two float64 by doubling in each of 7 steps
        assert ledger.requests == 7
        assert ledger.bytes_sent == 7 * 2 * 2 * 8
        assert set(ledger.entries) == {"Sum"}


def test_one_rank_is_sufficient_to_synchronize_all():
    models, optimizers = team(3, make(threshold=50.0, window=2))
    train(models, optimizers, 4)
    assert not all_equal(models)
    with torch.no_grad():
        # the gradients of one rank grow
        models[1].tied.bias.mul_(0).add_(1e3)
        models[1].first.weight.mul_(30)
    train(models, optimizers, 5, 4)
    assert all_equal(models)
    changes = [each.change for each in optimizers]
    assert changes[1] >= 50 > max(changes[0], changes[2])


def test_a_rank_with_a_gradient_that_is_not_finite_requests_a_mean():
    models, optimizers = team(3, make(threshold=1e6, window=1), adamw)
    train(models, optimizers, 3)
    assert not all_equal(models)

    def bad_step(model, optimizer):
        rows = batches(4)[3]
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        if optimizer.group.rank == 1:
            model.rare.grad = torch.full_like(model.rare, math.nan)
        yield from optimizer.algorithm()

    lockstep([bad_step(*pair) for pair in zip(models, optimizers, strict=True)])
    assert all_equal(models)
    assert vector_of(models[0]).isfinite().all()
    assert [each.skipped for each in optimizers] == [0, 1, 0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_are_votes_and_means(world_size):
    models, optimizers = team(world_size, make(threshold=THRESHOLD, window=2), dtype=torch.float32)
    lockstep([optimizer.broadcast_model_algorithm() for optimizer in optimizers])
    found = []
    for step in range(8):
        before = optimizers[0].num_exchanges
        outcome = lockstep_by(
            "builtin",
            [_one_step(*pair, step) for pair in zip(models, optimizers, strict=True)],
        )
        is_due = optimizers[0].num_exchanges > before
        found.append(is_due)
        # a vote and a bit of 8 bytes
        expected = 2 * (world_size - 1) * 2 * 8 / world_size + is_due * sent_by_step(optimizers[0])
        for ledger in outcome.ledgers:
            # parts of a ring differ by an element
            assert abs(ledger.bytes_sent - expected) <= 4 * 2 * world_size * 8
    assert set(found) == {True, False}


def _one_step(model, optimizer, step):
    rows = batches(step + 1)[step]
    rank, world_size = optimizer.group.rank, optimizer.group.world_size
    optimizer.zero_grad()
    loss_of(model, rows[rank::world_size]).backward()
    yield from optimizer.algorithm()


def test_its_state_belongs_to_its_class():
    optimizer = SelSync(sgd(nn.Linear(2, 2).parameters()), compress=Dense(torch.float16))
    assert "local_steps=1, threshold=0.3, window=25) of SGD" in repr(optimizer)
    state = optimizer.state_dict()
    other = LocalSGD(sgd(nn.Linear(2, 2).parameters()))
    with pytest.raises(ValueError, match="the state of SelSync, not of LocalSGD"):
        other.load_state_dict(state)
