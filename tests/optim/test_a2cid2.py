"""A2CiD2 in rounds of pairs: its events, its limiting cases, checkpoints and bytes."""

import math

import pytest
import torch
from optim.local import (
    adamw,
    all_equal,
    as_worker,
    check_processes_as_lockstep,
    check_resuming_at_every_step,
    mean_of,
    saved,
    sgd,
    taught,
    team,
    train,
    vector_of,
)
from processes import results
from torch import nn

from gcnzc.exchange import Group, lockstep
from gcnzc.optim import LocalSGD, Strategy, a2cid2, resize_state
from gcnzc.optim.strategy.gossip_graph import GossipGraph, compute_momentum

SIZE = 6


def make(**options):
    return lambda inner, group: Strategy(inner, a2cid2(**options), group)


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
        optimizer.initialize()
    for _ in range(steps):
        for rank, each in enumerate(parameters):
            each.grad = torch.zeros(SIZE, dtype=torch.float64)
            if targets is not None:
                each.grad = each.detach() - targets[rank]
        lockstep([optimizer.algorithm() for optimizer in optimizers])
    found = torch.stack([each.detach() for each in parameters])
    return found, [each.recipe.update.second for each in optimizers], optimizers


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
    momentum = optimizers[0].recipe.update.momentum
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


@pytest.mark.parametrize("matching", ["cycle", "random"])
@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_exchanges_preserve_the_sums_of_both_variables_and_agree(world_size, matching):
    begin = vectors(world_size)
    found, second, _ = train_vectors(world_size, 40, matching=matching)
    for each in (found, torch.stack(second)):
        torch.testing.assert_close(each.sum(0), begin.sum(0), rtol=0, atol=1e-12)
    assert (found - begin.mean(0)).abs().max() < 1e-3


def test_momentum_makes_a_large_ring_agree_faster():
    mean = vectors(16).mean(0)
    errors = [
        (train_vectors(16, 60, eta=eta)[0] - mean).square().mean().sqrt() for eta in (0.0, None)
    ]
    assert errors[0] > 100 * errors[1]


def test_without_momentum_it_is_plain_gossip_bit_for_bit():
    targets = vectors(4) + 1
    found, second, optimizers = train_vectors(4, 7, targets=targets, eta=0)
    x = vectors(4)
    for step in range(7):
        x = x.add(x - targets, alpha=-0.1)
        for i, j in RINGS[4][step % 2]:
            x[i] = x[j] = (x[i] + x[j]) / 2
    assert torch.equal(found, x)
    assert all(not each.numel() for each in second)
    assert "second" not in optimizers[0].recipe.update.local_state()


@pytest.mark.parametrize("inner", [sgd, adamw])
def test_two_ranks_without_momentum_are_local_sgd_with_an_exchange_in_every_step(inner):
    models, optimizers = team(2, make(eta=0), inner)
    others, theirs = team(2, local_sgd, inner)
    train(models, optimizers, 12)
    train(others, theirs, 12)
    for one, other in zip(models, others, strict=True):
        assert torch.equal(vector_of(one), vector_of(other))


@pytest.mark.parametrize("eta", [0, None])
def test_many_exchanges_on_a_complete_graph_are_data_parallelism(eta):
    models, optimizers = team(4, make(topology="complete", gossip_rate=60, eta=eta))
    others, theirs = team(4, local_sgd)
    train(models, optimizers, 8)
    train(others, theirs, 8)
    for model in models:
        torch.testing.assert_close(vector_of(model), vector_of(others[0]), rtol=0, atol=1e-9)


def test_half_a_round_per_step_exchanges_in_every_second_step():
    _, _, optimizers = train_vectors(4, 9, gossip_rate=0.5)
    assert [each.recipe.exchange.num_exchanges for each in optimizers] == [5] * 4
    assert optimizers[0].num_exchanges == 5


def test_one_rank_of_an_odd_ring_is_idle():
    _, _, optimizers = train_vectors(3, 9)
    assert [each.recipe.exchange.num_exchanges for each in optimizers] == [6] * 3


