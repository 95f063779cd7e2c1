"""Damaged values anywhere in the states of all optimizers are rejected, and not loaded."""

import copy

import pytest
import torch
from optim.kinds import KINDS, ZERO_ONE_LOCAL
from optim.test_damaged_states import bits_of, make

WITH_STATE = {name: make for name, make in KINDS.items() if name != "averaged"}
"""all optimizers except those that load any state of an inner optimizer"""
# a parameter's state may have None, such as the momentum of SGD, and other optional values
OPTIONAL = {"pending_gradients"}


def leaves(values, path=()):
    """The paths of all values in nested dictionaries."""
    for name, value in values.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from leaves(value, (*path, name))


def holder_of(state, path):
    for name in path[:-1]:
        state = state[name]
    return state


def damages_of(path, value):
    """Values that must not be loaded instead of `value`."""
    *_, name = path
    yield ["a list"]
    if name not in OPTIONAL:
        yield None
    if not isinstance(value, str):
        yield "a text"
    if isinstance(value, bool):
        yield 1
    elif isinstance(value, int):
        yield from (-7, 0.5, torch.nan, 10**30, True)
    elif isinstance(value, float):
        yield from (torch.nan, torch.inf)
    elif isinstance(value, torch.Tensor):
        yield value.to(torch.complex64)
        if value.dtype != torch.bool and name != "step":
            yield value.bool()
        # the state of a parameter and this rank's vectors may overflow, which is repaired
        is_own = path[0] in ("inner", "local") and name not in ("step", "update")
        if value.is_floating_point() and value.numel() and not is_own and not may_overflow(name):
            yield torch.full_like(value, torch.nan)
        if name.endswith(" values"):
            # the last is the number of finite vectors
            for number in (torch.nan, torch.inf, -1.0):
                changed = value.clone()
                changed[-1] = number
                yield changed
        # `times` may have any number of rows
        if value.ndim and value.numel() > 1 and name != "times":
            yield value[:-1]


def error_of(optimizer, state):
    try:
        optimizer.load_state_dict(state)
    except ValueError as error:
        return str(error)
    return ""


def may_overflow(name):
    return name.endswith((" mean", " values"))


@pytest.mark.parametrize("name", WITH_STATE)
def test_a_damaged_value_is_rejected_and_nothing_is_loaded(name):
    # 0/1 Adam is between two synchronizations after 6 steps
    _, optimizers = make(name, 6)
    models, others = make(name, 2)
    before = bits_of(models[1], others[1])
    found = optimizers[1].snapshot()
    sections = ("shared", "local", "shards", "errors")
    state = {section: found[section] for section in sections}
    paths = list(leaves(state))
    if "inner" in found:
        paths += leaves({"inner": {"state": found["inner"]["state"]}})
    assert len(paths) > 8
    accepted = []
    for path in paths:
        value = holder_of(found, path)[path[-1]]
        for damage in damages_of(path, value):
            if damage is None and name in ("a2cid2", "fedglomo"):
                continue  # these do not have all vectors at all times
            state = copy.deepcopy(found)
            holder_of(state, path)[path[-1]] = damage
            if "\n\nhint: " not in error_of(others[1], state):
                accepted.append((path, damage))
                models, others = make(name, 2)
    assert not accepted
    assert bits_of(models[1], others[1]) == before
    others[1].load_state_dict(found)


@pytest.mark.parametrize("name", [*ZERO_ONE_LOCAL, "onebit-lamb", "averaged sign", "drop-compute"])
def test_a_missing_value_is_rejected_and_nothing_is_loaded(name):
    _, optimizers = make(name, 6)
    models, others = make(name, 2)
    before = bits_of(models[1], others[1])
    found = optimizers[1].snapshot()
    for path in leaves({section: found[section] for section in ("shared", "local")}):
        # inactive elements may have no gradients, and an inner optimizer no state
        if path[-1] in {"pending_gradients", "active"} or path[1:2] == ("inner",):
            continue
        state = copy.deepcopy(found)
        del holder_of(state, path)[path[-1]]
        with pytest.raises(ValueError, match=r"(?s)hint: "):
            others[1].load_state_dict(state)
    assert bits_of(models[1], others[1]) == before


@pytest.mark.parametrize("name", ["averaged", "onebit-adam", "diloco"])
def test_a_state_dict_of_another_structure_is_rejected_and_nothing_is_loaded(name):
    _, optimizers = make(name, 4)
    models, others = make(name, 2)
    before = bits_of(models[1], others[1])
    for key, value in (
        *(("state", each) for each in ([1], None, {0: 3}, {0: None})),
        *(("param_groups", each) for each in ({"params": [0, 1]}, None, 3, [3])),
    ):
        with pytest.raises(ValueError, match=r"(?s)\n\nhint: "):
            others[1].load_state_dict(optimizers[1].state_dict() | {key: value})
    assert bits_of(models[1], others[1]) == before


@pytest.mark.parametrize("name", ["zero-one-adam", "onebit-adam"])
def test_integers_of_more_than_64_bits_are_no_options(name):
    _, optimizers = make(name, 4)
    _, others = make(name, 2)
    state = optimizers[1].snapshot()
    state["param_groups"][0]["eps"] = 10**30
    with pytest.raises(ValueError, match=r"eps(.|\n)*\n\nhint: "):
        others[1].load_state_dict(state)


@pytest.mark.parametrize("section", ["shared", "local", "shards", "errors"])
def test_a_section_that_is_not_a_mapping_is_named(section):
    _, optimizers = make("averaged sign", 2)
    state = copy.deepcopy(optimizers[1].snapshot())
    state[section] = []
    with pytest.raises(ValueError, match=rf"^{section} of the state is \[\], not a mapping\n"):
        optimizers[1].load_state_dict(state)
