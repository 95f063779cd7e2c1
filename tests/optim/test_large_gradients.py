"""Finite gradients that would overflow the state: the step is skipped like a non-finite one."""

import copy
import functools
import math

import pytest
import torch
from optim.kinds import (
    CASES,
    EVERY_STEP,
    KINDS,
    LOCAL,
    LOCAL_VARIANTS,
    REPLICATED,
    WITH_LOCAL_STEPS,
)
from torch import nn

from gcnzc.compress import Dense
from gcnzc.exchange import Group, lockstep
from gcnzc.kernels.finite import square_limit
from gcnzc.optim import Averaged, ZeroOneAdam
from gcnzc.optim.finite_gradients import count_bad_elements

# steps with a large gradient on rank 1: in the warm-up or before the first synchronization, and
# after it, before an exchange
BAD, END = (2, 6), 12
LIMIT = square_limit(torch.float32)


def make_team(make):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
    return models, [make(model, Group(rank, 2)) for rank, model in enumerate(models)]


def give_gradients(models, step, large=None, scale=1.0):
    for rank, model in enumerate(models):
        generator = torch.Generator().manual_seed(10 * step + rank)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator) * scale
        if large is not None and rank == 1:
            model[2].weight.grad[1, 3] = large


def take_step(optimizers):
    lockstep([optimizer.algorithm() for optimizer in optimizers])


def are_all_finite(state):
    if isinstance(state, torch.Tensor):
        return not state.dtype.is_floating_point or bool(state.isfinite().all())
    if isinstance(state, float):
        return math.isfinite(state)
    values = state.values() if isinstance(state, dict) else state
    return not isinstance(state, dict | list | tuple) or all(map(are_all_finite, values))


def vectors_of(models):
    return [nn.utils.parameters_to_vector(model.parameters()).detach() for model in models]


def train(make, large, *, calls_bad_steps=True):
    """The parameters after each step, and the optimizers."""
    models, optimizers = make_team(make)
    found = []
    for step in range(1, END + 1):
        give_gradients(models, step, large if step in BAD else None)
        if calls_bad_steps or step not in BAD:
            take_step(optimizers)
            lockstep(
                [
                    optimizer.finish_pending_algorithm()
                    for optimizer in optimizers
                    if is_local(optimizer)
                ]
            )
            assert all(are_all_finite(optimizer.snapshot()) for optimizer in optimizers), step
        found.append(vectors_of(models))
    lockstep([optimizer.finalize_algorithm() for optimizer in optimizers])
    return [*found, vectors_of(models)], optimizers


@functools.cache
def trained(name, large):
    return train(KINDS[name], large)


def is_local(optimizer):
    return hasattr(optimizer, "finish_pending_algorithm")


