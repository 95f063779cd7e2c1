"""CO2: rounds of its equations, delayed and eager means, faults, overlap, measured intervals."""

import itertools
import math
import sys

import pytest
import torch
from optim import teams
from optim.clocks import Handed, slow_down
from torch import nn

from gcnzc.exchange import Compute, Group, Link, lockstep
from gcnzc.optim import CO2, resize_state
from gcnzc.optim.sync_interval import INITIAL_STEPS, NUM_MEASURED, WARM_UP

LATE = {"gap": "none", "clip": None}
EAGER = {"gap": "none", "eager": 0.5}
# as in the paper, with the gap and without eager ranks
PUBLISHED = {"outer_lr": 1.0, "outer_momentum": 0.2, "eager": 0.0, "gap": "gap_aware"}


def every(steps, **options):
    return teams.around(CO2, local_steps=steps, **{**PUBLISHED, **options})


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def flat(model):
    return nn.utils.parameters_to_vector(trained(model)).detach()


def own_steps(models, steps):
    """After each of the steps of SGD that workers take on their own, their parameters (W, n)."""
    optimizers = [teams.sgd(model.parameters()) for model in models]
    for rows in teams.batches(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            share = teams.share_of(rows, Group(rank, len(models)))
            optimizer.zero_grad()
            (len(share) * len(models) / len(rows) * teams.loss_of(model, share)).backward()
            optimizer.step()
        yield torch.stack([flat(model) for model in models])


def by_hand(world_size, steps, each, *, lr, momentum, gap, clip, delay, eager=0.0):
    """Where the workers begin after each round (W, n): the equations, one after the other."""
    models = [teams.Everything() for _ in range(world_size)]
    starts = [flat(models[0])]
    begun = starts[0].repeat(world_size, 1)
    means, distances, found = [], [], []
    buffer = torch.zeros_like(starts[0])
    for number, own in enumerate(own_steps(models, steps), 1):
        if number % each:
            continue
        differences = begun - own
        means.append(differences.mean(dim=0))
        late = len(means) - 1 - delay
        start = starts[-1]
        if late >= 0:
            distance = (starts[-1] - starts[late]).norm().item()
            distances += [distance] if distance else []
            usual = distances[0] if distances else 0.0
            for other in distances[1:]:
                usual = (usual + other) / 2
            buffer = momentum * buffer + means[late] / gap(distance, usual)
            buffer = buffer.clamp(-clip, clip)
            start = start - lr * buffer
        starts.append(start)
        begun = start - eager * differences
        for model, row in zip(models, begun, strict=True):
            # whose parameters then lie in it
            nn.utils.vector_to_parameters(row.clone(), trained(model))
        found.append(begun)
    return found


def ratio(distance, usual):
    return 1 + distance / usual if usual else 1.0


class Root:
    # a test's name must be the same in every process
    def __repr__(self):
        return "root"

    def __call__(self, distance, usual):
        return math.sqrt(1 + 3 * distance + usual)


root = Root()
GAPS = {"none": lambda *_: 1.0, "gap_aware": ratio, 2.5: lambda *_: 2.5, root: root}


@pytest.mark.parametrize(
    ("gap", "world_size", "each", "lr", "momentum", "clip", "delay", "eager"),
    [
        ("none", 2, 3, 1.0, 0.2, None, 1, 0.0),
        ("gap_aware", 3, 1, 0.7, 0.5, None, 1, 0.0),
        ("gap_aware", 3, 4, 1.0, 0.2, 0.02, 1, 0.0),
        (2.5, 2, 2, 1.3, 0.0, 0.05, 0, 0.0),
        (root, 4, 3, 0.5, 0.4, None, 0, 0.0),
        ("none", 2, 3, 1.0, 0.0, None, 1, 0.5),
        (root, 3, 2, 0.4, 0.7, 0.05, 1, 0.8),
    ],
    ids=str,
)
@pytest.mark.parametrize("sharded", [False, True])
def test_rounds_match_a_reference(gap, world_size, each, lr, momentum, clip, delay, eager, sharded):
    options = {"outer_lr": lr, "outer_momentum": momentum, "clip": clip, "delay": delay}
    options |= {"eager": eager, "sharded": sharded}
    models, optimizers = teams.team(world_size, every(each, gap=gap, **options))
    expected = by_hand(
        world_size,
        5 * each,
        each,
        lr=lr,
        momentum=momentum,
        gap=GAPS[gap],
        clip=math.inf if clip is None else clip,
        delay=delay,
        eager=eager,
    )
    for number, rows in enumerate(expected):
        teams.train(models, optimizers, (number + 1) * each, number * each)
        assert teams.all_equal(models) == (not eager)
        for model, right in zip(models, rows, strict=True):
            torch.testing.assert_close(flat(model), right, rtol=0, atol=1e-12)


def quadratic(world_size, make, targets, size, lr=0.1):
    """The parameters and optimizers of workers that each have a target, and a step of all."""
    vectors = [nn.Parameter(torch.zeros(size, dtype=torch.float64)) for _ in range(world_size)]
    optimizers = teams.of_group(
        vectors, lambda each, group: make(torch.optim.SGD([each], lr=lr), group)
    )

    def step():
        for vector, target in zip(vectors, targets, strict=True):
            vector.grad = vector.detach() - target
        teams.step_all(optimizers)

    return vectors, optimizers, step


def test_a_shard_may_be_empty():
    # of 32 elements at least
    targets, found = torch.randn(3, 5, dtype=torch.float64), []
    for sharded in (False, True):
        vectors, _, step = quadratic(3, every(2, sharded=sharded), targets, 5)
        for _ in range(20):
            step()
        found.append(vectors[0].detach())
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)
    assert found[0].abs().min() > 0


