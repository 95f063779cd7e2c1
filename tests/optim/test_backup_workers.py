"""Dynamic backup workers: members, means, epochs, stragglers, signals, resuming, processes."""

import copy
import math
import random
import time

import numpy as np
import pytest
import torch
from optim.local import team, train, vector_of
from processes import results
from slow_cases import seeds

from gcnzc.exchange import (
    Compute,
    Crash,
    Group,
    Link,
    ReadKeys,
    SlowDown,
    init_group,
    lockstep,
)
from gcnzc.exchange.topology import is_connected
from gcnzc.optim import BackupWorkers, LocalSGD
from gcnzc.optim.backup_workers import TreeQuorum
from gcnzc.optim.control import namespace
from gcnzc.optim.gossip import GossipGraph
from gcnzc.optim.rounds import RankStatus, StatusKind

LR = 0.1


class Rank:
    """A rank that minimizes |x - target|^2 / 2, and the log of its rounds."""

    def __init__(self, rank, world_size, group=None, **options):
        self.target = torch.tensor([1.0, -2.0, 3.0]) * (rank + 1)
        self.x = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        inner = torch.optim.SGD([self.x], lr=LR)
        group = group or Group(rank, world_size)
        self.optimizer = BackupWorkers(inner, group, signals=1, **options)
        self.rounds, self.mixes, self.after = [], {}, []
        mean, finish = self.optimizer.neighbor_mean, self.optimizer.finish_round

        def logged(closed, own):
            before = own.clone()
            answer = yield from mean(closed, own)
            self.mixes[closed.round] = before, None if answer is None else answer.clone()
            return answer

        def with_log(step):
            self.rounds.append((yield from finish(step)))
            return self.rounds[-1]

        self.optimizer.neighbor_mean, self.optimizer.finish_round = logged, with_log

    def set_gradient(self):
        self.x.grad = self.x.detach() - self.target

    def step(self, seconds):
        """A step in virtual time."""
        self.set_gradient()
        yield Compute(seconds)
        yield from self.optimizer.algorithm()
        self.after.append(self.x.detach().clone())

    def train(self, times):
        yield from self.optimizer.broadcast_model_algorithm()
        for seconds in times:
            yield from self.step(seconds)
        yield from self.optimizer.finalize_algorithm()


def all_rounds(ranks):
    """The rounds by number, after a check that all ranks know the same ones."""
    found = {}
    for number, each in enumerate(ranks):
        numbers = [closed.round for closed in each.rounds]
        assert numbers == sorted(set(numbers)), "each step has a later round"
        for closed in each.rounds:
            assert number in closed.members
            assert found.setdefault(closed.round, closed) == closed
    assert sorted(found) == list(range(1, len(found) + 1)), "each round has a member"
    for number, closed in found.items():
        for rank in closed.members:
            assert number in [each.round for each in ranks[rank].rounds]
    return dict(sorted(found.items()))


def check_rounds(ranks, graph):
    """Check the sums of parameters, and that the edges of each epoch connect all ranks.

    Returns:
        The number of epochs.
    """
    world_size, edges = len(ranks), set()
    rules = ranks[0].optimizer.rules
    epochs, pending = 0, set(rules.tree)
    for closed in all_rounds(ranks).values():
        own, mean = [], []
        for rank in closed.members:
            if closed.round in ranks[rank].mixes:
                before, after = ranks[rank].mixes[closed.round]
                own.append(before)
                mean.append(after)
        if own:
            torch.testing.assert_close(sum(mean), sum(own), rtol=1e-12, atol=1e-12)
        edges |= {edge for edge in graph if set(edge) <= set(closed.members)}
        pending -= edges
        if not pending:
            assert is_connected(world_size, edges)
            epochs, edges, pending = epochs + 1, set(), set(rules.tree)
        assert set(rules.pending(closed)) == pending
    return epochs


def stragglers(world_size, steps, seed, chance=0.2, factor=5.0):
    choose = random.Random(seed)
    return [
        [factor if choose.random() < chance else 1.0 for _ in range(steps)]
        for _ in range(world_size)
    ]