def test_a_single_rank_takes_only_the_inner_steps():
    (model,), optimizers = team(1, make())
    (other,), others = team(1, local_sgd)
    train([model], optimizers, 5)
    train([other], others, 5)
    assert torch.equal(vector_of(model), vector_of(other))
    lockstep([optimizers[0].finalize_algorithm()])


@pytest.mark.parametrize(
    "options",
    [
        {"eta": 0.0},
        {"gossip_rate": 1.5, "matching": "random", "seed": 3},
        {"topology": [(0, 1), (1, 2)]},
    ],
    ids=str,
)
def test_a_run_resumes_from_any_step(options):
    check_resuming_at_every_step(make(**options), 3, 7, inner=adamw)


@pytest.mark.parametrize(("old", "new"), [(3, 2), (2, 4), (3, 1), (1, 2)])
def test_another_number_of_ranks_starts_from_the_mean_of_the_old(old, new):
    models, optimizers = team(old, make(), dtype=torch.float32)
    train(models, optimizers, 6)
    states = [saved(optimizer.state_dict()) for optimizer in optimizers]
    again, others = team(new, make(), dtype=torch.float32)
    for rank, optimizer in enumerate(others):
        optimizer.load_state_dict(resize_state(states, rank, new))
    for model in again:
        torch.testing.assert_close(vector_of(model), mean_of(models))
    assert all_equal(again)
    train(again, others, 10, 6)
    lockstep([optimizer.finalize_algorithm() for optimizer in others])
    assert all_equal(again)


def test_a_state_without_momentum_starts_one():
    models, optimizers = team(2, make(eta=0))
    train(models, optimizers, 3)
    _, others = team(2, make())
    for own, other in zip(optimizers, others, strict=True):
        other.load_state_dict(saved(own.state_dict()))
        assert torch.equal(other.recipe.update.second, other.vector())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_are_as_stated(dtype):
    models, optimizers = team(4, make(control_interval=100), dtype=dtype)
    lockstep([optimizer.broadcast_model_algorithm() for optimizer in optimizers])
    pairs = zip(models, optimizers, strict=True)
    found = lockstep([taught(model, optimizer, 15) for model, optimizer in pairs])
    count = optimizers[0].flat_params.num_elements
    for ledger, optimizer in zip(found.ledgers, optimizers, strict=True):
        stated = 15 * optimizer.recipe.exchange.bytes_sent()
        assert stated == 15 * (count + 1) * dtype.itemsize
        assert ledger.bytes_sent == stated
    expected = 2 * count * dtype.itemsize
    assert optimizers[0].recipe.update.state_bytes == expected


def test_a_rank_whose_parameters_are_not_finite_takes_those_of_its_peer():
    models, optimizers = team(4, make(), adamw)
    train(models, optimizers, 2)
    with torch.no_grad():
        models[1].first.weight[0, 0] = math.nan
        optimizers[1].state[models[1].first.bias]["exp_avg"][0] = math.inf
    train(models, optimizers, 3, 2)
    assert all(bool(vector_of(model).isfinite().all()) for model in models)
    # its peer in the third round
    torch.testing.assert_close(vector_of(models[1]), vector_of(models[0]), rtol=0, atol=1e-2)
    assert [optimizer.dropped for optimizer in optimizers] == [1, 1, 0, 0]
    for optimizer in optimizers[:2]:
        expected = "the parameters of rank 1 are not finite or too large"
        assert optimizer.skip_reason.endswith(expected)
    assert models[1].first.bias not in optimizers[1].state
    train(models, optimizers, 9, 3)
    assert all(bool(vector_of(model).isfinite().all()) for model in models)


def test_nothing_changes_if_both_peers_are_not_finite():
    models, optimizers = team(2, make(eta=0))
    train(models, optimizers, 1)
    with torch.no_grad():
        models[0].rare[1] = models[1].rare[0] = math.nan
    train(models, optimizers, 2, 1)
    assert not models[0].rare[0].isnan()
    assert [optimizer.dropped for optimizer in optimizers] == [2, 2]


