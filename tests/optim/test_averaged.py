import pytest
import torch
from collective_sizes import WAYS, lockstep_by
from optim.models import Everything, batches, loss_of, train_on_shares
from torch import nn

from gcnzc.exchange import Group, Link, lockstep
from gcnzc.exchange.sync import all_gather_text, broadcast_bytes, check_same
from gcnzc.optim import Averaged

WORLDS = [1, 2, 3, 4, 8]
STEPS = 12
INNER = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
}


def whole(make_inner, sparse=False):
    """One worker that sees all rows of every step."""
    model = Everything(sparse=sparse)
    optimizer = make_inner(model.parameters())
    for rows in batches(STEPS):
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("inner", INNER)
def test_ranks_on_shards_of_a_minibatch_equal_one_rank_on_all_of_it(inner, world_size):
    expected = whole(INNER[inner])
    models = [Everything() for _ in range(world_size)]
    lockstep(
        [
            train_on_shares(model, INNER[inner](model.parameters()), rank, world_size, STEPS)
            for rank, model in enumerate(models)
        ]
    )
    for model in models:
        for (name, found), right in zip(
            model.named_parameters(), expected.parameters(), strict=True
        ):
            torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-12, msg=name)
        for found, first in zip(model.parameters(), models[0].parameters(), strict=True):
            assert torch.equal(found, first)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_sparse_embedding_stays_sparse(world_size):
    sgd = lambda params: torch.optim.SGD(params, lr=0.05)  # noqa: E731
    expected = whole(sgd, sparse=True)
    models = [Everything(sparse=True) for _ in range(world_size)]
    lockstep(
        [
            train_on_shares(model, sgd(model.parameters()), rank, world_size, STEPS)
            for rank, model in enumerate(models)
        ]
    )
    for model in models:
        assert model.table.weight.grad.is_sparse
        for found, right in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-12)


def one_step(models, inner=INNER["sgd"]):
    """A step of optimizers whose gradients are there already."""
    optimizers = [
        Averaged(inner(model.parameters()), Group(rank, len(models)))
        for rank, model in enumerate(models)
    ]
    found = lockstep([optimizer.algorithm() for optimizer in optimizers])
    return optimizers, found


def with_gradients(model, value):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return model


def test_a_gradient_missing_on_some_ranks_counts_as_zeros():
    models = [with_gradients(nn.Linear(2, 2), 1.0) for _ in range(4)]
    models[1].bias.grad = models[2].bias.grad = None
    one_step(models)
    assert all(torch.equal(model.bias.grad, torch.full((2,), 0.5)) for model in models)
    assert all(torch.equal(model.weight.grad, torch.ones(2, 2)) for model in models)


def test_a_parameter_without_a_gradient_on_any_rank_is_not_updated():
    models = [with_gradients(nn.Linear(2, 2), 1.0) for _ in range(2)]
    before = models[0].bias.detach().clone()
    for model in models:
        model.bias.grad = None
    # decay would move it
    one_step(models, INNER["adamw"])
    assert all(model.bias.grad is None for model in models)
    assert torch.equal(models[0].bias, before)


def begin(models):
    """What making the optimizers does, of workers that are not connected."""
    optimizers = [
        Averaged(INNER["sgd"](model.parameters()), Group(rank, len(models)), module=model)
        for rank, model in enumerate(models)
    ]
    return lockstep([optimizer.broadcast_model_algorithm() for optimizer in optimizers])


def test_models_that_differ_are_an_error_and_do_not_hang():
    models = [nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 3)]
    with pytest.raises(ValueError, match=r"ranks 0 and 2 differ: at line 1, .*\(2, 2\).*\(3, 2\)"):
        begin(models)
    models = [nn.Linear(2, 2), nn.Linear(2, 2, bias=False)]
    with pytest.raises(ValueError, match=r"at line 2, rank 0 has .* 1 \(2,\).* rank 1 has no line"):
        begin(models)
    models = [with_gradients(nn.Linear(2, 2), 1.0), with_gradients(nn.Linear(2, 3), 1.0)]
    with pytest.raises(ValueError, match="the optimizers of ranks 0 and 1 differ"):
        one_step(models)


def test_an_option_that_differs_in_the_first_step_is_named_with_both_values():
    models = [with_gradients(nn.Linear(2, 2), 1.0) for _ in range(2)]
    optimizers = [
        Averaged(torch.optim.SGD(model.parameters(), lr=0.01 + rank), Group(rank, 2))
        for rank, model in enumerate(models)
    ]
    message = "^lr of parameter group 0 differs between ranks: 0.01 on rank 0, 1.01 on rank 1\n\n"
    with pytest.raises(ValueError, match=message):
        lockstep([optimizer.algorithm() for optimizer in optimizers])


def test_lines_of_different_options_are_shown_without_tabs():
    with pytest.raises(ValueError, match=r"rank 0 has 'lr: 0\.1' and rank 1 has 'eps: 1'"):
        lockstep([check_same([line], "options") for line in ("lr\t0.1", "eps\t1")])


@pytest.mark.parametrize("texts", [["", "a", "", "Grüße"], ["only one"]])
def test_texts_of_all_ranks_are_gathered_and_broadcast(texts):
    found = lockstep([all_gather_text(text) for text in texts]).results
    assert all(each == texts for each in found)
    assert lockstep([broadcast_bytes(texts[0].encode(), 0)]).results == [texts[0].encode()]
    bytes_of_first = lockstep(
        [broadcast_bytes(text.encode(), rank) for rank, text in enumerate(texts)]
    )
    assert set(bytes_of_first.results) == {texts[0].encode()}


def test_the_number_of_messages_does_not_grow_with_the_parameters():
    for layers in (1, 20):
        models = [
            with_gradients(nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers))), 1.0)
            for _ in range(2)
        ]
        _, found = one_step(models)
        assert found.ledgers[0].entries["Mean"].requests == 1


@pytest.mark.parametrize("way", WAYS)
def test_replicas_are_bitwise_equal_with_every_algorithm(way):
    models = [Everything() for _ in range(5)]
    lockstep_by(
        way,
        [
            train_on_shares(model, INNER["adam"](model.parameters()), rank, 5, 5)
            for rank, model in enumerate(models)
        ],
        Link(bytes_per_s=1e6, delay_s=0.001),
    )
    for model in models:
        assert all(map(torch.equal, model.parameters(), models[0].parameters()))


def test_signals_and_options_are_exchanged_if_all_gradients_are_sparse():
    optimizers = []
    for rank in range(2):
        table = nn.Embedding(5, 2, sparse=True)
        inner = torch.optim.SGD(table.parameters(), lr=0.1)
        optimizers.append((table, Averaged(inner, Group(rank, 2), signals=2)))
    optimizers[1][1].signals = [False, True]

    def take(steps):
        for _ in range(steps):
            for table, optimizer in optimizers:
                table(torch.tensor([optimizer.group.rank])).sum().backward()
            lockstep([optimizer.algorithm() for _, optimizer in optimizers])

    take(1)
    assert [optimizer.received_signals for _, optimizer in optimizers] == [[False, True]] * 2
    optimizers[1][1].param_groups[0]["lr"] = 0.2
    with pytest.raises(ValueError, match=r"lr of parameter group 0 differs between ranks"):
        take(20)
