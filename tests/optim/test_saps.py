"""SAPS: rounds of a reference, pairs, measured bandwidths, faults."""

import copy

import numpy as np
import pytest
import torch
from optim import teams

from gcnzc.exchange import Group, Link, lockstep
from gcnzc.exchange.topology import NEVER, bandwidth_matching, bottleneck_threshold, round_robin
from gcnzc.kernels.codec.random_indices import draw_indices_reference
from gcnzc.optim import SAPS
from gcnzc.optim.saps import measure_bandwidths

FIRST_HALF = np.arange(8) < 4
ISLANDS = np.where(FIRST_HALF[:, None] == FIRST_HALF, 100.0, 10.0)


def pairs(density=0.25, **options):
    return teams.around(SAPS, density=density, **options)


def spread(optimizers, seed=0):
    """Give every rank random parameters (W, n), which its local steps do not change."""
    teams.broadcast(optimizers)
    count = optimizers[0].parameters.numel()
    values = torch.randn(len(optimizers), count, generator=torch.Generator().manual_seed(seed))
    for optimizer, own in zip(optimizers, values.double(), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.parameters = own
    return parameters_of(optimizers)


def parameters_of(optimizers):
    return torch.stack([optimizer.parameters for optimizer in optimizers]).numpy()


def reference(values, density, rounds, bandwidth, seed=0):
    """The parameters (W, n) after rounds without local steps, in NumPy."""
    world_size, count = values.shape
    last_met = np.full((world_size, world_size), NEVER)
    threshold = bottleneck_threshold(bandwidth)
    values = values.copy()
    for number in range(rounds):
        options = {"round": number, "window": (world_size + 1) // 2, "threshold": threshold}
        matching = bandwidth_matching(bandwidth, last_met, seed, **options)
        kept = draw_indices_reference(count, round(density * count), seed, number)
        for low, high in matching:
            values[low, kept] = values[high, kept] = (values[low, kept] + values[high, kept]) / 2
            last_met[low, high] = last_met[high, low] = number
    return values


@pytest.mark.parametrize(
    ("world_size", "is_given"), [(2, False), (3, True), (4, True), (5, False), (7, True)]
)
@pytest.mark.parametrize("density", [1.0, 0.1])
def test_rounds_are_those_of_a_reference_and_keep_the_mean(world_size, density, is_given):
    bandwidth = ISLANDS[:world_size, :world_size] if is_given else np.ones((world_size, world_size))
    own = {"bandwidth": bandwidth} if is_given else {}
    _, optimizers = teams.team(world_size, pairs(density, seed=3, **own))
    before = spread(optimizers)
    for number in range(1, 13):
        teams.step_all(optimizers)
        found = parameters_of(optimizers)
        expected = reference(before, density, number, bandwidth, 3)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(found.mean(0), before.mean(0), rtol=0, atol=1e-12)
    if density == 1:
        assert found.var(0).sum() < 0.3 * before.var(0).sum()


def test_the_exchanged_elements_change_each_round_and_no_generator_is_used():
    _, optimizers = teams.team(2, pairs(0.02, seed=9))
    state, before, seen = torch.get_rng_state(), spread(optimizers), []
    for _ in range(40):
        spread(optimizers)
        teams.step_all(optimizers)
        seen.append(frozenset(np.flatnonzero((parameters_of(optimizers) != before).any(0))))
    assert torch.equal(torch.get_rng_state(), state)
    assert len(set(seen)) == 40
    # each index about equally often: 40 * 0.02 times
    assert len(frozenset().union(*seen)) > 0.45 * before.shape[1]
    # at least one
    assert teams.team(2, pairs(1e-9))[1][0].num_exchanged == 1


def test_a_measurement_is_not_repeated_after_resuming():
    options = {"probe_interval": 100}
    models, optimizers = teams.team(4, pairs(**options))
    teams.train(models, optimizers, 3)
    _, others = teams.team(4, pairs(**options))
    for optimizer, other in zip(optimizers, others, strict=True):
        other.load_state_dict(teams.saved(optimizer.state_dict()))
    found = teams.step_all(others)
    assert all(ledger.entries["SendReceive"].requests == 1 for ledger in found.ledgers)
    assert all(torch.equal(each.measured, others[0].measured) for each in [*optimizers, *others])


def test_a_rank_that_is_not_finite_takes_the_parameters_of_its_peer():
    models, optimizers = teams.team(4, pairs(), teams.adamw)
    teams.train(models, optimizers, 3)
    with torch.no_grad():
        models[1].first.weight[0, 0] = float("nan")
        optimizers[1].state[models[1].rare]["exp_avg"][0] = float("inf")
    own = [
        copy.deepcopy((model, each.inner)) for model, each in zip(models, optimizers, strict=True)
    ]
    teams.train(models, optimizers, 4, 3)
    (pair,) = [edge for edge in optimizers[0].pairs if 1 in edge]
    peer = sum(pair) - 1
    assert torch.equal(teams.vector_of(models[1]), teams.vector_of(models[peer]))
    assert all(teams.vector_of(model).isfinite().all() for model in models)
    assert models[1].rare not in optimizers[1].state
    for rank, optimizer in enumerate(optimizers):
        reason = "the parameters of rank 1 are not finite or too large"
        assert optimizer.dropped == (rank in pair)
        assert (reason in optimizer.skip_reason) == (rank in pair)
    # its peer has taken its own step, without a mean
    model, inner = own[peer]
    share = teams.share_of(teams.batches(4)[3], Group(peer, 4))
    inner.zero_grad()
    (len(share) * 4 / len(teams.batches(4)[3]) * teams.loss_of(model, share)).backward()
    inner.step()
    torch.testing.assert_close(
        teams.vector_of(models[peer]), teams.vector_of(model), rtol=0, atol=1e-12
    )
    teams.train(models, optimizers, 8, 4)
    assert all(teams.vector_of(model).isfinite().all() for model in models)


@pytest.mark.parametrize("world_size", [1, 2, 3, 6, 7])
def test_a_round_robin_has_each_pair_once(world_size):
    rounds = list(round_robin(world_size))
    met = [edge for matching in rounds for edge in matching]
    assert sorted(met) == [(i, j) for i in range(world_size) for j in range(i + 1, world_size)]
    assert all(len(matching) == world_size // 2 for matching in rounds)


def links_of(bandwidth):
    ranks = range(len(bandwidth))
    return {(i, j): Link(bandwidth[i, j]) for i in ranks for j in ranks if i != j}


@pytest.mark.parametrize("world_size", [3, 8])
def test_bandwidths_are_measured_and_the_lower_direction_counts(world_size):
    bandwidth = 1e6 * ISLANDS[:world_size, :world_size]
    bandwidth[0, 1] = 5e6
    found = lockstep(
        [measure_bandwidths(rank, world_size) for rank in range(world_size)],
        links=links_of(bandwidth),
    ).results
    expected = np.minimum(bandwidth, bandwidth.T) * (1 - np.eye(world_size))
    for each in found:
        np.testing.assert_allclose(each, expected, rtol=0.01)
        assert np.array_equal(each, found[0])


def test_measured_bandwidths_select_fast_pairs_and_are_renewed():
    _, optimizers = teams.team(8, pairs(0.01, probe_interval=10))
    teams.broadcast(optimizers)
    slow = []
    for number in range(30):
        # the islands differ from round 10 on
        islands = ISLANDS if number < 10 else np.roll(ISLANDS, 2, (0, 1))
        teams.step_all(optimizers, links=links_of(1e6 * islands))
        slow.append(any(islands[edge] == 10 for edge in optimizers[0].pairs))
    # one round in about 5 connects the islands
    assert sum(slow[:10]) <= 3
    assert 2 <= sum(slow[10:]) <= 6
