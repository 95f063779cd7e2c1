"""Parameters that one rank alone loads or edits in the middle of a run, over three processes."""

import re
import warnings

import pytest
import torch
from optim.kinds import AVERAGED, KINDS, LOCAL, REPLICATED, ZERO_ONE_LOCAL
from optim.test_device_reads import CASES
from optim.test_device_reads import train as train_on_device
from processes import results
from simulated_device import OnDevice, Reads
from torch import nn

from gcnzc.exchange import Group, init_group, lockstep
from gcnzc.optim import checksums

# exchanges from one checksum to the next here
INTERVAL = 20
# most exchanges between an edit and its error; each after the checksum finds it in half of cases
MOST = INTERVAL + 40
# whose trained parameters are compared
COMPARED = ("averaged", "averaged int8", "onebit-adam", "onebit-lamb", "zero-one-adam local steps")
EDITED, NOBODY = 5, 3


def model_of():
    torch.manual_seed(0)
    frozen = nn.Linear(6, 6).requires_grad_(False)
    return nn.Sequential(frozen, nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def load_weights(model):
    """Replace the weights of a layer, as a file for one rank alone would."""
    model[1].load_state_dict({name: 2 * each for name, each in model[1].state_dict().items()})


def edit_one_element(model):
    with torch.no_grad():
        model[3].weight[0, 3] += 0.5


def edit_a_frozen_layer(model):
    model[0].weight.data[2, 2] = 7


def set_gradients(model, step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    model.zero_grad()
    model(torch.randn(16, 6, generator=generator)).square().mean().backward()


def train_until_an_error(make, group, edit, edited_rank):
    """The error that ends training after an edit on one rank, and its step."""
    model = model_of()
    optimizer = make(model, group, module=model)
    is_edited = group.rank != edited_rank
    # with local steps, four of them are one exchange
    for step in range(1, 4 * MOST):
        try:
            set_gradients(model, step, group.rank)
            optimizer.step()
        except ValueError as error:
            return str(error), step
        # 0/1 Adam replaces parameters that are edited while its replicas are apart
        if not is_edited and step >= EDITED and optimizer.replicated_parameters() is not None:
            edit(model)
            is_edited = True
    return "", step


def train_all():
    found = {}
    checksums.INTERVAL = INTERVAL
    with init_group(timeout_s=20) as group:
        for name in COMPARED:
            found[name] = train_until_an_error(KINDS[name], group, load_weights, 1)
        for edit, rank in ((edit_one_element, 2), (edit_one_element, 0), (load_weights, NOBODY)):
            found[edit.__name__, rank] = train_until_an_error(KINDS["averaged"], group, edit, rank)
        for name in ("averaged", "onebit-adam", "local-sgd", "co2"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                error = train_until_an_error(KINDS[name], group, edit_a_frozen_layer, 1)
            texts = [str(each.message) for each in caught if "frozen" in str(each.message)]
            found[name, "frozen"] = (error[0], texts)
        model = model_of()
        optimizer = KINDS["averaged"](model, group)
        for step in range(EDITED):
            set_gradients(model, step, group.rank)
            optimizer.step()
        if group.rank == 2:
            load_weights(model)
        try:
            optimizer.finalize()
        except ValueError as error:
            found["finalize"] = str(error)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return results(3, tmp_path_factory.mktemp("edited"), train_all)


def error_of(ranks, name):
    """The error and its step, which are the same on all ranks."""
    first, *others = (found[name] for found in ranks)
    assert all(each == first for each in others)
    return first


@pytest.mark.parametrize("name", COMPARED)
def test_weights_that_one_rank_loads_are_an_error_on_all_that_names_rank_and_parameter(ranks, name):
    text, step = error_of(ranks, name)
    pattern = (
        r"parameters differ between ranks: group 0, parameter 2, named 1\.weight of rank 0 is not "
        r"that of rank 1; 1 more differ\n\nhint: load or change parameters in the"
    )
    assert re.match(pattern, text), (text, step)


def test_an_element_that_one_rank_edits_is_an_error_on_all(ranks):
    text, step = error_of(ranks, ("edit_one_element", 2))
    assert "parameter 4, named 3.weight of rank 0 is not that of rank 2\n\nhint: " in text
    assert EDITED < step < MOST
    text, _ = error_of(ranks, ("edit_one_element", 0))
    assert "named 3.weight of rank 0 is not that of ranks 1, 2\n\nhint: " in text


def test_a_frozen_layer_that_one_rank_edits_is_warned_of_once_on_all(ranks):
    for name in ("averaged", "onebit-adam", "local-sgd", "co2"):
        error, texts = error_of(ranks, (name, "frozen"))
        assert error == ""
        (text,) = texts
        assert "1 frozen parameters differ between ranks: group 0, parameter 0, named 0.w" in text


def test_a_sum_tells_the_order_of_elements_and_no_place_in_memory():
    values = torch.randn(3 * checksums.COLUMNS + 5)
    offset = torch.empty(len(values) + 1)[1:].copy_(values)
    sums = {int(checksums.sum_of_bits(each)) for each in (values, values.clone(), offset)}
    assert len(sums) == 1
    flipped = values.clone()
    flipped[:4] *= -1
    others = (values.roll(1), values.roll(checksums.COLUMNS), values.flip(0), flipped)
    assert len(sums | {int(checksums.sum_of_bits(each)) for each in others}) == 5
    small = torch.randn(5)
    assert int(checksums.sum_of_bits(small)) != int(checksums.sum_of_bits(-small))


def test_replicas_that_are_frozen_after_local_steps_are_no_error():
    models = [model_of() for _ in range(2)]
    optimizers = [KINDS["local-sgd"](model, Group(rank, 2)) for rank, model in enumerate(models)]
    for step in range(3):
        for rank, model in enumerate(models):
            set_gradients(model, step, rank)
        lockstep([each.algorithm() for each in optimizers])
    for model in models:
        model.requires_grad_(False)
    # the layer that was frozen from the beginning
    for optimizer in optimizers:
        names = [name.split(",")[1] for name, _ in optimizer.replicated_parameters()]
        assert names == [" parameter 0", " parameter 1"]


def test_replicas_that_nobody_edits_are_no_error(ranks):
    text, _ = error_of(ranks, ("load_weights", NOBODY))
    assert text == ""


def test_finalize_finds_an_edit_at_once(ranks):
    text = error_of(ranks, "finalize")
    assert "parameter 2 of rank 0 is not that of rank 2; 1 more differ\n\nhint: " in text


@pytest.mark.parametrize("name", AVERAGED | REPLICATED | ZERO_ONE_LOCAL | LOCAL)
def test_replicas_in_lockstep_stay_without_an_error(name, monkeypatch):
    monkeypatch.setattr(checksums, "INTERVAL", 2)
    models = [model_of() for _ in range(2)]
    optimizers = [KINDS[name](model, Group(rank, 2)) for rank, model in enumerate(models)]
    for step in range(40):
        for rank, model in enumerate(models):
            set_gradients(model, step, rank)
        lockstep([each.algorithm() for each in optimizers])
    lockstep([each.finalize_algorithm() for each in optimizers])
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_differences_by_rounding_are_removed_with_a_warning():
    models = [model_of() for _ in range(2)]
    optimizers = [KINDS["averaged"](model, Group(rank, 2)) for rank, model in enumerate(models)]
    lockstep([each.broadcast_model_algorithm() for each in optimizers])
    with torch.no_grad():
        models[1][1].weight.mul_(1 + 1e-6)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        lockstep([each.finalize_algorithm() for each in optimizers])
    assert "1 parameters differed slightly between ranks" in str(found[0].message)
    assert torch.equal(models[0][1].weight, models[1][1].weight)


@torch.no_grad()
@pytest.mark.parametrize("name", ["averaged", "onebit-adam", "local-sgd"])
def test_checksums_do_not_make_the_host_wait_for_the_device(name, monkeypatch):
    monkeypatch.setattr(checksums, "INTERVAL", 2)
    with Reads():
        _, waits, _ = train_on_device(CASES[name], OnDevice)
    for step, (count, most, kinds) in enumerate(waits[1:], 2):
        assert count <= most, (step, kinds)
