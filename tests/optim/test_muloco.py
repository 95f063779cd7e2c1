"""MuLoCo: DiLoCo of Muon with outer gradients of two bits."""

import warnings

import pytest
import torch
from optim.local import all_equal, check_resuming_at_every_step, saved, team, train, vector_of
from torch import nn
from torch.nn import functional

from gcnzc.compress import Blocks, Dense
from gcnzc.exchange import Group, lockstep
from gcnzc.optim import DiLoCo, LocalSGD, MuLoCo, Muon, resize_state

INT2 = Blocks("int2", has_feedback=True)
PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "compress": Dense()}


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


@pytest.mark.parametrize("world_size", [2, 3])
def test_without_compression_and_an_outer_step_of_one_it_is_local_sgd(world_size):
    found = []
    for make in (every(3, **PLAIN), every(3, LocalSGD)):
        models, optimizers = team(world_size, make, muon)
        train(models, optimizers, 9)
        found.append(vector_of(models[0]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-10)


def test_a_run_resumes_from_any_step():
    check_resuming_at_every_step(every(3), 3, 7, inner=muon, dtype=torch.float32)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_states_of_other_numbers_of_ranks_are_loaded(world_size):
    models, optimizers = team(3, every(3), muon, torch.float32)
    train(models, optimizers, 6)
    states = [saved(optimizer.state_dict()) for optimizer in optimizers]
    others, more = team(world_size, every(3), muon, torch.float32)
    for rank, optimizer in enumerate(more):
        optimizer.load_state_dict(resize_state(states, rank, world_size))
    assert torch.equal(vector_of(others[0]), vector_of(models[0]))
    train(others, more, 9, 6)
    assert all_equal(others)


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
    count = first.flat_params.num_elements
    first_bytes = outcome.ledgers[0].bytes_sent - 10 * first.bytes_per_synchronization
    assert first.bytes_per_synchronization == INT2.bytes_sent(count, 4, first.extras)
    torch.set_rng_state(state)
    _, (dense, *_), whole, exact = learn(4, 60, every(6, compress=Dense()))
    assert whole.ledgers[0].bytes_sent - 10 * dense.bytes_per_synchronization == first_bytes
    share = first.bytes_per_synchronization / dense.bytes_per_synchronization
    assert share == pytest.approx((2 + 32 / 256) / 32, rel=0.03)
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


def test_a_rank_whose_parameters_are_not_finite_continues_from_the_mean_of_the_others():
    models, optimizers, _, right = learn(3, 24, every(6), bad_rank=1)
    assert all_equal(models)
    assert all(torch.isfinite(vector_of(model)).all() for model in models)
    assert all(optimizer.dropped == 1 for optimizer in optimizers)
    assert right > 0.4


def test_another_inner_optimizer_causes_a_warning():
    parameters = [*nn.Linear(3, 2).parameters()]
    with pytest.warns(UserWarning, match="MuLoCo has AdamW .* use gcnzc.optim.Muon") as warned:
        MuLoCo(torch.optim.AdamW(parameters), Group())
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MuLoCo(torch.optim.Muon([nn.Parameter(torch.zeros(3, 2))]), Group())
        MuLoCo(muon(parameters), Group())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outer_lr": -1.0}, "outer_lr is -1.0"),
        ({"outer_momentum": 1.0}, "outer_momentum is 1.0"),
        ({"local_steps": 0}, "local_steps"),
    ],
)
def test_invalid_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        MuLoCo(muon(nn.Linear(3, 2).parameters()), Group(), **options)
