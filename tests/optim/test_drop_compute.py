"""DropCompute: steps on the computed micro-batches, thresholds, calibration, resuming."""

import copy

import numpy as np
import pytest
import torch
from optim import teams
from torch import nn

from gcnzc.compress import Sign
from gcnzc.exchange import lockstep
from gcnzc.optim import Averaged, DropCompute, resize_state
from gcnzc.optim.compute_deadline import (
    ComputeClock,
    SimulatedClock,
    SimulatedTime,
    choose_threshold,
    effective_speed,
    known_times,
)

MICRO = 5
FORWARD = 0.25  # of the time of a micro-batch
WORLDS = [1, 3]
SHORT = (2, 6)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def micro_batch(step, rank, number):
    generator = torch.Generator().manual_seed(1000 * step + 50 * rank + number)
    return torch.randperm(teams.ROWS, generator=generator)[: 6 + (step + number) % 3]


def seconds(step, rank, number):
    """The time of a micro-batch: rank 1 is slow in odd steps; sums are exact."""
    slow = rank == 1 and step % 2 == 1
    return (1 + (3 * step + 5 * rank + number) % 4) / 4 + 3 * slow


def team(world_size, inner=sgd, dtype=torch.float64, **options):
    models = [teams.Everything().to(dtype) for _ in range(world_size)]
    options = {"micro_batches": MICRO, "threshold": None, **options}

    def make(model, group):
        return DropCompute(inner(model.parameters()), group, clock=SimulatedClock(), **options)

    return models, teams.of_group(models, make)


def steps_of(model, optimizer, steps, times=seconds, each=None, computed=None, passes=1):
    """Steps of one rank in virtual time; `computed` collects (step, rank, number)."""
    clock, rank = optimizer.deadline.clock, optimizer.group.rank
    yield from clock.update()
    for step in steps:
        optimizer.zero_grad()
        for number in optimizer.micro_batches(range(MICRO)):
            loss = teams.loss_of(model, micro_batch(step, rank, number))
            taken_s = times(step, rank, number)
            if passes == 2:
                yield from clock.compute(FORWARD * taken_s)
                if not optimizer.backward(loss):
                    continue
                taken_s -= FORWARD * taken_s
            else:
                loss.backward()
            yield from clock.compute(taken_s)
            if computed is not None:
                computed.append((step, rank, number))
        yield from optimizer.algorithm()
        if each is not None:
            each(step, rank)


def train(models, optimizers, steps, **options):
    return lockstep(teams.of_ranks(steps_of, models, optimizers, steps, **options))


def accumulated(model, optimizer, steps):
    """Plain accumulation, whose gradients `Averaged` divides by the number of micro-batches."""
    for step in steps:
        optimizer.zero_grad()
        for number in range(MICRO):
            teams.loss_of(model, micro_batch(step, optimizer.group.rank, number)).backward()
        optimizer.weight = 1 / MICRO
        yield from optimizer.algorithm()


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("compress", [None, Sign(block=64)], ids=["plain", "sign"])
@pytest.mark.parametrize("threshold", [None, 1000.0])
def test_without_drops_it_is_accumulation_bit_for_bit(world_size, compress, threshold):
    dtype = torch.float32 if compress else torch.float64
    models, optimizers = team(world_size, adam, dtype, compress=compress, threshold=threshold)
    train(models, optimizers, range(6))
    plain = [teams.Everything().to(dtype) for _ in range(world_size)]
    make = lambda model, group: Averaged(adam(model.parameters()), group, compress=compress)  # noqa: E731
    lockstep(teams.of_ranks(accumulated, plain, teams.of_group(plain, make), range(6)))
    assert torch.equal(teams.vectors_of(models), teams.vectors_of(plain))
    assert all(optimizer.dropped_micro_batches == 0 for optimizer in optimizers)
    assert all(optimizer.computed_micro_batches == 6 * MICRO for optimizer in optimizers)


