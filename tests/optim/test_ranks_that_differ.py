"""Ranks that train other parameters, or of which one alone loads a state, over two processes."""

import copy
import pickle
import re

import pytest
import torch
from optim.kinds import KINDS, adamw
from processes import results, shorten_waits
from torch import nn

from gcnzc.exchange import RequestMismatch, init_group
from gcnzc.optim import Averaged, LocalSGD, OneBitAdam

STEPS, SAVED, CHANGED = 14, 2, 5


def model_of():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    return model


def take_step(model, optimizer, step):
    generator = torch.Generator().manual_seed(10 * step + optimizer.group.rank)
    optimizer.zero_grad()
    model(torch.randn(16, 6, generator=generator)).square().mean().backward()
    optimizer.step()


def unfreeze_on_rank_1(model, optimizer, state):
    if optimizer.group.rank == 1:
        model[0].requires_grad_(True)


def freeze_on_rank_0(model, optimizer, state):
    if optimizer.group.rank == 0:
        model[3].bias.requires_grad_(False)


def load_an_older_state_on_rank_1(model, optimizer, state):
    if optimizer.group.rank == 1:
        optimizer.load_state_dict(state)


def load_its_own_state_on_rank_1(model, optimizer, state):
    if optimizer.group.rank == 1:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


CHANGES = [
    unfreeze_on_rank_1,
    freeze_on_rank_0,
    load_an_older_state_on_rank_1,
    load_its_own_state_on_rank_1,
]


def train_until_an_error(make, group, change):
    """The error that ends training after a change, and its step; an empty text if none does."""
    model = model_of()
    optimizer = make(model, group)
    for step in range(1, STEPS + 1):
        try:
            take_step(model, optimizer, step)
        except (ValueError, RequestMismatch) as error:
            return str(error), step
        if step == SAVED:
            state = copy.deepcopy(optimizer.state_dict())
        if step == CHANGED:
            change(model, optimizer, state)
    return "", STEPS


# optimizers whose settings depend on the rank
SETTINGS = {
    "averaged": lambda model, group: Averaged(
        adamw(model), group, clip_norm=0.1 if group.rank else None
    ),
    "averaged inner": lambda model, group: Averaged(
        torch.optim.SGD(model.parameters(), lr=0.01) if group.rank else adamw(model), group
    ),
    "onebit-adam": lambda model, group: OneBitAdam(
        model.parameters(), 0.01, group=group, clip_norm=0.1 + group.rank
    ),
    "local-sgd inner": lambda model, group: LocalSGD(
        torch.optim.Adam(model.parameters(), lr=0.01) if group.rank else adamw(model), group
    ),
}


def error_of(make, group):
    try:
        make(model_of(), group)
    except ValueError as error:
        return str(error)
    return ""


def finalize_after_other_steps(make, group):
    """The error of `finalize` on a rank that left out its last step, and on one that did not."""
    model = model_of()
    optimizer = make(model, group)
    try:
        for step in range(1, STEPS + 1 - group.rank):
            take_step(model, optimizer, step)
        optimizer.finalize()
    except (ValueError, RequestMismatch) as error:
        return str(error)
    return ""


def train_all():
    shorten_waits()
    found = {}
    with init_group(timeout_s=20) as whole:
        for name, make in KINDS.items():
            for change in CHANGES:
                # an error may have ended the connections of the group before
                group = whole.subgroup([0, 1])
                found[name, change.__name__] = train_until_an_error(make, group, change)
                group.close()
            group = whole.subgroup([0, 1])
            found[name, "finalize"] = finalize_after_other_steps(make, group)
            group.close()
        for name, make in SETTINGS.items():
            found[name, "settings"] = error_of(make, whole.subgroup([0, 1]))
        copies = {how: add_to_a_copy(copied, whole) for how, copied in COPIES.items()}
    return found, copies


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return results(2, tmp_path_factory.mktemp("differ"), train_all)


def found_by(ranks, name, change):
    """The steps in which ranks 0 and 1 raise the same error, and its text."""
    (text, step), (other, second) = (found[name, change.__name__] for found, _ in ranks)
    assert text == other
    return step, second, text


