import pytest
import torch
from collective_sizes import lockstep_by
from optim.local import (
    adamw,
    all_equal,
    mean_of,
    saved,
    sent_by_step,
    sgd,
    taught,
    team,
    train,
    vector_of,
)
from optim.models import Everything, batches, loss_of

from gcnzc.compress import Dense
from gcnzc.exchange import Group, lockstep
from gcnzc.optim import DiLoCo, StreamingDiLoCo, resize_state

HALF = Dense(torch.float16)
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9}
PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0}


def every(steps, **options):
    return lambda inner, group: DiLoCo(inner, group, local_steps=steps, **{**OUTER, **options})


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_outer_step_is_that_of_torch_bit_for_bit(momentum, nesterov):
    parameter = torch.nn.Parameter(torch.randn(100))
    own = DiLoCo(
        torch.optim.SGD([parameter]), outer_lr=0.7, outer_momentum=momentum, nesterov=nesterov
    )
    anchor, buffer = parameter.detach().clone(), torch.zeros(100)
    sgd = torch.optim.SGD([parameter], 0.7, momentum, nesterov=nesterov and momentum > 0)
    for _ in range(5):
        parameter.grad = torch.randn(100)
        sgd.step()
        own.outer_step(anchor, buffer, parameter.grad.clone())
        assert torch.equal(anchor, parameter)


@pytest.mark.parametrize("kind", [DiLoCo, StreamingDiLoCo])
def test_a_state_of_a_single_rank_before_its_first_step_is_loaded(kind):
    def build():
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 2)
        inner = torch.optim.Adam(model.parameters(), lr=0.1)
        return model, kind(inner, Group(), local_steps=4, alone=True)

    (one, first), (other, second) = build(), build()
    second.load_state_dict(saved(first.state_dict()))
    for model, optimizer in ((one, first), (other, second)):
        for _ in range(14):
            optimizer.zero_grad()
            model(torch.ones(3, 5)).square().mean().backward()
            optimizer.step()
    assert torch.equal(one.weight, other.weight)


@pytest.mark.parametrize("nesterov", [False, True])
def test_an_outer_step_is_torchs_on_the_mean_difference(nesterov):
    models, optimizers = team(3, every(4, nesterov=nesterov), adamw)
    lockstep([optimizer.broadcast_model_algorithm() for optimizer in optimizers])
    common = torch.nn.Parameter(vector_of(models[0]))
    sgd = torch.optim.SGD([common], 0.7, 0.9, nesterov=nesterov)
    for begin in (0, 4, 8):
        # the same steps with a window that does not end
        others, theirs = team(3, every(100), adamw)
        for model, other, optimizer in zip(models, others, theirs, strict=True):
            other.load_state_dict(model.state_dict())
            optimizer.inner.load_state_dict(
                saved(optimizers[optimizer.group.rank].inner.state_dict())
            )
            optimizer.is_broadcast = True
            optimizer.on_broadcast()
        train(others, theirs, begin + 4, begin)
        train(models, optimizers, begin + 4, begin)
        common.grad = common.detach() - mean_of(others)
        sgd.step()
        assert all_equal(models)
        torch.testing.assert_close(vector_of(models[0]), common.detach(), rtol=0, atol=1e-12)


def nesterov(parameters):
    return torch.optim.SGD(parameters, 0.7, 0.9, nesterov=True)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.02, weight_decay=0.1)


@pytest.mark.parametrize("kind", [DiLoCo, StreamingDiLoCo])
@pytest.mark.parametrize("options", [{"offload": True}, {"outer": nesterov}])
def test_an_optimizer_of_torch_and_host_memory_change_no_bit(kind, options):
    found = []
    for own in ({}, options):
        make = lambda inner, group, own=own: kind(inner, group, local_steps=4, **OUTER, **own)  # noqa: E731
        models, optimizers = team(3, make, adamw)
        train(models, optimizers, 15)
        found.append(torch.stack([vector_of(model) for model in models]))
        assert optimizers[0].anchor.device.type == "cpu"
    assert torch.equal(*found)


def test_adam_as_outer_optimizer_takes_steps_with_the_mean_difference():
    models, optimizers = team(3, every(4, outer=adam))
    lockstep([optimizer.broadcast_model_algorithm() for optimizer in optimizers])
    common = torch.nn.Parameter(vector_of(models[0]))
    reference = adam([common])
    flags = [torch.full_like(each, each.requires_grad) for each in models[0].parameters()]
    is_trained = torch.cat([each.view(-1) for each in flags]) > 0
    for begin in (0, 4, 8):
        others, theirs = team(3, every(100))
        for model, other, optimizer in zip(models, others, theirs, strict=True):
            other.load_state_dict(model.state_dict())
            optimizer.is_broadcast = True
        train(others, theirs, begin + 4, begin)
        train(models, optimizers, begin + 4, begin)
        common.grad = common.detach() - mean_of(others)
        reference.step()
        assert all_equal(models)
        found, expected = vector_of(models[0])[is_trained], common.detach()[is_trained]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", [DiLoCo, StreamingDiLoCo])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_outer_optimizer_is_saved_and_resized(kind, world_size):
    def make(inner, group):
        return kind(inner, group, local_steps=4, outer=adam)

    models, optimizers = team(3, make)
    train(models, optimizers, 10)
    lockstep([optimizer.finish_pending_algorithm() for optimizer in optimizers])
    states = [saved(optimizer.state_dict()) for optimizer in optimizers]
    others, loaded = team(world_size, make)
    for rank, optimizer in enumerate(loaded):
        optimizer.load_state_dict(resize_state(states, rank, world_size))
        if world_size > 1:
            for name, outer in optimizer.outer_optimizers.items():
                expected = optimizers[0].outer_optimizers[name].state_dict()["state"]
                assert repr(outer.state_dict()["state"]) == repr(expected)
    train(others, loaded, 17, 10)
    if world_size == 3:
        train(models, optimizers, 17, 10)
        assert all(map(torch.equal, map(vector_of, models), map(vector_of, others)))


