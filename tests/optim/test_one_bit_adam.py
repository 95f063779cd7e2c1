import copy

import pytest
import torch
from optim.models import Everything, batches, loss_of
from optim.oracle import fixture, followed, lengths
from optim.replicas import (
    saved,
    team,
    tensors_of,
    train,
    train_as_worker,
    values_of,
)
from processes import results
from torch import nn

from bench.network.deepspeed_oracles import OneBitAdamDeepSpeed, PaddedSign
from gcnzc.compress import Dense, Sign, WorkerInfo
from gcnzc.exchange import Group, lockstep
from gcnzc.optim import OneBitAdam, resize_state
from gcnzc.optim.resize import unpack_state
from gcnzc.optim.synchronous.freeze_rule import FreezeRule


def small_team(world_size, shapes=((6, 4), (5,)), **options):
    """Optimizers of a few parameters, which are given gradients by hand."""
    torch.manual_seed(1)
    values = [torch.randn(shape) for shape in shapes]
    models = [[nn.Parameter(value.clone()) for value in values] for _ in range(world_size)]
    options = {"lr": 0.01, **options}
    optimizers = [
        OneBitAdam(model, group=Group(rank, world_size), **options)
        for rank, model in enumerate(models)
    ]
    return models, optimizers


def give(models, seed, scale=1.0):
    """Other gradients to every worker."""
    generator = torch.Generator().manual_seed(seed)
    for model in models:
        for parameter in model:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * scale


def step(optimizers):
    return lockstep([optimizer.algorithm() for optimizer in optimizers])


def alike(models):
    first = list(models[0])
    return all(all(map(torch.equal, model, first)) for model in map(list, models))


# --- what is known of it


def test_it_follows_deepspeed():
    recorded = fixture("onebitadam")
    hyper = recorded["hyper"]

    def make(parameters, group):
        return OneBitAdamDeepSpeed(
            parameters,
            lr=hyper["lr"],
            betas=hyper["betas"],
            weight_decay=hyper["weight_decay"],
            warmup=hyper["freeze_step"],
            compress=PaddedSign(lengths(recorded)),
            bias_correction=False,
            variance_floor=0.0,
            group=group,
        )

    frozen = []
    for number, optimizers, difference in followed(recorded, make):
        # one element of 34 is rounded otherwise at step 6, by 1.2e-7, on the machines tried
        assert difference <= 2.5e-7, number
        frozen.append(optimizers[0].is_frozen)
    dense = recorded["dense_allreduce_at_step"]
    # frozen after a step: the next one is compressed
    assert [not is_frozen for is_frozen in frozen[:-1]] == dense[2:]


def test_a_wrong_rounding_of_the_mean_is_detected():
    recorded = fixture("onebitadam")
    hyper = recorded["hyper"]
    make = lambda parameters, group: OneBitAdam(  # noqa: E731
        parameters, lr=hyper["lr"], betas=hyper["betas"], warmup=5, variance_floor=0.0, group=group
    )
    assert max(difference for *_, difference in followed(recorded, make)) > 1e-3


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
    for (name, parameter), right in zip(
        found.named_parameters(), expected.parameters(), strict=True
    ):
        if dtype == torch.bfloat16:
            # its averages are kept in float32 here
            torch.testing.assert_close(parameter, right, rtol=0.05, atol=0.05, msg=name)
        else:
            assert torch.equal(parameter, right), name


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_warm_up_is_adamw_of_mean_gradients(world_size):
    model = Everything()
    expected = torch.optim.AdamW(model.parameters(), lr=0.01)
    # the first of these batches has a gradient of `rare`
    for rows in batches(15)[1:]:
        expected.zero_grad()
        loss_of(model, rows).backward()
        for parameter in expected.state:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        expected.step()
    models, optimizers = team(world_size, torch.float64, warmup=100)
    train(models, optimizers, 15, 1)
    assert not optimizers[0].is_frozen
    for found in models:
        torch.testing.assert_close(values_of(found), values_of(model), rtol=1e-12, atol=1e-12)


