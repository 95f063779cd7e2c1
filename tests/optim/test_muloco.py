"""MuLoCo: DiLoCo of Muon with outer gradients of two bits."""

import warnings

import pytest
import torch
from optim.teams import all_equal, around, team, train, vector_of
from torch import nn
from torch.nn import functional

from gcnzc.compress import Blocks, Dense
from gcnzc.exchange import Group, lockstep
from gcnzc.optim import DiLoCo, MuLoCo, Muon

INT2 = Blocks("int2", has_feedback=True)


def muon(parameters):
    return Muon(parameters, lr=0.01)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_it_is_diloco_with_its_defaults_bit_for_bit(world_size):
    options = {"outer_lr": 0.7, "outer_momentum": 0.6, "compress": INT2}
    found = []
    for make in (around(MuLoCo, local_steps=3), around(DiLoCo, local_steps=3, **options)):
        models, optimizers = team(world_size, make, muon, torch.float32)
        train(models, optimizers, 9)
        assert all_equal(models)
        found.append(vector_of(models[0]))
    assert torch.equal(*found)


def learn(world_size, steps, **options):
    """The parameters after some steps, the bytes of a rank, and the share of right answers."""
    torch.manual_seed(7)
    teacher = nn.Linear(20, 4)
    models, optimizers = [], []
    for rank in range(world_size):
        torch.manual_seed(0)
        layers = nn.Linear(20, 128), nn.Tanh(), nn.Linear(128, 128), nn.Linear(128, 4)
        models.append(nn.Sequential(*layers))
        inner = Muon(models[rank].parameters(), lr=0.005, module=models[rank])
        optimizers.append(MuLoCo(inner, Group(rank, world_size), **options))

    def take(rank):
        generator = torch.Generator().manual_seed(rank)
        for _ in range(steps):
            rows = torch.randn(32, 20, generator=generator)
            optimizers[rank].zero_grad()
            functional.cross_entropy(models[rank](rows), teacher(rows).argmax(1)).backward()
            yield from optimizers[rank].algorithm()

    lockstep([optimizer.broadcast_model_algorithm() for optimizer in optimizers])
    outcome = lockstep([take(rank) for rank in range(world_size)])
    rows = torch.randn(2000, 20, generator=torch.Generator().manual_seed(99))
    right = (models[0](rows).argmax(1) == teacher(rows).argmax(1)).double().mean()
    return vector_of(models[0]), outcome.ledgers[0].bytes_sent, float(right)


def test_two_bits_per_element_suffice_because_of_error_feedback():
    (_, sent, right), (_, whole, exact) = (
        learn(4, 60, local_steps=6, compress=compress) for compress in (INT2, Dense())
    )
    assert sent / whole == pytest.approx((2 + 32 / 256) / 32, rel=0.03)
    assert right > exact - 0.06 > 0.8
    dense, with_errors, without = (
        learn(2, 60, local_steps=3, compress=compress)[0]
        for compress in (Dense(), INT2, Blocks("int2"))
    )
    assert (with_errors - dense).norm() < 0.9 * (without - dense).norm()


def test_another_inner_optimizer_causes_a_warning():
    parameters = [*nn.Linear(3, 2).parameters()]
    with pytest.warns(UserWarning, match="MuLoCo has AdamW .* use gcnzc.optim.Muon") as warned:
        MuLoCo(torch.optim.AdamW(parameters), Group())
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MuLoCo(torch.optim.Muon([nn.Parameter(torch.zeros(3, 2))]), Group())
        MuLoCo(muon(parameters), Group())