def are_equal(found, expected):
    return all(
        all(map(torch.equal, own, other)) for own, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("large", [1e30, -1e38])
@pytest.mark.parametrize("name", KINDS)
def test_training_goes_on_as_after_a_gradient_that_is_not_finite(name, large):
    found, optimizers = trained(name, large)
    expected, others = trained(name, math.nan)
    assert are_equal(found, expected)
    for own, other in zip(optimizers, others, strict=True):
        assert (own.skipped, own.steps) == (other.skipped, other.steps)
    assert torch.equal(*found[-1])
    assert found[-1][0].isfinite().all()
    # training has gone on
    assert not any(map(torch.equal, found[-1], found[max(BAD)]))


@pytest.mark.parametrize("large", [1e30, math.inf])
@pytest.mark.parametrize("name", EVERY_STEP)
def test_ranks_that_exchange_in_every_step_go_on_as_if_the_step_was_not_taken(name, large):
    found, optimizers = trained(name, large)
    expected, _ = train(KINDS[name], large, calls_bad_steps=False)
    assert are_equal(found, expected)
    for step_vectors in found:
        assert torch.equal(*step_vectors)
    assert [optimizer.skipped for optimizer in optimizers] == [len(BAD)] * 2


@pytest.mark.parametrize("name", LOCAL)
def test_with_local_steps_only_the_rank_with_the_gradient_skips_its_step(name):
    _, optimizers = trained(name, 1e30)
    assert [optimizer.skipped for optimizer in optimizers] == [0, len(BAD)]


@pytest.mark.parametrize("name", EVERY_STEP)
def test_the_message_names_the_rank_and_the_number_of_elements(name):
    models, optimizers = make_team(KINDS[name])
    give_gradients(models, 1, 1e30)
    take_step(optimizers)
    for optimizer in optimizers:
        assert optimizer.skip_reason.endswith("not finite or too large: rank 1 has 1")
        assert optimizer.steps == 0


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("large", [LIMIT / 4, -LIMIT / 4])
def test_gradients_below_the_limit_are_used_and_do_not_overflow(name, large):
    models, optimizers = make_team(KINDS[name])
    for step in range(1, END + 1):
        give_gradients(models, step, large if step == BAD[0] else None)
        take_step(optimizers)
        lockstep(
            [
                optimizer.finish_pending_algorithm()
                for optimizer in optimizers
                if is_local(optimizer)
            ]
        )
        assert all(are_all_finite(optimizer.snapshot()) for optimizer in optimizers), step
    assert [optimizer.skipped for optimizer in optimizers] == [0, 0]


@pytest.mark.parametrize("name", REPLICATED)
def test_all_elements_just_below_the_limit_in_every_step_do_not_overflow(name):
    models, optimizers = make_team(KINDS[name])
    for step in range(1, END + 1):
        for model in models:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, LIMIT * (-1.0) ** step * 0.99)
        take_step(optimizers)
        assert all(are_all_finite(optimizer.snapshot()) for optimizer in optimizers), step
    assert [optimizer.skipped for optimizer in optimizers] == [0, 0]


@pytest.mark.parametrize("name", KINDS)
def test_a_single_rank_skips_the_step(name):
    model = nn.Linear(3, 2)
    optimizer = KINDS[name](model, Group())
    for step in range(1, 5):
        model.weight.grad = torch.ones(2, 3)
        model.bias.grad = torch.ones(2)
        if step == 2:
            model.weight.grad[1, 1] = -1e30
            before = copy.deepcopy(model.state_dict())
        optimizer.step()
        if step == 2:
            assert optimizer.skipped == 1
            assert "not finite or too large" in optimizer.skip_reason
            assert all(map(torch.equal, model.state_dict().values(), before.values()))
        assert are_all_finite(optimizer.snapshot())
    assert optimizer.skipped == 1
    assert not torch.equal(model.weight, before["weight"])


def test_a_large_gradient_of_a_local_step_leaves_the_momentum_unchanged():
    def make(model, group):
        return ZeroOneAdam(model.parameters(), 0.01, group=group, schedule=WITH_LOCAL_STEPS)

    models, optimizers = make_team(make)
    for step in range(1, 8):
        give_gradients(models, step, 1e30 if step == 6 else None)
        take_step(optimizers)
        assert ("too large" in optimizers[1].skip_reason) == (step == 6)
    assert [optimizer.num_nonfinite for optimizer in optimizers] == [0, 1]
    assert [optimizer.skipped for optimizer in optimizers] == [0, 0]


@pytest.mark.parametrize("name", REPLICATED)
@pytest.mark.parametrize("large", [1e18, 1e30])
def test_clipped_gradients_are_not_too_large(name, large):
    def make(model, group):
        return KINDS[name](model, group, clip_norm=1.0)

    models, optimizers = make_team(make)
    for step in range(1, END + 1):
        give_gradients(models, step, large if step in BAD else None)
        take_step(optimizers)
        assert all(are_all_finite(optimizer.snapshot()) for optimizer in optimizers), step
    assert [optimizer.skipped for optimizer in optimizers] == [0, 0]
    assert torch.equal(*vectors_of(models))