@pytest.mark.parametrize("name", KINDS)
def test_a_layer_that_one_rank_unfreezes_or_freezes_is_an_error_on_both_in_one_step(ranks, name):
    for change, values in (
        (unfreeze_on_rank_1, ("False for parameters 0-1, of 6", "True for all parameters, of 6")),
        (
            freeze_on_rank_0,
            ("False for parameters 0-1, 5, of 6", "False for parameters 0-1, of 6"),
        ),
    ):
        step, second, text = found_by(ranks, name, change)
        assert step == second
        expected = "requires_grad of parameter group 0 differs between ranks: "
        assert text.startswith(f"{expected}{values[0]} on rank 0, {values[1]} on rank 1\n\nhint: ")


@pytest.mark.parametrize("name", KINDS)
def test_a_state_that_one_rank_alone_loads_is_an_error_on_both_with_their_steps(ranks, name):
    *_, text = found_by(ranks, name, load_an_older_state_on_rank_1)
    pattern = r"number of steps differs between ranks: (\d+) on rank 0, (\d+) on rank 1\n\nhint: "
    steps = re.match(pattern, text)
    assert steps, text
    assert int(steps[1]) > int(steps[2]) >= SAVED
    *_, text = found_by(ranks, name, load_its_own_state_on_rank_1)
    expected = f"loaded state differs between ranks: none on rank 0, of step {CHANGED} on rank 1"
    if name in ("backup-workers", "diloco quorum") and re.match(pattern, text):
        # rank 0 does not wait in each step, so it may have taken more steps when they compare
        return
    assert text.startswith(f"{expected}\n\nhint: ")


@pytest.mark.parametrize("name", KINDS)
def test_a_rank_that_took_fewer_steps_is_an_error_on_both_in_finalize(ranks, name):
    texts = [found[name, "finalize"] for found, _ in ranks]
    # a last step that exchanges meets the comparison of `finalize`; others end before it
    unequal = f"number of steps differs between ranks: {STEPS} on rank 0, {STEPS - 1} on rank 1"
    calls = (
        "call differs between ranks: step() on rank 0, finalize() on rank 1\n\nhint: call step() "
    )
    assert all(calls in text or unequal in text for text in texts), texts


@pytest.mark.parametrize("name", SETTINGS)
def test_other_settings_on_one_rank_are_an_error_on_both_at_construction(ranks, name):
    for found, _ in ranks:
        assert "the optimizers of ranks 0 and 1 differ" in found[name, "settings"]


# --- copies of Averaged, which broadcast only what is added


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.late = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, rows):
        return self.late(self.norm(self.first(rows)))


COPIES = {
    "itself": lambda pair: pair,
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
}


def add_to_a_copy(copied, group):
    """Buffers of a copy before and after a layer is added, and the layer before and after a step.

    Rank 0's buffers and layer are not those of rank 1.
    """
    model = Normalized()
    first = [*model.first.parameters(), *model.norm.parameters()]
    optimizer = Averaged(torch.optim.SGD(first, lr=0.1), group, module=model)
    for step in range(3):
        take_step(model, optimizer, step)
    model, optimizer = copied((model, optimizer))
    for parameter in model.parameters():
        parameter.grad = None
    take_step(model, optimizer, 3)
    before = model.norm.running_mean.clone()
    with torch.no_grad():
        model.late.weight.add_(group.rank)
    model.added = nn.Linear(1, 1)
    with torch.no_grad():
        model.added.weight.fill_(group.rank)
    optimizer.add_param_group({"params": list(model.added.parameters())})
    after, added = model.norm.running_mean.clone(), model.added.weight.detach().clone()
    model.late = nn.Sequential(model.late, model.added)
    take_step(model, optimizer, 4)
    return before, after, added, model.added.weight.detach().clone()


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_averaged_broadcasts_only_what_is_added(ranks, how):
    first, second = (copies[how] for _, copies in ranks)
    for before, after, added, trained in (first, second):
        assert torch.equal(before, after)
        assert added.item() == 0
        assert torch.equal(trained, first[3])
        assert trained.item() != 0
    # each rank has its own minibatches
    assert not torch.equal(first[0], second[0])
