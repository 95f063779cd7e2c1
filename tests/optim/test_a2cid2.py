"""A2CiD2: its events in rounds of pairs, and exchanges that are overlapped with the steps."""

import copy
import math
import random

import pytest
import torch
from optim.teams import broadcast, of_group, of_ranks, steps_of, team, train
from torch import nn

from gcnzc.exchange import Compute, Link, Now, RequestMismatch, lockstep
from gcnzc.optim import A2CiD2, LocalSGD

SIZE = 6


def vectors(world_size):
    """(W, n): different parameters of each rank, whose gradients are their distances from it."""
    generator = torch.Generator().manual_seed(world_size)
    return torch.randn(world_size, SIZE, generator=generator, dtype=torch.float64)


def make_ranks(world_size, **options):
    """Parameters that differ between ranks, and their optimizers, of SGD with lr 0.1."""
    parameters = [nn.Parameter(each) for each in vectors(world_size)]
    make = lambda each, group: A2CiD2(torch.optim.SGD([each], lr=0.1), group, **options)  # noqa: E731
    optimizers = of_group(parameters, make)
    for optimizer in optimizers:
        # each rank starts from its own parameters
        optimizer.is_broadcast = True
        optimizer.on_broadcast()
        optimizer.is_in_sync = False
    return parameters, optimizers


# --- in rounds


def train_vectors(world_size, steps, targets, **options):
    """Parameters and x~ of each rank after steps towards a target of its own."""
    parameters, optimizers = make_ranks(world_size, **options)
    for _ in range(steps):
        for each, target in zip(parameters, targets, strict=True):
            each.grad = each.detach() - target
        lockstep([optimizer.algorithm() for optimizer in optimizers])
    return torch.stack([each.detach() for each in parameters]), optimizers


