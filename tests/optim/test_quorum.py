"""DiLoCo with a quorum: members, outer steps, stragglers, random schedules, resuming, processes."""

import random

import pytest
import torch
from optim.local import all_equal, saved, team, train, vector_of
from processes import results
from slow_cases import seeds
from torch import nn

from gcnzc.exchange import Compute, Group, Link, Now, init_group, lockstep
from gcnzc.optim import DecoupledDiLoCo, DiLoCo
from gcnzc.optim.decoupled_diloco import MajorityQuorum
from gcnzc.optim.rounds import ClosedRound, RankStatus, StatusKind

LR, OUTER_LR, MOMENTUM = 0.1, 0.5, 0.9
OUTER = {"outer_lr": OUTER_LR, "outer_momentum": MOMENTUM, "signals": 1}


def with_quorum(quorum, steps=3, **options):
    return lambda inner, group: DecoupledDiLoCo(
        inner, group, quorum=quorum, local_steps=steps, **OUTER, **options
    )


class Rank:
    """A rank that minimizes |x - target|^2 / 2, and the log of its rounds."""

    def __init__(self, rank, world_size, group=None, quorum=2, steps=3, **options):
        self.target = torch.tensor([1.0, -2.0, 3.0]) * (rank + 1)
        self.x = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        make = with_quorum(quorum, steps, **options)
        self.optimizer = make(torch.optim.SGD([self.x], lr=LR), group or Group(rank, world_size))
        self.rounds, self.sent = [], {}
        optimizer = self.optimizer
        outer_step, mean_of_members = optimizer.outer_step, optimizer.mean_of_members

        def logged(anchor, momentum, difference):
            outer_step(anchor, momentum, difference)
            self.rounds.append((optimizer.last, anchor.clone(), momentum.clone()))

        def keep(closed, values):
            self.sent[closed.round] = values[:3].clone()
            return mean_of_members(closed, values)

        optimizer.outer_step, optimizer.mean_of_members = logged, keep

    def train(self, times, *, finalizes=True):
        yield from self.optimizer.broadcast_model_algorithm()
        for seconds in times:
            yield from self.step(seconds)
        self.end = yield Now()
        yield from self.optimizer.finalize_algorithm() if finalizes else ()

    def step(self, seconds):
        self.x.grad = self.x.detach() - self.target
        yield Compute(seconds)
        yield from self.optimizer.algorithm()


def run_ranks(ranks, times, link=None, **options):
    pairs = zip(ranks, times, strict=True)
    return lockstep([rank.train(each, **options) for rank, each in pairs], link)