def test_gradients_of_warm_up_may_be_sent_in_half():
    models, optimizers = small_team(2, warmup=10, gradient_compression=Dense(torch.bfloat16))
    whole, others = small_team(2, warmup=10)
    for number in range(5):
        give(models, number)
        give(whole, number)
        step(optimizers)
        step(others)
    assert alike(models)
    assert not alike([models[0], whole[0]])
    for one, other in zip(models[0], whole[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


# --- after the warm-up


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_replicas_are_equal_after_every_step(world_size):
    models, optimizers = team(world_size, warmup=4, refresh=5)
    kinds = set()
    for number in range(14):
        kinds.add((optimizers[0].is_frozen, optimizers[0].is_gradient_step))
        train(models, optimizers, number + 1, number)
        first = values_of(models[0])
        assert all(torch.equal(values_of(model), first) for model in models)
        for optimizer in optimizers[1:]:
            for name, vector in optimizer.vectors.items():
                assert torch.equal(vector, optimizers[0].vectors[name]), name
            assert optimizer.numbers == optimizers[0].numbers
    assert kinds == {(False, True), (True, True), (True, False)}


@pytest.mark.parametrize("layers", [1, 9])
@pytest.mark.parametrize(
    ("options", "excluded", "requests"),
    [
        ({}, False, {"AllToAll": 1, "AllGather": 1}),
        ({}, True, {"AllToAll": 1, "AllGather": 1, "Sum": 1}),
        ({"clip_norm": 1.0}, False, {"AllToAll": 1, "AllGather": 2}),
    ],
)
def test_collectives_and_bytes_of_a_step(layers, options, excluded, requests):
    world_size, shapes = 3, [(40, 7), (7,)] * layers
    models = [[nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(world_size)]
    extra = [nn.Parameter(torch.ones(11)) for _ in range(world_size)]
    optimizers = []
    for rank, model in enumerate(models):
        groups = [{"params": model}]
        if excluded:
            groups.append({"params": [extra[rank]], "compress": False})
        optimizers.append(
            OneBitAdam(groups, warmup=1, signals=2, group=Group(rank, world_size), **options)
        )
    everything = [[*model, more] for model, more in zip(models, extra, strict=True)]
    give(everything, 0)
    step(optimizers)
    give(everything, 1)
    ledger = step(optimizers).ledgers[0]
    found = {kind: entry.requests for kind, entry in ledger.entries.items()}
    # a mean may be asked for as a sum or as such
    assert {("Sum" if kind == "Mean" else kind): n for kind, n in found.items()} == requests
    # a bit of the options' hash, two signals, and how many elements would wake
    sent = Sign().bytes_sent(287 * layers, world_size, 4)
    coded = sum(ledger.entries[kind].bytes_sent for kind in ("AllToAll", "AllGather"))
    # the squared norm of a rank's gradient, float64, for each other rank
    squares = 8 * (world_size - 1) if options else 0
    assert coded == sent + squares
    assert alike(everything) or not excluded


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", [32, 4096])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_error_feedback_keeps_all_that_compression_leaves_out(world_size, block, dtype):
    n, steps = 333, 40
    places = [
        WorkerInfo(rank, world_size, torch.device("cpu"), dtype) for rank in range(world_size)
    ]
    reducers = [Sign(block=block).reducer(n, place) for place in places]
    active = torch.arange(n) % 7 > 0
    for reducer in reducers:
        reducer.restrict_to(active)
    inputs, outputs = torch.zeros(n).double(), torch.zeros(n).double()
    for _ in range(steps):
        vectors = [torch.randn(n, dtype=dtype) * 10 ** torch.randn(n) for _ in range(world_size)]
        vectors = [vector.to(dtype) for vector in vectors]
        inputs += sum(vector.double() for vector in vectors) / world_size * active
        pairs = zip(reducers, vectors, strict=True)
        assert lockstep([reducer.mean(vector) for reducer, vector in pairs]).results[0] == ""
        outputs += vectors[0].double()
    pending = sum(reducer.worker_error.double() for reducer in reducers) / world_size
    pending += torch.cat([reducer.server_error.double() for reducer in reducers])
    size = float(inputs.abs().max())
    # codes and means of them are float32 in any case
    limit = size * 1e-5
    torch.testing.assert_close(outputs + pending, inputs, rtol=0, atol=limit)
    # there is much that is left out
    assert float(pending.abs().max()) > 10 * limit


def test_an_uncompressed_group_exchanges_gradients_and_updates_its_variance():
    torch.manual_seed(3)
    start = torch.randn(6)
    pairs = [
        [nn.Parameter(torch.randn(4)), nn.Parameter(start.clone()), nn.Parameter(torch.ones(3))]
        for _ in range(2)
    ]
    for pair in pairs[1:]:
        pair[0].data.copy_(pairs[0][0])
    optimizers = [
        OneBitAdam(
            [{"params": pair[:1]}, {"params": pair[1:], "compress": False}],
            warmup=3,
            group=Group(rank, 2),
        )
        for rank, pair in enumerate(pairs)
    ]
    alone = nn.Parameter(start.clone())
    expected = torch.optim.AdamW([alone])
    for number in range(9):
        give(pairs, number)
        if number < 5:
            # for the first time after the freeze
            for pair in pairs:
                pair[2].grad = None
        alone.grad = (pairs[0][1].grad + pairs[1][1].grad) / 2
        expected.step()
        step(optimizers)
        assert bool((pairs[0][2] == 1).all()) == (number < 5)
        torch.testing.assert_close(pairs[0][1], alone, rtol=1e-5, atol=1e-6)
        assert alike(pairs)


def test_compressed_steps_come_close_to_dense_ones():
    """With every worker's gradient the same and of one size, signs leave nothing out."""
    models, optimizers = small_team(2, shapes=[(64,)], warmup=2)
    whole, others = small_team(2, shapes=[(64,)], warmup=100)
    direction = torch.randn(64).sign()
    for _ in range(6):
        for parameter in (*models[0], *models[1], *whole[0], *whole[1]):
            parameter.grad = direction.clone()
        step(optimizers)
        step(others)
    assert optimizers[0].is_frozen
    torch.testing.assert_close(models[0][0], whole[0][0], rtol=1e-4, atol=1e-4)


# --- faults

# the number of steps before, of which the third freezes; the next one is then of this kind
PHASES = {"warm-up": 1, "compressed": 4, "refresh": 5, "in a refresh": 6}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("phase", PHASES)
def test_all_ranks_skip_gradients_that_are_not_finite_on_one(phase, bad):
    models, optimizers = small_team(3, warmup=3, refresh=3)
    for number in range(PHASES[phase]):
        give(models, number)
        step(optimizers)
    assert optimizers[0].is_frozen == (phase != "warm-up")
    assert optimizers[0].is_gradient_step == (phase != "compressed")
    before = [copy.deepcopy(model) for model in models], [tensors_of(each) for each in optimizers]
    numbers = [copy.deepcopy((each.steps, each.numbers)) for each in optimizers]
    for _ in range(2):
        give(models, 77)
        models[1][0].grad[2, 1] = bad
        models[1][1].grad[3] = bad
        step(optimizers)
    for rank, optimizer in enumerate(optimizers):
        assert all(map(torch.equal, models[rank], before[0][rank]))
        assert all(map(torch.equal, tensors_of(optimizer), before[1][rank]))
        assert (optimizer.steps, optimizer.numbers) == numbers[rank]
        assert optimizer.skipped == 2
        assert "not finite or too large: rank 1 has 2" in optimizer.skip_reason
    # and it goes on
    give(models, 5)
    step(optimizers)
    assert optimizers[0].skip_reason == ""
    assert alike(models)
    assert not torch.equal(models[0][0], before[0][0][0])


def test_a_missing_gradient_counts_as_zeros():
    trained = []
    for missing in (True, False):
        models, optimizers = small_team(3, warmup=2)
        for number in range(6):
            give(models, number)
            models[1][1].grad = None if missing else torch.zeros(5)
            step(optimizers)
        assert alike(models)
        trained.append(models[0])
    assert all(map(torch.equal, *trained))


def embeddings(steps, half_at=lambda number: True, **options):
    """A table of 64 rows of which two workers look up the even ones alone, at some steps."""
    torch.manual_seed(0)
    start = torch.randn(64, 8)
    tables = [nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = [
        OneBitAdam([table], lr=0.01, group=Group(rank, 2), **options)
        for rank, table in enumerate(tables)
    ]
    for number in range(steps):
        for rank, table in enumerate(tables):
            generator = torch.Generator().manual_seed(100 * number + rank)
            rows = torch.randint(0, 64, (16,), generator=generator)
            table.grad = None
            rows = rows // 2 * 2 if half_at(number) else rows
            (table[rows] - 1).square().mean().backward()
        step(optimizers)
    assert torch.equal(*tables)
    return start, tables[0].detach(), optimizers[0]


def test_rows_that_were_never_looked_up_only_decay():
    steps = 30
    start, table, optimizer = embeddings(steps, warmup=5, weight_decay=0.1)
    assert optimizer.is_frozen
    assert int(optimizer.vectors["active"].sum()) <= 32 * 8
    decayed = start[1::2] * (1 - 0.01 * 0.1) ** steps
    torch.testing.assert_close(table[1::2], decayed, rtol=1e-5, atol=1e-6)
    assert float(table.abs().max()) < 5
    assert float((table[::2] - 1).square().mean()) < float((start[::2] - 1).square().mean())


def test_without_the_mask_such_rows_explode(monkeypatch):
    monkeypatch.setattr(OneBitAdam, "_set_active", lambda self, active: None)
    _, table, _ = embeddings(10, warmup=5)
    assert float(table.abs().max()) > 1e3


@pytest.mark.parametrize(("floor", "explodes"), [(1e-4, False), (0.0, True)])
def test_rows_that_were_looked_up_long_ago_do_not_explode(floor, explodes):
    late = lambda number: number > 0  # noqa: E731
    start, table, _ = embeddings(120, late, warmup=100, betas=(0.8, 0.8), variance_floor=floor)
    moved = float((table[1::2] - start[1::2]).abs().max())
    assert (moved > 100) == explodes
    assert explodes or moved < 5


@pytest.mark.parametrize("reactivate", ["step", "refresh"])
def test_rows_that_are_looked_up_later(reactivate):
    early = lambda number: number < 10  # noqa: E731
    options = {"warmup": 5, "weight_decay": 0.0, "reactivate": reactivate}
    start, before, asleep = embeddings(10, early, **options)
    assert torch.equal(before[1::2], start[1::2])
    _, table, optimizer = embeddings(60, early, **options)
    if reactivate == "refresh":
        assert torch.equal(table[1::2], start[1::2])
        assert torch.equal(optimizer.vectors["active"], asleep.vectors["active"])
        return
    assert not bool((table[1::2] == start[1::2]).any())
    assert float((table[1::2] - 1).square().mean()) < float((start[1::2] - 1).square().mean())
    # none is asleep any more, so that all steps are compressed again
    assert "active" not in optimizer.vectors
    assert not optimizer.is_gradient_step


def test_gradient_steps_become_rare_if_rows_are_reactivated_continually():
    tables = [nn.Parameter(torch.zeros(64, 8)) for _ in range(2)]
    optimizers = [
        OneBitAdam([table], lr=0.01, warmup=5, group=Group(rank, 2))
        for rank, table in enumerate(tables)
    ]
    gradient_steps = []
    for number in range(1, 73):
        if optimizers[0].is_gradient_step:
            gradient_steps.append(number)
        row = 0 if number <= 5 else number % 64
        for rank, table in enumerate(tables):
            table.grad = None
            (table[torch.tensor([0, 1, row if rank else 0])] - 1).square().mean().backward()
        step(optimizers)
    # a row each step asks for one; the sixth step is the first that sees a row asleep
    assert gradient_steps == [1, 2, 3, 4, 5, 7, 9, 11, 15, 23, 39, 71]
    # and takes with it all that woke before
    assert not bool((tables[0] == 0).any())
    assert torch.equal(*tables)


def test_a_parameter_with_its_only_gradient_in_a_compressed_step_is_updated():
    models, optimizers = small_team(2, warmup=2, weight_decay=0.0)
    start = models[0][1].detach().clone()
    for number in range(8):
        give(models, number)
        for model in models:
            model[1].grad = model[1].grad if number == 4 else None
        step(optimizers)
        # the gradient is pending until the next step, which exchanges gradients
        assert torch.equal(models[0][1], start) == (number < 5)


def test_a_gradient_too_small_for_a_variance_reactivates_nothing():
    models, optimizers = small_team(2, shapes=[(40,)], warmup=2)
    for number in range(6):
        give(models, number)
        for model in models:
            model[0].grad[:20] = 1e-25 if number > 2 else 0.0
        assert number < 2 or not optimizers[0].is_gradient_step
        step(optimizers)


@pytest.mark.parametrize(("floor", "explodes"), [(1e-4, False), (0.0, True)])
def test_elements_reactivated_by_a_small_gradient_do_not_explode(floor, explodes):
    # in reach of the others' scale, which is that of the block
    models, optimizers = small_team(2, shapes=[(64,)], warmup=2, variance_floor=floor)
    start = models[0][0].detach().clone()
    for number in range(8):
        give(models, number)
        for model in models:
            model[0].grad[::2] = 1e-12 if number > 2 else 0.0
        step(optimizers)
    assert "active" not in optimizers[0].vectors
    moved = float((models[0][0] - start).detach()[::2].abs().max())
    assert (moved > 1e3) == explodes
    assert explodes or moved < 10


def test_parameters_that_differ_are_named_on_all_workers():
    shapes = [(2, 2), (2, 2), (2, 3)]
    optimizers = [
        OneBitAdam([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(shape))], group=group)
        for group, shape in zip((Group(rank, 3) for rank in range(3)), shapes, strict=True)
    ]

    def words(optimizer):
        try:
            yield from optimizer.algorithm()
        except ValueError as error:
            return str(error)

    for found in lockstep([words(optimizer) for optimizer in optimizers]).results:
        assert "ranks 0 and 2 differ" in found
        assert "group 0, parameter 1 (2, 2)" in found
        assert "group 0, parameter 1 (2, 3)" in found


def test_options_that_differ_are_an_error():
    optimizers = [
        OneBitAdam([nn.Parameter(torch.ones(3))], warmup=5 + rank, group=Group(rank, 2))
        for rank in range(2)
    ]
    with pytest.raises(ValueError, match=r"warmup 5 .*warmup 6 "):
        step(optimizers)


def test_all_ranks_start_with_the_parameters_of_rank_0():
    models, optimizers = small_team(3)
    for rank, model in enumerate(models):
        model[0].data.add_(rank)
    first = models[0][0].detach().clone()
    lockstep([optimizer.broadcast_model_algorithm() for optimizer in optimizers])
    assert all(torch.equal(model[0], first) for model in models)


def test_sparse_gradients_are_as_dense_ones():
    trained = []
    for sparse in (True, False):
        models = [Everything(sparse=sparse).float() for _ in range(2)]
        optimizers = [
            OneBitAdam(model.parameters(), lr=0.01, warmup=4, group=Group(rank, 2))
            for rank, model in enumerate(models)
        ]
        train(models, optimizers, 8)
        assert models[0].table.weight.grad.is_sparse == sparse
        trained.append(values_of(models[1]))
    assert torch.equal(*trained)


def test_parameters_of_half_and_single_precision_train_together():
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1).bfloat16()))
    optimizers = [
        OneBitAdam(model.parameters(), lr=0.02, warmup=20, group=Group(rank, 2))
        for rank, model in enumerate(models)
    ]
    losses = []
    for number in range(80):
        for rank, model in enumerate(models):
            inputs = torch.randn(32, 6, generator=torch.Generator().manual_seed(2 * number + rank))
            hidden = model[1](model[0](inputs))
            difference = (
                model[2](hidden.bfloat16()).float() - inputs.sum(dim=1, keepdim=True).tanh()
            )
            model.zero_grad()
            difference.square().mean().backward()
        losses.append(float(difference.detach().square().mean()))
        step(optimizers)
    assert models[0][2].weight.dtype == torch.bfloat16
    assert alike([list(model.parameters()) for model in models])
    assert sum(losses[-10:]) < 0.3 * sum(losses[:10])


