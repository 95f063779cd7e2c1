"""1-bit Adam: AdamW, inactive elements, clipping, its variance."""

import pytest
import torch
from optim.teams import Everything, batches, loss_of, of_group, step_all
from torch import nn

from gcnzc.exchange import Group
from gcnzc.optim import OneBitAdam, OneBitLamb


def small_team(world_size, shapes=((6, 4), (5,)), kind=OneBitAdam, **options):
    """Optimizers of a few parameters, which are given gradients by hand."""
    torch.manual_seed(1)
    values = [torch.randn(shape) for shape in shapes]
    models = [[nn.Parameter(value.clone()) for value in values] for _ in range(world_size)]
    options = {"lr": 0.01, **options}
    return models, of_group(models, lambda model, group: kind(model, group=group, **options))


def give(models, seed, scale=1.0):
    """Other gradients to every worker."""
    generator = torch.Generator().manual_seed(seed)
    for model in models:
        for parameter in model:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * scale


def flat(model):
    return torch.cat([parameter.detach().view(-1) for parameter in model])


def gradients_of(models):
    return torch.stack([torch.cat([each.grad.view(-1) for each in model]) for model in models])


# --- what is known of it


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_worker_is_adamw_to_the_bit(dtype):
    def parts(model):
        return [
            {"params": model.table.parameters(), "weight_decay": 0.0, "betas": (0.8, 0.99)},
            {"params": [*model.first.parameters(), model.tied.bias], "lr": 0.02},
            {"params": [model.unused]},
        ]

    def learn(make):
        model = Everything().to(dtype)
        optimizer = make(parts(model), lr=0.01, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
        for rows in batches(20):
            optimizer.zero_grad()
            # `rare` is left out: AdamW counts its steps from its first gradient
            loss_of(model, rows).backward()
            optimizer.step()
            scheduler.step()
        return model

    expected = learn(torch.optim.AdamW)
    found = learn(lambda *given, **options: OneBitAdam(*given, group=Group(), **options))
    # averages of bfloat16 are kept in float32 here
    exactly = {"rtol": 0, "atol": 0} if dtype != torch.bfloat16 else {"rtol": 0.05, "atol": 0.05}
    for mine, right in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, right, **exactly)


def test_an_uncompressed_group_exchanges_gradients_and_updates_its_variance():
    torch.manual_seed(3)
    start, coded = torch.randn(6), torch.randn(4)
    models, optimizers = [], []
    for rank in range(2):
        models.append([nn.Parameter(each.clone()) for each in (coded, start, torch.ones(3))])
        groups = [{"params": models[rank][:1]}, {"params": models[rank][1:], "compress": False}]
        optimizers.append(OneBitAdam(groups, warmup=3, group=Group(rank, 2)))
    alone = nn.Parameter(start.clone())
    expected = torch.optim.AdamW([alone])
    for number in range(9):
        give(models, number)
        if number < 5:
            # for the first time after the freeze
            for model in models:
                model[2].grad = None
        alone.grad = (models[0][1].grad + models[1][1].grad) / 2
        expected.step()
        step_all(optimizers)
        assert bool((models[0][2] == 1).all()) == (number < 5)
        torch.testing.assert_close(models[0][1], alone, rtol=1e-5, atol=1e-6)
        assert torch.equal(*map(flat, models))


# --- elements without gradients


def embeddings(steps, half_at=lambda number: True, **options):
    """A table of 64 rows of which two workers look up the even ones alone, at some steps."""
    torch.manual_seed(0)
    start = torch.randn(64, 8)
    tables = [nn.Parameter(start.clone()) for _ in range(2)]
    make = lambda table, group: OneBitAdam([table], lr=0.01, group=group, **options)  # noqa: E731
    optimizers = of_group(tables, make)
    for number in range(steps):
        for rank, table in enumerate(tables):
            generator = torch.Generator().manual_seed(100 * number + rank)
            rows = torch.randint(0, 64, (16,), generator=generator)
            table.grad = None
            rows = rows // 2 * 2 if half_at(number) else rows
            (table[rows] - 1).square().mean().backward()
        step_all(optimizers)
    assert torch.equal(*tables)
    return start, tables[0].detach(), optimizers[0]


def test_rows_that_were_never_looked_up_only_decay():
    start, table, optimizer = embeddings(30, warmup=5, weight_decay=0.1)
    assert optimizer.is_frozen
    decayed = start[1::2] * (1 - 0.01 * 0.1) ** 30
    torch.testing.assert_close(table[1::2], decayed, rtol=1e-5, atol=1e-6)
    assert float(table.abs().max()) < 5
    assert float((table[::2] - 1).square().mean()) < float((start[::2] - 1).square().mean())


@pytest.mark.parametrize(("floor", "explodes"), [(1e-4, False), (0.0, True)])
def test_rows_that_were_looked_up_long_ago_do_not_explode(floor, explodes):
    late = lambda number: number > 0  # noqa: E731
    start, table, _ = embeddings(120, late, warmup=100, betas=(0.8, 0.8), variance_floor=floor)
    moved = float((table[1::2] - start[1::2]).abs().max())
    assert (moved > 100) == explodes
    assert explodes or moved < 5


