"""What every method promises of gradients that are not finite, too large, scaled or clipped."""

import copy
import functools
import math

import pytest
import torch
from optim import methods
from optim.teams import (
    are_all_finite,
    finalize,
    finish_pending,
    of_ranks,
    set_noise,
    step_all,
    vector_of,
    vectors_of,
)
from simulated_ranks import simulate
from torch import nn

from gcnzc.compress import Dense
from gcnzc.exchange import Group, lockstep
from gcnzc.kernels.finite import square_limit
from gcnzc.optim import LocalSGD

# steps with a bad gradient on rank 1: in the warm-up or before the first synchronization, and after
# it, before an exchange
BAD, END = (2, 6), 12
LIMIT = square_limit(torch.float32)


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8).to(dtype), nn.Tanh(), nn.Linear(8, 2))


def make_team(name, dtype=torch.float32, **options):
    models = [make_model(dtype) for _ in range(2)]
    return models, methods.CASES[name].optimizers(models, **options)


def give_gradients(models, step, large=None, scale=1.0):
    for rank, model in enumerate(models):
        set_noise(model, 10 * step + rank, scale)
    if large is not None:
        models[1][2].weight.grad[1, 3] = large


def take_step(optimizers):
    step_all(optimizers)
    finish_pending(optimizers)
    assert all(are_all_finite(optimizer.snapshot()) for optimizer in optimizers)


def skipped_by(optimizers):
    return [optimizer.skipped for optimizer in optimizers]


@functools.cache
def trained(name, large, calls_bad_steps=True, dtype=torch.float32):
    """The parameters after each step and at the end, and the optimizers.

    The first layer has this dtype, the last one, with the bad gradients, float32.
    """
    models, optimizers = make_team(name, dtype)
    found = []
    for step in range(1, END + 1):
        give_gradients(models, step, large if step in BAD else None)
        if calls_bad_steps or step not in BAD:
            take_step(optimizers)
        found.append(vectors_of(models))
    finalize(optimizers)
    return torch.stack([*found, vectors_of(models)]), optimizers


@pytest.mark.parametrize("large", [1e30, -1e38])
@pytest.mark.parametrize("name", methods.METHODS)
def test_training_goes_on_as_after_a_gradient_that_is_not_finite(name, large):
    found, optimizers = trained(name, large)
    expected, others = trained(name, math.nan)
    assert torch.equal(found, expected)
    for own, other in zip(optimizers, others, strict=True):
        assert (own.skipped, own.steps) == (other.skipped, other.steps)
    assert torch.equal(*found[-1])
    assert found[-1].isfinite().all()
    # training has gone on
    assert not any(map(torch.equal, found[-1], found[max(BAD)]))
    # with local steps, only the rank with the gradient skips its step
    if name in methods.EVERY_STEP:
        assert skipped_by(optimizers) == [len(BAD)] * 2
    elif name in methods.LOCAL:
        assert skipped_by(optimizers) == [0, len(BAD)]


@pytest.mark.parametrize("large", [1e30, math.inf])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in methods.EVERY_STEP), ("averaged sign", torch.float64)],
)
def test_ranks_that_exchange_in_every_step_go_on_as_if_the_step_was_not_taken(name, dtype, large):
    found, _ = trained(name, large, dtype=dtype)
    expected, _ = trained(name, large, calls_bad_steps=False, dtype=dtype)
    assert torch.equal(found, expected)
    assert torch.equal(found[:, 0], found[:, 1])


@pytest.mark.parametrize("name", methods.EVERY_STEP)
def test_the_message_names_the_rank_and_the_number_of_elements(name):
    models, optimizers = make_team(name)
    give_gradients(models, 1, 1e30)
    take_step(optimizers)
    for optimizer in optimizers:
        assert optimizer.skip_reason.endswith("not finite or too large: rank 1 has 1")
        assert optimizer.steps == 0


@pytest.mark.parametrize("name", methods.METHODS)
@pytest.mark.parametrize("large", [LIMIT / 4, -LIMIT / 4])
def test_gradients_below_the_limit_are_used_and_do_not_overflow(name, large):
    models, optimizers = make_team(name)
    for step in range(1, END + 1):
        give_gradients(models, step, large if step == BAD[0] else None)
        take_step(optimizers)
    assert skipped_by(optimizers) == [0, 0]