def test_frozen_and_tied_parameters():
    models, optimizers = team(2, warmup=3)
    train(models, optimizers, 8)
    for model in models:
        assert model.tied.weight is model.first.weight
        assert torch.equal(model.frozen, Everything().float().frozen)
        # it never had a gradient: not even decay moves it
        assert torch.equal(model.unused, Everything().float().unused)
    assert sum(parameter.numel() for parameter in optimizers[0].flat_params.parameters) == len(
        values_of(models[0])
    )


# --- checkpoints

END, AHEAD = 16, 3


def history():
    """Each step's state and parameters, of a run with all kinds of steps."""
    models, optimizers = team(3, warmup=4, refresh=3)
    states, values, wakes = [], [], []
    for number in range(END):
        states.append(([saved(each) for each in optimizers], copy.deepcopy(models)))
        wakes.append((optimizers[0].is_frozen, optimizers[0].numbers["has_inactive_gradient"]))
        train(models, optimizers, number + 1, number)
        values.append(([values_of(model) for model in models], list(map(tensors_of, optimizers))))
    # before the freeze, after it, and with rows about to wake
    assert {(False, False), (True, False), (True, True)} == set(wakes)
    return states, values


def test_it_resumes_to_the_bit_at_every_step():
    states, values = history()
    for number, (state, models) in enumerate(states):
        _, optimizers = team(3, warmup=4, refresh=3)
        optimizers = [
            OneBitAdam(model.parameters(), lr=0.01, warmup=4, refresh=3, group=optimizer.group)
            for model, optimizer in zip(models, optimizers, strict=True)
        ]
        for optimizer, each in zip(optimizers, state, strict=True):
            optimizer.load_state_dict(each)
        end = min(number + AHEAD, END)
        train(models, optimizers, end, number)
        for rank, optimizer in enumerate(optimizers):
            assert torch.equal(values_of(models[rank]), values[end - 1][0][rank]), number
            assert all(map(torch.equal, tensors_of(optimizer), values[end - 1][1][rank])), number


