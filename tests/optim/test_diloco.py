"""DiLoCo and local SGD: outer steps of torch's optimizers, shards, faults, a single rank."""

import pytest
import torch
from optim.teams import (
    adamw,
    all_equal,
    around,
    broadcast,
    finish_pending,
    mean_of,
    saved,
    sgd,
    team,
    train,
    vector_of,
    vectors_of,
)

from gcnzc.compress import Dense
from gcnzc.exchange import Group
from gcnzc.optim import DiLoCo, LocalSGD, StreamingDiLoCo, resize_state

HALF = Dense(torch.float16)
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9}


def every(steps, **options):
    return around(DiLoCo, local_steps=steps, **{**OUTER, **options})


def momentum(nesterov):
    return lambda parameters: torch.optim.SGD(parameters, 0.7, 0.9, nesterov=nesterov)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.02, weight_decay=0.1)


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({"nesterov": False}, momentum(False)),
        ({"nesterov": True}, momentum(True)),
        ({"outer": adam}, adam),
    ],
    ids=["heavy ball", "nesterov", "adam"],
)
def test_an_outer_step_is_torchs_on_the_mean_difference(options, reference):
    models, optimizers = team(3, every(4, **options), adamw)
    broadcast(optimizers)
    common = torch.nn.Parameter(vector_of(models[0]))
    outer = reference([common])
    flags = [torch.full_like(each, each.requires_grad) for each in models[0].parameters()]
    is_trained = torch.cat([each.view(-1) for each in flags]) > 0
    for begin in (0, 4, 8):
        # the same steps with a window that does not end
        others, theirs = team(3, every(100), adamw)
        for model, other, own, its in zip(models, others, optimizers, theirs, strict=True):
            other.load_state_dict(model.state_dict())
            its.inner.load_state_dict(saved(own.inner.state_dict()))
            its.is_broadcast = True
            its.on_broadcast()
        train(others, theirs, begin + 4, begin)
        train(models, optimizers, begin + 4, begin)
        common.grad = common.detach() - mean_of(others)
        outer.step()
        assert all_equal(models)
        found, expected = vector_of(models[0])[is_trained], common.detach()[is_trained]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", [DiLoCo, StreamingDiLoCo])
@pytest.mark.parametrize("options", [{"offload": True}, {"outer": momentum(True)}])
def test_an_optimizer_of_torch_and_host_memory_change_no_bit(kind, options):
    found = []
    for own in ({}, options):
        models, optimizers = team(3, around(kind, local_steps=4, **OUTER, **own), adamw)
        train(models, optimizers, 15)
        found.append(vectors_of(models))
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", [DiLoCo, StreamingDiLoCo])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_outer_optimizer_is_saved_and_resized(kind, world_size):
    make = around(kind, local_steps=4, outer=adam)
    models, optimizers = team(3, make)
    train(models, optimizers, 10)
    finish_pending(optimizers)
    states = [saved(optimizer.state_dict()) for optimizer in optimizers]
    others, loaded = team(world_size, make)
    for rank, optimizer in enumerate(loaded):
        optimizer.load_state_dict(resize_state(states, rank, world_size))
        if world_size > 1:
            for own, first in zip(optimizer.fragments, optimizers[0].fragments, strict=True):
                expected = first.outer.state_dict()["state"]
                assert repr(own.outer.state_dict()["state"]) == repr(expected)
    train(others, loaded, 17, 10)
    if world_size == 3:
        train(models, optimizers, 17, 10)
        assert torch.equal(vectors_of(models), vectors_of(others))


def test_sharding_changes_only_the_memory():
    models, optimizers = team(3, every(4, sharded=True), adamw)
    train(models, optimizers, 12)
    others, theirs = team(3, every(4), adamw)
    train(others, theirs, 12)
    torch.testing.assert_close(vector_of(models[0]), vector_of(others[0]), rtol=0, atol=1e-12)
    count = sum(each.numel() for each in models[0].parameters() if each.requires_grad)
    assert theirs[0].state_bytes == 2 * count * 8
    assert sum(optimizer.state_bytes for optimizer in optimizers) == 2 * count * 8
    assert max(optimizer.state_bytes for optimizer in optimizers) <= 2 * (count // 3 + 32) * 8


@pytest.mark.parametrize("options", [{"compress": HALF}, {"sharded": True}])
@pytest.mark.parametrize("overflows", [False, True])
def test_nothing_changes_if_no_rank_is_finite_or_the_mean_overflows(options, overflows):
    models, optimizers = team(2, every(2, **options), sgd, torch.float32)
    train(models, optimizers, 3)
    kept = [(each.anchor.clone(), each.momentum.clone()) for each in optimizers]
    with torch.no_grad():
        for model in models:
            # of the first share alone
            model.table.weight[0, 0] = 1e6 if overflows else float("nan")
    for optimizer in optimizers if overflows else ():
        # overflows where the difference, which is not compressed, does not
        optimizer.outer_lr = 1e38
    train(models, optimizers, 4, 3)
    for (anchor, buffer), optimizer in zip(kept, optimizers, strict=True):
        assert torch.equal(optimizer.anchor, anchor)
        assert torch.equal(optimizer.momentum, buffer)
        assert ("no rank's parameters are finite" in optimizer.skip_reason) != overflows
        assert optimizer.dropped == 1


def test_a_single_rank_takes_outer_steps_if_requested():
    results = []
    for sharded in (False, True):
        make = every(2, outer_lr=0.5, outer_momentum=0.0, alone=True, sharded=sharded)
        (alone,), optimizers = team(1, make)
        begin = vector_of(alone)
        train([alone], optimizers, 2)
        (other,), its = team(1, every(2))
        train([other], its, 2)
        torch.testing.assert_close(vector_of(alone), (begin + vector_of(other)) / 2)
        results.append(vector_of(alone))
    torch.testing.assert_close(*results, rtol=0, atol=1e-14)


def test_means_of_differences_are_means_of_parameters():
    plain, optimizers = team(3, around(LocalSGD, local_steps=4))
    train(plain, optimizers, 12)
    # of another dtype than the vector's own, though as exact
    make = around(LocalSGD, local_steps=4, compress=Dense(torch.float64))
    models, optimizers = team(3, make)
    train(models, optimizers, 12)
    assert all_equal(models)
    torch.testing.assert_close(vector_of(models[0]), vector_of(plain[0]), rtol=0, atol=1e-12)


def test_the_state_of_a_method_belongs_to_its_class():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = DiLoCo(sgd([parameter]), Group(), local_steps=3)
    assert "local_steps=3" in repr(optimizer)
    with pytest.raises(ValueError, match="the state of DiLoCo, not of LocalSGD"):
        LocalSGD(sgd([parameter]), Group()).load_state_dict(optimizer.state_dict())