@pytest.mark.parametrize("name", methods.REPLICATED)
def test_all_elements_just_below_the_limit_in_every_step_do_not_overflow(name):
    models, optimizers = make_team(name)
    for step in range(1, END + 1):
        for model in models:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, LIMIT * (-1.0) ** step * 0.99)
        take_step(optimizers)
    assert skipped_by(optimizers) == [0, 0]


@pytest.mark.parametrize("name", methods.METHODS)
def test_a_single_rank_skips_the_step(name):
    model = nn.Linear(3, 2)
    optimizer = methods.METHODS[name].make(model, Group())
    for step in range(1, 5):
        model.weight.grad, model.bias.grad = torch.ones(2, 3), torch.ones(2)
        if step == 2:
            model.weight.grad[1, 1] = -1e30
            before = copy.deepcopy(model.state_dict())
        optimizer.step()
        if step == 2:
            assert "not finite or too large" in optimizer.skip_reason
            assert all(map(torch.equal, model.state_dict().values(), before.values()))
        assert are_all_finite(optimizer.snapshot())
    assert optimizer.skipped == 1
    assert not torch.equal(model.weight, before["weight"])


@pytest.mark.parametrize("name", methods.REPLICATED)
@pytest.mark.parametrize("large", [1e18, 1e30])
def test_clipped_gradients_are_not_too_large(name, large):
    models, optimizers = make_team(name, clip_norm=1.0)
    for step in range(1, END + 1):
        give_gradients(models, step, large if step in BAD else None)
        take_step(optimizers)
    assert skipped_by(optimizers) == [0, 0]
    assert torch.equal(*vectors_of(models))


@pytest.mark.parametrize("name", methods.REPLICATED)
def test_sums_in_a_short_dtype_do_not_overflow_the_state(name):
    found = []
    for large in (1e30, math.nan):
        models, optimizers = make_team(name, gradient_compression=Dense(torch.float16))
        for step in range(1, END + 1):
            give_gradients(models, step, large if step in BAD else None)
            take_step(optimizers)
        found.append(vectors_of(models))
    assert torch.equal(*found)


def test_the_limit_is_that_of_the_mean_of_gradients_without_compression():
    models, optimizers = make_team("averaged")
    for step, (factor, skipped) in enumerate(((1.9, 0), (2.1, 1)), 1):
        give_gradients(models, step, factor * LIMIT)
        take_step(optimizers)
        assert skipped_by(optimizers) == [skipped] * 2


def test_sparse_gradients_that_are_too_large_are_skipped():
    models = [nn.Embedding(5, 2, sparse=True) for _ in range(2)]
    inner = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    optimizers = methods.METHODS["averaged"].optimizers(models, inner=inner)
    for step, large in enumerate([1.0, 1e30], 1):
        for rank, model in enumerate(models):
            values = torch.tensor([[1.0, large if rank else 1.0]])
            model.weight.grad = torch.sparse_coo_tensor(
                [[rank]], values, (5, 2), check_invariants=False
            )
        before = vector_of(models[0])
        step_all(optimizers)
        assert torch.equal(vector_of(models[0]), before) == (step == 2)
    assert optimizers[0].skip_reason.endswith("rank 1 has 1")


@pytest.mark.parametrize("bad", [1e30, math.nan, math.inf])
@pytest.mark.parametrize("name", methods.LOCAL_CASES)
def test_a_rank_with_parameters_that_are_too_large_is_excluded_from_the_mean(name, bad):
    models, optimizers = make_team(name)
    if name.startswith("fedglomo of"):
        return  # a rank that does not take part has no mean to be excluded from
    reasons = set()
    for step in range(1, END + 1):
        give_gradients(models, step)
        if step == BAD[0]:
            with torch.no_grad():
                models[1][0].weight[0, 0] = bad
            for moments in optimizers[1].state[models[1][0].weight].values():
                # large ones are used
                if isinstance(moments, torch.Tensor) and moments.ndim and not math.isfinite(bad):
                    moments[0, 0] = bad
        step_all(optimizers)
        finish_pending(optimizers)
        reasons |= {optimizer.skip_reason for optimizer in optimizers}
    finalize(optimizers)
    assert torch.equal(*vectors_of(models))
    assert vector_of(models[0]).abs().amax() < 10
    assert [optimizer.dropped for optimizer in optimizers] == [1, 1]
    assert any("not finite or too large" in reason for reason in reasons)
    # moments that are not finite begin anew
    assert all(are_all_finite(optimizer.snapshot()) for optimizer in optimizers)


# --- elements whose gradients are not exchanged yet

WARMUP, FIRST, LAST = 10, 20, 26
ROW = 3  # without a gradient until step FIRST