def test_sharding_changes_only_the_memory():
    models, optimizers = team(3, every(4, sharded=True), adamw)
    train(models, optimizers, 12)
    others, theirs = team(3, every(4), adamw)
    train(others, theirs, 12)
    torch.testing.assert_close(vector_of(models[0]), vector_of(others[0]), rtol=0, atol=1e-12)
    count = theirs[0].flat.num_elements
    assert theirs[0].state_bytes == 2 * count * 8
    assert sum(optimizer.state_bytes for optimizer in optimizers) == 2 * count * 8
    assert max(optimizer.state_bytes for optimizer in optimizers) <= 2 * (count // 3 + 32) * 8


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"compress": HALF}, {"sharded": True}])
def test_bytes_and_requests_are_as_stated(options, world_size):
    models, optimizers = team(world_size, every(4, **options, signals=1), dtype=torch.float32)
    lockstep([optimizer.broadcast_model_algorithm() for optimizer in optimizers])
    found = lockstep_by(
        "builtin",
        [taught(*pair, 9) for pair in zip(models, optimizers, strict=True)],
    )
    for ledger, optimizer in zip(found.ledgers, optimizers, strict=True):
        # of a shard: its extras, the mean, and the anchor
        assert ledger.requests == 2 * (3 if "sharded" in options else 1)
        stated = 2 * sent_by_step(optimizer)
        # parts of a ring differ by an element
        slack = 2 * 2 * world_size * 4
        assert abs(ledger.bytes_sent - stated) <= slack


@pytest.mark.parametrize("sharded", [False, True])
def test_nothing_changes_if_no_rank_is_finite(sharded):
    models, optimizers = team(2, every(2, sharded=sharded))
    train(models, optimizers, 3)
    kept = [(each.anchor.clone(), each.momentum.clone()) for each in optimizers]
    with torch.no_grad():
        for model in models:
            model.rare[1] = float("nan")
    train(models, optimizers, 4, 3)
    for (anchor, momentum), optimizer in zip(kept, optimizers, strict=True):
        assert torch.equal(optimizer.anchor, anchor)
        assert torch.equal(optimizer.momentum, momentum)
        assert "no rank's parameters are finite" in optimizer.skip_reason
        assert optimizer.dropped == 1


@pytest.mark.parametrize("options", [{"compress": HALF}, {"sharded": True}])
def test_nothing_changes_if_the_mean_overflows(options):
    models, optimizers = team(2, every(2, **options), sgd, torch.float32)
    train(models, optimizers, 3)
    kept = [(each.anchor.clone(), each.momentum.clone()) for each in optimizers]
    with torch.no_grad():
        for model in models:
            # of the first share alone
            model.table.weight[0, 0] = 1e6
    for optimizer in optimizers:
        # overflows where the difference, which is not compressed, does not
        optimizer.outer_lr = 1e38
    train(models, optimizers, 4, 3)
    for (anchor, momentum), optimizer in zip(kept, optimizers, strict=True):
        assert torch.equal(optimizer.anchor, anchor)
        assert torch.equal(optimizer.momentum, momentum)
        assert optimizer.skip_reason.startswith("synchronization skipped: ")
        assert "no rank" not in optimizer.skip_reason
        assert optimizer.dropped == 1


def test_a_single_rank_takes_inner_steps_and_outer_ones_if_requested():
    (plain,), optimizers = team(1, every(2))
    train([plain], optimizers, 6)
    expected = Everything()
    inner = sgd(expected.parameters())
    for rows in batches(6):
        inner.zero_grad()
        loss_of(expected, rows).backward()
        inner.step()
    assert torch.equal(vector_of(plain), vector_of(expected))
    results = []
    for sharded in (False, True):
        make = every(2, outer_lr=0.5, outer_momentum=0.0, alone=True, sharded=sharded)
        (alone,), optimizers = team(1, make)
        begin = vector_of(alone)
        train([alone], optimizers, 2)
        two, theirs = team(1, every(2))
        train(two, theirs, 2)
        torch.testing.assert_close(vector_of(alone), (begin + vector_of(two[0])) / 2)
        results.append(vector_of(alone))
    torch.testing.assert_close(*results, rtol=0, atol=1e-14)


def test_a_sparse_gradient_is_stepped_by_the_inner_optimizer():
    models = [Everything(sparse=True) for _ in range(2)]
    optimizers = [
        DiLoCo(sgd(model.parameters()), Group(rank, 2), local_steps=2, **PLAIN)
        for rank, model in enumerate(models)
    ]
    train(models, optimizers, 4)
    assert models[0].table.weight.grad.is_sparse
    dense, theirs = team(2, every(2, **PLAIN))
    train(dense, theirs, 4)
    torch.testing.assert_close(vector_of(models[0]), vector_of(dense[0]), rtol=0, atol=1e-12)
