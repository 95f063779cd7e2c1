"""Ranks that differ are an error on all of them: options, steps, states, parameters, order."""

import copy
import itertools
import re
import warnings

import pytest
import torch
from optim import teams
from optim.methods import LR, METHODS
from optim.test_device_reads import CASES as ON_DEVICE
from optim.test_device_reads import drive
from optim.test_device_reads import train as train_on_device
from processes import results, shorten_waits
from simulated_device import OnDevice, Reads
from simulated_ranks import simulate
from slow_cases import mark_slow
from torch import nn
from torch.distributed import HashStore

from gcnzc.exchange import Group, RequestMismatch, init_group
from gcnzc.optim import Averaged, OneBitAdam, checksums

STEPS, SAVED, CHANGED = 14, 2, 5


def model_of(seed=0):
    torch.manual_seed(seed)
    frozen = nn.Linear(6, 6).requires_grad_(False)
    return nn.Sequential(frozen, nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def take_step(model, optimizer, step):
    teams.take_steps(model, optimizer, step + 1, step)


# --- what one rank changes alone


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


def change_an_option_on_rank_1(model, optimizer, state):
    if optimizer.group.rank == 1:
        optimizer.param_groups[0]["weight_decay"] = 0.5


def change_nothing(model, optimizer, state):
    """The rank takes a step less."""


def train_until_an_error(group, name, change):
    """The error that ends training after a change, and its step; an empty text if none does."""
    model, step = model_of(), 0
    optimizer = METHODS[name].make(model, group)
    last = STEPS - (group.rank if change is change_nothing else 0)
    last += 30 * (change is change_an_option_on_rank_1)
    try:
        for step in range(1, last + 1):
            take_step(model, optimizer, step)
            if step == SAVED:
                state = copy.deepcopy(optimizer.state_dict())
            if step == CHANGED:
                change(model, optimizer, state)
        optimizer.finalize()
    except (ValueError, RequestMismatch) as error:
        return str(error), step
    return "", step


FLAGS = "requires_grad of parameter group 0 differs between ranks: "
NUMBERS = r"number of steps differs between ranks: (\d+) on rank 0, (\d+) on rank 1\n\nhint: "
ONE_STEP_LESS = f"number of steps differs between ranks: {STEPS} on rank 0, {STEPS - 1} on rank 1"
CHANGES = {
    unfreeze_on_rank_1: f"{FLAGS}False for parameters 0, 1, of 6 on rank 0, True for all "
    "parameters, of 6 on rank 1\n\nhint: ",
    freeze_on_rank_0: f"{FLAGS}False for parameters 0, 1, 5, of 6 on rank 0, False for "
    "parameters 0, 1, of 6 on rank 1\n\nhint: ",
    load_an_older_state_on_rank_1: NUMBERS,
    # a rank that does not wait in each step may have taken more steps when they compare
    load_its_own_state_on_rank_1: rf"{NUMBERS}|loaded state differs between ranks: none on rank 0, "
    rf"of step {CHANGED} on rank 1\n\nhint: ",
    change_an_option_on_rank_1: r"weight_decay of parameter group 0 differs between ranks: 0\.\d* "
    r"on rank 0, 0\.5 on rank 1\n\nhint: ",
    # a last step that exchanges meets the comparison of `finalize`; others end before it
    change_nothing: rf"{ONE_STEP_LESS}|call differs between ranks: step\(\) on rank 0, finalize\(\)"
    r" on rank 1\n\nhint: call step\(\) ",
}


# changes of which the others of a method tell much the same
LESS = (freeze_on_rank_0, load_its_own_state_on_rank_1, change_an_option_on_rank_1)
FEW = ("averaged", "onebit-adam", "local-sgd", "streaming-diloco", "a2cid2", "diloco quorum")


@pytest.mark.parametrize(
    ("name", "change"),
    mark_slow(
        itertools.product(METHODS, CHANGES),
        lambda name, change: change in LESS and name not in FEW,
    ),
)
def test_what_one_rank_changes_alone_is_an_error_on_both(name, change):
    (text, step), (other, second) = simulate(2, train_until_an_error, name, change)
    assert re.match(CHANGES[change], text), text
    assert text == other
    if change in (unfreeze_on_rank_1, freeze_on_rank_0):
        assert step == second
    if change is load_an_older_state_on_rank_1:
        own, its = map(int, re.match(NUMBERS, text).groups())
        assert own > its >= SAVED


OVER_PROCESSES = (unfreeze_on_rank_1, load_an_older_state_on_rank_1, change_nothing)


def find_over_processes():
    shorten_waits()
    with init_group(timeout_s=20) as whole:
        found = []
        for name in ("averaged", "streaming-diloco"):
            for change in OVER_PROCESSES:
                # an error may have ended the connections of the group before
                group = whole.subgroup([0, 1])
                found.append(train_until_an_error(group, name, change)[0])
                group.close()
        return [*found, error_of_pair(whole, "onebit-adam", 3)]


def test_processes_find_what_one_rank_changes_alone(tmp_path):
    first, second = results(2, tmp_path, find_over_processes)
    patterns = [CHANGES[change] for change in OVER_PROCESSES] * 2
    for text, pattern in zip(first, [*patterns, OTHER_ORDER], strict=True):
        assert re.match(pattern, text), text
    assert re.match(OTHER_ORDER, second[-1])
    assert first[:-1] == second[:-1]


# --- options of groups that differ from the start, or follow each rank's own loss


@pytest.mark.parametrize("name", METHODS)
def test_options_that_differ_from_the_start_are_named_before_the_first_step(name):
    models = [teams.Everything().float() for _ in range(2)]
    optimizers = METHODS[name].optimizers(models)
    optimizers[1].param_groups[0]["weight_decay"] = 0.5
    for model in models:
        teams.loss_of(model, teams.batches(1)[0]).backward()
    before = teams.vector_of(models[0])
    message = r"^weight_decay of parameter group 0 differs between ranks: .* on rank 0, 0.5 on rank"
    with pytest.raises(ValueError, match=message):
        teams.step_all(optimizers)
    assert torch.equal(teams.vector_of(models[0]), before)


def follow_own_loss(group, name):
    """The error that ends training with a scheduler of each rank, and after which step."""
    model = model_of()
    optimizer = METHODS[name].make(model, group)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
    for step in range(60):
        try:
            take_step(model, optimizer, step)
        except ValueError as error:
            return str(error), step
        # the loss of rank 0 decreases in every step, that of rank 1 never
        scheduler.step(1.0 if group.rank else 1 / (1 + step))
    return "", 60


@pytest.mark.parametrize("name", METHODS)
def test_a_scheduler_that_follows_each_ranks_own_loss_ends_in_an_error_on_all_ranks(name):
    (message, step), other = simulate(2, follow_own_loss, name)
    assert (message, step) == other
    pattern = r"lr of parameter group 0 differs between ranks: (\S+) on rank 0, (\S+) on rank 1\n\n"
    own, smaller = map(float, re.match(pattern, message).groups())
    assert smaller < own == LR
    # learning rates differ from step 3 on, and bits in about half of the exchanges
    assert 3 <= step < 50


# --- parameters of another shape or dtype


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", METHODS)
def test_a_parameter_of_another_shape_or_dtype_is_named(name, world_size):
    for index, shape, dtype, data in (
        (1, (3,), "float32", torch.zeros(3)),
        (0, (2, 3), "float64", torch.zeros(2, 3).double()),
    ):
        models = [nn.Linear(3, 2) for _ in range(world_size)]
        optimizers = METHODS[name].optimizers(models)
        for step in range(6):
            if step == 5:
                edited = list(models[-1].parameters())[index]
                edited.grad = None
                edited.data = data
            for model in models:
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
            if step < 5:
                teams.step_all(optimizers)
        expected = rf"^group 0, parameter {index}: {re.escape(str(shape))} torch.{dtype} on cpu "
        expected += r"now, but .* torch.float32 on cpu when \w+ was constructed\n\nhint: "
        with pytest.raises(ValueError, match=expected):
            teams.step_all(optimizers)


def test_other_errors_stay_as_they_are():
    model = nn.Linear(3, 2)
    optimizer = METHODS["averaged"].make(model, Group())

    def fail(*_):
        raise RuntimeError("of the optimizer")

    optimizer.inner.step = fail
    model(torch.ones(3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"^of the optimizer$"):
        optimizer.step()


# --- parameters that one rank alone loads or edits

# exchanges from one checksum to the next here
INTERVAL = 20
# most exchanges between an edit and its error; each after the checksum finds it in half of cases
MOST = INTERVAL + 40
# whose trained parameters are compared
COMPARED = ("averaged", "averaged int8", "onebit-adam", "onebit-lamb", "zero-one-adam local steps")
EDITED, NOBODY = 5, 3


def load_weights(model):
    """Replace the weights of a layer, as a file for one rank alone would."""
    model[1].load_state_dict({name: 2 * each for name, each in model[1].state_dict().items()})


def edit_one_element(model):
    with torch.no_grad():
        model[3].weight[0, 3] += 0.5


def edit_a_frozen_layer(model):
    model[0].weight.data[2, 2] = 7


def edit_until_an_error(group, name, edit, edited_rank):
    """The error that ends training after an edit on one rank, and its step."""
    model = model_of()
    optimizer = METHODS[name].make(model, group, module=model)
    is_edited = group.rank != edited_rank
    # with local steps, four of them are one exchange
    for step in range(1, 4 * MOST):
        try:
            take_step(model, optimizer, step)
        except ValueError as error:
            return str(error), step
        # 0/1 Adam replaces parameters that are edited while its replicas are apart
        if not is_edited and step >= EDITED and optimizer.replicated_parameters() is not None:
            edit(model)
            is_edited = True
    return "", step


def error_after(name, edit, edited_rank):
    """The error and its step, which are the same on all three ranks."""
    first, *others = simulate(3, edit_until_an_error, name, edit, edited_rank)
    assert all(each == first for each in others)
    return first


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(checksums, "INTERVAL", INTERVAL)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("name", COMPARED)
def test_weights_that_one_rank_loads_are_an_error_on_all_that_names_rank_and_parameter(name):
    text, _ = error_after(name, load_weights, 1)
    pattern = (
        r"parameters differ between ranks: group 0, parameter 2, named 1\.weight of rank 0 is not "
        r"that of rank 1; 1 more differ\n\nhint: load or change parameters in the"
    )
    assert re.match(pattern, text), text


@pytest.mark.usefixtures("often")
def test_an_element_that_one_rank_edits_is_an_error_on_all():
    text, step = error_after("averaged", edit_one_element, 2)
    assert "parameter 4, named 3.weight of rank 0 is not that of rank 2\n\nhint: " in text
    assert EDITED < step < MOST
    text, _ = error_after("averaged", edit_one_element, 0)
    assert "named 3.weight of rank 0 is not that of ranks 1, 2\n\nhint: " in text
    assert error_after("averaged", load_weights, NOBODY)[0] == ""


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("name", ["averaged", "onebit-adam", "local-sgd", "co2"])
def test_a_frozen_layer_that_one_rank_edits_is_warned_of_once_on_all(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert error_after(name, edit_a_frozen_layer, 1)[0] == ""
    texts = [str(each.message) for each in caught if "frozen" in str(each.message)]
    assert len(texts) == 3
    for text in texts:
        assert "1 frozen parameters differ between ranks: group 0, parameter 0, named 0.w" in text


def steps_in_lockstep(name, steps):
    models = [model_of() for _ in range(2)]
    optimizers = METHODS[name].optimizers(models)
    for step in range(steps):
        for rank, model in enumerate(models):
            teams.backward(model, rank, step)
        teams.step_all(optimizers)
    return models, optimizers


@pytest.mark.parametrize("name", METHODS)
def test_replicas_that_nobody_edits_stay_without_an_error(name, monkeypatch):
    monkeypatch.setattr(checksums, "INTERVAL", 2)
    models, optimizers = steps_in_lockstep(name, 30)
    teams.finalize(optimizers)
    assert torch.equal(teams.vector_of(models[0]), teams.vector_of(models[1]))


@pytest.mark.parametrize("name", ["averaged", "onebit-adam", "zero-one-adam local steps"])
def test_finalize_finds_an_edit_at_once_and_removes_differences_by_rounding(name):
    for factor in (2.0, 1 + 1e-6):
        models, optimizers = steps_in_lockstep(name, 8)
        with torch.no_grad():
            models[1][1].weight.mul_(factor)
        if factor == 2:
            with pytest.raises(
                ValueError, match="parameter 2 of rank 0 is not that of rank 1\n\nhi"
            ):
                teams.finalize(optimizers)
            continue
        with pytest.warns(UserWarning, match="1 parameters differed slightly between ranks"):
            teams.finalize(optimizers)
        assert torch.equal(models[0][1].weight, models[1][1].weight)


@torch.no_grad()
@pytest.mark.parametrize("name", ["averaged", "onebit-adam", "local-sgd"])
def test_checksums_do_not_make_the_host_wait_for_the_device(name, monkeypatch):
    monkeypatch.setattr(checksums, "INTERVAL", 2)
    with Reads():
        _, waits, _ = train_on_device(ON_DEVICE[name], OnDevice)
    for step, (count, most, kinds) in enumerate(waits[1:], 2):
        assert count <= most, (step, kinds)


# --- two optimizers of one process, which ranks step or construct in different orders

PAIRED = ("averaged", "onebit-adam", "zero-one-adam", "local-sgd", "streaming-diloco", "co2")


def step_pair(group, name, swapped):
    """Step two optimizers in turns, from step `swapped` on in another order on rank 1."""
    pairs = [(model, METHODS[name].make(model, group)) for model in map(model_of, range(2))]
    for step in range(1, STEPS + 1):
        for model, optimizer in pairs[:: -1 if group.rank and step >= swapped else 1]:
            take_step(model, optimizer, step)
    for _, optimizer in pairs:
        optimizer.finalize()
    return torch.cat([teams.vector_of(model) for model, _ in pairs])


def error_of_pair(group, name, swapped):
    with pytest.raises(RequestMismatch) as error:
        step_pair(group, name, swapped)
    return str(error.value)


OTHER_ORDER = (
    r"optimizer differs between ranks: \w+ number 1 on rank 0, \w+ number 2 on rank 1\n\nhint: "
    "construct and step optimizers in the same order on all ranks"
)


@pytest.mark.parametrize("swapped", [1, 3])
@pytest.mark.parametrize("name", PAIRED)
def test_optimizers_stepped_in_another_order_on_one_rank_are_an_error_on_both(name, swapped):
    for text in simulate(2, error_of_pair, name, swapped):
        assert re.match(OTHER_ORDER, text), text


@pytest.mark.parametrize("name", PAIRED)
def test_optimizers_stepped_in_the_same_order_keep_their_models_in_sync(name):
    assert torch.equal(*simulate(2, step_pair, name, STEPS + 1))


@pytest.mark.parametrize("name", ["averaged", "onebit-adam", "local-sgd"])
def test_optimizers_stepped_in_another_order_are_found_without_headers_as_over_nccl(name):
    def steps(rank):
        group, models = Group(rank, 2), map(model_of, range(2))
        pairs = [(model, METHODS[name].make(model, group)) for model in models]
        for model, optimizer in pairs[:: -1 if rank else 1]:
            for step in range(1, 40):
                teams.backward(model, rank, step)
                yield from optimizer.algorithm()

    with pytest.raises(ValueError, match=r"optimizer differs between ranks: .* number 1 on rank 0"):
        drive([steps(rank) for rank in range(2)])


class Other(nn.Linear):
    def __init__(self):
        super().__init__(6, 8)
        self.second = nn.Linear(8, 1)


def construct_two(group):
    """Construct two optimizers of the same shapes, whose models have other names for them."""
    models = [nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1)), Other()]
    for model in models[:: -1 if group.rank else 1]:
        Averaged(torch.optim.SGD(model.named_parameters(), lr=0.1), group)


def test_optimizers_constructed_in_another_order_are_an_error_if_their_names_differ():
    with pytest.raises(ValueError, match=r"named 0\.weight differs between ranks: "):
        simulate(2, construct_two)


def test_the_steps_of_optimizers_are_counted_until_the_user_sets_the_status():
    group, parameter = Group(store=HashStore()), nn.Parameter(torch.ones(2))

    def count(optimizer):
        parameter.grad = torch.ones(2)
        optimizer.step()
        return group.monitor.step, group.monitor.activity

    first = Averaged(torch.optim.SGD([parameter], lr=0.1), group)
    assert [count(first) for _ in range(3)][-1] == (3, "training")
    # the steps of several optimizers are counted together, and a resumed one continues to count
    second = OneBitAdam([parameter], group=group)
    count(second)
    assert count(first) == (5, "training")
    second.steps = 100
    assert count(second) == (101, "training")
    group.set_status(7, "epoch 2")
    assert count(first) == (7, "epoch 2")
    group.close()


# --- copies of Averaged, which broadcast only what is added


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.late = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, rows):
        return self.late(self.norm(self.first(rows)))


def add_to_a_copy(group, is_copied):
    """Buffers of a copy before and after a layer is added, and the layer before and after a step.

    Rank 0's buffers and layer are not those of rank 1.
    """
    model = Normalized()
    first = [*model.first.parameters(), *model.norm.parameters()]
    optimizer = Averaged(torch.optim.SGD(first, lr=0.1), group, module=model)
    for step in range(3):
        take_step(model, optimizer, step)
    if is_copied:
        model, optimizer = copy.deepcopy((model, optimizer))
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


@pytest.mark.parametrize("is_copied", [False, True])
def test_averaged_and_its_copies_broadcast_only_what_is_added(is_copied):
    first, second = simulate(2, add_to_a_copy, is_copied)
    for before, after, added, trained in (first, second):
        assert torch.equal(before, after)
        assert added.item() == 0
        assert torch.equal(trained, first[3])
        assert trained.item() != 0
    # each rank has its own minibatches
    assert not torch.equal(first[0], second[0])


def test_the_checksum_of_elements_that_are_not_adjacent_is_that_of_a_copy():
    column = torch.arange(24.0).view(6, 4)[:, 1]
    assert torch.equal(checksums.sum_of_bits(column), checksums.sum_of_bits(column.clone()))