def test_rows_that_are_looked_up_later_may_wait_for_a_refresh():
    early = lambda number: number < 10  # noqa: E731
    start, table, _ = embeddings(60, early, warmup=5, weight_decay=0.0, reactivate="refresh")
    assert torch.equal(table[1::2], start[1::2])


def test_a_parameter_with_its_only_gradient_in_a_compressed_step_is_updated():
    models, optimizers = small_team(2, warmup=2, weight_decay=0.0)
    start = models[0][1].detach().clone()
    for number in range(8):
        give(models, number)
        for model in models:
            model[1].grad = model[1].grad if number == 4 else None
        step_all(optimizers)
        # the gradient is pending until the next step, which exchanges gradients
        assert torch.equal(models[0][1], start) == (number < 5)


def test_a_gradient_too_small_for_a_variance_reactivates_nothing():
    models, optimizers = small_team(2, shapes=[(40,)], warmup=2)
    for number in range(6):
        give(models, number)
        for model in models:
            model[0].grad[:20] = 1e-25 if number > 2 else 0.0
        assert number < 2 or not optimizers[0].is_gradient_step
        step_all(optimizers)


# --- clipping and the variance


@pytest.mark.parametrize("warmup", [100, 2])
def test_all_ranks_clip_by_the_same_factor(warmup):
    models, optimizers = small_team(3, warmup=warmup, clip_norm=0.5)
    plain, others = small_team(3, warmup=warmup)
    for number in range(5):
        give(models, number, 10.0)
        give(plain, number, 10.0)
        gradients = gradients_of(plain)
        # the root of the mean of squares in a compressed step, since nobody has the mean
        norm = gradients.square().sum(1).mean().sqrt()
        if optimizers[0].is_gradient_step:
            norm = gradients.mean(dim=0).norm()
        for model in plain:
            for parameter in model:
                parameter.grad *= min(1.0, 0.5 / float(norm))
        step_all(optimizers)
        step_all(others)
        torch.testing.assert_close(flat(models[0]), flat(plain[0]), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(flat(model), flat(models[0])) for model in models)


def norms_until_frozen(norm_at, **options):
    """After how many steps the optimizers freeze if gradients have these norms; 0 if never."""
    options = {"betas": (0.0, 0.9), "warmup": None, **options}
    models, optimizers = small_team(2, shapes=[(8,)], **options)
    for number in range(1, 200):
        for model in models:
            # so that the variance has this norm
            model[0].grad = torch.full((8,), norm_at(number))
        # as if other numbers of threads had rounded the norm
        optimizers[1].variance *= 1 + 1e-6
        step_all(optimizers)
        assert optimizers[0].frozen_at == optimizers[1].frozen_at
        assert optimizers[0].norms == optimizers[1].norms
        if optimizers[0].frozen_at:
            break
    return optimizers[0].frozen_at


@pytest.mark.parametrize(
    ("norm_at", "options", "expected"),
    [
        # the variance is compared every ten steps
        (lambda step: 1.0, {}, 30),
        # neither growth nor decline is stable; the paper's rule would take the first for settled
        (lambda step: 1.05 ** (step / 10), {}, 50),
        (lambda step: 1.05 ** (step / 10), {"total_steps": 1000}, 50),
        (lambda step: 2.0**step, {"total_steps": 132}, 33),
    ],
    ids=["stable", "growing", "growing in a known run", "at most"],
)
@pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb])
def test_it_freezes_by_itself_when_the_variance_is_stable(kind, norm_at, options, expected):
    assert norms_until_frozen(norm_at, kind=kind, **options) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # by the first step of each: 3, 6, 12, 24 from the freeze
        ({"refresh": 3, "refresh_steps": 1}, [7, 10, 16, 28]),
        ({"refresh": 3, "refresh_steps": 2}, [7, 8, 10, 11, 16, 17, 28, 29]),
        ({"refresh": 3}, [7, 8, 9, 10, 11, 12, 16, 17, 18, 28, 29, 30]),
    ],
)
def test_intervals_between_variance_refreshes_double(options, expected):
    models, optimizers = small_team(2, warmup=4, betas=(0.9, 0.99), variance_floor=0.0, **options)
    gradient_steps, variances = [], {}
    for number in range(1, 32):
        if optimizers[0].is_gradient_step:
            gradient_steps.append(number)
        give(models, number)
        step_all(optimizers)
        variances[number] = optimizers[0].variance.clone()
        if number > 4 and number not in expected:
            assert torch.equal(variances[number], variances[number - 1])
    assert gradient_steps == [1, 2, 3, 4, *expected]


def test_a_refresh_decays_the_variance_like_all_steps_since_the_last_one():
    models, optimizers = small_team(
        2, warmup=2, betas=(0.9, 0.9), variance_floor=0.0, refresh=8, refresh_steps=4
    )
    give(models, 0)
    for number in range(1, 22):
        if number in (3, 14):
            frozen = optimizers[0].variance.clone()
            give(models, 0, 3.0 if number == 3 else 0.5)
            square = gradients_of(models).mean(dim=0).square()
        step_all(optimizers)
        if number in (13, 21):
            # the same gradient all the time, over 11 and 8 steps
            kept = 0.9 ** (11 if number == 13 else 8)
            expected = kept * frozen + (1 - kept) * square
            torch.testing.assert_close(optimizers[0].variance, expected)
