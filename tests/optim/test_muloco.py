"""MuLoCo: DiLoCo of Muon with outer gradients of two bits."""

import warnings

import pytest
import torch
from optim.local import all_equal, team, train, vector_of
from torch import nn
from torch.nn import functional

from gcnzc.compress import Blocks, Dense
from gcnzc.exchange import Group, lockstep
from gcnzc.optim import DiLoCo, MuLoCo, Muon

INT2 = Blocks("int2", has_feedback=True)


def muon(parameters):
    return Muon(parameters, lr=0.01)


def every(steps, kind=MuLoCo, **options):
    return lambda inner, group: kind(inner, group, local_steps=steps, **options)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_it_is_diloco_with_its_defaults_bit_for_bit(world_size):
    options = {"outer_lr": 0.7, "outer_momentum": 0.6, "compress": INT2}
    found = []
    for make in (every(3), every(3, DiLoCo, **options)):
        models, optimizers = team(world_size, make, muon, torch.float32)
        train(models, optimizers, 9)
        assert all_equal(models)
        found.append(vector_of(models[0]))
    assert torch.equal(*found)


def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 128), nn.Tanh(), nn.Linear(128, 128), nn.Linear(128, 4))


def learn(world_size, steps, make, bad_rank=None):
    """The models after some steps, the optimizers, and the result of `lockstep`."""
    teacher = nn.Linear(20, 4)
    models = [wide() for _ in range(world_size)]
    optimizers = [
        make(Muon(model.parameters(), lr=0.005, module=model), Group(rank, world_size))
        for rank, model in enumerate(models)
    ]

    def take(rank):
        generator = torch.Generator().manual_seed(rank)
        for step in range(steps):
            rows = torch.randn(32, 20, generator=generator)
            optimizers[rank].zero_grad()
            functional.cross_entropy(models[rank](rows), teacher(rows).argmax(1)).backward()
            if rank == bad_rank and step == 4:
                with torch.no_grad():
                    models[rank][0].weight[0, 0] = torch.nan
            yield from optimizers[rank].algorithm()

    outcome = lockstep([take(rank) for rank in range(world_size)])
    rows = torch.randn(2000, 20, generator=torch.Generator().manual_seed(99))
    right = (models[0](rows).argmax(1) == teacher(rows).argmax(1)).double().mean()
    return models, optimizers, outcome, float(right)


def test_two_bits_per_element_are_sent_and_suffice():
    torch.manual_seed(7)
    state = torch.get_rng_state()
    _, (first, *_), outcome, right = learn(4, 60, every(6))
    # ten synchronizations, and the comparison of options before the first
    count = first.flat.num_elements
    sent = INT2.bytes_sent(count, 4, first.extras)
    first_bytes = outcome.ledgers[0].bytes_sent - 10 * sent
    torch.set_rng_state(state)
    _, (dense, *_), whole, exact = learn(4, 60, every(6, compress=Dense()))
    dense_sent = Dense().bytes_sent(count, 4, dense.extras)
    assert whole.ledgers[0].bytes_sent - 10 * dense_sent == first_bytes
    assert sent / dense_sent == pytest.approx((2 + 32 / 256) / 32, rel=0.03)
    assert right > exact - 0.06 > 0.8


def test_error_feedback_is_what_makes_two_bits_suffice():
    torch.manual_seed(7)
    state = torch.get_rng_state()
    found = []
    for compress in (Dense(), INT2, Blocks("int2")):
        torch.set_rng_state(state)
        models, _, _, _ = learn(2, 60, every(3, compress=compress))
        found.append(vector_of(models[0]))
    exact, with_errors, without = found
    assert (with_errors - exact).norm() < 0.9 * (without - exact).norm()


def test_another_inner_optimizer_causes_a_warning():
    parameters = [*nn.Linear(3, 2).parameters()]
    with pytest.warns(UserWarning, match="MuLoCo has AdamW .* use gcnzc.optim.Muon") as warned:
        MuLoCo(torch.optim.AdamW(parameters), Group())
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MuLoCo(torch.optim.Muon([nn.Parameter(torch.zeros(3, 2))]), Group())
        MuLoCo(muon(parameters), Group())