def alone_over(computed, steps, inner):
    """One process that accumulates exactly these micro-batches."""
    model = teams.Everything()
    optimizer = inner(model.parameters())
    for step in steps:
        optimizer.zero_grad()
        own = [each for each in computed if each[0] == step]
        for each in own:
            (teams.loss_of(model, micro_batch(*each)) / len(own)).backward()
        optimizer.step()
    return model


def times_of(world_size, steps, passes, times=seconds):
    """(W, S, 2M): the ends of the parts of all micro-batches."""
    # forward passes that are not timed take no time
    parts = np.array([FORWARD, 1 - FORWARD] if passes == 2 else [0.0, 1.0])
    found = [
        [np.cumsum([parts * times(step, rank, m) for m in range(MICRO)]) for step in steps]
        for rank in range(world_size)
    ]
    return np.array(found)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("inner", [sgd, adam])
def test_a_step_is_that_of_one_process_on_the_computed_micro_batches(world_size, passes, inner):
    models, optimizers = team(world_size, inner, threshold=2.0)
    computed = []
    train(models, optimizers, range(8), computed=computed, passes=passes)
    assert teams.all_equal(models)
    expected = alone_over(computed, range(8), inner)
    torch.testing.assert_close(
        teams.vector_of(models[0]), teams.vector_of(expected), rtol=1e-9, atol=1e-11
    )
    # what is kept is what the times say
    kept = (known_times(times_of(world_size, range(8), passes)) < 2.0)[..., 1::2]
    assert sorted(computed) == sorted(
        (step, rank, m) for rank, step, m in zip(*np.nonzero(kept), strict=True)
    )
    dropped = (~kept).sum(axis=(1, 2))
    assert dropped.sum() > 0
    assert [each.dropped_micro_batches for each in optimizers] == dropped.tolist()
    assert [each.computed_micro_batches for each in optimizers] == kept.sum(axis=(1, 2)).tolist()
    for optimizer in optimizers:
        assert optimizer.dropped_share == pytest.approx(dropped.sum() / kept.size, rel=1e-6)


def stepped_on(rows):
    """The parameters after one step on all rows."""
    model = teams.Everything()
    inner = sgd(model.parameters())
    teams.loss_of(model, rows).backward()
    inner.step()
    return teams.vector_of(model)


@pytest.mark.parametrize("world_size", WORLDS)
def test_sizes_weight_the_micro_batches(world_size):
    models, optimizers = team(world_size)
    # two micro-batches on even ranks, three on odd ones, of one to three rows
    rows = [
        [torch.arange(rank + m, rank + m + 1 + m) for m in range(2 + rank % 2)]
        for rank in range(world_size)
    ]

    def step(rank):
        sizes = [len(each) / 2 for each in rows[rank]]
        for number, batch in enumerate(optimizers[rank].micro_batches(rows[rank], sizes)):
            (sizes[number] * teams.loss_of(models[rank], batch)).backward()
        yield from optimizers[rank].algorithm()

    lockstep([step(rank) for rank in range(world_size)])
    expected = stepped_on(torch.cat([each for own in rows for each in own]))
    for model in models:
        torch.testing.assert_close(teams.vector_of(model), expected, rtol=1e-9, atol=1e-12)


class ScriptedClock(ComputeClock):
    """A clock that a test sets forward."""

    def __init__(self, device="cpu"):
        super().__init__(torch.device(device))
        self.time_s = 0.0

    def record(self):
        return SimulatedTime(self.time_s)


