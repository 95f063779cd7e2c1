"""Dynamic backup workers: members and means of rounds, stragglers, random schedules, resuming."""

import math
import random

import numpy as np
import pytest
import torch
from optim.rounds import LR, make_ranks, rounds_of, run_ranks
from optim.teams import around

from gcnzc.exchange import Link, lockstep
from gcnzc.exchange.sync import all_gather_scalar
from gcnzc.optim import BackupWorkers


def backup(world_size, **options):
    return make_ranks(world_size, around(BackupWorkers, signals=1, **options))


def stragglers(world_size, steps, seed, chance=0.2, factor=5.0):
    choose = random.Random(seed)
    return [
        [factor if choose.random() < chance else 1.0 for _ in range(steps)]
        for _ in range(world_size)
    ]


EDGES = {
    "ring": lambda world_size: {
        tuple(sorted((rank, (rank + 1) % world_size))) for rank in range(world_size)
    },
    "complete": lambda world_size: {(i, j) for j in range(world_size) for i in range(j)},
}


def reference(world_size, graph, times):
    """Rounds without latency, by the definition: yields (members, parameters of all ranks).

    The ranks wait for one another in the first step.
    """
    edges = EDGES[graph](world_size)
    # of a ring and of a complete graph, the depth-first tree is a path
    tree = {(rank, rank + 1) for rank in range(world_size - 1)}
    targets = np.array([[1.0, -2.0, 3.0]]) * np.arange(1, world_size + 1)[:, None]
    x, pending, counts = np.zeros((world_size, 3)), set(tree), [1] * world_size
    finished = set(range(world_size))
    ends = [math.inf] * world_size
    now = max(own[0] for own in times)
    while True:
        if not finished:
            rank = int(np.argmin(ends))
            now, ends[rank] = ends[rank], math.inf
            finished.add(rank)
        while not (pending_inside := {edge for edge in pending if set(edge) <= finished}):
            rank = int(np.argmin(ends))
            now, ends[rank] = ends[rank], math.inf
            finished.add(rank)
        members = sorted(finished)
        inside = [edge for edge in edges if set(edge) <= finished]
        degrees = [sum(rank in edge for edge in inside) for rank in range(world_size)]
        mixing = np.eye(world_size)
        for i, j in inside:
            weight = 1 / (1 + max(degrees[i], degrees[j]))
            mixing[i, j] = mixing[j, i] = weight
            mixing[i, i] -= weight
            mixing[j, j] -= weight
        stepped = x.copy()
        stepped[members] -= LR * (x - targets)[members]
        x[members] = (mixing @ stepped)[members]
        # an epoch ends when its edges connect all ranks
        pending = (pending - pending_inside) or set(tree)
        yield tuple(members), x.copy()
        for rank in members:
            if counts[rank] == len(times[rank]):
                return
            ends[rank] = now + times[rank][counts[rank]]
            counts[rank] += 1
        finished = set()


@pytest.mark.parametrize("graph", EDGES)
@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_rounds_are_those_of_the_definition(world_size, graph):
    choose = random.Random(world_size)
    times = [[choose.random() + 0.01 for _ in range(30)] for _ in range(world_size)]
    ranks = backup(world_size, topology=graph, grace=0.0, control_interval=1000)
    run_ranks(ranks, times)
    found = rounds_of(ranks)
    count = 0
    for number, (members, x) in enumerate(reference(world_size, graph, times), 1):
        assert found[number].members == members
        for rank in members:
            (taken,) = [each for each in ranks[rank].rounds if each.closed.round == number]
            np.testing.assert_allclose(taken.x, x[rank], rtol=1e-10, atol=1e-12)
        count += 1
    assert count >= 25