def total_pending(states):
    errors = [unpack_state("", state)["errors"]["momentum"] for state in states]
    pending = torch.cat([each["server"] for each in errors]).double()
    return pending + sum(each["worker"].double() for each in errors) / len(errors)


@pytest.mark.parametrize("new", [2, 8, 3])
def test_another_number_of_ranks_keeps_the_compression_errors(new):
    models, optimizers = team(4, warmup=3)
    # the last step is compressed or not, as rows wake
    train(models, optimizers, 9)
    states = [saved(each) for each in optimizers]
    fitted = [resize_state(states, rank, new) for rank in range(new)]
    size = float(total_pending(states).abs().max())
    assert size > 0
    torch.testing.assert_close(
        total_pending(fitted), total_pending(states), rtol=1e-6, atol=1e-7 * size
    )
    others, anew = team(new, warmup=3)
    for rank, optimizer in enumerate(anew):
        others[rank].load_state_dict(models[0].state_dict())
        optimizer.load_state_dict(fitted[rank])
        for name, vector in optimizers[0].vectors.items():
            assert torch.equal(optimizer.vectors[name], vector), name
        assert (optimizer.steps, optimizer.numbers) == (9, optimizers[0].numbers)
    train(others, anew, 14, 9)
    assert all(torch.equal(values_of(each), values_of(others[0])) for each in others)