def check_rounds(ranks):
    """All members agree on a round, and its outer step is that of the definition."""
    found = {}
    for number, each in enumerate(ranks):
        numbers = [closed.round for closed, _, _ in each.rounds]
        assert numbers == sorted(set(numbers))
        for closed, anchor, momentum in each.rounds:
            assert number in closed.members
            known = found.setdefault(closed.round, (closed, anchor, momentum))
            assert known[0] == closed
            assert torch.equal(known[1], anchor)
            assert torch.equal(known[2], momentum)
    anchor, momentum = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for number in sorted(found):
        closed, after, buffer = found[number]
        mean = torch.stack([ranks[rank].sent[number] for rank in closed.members]).mean(0)
        momentum = MOMENTUM * momentum + mean
        anchor = anchor - OUTER_LR * (mean + MOMENTUM * momentum)
        torch.testing.assert_close(after, anchor, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(buffer, momentum, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(rank.x, ranks[0].x) for rank in ranks)
    return [found[number][0] for number in sorted(found)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_quorum_of_all_ranks_is_diloco_bit_for_bit(world_size):
    models, optimizers = team(world_size, with_quorum(world_size))
    train(models, optimizers, 11)

    def plain(inner, group):
        return DiLoCo(inner, group, local_steps=3, **OUTER)

    others, expected = team(world_size, plain)
    train(others, expected, 11)
    for model, other in zip(models, others, strict=True):
        assert torch.equal(vector_of(model), vector_of(other))
    for each in (optimizers, expected):
        lockstep([optimizer.finalize_algorithm() for optimizer in each])
    assert all_equal(models)
    assert torch.equal(vector_of(models[0]), vector_of(others[0]))


def test_a_slow_rank_does_not_delay_the_others():
    steps, slow = 30, 5.0
    ends = {}
    for quorum in (3, 4):
        ranks = [Rank(rank, 4, quorum=quorum) for rank in range(4)]
        times = [[1.0] * steps] * 3 + [[slow] * steps]
        run_ranks(ranks, times, Link(delay_s=0.001))
        check_rounds(ranks)
        ends[quorum] = [rank.end for rank in ranks]
    # all ranks wait for one another after the first step
    assert max(ends[3][:3]) < slow + 1.02 * (steps - 1)
    assert min(ends[4]) >= slow * steps
    # the last rank waits for less than a round of the others, and at the end for none
    assert slow * steps <= ends[3][3] < slow * steps + 3


def test_the_difference_of_a_late_rank_counts_in_the_next_round():
    ranks = [Rank(rank, 3, quorum=2) for rank in range(3)]
    # after the first step, at 3 s, rounds end at 5, 8 and 11 s; the last rank finishes at 9 s
    run_ranks(ranks, [[1.0] * 12, [1.0] * 12, [3.0] * 12])
    rounds = check_rounds(ranks)
    assert [closed.members for closed in rounds[:4]] == [(0, 1), (0, 1), (0, 1, 2), (0, 1)]
    assert rounds[2].sends == ((0, 2),)
    # of three steps from the first anchor
    target, x = ranks[2].target, torch.zeros(3, dtype=torch.float64)
    for _ in range(3):
        x = x - LR * (x - target)
    torch.testing.assert_close(ranks[2].sent[3], -x)


@pytest.mark.parametrize(("grace_s", "members"), [(0.0, (0, 1)), (0.2, (0, 1)), (0.4, (0, 1, 2))])
def test_a_round_waits_for_further_ranks_during_the_grace_window(grace_s, members):
    ranks = [Rank(rank, 3, quorum=2, grace_s=grace_s) for rank in range(3)]
    # after the first step, the last rank needs 0.3 s more for two steps
    run_ranks(ranks, [[1.0] * 3, [1.0] * 3, [1.15] * 3])
    assert check_rounds(ranks)[0].members == members


@pytest.mark.parametrize("seed", seeds(200, 10))
def test_random_schedules_end(seed):
    generator = random.Random(seed)
    world_size = generator.randint(2, 6)
    quorum = generator.randint(world_size // 2 + 1, world_size)
    options = {"grace_s": generator.choice([0.0, 0.01, 0.3]), "steps": generator.randint(1, 3)}
    options["control_interval"] = generator.choice([1, 4, 128])
    ranks = [Rank(rank, world_size, quorum=quorum, **options) for rank in range(world_size)]
    slow = [generator.choice([0.01, 0.1, 1.0]) for _ in range(world_size)]
    steps = generator.randint(2, 8)
    times = [[generator.expovariate(1 / each) for _ in range(steps)] for each in slow]
    link = generator.choice([None, Link(1e6, 0.001), Link(1e4, 0.05)])
    run_ranks(ranks, times, link)
    for closed in check_rounds(ranks):
        assert len(closed.members) >= quorum


def test_parameters_that_are_not_finite_do_not_spread():
    ranks = [Rank(rank, 3, quorum=2) for rank in range(3)]

    def damaged():
        yield from ranks[0].optimizer.broadcast_model_algorithm()
        for step in range(6):
            ranks[0].x.grad = ranks[0].x.detach() - ranks[0].target
            if step == 1:
                with torch.no_grad():
                    ranks[0].x[1] = torch.nan
            yield Compute(1.0)
            yield from ranks[0].optimizer.algorithm()
        yield from ranks[0].optimizer.finalize_algorithm()

    lockstep([damaged(), *(rank.train([1.0] * 6) for rank in ranks[1:])])
    closed = [each for each, _, _ in ranks[0].rounds]
    assert [each.damaged for each in closed] == [(0,), ()]
    sent = torch.stack([rank.sent[1] for rank in ranks[1:]]).mean(0)
    torch.testing.assert_close(ranks[0].rounds[0][1], -OUTER_LR * (1 + MOMENTUM) * sent)
    assert all(torch.equal(rank.x, ranks[0].x) for rank in ranks)
    assert ranks[0].x.isfinite().all()


@pytest.mark.parametrize("seed", seeds(30, 4))
def test_a_quorum_of_all_ranks_misses_no_round(seed):
    """Also if ranks wait for sums of signals, and in collectives after a signal."""
    choose = random.Random(seed)
    world_size, steps = choose.randint(2, 4), choose.randint(1, 4)
    options = {"quorum": world_size, "steps": steps, "control_interval": choose.randint(1, 3)}
    ranks = [Rank(rank, world_size, **options) for rank in range(world_size)]
    ranks[-1].optimizer.signals = [choose.random() < 0.5]
    times = [[choose.choice([0.0, 0.1, 0.1]) for _ in range(12)] for _ in ranks]
    run_ranks(ranks, times, choose.choice([None, Link(1e4, 0.05)]))
    found = [(closed.round, closed.members) for closed in check_rounds(ranks)]
    assert found == [(each, tuple(range(world_size))) for each in range(1, 1 + 12 // steps)]


def test_a_rank_that_resumes_late_misses_no_round_of_all_ranks():
    ranks = [Rank(rank, 2, quorum=2, steps=1, control_interval=1) for rank in range(2)]
    resume = ranks[0].optimizer._resume

    def late(policies):
        yield Compute(10.0)
        yield from resume(policies)

    ranks[0].optimizer._resume = late
    # after each sum, all ranks pause and wait for one another
    ranks[1].optimizer.signals = [True]
    run_ranks(ranks, [[1.0] * 6] * 2)
    assert [closed.members for closed in check_rounds(ranks)] == [(0, 1)] * 6


def test_a_rank_that_missed_rounds_resumes_with_its_older_anchor():
    ranks = [Rank(rank, 3, quorum=2) for rank in range(3)]
    run_ranks(ranks, [[1.0] * 9, [1.0] * 9, [9.0] * 2], finalizes=False)
    assert [rank.optimizer.last.round for rank in ranks] == [3, 3, 0]
    states = [saved(rank.optimizer.state_dict()) for rank in ranks]
    again = [Rank(rank, 3, quorum=2) for rank in range(3)]
    for rank, other, state in zip(ranks, again, states, strict=True):
        other.optimizer.load_state_dict(state)
        assert torch.equal(other.optimizer.anchor, rank.optimizer.anchor)
        assert torch.equal(other.optimizer.momentum, rank.optimizer.momentum)
        assert torch.equal(other.x, rank.x)
    assert not torch.equal(again[0].optimizer.anchor, again[2].optimizer.anchor)
    # the last rank needs one more step of its three
    run_ranks(again, [[1.0] * 3, [1.0] * 3, [1.0]], finalizes=False)
    for rank in again:
        ((closed, anchor, momentum),) = rank.rounds
        assert (closed.round, closed.members, closed.sends) == (4, (0, 1, 2), ((0, 2),))
        assert torch.equal(anchor, again[0].optimizer.anchor)
        assert torch.equal(momentum, again[0].optimizer.momentum)


def test_bytes_are_those_of_the_sum_among_members():
    ranks = [Rank(rank, 3, quorum=2) for rank in range(3)]
    outcome = run_ranks(ranks, [[1.0] * 3, [1.0] * 3, [9.0] * 3])
    (closed,) = check_rounds(ranks)
    assert closed.members == (0, 1)
    sent = [ledger.entries["Send"].bytes_sent for ledger in outcome.ledgers[:2]]
    # by doubling: the vector and its extras, which have no other use here
    assert sent == [8 * (3 + ranks[0].optimizer.extras)] * 2
    # what the ranks agree on by the store counts too
    for ledger in outcome.ledgers:
        assert ledger.entries["CompareAndSet"].bytes_sent > 0
        assert ledger.bytes_sent == sum(each.bytes_sent for each in ledger.entries.values())


def test_rules_of_closing():
    rules = MajorityQuorum(5, 3)
    last = rules.begin()

    def statuses(*rounds, paused=()):
        return [
            RankStatus(number, StatusKind.PAUSED if rank in paused else StatusKind.FINISHED)
            for rank, number in enumerate(rounds)
        ]

    assert not rules.can_close(last, statuses(1, 1, 0, 0, 0))
    assert rules.can_close(last, statuses(1, 1, 0, 1, 0))
    first = rules.close(last, statuses(1, 1, 0, 1, 0), 0)
    assert (first.members, first.sends) == ((0, 1, 3), ())
    second = rules.close(first, statuses(1, 2, 2, 1, 2), 1)
    # rank 1 has the state of the first round
    assert (second.members, second.sends) == ((1, 2, 4), ((1, 2), (1, 4)))
    third = rules.close(second, statuses(3, 2, 3, 3, 3), 0)
    assert (third.members, third.sends) == ((0, 2, 3, 4), ((2, 0), (4, 3)))
    # no quorum is possible
    alone = statuses(0, 0, 0, 1, 0, paused=(0, 1, 2))
    assert rules.can_close(last, alone)
    assert rules.is_complete(last, alone)
    assert rules.close(last, alone, 3).members == ()
    assert not rules.can_close(last, statuses(0, 0, 0, 0, 0, paused=(0, 1, 2)))


def train_as_worker():
    with init_group(timeout_s=60) as group:
        rank = Rank(group.rank, 3, group, grace_s=0.01)
        for step in range(12):
            rank.x.grad = rank.x.detach() - rank.target
            rank.optimizer.signals = [step == 3 and group.rank == 1]
            rank.optimizer.step()
        rank.optimizer.finalize()
        closed = [closed.to_bytes().decode() for closed, _, _ in rank.rounds]
        return closed, rank.x.detach()


def test_processes_agree_on_rounds(tmp_path):
    found = results(3, tmp_path, train_as_worker)
    assert all(torch.equal(x, found[0][1]) for _, x in found)
    rounds = {}
    for number, (closed, _) in enumerate(found):
        for text in closed:
            each = ClosedRound.from_bytes(text.encode())
            assert number in each.members
            assert rounds.setdefault(each.round, each) == each
            assert len(each.members) >= 2
    # each rank finishes four rounds, unless the others have finished all of theirs
    assert len(rounds) >= 4


def states_after(world_size, quorum, seed):
    """The states of all ranks after 7 steps of a run, whose gradients depend on the seed."""
    ranks = [Rank(rank, world_size, quorum=quorum) for rank in range(world_size)]
    for rank in ranks:
        rank.target = rank.target + seed
    run_ranks(ranks, [[1.0] * 7] * world_size, finalizes=False)
    return [saved(rank.optimizer.state_dict()) for rank in ranks]


@pytest.mark.parametrize(("world_size", "quorum"), [(2, 2), (3, 3), (3, 2)])
def test_states_of_different_runs_are_an_error_on_all_ranks(world_size, quorum):
    own, other = (states_after(world_size, quorum, seed) for seed in (0, 5))
    ranks = [Rank(rank, world_size, quorum=quorum) for rank in range(world_size)]
    errors = []

    def resume(number, rank):
        rank.optimizer.load_state_dict((other if number == 1 else own)[number])
        try:
            yield from rank.train([1.0] * 4)
        except ValueError as error:
            errors.append(str(error))

    lockstep([resume(number, rank) for number, rank in enumerate(ranks)])
    assert len(errors) == world_size
    for error in errors:
        assert error.startswith("content of the loaded state differs between ranks: anchor ")
        assert "hint: load the states of one checkpoint, of one run, on all ranks" in error
