import pytest
import torch
from collective_sizes import lockstep_by
from optim.local import (
    all_equal,
    sgd,
    taught,
    team,
    train,
    vector_of,
)
from torch import nn

from gcnzc.compress import Dense, Sign
from gcnzc.exchange import Group, lockstep
from gcnzc.optim import LocalSGD

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
    assert all(torch.equal(each.anchor, each.parameters) for each in optimizers)


@pytest.mark.parametrize("compress", [Dense(), HALF, Sign(block=64)], ids=["dense", "half", "sign"])
def test_bytes_and_requests_are_as_stated(compress):
    models, optimizers = team(4, every(5, compress=compress, signals=2), dtype=torch.float32)
    lockstep([optimizer.broadcast_model_algorithm() for optimizer in optimizers])
    pairs = zip(models, optimizers, strict=True)
    found = lockstep_by(
        "builtin",
        [taught(model, optimizer, 15) for model, optimizer in pairs],
    )
    count = optimizers[0].flat.num_elements
    for ledger in found.ledgers:
        # ring's parts differ by an element
        stated = 3 * compress.bytes_sent(count, 4, 4)
        assert abs(ledger.bytes_sent - stated) <= 3 * 6 * 4
        assert ledger.requests == 3 * (2 if isinstance(compress, Sign) else 1)


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
