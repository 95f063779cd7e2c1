"""Check arguments: an error names the argument, its value, and what to give instead."""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IdsLike: TypeAlias = Tensor | NDArray[np.integer] | Sequence[int]


# sizes and counts are handed on to code that counts in 64 bits
INTEGER_LIMIT = 2**63 - 1


EPOCH_LIMIT = 2**32 - 1


THREADS_LIMIT = 1024


# fanouts are int32 in the samplers of PyG and DGL, too
FANOUT_LIMIT = 2**31 - 1


ALL_NEIGHBOURS = -1


# characters of a value in a message
SHOWN = 100


def describe(value: object) -> str:
    """Describe a value for an error message: its repr if that is short, otherwise its type."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} and shape {value.shape}"
    if value is None or isinstance(value, str | int | float | np.generic | torch.dtype):
        text = repr(value)
    elif isinstance(value, list | tuple) and len(value) <= SHOWN:
        inner = ", ".join(map(describe, value))
        text = f"[{inner}]" if isinstance(value, list) else f"({inner})"
    else:
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def check_kind(name: str, value: object, kinds: type | tuple[type, ...], hint: str = "") -> None:
    """Check that a value is an instance of a class, or of one of several.

    Args:
        name: of the argument.
        value: of the argument.
        kinds: the class, or several.
        hint: what to give instead, if the names of the classes do not say it.

    Raises:
        TypeError: it is of another class.
    """
    if not isinstance(value, kinds):
        names = [kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,))]
        hint = f"\n\nhint: {hint}" if hint else ""
        raise TypeError(f"{name} is {describe(value)}, not a {' or '.join(names)}{hint}")


def check_callable(name: str, value: object) -> None:
    """Check that a value is None or can be called.

    Raises:
        TypeError: it is neither.
    """
    if value is not None and not callable(value):
        raise TypeError(f"{name} is {describe(value)}, not a function\n\nhint: {name}=None")


def check_integer(
    name: str,
    value: Any,
    least: int = -(2**63),
    most: int = INTEGER_LIMIT,
    hint: str | None = None,
) -> int:
    """Return `value` as an int; numpy's and torch's integers are taken, bool and float are not.

    Args:
        name: of the argument.
        value: of the argument.
        least: the smallest valid value.
        most: the largest one.
        hint: what to give instead; the range if None.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is out of range.
    """
    if most == INTEGER_LIMIT:
        hint = hint or f"an integer of at least {least}"
    hint = hint or f"an integer from {least} to {most}"
    is_flag = isinstance(value, bool | np.bool_)
    try:
        number = operator.index(value)
    except (TypeError, RuntimeError):
        number = None
    if number is None or is_flag:
        raise TypeError(f"{name} is {describe(value)}, not an integer\n\nhint: {hint}")
    if not least <= number <= most:
        bound = f"at least {least}" if number < least else f"at most {most}"
        raise ValueError(f"{name} is {describe(number)}, but must be {bound}\n\nhint: {hint}")
    return number


def check_seed(name: str, value: Any) -> int:
    """Return a seed of 64 bits as an int.

    Raises:
        TypeError: it is not an integer.
        ValueError: it does not fit 64 bits.
    """
    return check_integer(
        name, value, -(2**63), 2**64 - 1, "a seed fits 64 bits, such as one of 0 to 2**64 - 1"
    )


def check_epoch(name: str, value: Any) -> int:
    """Return the number of an epoch, which is counted from 0 in 32 bits.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is out of range.
    """
    return check_integer(name, value, 0, EPOCH_LIMIT, "epochs count from 0, below 2**32")


def check_number(
    name: str,
    value: Any,
    is_valid: Callable[[float], bool] = math.isfinite,
    hint: str = "a finite number",
) -> float:
    """Return a real number as a float.

    Args:
        name: of the argument.
        value: of the argument.
        is_valid: whether a number is valid; any comparison with NaN is False.
        hint: the valid numbers, for the error message.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not valid.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(
        value, int | float | np.integer | np.floating
    ):
        raise TypeError(f"{name} is {describe(value)}, not a number\n\nhint: {hint}")
    if not is_valid(value):  # type: ignore[arg-type]
        raise ValueError(f"{name} is {describe(value)}\n\nhint: {hint}")
    return float(value)