@pytest.mark.parametrize(("old", "new"), [(1, 3), (3, 1)])
def test_from_one_worker_and_to_one(old, new):
    models, optimizers = team(old, warmup=3)
    train(models, optimizers, 6)
    states = [saved(each) for each in optimizers]
    others, anew = team(new, warmup=3)
    for rank, optimizer in enumerate(anew):
        others[rank].load_state_dict(models[0].state_dict())
        optimizer.load_state_dict(resize_state(states, rank, new))
    train(others, anew, 12, 6)
    assert all(torch.equal(values_of(each), values_of(others[0])) for each in others)
    # and once more, frozen by now
    states = [saved(each) for each in anew]
    more, last = team(2, warmup=3)
    for rank, optimizer in enumerate(last):
        more[rank].load_state_dict(others[0].state_dict())
        optimizer.load_state_dict(resize_state(states, rank, 2))
        assert optimizer.is_frozen
    train(more, last, 16, 12)
    assert torch.equal(values_of(more[0]), values_of(more[1]))


def regression(steps, between=None):
    """The loss at the end of a regression whose features are of very different sizes."""
    generator = torch.Generator().manual_seed(7)
    sizes = 10 ** torch.linspace(-1, 0.5, 96)
    wanted = torch.randn(96, generator=generator)
    parameters = [nn.Parameter(torch.zeros(96)) for _ in range(4)]
    options = {"lr": 0.02, "weight_decay": 0.0, "warmup": 30}

    def optimizers(parameters):
        groups = [Group(rank, len(parameters)) for rank in range(len(parameters))]
        pairs = zip(parameters, groups, strict=True)
        return [OneBitAdam([parameter], group=group, **options) for parameter, group in pairs]

    made, losses = optimizers(parameters), []
    for number in range(steps):
        if between is not None and number > 40 and number % 5 == 0:
            states = between([saved(each) for each in made])
            values = parameters[0].detach()
            parameters = [nn.Parameter(values.clone()) for _ in states]
            made = optimizers(parameters)
            for each, state in zip(made, states, strict=True):
                each.load_state_dict(state)
        for p in parameters:
            inputs = torch.randn(64, 96, generator=generator) * sizes
            p.grad = None
            (inputs @ (p - wanted)).square().mean().backward()
        step(made)
        losses.append(float(((parameters[0].detach() - wanted) * sizes).square().sum()))
    # it goes up and down
    return sum(losses[-20:]) / 20


