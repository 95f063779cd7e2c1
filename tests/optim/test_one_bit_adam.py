import pytest
import torch
from optim.local import train
from optim.models import Everything, batches, loss_of
from optim.oracle import fixture, followed, lengths
from optim.replicas import team, values_of
from torch import nn

from bench.network.deepspeed_oracles import OneBitAdamDeepSpeed, PaddedSign
from gcnzc.compress import Sign, WorkerInfo
from gcnzc.exchange import Group, lockstep
from gcnzc.optim import OneBitAdam
from gcnzc.optim.synchronous.one_bit_adam import FreezeRule


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
            shared, first_shared = (
                each.snapshot()["shared"] for each in (optimizer, optimizers[0])
            )
            assert shared.keys() == first_shared.keys()
            for name, value in shared.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(first_shared[name])), (
                    name
                )
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


# --- faults


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
    assert int(optimizer.active.sum()) <= 32 * 8
    decayed = start[1::2] * (1 - 0.01 * 0.1) ** steps
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


@pytest.mark.parametrize("reactivate", ["step", "refresh"])
def test_rows_that_are_looked_up_later(reactivate):
    early = lambda number: number < 10  # noqa: E731
    options = {"warmup": 5, "weight_decay": 0.0, "reactivate": reactivate}
    start, before, asleep = embeddings(10, early, **options)
    assert torch.equal(before[1::2], start[1::2])
    _, table, optimizer = embeddings(60, early, **options)
    if reactivate == "refresh":
        assert torch.equal(table[1::2], start[1::2])
        assert torch.equal(optimizer.active, asleep.active)
        return
    assert not bool((table[1::2] == start[1::2]).any())
    assert float((table[1::2] - 1).square().mean()) < float((start[1::2] - 1).square().mean())
    # none is asleep any more, so that all steps are compressed again
    assert optimizer.active is None
    assert not optimizer.is_gradient_step


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


# --- checkpoints


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
    with pytest.raises(ValueError, match="param_groups of the state is None, not a list"):
        optimizer.load_state_dict({"state": state["state"]})
    optimizer.load_state_dict(state)


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


def test_it_freezes_by_itself_when_the_variance_is_stable():
    models, optimizers = small_team(2, betas=(0.9, 0.9), warmup=None, warmup_range=(40, 1000))
    frozen_at = 0
    for number in range(200):
        give(models, number)
        step(optimizers)
        assert optimizers[0].frozen_at == optimizers[1].frozen_at
        if frozen_at := optimizers[0].frozen_at:
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
    assert optimizers[0].frozen_at == 25


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
            gradients = [torch.cat([p.grad.view(-1) for p in model]) for model in models]
            square = torch.stack(gradients).mean(dim=0).square()
        step(optimizers)
        if number in (13, 21):
            # the same gradient all the time, over 11 and 8 steps
            kept = 0.9 ** (11 if number == 13 else 8)
            expected = kept * frozen + (1 - kept) * square
            torch.testing.assert_close(optimizers[0].variance, expected)


# --- over processes
