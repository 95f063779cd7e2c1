"""DiLoCo with a quorum: members, outer steps, stragglers, random schedules, resuming."""

import random

import pytest
import torch
from optim.rounds import LR, make_ranks, rounds_of, run_ranks
from optim.teams import around, saved
from slow_cases import seeds

from gcnzc.exchange import Link
from gcnzc.optim import DecoupledDiLoCo

OUTER_LR, MOMENTUM = 0.5, 0.9
OUTER = {"outer_lr": OUTER_LR, "outer_momentum": MOMENTUM, "signals": 1}


def with_quorum(world_size, quorum=2, local_steps=3, **options):
    make = around(DecoupledDiLoCo, quorum=quorum, local_steps=local_steps, **OUTER, **options)
    return make_ranks(world_size, make)


def check_rounds(ranks):
    """All members agree on a round, and its outer step is that of the definition."""
    anchor, momentum = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    found = rounds_of(ranks)
    for number, closed in found.items():
        members = [
            taken
            for rank in closed.members
            for taken in ranks[rank].rounds
            if taken.closed.round == number
        ]
        mean = torch.stack([taken.difference for taken in members]).mean(0)
        momentum = MOMENTUM * momentum + mean
        anchor = anchor - OUTER_LR * (mean + MOMENTUM * momentum)
        for taken in members:
            assert torch.equal(taken.anchor, members[0].anchor)
            assert torch.equal(taken.momentum, members[0].momentum)
        torch.testing.assert_close(members[0].anchor, anchor, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(members[0].momentum, momentum, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(rank.x, ranks[0].x) for rank in ranks)
    return list(found.values())


def test_a_slow_rank_does_not_delay_the_others():
    steps, slow = 30, 5.0
    ends = {}
    for quorum in (3, 4):
        ranks = with_quorum(4, quorum)
        run_ranks(ranks, [[1.0] * steps] * 3 + [[slow] * steps], Link(delay_s=0.001))
        check_rounds(ranks)
        ends[quorum] = [rank.end for rank in ranks]
    # all ranks wait for one another after the first step
    assert max(ends[3][:3]) < slow + 1.02 * (steps - 1)
    assert min(ends[4]) >= slow * steps
    # the last rank waits for less than a round of the others, and at the end for none
    assert slow * steps <= ends[3][3] < slow * steps + 3


def test_the_difference_of_a_late_rank_counts_in_the_next_round():
    ranks = with_quorum(3)
    # after the first step, at 3 s, rounds end at 5, 8 and 11 s; the last rank finishes at 9 s
    run_ranks(ranks, [[1.0] * 12, [1.0] * 12, [3.0] * 12])
    rounds = check_rounds(ranks)
    assert [closed.members for closed in rounds[:4]] == [(0, 1), (0, 1), (0, 1, 2), (0, 1)]
    # of three steps from the first anchor
    target, x = ranks[2].target, torch.zeros(3, dtype=torch.float64)
    for _ in range(3):
        x = x - LR * (x - target)
    torch.testing.assert_close(ranks[2].rounds[0].difference, -x)


@pytest.mark.parametrize(("grace_s", "members"), [(0.0, (0, 1)), (0.2, (0, 1)), (0.4, (0, 1, 2))])
def test_a_round_waits_for_further_ranks_during_the_grace_window(grace_s, members):
    ranks = with_quorum(3, grace_s=grace_s)
    # after the first step, the last rank needs 0.3 s more for two steps
    run_ranks(ranks, [[1.0] * 3, [1.0] * 3, [1.15] * 3])
    assert check_rounds(ranks)[0].members == members


@pytest.mark.parametrize("seed", seeds(200, 10))
def test_random_schedules_end(seed):
    choose = random.Random(seed)
    world_size = choose.randint(2, 6)
    quorum = choose.randint(world_size // 2 + 1, world_size)
    options = {"grace_s": choose.choice([0.0, 0.01, 0.3]), "local_steps": choose.randint(1, 3)}
    options["control_interval"] = choose.choice([1, 4, 128])
    ranks = with_quorum(world_size, quorum, **options)
    slow = [choose.choice([0.01, 0.1, 1.0]) for _ in range(world_size)]
    steps = choose.randint(2, 8)
    times = [[choose.expovariate(1 / each) for _ in range(steps)] for each in slow]
    run_ranks(ranks, times, choose.choice([None, Link(1e6, 0.001), Link(1e4, 0.05)]))
    for closed in check_rounds(ranks):
        assert len(closed.members) >= quorum


def test_parameters_that_are_not_finite_do_not_spread():
    def damage(rank, step):
        if rank.rank == 0 and step == 1:
            rank.x[1] = torch.nan

    ranks = with_quorum(3)
    run_ranks(ranks, [[1.0] * 6] * 3, change=damage)
    assert [taken.closed.damaged for taken in ranks[0].rounds] == [(0,), ()]
    sent = torch.stack([rank.rounds[0].difference for rank in ranks[1:]]).mean(0)
    torch.testing.assert_close(ranks[0].rounds[0].anchor, -OUTER_LR * (1 + MOMENTUM) * sent)
    assert all(torch.equal(rank.x, ranks[0].x) for rank in ranks)
    assert ranks[0].x.isfinite().all()


@pytest.mark.parametrize("seed", seeds(30, 4))
def test_a_quorum_of_all_ranks_misses_no_round(seed):
    """Also if ranks wait for sums of signals, and in collectives after a signal."""
    choose = random.Random(seed)
    world_size, steps = choose.randint(2, 4), choose.randint(1, 4)
    control = choose.randint(1, 3)
    ranks = with_quorum(world_size, world_size, steps, control_interval=control)
    ranks[-1].optimizer.signals = [choose.random() < 0.5]
    times = [[choose.choice([0.0, 0.1, 0.1]) for _ in range(12)] for _ in ranks]
    run_ranks(ranks, times, choose.choice([None, Link(1e4, 0.05)]))
    found = [(closed.round, closed.members) for closed in check_rounds(ranks)]
    assert found == [(each, tuple(range(world_size))) for each in range(1, 1 + 12 // steps)]


def test_a_rank_that_missed_rounds_resumes_with_its_older_anchor():
    ranks = with_quorum(3)
    run_ranks(ranks, [[1.0] * 9, [1.0] * 9, [9.0] * 2], finalizes=False)
    assert [rank.optimizer.last.round for rank in ranks] == [3, 3, 0]
    again = with_quorum(3)
    for rank, other in zip(ranks, again, strict=True):
        other.optimizer.load_state_dict(saved(rank.optimizer.state_dict()))
        assert torch.equal(other.optimizer.anchor, rank.optimizer.anchor)
        assert torch.equal(other.x, rank.x)
    assert not torch.equal(again[0].optimizer.anchor, again[2].optimizer.anchor)
    # the last rank needs one more step of its three
    run_ranks(again, [[1.0] * 3, [1.0] * 3, [1.0]], finalizes=False)
    for rank in again:
        (taken,) = rank.rounds
        assert (taken.closed.round, taken.closed.members) == (4, (0, 1, 2))
        assert torch.equal(taken.anchor, again[0].optimizer.anchor)
        assert torch.equal(taken.momentum, again[0].optimizer.momentum)


def test_bytes_are_those_of_the_sum_among_members():
    ranks = with_quorum(3)
    outcome = run_ranks(ranks, [[1.0] * 3, [1.0] * 3, [9.0] * 3])
    (closed,) = check_rounds(ranks)
    assert closed.members == (0, 1)
    # by doubling: the vector, a signal and what is compared
    assert [each.entries["Send"].bytes_sent for each in outcome.ledgers[:2]] == [8 * (3 + 3)] * 2
    # what the ranks agree on by the store counts too
    for ledger in outcome.ledgers:
        assert ledger.entries["CompareAndSet"].bytes_sent > 0
        assert ledger.bytes_sent == sum(each.bytes_sent for each in ledger.entries.values())
