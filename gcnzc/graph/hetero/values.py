"""Convert values of nodes and edges: times, weights, features, labels and splits."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gcnzc.datasets.part_names import part_of
from gcnzc.system.arguments import describe

# int64's least value, which NumPy and pandas write for a missing time (NaT)
MISSING_TIME = -(2**63)
# units of times, and their length in nanoseconds
UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
DATE_UNITS = {**UNITS, "m": 60 * 10**9, "h": 3600 * 10**9, "D": 86400 * 10**9}


def to_array(name: str, value: Any) -> NDArray[Any]:
    """Return a tensor on any device, an array, a pandas column or a list as an array."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    if hasattr(value, "to_numpy"):
        return np.asarray(value.to_numpy())
    try:
        return np.asarray(value)
    except ValueError:
        raise TypeError(f"{name} is {describe(value)}\n\nhint: a tensor or an array") from None


def as_times(name: str, value: Any, count: int, unit: str = "s") -> Tensor:
    """Return times as a contiguous int64 tensor.

    Args:
        name: of the values, for messages.
        value: (count,) integers; floating-point numbers without fractions; or NumPy's or pandas'
            dates, which become the time since 1970 in `unit`, rounded up so that nothing seems to
            happen before its time.
        count: number of nodes or edges.
        unit: "s", "ms", "us" or "ns".

    Raises:
        ValueError: a time is missing or has a fraction, or the shape is wrong.
    """
    times = to_array(name, value)
    _check_length(name, times, count, dimensions=(1,))
    if times.dtype.kind in "mM":
        if (place := _first(np.isnat(times))) is not None:
            raise _missing_time(name, place, "NaT")
        return torch.from_numpy(_since_1970(times, UNITS[unit]))
    if times.dtype.kind == "f":
        if (place := _first(~np.isfinite(times))) is not None:
            raise _missing_time(name, place, str(times[place]))
        whole = (times == np.floor(times)) & (np.abs(times) < 2.0**63)
        if (place := _first(~whole)) is not None:
            raise ValueError(
                f"{name}[{place}] is {times[place]}\n\nhint: times are integers; convert them to a "
                "smaller unit, such as milliseconds"
            )
    elif times.dtype.kind not in "iu":
        raise ValueError(f"{name} has type {times.dtype}\n\nhint: times are integers or dates")
    elif (place := _first(times > np.iinfo(np.int64).max)) is not None:
        raise ValueError(
            f"{name}[{place}] is {times[place]}, which int64 does not have\n\n"
            "hint: times are below 2**63; subtract the earliest, or use a larger unit"
        )
    converted = np.ascontiguousarray(times.astype(np.int64, copy=False))
    if (place := _first(converted == MISSING_TIME)) is not None:
        raise _missing_time(name, place, "NaT")
    return torch.from_numpy(_writable(converted))