def test_resizing_without_the_compression_errors_is_worse():
    def folded(states):
        new = 2 if len(states) == 4 else 4
        return [resize_state(states, rank, new) for rank in range(new)]

    def forgotten(states):
        found = folded(states)
        for state in found:
            for error in state["errors"]["momentum"].values():
                error.zero_()
        return found

    start = regression(30)
    fold, reset = regression(160, folded), regression(160, forgotten)
    assert fold < 0.2 * start
    assert fold < 0.3 * reset


def test_states_of_other_ranks_and_models_are_rejected():
    models, optimizers = small_team(2, warmup=2)
    for number in range(3):
        give(models, number)
        step(optimizers)
    state = saved(optimizers[1])
    with pytest.raises(ValueError, match="rank 1 of 2 cannot be loaded on rank 0 of 2"):
        optimizers[0].load_state_dict(state)
    _, (_, other) = small_team(2, shapes=((6, 4), (4,)), warmup=2)
    with pytest.raises(ValueError, match=r"parameter 1 \(5,\).*parameter 1 \(4,\)"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="does not support adding parameters"):
        other.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_damaged_and_incomplete_states_are_rejected():
    _, (optimizer, _) = small_team(2, warmup=2)
    state = optimizer.state_dict()
    entries = state["state"].items()
    cut = {
        number: {
            name: value[:-20] if isinstance(value, bytes) else value
            for name, value in entry.items()
        }
        for number, entry in entries
    }
    with pytest.raises(ValueError, match=r"(?s)the state is damaged: .*\n\nhint: "):
        optimizer.load_state_dict({**state, "state": cut})
    with pytest.raises(ValueError, match="the state has 0 parameter groups, but was saved with 1"):
        optimizer.load_state_dict({"state": state["state"]})
    optimizer.load_state_dict(state)


