"""Gradients that are not finite, on elements that are not exchanged yet."""

import itertools
import math

import pytest
import torch
from processes import results
from torch import nn

from gcnzc.compress import Dense
from gcnzc.exchange import Group, init_group, lockstep
from gcnzc.optim import OneBitAdam, OneBitLamb, ZeroOneAdam, ZeroOneSchedule

WARMUP, FIRST, BAD, END = 10, 20, 12, 26
ROW = 3  # without a gradient until step FIRST
KINDS = {
    "onebit-adam": lambda params, **options: OneBitAdam(params, lr=0.01, warmup=WARMUP, **options),
    "onebit-lamb": lambda params, **options: OneBitLamb(params, lr=0.01, warmup=WARMUP, **options),
    # agrees on an update at every step between its refreshes
    "zero-one-adam": lambda params, **options: ZeroOneAdam(
        params, lr=0.01, schedule=ZeroOneSchedule(None, variance_doubling=2), **options
    ),
}


def give_gradient(table, step, rank, bad=None):
    """A gradient of all rows but ROW, which has one from step FIRST on, and `bad` at step BAD."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    table.grad = torch.randn(table.shape, generator=generator)
    table.grad[ROW] *= step >= FIRST
    if bad is not None and step == BAD and rank == 0:
        table.grad[ROW, 0] = bad


def are_all_finite(state):
    if isinstance(state, torch.Tensor):
        return not state.dtype.is_floating_point or bool(state.isfinite().all())
    values = state.values() if isinstance(state, dict) else state
    return not isinstance(state, dict | list) or all(map(are_all_finite, values))


def train_with_bad_gradients():
    """What each optimizer comes to on this rank when rank 0 has one gradient that is not finite."""
    found = {}
    with init_group() as group:
        for (name, make), bad in itertools.product(KINDS.items(), [math.nan, math.inf]):
            table = nn.Parameter(torch.ones(8, 4))
            optimizer = make([table], group=group)
            blames, states = [], True
            for step in range(1, END + 1):
                give_gradient(table, step, group.rank, bad)
                optimizer.step()
                blames.append(optimizer.skip_reason)
                states &= are_all_finite(optimizer.snapshot())
            found[name, bad] = table.detach().clone(), optimizer.steps, blames, states
    return found


def test_one_bad_gradient_of_an_inactive_element_skips_one_step_on_all_ranks(tmp_path):
    ranks = results(2, tmp_path, train_with_bad_gradients)
    assert len(ranks[0]) == 2 * len(KINDS)
    # in the order in which they were made: NaN is no key that is found again
    for (name, found), others in zip(ranks[0].items(), ranks[1].values(), strict=True):
        (table, *first), (other, *second) = found, others
        assert torch.equal(table, other), name
        assert first == second, name
        steps, blames, states_are_finite = first
        assert states_are_finite, name
        assert [number for number, skip_reason in enumerate(blames, 1) if skip_reason] == [BAD], (
            name
        )
        assert "not finite or too large: rank 0 has 1" in blames[BAD - 1]
        assert steps == END - 1
        assert table.isfinite().all(), name
        assert not torch.equal(table[ROW], torch.ones(4)), name


def make_team(name, **options):
    tables = [nn.Parameter(torch.ones(8, 4)) for _ in range(2)]
    made = [
        KINDS[name]([table], group=Group(rank, 2), **options) for rank, table in enumerate(tables)
    ]
    return tables, made


def train(tables, optimizers, begin, end, scale=1.0):
    for step in range(begin, end + 1):
        for rank, table in enumerate(tables):
            give_gradient(table, step, rank)
            if scale != 1:
                table.grad.abs_().mul_(scale)
        lockstep([optimizer.algorithm() for optimizer in optimizers])


@pytest.mark.parametrize("name", KINDS)
def test_pending_gradients_do_not_overflow_a_short_dtype(name):
    tables, optimizers = make_team(name, gradient_compression=Dense(torch.float16))
    train(tables, optimizers, 1, FIRST - 1)
    for optimizer in optimizers:
        # so that gradients add up for longer
        optimizer.reactivate_from = FIRST + 4
    train(tables, optimizers, FIRST, FIRST + 8, scale=1e4)
    assert [optimizer.skipped for optimizer in optimizers] == [0, 0]
    assert not torch.equal(tables[0][ROW], torch.ones(4))