def check_flag(name: str, value: Any) -> bool:
    """Return a bool as a Python bool; the integers 0 and 1 are accepted too.

    Raises:
        TypeError: it is anything else.
    """
    if isinstance(value, bool | np.bool_ | int | np.integer) and value in (0, 1):
        return bool(value)
    raise TypeError(f"{name} is {describe(value)}, not True or False\n\nhint: {name}=True")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Check that a value is one of some strings.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} is {describe(value)}\n\nhint: one of {', '.join(choices)}")


def check_fanouts(name: str, value: Any) -> tuple[int, ...]:
    """Return fanouts, the numbers of neighbours sampled for each layer, as a tuple of int.

    Raises:
        TypeError: they are not a sequence of integers.
        ValueError: there are none, or one is below -1 or above 2**31 - 1.
    """
    hint = "fanouts are one integer a layer, such as [15, 10, 5]; -1 keeps all neighbours"
    if isinstance(value, str | bytes | dict) or not isinstance(value, Iterable):
        raise TypeError(f"{name} is {describe(value)}, not a list of integers\n\nhint: {hint}")
    numbers = tuple(value.tolist() if isinstance(value, Tensor | np.ndarray) else value)
    if not numbers:
        raise ValueError(f"{name} is {describe(value)}: no fanout\n\nhint: {hint}")
    return tuple(
        check_integer(f"{name}[{place}]", number, ALL_NEIGHBOURS, FANOUT_LIMIT, hint)
        for place, number in enumerate(numbers)
    )


def check_device(name: str, value: Any) -> torch.device:
    """Return a `torch.device`, given as a device, its name, or the index of a GPU.

    Raises:
        TypeError: it is none of these.
        ValueError: torch has no device of that name.
    """
    hint = "'cpu', 'cuda', or 'cuda:1'"
    if isinstance(value, bool) or not isinstance(value, str | int | torch.device):
        raise TypeError(f"{name} is {describe(value)}, not a device\n\nhint: {hint}")
    try:
        return torch.device(value)
    except (RuntimeError, ValueError, OverflowError, TypeError):
        raise ValueError(f"{name} is {describe(value)}, not a device\n\nhint: {hint}") from None


def check_edge_index(name: str, value: Any) -> Tensor:
    """Return edges, a (2, E) tensor of int32 or int64; without edges it may be of any dtype.

    Raises:
        ValueError: it is not such a tensor.
    """
    is_pair = isinstance(value, Tensor) and value.ndim == 2 and len(value) == 2
    if not is_pair or (value.numel() and value.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f"{name} is {describe(value)}, not int64 of shape (2, E)")
    # `torch.tensor([[], []])` is of float32
    return value if value.numel() else value.long()


def as_ids(name: str, value: Any, hint: str) -> Tensor:
    """Return ids of nodes or edges, given as a tensor, an array or a list, as an int64 tensor (N,).

    A tensor stays on its device, and is not copied if its dtype is int64.

    Args:
        name: of the argument.
        value: of the argument, with dtype int32 or int64.
        hint: what to give instead, for the error message.

    Raises:
        TypeError: it is none of these.
        ValueError: its dtype is another one, or it does not have one dimension.
    """
    ids = value
    if not isinstance(value, Tensor | np.ndarray):
        if isinstance(value, str | bytes | dict) or not isinstance(value, Iterable):
            raise TypeError(
                f"{name} is {describe(value)}, not a tensor, an array or a list of integers\n\n"
                f"hint: {hint}"
            )
        listed = list(value)
        try:
            ids = np.asarray(listed) if listed else np.empty(0, np.int64)
        except (ValueError, RuntimeError, TypeError):
            ids = np.empty(len(listed), object)
    is_integer = (
        ids.dtype in (torch.int32, torch.int64)
        if isinstance(ids, Tensor)
        # in any byte order
        else ids.dtype.kind == "i" and ids.dtype.itemsize in (4, 8)
    )
    if not is_integer or ids.ndim != 1:
        raise ValueError(
            f"{name} is {describe(value)}: a vector of int32 or int64 is needed\n\nhint: {hint}"
        )
    if isinstance(ids, Tensor):
        return ids.long()
    # a copy, since torch does not support read-only memory
    return torch.from_numpy(ids.astype(np.int64))
