"""Check that a state is of the same parameters as an optimizer, before any of it is loaded."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gcnzc.compress.reducer import DAMAGED_HINT
from gcnzc.optim.fully_shard import local
from gcnzc.optim.muon import Muon
from gcnzc.optim.resize import check_mapping
from gcnzc.system.arguments import describe

MAX_COUNT = 2**53
"""the largest number of steps, exchanges or ranks in a state"""
# the state of a parameter after its first step
_ADAM = {"step", "exp_avg", "exp_avg_sq"}
_REQUIRED = {torch.optim.Adam: _ADAM, torch.optim.AdamW: _ADAM}
_HINT = "hint: load it into an optimizer of the same model"
# before the names of counts in a parameter group
_COUNT = "gcnzc_"


def check_param_groups(groups: object) -> None:
    """Check that the parameter groups of a state are mappings, each with a list of parameters.

    Raises:
        ValueError: they are not.
    """
    if not isinstance(groups, list | tuple):
        raise ValueError(
            f"param_groups of the state is {describe(groups)}, not a list\n\n{DAMAGED_HINT}"
        )
    for group in groups:
        params = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(params, list | tuple) or not all(
            isinstance(p, int | str) for p in params
        ):
            raise ValueError(
                f"param_groups of the state has {describe(group)}, not a mapping with a list "
                f"params\n\n{DAMAGED_HINT}"
            )


def check_group_lengths(
    groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> None:
    """Check that the parameter groups of a state have as many parameters as those of an optimizer.

    Args:
        groups: the optimizer's `param_groups`.
        saved: those of the state.

    Raises:
        ValueError: they have not.
    """
    check_param_groups(saved)
    own_counts, counts = ([len(group["params"]) for group in each] for each in (groups, saved))
    if own_counts != counts:
        raise ValueError(
            f"the state has groups of {counts} parameters, but this optimizer has groups of "
            f"{own_counts}\n\n{_HINT}"
        )


def check_layout(layout: Sequence[str], saved: Sequence[str]) -> None:
    """Check that a state has the same parameters as an optimizer.

    Args:
        layout: a line for each parameter of the optimizer, such as its name and shape.
        saved: those of the state.

    Raises:
        ValueError: a line differs; the message has the first of them.
    """
    if not isinstance(saved, list | tuple):
        raise ValueError(f"layout of the state is {describe(saved)}, not a list\n\n{DAMAGED_HINT}")
    for own, other in zip_longest(layout, saved):
        if own != other:
            raise ValueError(
                f"the state has {other or 'no more parameters'}, but this optimizer has "
                f"{own or 'no more parameters'}\n\n{_HINT}"
            )


def add_counts(state_dict: Mapping[str, Any], **counts: int) -> dict[str, Any]:
    """Return an inner optimizer's state dict with counts in its first parameter group.

    The inner optimizer itself loads it too, since torch's optimizers accept further options of a
    group. torch.distributed.checkpoint saves the options of groups, but no other entries.
    """
    first, *others = state_dict["param_groups"]
    first = {**first, **{f"{_COUNT}{name}": count for name, count in counts.items()}}
    return {**state_dict, "param_groups": [first, *others]}


def split_counts(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the arguments of `add_counts`; there are no counts in a state dict without them.

    Raises:
        ValueError: it is no state dict, or a count is damaged.
    """
    check_mapping(state_dict, "state", "param_groups")
    check_param_groups(state_dict["param_groups"])
    groups = [dict(group) for group in state_dict["param_groups"]]
    names = [name for name in groups[0] if name.startswith(_COUNT)] if groups else []
    for name in names:
        value = groups[0][name]
        if type(value) is not int or not 0 <= value <= MAX_COUNT:
            raise ValueError(
                f"{name} of the state is {describe(value)}, not a count\n\n{DAMAGED_HINT}"
            )
    counts = {name.removeprefix(_COUNT): groups[0].pop(name) for name in names}
    return {**state_dict, "param_groups": groups}, counts


def check_inner_state(inner: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Check that a state dict of an inner optimizer is of the same parameters.

    Shapes are compared if torch implements the optimizer, and for `gcnzc.optim.Muon`. These, except
    Adafactor, have tensors of the parameter's shape, and scalars such as `step`. Others may have
    other tensors.

    Args:
        inner: the inner optimizer.
        state_dict: a result of its `state_dict`.

    Raises:
        ValueError: the numbers of parameters or their shapes differ, or a value is missing or
            damaged.
    """
    check_mapping(state_dict, "state", "param_groups")
    groups, states = state_dict["param_groups"], state_dict["state"]
    check_group_lengths(inner.param_groups, groups)
    check_mapping(states)
    kind = type(inner)
    # torch 2.4 has no Adafactor
    is_known = kind.__module__.startswith("torch.optim") and kind.__name__ != "Adafactor"
    is_known |= issubclass(kind, Muon)
    required = _REQUIRED.get(kind, set())
    for number, (group, saved) in enumerate(zip(inner.param_groups, groups, strict=True)):
        pairs = zip(group["params"], saved["params"], strict=True)
        for index, (parameter, saved_index) in enumerate(pairs):
            where = f"group {number}, parameter {index}"
            values = states.get(saved_index, {})
            check_mapping(values)
            if values and (missing := sorted(required.difference(values))):
                raise ValueError(
                    f"the state of {where} has no {', '.join(missing)}\n\n{DAMAGED_HINT}"
                )
            for name, value in values.items() if is_known else ():
                _check_inner_value(name, value, where, parameter, is_required=name in required)


def _check_inner_value(
    name: str, value: object, where: str, parameter: Tensor, *, is_required: bool
) -> None:
    """Check a value of the state of a parameter; see `check_inner_state`."""
    # such as the momentum of SGD before the first step
    if value is None and not is_required:
        return
    is_number = isinstance(value, int | float | Tensor) and not isinstance(value, bool)
    is_complex = isinstance(value, Tensor) and value.is_complex()
    if not is_number or (is_complex and not parameter.is_complex()):
        raise ValueError(f"{name} of {where} of the state is {describe(value)}\n\n{DAMAGED_HINT}")
    assert isinstance(value, int | float | Tensor), "checked above"
    is_scalar = not isinstance(value, Tensor) or value.numel() == 1
    needs_elements = is_required and name != "step"
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    if shape != local(parameter).shape and (needs_elements or not is_scalar):
        raise ValueError(
            f"the state has {name} {shape} of {where}, but this optimizer has a parameter "
            f"{tuple(local(parameter).shape)}\n\n{_HINT}"
        )
    is_real = not isinstance(value, Tensor) or value.is_floating_point()
    if not (is_scalar or is_real or is_complex):
        raise ValueError(f"{name} of {where} of the state is {describe(value)}\n\n{DAMAGED_HINT}")
    if name == "step" and is_scalar and not 0 <= float(value) <= MAX_COUNT:
        raise ValueError(f"step of {where} of the state is {float(value)}\n\n{DAMAGED_HINT}")
