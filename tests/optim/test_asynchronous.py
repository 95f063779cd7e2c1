"""Optimizers that do not wait for all ranks: several of one group, copies of them, processes."""

import copy
import random
import time
from functools import partial

import pytest
import torch
from optim.rounds import Rank
from processes import results
from slow_cases import seeds
from torch import nn

from gcnzc.exchange import Compute, Group, Link, RequestMismatch, init_group, lockstep
from gcnzc.optim import A2CiD2, BackupWorkers, DecoupledDiLoCo

OUTER = {"local_steps": 2, "outer_lr": 0.7, "outer_momentum": 0.5}
MAKERS = {
    "a2cid2": partial(A2CiD2, asynchronous=True, control_interval=2),
    "backup": partial(BackupWorkers, topology="ring", control_interval=2),
    "quorum": partial(DecoupledDiLoCo, **OUTER, quorum=3, control_interval=3),
}


def make_pair(name, group):
    x = nn.Parameter(torch.full((3,), float(group.rank), dtype=torch.float64))
    return x, MAKERS[name](torch.optim.SGD([x], lr=0.1), group)


def step(pair, target):
    x, optimizer = pair
    x.grad = x.detach() - target
    yield from optimizer.algorithm()


def train(names, group, times, *, with_copies):
    """Step several optimizers in turns, and copies of them from the middle on."""
    pairs = [make_pair(name, group) for name in names]
    for _, optimizer in pairs:
        yield from optimizer.broadcast_model_algorithm()
    for number, seconds in enumerate(times):
        if with_copies and number == len(times) // 2:
            pairs += [copy.deepcopy(pair) for pair in pairs]
        for pair in pairs:
            yield Compute(seconds / len(pairs))
            yield from step(pair, group.rank + 1.0)
    for _, optimizer in pairs:
        own = yield from optimizer.average_parameters_algorithm()
        optimizer.restore_parameters(own)
        yield from optimizer.finalize_algorithm()
    return torch.stack([x.detach() for x, _ in pairs])


@pytest.mark.parametrize(
    "names", [("a2cid2",) * 2, ("backup",) * 2, ("quorum",) * 2, ("backup", "quorum")]
)
@pytest.mark.parametrize("with_copies", [False, True])
@pytest.mark.parametrize("part", seeds(8, 1))
def test_random_schedules_of_several_optimizers_end(names, with_copies, part):
    for seed in range(4 * part, 4 * (part + 1)):
        choose = random.Random(seed)
        world_size = choose.randint(3, 5)
        speeds = [choose.choice([0.1, 1.0, 4.0]) for _ in range(world_size)]
        steps = choose.randint(2, 8)
        times = [[each * choose.random() for _ in range(steps)] for each in speeds]
        link = choose.choice([None, Link(1e5, 0.01)])
        algorithms = [
            train(names, Group(rank, world_size), own, with_copies=with_copies)
            for rank, own in enumerate(times)
        ]
        found = lockstep(algorithms, link, store_s=choose.choice([0.0, 0.001])).results
        assert all(torch.equal(values, found[0]) for values in found), seed


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_waits_in_another_optimizer_misses_no_round_of_all_ranks(seed):
    choose, num_exchanges = random.Random(seed), [0] * 3

    def steps(rank, times):
        group = Group(rank, 3)
        pairs = [make_pair(name, group) for name in ("backup", "quorum")]
        for _, optimizer in pairs:
            yield from optimizer.broadcast_model_algorithm()
        for seconds in times:
            for pair in pairs:
                yield Compute(seconds)
                yield from step(pair, rank + 1.0)
        num_exchanges[rank] = pairs[1][1].num_exchanges

    lockstep([steps(rank, [choose.random() for _ in range(12)]) for rank in range(3)])
    # a quorum of three ranks, every two steps
    assert num_exchanges == [6] * 3


def train_copies_in_another_order(name, rank):
    """Steps of an optimizer and then of its copy on rank 0; other ranks begin with the copy."""
    first = make_pair(name, Group(rank, 3))
    yield from first[1].broadcast_model_algorithm()
    yield from step(first, 1.0)
    copied = copy.deepcopy(first)
    for each in (first, copied)[:: -1 if rank else 1]:
        for _ in range(8):
            yield Compute(0.1)
            yield from step(each, 1.0)


@pytest.mark.parametrize("name", MAKERS)
def test_a_copy_on_one_rank_and_the_original_on_another_are_a_mismatch(name):
    with pytest.raises(RequestMismatch, match="do not match"):
        lockstep([train_copies_in_another_order(name, rank) for rank in range(3)])


# --- processes


def log_rounds(group, make):
    """The rounds of which a rank is a member, and its parameters, with a straggler in turn."""
    rank = Rank(make, group.rank, group.world_size, group)
    for number in range(20):
        rank.begin_step()
        time.sleep(0.02 if number % 3 == group.rank else 0.0)
        rank.optimizer.signals = [number == 3 and group.rank == 1]
        rank.optimizer.step()
        rank.end_step()
        if number == 9 and isinstance(rank.optimizer, BackupWorkers):
            rank.optimizer.load_state_dict(rank.optimizer.state_dict())
    rank.optimizer.finalize()
    return [(taken.closed.round, taken.closed.members) for taken in rank.rounds], rank.x.detach()


def train_over_processes():
    found = {}
    with init_group(timeout_s=60) as group:
        times = [0.01 * (1 + group.rank * (number % 3)) for number in range(6)]
        for name in MAKERS:
            found[name] = group.run(train((name,) * 2, group, times, with_copies=True))
        for name, make in (
            ("backup", partial(BackupWorkers, topology="ring", control_interval=4, signals=1)),
            ("quorum", partial(DecoupledDiLoCo, **OUTER, quorum=2, grace_s=0.01, signals=1)),
        ):
            found[f"rounds of {name}"] = log_rounds(group, make)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return results(3, tmp_path_factory.mktemp("asynchronous"), train_over_processes)


@pytest.mark.parametrize("name", MAKERS)
def test_processes_step_several_optimizers_and_copies_in_turns(ranks, name):
    assert len(ranks[0][name]) == 4
    assert all(torch.equal(each[name], ranks[0][name]) for each in ranks)


@pytest.mark.parametrize(("name", "least"), [("backup", 1), ("quorum", 2)])
def test_processes_agree_on_rounds(ranks, name, least):
    rounds = {}
    for rank, (logged, x) in enumerate(each[f"rounds of {name}"] for each in ranks):
        assert torch.equal(x, ranks[0][f"rounds of {name}"][1])
        for number, members in logged:
            assert rank in members
            assert len(members) >= least
            assert rounds.setdefault(number, members) == members
    assert sorted(rounds) == list(range(1, len(rounds) + 1))
    assert len(rounds) >= 10
