"""Check that a state is of the same parameters as an optimizer, before any of it is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gcnzc.optim.muon import Muon
from gcnzc.optim.resize import RESIZED_FROM

_HINT = "hint: load it into an optimizer of the same model"


@dataclass(frozen=True)
class SavedTensor:
    """The properties of a tensor of a state that `check_tensor` checks."""

    shape: tuple[int, ...]
    may_overflow: bool = False
    """whether elements may be infinite or NaN"""


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
    for own, other in zip_longest(layout, saved):
        if own != other:
            raise ValueError(
                f"the state has {other or 'no more parameters'}, but this optimizer has "
                f"{own or 'no more parameters'}\n\n{_HINT}"
            )


def check_tensor(state: Mapping[str, Any], name: str, expected: SavedTensor) -> None:
    """Check a tensor of a state, before anything is loaded.

    Args:
        state: tensors by name.
        name: the name of the tensor.
        expected: its properties.

    Raises:
        ValueError: it is missing, not a tensor, of another shape, or has elements that are not
            finite.
    """
    value = state.get(name)
    hint = "hint: load another checkpoint; this one is damaged, or was saved with other options"
    if not isinstance(value, Tensor):
        found = "is missing" if value is None else f"is a {type(value).__name__}"
        raise ValueError(f"{name} of the state {found}\n\n{hint}")
    if value.shape != expected.shape:
        raise ValueError(
            f"{name} of the state has the shape {tuple(value.shape)}, not {expected.shape}"
            f"\n\n{hint}"
        )
    if not expected.may_overflow and not bool(value.isfinite().all()):
        raise ValueError(f"{name} of the state has elements that are not finite\n\n{hint}")


def saved_world_size(snapshot: Mapping[str, Any]) -> int:
    """Return the number of ranks that saved a state, before `gcnzc.optim.resize_state`."""
    number: int = snapshot.get(RESIZED_FROM, snapshot["world_size"])
    return number


def check_inner_state(inner: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Check that a state dict of an inner optimizer is of the same parameters.

    Shapes are compared if torch implements the optimizer, and for `gcnzc.optim.Muon`. These, except
    Adafactor, have tensors of the parameter's shape, and scalars such as `step`. Others may have
    other tensors.

    Args:
        inner: the inner optimizer.
        state_dict: a result of its `state_dict`.

    Raises:
        ValueError: the numbers of parameters or their shapes differ.
    """
    groups = state_dict["param_groups"]
    check_group_lengths(inner.param_groups, groups)
    kind = type(inner)
    # torch 2.4 has no Adafactor
    is_known = kind.__module__.startswith("torch.optim") and kind.__name__ != "Adafactor"
    if not (is_known or issubclass(kind, Muon)):
        return
    for number, (group, saved) in enumerate(zip(inner.param_groups, groups, strict=True)):
        pairs = zip(group["params"], saved["params"], strict=True)
        for index, (parameter, saved_index) in enumerate(pairs):
            for name, value in state_dict["state"].get(saved_index, {}).items():
                has_elements = isinstance(value, Tensor) and value.numel() != 1
                if has_elements and value.shape != parameter.shape:
                    raise ValueError(
                        f"the state has {name} {tuple(value.shape)} of group {number}, parameter "
                        f"{index}, but this optimizer has a parameter {tuple(parameter.shape)}"
                        f"\n\n{_HINT}"
                    )
