import copy

import pytest
import torch
from optim.local import (
    all_equal,
    saved,
    sgd,
    taught,
    team,
    train,
    vector_of,
)
from torch import nn

from gcnzc.compress import Dense, Sign
from gcnzc.exchange import Choices, Group, lockstep
from gcnzc.optim.local.local_sgd import LocalSGD
from gcnzc.optim.resize import resize_state

HALF = Dense(torch.float16)


def every(steps, **options):
    return lambda inner, group: LocalSGD(inner, group, local_steps=steps, **options)


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