def reference(world_size, steps, rounds, rate, eta, alpha, targets):
    """The same by the equations, with an exponential of the matrix of the two variables."""
    x = vectors(world_size)
    second = x.clone()
    coupling = eta * torch.tensor([[-1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)

    def mix(time):
        nonlocal x, second
        pair = torch.linalg.matrix_exp(coupling * time) @ torch.stack([x, second]).flatten(1)
        x, second = pair.unflatten(1, (world_size, SIZE)).unbind()

    events = sorted(
        [(float(step), 1, step) for step in range(steps)]
        + [((number + 0.5) / rate, 0, number) for number in range(round(rate * steps))]
        + [(float(steps), 2, 0)]
    )
    now = 0.0
    for time, kind, number in events:
        mix(time - now)
        now = time
        if kind == 1:
            update = -0.1 * (x - targets)
            x, second = x + update, second + update
        elif kind == 0:
            for i, j in rounds[number % len(rounds)]:
                difference = (x[i] - x[j]).clone()
                for rank, sign in ((i, -1), (j, 1)):
                    x[rank] += sign * difference / 2
                    second[rank] += sign * alpha * difference
    return x, second


ODD_RING = [[(0, 1), (2, 3)], [(0, 4), (1, 2)], [(3, 4)]]
RINGS = {2: [[(0, 1)]], 4: [[(0, 1), (2, 3)], [(0, 3), (1, 2)]], 5: ODD_RING}


@pytest.mark.parametrize("eta", [None, 0])
@pytest.mark.parametrize("rate", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("world_size", RINGS)
def test_the_events_are_those_of_the_equations(world_size, rate, eta):
    """Without momentum they are plain gossip."""
    targets = vectors(world_size) + torch.arange(world_size, dtype=torch.float64)[:, None]
    found, optimizers = train_vectors(world_size, 8, targets, gossip_rate=rate, eta=eta)
    momentum = optimizers[0].momentum
    constants = (momentum.eta, momentum.alpha) if eta is None else (0.0, 0.5)
    x, second = reference(world_size, 8, RINGS[world_size], rate, *constants, targets)
    torch.testing.assert_close(found, x, rtol=1e-12, atol=1e-12)
    if eta is None:
        own = torch.stack([each.second for each in optimizers])
        torch.testing.assert_close(own, second, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world_size", [4, 8, 16])
@pytest.mark.parametrize("rate", [1.0, 3.0])
def test_the_constants_of_a_ring(world_size, rate):
    found = make_ranks(world_size, gossip_rate=rate)[1][0].momentum
    chi_1 = 1 / (rate * (1 - math.cos(2 * math.pi / world_size)))
    # two edges in series with the others, of conductance rate / 2
    chi_2 = (world_size - 1) / world_size / rate
    assert found.eta == pytest.approx(1 / (2 * math.sqrt(chi_1 * chi_2)))
    assert found.alpha == pytest.approx(math.sqrt(chi_1 / chi_2) / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_are_as_stated(dtype):
    models, optimizers = team(
        4, lambda inner, group: A2CiD2(inner, group, control_interval=100), dtype=dtype
    )
    broadcast(optimizers)
    found = lockstep(of_ranks(steps_of, models, optimizers, 15))
    count = sum(each.numel() for each in models[0].parameters() if each.requires_grad)
    for ledger in found.ledgers:
        assert ledger.bytes_sent == 15 * count * dtype.itemsize
    assert optimizers[0].state_bytes == 2 * count * dtype.itemsize


def test_nothing_changes_if_both_peers_are_not_finite():
    models, optimizers = team(2, lambda inner, group: A2CiD2(inner, group, eta=0))
    train(models, optimizers, 1)
    with torch.no_grad():
        models[0].rare[1] = models[1].rare[0] = math.nan
    train(models, optimizers, 2, 1)
    assert not models[0].rare[0].isnan()
    assert [optimizer.dropped for optimizer in optimizers] == [1, 1]
    reason = "the parameters of rank 0 and 1 are not finite or too large"
    assert all(reason in optimizer.skip_reason for optimizer in optimizers)


# --- overlapped with the steps, of ranks that differ in speed


def overlapped_steps(parameter, optimizer, times, target=None, each=None, finalizes=True):
    """Steps that take these times; their ends by the clock, and the parameters at the end."""
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
    own = parameter.detach().clone()
    if finalizes:
        yield from optimizer.finalize_algorithm()
    return ends, own


def simulate(times, targets=None, each=None, link=Link(delay_s=0.01), finalizes=True, **options):  # noqa: B008
    parameters, optimizers = make_ranks(len(times), asynchronous=True, **options)
    targets = [None] * len(times) if targets is None else targets
    ranks = zip(parameters, optimizers, times, targets, strict=True)
    outcome = lockstep([overlapped_steps(*rank, each, finalizes) for rank in ranks], link)
    return parameters, optimizers, outcome


def test_two_ranks_exchange_as_a_reference():
    """Rank 0 makes an offer after a step, and applies the answer two steps later."""
    targets = vectors(2) + torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    _, optimizers, outcome = simulate([[1.0] * 8] * 2, targets, eta=0)
    x = vectors(2)
    offer = answer = None
    for _ in range(8):
        x = x - 0.1 * (x - targets)
        if answer is not None:
            x[0] -= (offer - answer) / 2
            offer = answer = None
        if offer is not None:
            answer = x[1].clone()
            x[1] -= (answer - offer) / 2
        else:
            offer = x[0].clone()
    for rank, (_, own) in enumerate(outcome.results):
        torch.testing.assert_close(own, x[rank], rtol=0, atol=1e-14)
    assert [each.num_pairs for each in optimizers] == [4, 4]


@pytest.mark.parametrize("slow", [0, 2])
def test_a_slow_rank_does_not_slow_the_others(slow):
    times = [[3.0 if rank == slow else 1.0] * 40 for rank in range(4)]
    _, optimizers, outcome = simulate(times)
    for rank, (ends, _) in enumerate(outcome.results):
        assert ends[-1] < (3.05 if rank == slow else 1.1) * 40 * 1.05
    # the others still exchange, and not only when the slow rank does
    for rank, optimizer in enumerate(optimizers):
        assert rank == slow or optimizer.num_pairs > 20
    # of data parallelism, each step takes as long as that of the slowest rank
    parameters = [nn.Parameter(each) for each in vectors(4)]
    make = lambda each, group: LocalSGD(torch.optim.SGD([each], lr=0.1), group, local_steps=1)  # noqa: E731
    others = of_group(parameters, make)
    ranks = zip(parameters, others, times, strict=True)
    outcome = lockstep([overlapped_steps(*rank) for rank in ranks], Link(delay_s=0.01))
    assert all(ends[-1] > 3 * 40 for ends, _ in outcome.results)


def test_signals_are_delivered_in_the_same_step_on_all_ranks():
    for seed in range(10):
        choose = random.Random(seed)
        world_size = choose.randint(2, 5)
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

        times = [[speed] * 60 for speed in speeds]
        simulate(times, each=each, signals=2, control_interval=2)
        # a sum takes part in the signal once, though the sender sends it until it is received
        assert len(seen[0]) == 1
        assert seen[0][0][1] == [True, False]
        assert seen[0][0][0] > at
        assert all(each == seen[0] for each in seen)


@pytest.mark.parametrize("interval", [2, 100])
def test_a_rank_that_takes_fewer_steps_is_an_error(interval):
    # with many sums, rank 1 starts one less
    expected = {
        2: (RequestMismatch, "requests do not match"),
        100: (ValueError, "number of steps differs between ranks: 9 on"),
    }
    kind, message = expected[interval]
    with pytest.raises(kind, match=message):
        simulate([[1.0] * 9, [1.0] * 8, [1.0] * 9], control_interval=interval)


def test_a_rank_with_parameters_that_are_not_finite_does_not_damage_the_others():
    def damage(optimizer):
        (parameter,) = optimizer.param_groups[0]["params"]
        if optimizer.steps == 5 and optimizer.group.rank == 2:
            with torch.no_grad():
                parameter[1] = math.nan
        elif optimizer.group.rank != 2:
            assert parameter.isfinite().all()

    times = [[1.0 + 0.1 * rank] * 20 for rank in range(4)]
    parameters, optimizers, _ = simulate(times, each=damage)
    assert all(torch.equal(each, parameters[0]) for each in parameters)
    assert parameters[0].isfinite().all()
    assert optimizers[2].dropped >= 1


def test_exchanges_from_before_a_state_was_loaded_are_ignored():
    states, loaded = {}, set()

    def load(optimizer):
        rank = optimizer.group.rank
        if optimizer.steps == 1 and rank not in states:
            states[rank] = copy.deepcopy(optimizer.state_dict())
        elif optimizer.steps == 6 and rank not in loaded:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].copy_(1e3 * vectors(4)[rank])
            optimizer.load_state_dict(states[rank])
            loaded.add(rank)

    times = [[1.0 + 0.3 * rank] * 20 for rank in range(4)]
    parameters, _, outcome = simulate(times, each=load, link=Link(delay_s=0.1), eta=0)
    assert len(loaded) == 4
    # the mean is that of parameters after step 1, not of those that the state replaced
    assert parameters[0].abs().max() < 5
    assert all(own.abs().max() < 5 for _, own in outcome.results)


def test_bytes_of_overlapped_exchanges_are_as_stated():
    _, _, outcome = simulate([[1.0] * 21] * 4, finalizes=False, control_interval=100)
    for ledger in outcome.ledgers:
        entry = ledger.entries["Send"]
        assert entry.bytes_sent == entry.messages * (SIZE + 2) * 8
        # one exchange per step, and the last offers may have no answer yet
        assert 20 <= entry.messages <= 22
