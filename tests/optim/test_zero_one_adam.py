"""0/1 Adam: its schedule, its steps against plain loops, inactive rows."""

import math
from itertools import pairwise

import pytest
import torch
from optim.teams import all_equal, of_group, step_all, vector_of
from torch import nn

from gcnzc.compress import Dense, Sign
from gcnzc.optim import ZeroOneAdam, ZeroOneSchedule

# refreshes 1 2 3 5 7, agreements 4 6 8 9 10, then windows of 2 from 11 and of 4 from 15
SHORT = ZeroOneSchedule(warmup=8, variance_doubling=2, local_doubling=4, max_local_interval=4)
ROWS, COLUMNS = 12, 5


class Rows(nn.Module):
    """A linear model of rows that are given, in float64 unless told otherwise."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first = nn.Parameter(torch.randn(COLUMNS, 7, generator=generator, dtype=dtype))
        self.second = nn.Parameter(torch.randn(7, generator=generator, dtype=dtype))

    def loss(self, rows):
        product = torch.tanh(rows @ self.first) @ self.second.to(rows.dtype)
        return (product - rows.sum(dim=1)).square().mean()


def made(world_size, dtype=torch.float64, **options):
    models = [Rows(dtype) for _ in range(world_size)]
    return models, optimizers_of(models, **options)


def optimizers_of(models, **options):
    options = {"lr": 0.01, "schedule": SHORT, **options}
    return of_group(
        models, lambda model, group: ZeroOneAdam(model.parameters(), group=group, **options)
    )


def differentiate(models, step):
    for rank, model in enumerate(models):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        rows = torch.randn(ROWS, COLUMNS, generator=generator, dtype=model.first.dtype)
        model.zero_grad()
        model.loss(rows).backward()


def train(models, optimizers, end, begin=0):
    for step in range(begin + 1, end + 1):
        differentiate(models, step)
        outcome = step_all(optimizers)
    return outcome


# --- the schedule


def test_intervals_between_refreshes_double():
    schedule = ZeroOneSchedule(None, variance_doubling=2)
    found = [step for step in range(1, 40) if schedule.updates_variance(step)]
    # k_0 = 1, and k_(j + 1) - k_j = 2 ** (j // 2)
    expected = [1]
    while expected[-1] < 40:
        expected.append(expected[-1] + 2 ** ((len(expected) - 1) // 2))
    assert found == expected[:-1]


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_synchronization_precedes_each_variance_update(goes_on):
    options = {"variance_doubling": 3, "local_doubling": 30, "max_local_interval": 8}
    schedule = ZeroOneSchedule(20, **options, updates_variance_after_warmup=goes_on)
    kinds = [schedule.exchange(step) for step in range(1, 2000)]
    assert set(kinds) == {"gradient", "update", "nothing"}
    for before, kind in pairwise(kinds):
        assert kind != "gradient" or before != "nothing"
    windows = "".join("-" if kind == "nothing" else "|" for kind in kinds).split("|")
    assert max(map(len, windows)) == schedule.max_local_interval - 1
    assert "nothing" not in kinds[:50]
    assert ("gradient" in kinds[500:]) == goes_on


def test_traffic_of_the_bert_schedule():
    steps, n, world_size = 118_000, 10**8, 16
    schedule = ZeroOneSchedule(warmup=12_500, local_doubling=32_678, max_local_interval=16)
    kinds = [schedule.exchange(step) for step in range(1, steps + 1)]
    counts = {kind: kinds.count(kind) for kind in ("gradient", "update", "nothing")}
    assert counts["gradient"] == 153
    # as float16 is 16 bits
    bits = (16 * counts["gradient"] + counts["update"]) / steps
    assert f"{bits:.3f}" == "0.618"
    # the same of what is really sent, scales and all
    whole = Dense(torch.float16).bytes_sent(n, world_size)
    signs = Sign().bytes_sent(n, world_size, 2)
    sent = counts["gradient"] * whole + counts["update"] * signs
    both_ways = 2 * (world_size - 1) / world_size
    assert sent * 8 / (n * steps * both_ways) <= 0.63


# --- its steps


def write(model, values):
    with torch.no_grad():
        nn.utils.vector_to_parameters(values.clone(), model.parameters())


OPTIONS = {"lr": 0.02, "betas": (0.85, 0.98), "eps": 1e-6, "weight_decay": 0.2}


def slow_zero_one(steps, world_size, options, schedule):
    """0/1 Adam without compression, a plain loop: parameters are averaged, not updates."""
    models = [Rows() for _ in range(world_size)]
    beta1, beta2 = options["betas"]
    lr, kept = options["lr"], 1 - options["lr"] * options["weight_decay"]
    momenta, variance, refreshes = [0.0] * world_size, 0.0, 0
    anchor, length = vector_of(models[0]), 0.0
    for step in range(1, steps + 1):
        differentiate(models, step)
        gradients = [torch.cat([p.grad.reshape(-1) for p in m.parameters()]) for m in models]
        if schedule.updates_variance(step):
            gradients = [sum(gradients) / world_size] * world_size
            variance = beta2 * variance + (1 - beta2) * gradients[0] ** 2
            refreshes += 1
        root = (variance / (1 - beta2**refreshes)).sqrt() + options["eps"]
        size = lr / (1 - beta1**step)
        for rank, model in enumerate(models):
            momenta[rank] = beta1 * momenta[rank] + (1 - beta1) * gradients[rank]
            write(model, vector_of(model) * kept - size * momenta[rank] / root)
        anchor, length = anchor * kept, length * kept + size
        if schedule.exchange(step) != "nothing":
            mean = sum(vector_of(model) for model in models) / world_size
            for model in models:
                write(model, mean)
            momenta = [(anchor - mean) * root / length] * world_size
            anchor, length = mean, 0.0
    return [vector_of(model) for model in models]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("goes_on", [False, True])
def test_without_compression_a_synchronization_is_the_mean_of_local_steps(world_size, goes_on):
    schedule = ZeroOneSchedule(8, 2, 4, 4, updates_variance_after_warmup=goes_on)
    for steps in (23, 24):
        options = {**OPTIONS, "schedule": schedule, "compress": Dense(), "variance_floor": 0.0}
        models, optimizers = made(world_size, **options)
        train(models, optimizers, steps)
        expected = slow_zero_one(steps, world_size, OPTIONS, schedule)
        for model, right in zip(models, expected, strict=True):
            torch.testing.assert_close(vector_of(model), right, rtol=1e-8, atol=1e-10)
        assert optimizers[0].is_out_of_sync == (schedule.exchange(steps) == "nothing")


def test_replicas_are_bitwise_equal_after_each_synchronization_and_differ_between():
    models, optimizers = made(3, dtype=torch.float32, weight_decay=0.1)
    kinds = [SHORT.exchange(step) for step in range(1, 41)]
    for step, kind in enumerate(kinds, 1):
        assert optimizers[0].exchange == kind
        train(models, optimizers, step, step - 1)
        assert all_equal(models) == (kind != "nothing")
    assert kinds.count("nothing") > 10


def test_the_papers_form_has_no_bias_correction():
    always = ZeroOneSchedule(None, variance_doubling=10**9)
    corrected, plain = (made(1, schedule=always, bias_correction=each) for each in (True, False))
    before = vector_of(corrected[0][0])
    for pair in (corrected, plain):
        train(*pair, 1)
    first, other = (vector_of(models[0]) - before for models, _ in (corrected, plain))
    # (1 - b1) / sqrt(1 - b2) of the corrected step
    weight = torch.full_like(first, 0.1 / math.sqrt(0.001))
    decayed = before * 0.01 * 0.01
    torch.testing.assert_close((other + decayed) / (first + decayed), weight, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_excluded_group_is_exchanged_at_every_step(dtype):
    models = [Rows(torch.float32) for _ in range(2)]
    for model in models:
        model.second.data = model.second.data.to(dtype)

    def make(model, group):
        groups = [{"params": [model.first]}, {"params": [model.second], "compress": False}]
        return ZeroOneAdam(groups, lr=0.01, schedule=SHORT, group=group)

    optimizers = of_group(models, make)
    for step in range(1, 25):
        kind = optimizers[0].exchange
        outcome = train(models, optimizers, step, step - 1)
        assert torch.equal(models[0].second, models[1].second)
        assert torch.equal(models[0].first, models[1].first) == (kind != "nothing")
        if step > 1:
            assert outcome.ledgers[0].requests == {"gradient": 1, "update": 3, "nothing": 1}[kind]


def test_gradients_are_clipped_by_one_factor_in_exchanged_steps():
    norms = {}
    for clip_norm in (0.1, None):
        models, optimizers = made(2, clip_norm=clip_norm, compress=Dense(), eps=1e-3)
        train(models, optimizers, 23)
        norms[clip_norm] = float(optimizers[0].momentum.norm())
        train(models, optimizers, 24, 23)
        assert all_equal(models)
    assert 0 < norms[0.1] <= 0.1 < norms[None]


def test_in_a_local_step_a_non_finite_gradient_is_replaced_by_the_momentum():
    (models, optimizers), (twins, others) = (
        made(3, compress=Dense(), weight_decay=0.1) for _ in range(2)
    )
    for pair in ((models, optimizers), (twins, others)):
        train(*pair, 14)
        differentiate(pair[0], 15)
    models[1].second.grad[0] = math.nan
    # what leaves a momentum as it is
    first, second = others[1].momentum.split([7 * COLUMNS, 7])
    twins[1].first.grad.copy_(first.view(COLUMNS, 7))
    twins[1].second.grad.copy_(second)
    for each in (optimizers, others):
        step_all(each)
    assert [optimizer.num_nonfinite for optimizer in optimizers] == [0, 1, 0]
    assert [optimizer.steps for optimizer in optimizers] == [15] * 3
    assert "rank 1 uses its unchanged momentum" in optimizers[1].skip_reason
    assert optimizers[0].skip_reason == ""
    for model, twin in zip(models, twins, strict=True):
        torch.testing.assert_close(vector_of(model), vector_of(twin))
    train(models, optimizers, 16, 15)
    assert optimizers[1].skip_reason == ""
    assert all_equal(models)


# --- inactive rows


class Table(nn.Module):
    """Rows that are looked up: even ones alone."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(64, 8))

    def loss(self, rows):
        return (self.table[rows] - rows[:, None] / 64).square().mean()