def train_row(name, steps, bad=None, scale=1.0, **options):
    tables = [nn.Parameter(torch.ones(8, 4)) for _ in range(2)]
    models = [nn.ParameterList([table]) for table in tables]
    optimizers = methods.METHODS[name].optimizers(models, **options)
    reasons = []
    for step in range(1, steps + 1):
        for rank, table in enumerate(tables):
            generator = torch.Generator().manual_seed(100 * step + rank)
            table.grad = torch.randn(table.shape, generator=generator)
            table.grad[ROW] *= step >= FIRST
            if step >= FIRST:
                table.grad.abs_().mul_(scale)
            if bad is not None and step == WARMUP + 2 and rank == 0:
                table.grad[ROW, 0] = bad
        take_step(optimizers)
        reasons.append(optimizers[1].skip_reason)
    assert torch.equal(*tables)
    assert not torch.equal(tables[0][ROW], torch.ones(4))
    return optimizers, reasons


# exchanges updates in every step between its refreshes
OF_ROWS = {name: {"warmup": WARMUP} for name in ("onebit-adam", "onebit-lamb")}
OF_ROWS["zero-one-adam"] = {}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", OF_ROWS)
def test_one_bad_gradient_of_an_inactive_element_skips_one_step_on_all_ranks(name, bad):
    optimizers, reasons = train_row(name, LAST, bad, **OF_ROWS[name])
    assert [step for step, reason in enumerate(reasons, 1) if reason] == [WARMUP + 2]
    assert "not finite or too large: rank 0 has 1" in reasons[WARMUP + 1]
    assert [optimizer.steps for optimizer in optimizers] == [LAST - 1] * 2


@pytest.mark.parametrize("name", OF_ROWS)
def test_pending_gradients_do_not_overflow_a_short_dtype(name):
    options = OF_ROWS[name] | {"gradient_compression": Dense(torch.float16)}
    optimizers, _ = train_row(name, FIRST + 8, scale=1e4, **options)
    assert skipped_by(optimizers) == [0, 0]


# --- torch's GradScaler

STEPS, SCALE = 10, 1024.0
# steps: the loss of rank 1 overflows; a gradient of rank 0 does, and is clipped before `step`
OVERFLOWS, CLIPPED = 5, 7


def take_scaled_step(model, optimizer, scaler, rank, step, unscales=False):
    generator = torch.Generator().manual_seed(10 * step + rank)
    loss = model(torch.randn(16, 6, generator=generator)).square().mean()
    if step == OVERFLOWS and rank == 1:
        loss = loss * torch.inf
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if unscales:
        if step == CLIPPED and rank == 0:
            model[0].weight.grad[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def train_scaled(group, make, unscales):
    """What a loop with a GradScaler sees after each step, and the parameters at the end."""
    model = make_model()
    optimizer = make(model, group)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    seen = []
    for step in range(1, STEPS + 1):
        take_scaled_step(model, optimizer, scaler, group.rank, step, unscales)
        seen.append((optimizer.skipped, scaler.get_scale(), vector_of(model)))
    optimizer.finalize()
    return seen, vector_of(model)


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("name", methods.METHODS)
def test_ranks_that_skip_a_step_lower_their_scales(name, unscales):
    ranks = simulate(2, train_scaled, methods.METHODS[name].make, unscales)
    (first, mine), (second, theirs) = ranks
    assert torch.equal(mine, theirs)
    assert mine.isfinite().all()
    if name not in methods.EVERY_STEP:
        # the rank that overflows skips its own step
        assert [seen[-1][1] for seen, _ in ranks] == [SCALE / 2**unscales, SCALE / 2]
        if name in methods.LOCAL:
            assert [seen[-1][0] for seen, _ in ranks] == [int(unscales), 1]
        for step in range(OVERFLOWS + 1, STEPS):
            # rank 0 overflows where gradients are unscaled
            assert unscales or not torch.equal(first[step][2], first[step - 1][2]), step
            assert not torch.equal(second[step][2], second[step - 1][2]), step
        return
    before, skips = vector_of(make_model()), 0
    for step, (own, other) in enumerate(zip(first, second, strict=True), 1):
        was, skips = skips, (step >= OVERFLOWS) + (unscales and step >= CLIPPED)
        # the same on both ranks, and half for each overflow
        assert (own[0], own[1]) == (other[0], other[1]) == (skips, SCALE / 2**skips), step
        assert torch.equal(own[2], other[2]), step
        assert torch.equal(own[2], before) == (skips > was), step
        before = own[2]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_the_mean_after_an_overflow_is_that_of_ranks_that_trained_alone():
    """LocalSGD against torch's SGD and GradScaler, whose overflow skips a step of one rank."""
    make = lambda model, group: LocalSGD(sgd(model), group, local_steps=4)  # noqa: E731
    ranks = simulate(2, train_scaled, make, False)
    start = make_model()
    for begin, end in ((1, 4), (5, 8)):
        models = [copy.deepcopy(start) for _ in range(2)]
        for rank, model in enumerate(models):
            scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
            for step in range(begin, end + 1):
                take_scaled_step(model, sgd(model), scaler, rank, step)
        mean = vectors_of(models).mean(dim=0)
        nn.utils.vector_to_parameters(mean, start.parameters())
        for seen, _ in ranks:
            torch.testing.assert_close(seen[end - 1][2], mean)


@pytest.mark.parametrize("unscales", [False, True])
def test_one_worker_takes_the_steps_of_its_inner_optimizer(unscales):
    class Plain(torch.optim.AdamW):
        """An optimizer of torch, whose overflows GradScaler handles."""

        skipped = 0

        def finalize(self):
            """Nothing is left to do."""

    def plain(model, group):
        return Plain(model.parameters(), lr=0.01, weight_decay=0.1)

    expected, _ = train_scaled(Group(), plain, unscales)
    found, _ = train_scaled(Group(), methods.METHODS["averaged"].make, unscales)
    for own, right in zip(found, expected, strict=True):
        assert own[1] == right[1]
        assert torch.equal(own[2], right[2])
    assert found[-1][0] == int(unscales)


@pytest.mark.parametrize("name", methods.METHODS)
def test_gradients_of_a_large_scale_are_judged_without_it(name):
    """GradScaler's scale grows until gradients overflow, so scaled ones may be large."""
    models, optimizers = make_team(name)
    give_gradients(models, 1, scale=2.0**60)
    for optimizer in optimizers:
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0**60), torch.tensor(0.0)
    before = vector_of(models[0])
    take_step(optimizers)
    assert skipped_by(optimizers) == [0, 0]
    assert not torch.equal(vector_of(models[0]), before)


