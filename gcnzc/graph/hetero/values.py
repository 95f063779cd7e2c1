"""Convert values of nodes and edges: weights, features, labels and splits."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gcnzc.datasets.part_names import part_of
from gcnzc.system.arguments import describe


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


def as_weights(name: str, value: Any, count: int) -> Tensor:
    """Return sampling weights as a contiguous float32 tensor.

    Raises:
        ValueError: a weight is negative or not finite, or the shape is wrong.
    """
    weights = to_array(name, value)
    if weights.ndim == 2 and weights.shape[1] == 1:
        weights = weights[:, 0]
    check_length(name, weights, count, dimensions=(1,))
    if weights.dtype.kind not in "fiub":
        raise ValueError(f"{name} has type {weights.dtype}\n\nhint: weights are numbers")
    with np.errstate(over="ignore"):
        converted = np.ascontiguousarray(weights, np.float32)
    if (place := first(~(np.isfinite(converted) & (converted >= 0)))) is not None:
        raise ValueError(
            f"{name}[{place}] is {weights[place]}\n\n"
            "hint: weights are finite and at least 0; an edge of weight 0 is never sampled"
        )
    return torch.from_numpy(writable(converted))


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
        features = torch.from_numpy(writable(array))
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
    check_length(name, labels, count, dimensions=(1, 2))
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind not in "fiub":
        raise ValueError(f"{name} has type {labels.dtype}\n\nhint: labels are numbers")
    dtype = np.float32 if labels.dtype.kind == "f" else np.int64
    return torch.from_numpy(writable(np.ascontiguousarray(labels, dtype)))


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
            check_length(own, ids, count, dimensions=(1,))
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
        if (place := first((ids < 0) | (ids >= count))) is not None:
            raise ValueError(
                f"{own} contains the node {ids[place]}, but the type has {count} nodes\n\n"
                f"hint: ids are from 0 to {count - 1}"
            )
        split[part] = torch.from_numpy(ids)
    return split


def check_length(name: str, values: NDArray[Any], count: int, dimensions: tuple[int, ...]) -> None:
    """Check the length and the number of dimensions of an array."""
    if values.ndim not in dimensions or len(values) != count:
        raise _wrong_length(name, values.shape, count)


def _wrong_length(name: str, shape: tuple[int, ...], count: int) -> ValueError:
    return ValueError(
        f"{name} has shape {shape}, but the type has {count} nodes or edges\n\n"
        "hint: one row for each, in the order of their ids"
    )


def first(is_wrong: NDArray[np.bool_]) -> int | None:
    """Return the first position that is True; None if there is none."""
    return int(is_wrong.argmax()) if is_wrong.any() else None


def writable(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array that torch can share: not read-only and without negative strides."""
    is_shared = array.flags.writeable and all(step >= 0 for step in array.strides)
    return array if is_shared else array.copy()
