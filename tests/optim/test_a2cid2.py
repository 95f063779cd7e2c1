"""A2CiD2 in rounds of pairs: its events, its limiting cases, checkpoints and bytes."""

import math

import pytest
import torch
from optim.local import (
    adamw,
    sgd,
    taught,
    team,
    train,
    vector_of,
)
from torch import nn

from gcnzc.exchange import Group, lockstep
from gcnzc.optim import A2CiD2, LocalSGD
from gcnzc.optim.a2cid2 import compute_momentum
from gcnzc.optim.gossip import GossipGraph

SIZE = 6


def make(**options):
    return lambda inner, group: A2CiD2(inner, group, **options)


def local_sgd(inner, group):
    return LocalSGD(inner, group, local_steps=1)


def vectors(world_size):
    """(W, n): different parameters of each rank, whose gradients are their distances from it."""
    generator = torch.Generator().manual_seed(world_size)
    return torch.randn(world_size, SIZE, generator=generator, dtype=torch.float64)


def train_vectors(world_size, steps, *, targets=None, **options):
    """Parameters and x~ of each rank after SGD with lr 0.1 towards a target of its own."""
    parameters = [nn.Parameter(each) for each in vectors(world_size)]
    optimizers = [
        make(**options)(torch.optim.SGD([each], lr=0.1), Group(rank, world_size))
        for rank, each in enumerate(parameters)
    ]
    for optimizer in optimizers:
        # each rank starts from its own parameters
        optimizer.is_broadcast = True
        optimizer.on_broadcast()
        optimizer.is_in_sync = False
    for _ in range(steps):
        for rank, each in enumerate(parameters):
            each.grad = torch.zeros(SIZE, dtype=torch.float64)
            if targets is not None:
                each.grad = each.detach() - targets[rank]
        lockstep([optimizer.algorithm() for optimizer in optimizers])
    found = torch.stack([each.detach() for each in parameters])
    return found, [each.second for each in optimizers], optimizers


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


@pytest.mark.parametrize("rate", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("world_size", RINGS)
def test_the_events_are_those_of_the_equations(world_size, rate):
    targets = vectors(world_size) + torch.arange(world_size, dtype=torch.float64)[:, None]
    rounds = RINGS[world_size]
    found, second, optimizers = train_vectors(world_size, 8, targets=targets, gossip_rate=rate)
    momentum = optimizers[0].momentum
    x, expected = reference(world_size, 8, rounds, rate, momentum.eta, momentum.alpha, targets)
    torch.testing.assert_close(found, x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.stack(second), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world_size", [4, 8, 16])
@pytest.mark.parametrize("rate", [1.0, 3.0])
def test_the_constants_of_a_ring(world_size, rate):
    rates = GossipGraph("ring").rates(world_size, rate)
    found = compute_momentum(world_size, rates)
    chi_1 = 1 / (rate * (1 - math.cos(2 * math.pi / world_size)))
    # two edges in series with the others, of conductance rate / 2
    chi_2 = (world_size - 1) / world_size / rate
    assert found.eta == pytest.approx(1 / (2 * math.sqrt(chi_1 * chi_2)))
    assert found.alpha == pytest.approx(math.sqrt(chi_1 / chi_2) / 2)
    assert compute_momentum(world_size, rates, 0.25).eta == 0.25
    assert compute_momentum(world_size, rates, 0.0).alpha == 0.5


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_exchanges_preserve_the_sums_of_both_variables_and_agree(world_size):
    begin = vectors(world_size)
    found, second, _ = train_vectors(world_size, 40)
    for each in (found, torch.stack(second)):
        torch.testing.assert_close(each.sum(0), begin.sum(0), rtol=0, atol=1e-12)
    assert (found - begin.mean(0)).abs().max() < 1e-3


def test_without_momentum_it_is_plain_gossip_bit_for_bit():
    targets = vectors(4) + 1
    found, second, optimizers = train_vectors(4, 7, targets=targets, eta=0)
    x = vectors(4)
    for step in range(7):
        x = x.add(x - targets, alpha=-0.1)
        for i, j in RINGS[4][step % 2]:
            x[i] = x[j] = (x[i] + x[j]) / 2
    assert torch.equal(found, x)
    assert second == [None] * 4
    assert "second" not in optimizers[0].snapshot()["local"]


@pytest.mark.parametrize("inner", [sgd, adamw])
def test_two_ranks_without_momentum_are_local_sgd_with_an_exchange_in_every_step(inner):
    models, optimizers = team(2, make(eta=0), inner)
    others, theirs = team(2, local_sgd, inner)
    train(models, optimizers, 12)
    train(others, theirs, 12)
    for one, other in zip(models, others, strict=True):
        assert torch.equal(vector_of(one), vector_of(other))


def test_half_a_round_per_step_exchanges_in_every_second_step():
    _, _, optimizers = train_vectors(4, 9, gossip_rate=0.5)
    assert [each.num_pairs for each in optimizers] == [5] * 4
    assert optimizers[0].num_exchanges == 5


def test_one_rank_of_an_odd_ring_is_idle():
    _, _, optimizers = train_vectors(3, 9)
    assert [each.num_pairs for each in optimizers] == [6] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_are_as_stated(dtype):
    models, optimizers = team(4, make(control_interval=100), dtype=dtype)
    lockstep([optimizer.broadcast_model_algorithm() for optimizer in optimizers])
    pairs = zip(models, optimizers, strict=True)
    found = lockstep([taught(model, optimizer, 15) for model, optimizer in pairs])
    count = optimizers[0].flat.num_elements
    for ledger in found.ledgers:
        assert ledger.bytes_sent == 15 * count * dtype.itemsize
    expected = 2 * count * dtype.itemsize
    assert optimizers[0].state_bytes == expected


def test_nothing_changes_if_both_peers_are_not_finite():
    models, optimizers = team(2, make(eta=0))
    train(models, optimizers, 1)
    with torch.no_grad():
        models[0].rare[1] = models[1].rare[0] = math.nan
    train(models, optimizers, 2, 1)
    assert not models[0].rare[0].isnan()
    assert [optimizer.dropped for optimizer in optimizers] == [1, 1]
    reason = "the parameters of rank 0 and 1 are not finite or too large"
    assert all(reason in optimizer.skip_reason for optimizer in optimizers)