def run_team(times, link=None, store_s=0.0, faults=None, **options):
    ranks = [Rank(rank, len(times), **options) for rank in range(len(times))]
    algorithms = [each.train(own) for each, own in zip(ranks, times, strict=True)]
    return ranks, lockstep(algorithms, link, store_s=store_s, faults=faults)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_equally_fast_ranks_on_a_complete_graph_are_local_sgd(world_size):
    def make(inner, group):
        return BackupWorkers(inner, group, topology="complete", control_interval=3)

    models, optimizers = team(world_size, make)
    train(models, optimizers, 12)
    expected, others = team(world_size, lambda inner, group: LocalSGD(inner, group, local_steps=1))
    train(expected, others, 12)
    for model, other in zip(models, expected, strict=True):
        torch.testing.assert_close(vector_of(model), vector_of(other), rtol=1e-11, atol=1e-13)
    for each in optimizers if world_size > 1 else ():
        assert (each.last.round, each.last.members) == (12, tuple(range(world_size)))


def reference(world_size, graph, times):
    """Rounds without latency, by the definition: yields (members, parameters of all ranks).

    The ranks wait for one another in the first step.
    """
    edges = GossipGraph(graph).edges(world_size)
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
        pending = (pending - pending_inside) or set(tree)
        yield tuple(members), x.copy()
        for rank in members:
            if counts[rank] == len(times[rank]):
                return
            ends[rank] = now + times[rank][counts[rank]]
            counts[rank] += 1
        finished = set()


@pytest.mark.parametrize("graph", ["ring", "complete"])
@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_rounds_are_those_of_the_definition(world_size, graph):
    choose = random.Random(world_size)
    times = [[choose.random() + 0.01 for _ in range(30)] for _ in range(world_size)]
    ranks, _ = run_team(times, topology=graph, grace=0.0, control_interval=1000)
    found = all_rounds(ranks)
    count = 0
    for number, (members, x) in enumerate(reference(world_size, graph, times), 1):
        assert found[number].members == members
        for rank in members:
            index = [each.round for each in ranks[rank].rounds].index(number)
            np.testing.assert_allclose(ranks[rank].after[index], x[rank], rtol=1e-10, atol=1e-12)
        count += 1
    assert count >= 25


@pytest.mark.parametrize("graph", ["ring", "4-regular", "complete"])
def test_stragglers_delay_few_rounds(graph):
    times = stragglers(8, 60, seed=0)
    full_s = sum(max(each) for each in zip(*times, strict=True))
    ranks, outcome = run_team(times, Link(1e6, 1e-4), store_s=2e-4, topology=graph)
    epochs = check_rounds(ranks, GossipGraph(graph).edges(8))
    assert epochs >= 10
    # in a run the time of the slowest rank's own steps is a lower limit
    assert max(map(sum, times)) <= max(outcome.seconds) < 0.75 * full_s
    waiting, outcome = run_team(
        times, Link(1e6, 1e-4), store_s=2e-4, topology=graph, grace=math.inf
    )
    assert len(all_rounds(waiting)) == 60
    assert full_s <= max(outcome.seconds) < 1.01 * full_s


def test_all_ranks_wait_after_each_wait_interval():
    """Other collectives of all ranks are possible there; otherwise they would never end."""
    from gcnzc.exchange.sync import all_gather_scalar

    times = stragglers(5, 24, seed=1)
    ranks = [
        Rank(rank, 5, topology="ring", wait_interval=8, control_interval=5) for rank in range(5)
    ]
    found = [[] for _ in ranks]

    def epochs(rank):
        yield from ranks[rank].optimizer.broadcast_model_algorithm()
        for number, seconds in enumerate(times[rank], 1):
            yield from ranks[rank].step(seconds)
            if number % 8 == 0:
                steps = yield from all_gather_scalar(ranks[rank].optimizer.steps)
                found[rank].append(list(steps))
                # `average_parameters` may be called in any step
            if number % 6 == 0:
                own = yield from ranks[rank].optimizer.average_parameters_algorithm()
                found[rank].append(ranks[rank].x.detach().tolist())
                ranks[rank].optimizer.restore_parameters(own)
        yield from ranks[rank].optimizer.finalize_algorithm()

    lockstep([epochs(rank) for rank in range(5)])
    assert found[0][1] == [8] * 5
    for other in found[1:]:
        assert other == found[0]
    check_rounds(ranks, GossipGraph("ring").edges(5))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])
