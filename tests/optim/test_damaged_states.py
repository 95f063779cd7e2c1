"""Damaged states of strategies are rejected with the name of what is damaged, and not loaded."""

import copy
import math

import pytest
import torch
from optim.kinds import KINDS, LOCAL, local
from torch import nn

from gcnzc.compress import Sign
from gcnzc.exchange import Group, lockstep
from gcnzc.optim import DiLoCo

MAKERS = KINDS | {"diloco sign": local(DiLoCo, compress=Sign(block=32))}


def train(model, optimizer, steps):
    yield from optimizer.broadcast_model_algorithm()
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() + 1
        yield from optimizer.algorithm()
        # the results of overlapped exchanges are in the states
        if hasattr(optimizer, "finish_pending_algorithm"):
            yield from optimizer.finish_pending_algorithm()


def make(name, steps):
    """The models and optimizers of two ranks."""
    torch.manual_seed(0)
    # each rank has a shard, of a multiple of 32 elements
    models = [nn.Linear(16, 8) for _ in range(2)]
    optimizers = [MAKERS[name](model, Group(rank, 2)) for rank, model in enumerate(models)]
    lockstep([train(*pair, steps) for pair in zip(models, optimizers, strict=True)])
    return models, optimizers


SECTIONS = ("shared", "local", "shards")
MAY_OVERFLOW = {"fragment 0 mean", "fragment 1 mean"}
"""means that are not applied, which may be infinite"""
REQUIRED = {
    *("parameters", "anchor", "momentum", "common_start", "own"),
    *("squares", "num_squares", "last_met", "rounds"),
}
"""the names of tensors without which a state cannot be loaded"""


def bits_of(model, optimizer):
    return repr([model.state_dict(), optimizer.snapshot(), optimizer.steps])


def shorten(tensors, name):
    # a scalar has no elements to remove
    value = tensors[name]
    tensors[name] = value[:-1] if value.ndim else value.repeat(2)


def set_nan(tensors, name):
    tensors[name][0] = torch.nan


def set_text(tensors, name):
    tensors[name] = "a text"


def delete(tensors, name):
    del tensors[name]


DAMAGES = {
    shorten: r"has the shape \(.*\), not \(.*\)",
    set_nan: "has elements that are not finite",
    set_text: "is (a str|'a text')",
}


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("steps", [4, 6])
def test_a_damaged_tensor_is_rejected_by_name_and_nothing_is_loaded(name, steps):
    _, optimizers = make(name, steps)
    models, others = make(name, 2)
    before = bits_of(models[1], others[1])
    found = optimizers[1].snapshot()
    tensors = [
        (section, each, value)
        for section in SECTIONS
        for each, value in found[section].items()
        if isinstance(value, torch.Tensor)
    ]
    assert "parameters" in {each for _, each, _ in tensors}
    for section, each, value in tensors:
        for damage, message in DAMAGES.items():
            if damage is set_nan and (
                not value.is_floating_point() or section == "local" or each in MAY_OVERFLOW
            ):
                continue
            state = copy.deepcopy(found)
            damage(state[section], each)
            with pytest.raises(ValueError, match=rf"^{each} of the state {message}\n\nhint: "):
                others[1].load_state_dict(state)
    assert bits_of(models[1], others[1]) == before
    others[1].load_state_dict(found)


@pytest.mark.parametrize("name", LOCAL)
def test_a_state_without_a_tensor_is_rejected_and_nothing_is_loaded(name):
    _, optimizers = make(name, 6)
    models, others = make(name, 2)
    before = bits_of(models[1], others[1])
    found = optimizers[1].snapshot()
    for section in SECTIONS:
        for each in REQUIRED & set(found[section]):
            state = copy.deepcopy(found)
            delete(state[section], each)
            with pytest.raises(ValueError, match=r"(?s)the state .*\n\nhint: "):
                others[1].load_state_dict(state)
    assert bits_of(models[1], others[1]) == before


@pytest.mark.parametrize("name", LOCAL)
def test_a_state_without_a_number_or_a_text_is_rejected_and_nothing_is_loaded(name):
    _, optimizers = make(name, 6)
    models, others = make(name, 2)
    before = bits_of(models[1], others[1])
    found = optimizers[1].snapshot()
    for each, value in found["shared"].items():
        if isinstance(value, torch.Tensor):
            continue
        state = copy.deepcopy(found)
        delete(state["shared"], each)
        with pytest.raises(ValueError, match=rf"(?s){each}( of the state is .*)?\n\nhint: "):
            others[1].load_state_dict(state)
    assert bits_of(models[1], others[1]) == before


def test_numbers_that_are_not_finite_are_rejected_and_nothing_is_loaded():
    _, optimizers = make("backup-workers", 6)
    models, others = make("backup-workers", 2)
    before = bits_of(models[1], others[1])
    state = copy.deepcopy(optimizers[1].snapshot())
    state["local"]["rounds"][0] = math.nan
    with pytest.raises(ValueError, match=r"^rounds of the state is .*nan"):
        others[1].load_state_dict(state)
    assert bits_of(models[1], others[1]) == before


def test_compression_errors_of_another_shape_are_rejected_and_nothing_is_loaded():
    _, optimizers = make("diloco sign", 6)
    models, others = make("diloco sign", 2)
    before = bits_of(models[1], others[1])
    state = copy.deepcopy(optimizers[1].snapshot())
    shorten(state["errors"]["fragment 0"], "worker")
    with pytest.raises(ValueError, match=r"^errors of shapes .*\n\nhint: "):
        others[1].load_state_dict(state)
    assert bits_of(models[1], others[1]) == before
    others[1].load_state_dict(optimizers[1].snapshot())


KEYS = ("shared", "local", "shards", "errors", "optimizer", "layout", "rank", "world_size")


@pytest.mark.parametrize("name", ["diloco", "co2"])
def test_a_state_without_a_key_is_rejected(name):
    _, optimizers = make(name, 6)
    models, others = make(name, 2)
    before = bits_of(models[1], others[1])
    paths = [*((each,) for each in KEYS), ("param_groups",), ("local", "inner")]
    paths += [("shared", "steps"), ("shared", "is_local"), ("local", "inner", "param_groups")]
    for *above, last in paths:
        state = holder = copy.deepcopy(optimizers[1].snapshot())
        for each in above:
            holder = holder[each]
        del holder[last]
        with pytest.raises(ValueError, match=r"state .*(\n)*.*\n\nhint: "):
            others[1].load_state_dict(state)
    assert bits_of(models[1], others[1]) == before
