"""A2CiD2 with exchanges that are overlapped with the steps, of ranks that differ in speed."""

import copy
import math
import pickle
import random

import pytest
import torch
from optim.kinds import adamw
from processes import results
from slow_cases import seeds
from torch import nn

from gcnzc.exchange import (
    Compute,
    Crash,
    Group,
    Link,
    Now,
    RequestMismatch,
    SlowDown,
    WorkerLost,
    init_group,
    lockstep,
    run,
)
from gcnzc.exchange.topology import complete
from gcnzc.optim import A2CiD2, LocalSGD
from gcnzc.optim.offers import color_ranks

SIZE = 3


def start_vectors(world_size):
    generator = torch.Generator().manual_seed(world_size)
    return torch.randn(world_size, SIZE, generator=generator, dtype=torch.float64)


def make_ranks(world_size, signals=0, **options):
    """Parameters that differ between ranks, and their optimizers."""
    parameters = [nn.Parameter(each) for each in start_vectors(world_size)]
    optimizers = [
        A2CiD2(
            torch.optim.SGD([each], lr=0.1),
            Group(rank, world_size),
            asynchronous=True,
            signals=signals,
            **options,
        )
        for rank, each in enumerate(parameters)
    ]
    for optimizer in optimizers:
        # each rank starts from its own parameters
        optimizer.is_broadcast = True
        optimizer.on_broadcast()
        optimizer.is_in_sync = False
    return parameters, optimizers


def steps_of(parameter, optimizer, times, target=None, each=None):
    """Steps that take these times; their ends by the clock."""
    ends = []
    for seconds in times:
        yield Compute(seconds)
        parameter.grad = torch.zeros(SIZE, dtype=torch.float64)
        if target is not None:
            parameter.grad = parameter.detach() - target
        yield from optimizer.algorithm()
        ends.append((yield Now()))
        if each is not None:
            each(optimizer)
    return ends


def train_and_finalize(parameter, optimizer, times, target=None, each=None):
    ends = yield from steps_of(parameter, optimizer, times, target, each)
    own = parameter.detach().clone()
    yield from optimizer.finalize_algorithm()
    return ends, own


def simulate(times, link=Link(delay_s=0.01), faults=None, targets=None, **options):  # noqa: B008
    parameters, optimizers = make_ranks(len(times), **options)
    targets = [None] * len(times) if targets is None else targets
    ranks = zip(parameters, optimizers, times, targets, strict=True)
    outcome = lockstep([train_and_finalize(*each) for each in ranks], link, faults=faults)
    return parameters, optimizers, outcome


def random_graph(choose, world_size):
    """A named graph, or a random tree with some more edges."""
    name = choose.choice(["ring", "exponential", "complete", "edges"])
    if name != "edges":
        return name
    edges = {(choose.randrange(rank), rank) for rank in range(1, world_size)}
    return sorted(edges | {each for each in complete(world_size) if choose.random() < 0.2})


def random_run(seed):
    choose = random.Random(seed)
    world_size, steps = choose.randint(2, 5), choose.randint(1, 7)
    scale = [choose.choice([0.0, 1.0, 1.0, 3.0, 10.0]) for _ in range(world_size)]
    times = [[each * choose.choice([1.0, choose.random()]) for _ in range(steps)] for each in scale]
    options = {
        "topology": random_graph(choose, world_size),
        "gossip_rate": choose.choice([0.3, 1.0, 4.0]),
        "eta": choose.choice([0.0, None]),
        "control_interval": choose.choice([1, 3]),
    }
    link = Link(choose.choice([math.inf, 100.0]), choose.choice([0.0, 0.01, 2.0]))
    return choose, times, link, options