def test_parameters_that_are_not_finite_do_not_spread(bad):
    times = stragglers(5, 20, seed=2)
    ranks = [Rank(rank, 5, topology="ring", control_interval=6) for rank in range(5)]

    def damaged(rank):
        each = ranks[rank]
        yield from each.optimizer.broadcast_model_algorithm()
        for number, seconds in enumerate(times[rank]):
            if rank == 3 and number in (4, 5, 11):
                with torch.no_grad():
                    each.x[1] = bad
            yield from each.step(seconds)
            if rank != 3:
                assert each.x.abs().max() < 100
        yield from each.optimizer.finalize_algorithm()

    lockstep([damaged(rank) for rank in range(5)])
    found = all_rounds(ranks)
    damaged_rounds = [closed for closed in found.values() if closed.damaged]
    assert [closed.damaged for closed in damaged_rounds] == [(3,)] * len(damaged_rounds)
    assert len(damaged_rounds) >= 3
    assert ranks[3].optimizer.dropped >= 3
    for each in ranks:
        assert torch.equal(each.x, ranks[0].x)
        assert each.x.isfinite().all()


def test_bytes_are_those_of_the_members_edges():
    times = stragglers(6, 20, seed=5)
    ranks, outcome = run_team(times, topology="4-regular", control_interval=1000)
    rules = TreeQuorum(6, GossipGraph("4-regular").edges(6))
    for rank, (each, ledger) in enumerate(zip(ranks, outcome.ledgers, strict=True)):
        num_messages = sum(len(rules.peers(closed, rank)) for closed in each.rounds)
        assert ledger.entries["Send"].messages == num_messages
        assert ledger.entries["Send"].bytes_sent == 8 * 3 * num_messages


def test_the_keys_of_finished_rounds_are_deleted():
    times = stragglers(4, 50, seed=4)
    ranks = [Rank(rank, 4, control_interval=8) for rank in range(4)]
    counts = []

    def counted(rank):
        each = ranks[rank]
        yield from each.optimizer.broadcast_model_algorithm()
        for seconds in times[rank]:
            yield from each.step(seconds)
            keys = [f"{namespace(each.optimizer)}/0/closed/{number}" for number in range(300)]
            counts.append(sum(map(bool, (yield ReadKeys(keys)))))
        yield from each.optimizer.finalize_algorithm()

    lockstep([counted(rank) for rank in range(4)])
    assert len(all_rounds(ranks)) > 40
    assert max(counts) <= 12


@pytest.mark.parametrize("seed", seeds(300, 12))
def test_random_schedules_end(seed):
    choose = random.Random(seed)
    world_size, steps = choose.randint(2, 7), choose.randint(1, 12)
    graphs = ["ring", "exponential", "complete", *(["4-regular"] if world_size > 4 else [])]
    graph = choose.choice(graphs)
    slow = choose.randrange(world_size)
    times = [
        [
            choose.choice([0.0, 0.01, 1.0, choose.random()])
            * (10 if rank == slow and seed % 3 == 0 else 1)
            for _ in range(steps)
        ]
        for rank in range(world_size)
    ]
    link = choose.choice([None, Link(1e3, 0.01), Link(1e5, 0.001, message_s=0.001)])
    faults = {
        rank: [SlowDown(choose.random(), choose.choice([3.0, math.inf]), choose.random() + 0.01)]
        for rank in range(world_size)
        if choose.random() < 0.3
    }
    ranks, _ = run_team(
        times,
        link,
        store_s=choose.choice([0.0, 0.001, 0.1]),
        faults=faults,
        topology=graph,
        grace=choose.choice([0.0, 0.1, 2.0, math.inf]),
        control_interval=choose.randint(1, 8),
        wait_interval=choose.choice([None, 1, 3]),
    )
    check_rounds(ranks, GossipGraph(graph).edges(world_size))
    for each in ranks:
        assert torch.equal(each.x, ranks[0].x)
        assert len(each.rounds) == steps


def test_a_rank_that_crashes_is_named():
    for at_s in (2.5, 4.2, 7.7):
        times = [[1.0] * 20] * 4
        _, outcome = run_team(times, Link(1e5, 0.001), faults={2: [Crash(at_s)]}, topology="ring")
        for rank in (0, 1, 3):
            assert "rank 2 crashed" in str(outcome.errors[rank])


