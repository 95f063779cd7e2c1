"""Check the items of a minibatch that a sampler, or another loader, chose."""

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcnzc.system.arguments import describe


def as_items(given: Any, num_items: int, where: str) -> Tensor:
    """Return the items of a minibatch as an int64 tensor (S,) on the host.

    They are any iterable of integers, as for torch's `DataLoader`: Python's, NumPy's, or integer
    tensors of one element. Truth values are rejected, and negative integers, which torch counts
    from the end.

    Args:
        given: indices of nodes or edges of the loader, in [0, num_items).
        num_items: the number of items of the loader.
        where: what has the items, for error messages.

    Raises:
        TypeError: `given` is not an iterable of integers; the message has the value and its
            position.
        IndexError: an index is out of range; the message has the value and its position.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Iterable) or _is_scalar(given):
        raise TypeError(f"{where} is {describe(given)}, not a list of integers\n\n{_HINT}")
    if isinstance(given, Tensor | np.ndarray) and _is_integral(given) and given.ndim == 1:
        values = given.tolist()
    else:
        values = [
            value if type(value) is int else _as_integer(value, place, where)
            for place, value in enumerate(given)
        ]
    if values and not 0 <= min(values) <= max(values) < num_items:
        place = next(i for i, value in enumerate(values) if not 0 <= value < num_items)
        raise IndexError(
            f"{where} has {describe(values[place])} at position {place}, but the loader "
            f"has {num_items} items\n\n{_HINT}"
        )
    return torch.tensor(values, dtype=torch.int64)


_HINT = (
    "hint: an item is an index of the nodes or edges that the loader was given, counted from 0; a "
    "mask becomes indices by .nonzero().flatten()"
)


def _as_integer(value: Any, place: int, where: str) -> int:
    is_array = isinstance(value, Tensor | np.ndarray | np.generic)
    is_flag = isinstance(value, bool) or (is_array and not _is_integral(value))
    try:
        if not is_flag:
            return operator.index(value)
    except (TypeError, RuntimeError):
        pass
    shown = value.item() if is_array and _is_scalar(value) else value
    raise TypeError(f"{where} has {describe(shown)} at position {place}, not an integer\n\n{_HINT}")


def _is_integral(values: Any) -> bool:
    """Whether the dtype of a tensor, an array or a NumPy number is one of integers."""
    if isinstance(values, Tensor):
        kinds = values.dtype.is_floating_point, values.dtype.is_complex, values.dtype == torch.bool
        return not any(kinds)
    return values.dtype.kind in "iu"


def _is_scalar(given: Any) -> bool:
    return isinstance(given, Tensor | np.ndarray | np.generic) and given.ndim == 0