@pytest.mark.parametrize("part", seeds(10, 1))
def test_random_schedules_end_and_preserve_the_sum(part):
    for seed in range(30 * part, 30 * (part + 1)):
        _, times, link, options = random_run(seed)
        expected = start_vectors(len(times)).mean(0)
        parameters, optimizers, outcome = simulate(times, link, **options)
        assert outcome.errors == [None] * len(times)
        for parameter in parameters:
            assert torch.equal(parameter, parameters[0]), seed
        offers = [each.offers for each in optimizers]
        assert all(each.num_unanswered == each.num_overlapping == 0 for each in offers)
        # both ranks apply each exchange
        assert sum(each.num_pairs for each in optimizers) % 2 == 0
        if options["eta"] == 0.0:
            torch.testing.assert_close(parameters[0].detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("part", seeds(4, 1))
def test_a_crash_or_a_pause_of_a_rank_ends_in_a_clear_error_or_not_at_all(part):
    for seed in range(15 * part, 15 * (part + 1)):
        choose, times, link, options = random_run(seed)
        lost = choose.randrange(len(times))
        at = choose.random() * max(map(sum, times))
        pauses = seed % 3 == 0
        fault = SlowDown(at, math.inf, 7.0) if pauses else Crash(at)
        _, _, outcome = simulate(times, link, {lost: [fault]}, **options)
        if outcome.errors[lost] is None:
            assert outcome.errors == [None] * len(times)
            continue
        assert not pauses
        # every rank needs all others in `finalize`
        for error in outcome.errors:
            assert isinstance(error, WorkerLost)
        assert any("crashed" in str(error) for error in outcome.errors)


def test_two_ranks_exchange_as_a_reference():
    """Rank 0 makes an offer after a step, and applies the answer two steps later."""
    targets = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.0, -1.0]], dtype=torch.float64)
    _, optimizers, outcome = simulate([[1.0] * 8] * 2, targets=targets, eta=0)
    x = start_vectors(2)
    offer = answer = None
    for step in range(8):
        x = x - 0.1 * (x - targets)
        if answer is not None:
            x[0] -= (offer - answer) / 2
            offer = answer = None
        if offer is not None:
            answer = x[1].clone()
            x[1] -= (answer - offer) / 2
        elif step < 8:
            offer = x[0].clone()
    for rank, (_, own) in enumerate(outcome.results):
        torch.testing.assert_close(own, x[rank], rtol=0, atol=1e-14)
    assert [each.num_pairs for each in optimizers] == [4, 4]


@pytest.mark.parametrize("slow", range(4))
def test_a_slow_rank_does_not_slow_the_others(slow):
    steps = 40

    def ends(factor):
        times = [[factor if rank == slow else 1.0] * steps for rank in range(4)]
        _, optimizers, outcome = simulate(times)
        return [result[0][-1] for result in outcome.results], optimizers

    expected, _ = ends(1.0)
    found, optimizers = ends(3.0)
    for rank in range(4):
        limit = 3.05 if rank == slow else 1.1
        assert found[rank] < limit * expected[rank]
    # the others still exchange, and not only when the slow rank does
    for rank, optimizer in enumerate(optimizers):
        assert rank == slow or optimizer.num_pairs > steps / 2

    parameters = [nn.Parameter(torch.zeros(SIZE, dtype=torch.float64)) for _ in range(4)]
    others = [
        LocalSGD(torch.optim.SGD([each], lr=0.1), Group(rank, 4), local_steps=1)
        for rank, each in enumerate(parameters)
    ]
    times = [[3.0 if rank == slow else 1.0] * steps for rank in range(4)]
    outcome = lockstep(
        [steps_of(*each) for each in zip(parameters, others, times, strict=True)],
        Link(delay_s=0.01),
    )
    # of data parallelism, each step takes as long as that of the slowest rank
    assert all(result[-1] > 3 * steps for result in outcome.results)


def test_signals_are_delivered_in_the_same_step_on_all_ranks():
    for seed in range(10):
        choose = random.Random(seed)
        world_size = choose.randint(2, 5)
        parameters, optimizers = make_ranks(world_size, signals=2, control_interval=2)
        sender, at = choose.randrange(world_size), choose.randrange(1, 6)
        speeds = [choose.choice([0.5, 1.0, 3.0]) for _ in range(world_size)]
        seen = [[] for _ in range(world_size)]

        def each(optimizer, seen=seen, sender=sender, at=at):
            rank, flags = optimizer.group.rank, optimizer.received_signals
            if any(flags):
                seen[rank].append((optimizer.steps, list(flags)))
                optimizer.signals = [False, False]
            elif rank == sender and optimizer.steps >= at and not seen[rank]:
                optimizer.signals = [True, False]

        ranks = zip(parameters, optimizers, speeds, strict=True)
        lockstep(
            [
                train_and_finalize(parameter, optimizer, [speed] * 60, None, each)
                for parameter, optimizer, speed in ranks
            ],
            Link(delay_s=0.01),
        )
        # a sum takes part in the signal once, though the sender sends it until it is received
        assert len(seen[0]) == 1
        assert seen[0][0][1] == [True, False]
        assert seen[0][0][0] > at
        assert all(each == seen[0] for each in seen)


@pytest.mark.parametrize("interval", [3, 100])
def test_a_rank_that_takes_fewer_steps_is_an_error(interval):
    parameters, optimizers = make_ranks(3, control_interval=interval)
    times = [[1.0] * 9, [1.0] * 8, [1.0] * 9]
    ranks = zip(parameters, optimizers, times, strict=True)
    if interval == 3:
        # rank 1 starts a sum less
        expected = pytest.raises(RequestMismatch, match="requests do not match")
    else:
        expected = pytest.raises(ValueError, match="number of steps differs between ranks: 9 on")
    with expected:
        lockstep([train_and_finalize(*each) for each in ranks])