@pytest.mark.parametrize("graph", ["ring", "4-regular", "complete"])
def test_stragglers_delay_few_rounds(graph):
    times, link = stragglers(8, 60, seed=0), Link(1e6, 1e-4)
    full_s = sum(max(each) for each in zip(*times, strict=True))
    ranks = backup(8, topology=graph)
    outcome = run_ranks(ranks, times, link, store_s=2e-4)
    assert all(torch.equal(each.x, ranks[0].x) for each in ranks)
    # in a run the time of the slowest rank's own steps is a lower limit
    assert max(map(sum, times)) <= max(outcome.seconds) < 0.75 * full_s
    waiting = backup(8, topology=graph, grace=math.inf)
    outcome = run_ranks(waiting, times, link, store_s=2e-4)
    assert len(rounds_of(waiting)) == 60
    assert full_s <= max(outcome.seconds) < 1.01 * full_s


def test_all_ranks_wait_after_each_wait_interval():
    """Other collectives of all ranks are possible there; otherwise they would never end."""
    ranks = backup(5, topology="ring", wait_interval=8, control_interval=5)
    found = [[] for _ in ranks]

    def epochs(each, times):
        rank, optimizer = each.rank, each.optimizer
        yield from optimizer.broadcast_model_algorithm()
        for number, seconds in enumerate(times, 1):
            yield from each.step(seconds)
            if number % 8 == 0:
                found[rank].append(list((yield from all_gather_scalar(optimizer.steps))))
            # `average_parameters` may be called in any step
            if number % 6 == 0:
                own = yield from optimizer.average_parameters_algorithm()
                found[rank].append(each.x.detach().tolist())
                optimizer.restore_parameters(own)
        yield from optimizer.finalize_algorithm()

    pairs = zip(ranks, stragglers(5, 24, seed=1), strict=True)
    lockstep([epochs(*pair) for pair in pairs])
    assert found[0][1] == [8] * 5
    assert all(other == found[0] for other in found)
    rounds_of(ranks)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])
def test_parameters_that_are_not_finite_do_not_spread(bad):
    def damage(each, step):
        if each.rank == 3 and step in (4, 5, 11):
            each.x[1] = bad

    ranks = backup(5, topology="ring", control_interval=6)
    run_ranks(ranks, stragglers(5, 20, seed=2), change=damage)
    damaged = [closed.damaged for closed in rounds_of(ranks).values() if closed.damaged]
    assert damaged == [(3,)] * len(damaged)
    assert len(damaged) >= 3
    assert ranks[3].optimizer.dropped >= 3
    for each in ranks:
        assert torch.equal(each.x, ranks[0].x)
        assert each.x.isfinite().all()
        assert each.rank == 3 or all(x.abs().max() < 100 for x in each.after)


def test_bytes_are_those_of_the_members_edges():
    ranks = backup(6, topology="ring", control_interval=1000)
    outcome = run_ranks(ranks, stragglers(6, 20, seed=5))
    for each, ledger in zip(ranks, outcome.ledgers, strict=True):
        neighbors = {(each.rank + 1) % 6, (each.rank - 1) % 6}
        count = sum(len(neighbors & set(taken.closed.members)) for taken in each.rounds)
        assert ledger.entries["Send"].messages == count
        assert ledger.entries["Send"].bytes_sent == 8 * 3 * count


def test_a_resumed_run_continues_after_the_latest_round():
    ranks = backup(4, topology="ring")
    run_ranks(ranks, stragglers(4, 9, seed=6))
    last = max(each.optimizer.last.round for each in ranks)
    again = backup(4, topology="ring")
    for each, other in zip(again, ranks, strict=True):
        each.optimizer.load_state_dict(other.optimizer.state_dict())
        assert each.optimizer.steps == 9
    # the same optimizers continue in another simulation, whose store is empty
    for each in (again, ranks):
        run_ranks(each, [[1.0]] * 4)
        for rank in each:
            closed = rank.rounds[-1].closed
            assert (closed.round, closed.members) == (last + 1, (0, 1, 2, 3))
    for each, other in zip(ranks, again, strict=True):
        assert torch.equal(each.x, other.x)
