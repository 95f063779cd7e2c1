import copy

import pytest
import torch
from optim.local import (
    Handed,
    adamw,
    all_equal,
    check_resuming_at_every_step,
    mean_of,
    saved,
    sgd,
    taught,
    team,
    train,
    vector_of,
)
from optim.models import Everything, batches, loss_of
from torch import nn

from gcnzc.compress import Dense, Sign
from gcnzc.exchange import Choices, Compute, Group, lockstep
from gcnzc.optim.local.local_sgd import LocalSGD
from gcnzc.optim.local.sync_interval import INITIAL_STEPS, NUM_MEASURED, WARM_UP
from gcnzc.optim.resize import resize_state

HALF = Dense(torch.float16)


def every(steps, **options):
    return lambda inner, group: LocalSGD(inner, group, local_steps=steps, **options)


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def whole(steps):
    """One worker that sees all rows of every step."""
    model = Everything()
    optimizer = sgd(model.parameters())
    for rows in batches(steps):
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_mean_after_every_step_is_data_parallelism(world_size):
    models, optimizers = team(world_size, every(1))
    train(models, optimizers, 20)
    expected = whole(20)
    assert all_equal(models)
    for found, right in zip(models[0].parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


def test_means_of_differences_are_means_of_parameters():
    plain, optimizers = team(3, every(4))
    train(plain, optimizers, 12)
    # of another dtype than the vector's own, though as exact
    models, optimizers = team(3, every(4, compress=Dense(torch.float64)))
    train(models, optimizers, 12)
    assert all_equal(models)
    torch.testing.assert_close(vector_of(models[0]), vector_of(plain[0]), rtol=0, atol=1e-12)
    # from the last mean on, not from the first parameters
    assert all(torch.equal(each.recipe.update.anchor, each.vector()) for each in optimizers)


def test_ranks_are_in_sync_only_after_each_mean():
    models, optimizers = team(3, every(4), adamw)
    for step in range(12):
        train(models, optimizers, step + 1, step)
        assert all_equal(models) == (step % 4 == 3)


def test_a_single_rank_takes_only_the_inner_steps():
    (model,), optimizers = team(1, every(2))
    train([model], optimizers, 20)
    assert all(map(torch.equal, model.parameters(), whole(20).parameters()))
    model, other = Everything(), Everything()
    optimizer, inner = LocalSGD(sgd(model.parameters()), local_steps=2), sgd(other.parameters())
    for each, step in ((model, optimizer.step), (other, inner.step)):
        loss_of(each, batches(1)[0]).backward()
        step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    optimizer.finalize()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("options", [{}, {"compress": HALF}, {"compress": Sign(block=64)}])
def test_a_run_resumes_from_any_step(options):
    dtype = torch.float32 if "compress" in options else torch.float64
    check_resuming_at_every_step(every(3, **options), 2, 8, inner=adamw, dtype=dtype)


def test_a_state_belongs_to_one_rank():
    models, optimizers = team(2, every(3))
    train(models, optimizers, 1)
    with pytest.raises(ValueError, match=r"(?s)rank 0 of 2 cannot .* 1 of 2.*resize_state"):
        optimizers[1].load_state_dict(optimizers[0].state_dict())


@pytest.mark.parametrize(("old", "new"), [(3, 2), (2, 4), (3, 1), (1, 2)])
@pytest.mark.parametrize("compress", [Dense(), Sign(block=64)], ids=["dense", "sign"])
def test_another_number_of_ranks_starts_from_the_mean_of_the_old(old, new, compress):
    make = every(4, compress=compress)
    models, optimizers = team(old, make, dtype=torch.float32)
    train(models, optimizers, 6)
    states = [saved(optimizer.state_dict()) for optimizer in optimizers]
    again, others = team(new, make, dtype=torch.float32)
    for rank, optimizer in enumerate(others):
        optimizer.load_state_dict(resize_state(states, rank, new))
    for model in again:
        torch.testing.assert_close(vector_of(model), mean_of(models))
    assert all_equal(again)
    # the window of the old ones ends when it would have; one alone has none
    train(again, others, 10 if old == 1 else 8, 6)
    assert all_equal(again)


@pytest.mark.parametrize("compress", [Dense(), HALF, Sign(block=64)], ids=["dense", "half", "sign"])
def test_bytes_and_requests_are_as_stated(compress):
    models, optimizers = team(4, every(5, compress=compress, signals=2), dtype=torch.float32)
    lockstep([optimizer.broadcast_model_algorithm() for optimizer in optimizers])
    pairs = zip(models, optimizers, strict=True)
    found = lockstep(
        [taught(model, optimizer, 15) for model, optimizer in pairs],
        choices=Choices.always(Sum="ring"),
    )
    count = optimizers[0].flat_params.num_elements
    for ledger in found.ledgers:
        # ring's parts differ by an element
        stated = 3 * compress.bytes_sent(count, 4, 4)
        assert abs(ledger.bytes_sent - stated) <= 3 * 6 * 4
        assert ledger.requests == 3 * (2 if isinstance(compress, Sign) else 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_rank_skips_its_step_if_its_gradient_is_not_finite(bad):
    models, optimizers = team(3, every(2))
    lockstep([optimizer.broadcast_model_algorithm() for optimizer in optimizers])
    before = vector_of(models[0])
    for model in models:
        for parameter in trained(model):
            parameter.grad = torch.ones_like(parameter)
    models[1].rare.grad[2] = bad
    lockstep([optimizer.algorithm() for optimizer in optimizers])
    assert [optimizer.skipped for optimizer in optimizers] == [0, 1, 0]
    assert (
        optimizers[1].skip_reason
        == "local step skipped, because a gradient of rank 1 is not finite or too large"
    )
    assert optimizers[0].skip_reason == optimizers[2].skip_reason == ""
    assert torch.equal(vector_of(models[1]), before)
    assert not torch.equal(vector_of(models[0]), before)
    # it takes part in the mean nevertheless
    expected = mean_of(models)
    models[1].rare.grad[2] = 1.0
    for model in models:
        for parameter in trained(model):
            parameter.grad.zero_()
    lockstep([optimizer.algorithm() for optimizer in optimizers])
    assert all_equal(models)
    torch.testing.assert_close(vector_of(models[1]), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("compress", [Dense(), HALF, Sign(block=64)], ids=["dense", "half", "sign"])
def test_a_rank_whose_parameters_are_not_finite_gets_those_of_the_others(compress):
    models, optimizers = team(3, every(3, compress=compress), adamw, torch.float32)
    train(models, optimizers, 2)
    with torch.no_grad():
        models[1].first.weight[0, 0] = float("nan")
        optimizers[1].state[models[1].rare]["exp_avg"][0] = float("inf")
    train(models, optimizers, 3, 2)
    assert all_equal(models)
    assert vector_of(models[0]).isfinite().all()
    if compress == Dense():
        # of the two that were left: the third step of worker 1 changed nothing that counts
        others, theirs = team(3, every(100), adamw, torch.float32)
        train(others, theirs, 3)
        torch.testing.assert_close(vector_of(models[1]), mean_of([others[0], others[2]]))
    for optimizer in optimizers:
        assert optimizer.dropped == 1
        assert optimizer.skip_reason.endswith(
            "the parameters of 1 of 3 ranks are not finite or too large"
        )
    assert models[1].rare not in optimizers[1].state
    assert models[0].rare in optimizers[0].state
    train(models, optimizers, 6, 3)
    assert all_equal(models)
    assert vector_of(models[0]).isfinite().all()


def test_nothing_changes_if_no_rank_is_finite():
    models, optimizers = team(2, every(1, compress=Dense(torch.float32)))
    train(models, optimizers, 1)
    with torch.no_grad():
        models[0].rare[1] = models[1].rare[0] = float("nan")
    before = copy.deepcopy([list(model.parameters()) for model in models])
    anchor = optimizers[0].recipe.update.anchor.clone()
    train(models, optimizers, 2, 1)
    for model, values, optimizer in zip(models, before, optimizers, strict=True):
        for found, right in zip(model.parameters(), values, strict=True):
            torch.testing.assert_close(found, right, rtol=0, atol=1, equal_nan=True)
        assert "no rank's parameters are finite" in optimizer.skip_reason
        assert torch.equal(optimizer.recipe.update.anchor, anchor)


def test_signals_are_sent_with_a_mean_and_reach_all_ranks():
    models, optimizers = team(3, every(2, signals=2))
    for step in range(6):
        optimizers[2].signals = [step >= 2, False]
        train(models, optimizers, step + 1, step)
        expected = [step in (3, 5), False]
        assert all(optimizer.received_signals == expected for optimizer in optimizers)
    (model,), (optimizer,) = team(1, every(2, signals=1))
    optimizer.signals = [True]
    train([model], [optimizer], 1)
    assert optimizer.received_signals == [True]


def test_parameters_are_averaged_for_evaluation_and_restored():
    models, optimizers = team(3, every(5))
    train(models, optimizers, 7)
    own = [vector_of(model) for model in models]
    mean = mean_of(models)
    kept = lockstep([optimizer.average_parameters_algorithm() for optimizer in optimizers]).results
    assert all_equal(models)
    torch.testing.assert_close(vector_of(models[0]), mean, rtol=1e-14, atol=1e-15)
    pairs = zip(optimizers, kept, strict=True)
    for optimizer, each in pairs:
        optimizer.restore_parameters(each)
    assert all(map(torch.equal, own, map(vector_of, models)))


@pytest.mark.parametrize("compress", [Dense(), HALF], ids=["dense", "half"])
def test_finalize_sets_the_mean_bit_for_bit(compress):
    models, optimizers = team(3, every(5, compress=compress))
    train(models, optimizers, 7)
    mean = mean_of(models)
    lockstep([optimizer.finalize_algorithm() for optimizer in optimizers])
    assert all_equal(models)
    torch.testing.assert_close(vector_of(models[0]), mean, rtol=1e-14, atol=1e-15)
    for optimizer in optimizers:
        if compress != Dense():
            assert torch.equal(optimizer.recipe.update.anchor, optimizer.vector())
    # and may go on
    train(models, optimizers, 12, 7)
    assert all_equal(models)


def test_layouts_and_options_that_differ_are_an_error():
    inner = [sgd(nn.Linear(2, size).parameters()) for size in (2, 3)]
    optimizers = [LocalSGD(each, Group(rank, 2), local_steps=2) for rank, each in enumerate(inner)]
    with pytest.raises(ValueError, match=r"rank 0 has 'group 0, parameter 0 \(2, 2\)"):
        lockstep([optimizer.broadcast_model_algorithm() for optimizer in optimizers])
    inner = [sgd(nn.Linear(2, 2).parameters()) for _ in range(2)]
    optimizers = [
        LocalSGD(each, Group(rank, 2), local_steps=2 + rank) for rank, each in enumerate(inner)
    ]
    with pytest.raises(ValueError, match=r"local_steps=2.*local_steps=3"):
        lockstep([optimizer.broadcast_model_algorithm() for optimizer in optimizers])
    with pytest.raises(ValueError, match="local_steps is 0"):
        LocalSGD(inner[0], local_steps=0)


@pytest.mark.parametrize(
    ("exchange_s", "slowest_s", "expected"),
    [(0.5, 1.0, 10), (0.0, 1.0, 1), (2.0, 1.0, 40), (2.0, 2.0, 20)],
)
def test_the_number_of_local_steps_is_measured(exchange_s, slowest_s, expected):
    clocks = [Handed(), Handed()]
    seen = []

    def make(inner, group):
        return LocalSGD(inner, group, local_steps="auto", clocks=clocks[group.rank])

    models, optimizers = team(2, make)

    def slow(reducer, rank):
        mean = reducer.mean

        def slower(values, extras=0):
            clocks[rank].wall_s += exchange_s
            # who waits for the other sees more
            clocks[rank].wall_s += (slowest_s - 0.5) * rank
            return (yield from mean(values, extras))

        reducer.mean = slower

    def timed(rank):
        # of other workers than those that see most of the exchange
        yield from optimizers[rank].broadcast_model_algorithm()
        for number, rows in enumerate(batches(WARM_UP + NUM_MEASURED + 2)):
            clocks[rank].wall_s += 100.0 if number < WARM_UP else (slowest_s, 0.5)[rank]
            optimizers[rank].zero_grad()
            loss_of(models[rank], rows).backward()
            yield from optimizers[rank].algorithm()
            yield Compute(0.0)
            seen.append((number, optimizers[rank].local_steps))

    for rank, optimizer in enumerate(optimizers):
        slow(optimizer.recipe.exchange.reducer, rank)
    lockstep([timed(rank) for rank in range(2)])
    for number, steps in seen:
        assert steps == (INITIAL_STEPS if number < WARM_UP + NUM_MEASURED - 1 else expected)
    state = saved(optimizers[0].state_dict())
    _, (other, _) = team(2, make)
    other.load_state_dict(state)
    assert other.local_steps == expected


@pytest.mark.parametrize("is_bad", [False, True])
def test_a_grad_scaler_leaves_the_gradients_to_the_step(is_bad):
    model, other = Everything().float(), Everything().float()
    optimizer, inner = LocalSGD(adamw(model.parameters()), local_steps=2), adamw(other.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for rows in batches(3):
        optimizer.zero_grad()
        inner.zero_grad()
        scaler.scale(loss_of(model, rows)).backward()
        if is_bad:
            model.rare.grad = torch.full_like(model.rare, float("inf"))
        scaler.step(optimizer)
        scaler.update()
        loss_of(other, rows).backward()
        if not is_bad:
            inner.step()
    assert optimizer.skipped == (3 if is_bad else 0)
    # the first of the three backs off, too, as for any optimizer
    assert scaler.get_scale() == (128.0 if is_bad else 1024.0)
    torch.testing.assert_close(vector_of(model), vector_of(other), rtol=1e-4, atol=1e-6)


def test_it_is_an_optimizer():
    model = nn.Linear(2, 2)
    optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=1.0), local_steps=2)
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    assert optimizer.step(lambda: (model.weight.sum() ** 2).backward() or 3.0) == 3.0
    scheduler.step()
    assert optimizer.inner.param_groups[0]["lr"] == 0.5
    with pytest.raises(RuntimeError, match="does not support adding parameters"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    optimizer.zero_grad()
    assert model.weight.grad is None
    assert repr(optimizer).startswith("LocalSGD(local_steps=2, compress=Dense(dtype=None)) of SGD")


def test_half_precision_parameters_keep_their_dtype():
    models, optimizers = team(2, every(2), sgd, torch.bfloat16)
    train(models, optimizers, 4)
    assert all_equal(models)
    assert all(parameter.dtype == torch.bfloat16 for parameter in models[0].parameters())
    assert optimizers[0].flat_params.dtype == torch.float32


def test_parameters_of_several_dtypes():
    models = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()) for _ in range(2)]
    optimizers = [
        LocalSGD(sgd(model.parameters()), Group(rank, 2), local_steps=2)
        for rank, model in enumerate(models)
    ]
    for step in range(4):
        for rank, model in enumerate(models):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, rank + step)
        lockstep([optimizer.algorithm() for optimizer in optimizers])
        assert all_equal(models) == (step % 2 == 1)
    models[0][1].bias.grad[0] = float("nan")
    lockstep([optimizer.algorithm() for optimizer in optimizers])
    assert [optimizer.skipped for optimizer in optimizers] == [1, 0]


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_state_has_the_counters_of_its_rank(world_size):
    models, optimizers = team(world_size, lambda *given: LocalSGD(*given, local_steps=4))
    train(models, optimizers, 3)
    for rank, optimizer in enumerate(optimizers):
        optimizer.skipped, optimizer.dropped = rank + 1, 2 * rank
    states = [saved(optimizer.state_dict()) for optimizer in optimizers]
    _, others = team(world_size, lambda *given: LocalSGD(*given, local_steps=4))
    for rank, (other, state) in enumerate(zip(others, states, strict=True)):
        other.load_state_dict(state)
        assert (other.skipped, other.dropped) == (rank + 1, 2 * rank)
    # the mean of the ranks
    _, (one, other) = team(2, lambda *given: LocalSGD(*given, local_steps=4))
    one.load_state_dict(resize_state(states, 0, 2) if world_size != 2 else states[0])
    assert (one.skipped, one.dropped) == ((1, 0), (2, 2))[world_size == 3]
    # a state of an older version
    snapshot = other.snapshot()
    del snapshot["local"]["counters"]
    other.skipped = 5
    other.load_state_dict(snapshot)
    assert (other.skipped, other.dropped) == (0, 0)


def test_local_steps_is_not_a_flag():
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    with pytest.raises(ValueError, match=r"local_steps is True\n\nhint: "):
        LocalSGD(torch.optim.SGD(parameters, lr=0.1), Group(), local_steps=True)