def tables(world_size, weight_decay=0.0):
    models = [Table() for _ in range(world_size)]
    return models, optimizers_of(models, weight_decay=weight_decay)


def look_up(models, optimizers, steps, extra=None):
    """Steps with random even rows; `extra(rank, step)` is another row, or None."""
    for step in steps:
        for rank, model in enumerate(models):
            generator = torch.Generator().manual_seed(100 * step + rank)
            rows = torch.randint(0, 32, (16,), generator=generator) * 2
            if extra is not None and (row := extra(rank, step)) is not None:
                rows = torch.cat([rows, torch.tensor([row])])
            model.zero_grad()
            model.loss(rows).backward()
        step_all(optimizers)


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_that_were_never_looked_up_stay(world_size):
    models, optimizers = tables(world_size, weight_decay=0.1)
    look_up(models, optimizers, range(1, 41))
    expected = torch.full((32, 8), (1 - 0.01 * 0.1) ** 40)
    torch.testing.assert_close(models[0].table[1::2].detach(), expected)
    assert not torch.equal(models[0].table[::2], torch.ones(32, 8))
    assert models[0].table.abs().max() < 1.5


# in a step alone, and in one of agreement
@pytest.mark.parametrize("when", [15, 16])
def test_a_row_that_one_rank_looks_up_once_is_reactivated(when):
    models, optimizers = tables(2)
    once = lambda rank, step: 41 if (rank, step) == (1, when) else None  # noqa: E731
    look_up(models, optimizers, range(1, 17), once)
    # the row waits for a step with gradients, whatever the schedule says
    assert SHORT.exchange(17) == "nothing"
    assert [optimizer.exchange for optimizer in optimizers] == ["gradient"] * 2
    assert all(torch.equal(model.table[41], torch.ones(8)) for model in models)
    look_up(models, optimizers, [17])
    # its variance is the mean of the squares of three steps' gradients, of which two are 0
    moved = 1 - models[0].table[41].detach()
    expected = torch.full((8,), 0.01 * 0.1 * 3**0.5 / (1 - 0.9**17))
    torch.testing.assert_close(moved, expected, rtol=0.01, atol=0)
    assert torch.equal(models[0].table[43], torch.ones(8))
    assert optimizers[0].exchange == "nothing"
    look_up(models, optimizers, range(18, 41))
    assert all_equal(models)
    assert models[0].table.abs().max() < 1.5


def test_gradient_steps_become_rare_if_rows_are_reactivated_continually():
    models, optimizers = tables(2)
    look_up(models, optimizers, range(1, 17))
    with_gradients = []
    for step in range(17, 81):
        if optimizers[0].exchange == "gradient" and SHORT.exchange(step) != "gradient":
            with_gradients.append(step)
        look_up(
            models, optimizers, [step], lambda rank, step: (2 * step + 1) % 64 if rank else None
        )
    gaps = torch.tensor(with_gradients).diff().tolist()
    assert 2 <= len(gaps) <= 6
    assert all(later >= 2 * gap - 4 for gap, later in pairwise(gaps))
    # all have joined that had a gradient before the last of them
    assert bool((models[0].table[1::2] != 1).any(dim=1).all())
    assert models[0].table.abs().max() < 1.5