def test_signals_reach_all_ranks_in_one_step():
    models, optimizers = team(3, lambda inner, group: Strategy(
        inner, a2cid2(control_interval=3), group, signals=2
    ))  # fmt: skip
    for step in range(9):
        optimizers[2].signals = [step >= 3, False]
        train(models, optimizers, step + 1, step)
        expected = [step in (5, 8), False]
        assert all(optimizer.received_signals == expected for optimizer in optimizers)


def test_the_mean_is_set_for_evaluation_and_by_finalize():
    models, optimizers = team(4, make())
    train(models, optimizers, 3)
    own, mean = [vector_of(model) for model in models], mean_of(models)
    kept = lockstep([optimizer.average_parameters_algorithm() for optimizer in optimizers]).results
    assert all_equal(models)
    torch.testing.assert_close(vector_of(models[0]), mean, rtol=1e-14, atol=1e-15)
    pairs = zip(optimizers, kept, strict=True)
    for optimizer, each in pairs:
        optimizer.restore_parameters(each)
    assert all(map(torch.equal, own, map(vector_of, models)))
    lockstep([optimizer.finalize_algorithm() for optimizer in optimizers])
    assert all_equal(models)
    torch.testing.assert_close(vector_of(models[0]), mean, rtol=1e-14, atol=1e-15)
    # and may go on
    train(models, optimizers, 5, 3)


def test_half_precision_parameters_keep_their_dtype():
    models, optimizers = team(2, make(), sgd, torch.bfloat16)
    train(models, optimizers, 4)
    assert all(parameter.dtype == torch.bfloat16 for parameter in models[0].parameters())
    assert optimizers[0].recipe.update.second.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topology": "star"}, "topology is 'star'\n\nhint: use one of 'ring', 'exponential'"),
        ({"topology": [(0, 1)]}, "a graph that does not connect rank 0 and rank 2"),
        ({"topology": [(0, 1), (1, 3)]}, r"the edge \(1, 3\) in a graph of 3 ranks"),
        ({"topology": [(0, 1, 2)]}, r"the edge \(0, 1, 2\) of a graph"),
        ({"topology": 5}, "topology is 5\n\nhint: give the name of a graph, or pairs of ranks"),
        ({"topology": [(0.5, 1)]}, r"the edge \(0.5, 1\) of a graph"),
        ({"gossip_rate": 0}, "gossip_rate is 0\n\nhint: give a number above 0, at most 1000"),
        ({"gossip_rate": math.inf}, "gossip_rate is inf"),
        ({"gossip_rate": 1e9}, r"gossip_rate is 1000000000.0\n\nhint: .* above 0, at most 1000"),
        ({"eta": -1.0}, "eta is -1.0"),
        ({"matching": "greedy"}, "matching is 'greedy'\n\nhint: use one of cycle, random"),
        ({"seed": -1}, "seed is -1"),
        ({"control_interval": 0}, "control_interval is 0"),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_options_out_of_range_are_refused(options, text, asynchronous):
    with pytest.raises(ValueError, match=text):
        team(3, make(asynchronous=asynchronous, **options))


def test_options_must_be_equal_on_all_ranks():
    optimizers = [
        make(gossip_rate=1 + rank)(sgd(nn.Linear(2, 2).parameters()), Group(rank, 2))
        for rank in range(2)
    ]
    with pytest.raises(ValueError, match=r"gossip_rate=1.*gossip_rate=2"):
        lockstep([optimizer.broadcast_model_algorithm() for optimizer in optimizers])


def test_processes_train_as_the_simulation(tmp_path):
    found = results(3, tmp_path, as_worker, [make_for_processes], 7)
    check_processes_as_lockstep([each[0] for each in found], make_for_processes, 7)


def make_for_processes(inner, group):
    return Strategy(inner, a2cid2(control_interval=2), group)