def test_later_steps_do_not_change_the_numbers_of_a_state():
    models, optimizers = small_team(2, warmup=None, betas=(0.9, 0.5))
    for number in range(3):
        give(models, number)
        step(optimizers)
    state, packed = optimizers[0].snapshot(), optimizers[0].state_dict()
    norms = list(state["shared"]["numbers"]["norms"])
    assert norms
    give(models, 4)
    step(optimizers)
    assert state["shared"]["numbers"]["norms"] == norms
    assert unpack_state("OneBitAdam", packed)["shared"]["numbers"]["norms"] == norms


def test_memory_is_counted():
    models, optimizers = small_team(2, shapes=[(64,)], warmup=1)
    give(models, 0)
    # the momentum, the variance, a flag
    assert optimizers[0].state_bytes == 64 * 8 + 1
    step(optimizers)
    # what this worker has not sent, and what it has not passed on of its half
    assert optimizers[0].state_bytes == 64 * 8 + 1 + 64 * 4 + 32 * 4


# --- as an optimizer of torch


@pytest.mark.parametrize("warmup", [100, 2])
def test_all_ranks_clip_by_the_same_factor(warmup):
    models, optimizers = small_team(3, warmup=warmup, clip_norm=0.5)
    plain, others = small_team(3, warmup=warmup)
    for number in range(5):
        give(models, number, 10.0)
        give(plain, number, 10.0)
        gradients = [torch.cat([p.grad.view(-1) for p in model]) for model in plain]
        if optimizers[0].is_gradient_step:
            norm = float(torch.stack(gradients).mean(dim=0).norm())
        else:
            # the root of the mean of squares, since nobody has the mean
            norm = float(torch.stack([each.norm() for each in gradients]).square().mean().sqrt())
        for model in plain:
            for parameter in model:
                parameter.grad *= min(1.0, 0.5 / norm)
        step(optimizers)
        step(others)
        for one, other in zip(models[0], plain[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert alike(models)


@pytest.mark.parametrize("warmup", [100, 1])
@pytest.mark.parametrize("unscaled", [False, True])
def test_all_skip_when_one_workers_scaled_loss_overflows(warmup, unscaled):
    models, optimizers = small_team(2, warmup=warmup)
    plain, others = small_team(2, warmup=warmup)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in models]

    for number in range(4):
        give(models, number)
        give(plain, number)
        for model, scaler in zip(models, scalers, strict=True):
            scaler.scale(torch.ones(()))
            for parameter in model:
                parameter.grad *= scaler.get_scale()
        if number == 2:
            models[1][0].grad[0, 0] = float("inf")
        for optimizer, scaler in zip(optimizers, scalers, strict=True):
            if unscaled:
                scaler.unscale_(optimizer)
        step_scaled(optimizers, scalers)
        if number != 2:
            step(others)
        assert all(optimizer.skipped == (number >= 2) for optimizer in optimizers)
    assert alike(models)
    # the scale is a power of 2, so that nothing is rounded
    assert alike([models[0], plain[0]])


def step_scaled(optimizers, scalers):
    """`GradScaler.step` of all workers, whose optimizers' steps are taken together."""
    algorithms = []
    for optimizer, scaler in zip(optimizers, scalers, strict=True):

        def note(optimizer=optimizer):
            scale = getattr(optimizer, "grad_scale", None)

            def algorithm():
                optimizer.grad_scale = scale
                yield from optimizer.algorithm()
                del optimizer.grad_scale

            algorithms.append(algorithm())

        optimizer.step = note
        scaler.step(optimizer)
        del optimizer.step
    lockstep(algorithms)
    for scaler in scalers:
        scaler.update()


def test_it_is_an_optimizer_of_torch():
    model = nn.Linear(3, 1)
    optimizer = OneBitAdam(model.parameters(), lr=1.0, group=Group())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(3)).square().sum()
        loss.backward()
        return loss

    expected = float(model(torch.ones(3)).detach().square().sum())
    assert optimizer.step(closure).item() == pytest.approx(expected)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer.zero_grad()
    assert model.weight.grad is None
    with pytest.raises(ValueError, match="step or refresh"):
        OneBitAdam(model.parameters(), reactivate="maybe", group=Group())
    with pytest.raises(ValueError, match="uses error feedback"):
        OneBitAdam(model.parameters(), gradient_compression=Sign(), group=Group())