@pytest.mark.parametrize("name", methods.METHODS)
def test_a_gradient_that_is_too_large_lowers_the_scale(name):
    model = nn.Linear(3, 2)
    optimizer = methods.METHODS[name].make(model, Group())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.ones(3)).sum()).backward()
    model.weight.grad[0, 0] = 1e30
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512
    assert optimizer.skipped == 1


# --- the end of a run


def end_of(name, steps, change):
    """The error of `finalize` on each rank, and whether the ranks have the same parameters."""
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    models = [copy.deepcopy(model) for _ in range(3)]
    optimizers = methods.METHODS[name].optimizers(models)

    def train(model, optimizer):
        yield from optimizer.broadcast_model_algorithm()
        for step in range(steps):
            set_noise(model, 10 * step + optimizer.group.rank, 0.1)
            with torch.no_grad():
                change(model, optimizer, step)
            yield from optimizer.algorithm()
        try:
            yield from optimizer.finalize_algorithm()
        except ValueError as error:
            return str(error)
        return ""

    errors = lockstep(of_ranks(train, models, optimizers)).results
    return errors, all(torch.equal(vector_of(models[0]), vector_of(each)) for each in models)


@pytest.mark.parametrize("name", methods.LOCAL)
def test_a_failed_last_synchronization_is_an_error_on_all_ranks(name):
    def set_infinite(model, optimizer, step):
        if step == 5:
            model.bias[0] = torch.inf

    errors, are_equal = end_of(name, 10, set_infinite)
    # without a mean, these continue from a finite anchor
    assert are_equal == name.startswith(("co2", "diloco quorum", "fedglomo"))
    expected = "the last synchronization failed, so the ranks have different parameters: no rank's "
    assert all(error.startswith(expected) == (not are_equal) for error in errors), errors


def test_a_failed_synchronization_of_0_1_adam_is_an_error():
    def spoil_update(model, optimizer, step):
        if step == 9 and optimizer.group.rank == 1:
            optimizer.accumulated[0] = torch.nan

    errors, are_equal = end_of("zero-one-adam local steps", 10, spoil_update)
    assert not are_equal
    assert len(set(errors)) == 1
    assert errors[0].startswith("the last synchronization failed, so the ranks have different ")
    assert "rank 1 has 1" in errors[0]