@pytest.mark.parametrize("name", REPLICATED)
def test_sums_in_a_short_dtype_do_not_overflow_the_state(name):
    def make(model, group):
        return KINDS[name](model, group, gradient_compression=Dense(torch.float16))

    found, _ = train(make, 1e30)
    expected, _ = train(make, math.nan)
    assert are_equal(found, expected)


def test_the_limit_is_that_of_the_mean_of_gradients_without_compression():
    def make(model, group):
        return Averaged(torch.optim.SGD(model.parameters(), 0.1), group)

    models, optimizers = make_team(make)
    give_gradients(models, 1, 1.9 * LIMIT)
    take_step(optimizers)
    assert [optimizer.skipped for optimizer in optimizers] == [0, 0]
    give_gradients(models, 2, 2.1 * LIMIT)
    take_step(optimizers)
    assert [optimizer.skipped for optimizer in optimizers] == [1, 1]


def test_sparse_gradients_that_are_too_large_are_skipped():
    models, optimizers = [], []
    for rank in range(2):
        models.append(nn.Embedding(5, 2, sparse=True))
        optimizers.append(Averaged(torch.optim.SGD(models[-1].parameters(), 0.1), Group(rank, 2)))
    for step, large in enumerate([1.0, 1e30], 1):
        for rank, model in enumerate(models):
            values = torch.tensor([[1.0, large if rank else 1.0]])
            model.weight.grad = torch.sparse_coo_tensor(
                [[rank]], values, (5, 2), check_invariants=False
            )
        before = vectors_of(models)[0]
        take_step(optimizers)
        assert torch.equal(vectors_of(models)[0], before) == (step == 2)
    assert optimizers[0].skip_reason.endswith("rank 1 has 1")


@pytest.mark.parametrize("name", KINDS)
def test_gradients_of_a_large_scale_are_judged_without_it(name):
    """GradScaler's scale grows until gradients overflow, so scaled ones may be large."""
    models, optimizers = make_team(KINDS[name])
    give_gradients(models, 1, scale=2.0**60)
    for optimizer in optimizers:
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0**60), torch.tensor(0.0)
    before = vectors_of(models)[0]
    take_step(optimizers)
    assert [optimizer.skipped for optimizer in optimizers] == [0, 0]
    assert not torch.equal(vectors_of(models)[0], before)


@pytest.mark.parametrize("name", KINDS)
def test_grad_scaler_lowers_the_scale(name):
    model = nn.Linear(3, 2)
    optimizer = KINDS[name](model, Group())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.ones(3)).sum()).backward()
    model.weight.grad[0, 0] = 1e30
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512
    assert optimizer.skipped == 1


@pytest.mark.parametrize("bad", [1e30, math.nan, math.inf])
@pytest.mark.parametrize("name", LOCAL | LOCAL_VARIANTS)
def test_a_rank_with_parameters_that_are_too_large_is_excluded_from_the_mean(name, bad):
    models, optimizers = make_team(CASES[name])
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
        take_step(optimizers)
        lockstep([optimizer.finish_pending_algorithm() for optimizer in optimizers])
        reasons |= {optimizer.skip_reason for optimizer in optimizers}
    lockstep([optimizer.finalize_algorithm() for optimizer in optimizers])
    assert torch.equal(*vectors_of(models))
    assert vectors_of(models)[0].abs().amax() < 10
    assert [optimizer.dropped for optimizer in optimizers] == [1, 1]
    assert any("not finite or too large" in reason for reason in reasons)
    # moments that are not finite begin anew
    assert all(are_all_finite(optimizer.snapshot()) for optimizer in optimizers)


@pytest.mark.parametrize(
    ("factor", "count"),
    [
        (1.0, 3),
        (torch.tensor(2.0**-10), 2),
        # GradScaler has found an element that is not finite
        (torch.tensor(math.nan), 2),
    ],
)
def test_elements_are_counted_after_scaling(factor, count):
    parameter = nn.Parameter(torch.ones(5))
    assert count_bad_elements(parameter, factor) == 0
    parameter.grad = torch.tensor([1.0, LIMIT, math.nan, -math.inf, -LIMIT / 2])
    assert count_bad_elements(parameter, factor) == count
