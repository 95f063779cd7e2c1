"""Check and convert the keys of nodes and the names of classes.

Notation: N nodes, T columns of labels.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gcnzc.graph.hetero.values import check_length
from gcnzc.system.arguments import describe


def as_keys(name: str, value: Any, count: int) -> NDArray[Any] | None:
    """Return ids of nodes as (N,) int64, or as text; None if they are 0 to N - 1 in this order.

    Args:
        name: of the values, for messages.
        value: (N,) integers or values of any kind, such as a column of a table; the text of a value
            is its `str`.
        count: N.

    Raises:
        ValueError: an id is missing or occurs twice, or the shape is wrong.
    """
    import pandas

    given = value.cpu().numpy() if isinstance(value, Tensor) else value
    if isinstance(given, str) or not isinstance(given, Iterable) or getattr(given, "ndim", 1) != 1:
        raise ValueError(
            f"{name} are {describe(value)}\n\nhint: give one key for each node, such as a list"
        )
    index = pandas.Index(given, tupleize_cols=False)
    check_length(name, np.empty(len(index), np.int8), count, dimensions=(1,))
    if index.hasnans:
        raise ValueError(f"{name} have missing values\n\nhint: each node has a key of its own")
    if getattr(index.dtype, "kind", "O") in "iu" and (not count or index.max() < 2**63):
        keys: NDArray[Any] = index.to_numpy().astype(np.int64, copy=False)
    else:
        keys = np.empty(count, object)
        keys[:] = [str(each) for each in index]
        _check_characters(name, keys)
        index = pandas.Index(keys, dtype=object)
    if not index.is_unique:
        raise ValueError(
            f"{name} have {str(index[index.duplicated()][0])!r:.100} twice\n\n"
            "hint: each node has a key of its own; keys are compared as text"
        )
    are_positions = keys.dtype.kind == "i" and bool((keys == np.arange(count)).all())
    return None if are_positions else keys


def _check_characters(name: str, texts: Iterable[str]) -> None:
    """Raise a ValueError if a text has a NUL, at which numpy ends texts."""
    if wrong := next((each for each in texts if "\0" in each), None):
        raise ValueError(
            f"{name} have {wrong!r:.100}, which has a NUL character\n\nhint: remove it"
        )


def as_class_names(name: str, value: Any, labels: Tensor | None) -> list[str]:
    """Return names of classes, or of several columns of labels.

    Args:
        name: of the values, for messages.
        value: the name of each class; or of each of the T columns of labels, if there are several.
        labels: (N,) int64, or (N, T).

    Raises:
        ValueError: there are no classes, a name occurs twice, or their number does not fit the
            labels.
    """
    if labels is None or (labels.ndim == 1 and labels.is_floating_point()):
        raise ValueError(
            f"{name} are given, but the nodes have no class labels\n\nhint: omit `classes`"
        )
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{name} are {describe(value)}\n\nhint: give a list of names")
    found = [str(each) for each in value]
    _check_characters(name, found)
    if len(set(found)) < len(found):
        twice = next(each for each in found if found.count(each) > 1)
        raise ValueError(f"{name} have {twice!r:.100} twice\n\nhint: give each a name of its own")
    columns = labels.shape[1] if labels.ndim == 2 else 1
    if columns > 1:
        fits, wanted = len(found) == columns, f"give one for each of the {columns} label columns"
    else:
        last = int(labels.nan_to_num(-1).max()) if labels.numel() else -1
        fits, wanted = len(found) > last, f"give at least {last + 1} names, one for each class"
    if not fits:
        raise ValueError(f"{len(found)} names are given as {name}\n\nhint: {wanted}")
    return found