def test_a_schedulers_step_size_is_kept_in_the_state():
    (model,), (optimizer,) = small_team(1)
    give([model], 0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    scheduler.step()
    (_,), (other,) = small_team(1)
    other.load_state_dict(saved(optimizer))
    assert other.param_groups[0]["lr"] == 0.005
    assert other.param_groups[0]["initial_lr"] == 0.01


def test_signals_of_one_rank_reach_all_ranks():
    models, optimizers = small_team(3, warmup=2, signals=2)
    for number in range(4):
        for signals in ([False, False], [False, True], [True, False]):
            give(models, number)
            optimizers[2].signals = signals
            step(optimizers)
            assert all(optimizer.received_signals == signals for optimizer in optimizers)


def test_it_freezes_by_itself_when_the_variance_is_stable():
    models, optimizers = small_team(2, betas=(0.9, 0.9), warmup=None, warmup_range=(40, 1000))
    frozen_at = 0
    for number in range(200):
        give(models, number)
        step(optimizers)
        assert optimizers[0].numbers["frozen_at"] == optimizers[1].numbers["frozen_at"]
        if frozen_at := optimizers[0].numbers["frozen_at"]:
            break
    # at the third look at the soonest
    assert frozen_at >= 60
    assert frozen_at % FreezeRule(0.9).interval == 0
    models, optimizers = small_team(2, betas=(0.9, 0.9), warmup=None, warmup_range=(0, 25))
    for number in range(25):
        assert not optimizers[0].is_frozen
        # it grows all the time
        give(models, number, 1.5**number)
        step(optimizers)
    assert optimizers[0].numbers["frozen_at"] == 25


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
        step(optimizers)
        variances[number] = optimizers[0].vectors["variance"].clone()
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
            frozen = optimizers[0].vectors["variance"].clone()
            give(models, 0, 3.0 if number == 3 else 0.5)
            gradients = [torch.cat([p.grad.view(-1) for p in model]) for model in models]
            square = torch.stack(gradients).mean(dim=0).square()
        step(optimizers)
        if number in (13, 21):
            # the same gradient all the time, over 11 and 8 steps
            kept = 0.9 ** (11 if number == 13 else 8)
            expected = kept * frozen + (1 - kept) * square
            torch.testing.assert_close(optimizers[0].vectors["variance"], expected)


# --- over processes


def test_over_processes_as_in_lockstep(tmp_path):
    found = results(2, tmp_path, train_as_worker, 12)
    models, optimizers = team(2, warmup=5, refresh=4)
    train(models, optimizers, 12)
    for rank, (values, tensors, numbers) in enumerate(found):
        assert torch.equal(values, values_of(models[rank]))
        assert all(map(torch.equal, tensors, tensors_of(optimizers[rank])))
        assert numbers == optimizers[rank].numbers
