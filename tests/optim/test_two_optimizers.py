"""Two optimizers of one process, which ranks construct or step in different orders."""

import re

import pytest
import torch
from optim.kinds import KINDS
from optim.test_device_reads import drive
from processes import results, shorten_waits
from torch import nn
from torch.distributed import HashStore

from gcnzc.exchange import Group, RequestMismatch, init_group, lockstep
from gcnzc.optim import Averaged, OneBitAdam

STEPS, SWAPPED = 12, 3
NAMES = ("averaged", "onebit-adam", "zero-one-adam", "local-sgd", "streaming-diloco", "co2")


def model_of(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def set_gradients(model, step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    model.zero_grad()
    model(torch.randn(16, 6, generator=generator)).square().mean().backward()


def train_pair(make, group, swapped):
    """Step two optimizers in turns, from step `swapped` on in another order on rank 1.

    Returns:
        The parameters of both models, or the error.
    """
    pairs = []
    for seed in range(2):
        model = model_of(seed)
        pairs.append((model, make(model, group)))
    try:
        for step in range(1, STEPS + 1):
            for model, optimizer in pairs[:: -1 if group.rank and step >= swapped else 1]:
                set_gradients(model, step, group.rank)
                optimizer.step()
        for _, optimizer in pairs:
            optimizer.finalize()
    except (ValueError, RequestMismatch) as error:
        return f"{type(error).__name__}: {error}"
    return [parameter.detach() for model, _ in pairs for parameter in model.parameters()]


class Other(nn.Linear):
    def __init__(self):
        super().__init__(6, 8)
        self.second = nn.Linear(8, 1)


def construct_in_order(group, *, is_reversed):
    """Construct two optimizers of the same shapes, whose models have other names for them."""
    models = [nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1)), Other()]
    try:
        for model in models[:: -1 if is_reversed else 1]:
            Averaged(torch.optim.SGD(model.named_parameters(), lr=0.1), group)
    except (ValueError, RequestMismatch) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def train_pairs():
    shorten_waits()
    found = {}
    with init_group(timeout_s=20) as whole:
        for name in NAMES:
            for swapped in (1, SWAPPED, STEPS + 1):
                # an error ends the connections of a group
                group = whole.subgroup([0, 1])
                found[name, swapped] = train_pair(KINDS[name], group, swapped)
                group.close()
        for only_rank_1 in (False, True):
            is_reversed = whole.rank == 1 or not only_rank_1
            group = whole.subgroup([0, 1])
            found["construct", only_rank_1] = construct_in_order(group, is_reversed=is_reversed)
            group.close()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return results(2, tmp_path_factory.mktemp("two"), train_pairs)


@pytest.mark.parametrize("swapped", [1, SWAPPED])
@pytest.mark.parametrize("name", NAMES)
def test_optimizers_stepped_in_another_order_on_one_rank_are_an_error_on_both(ranks, name, swapped):
    pattern = (
        r"RequestMismatch: optimizer differs between ranks: \w+ number 1 on rank 0, \w+ number 2 "
        r"on rank 1\n\nhint: construct and step optimizers in the same order on all ranks"
    )
    for each in ranks:
        assert isinstance(each[name, swapped], str), "no error"
        assert re.match(pattern, each[name, swapped]), each[name, swapped]


@pytest.mark.parametrize("name", NAMES)
def test_optimizers_stepped_in_the_same_order_keep_their_models_in_sync(ranks, name):
    one, other = (each[name, STEPS + 1] for each in ranks)
    assert all(map(torch.equal, one, other))


def test_optimizers_constructed_in_another_order_are_an_error_if_their_names_differ(ranks):
    for each in ranks:
        assert each["construct", False] == ""
        assert "the optimizers of ranks 0 and 1 differ" in each["construct", True]
        assert "named 0.weight" in each["construct", True]


@pytest.mark.parametrize("name", NAMES)
def test_lockstep_reports_optimizers_stepped_in_another_order(name):
    with pytest.raises(RequestMismatch, match=r"for \w+ number [12], rank . requests .* for \w+"):
        lockstep(swapped_steps(name, 5))


@pytest.mark.parametrize("name", ["averaged", "onebit-adam", "local-sgd"])
def test_optimizers_stepped_in_another_order_are_found_without_headers_as_over_nccl(name):
    with pytest.raises(ValueError, match=r"optimizer differs between ranks: .* number 1 on rank 0"):
        drive(swapped_steps(name, 40))


def swapped_steps(name, count):
    """The steps of ranks 0 and 1, each with two optimizers, in another order on each."""

    def steps(rank, pairs):
        for model, optimizer in pairs[:: -1 if rank else 1]:
            for step in range(1, count):
                set_gradients(model, step, rank)
                yield from optimizer.algorithm()

    found = []
    for rank in range(2):
        models = [model_of(seed) for seed in range(2)]
        group = Group(rank, 2)
        found.append(steps(rank, [(model, KINDS[name](model, group)) for model in models]))
    return found


def take_step(optimizer, parameter):
    parameter.grad = torch.ones(2)
    optimizer.step()


def test_the_steps_of_optimizers_are_counted_until_the_user_sets_the_status():
    group, parameter = Group(store=HashStore()), nn.Parameter(torch.ones(2))
    first = Averaged(torch.optim.SGD([parameter], lr=0.1), group)
    for _ in range(3):
        take_step(first, parameter)
    assert (group.monitor.step, group.monitor.activity) == (3, "training")
    # the steps of several optimizers are counted together
    second = OneBitAdam([parameter], group=group)
    take_step(second, parameter)
    take_step(first, parameter)
    assert group.monitor.step == 5
    # a resumed optimizer continues to count
    second.steps = 100
    take_step(second, parameter)
    assert group.monitor.step == 101
    group.set_status(7, "epoch 2")
    take_step(first, parameter)
    assert (group.monitor.step, group.monitor.activity) == (7, "epoch 2")
    group.close()
