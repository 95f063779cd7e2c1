"""Optimizers with sparse compressions, and steps at the elements that were sent."""

import copy
import math

import pytest
import torch
from optim.teams import Everything, sgd
from slow_cases import seeds
from torch import nn

from gcnzc.compress import RandomBlock, RandomK, Sign, Threshold, TopK
from gcnzc.exchange import Group, lockstep
from gcnzc.optim import Averaged
from gcnzc.optim.averaged import step_on_supports

CLASSES, FEATURES, RANKS = 10, 64, 8


def shards(seed):
    """The rows and labels of each rank; they are sorted by label, so a rank has few classes."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    rows = centres.repeat_interleave(40, 0)
    rows = rows + 3 * torch.randn(rows.shape, generator=generator)
    labels = torch.arange(CLASSES).repeat_interleave(40)
    return list(zip((rows / rows.std()).chunk(RANKS), labels.chunk(RANKS), strict=True))


def learned(seed, steps, lr=0.2, **options):
    """The loss on all shards after training with heavy-ball momentum."""
    data = shards(seed)
    models, optimizers = [], []
    for rank in range(RANKS):
        torch.manual_seed(seed)
        models.append(nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES)))
        inner = torch.optim.SGD(models[-1].parameters(), lr=lr, momentum=0.9)
        optimizers.append(Averaged(inner, Group(rank, RANKS), **options))

    def steps_of(rank):
        generator = torch.Generator().manual_seed(100 * seed + rank)
        rows, labels = data[rank]
        for _ in range(steps):
            chosen = torch.randint(len(rows), (16,), generator=generator)
            optimizers[rank].zero_grad()
            nn.functional.cross_entropy(models[rank](rows[chosen]), labels[chosen]).backward()
            yield from optimizers[rank].algorithm()

    lockstep([steps_of(rank) for rank in range(RANKS)])
    rows, labels = (torch.cat(each) for each in zip(*data, strict=True))
    with torch.no_grad():
        return float(nn.functional.cross_entropy(models[0](rows), labels))


# the loss of a model that does not know anything
CHANCE = math.log(CLASSES)


@pytest.mark.parametrize("seed", seeds(3, 1))
def test_random_elements_diverge_with_momentum_everywhere_but_not_by_default(seed):
    compress = RandomK(0.03)
    assert learned(seed, 60, compress=compress, momentum="everywhere") > 1.5 * CHANCE
    assert learned(seed, 60, compress=compress) < 0.75 * CHANCE


def test_random_blocks_diverge_with_momentum_everywhere_but_not_by_default():
    compress = RandomBlock(0.05)
    assert learned(0, 100, 0.1, compress=compress, momentum="everywhere") > 1.5 * CHANCE
    assert learned(0, 100, 0.1, compress=compress) < 0.5 * CHANCE


@pytest.mark.parametrize("momentum", ["everywhere", "masked"])
def test_top_k_learns_on_an_easy_task_in_both_ways(momentum):
    compress = TopK(0.01, "layer")
    assert learned(0, 60, compress=compress, momentum=momentum) < 0.5 * CHANCE


def test_the_default_momentum_follows_from_the_compression():
    def default(compress):
        return Averaged(sgd(Everything().parameters()), Group(0, 2), compress=compress).momentum

    sparse = (TopK(0.1), Threshold(0.1), RandomK(0.1), RandomBlock(0.1))
    assert {default(each) for each in sparse} == {"masked"}
    others = (None, Sign(), RandomK(0.1, error_feedback=False), TopK(0.1, error_feedback=False))
    assert {default(each) for each in others} == {"everywhere"}


INNER = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, weight_decay=0.1, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


@pytest.mark.parametrize("name", INNER)
def test_a_masked_step_is_the_inner_step_at_the_support_and_nothing_elsewhere(name):
    generator = torch.Generator().manual_seed(1)
    masked = nn.Parameter(torch.randn(40, generator=generator))
    scalar = nn.Parameter(torch.tensor(2.0))
    whole = nn.Parameter(torch.randn(5, generator=generator))
    inner = INNER[name]([masked, scalar, whole])
    for step in range(4):
        support = torch.rand(40, generator=generator) < 0.5
        if step == 3:
            support[:] = False
        for parameter in (masked, scalar, whole):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        before = (masked.detach().clone(), copy.deepcopy(inner.state[masked]))
        twins = [nn.Parameter(each.detach().clone()) for each in (masked, scalar, whole)]
        plain = INNER[name](twins)
        plain.load_state_dict(copy.deepcopy(inner.state_dict()))
        for twin, parameter in zip(twins, (masked, scalar, whole), strict=True):
            twin.grad = parameter.grad.clone()
        plain.step()
        step_on_supports(inner, [(masked, support), (scalar, torch.tensor(True))])
        assert torch.equal(masked, torch.where(support, twins[0], before[0]))
        assert torch.equal(scalar, twins[1])
        assert torch.equal(whole, twins[2])
        for key, value in plain.state[twins[0]].items():
            found = inner.state[masked][key]
            if key == "step" or not isinstance(value, torch.Tensor):
                assert found == value
                continue
            old = before[1].get(key)
            old = torch.zeros_like(value) if old is None else old
            assert torch.equal(found, torch.where(support, value, old))
