"""Data parallelism: gradients of any kind, messages, and replicas that are equal bit for bit."""

import pytest
import torch
from collective_sizes import WAYS, lockstep_by
from optim.methods import METHODS
from optim.teams import (
    Everything,
    all_equal,
    batches,
    loss_of,
    of_ranks,
    sgd,
    step_all,
    steps_of,
    team,
    train,
    vector_of,
)
from torch import nn

from gcnzc.exchange import Group, Link
from gcnzc.optim import Averaged


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_sparse_embedding_stays_sparse(world_size):
    expected = Everything(sparse=True)
    optimizer = sgd(expected.parameters())
    for rows in batches(12):
        optimizer.zero_grad()
        loss_of(expected, rows).backward()
        optimizer.step()
    models, optimizers = team(world_size, Averaged, sparse=True)
    train(models, optimizers, 12)
    for model in models:
        assert model.table.weight.grad.is_sparse
        torch.testing.assert_close(vector_of(model), vector_of(expected), rtol=1e-6, atol=1e-12)


def with_gradients(model, value):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return model


def test_a_parameter_without_a_gradient_on_any_rank_has_none_afterwards():
    models = [with_gradients(nn.Linear(2, 2), 1.0) for _ in range(2)]
    for model in models:
        model.bias.grad = None
    step_all(METHODS["averaged"].optimizers(models))
    assert all(model.bias.grad is None for model in models)


def test_the_number_of_messages_does_not_grow_with_the_parameters():
    for layers in (1, 20):
        models = [
            with_gradients(nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers))), 1.0)
            for _ in range(2)
        ]
        found = step_all(METHODS["averaged"].optimizers(models))
        assert found.ledgers[0].entries["Mean"].requests == 1


@pytest.mark.parametrize("way", WAYS)
def test_replicas_are_bitwise_equal_with_every_algorithm(way):
    models, optimizers = METHODS["averaged"].team(5, torch.float64)
    link = Link(bytes_per_s=1e6, delay_s=0.001)
    lockstep_by(way, of_ranks(steps_of, models, optimizers, 5), link)
    assert all_equal(models)


def test_signals_and_options_are_exchanged_if_all_gradients_are_sparse():
    tables = [nn.Embedding(5, 2, sparse=True) for _ in range(2)]
    optimizers = [
        Averaged(sgd(table.parameters()), Group(rank, 2), signals=2)
        for rank, table in enumerate(tables)
    ]
    optimizers[1].signals = [False, True]

    def take(steps):
        for _ in range(steps):
            for rank, table in enumerate(tables):
                table(torch.tensor([rank])).sum().backward()
            step_all(optimizers)

    take(1)
    assert [optimizer.received_signals for optimizer in optimizers] == [[False, True]] * 2
    optimizers[1].param_groups[0]["lr"] = 0.2
    with pytest.raises(ValueError, match=r"lr of parameter group 0 differs between ranks"):
        take(20)