def test_a_rank_with_parameters_that_are_not_finite_does_not_damage_the_others():
    parameters, optimizers = make_ranks(4)

    def damage(optimizer):
        if optimizer.steps == 5 and optimizer.group.rank == 2:
            with torch.no_grad():
                parameters[2][1] = math.nan
        elif optimizer.group.rank != 2:
            assert parameters[optimizer.group.rank].isfinite().all()

    times = [[1.0 + 0.1 * rank] * 20 for rank in range(4)]
    ranks = zip(parameters, optimizers, times, strict=True)
    lockstep([train_and_finalize(*each, None, damage) for each in ranks])
    assert all(torch.equal(each, parameters[0]) for each in parameters)
    assert parameters[0].isfinite().all()
    assert optimizers[2].dropped >= 1


def test_exchanges_from_before_a_state_was_loaded_are_ignored():
    parameters, optimizers = make_ranks(4, eta=0)
    far = 1e3 * start_vectors(4)
    states = []

    def load(optimizer):
        rank = optimizer.group.rank
        if optimizer.steps == 1:
            optimizer.step_s = 0.5
            states.append((rank, copy.deepcopy(optimizer.state_dict())))
        elif optimizer.steps == 6 and not optimizer.offers.generation:
            with torch.no_grad():
                parameters[rank].copy_(far[rank])
            optimizer.load_state_dict(dict(states)[rank])
            assert optimizer.step_s == 0.5

    times = [[1.0 + 0.3 * rank] * 20 for rank in range(4)]
    ranks = zip(parameters, optimizers, times, strict=True)
    outcome = lockstep([train_and_finalize(*each, None, load) for each in ranks], Link(delay_s=0.1))
    assert [each.offers.generation for each in optimizers] == [1] * 4
    # the mean is that of parameters after step 1, not of those that the state replaced
    assert parameters[0].abs().max() < 5
    assert all(result[1].abs().max() < 5 for result in outcome.results)


def test_a_copy_and_an_unpickled_optimizer_have_no_messages():
    _, optimizers, _ = simulate([[1.0] * 3, [2.0] * 3])
    for other in (copy.deepcopy(optimizers[0]), pickle.loads(pickle.dumps(optimizers[0]))):
        assert not other.offers.is_open
        assert all(each.receive is each.send is None for each in other.offers.neighbors)
        assert torch.equal(other.second, optimizers[0].second)
        assert other.offers.method is other
        assert other.control.optimizer is other
    assert optimizers[0].offers.is_open


def test_neighbors_have_different_colors():
    for world_size in range(2, 8):
        for seed in range(5):
            edges = [each for each in complete(world_size) if (sum(each) * 7 + seed) % 3]
            colors = color_ranks(world_size, edges)
            assert all(colors[low] != colors[high] for low, high in edges)
    assert color_ranks(4, [(0, 1), (0, 3), (1, 2), (2, 3)]) == [0, 1, 0, 1]


def test_bytes_are_as_stated():
    parameters, optimizers = make_ranks(4, control_interval=100)
    ranks = zip(parameters, optimizers, strict=True)
    outcome = lockstep([steps_of(*each, [1.0] * 21) for each in ranks], Link(delay_s=0.01))
    for ledger in outcome.ledgers:
        entry = ledger.entries["Send"]
        assert entry.bytes_sent == entry.messages * (SIZE + 2) * 8
        # one exchange per step, and the last offers may have no answer yet
        assert 20 <= entry.messages <= 22


def train_on_processes():
    torch.manual_seed(0)
    with init_group(timeout_s=60) as group:
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        options = {"control_interval": 2, "signals": 1, "module": model}
        optimizer = A2CiD2(adamw(model), group, asynchronous=True, **options)
        seen = []
        for step in range(12):
            generator = torch.Generator().manual_seed(10 * step + group.rank)
            optimizer.zero_grad()
            model(torch.randn(16, 6, generator=generator) + group.rank).square().mean().backward()
            # ranks differ in speed
            run(sleep(0.03 * group.rank), group)
            optimizer.signals = [group.rank == 1 and step == 3]
            optimizer.step()
            seen += [optimizer.steps] * optimizer.received_signals[0]
            if step == 6:
                own = optimizer.average_parameters()
                mean = nn.utils.parameters_to_vector(model.parameters()).detach()
                optimizer.restore_parameters(own)
                state = copy.deepcopy(optimizer.state_dict())
        optimizer.finalize()
        count = optimizer.num_pairs
        return model.state_dict(), mean, seen, count, sorted(state)


def sleep(seconds):
    yield Compute(seconds)


def test_processes_exchange_beside_their_steps(tmp_path):
    found = results(3, tmp_path, train_on_processes)
    first, mean, seen, _, _ = found[0]
    for state, other, other_seen, count, keys in found:
        assert all(torch.equal(state[name], first[name]) for name in first)
        assert torch.equal(other, mean)
        assert other_seen == seen
        assert count >= 2
        assert keys == ["param_groups", "state"]
    assert all(value.isfinite().all() for value in first.values())