@pytest.mark.parametrize(("delay", "eager"), [(0, 0.0), (1, 0.0), (1, 0.5)])
def test_state_bytes_is_the_memory_of_the_state(delay, eager):
    # of a number of elements that four workers share without a remainder
    size, world_size = 1024, 4
    targets, most = torch.randn(world_size, size, dtype=torch.float64), {}
    for sharded in (False, True):
        make = every(3, sharded=sharded, delay=delay, eager=eager, signals=2)
        _, optimizers, step = quadratic(world_size, make, targets, size)
        most[sharded] = 0
        for _ in range(9):
            step()
            most[sharded] = max(most[sharded], optimizers[0].state_bytes // 8)
    share, sent = size // world_size, size if delay else 0
    # momentum and start; and where this worker began
    own = size if eager else 0
    assert most[True] == 2 * share + own + sent
    assert most[False] == 2 * size + own + sent


@pytest.mark.parametrize(
    ("options", "is_warned"),
    [
        ({}, False),
        ({"outer_momentum": 0.5}, True),
        ({"outer_momentum": 0.9, "delay": 0}, False),
        ({"gap": "none"}, True),
        ({"gap": 4.0, "outer_momentum": 0.5}, False),
        (EAGER, False),
        ({**EAGER, "outer_momentum": 0.9}, True),
    ],
    ids=str,
)
def test_large_momentum_in_long_rounds_causes_a_warning(options, is_warned, recwarn):
    inner = teams.sgd(nn.Linear(2, 2).parameters())
    options = {"local_steps": 48, **PUBLISHED, **options}
    CO2(inner, Group(0, 2), **options)
    assert [str(each.message) for each in recwarn.list if "diverge" in str(each.message)] == [
        str(each.message) for each in recwarn.list
    ]
    assert len(recwarn.list) == is_warned
    # nobody is late
    recwarn.clear()
    CO2(inner, Group(0, 1), **options)
    assert not recwarn.list


@pytest.mark.parametrize("sharded", [False, True])
def test_the_mean_is_over_the_remaining_ranks(sharded):
    # a step goes all the way
    make = every(1, sharded=sharded, **LATE)
    targets = [1.0, 2.0, 6.0]
    vectors, optimizers, _ = quadratic(3, make, targets, 40, lr=1.0)
    rounds = [
        ([1], 0.0, 0),
        # of 1 and 6, without the 2
        ([], 3.5, 1),
        # of all, from 0 as well, with a fifth of the first
        ([0, 1, 2], 3.5 + 3.0 + 0.2 * 3.5, 1),
        # nothing has come
        ([], 7.2, 2),
        # of all, from 7.2, with a fifth of the last that has come
        ([], 7.2 - 4.2 + 0.2 * 3.7, 2),
    ]
    teams.broadcast(optimizers)
    for spoilt, expected, dropped in rounds:
        for rank, vector in enumerate(vectors):
            vector.grad = vector.detach() - targets[rank]
            if rank in spoilt:
                # the step overflows
                vector.data.fill_(sys.float_info.max)
                vector.grad.fill_(-sys.float_info.max)
        teams.step_all(optimizers)
        for vector in vectors:
            right = torch.full_like(vector, expected)
            torch.testing.assert_close(vector.detach(), right, rtol=0, atol=1e-12)
        assert all(optimizer.dropped == dropped for optimizer in optimizers)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("delay", [0, 1])
def test_a_mean_that_overflows_changes_nothing(sharded, delay):
    calls = itertools.count()

    def divide_to_infinity(*_):
        """The divisors of the third round overflow its mean on all three ranks."""
        return 1e-40 if next(calls) // 3 == 2 else 1.0

    make = every(2, sharded=sharded, delay=delay, gap=divide_to_infinity)
    models, optimizers = teams.team(3, make, dtype=torch.float32)
    teams.train(models, optimizers, 4)
    before = [teams.vector_of(models[0])]
    momenta = [optimizer.momentum.clone() for optimizer in optimizers]
    teams.train(models, optimizers, 6, 4)
    assert all(map(torch.equal, momenta, (each.momentum for each in optimizers)))
    before.append(teams.vector_of(models[0]))
    # with a delay, what has not come is missed at the end of the next round
    teams.train(models, optimizers, 6 + 2 * delay, 6)
    assert teams.all_equal(models)
    assert torch.equal(teams.vector_of(models[0]), before[delay])
    for optimizer in optimizers:
        assert optimizer.dropped == 1
        assert optimizer.skip_reason.endswith("synchronization skipped: the mean overflows")


@pytest.mark.parametrize(("old", "new"), [(3, 2), (2, 4), (3, 1)])
@pytest.mark.parametrize("sharded", [False, True])
def test_another_number_of_eager_ranks_has_the_same_result(old, new, sharded):
    # so that a difference counts as much whether the outer step or the only worker left takes it
    make = every(4, sharded=sharded, outer_lr=1.0, outer_momentum=0.0, **EAGER)
    models, optimizers = teams.team(old, make)
    teams.train(models, optimizers, 10)
    teams.finish_pending(optimizers)
    states = [teams.saved(optimizer.state_dict()) for optimizer in optimizers]
    again, others = teams.team(new, make)
    for rank, optimizer in enumerate(others):
        optimizer.load_state_dict(resize_state(states, rank, new))
    before = teams.mean_of(models)
    teams.finalize(optimizers)
    teams.finalize(others)
    assert (teams.vector_of(models[0]) - before).abs().max() > 0.001
    torch.testing.assert_close(
        teams.vector_of(again[0]), teams.vector_of(models[0]), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("eager", [0.0, 0.8])
def test_finalize_includes_all_steps(eager):
    """Plain sums of differences: each round counts once, though it comes late."""
    targets = torch.randn(3, 10, dtype=torch.float64)
    for steps in (3, 4, 5, 8, 11):
        make = every(4, outer_momentum=0.0, eager=eager, **LATE)
        vectors, optimizers, _ = quadratic(3, make, targets, 10)
        for _ in range(steps):
            for vector, target in zip(vectors, targets, strict=True):
                # whatever the parameters are
                vector.grad = target.clone()
            teams.step_all(optimizers)
        teams.finalize(optimizers)
        expected = -0.1 * steps * targets.mean(dim=0)
        for vector in vectors:
            torch.testing.assert_close(vector.detach(), expected, rtol=0, atol=1e-14)


# --- overlapped with the steps


@pytest.mark.parametrize("sharded", [False, True])
def test_an_exchange_that_is_shorter_than_a_round_is_hidden(sharded):
    def waited(rate, **options):
        """Seconds of waits by the virtual clock, in rounds of four, and what workers come to."""
        models, optimizers = teams.team(
            2, every(4, sharded=sharded, **options), dtype=torch.float32
        )
        teams.broadcast(optimizers)

        def steps(model, optimizer):
            for rows in teams.batches(8 * 4):
                yield Compute(1.0)
                teams.set_gradients(model, optimizer, rows)
                yield from optimizer.algorithm()

        found = lockstep(teams.of_ranks(steps, models, optimizers), Link(rate))
        return max(found.exchange_s), teams.vector_of(models[0])

    whole_s, _ = waited(1.0, delay=0)
    rate = whole_s / 8 / 3.5
    assert waited(rate, delay=0)[0] == pytest.approx(8 * 3.5, rel=0.01)
    found_s, parameters = waited(rate)
    assert found_s <= 0.05 * 8 * 3.5
    # of a longer one only what is left is waited for
    found_s, slow = waited(rate * 3.5 / 12.0)
    assert found_s == pytest.approx(7 * (12.0 - 4.0), rel=0.01)
    # and time changes no bit
    assert torch.equal(parameters, slow)


@pytest.mark.parametrize(
    ("delay", "cpu_s", "expected"),
    # of the steps' time a half or a twentieth; of their work, 2 s each, a fortieth
    [(1, 0.0, 13), (0, 0.0, 130), (1, 3.0, 60), (0, 13.0, 260)],
)
def test_the_number_of_local_steps_is_measured(delay, cpu_s, expected):
    clocks, seen = [Handed(), Handed()], []

    def make(inner, group):
        return CO2(inner, group, local_steps="auto", delay=delay, clocks=clocks[group.rank])

    models, optimizers = teams.team(2, make)

    def timed(rank):
        yield from optimizers[rank].broadcast_model_algorithm()
        for number, rows in enumerate(teams.batches(WARM_UP + NUM_MEASURED + 2)):
            clocks[rank].wall_s += 1.0
            clocks[rank].cpu_s += 2.0
            teams.set_gradients(models[rank], optimizers[rank], rows)
            yield from optimizers[rank].algorithm()
            seen.append((number, optimizers[rank].local_steps))

    for optimizer, clock in zip(optimizers, clocks, strict=True):
        slow_down(optimizer, clock, 6.5, cpu_s)
    lockstep([timed(rank) for rank in range(2)])
    for number, steps in seen:
        assert steps == (INITIAL_STEPS if number < WARM_UP + NUM_MEASURED - 1 else expected)
    teams.finish_pending(optimizers)
    _, (other, _) = teams.team(2, make)
    other.load_state_dict(teams.saved(optimizers[0].state_dict()))
    assert other.local_steps == expected