@pytest.mark.parametrize("saved_at", [0, 3])
def test_a_running_optimizer_that_loads_a_state_continues_as_a_new_one(saved_at):
    def steps(rank, times, saved_at, loaded_at, states):
        yield from rank.optimizer.broadcast_model_algorithm()
        for step, seconds in enumerate(times):
            number = rank.optimizer.group.rank
            if step == saved_at:
                states[number] = copy.deepcopy(rank.optimizer.state_dict())
            if step == loaded_at:
                rank.optimizer.load_state_dict(states[number])
            yield from rank.step(seconds)
        yield from rank.optimizer.finalize_algorithm()

    for seed in range(10):
        choose = random.Random(seed)
        world_size = choose.randint(2, 5)
        speeds = [choose.choice([0.1, 1.0, 3.0]) for _ in range(world_size)]
        times = [[each * choose.random() for _ in range(14)] for each in speeds]
        states, found = {}, []
        for at, begin in ((saved_at, 0), (None, 8)):
            ranks = [
                Rank(rank, world_size, grace=0.0, control_interval=1000)
                for rank in range(world_size)
            ]
            pairs = zip(ranks, times, strict=True)
            lockstep([steps(rank, own[begin:], at, 8 - begin, states) for rank, own in pairs])
            found.append(ranks)
        for rank, other in zip(*found, strict=True):
            # with each rank's own parameters after its steps
            assert all(map(torch.equal, rank.after[8:], other.after))
            assert torch.equal(rank.x, other.x)


def test_a_resumed_run_continues_the_epoch_of_the_latest_round():
    ranks, _ = run_team(stragglers(4, 9, seed=6), topology="ring")
    last = max((each.optimizer.last for each in ranks), key=lambda closed: closed.round)
    states = [each.optimizer.state_dict() for each in ranks]
    again = [Rank(rank, 4, topology="ring") for rank in range(4)]
    for each, state in zip(again, states, strict=True):
        each.optimizer.load_state_dict(state)
        assert each.optimizer.steps == 9
    lockstep([each.train([1.0]) for each in again])
    for each in again:
        (closed,) = each.rounds
        assert closed.round == last.round + 1
        # all tree edges are established at once
        assert (closed.memory, closed.members) == ((1, 1, 1), (0, 1, 2, 3))
    # the same optimizers continue in another simulation, whose store is empty
    lockstep([each.train([1.0]) for each in ranks])
    for each, other in zip(ranks, again, strict=True):
        assert torch.equal(each.x, other.x)


def test_rules_of_closing():
    rules = TreeQuorum(4, GossipGraph("ring").edges(4))
    assert rules.tree == [(0, 1), (1, 2), (2, 3)]
    begin = rules.begin()

    def at(*kinds):
        kind = {
            "f": (1, StatusKind.FINISHED),
            "c": (0, StatusKind.FINISHED),
            "p": (0, StatusKind.PAUSED),
        }
        return [RankStatus(*kind[each]) for each in "".join(kinds)]

    # 0 and 3 have an edge of the graph, but none of the tree; f: finished, c: computing, p: paused
    for text, is_closable in {
        "cccc": False, "fccc": False, "fccf": False, "fcfc": False, "ffcc": True, "ffff": True,
        "fccp": False, "fpcf": False, "fppf": True, "fppc": False, "fppp": True,
        "pppp": False, "fpcp": True, "cpcp": False,
    }.items():  # fmt: skip
        assert rules.can_close(begin, at(text)) is is_closable, text
    other = rules.close(begin, at("ffcc"), 1)
    assert rules.pending(other) == [(1, 2), (2, 3)]
    # without rank 2 there is no pending edge, so that any edge suffices
    later = [RankStatus(2, StatusKind.FINISHED), *at("cpc")[:2], RankStatus(2, StatusKind.FINISHED)]
    assert rules.can_close(other, later)
    assert not rules.can_close(other, [*at("ccc")[:2], RankStatus(0, StatusKind.PAUSED), later[3]])
    assert rules.pending(rules.close(begin, at("ffff"), 2)) == rules.tree
    assert rules.is_complete(begin, at("fpff"))
    assert not rules.is_complete(begin, at("fpcf"))


def train_over_processes():
    with init_group(timeout_s=60) as group:
        each = Rank(group.rank, group.world_size, group, topology="ring", control_interval=4)
        for number in range(20):
            each.set_gradient()
            # a straggler in turn
            time.sleep(0.05 if number % 3 == group.rank else 0.0)
            each.optimizer.step()
            if number == 9:
                state = each.optimizer.state_dict()
                each.optimizer.load_state_dict(state)
        each.optimizer.finalize()
        return repr([vars(closed) for closed in each.rounds]), each.x.detach().clone()


def test_processes_agree_on_rounds(tmp_path):
    found = results(3, tmp_path, train_over_processes)
    rounds = {}
    for rank, (text, x) in enumerate(found):
        assert torch.equal(x, found[0][1])
        own = eval(text)
        assert len(own) == 20
        for closed in own:
            assert rank in closed["members"]
            assert rounds.setdefault(closed["round"], closed) == closed
    assert sorted(rounds) == list(range(1, len(rounds) + 1))