def test_micro_batches_end_at_the_threshold_and_leave_the_rest():
    model, clock = nn.Linear(2, 2), ScriptedClock()
    optimizer = DropCompute(sgd(model.parameters()), micro_batches=4, threshold=2.0, clock=clock)

    def taken(batches, seconds_each):
        found = []
        for batch in optimizer.micro_batches(batches):
            found.append(batch)
            clock.time_s += seconds_each
        return found

    source = iter(range(10))
    # at least one, and one that has begun is finished
    assert taken(source, 100.0) == [0]
    assert taken(source, 1.5) == [1, 2]
    # at most as many as a step has
    assert taken(source, 0.25) == [3, 4, 5, 6]
    assert taken([], 1.0) == []
    optimizer.step()
    # what an iterator does not have is not dropped
    assert optimizer.dropped_micro_batches == 0

    # the time to wait for a micro-batch counts
    def slow():
        for number in range(4):
            clock.time_s += 1.0
            yield number

    assert taken(slow(), 0.0) == [0, 1]
    optimizer.step()
    assert optimizer.dropped_micro_batches == 2
    for _ in optimizer.micro_batches(range(4)):
        break
    optimizer.step()
    assert (optimizer.dropped_micro_batches, optimizer.computed_micro_batches) == (5, 3)


def test_ranks_without_micro_batches_contribute_nothing():
    models, optimizers = team(2)

    def step(rank):
        rows = [torch.arange(4), torch.arange(4, 8)] if rank else []
        for batch in optimizers[rank].micro_batches(rows):
            teams.loss_of(models[rank], batch).backward()
        yield from optimizers[rank].algorithm()

    lockstep([step(0), step(1)])
    # no rank has any: nothing is updated, and nothing is divided by zero
    for optimizer in optimizers:
        optimizer.zero_grad()
        list(optimizer.micro_batches([]))
    teams.step_all(optimizers)
    assert teams.all_equal(models)
    expected = stepped_on(torch.arange(8))
    torch.testing.assert_close(teams.vector_of(models[0]), expected, rtol=1e-9, atol=1e-12)


class FakeEvent:
    """An event of a GPU whose work is done only when something waits for it."""

    def __init__(self, gpu):
        self.gpu, self.number = gpu, len(gpu.queued)
        gpu.queued.append(self)

    def seconds_to(self, later):
        # the work that is still queued when the host waits
        self.gpu.behind.append(len(self.gpu.queued) - 1 - later.number)
        return self.gpu.ends_s[later.number] - self.gpu.ends_s[self.number]


class FakeGpu(ComputeClock):
    """Computes micro-batches of these lengths in each step."""

    def __init__(self, lengths_s):
        super().__init__(torch.device("cuda"))
        self.ends_s = [0.0, *np.cumsum(lengths_s)]
        self.queued, self.behind = [], []

    def record(self):
        return FakeEvent(self)


@pytest.mark.parametrize(("threshold", "expected"), [(None, 6), (2.5, 4), (1.0, 2), (0.5, 2)])
def test_the_host_does_not_wait_for_the_last_micro_batch_of_a_gpu(threshold, expected):
    def of(gpu, threshold=threshold, **options):
        inner = sgd(nn.Linear(2, 2).parameters())
        return DropCompute(inner, micro_batches=6, threshold=threshold, clock=gpu, **options)

    gpu = FakeGpu([1.0] * 6)
    assert len(list(of(gpu).micro_batches(range(6)))) == expected
    assert set(gpu.behind) <= {1}
    assert (threshold is None) == (not gpu.behind)
    # one pass later with separate passes, of which each is shorter
    gpu = FakeGpu([0.5] * 12)
    optimizer = of(gpu)
    kept = (known_times(np.cumsum([0.5] * 12), gpu.delay) < (threshold or np.inf))[1::2]
    value = torch.zeros((), requires_grad=True)
    done = [optimizer.backward(1 * value) for _ in optimizer.micro_batches(range(6))]
    assert sum(done) == kept.sum()
    assert set(gpu.behind) <= {1}
    # and not while it measures
    gpu = FakeGpu([1.0] * 6)
    optimizer = of(gpu, "auto", calibration=(1, 9))
    assert len(list(optimizer.micro_batches(range(6)))) == 6
    optimizer.step()
    assert gpu.behind == []


# --- the threshold