def _since_1970(times: NDArray[Any], unit: int) -> NDArray[np.int64]:
    """Return dates or durations as numbers of units of so many nanoseconds, rounded up."""
    name, count = np.datetime_data(times.dtype)
    if name not in DATE_UNITS:
        # years, months and weeks
        times, name, count = times.astype(f"{times.dtype.kind}8[s]"), "s", 1
    own = DATE_UNITS[name] * count
    if own % unit and unit % own:
        times, own = times.astype(f"{times.dtype.kind}8[ns]"), 1
    ticks = times.astype(np.int64)
    if own % unit:
        return -(-ticks // (unit // own))
    factor = own // unit
    limit = np.iinfo(np.int64).max // factor
    if (place := _first((ticks > limit) | (ticks < -limit))) is not None:
        raise ValueError(
            f"the date {times[place]} at position {place} is out of the range of int64 in this "
            "time_unit\n\nhint: use a larger time_unit, such as 's'"
        )
    found: NDArray[np.int64] = ticks * factor
    return found


def _missing_time(name: str, place: int, value: str) -> ValueError:
    return ValueError(
        f"{name}[{place}] is {value}, a missing time\n\n"
        "hint: remove these rows, or give them a time; a type without any times is always visible"
    )


def as_weights(name: str, value: Any, count: int) -> Tensor:
    """Return sampling weights as a contiguous float32 tensor.

    Raises:
        ValueError: a weight is negative or not finite, or the shape is wrong.
    """
    weights = to_array(name, value)
    if weights.ndim == 2 and weights.shape[1] == 1:
        weights = weights[:, 0]
    _check_length(name, weights, count, dimensions=(1,))
    if weights.dtype.kind not in "fiub":
        raise ValueError(f"{name} has type {weights.dtype}\n\nhint: weights are numbers")
    with np.errstate(over="ignore"):
        converted = np.ascontiguousarray(weights, np.float32)
    if (place := _first(~(np.isfinite(converted) & (converted >= 0)))) is not None:
        raise ValueError(
            f"{name}[{place}] is {weights[place]}\n\n"
            "hint: weights are finite and at least 0; an edge of weight 0 is never sampled"
        )
    return torch.from_numpy(_writable(converted))


def as_features(name: str, value: Any, count: int) -> Tensor:
    """Return features as a (count, D) tensor on the host, without a copy where possible.

    A vector becomes one column. A torch CSR matrix stays sparse.

    Raises:
        ValueError: the shape or dtype is wrong.
    """
    if isinstance(value, Tensor):
        features = value.detach().cpu()
        if features.layout == torch.sparse_coo:
            features = features.to_sparse_csr()
    else:
        array = to_array(name, value)
        if array.dtype.kind not in "fiub":
            raise ValueError(
                f"{name} has type {array.dtype}\n\nhint: features are numbers; encode text first"
            )
        features = torch.from_numpy(_writable(array))
    if features.ndim == 1:
        features = features.unsqueeze(1)
    if features.ndim != 2 or len(features) != count:
        raise _wrong_length(name, tuple(features.shape), count)
    if features.layout == torch.strided and features.stride(1) != 1 and features.shape[1] > 1:
        features = features.contiguous()
    return features


def as_labels(name: str, value: Any, count: int) -> Tensor:
    """Return labels: (count,) or (count, T), int64 for integers, float32 for other numbers.

    Raises:
        ValueError: the shape or dtype is wrong.
    """
    labels = to_array(name, value)
    _check_length(name, labels, count, dimensions=(1, 2))
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind not in "fiub":
        raise ValueError(f"{name} has type {labels.dtype}\n\nhint: labels are numbers")
    dtype = np.float32 if labels.dtype.kind == "f" else np.int64
    return torch.from_numpy(_writable(np.ascontiguousarray(labels, dtype)))


def as_split(name: str, value: Mapping[str, Any], count: int) -> dict[str, Tensor]:
    """Return the int64 ids of "train", "valid" and "test", given as ids or masks.

    Raises:
        ValueError: a name, an id or a shape is wrong.
    """
    split = {}
    for key, given in value.items():
        part, own = part_of(key), f"{name}[{key!r}]"
        if part is None or part in split:
            raise ValueError(f"{name} has the key {key!r}\n\nhint: train, valid and test")
        ids = to_array(own, given)
        if ids.dtype == bool:
            _check_length(own, ids, count, dimensions=(1,))
            ids = np.flatnonzero(ids)
        if ids.dtype == np.uint8:
            raise ValueError(
                f"{own} has type uint8, which may be ids or a mask\n\n"
                "hint: convert a mask to bool, and ids to int64"
            )
        if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
            raise ValueError(
                f"{own} has shape {ids.shape} and type {ids.dtype}\n\nhint: node ids, or a mask"
            )
        ids = ids.astype(np.int64)
        if (place := _first((ids < 0) | (ids >= count))) is not None:
            raise ValueError(
                f"{own} contains the node {ids[place]}, but the type has {count} nodes\n\n"
                f"hint: ids are from 0 to {count - 1}"
            )
        split[part] = torch.from_numpy(ids)
    return split


def _check_length(name: str, values: NDArray[Any], count: int, dimensions: tuple[int, ...]) -> None:
    if values.ndim not in dimensions or len(values) != count:
        raise _wrong_length(name, values.shape, count)


def _wrong_length(name: str, shape: tuple[int, ...], count: int) -> ValueError:
    return ValueError(
        f"{name} has shape {shape}, but the type has {count} nodes or edges\n\n"
        "hint: one row for each, in the order of their ids"
    )


def _first(is_wrong: NDArray[np.bool_]) -> int | None:
    return int(is_wrong.argmax()) if is_wrong.any() else None


def _writable(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array that torch can share: not read-only and without negative strides."""
    is_shared = array.flags.writeable and all(step >= 0 for step in array.strides)
    return array if is_shared else array.copy()
