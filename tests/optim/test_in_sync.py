"""Processes with different seeds begin and end with the same parameters and buffers."""

import copy

import pytest
import torch
from optim.kinds import AVERAGED, FIXED_LAYOUT, KINDS
from processes import results
from torch import nn

from gcnzc.exchange import Group, init_group, lockstep
from gcnzc.exchange.sync import synchronize_buffers
from gcnzc.optim import Averaged, DiLoCo, LocalSGD, OneBitAdam

STEPS = 10


class Model(nn.Module):
    """With BatchNorm, other buffers and a frozen layer; their values depend on the seed."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("places", torch.randperm(7))
        self.register_buffer("offset", torch.randn(()))

    def forward(self, rows):
        return self.last(torch.tanh(self.norm(self.first(self.frozen(rows) + self.offset))))


def copied(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def take_steps(model, optimizer, begin, end):
    for step in range(begin, end):
        generator = torch.Generator().manual_seed(10 * step + optimizer.group.rank)
        rows = torch.randn(16, 6, generator=generator) + optimizer.group.rank
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()


def train_with_module(make, group, has_module):
    """The state of the model before and after the optimizer is made, and at the end."""
    model = Model(group.rank)
    before = copied(model)
    optimizer = make(model, group, **({"module": model} if has_module else {}))
    start = copied(model)
    take_steps(model, optimizer, 0, STEPS)
    optimizer.finalize()
    return before, start, copied(model)


def unfreeze(make, group):
    """The error of a step after a layer is unfrozen, or that layer before and after training."""
    model = Model(group.rank)
    optimizer = make(model, group)
    take_steps(model, optimizer, 0, 2)
    before = copied(model.frozen)
    model.frozen.requires_grad_(True)
    try:
        # to the end of an exchange, which with a delay of 4 steps begins at 4
        take_steps(model, optimizer, 2, 8)
    except ValueError as error:
        return str(error)
    optimizer.finalize()
    return before, copied(model.frozen)


def add_group(make, group):
    """A parameter of a group that is added, before and after steps."""
    model = Model(group.rank)
    optimizer = make(model, group)
    take_steps(model, optimizer, 0, 2)
    late = nn.Linear(1, 1)
    optimizer.add_param_group({"params": list(late.parameters())})
    before = copied(late)
    model.last = nn.Sequential(model.last, late)
    take_steps(model, optimizer, 2, 4)
    return before, copied(late)


def train_all():
    with init_group() as group:
        found = {
            (name, has_module): train_with_module(make, group, has_module)
            for name, make in KINDS.items()
            for has_module in (False, True)
        }
        unfrozen = {name: unfreeze(make, group) for name, make in KINDS.items()}
        added = {name: add_group(make, group) for name, make in AVERAGED.items()}
        return found, unfrozen, added


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return results(2, tmp_path_factory.mktemp("in_sync"), train_all)


def are_equal(one, other, names=None):
    return all(torch.equal(one[name], other[name]) for name in names or one)


@pytest.mark.parametrize("name", KINDS)
def test_all_ranks_start_with_the_parameters_of_rank_0(ranks, name):
    (before, start, end), (other, second, last) = (found[name, False] for found, _, _ in ranks)
    parameters = [each for each, _ in Model(0).named_parameters()]
    assert not any(
        torch.equal(before[each], other[each]) for each in ["frozen.weight", "last.bias"]
    )
    assert are_equal(start, before)
    # frozen ones included
    assert are_equal(second, before, parameters)
    assert are_equal(end, last, parameters)
    assert not torch.equal(end["first.weight"], start["first.weight"])


@pytest.mark.parametrize("name", KINDS)
def test_with_the_module_buffers_are_equal_at_start_and_end(ranks, name):
    (before, start, end), (_, second, last) = (found[name, True] for found, _, _ in ranks)
    assert are_equal(start, before)
    assert are_equal(second, before)
    assert are_equal(end, last)
    assert not torch.equal(end["norm.running_mean"], start["norm.running_mean"])
    assert end["norm.num_batches_tracked"] == STEPS


@pytest.mark.parametrize("name", AVERAGED)
def test_a_layer_that_is_unfrozen_trains_in_sync(ranks, name):
    (before, after), (_, other) = (unfrozen[name] for _, unfrozen, _ in ranks)
    assert not torch.equal(after["weight"], before["weight"])
    assert are_equal(after, other)


@pytest.mark.parametrize("name", FIXED_LAYOUT)
def test_a_layer_that_is_unfrozen_is_an_error_on_all_ranks(ranks, name):
    for _, unfrozen, _ in ranks:
        expected = "group 0, parameter 0: requires_grad=True now, but requires_grad=False when "
        assert unfrozen[name].startswith(expected)


@pytest.mark.parametrize("name", AVERAGED)
def test_added_parameters_begin_and_train_in_sync(ranks, name):
    (before, after), (other, second) = (added[name] for _, _, added in ranks)
    assert are_equal(before, other)
    assert are_equal(after, second)
    assert not torch.equal(after["weight"], before["weight"])


def test_freezing_later_is_an_error_if_the_layout_is_fixed():
    model = Model(0)
    for make in (OneBitAdam, lambda given: LocalSGD(torch.optim.SGD(given), local_steps=2)):
        optimizer = make(list(model.parameters()))
        model.last.bias.requires_grad_(False)
        with pytest.raises(ValueError, match=r"(?s)parameter 7: requires_grad=False now, .*hint: "):
            optimizer.step()
        model.last.bias.requires_grad_(True)


def test_parameters_added_to_the_inner_optimizer_are_an_error():
    model = Model(0)
    inner = torch.optim.SGD(model.parameters())
    optimizer = DiLoCo(inner)
    inner.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match=r"group 1, parameter 0: .* but no such parameter when"):
        optimizer.step()


def test_buffers_of_a_rank_that_overflowed_are_left_out_of_the_mean():
    models = [nn.BatchNorm1d(2) for _ in range(3)]
    for rank, model in enumerate(models):
        model.running_mean += 2.0 * rank
    models[1].running_mean[0] = torch.nan
    models[1].running_var.fill_(torch.inf)
    lockstep([synchronize_buffers(model) for model in models])
    for model in models:
        torch.testing.assert_close(model.running_mean, torch.tensor([2.0, 2.0]))
        torch.testing.assert_close(model.running_var, torch.ones(2))


def test_constant_buffers_keep_their_bits():
    """A causal mask has infinities; the rounded mean of three equal numbers may be another one."""
    mask = torch.full((4, 4), -torch.inf).triu(1)
    scales = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    models = [nn.Module() for _ in range(3)]
    for model in models:
        model.register_buffer("mask", mask.clone())
        model.register_buffer("scales", scales.clone())
        model.register_buffer("adjacency", torch.eye(3).to_sparse())
    lockstep([synchronize_buffers(model) for model in models])
    for model in models:
        assert torch.equal(model.mask, mask)
        assert torch.equal(model.scales, scales)
        assert torch.equal(model.adjacency.to_dense(), torch.eye(3))


@pytest.mark.parametrize("name", KINDS)
def test_buffers_of_a_run_that_is_resumed_stay_as_they_are(name):
    models = [Model(rank) for rank in range(2)]
    optimizers = [
        KINDS[name](model, Group(rank, 2), module=model) for rank, model in enumerate(models)
    ]

    def train(model, optimizer, begin, end):
        yield from optimizer.broadcast_model_algorithm()
        for step in range(begin, end):
            generator = torch.Generator().manual_seed(10 * step + optimizer.group.rank)
            optimizer.zero_grad()
            model(torch.randn(16, 6, generator=generator)).square().mean().backward()
            yield from optimizer.algorithm()
            yield from getattr(optimizer, "finish_pending_algorithm", lambda: ())()

    lockstep([train(*pair, 0, 5) for pair in zip(models, optimizers, strict=True)])
    again = copy.deepcopy([model.state_dict() for model in models])
    states = copy.deepcopy([optimizer.state_dict() for optimizer in optimizers])
    lockstep([train(*pair, 5, 8) for pair in zip(models, optimizers, strict=True)])
    assert not torch.equal(models[0].norm.running_mean, models[1].norm.running_mean)
    others = [Model(2 + rank) for rank in range(2)]
    loaded = [KINDS[name](model, Group(rank, 2), module=model) for rank, model in enumerate(others)]
    for model, optimizer, own, state in zip(others, loaded, again, states, strict=True):
        model.load_state_dict(own)
        optimizer.load_state_dict(state)
    lockstep([train(*pair, 5, 8) for pair in zip(others, loaded, strict=True)])
    for model, right in zip(others, models, strict=True):
        assert are_equal(model.state_dict(), right.state_dict())


def test_ranks_whose_buffers_differ_in_shape_are_an_error():
    models = [nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]
    for rank, model in enumerate(models):
        model.register_buffer("extra", torch.ones(1 + rank))
    optimizers = [
        Averaged(torch.optim.SGD(model.parameters()), Group(rank, 2), module=model)
        for rank, model in enumerate(models)
    ]
    with pytest.raises(ValueError, match=r"rank 0 has 'extra \(1,\)"):
        lockstep([optimizer.broadcast_model_algorithm() for optimizer in optimizers])