def speed_by_loops(times, overhead, threshold):
    """The effective speed, from its definition."""
    world_size, steps, parts = times.shape
    speeds, kept = [], 0
    for step in range(steps):
        full = max(times[rank, step, -1] for rank in range(world_size)) + overhead
        count, longest = 0, 0.0
        for rank in range(world_size):
            for part in range(parts):
                if part >= 2 and times[rank, step, part - 1] >= threshold:
                    break
                count += part % 2
                longest = max(longest, times[rank, step, part])
        kept += count
        speeds.append(count / (world_size * parts / 2) * full / (longest + overhead))
    return sum(speeds) / steps, 1 - kept / (times.size / 2)


def log_normal(world_size, steps, micro, sigma=1.0, seed=0):
    drawn = np.random.default_rng(seed).lognormal(0.0, sigma, (world_size, steps, 2 * micro))
    return np.cumsum(drawn, axis=2)


@pytest.mark.parametrize("max_dropped", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("overhead", [0.0, 3.0])
def test_the_chosen_threshold_is_the_best_within_the_limit(overhead, max_dropped):
    ends = log_normal(8, 20, 6)
    for threshold in (np.inf, *np.quantile(ends, [0.0, 0.3, 0.6, 0.9])):
        found = effective_speed(ends, overhead, threshold)
        expected = speed_by_loops(ends, overhead, threshold)
        assert (found.speed, found.dropped) == pytest.approx(expected)
    found = choose_threshold(ends, overhead, max_dropped)
    assert found.speed > 1
    assert 0 < found.dropped <= max_dropped
    expected = speed_by_loops(ends, overhead, found.seconds)
    assert (found.speed, found.dropped) == pytest.approx(expected)
    everything = [speed_by_loops(ends, overhead, each) for each in np.unique(ends)[::2]]
    best = max(speed for speed, dropped in everything if dropped <= max_dropped)
    # there are fewer candidates than times
    assert found.speed > 1 + 0.95 * (best - 1)


def test_nothing_is_dropped_if_that_does_not_help():
    # equal times
    ends = np.cumsum(np.ones((4, 5, 6)), axis=2)
    assert choose_threshold(ends, 0.5, 0.5).seconds == np.inf
    # an exchange that takes far longer than the computation
    assert choose_threshold(log_normal(4, 20, 6), 1e5, 0.1).seconds == np.inf
    # too few micro-batches for the delay
    assert not known_times(ends[..., :2], delay=1).any()
    assert choose_threshold(ends[..., :2], 0.0, 0.5, delay=1).seconds == np.inf


def noisy(seed, slow=lambda step: 1.0):
    drawn = np.random.default_rng(seed).lognormal(-3.0, 1.0, (5, 400, MICRO))
    return lambda step, rank, number: float(drawn[rank, step, number]) * slow(step)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("passes", [1, 2])
def test_all_ranks_select_the_threshold_that_the_times_of_the_calibration_predict(
    world_size, passes
):
    models, optimizers = team(world_size, threshold="auto", calibration=(3, 12), max_dropped=0.2)
    computed, times = [], noisy(4)
    train(models, optimizers, range(12), times=times, computed=computed, passes=passes)
    # nothing is dropped while it is measured
    assert len(computed) == world_size * 12 * MICRO
    thresholds = {optimizer.deadline.threshold_s for optimizer in optimizers}
    measured = times_of(world_size, range(2, 12), passes, times)
    expected = choose_threshold(measured, 0.0, 0.2)
    assert len(thresholds) == 1
    assert thresholds.pop() == pytest.approx(expected.seconds if world_size > 1 else np.inf)
    train(models, optimizers, range(12, 60), times=times, passes=passes)
    assert teams.all_equal(models)
    assert (optimizers[0].dropped_share > 0) == (world_size > 1)
    assert optimizers[0].dropped_share < 0.4


def test_it_measures_again_if_more_is_dropped_than_the_limit_permits():
    times = noisy(5, lambda step: 3.0 if step >= 30 else 1.0)
    models, optimizers = team(3, threshold="auto", calibration=(1, 15), max_dropped=0.2)
    train(models, optimizers, range(30), times=times)
    before = optimizers[0].deadline.threshold_s
    # everything takes three times as long
    train(models, optimizers, range(30, 60), times=times)
    after = {each.deadline.threshold_s for each in optimizers}
    assert len(after) == 1
    assert after.pop() > 1.5 * before
    assert teams.all_equal(models)


# --- resuming


OPTIONS = {
    "given": {"threshold": 2.0},
    "sign": {"threshold": 2.0, "compress": Sign(block=64), "dtype": torch.float32},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_run_resumes_from_any_step(options):
    models, optimizers = team(3, adam, **options)
    states = {}

    def keep(step, rank):
        state = teams.saved(optimizers[rank].state_dict())
        states[step, rank] = state, copy.deepcopy(models[rank].state_dict())

    train(models, optimizers, range(12), each=keep)
    assert optimizers[0].dropped_share > 0
    for step in range(11):
        again, others = team(3, adam, **options)
        for rank, other in enumerate(others):
            state, weights = states[step, rank]
            other.load_state_dict(state)
            again[rank].load_state_dict(weights)
        train(again, others, range(step + 1, 12))
        assert torch.equal(teams.vectors_of(again), teams.vectors_of(models)), step
        for other, optimizer in zip(others, optimizers, strict=True):
            assert other.dropped_micro_batches == optimizer.dropped_micro_batches
            assert other.computed_micro_batches == optimizer.computed_micro_batches
            assert other.dropped_share == optimizer.dropped_share


@pytest.mark.parametrize(("old", "new"), [(3, 3), (3, 2), (2, 3), (3, 1)])
def test_a_resumed_run_measures_again(old, new):
    options = {"threshold": "auto", "calibration": SHORT, "max_dropped": 0.3}
    models, optimizers = team(old, **options)
    train(models, optimizers, range(10))
    states = [teams.saved(optimizer.state_dict()) for optimizer in optimizers]
    assert not optimizers[0].deadline.is_calibrating
    again, others = team(new, **options)
    for rank, other in enumerate(others):
        other.load_state_dict(resize_state(states, rank, new))
        again[rank].load_state_dict(models[0].state_dict())
        assert other.deadline.threshold_s == np.inf
    train(again, others, range(10, 20))
    assert teams.all_equal(again)
    assert not others[0].deadline.is_calibrating


# --- wrong use


def test_bad_micro_batches_are_an_error():
    optimizer = DropCompute(sgd(nn.Linear(2, 2).parameters()), micro_batches=2)
    with pytest.raises(ValueError, match=r"(?s)3 micro-batches for a step of at most 2.*hint: "):
        optimizer.micro_batches([1, 2, 3])
    with pytest.raises(ValueError, match="1 sizes for 2 micro-batches"):
        optimizer.micro_batches([1, 2], [1.0])
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="sizes are "):
            optimizer.micro_batches([1, 2], [1.0, bad])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_without_counted_micro_batches_is_an_error(ranks):
    models, optimizers = team(ranks)
    before = teams.vectors_of(models)
    for rank, model in enumerate(models):
        teams.loss_of(model, micro_batch(0, rank, 0)).backward()
    message = r"(?s)`micro_batches` was not iterated since .*hint: .*micro_batches\(batches\)"
    with pytest.raises(ValueError, match=message):
        teams.step_all(optimizers)
    assert torch.equal(teams.vectors_of(models), before)


def test_models_that_communicate_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    with pytest.raises(ValueError, match=r"(?s)module '1' is a SyncBatchNorm.*hint: use BatchNorm"):
        DropCompute(sgd(model.parameters()), micro_batches=2, module=model)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert DropCompute(sgd(model.parameters()), micro_batches=2, module=model)
