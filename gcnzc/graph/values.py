"""Convert values of nodes and edges: weights, features, labels and splits."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gcnzc.datasets.source import SPLITS, check_once, is_mask, max_classes, part_of
from gcnzc.system.arguments import describe


def to_array(name: str, value: Any) -> NDArray[Any]:
    """Return a tensor on any device, an array, a pandas column or a list as an array.

    Raises:
        TypeError: the value is sparse, or not an array.
    """
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise TypeError(
                f"{name} is {describe(value)} of layout {value.layout}\n\nhint: a dense tensor; "
                "adjacency.coalesce().indices() has the edges of a sparse COO matrix"
            )
        dense = value.detach().cpu()
        # numpy has no such dtype
        return (dense.float() if dense.dtype == torch.bfloat16 else dense).numpy()
    if hasattr(value, "tocoo"):
        raise TypeError(
            f"{name} is a SciPy matrix of shape {value.shape}\n\nhint: an array; "
            "numpy.stack(matrix.nonzero()) has the edges from row to column of a matrix"
        )
    if hasattr(value, "to_numpy"):
        return np.asarray(value.to_numpy())
    try:
        return np.asarray(value)
    except ValueError:
        raise TypeError(f"{name} is {describe(value)}\n\nhint: a tensor or an array") from None


def as_weights(name: str, value: Any, count: int) -> Tensor:
    """Return sampling weights as a contiguous float32 tensor.

    Raises:
        TypeError: the value is sparse, or not an array.
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
    if (place := first_true(~(np.isfinite(converted) & (converted >= 0)))) is not None:
        raise ValueError(
            f"{name}[{place}] is {weights[place]}\n\n"
            "hint: weights are finite and at least 0; an edge of weight 0 is never sampled"
        )
    return torch.from_numpy(writable(converted))


def as_features(name: str, value: Any, count: int) -> Tensor:
    """Return features as a (count, D) tensor on the host, without a copy where possible.

    A vector becomes one column. Sparse tensors and SciPy matrices become torch CSR matrices of
    float32.

    Raises:
        TypeError: the value is not an array.
        ValueError: the shape or dtype is wrong.
    """
    if hasattr(value, "tocsr"):
        features = _to_torch_csr(name, value)
    elif isinstance(value, Tensor):
        features = value.detach().cpu()
        if features.layout == torch.sparse_coo and features.ndim == 2:
            features = features.to_sparse_csr()
        if features.layout not in (torch.strided, torch.sparse_csr):
            raise ValueError(f"{name} is {describe(value)} of {features.layout}, not dense or CSR")
        if features.layout == torch.sparse_csr:
            # the only dtype of sparse tables
            features = features.to(torch.float32)
    else:
        array = to_array(name, value)
        if array.dtype.kind not in "fiub":
            raise ValueError(f"{name} has type {array.dtype}, not numbers")
        features = torch.from_numpy(writable(array))
    if features.ndim == 1:
        features = features.unsqueeze(1)
    if features.ndim != 2 or len(features) != count:
        raise _wrong_length(name, tuple(features.shape), count)
    if features.layout == torch.strided and features.stride(1) != 1 and features.shape[1] > 1:
        features = features.contiguous()
    return features


def _to_torch_csr(name: str, matrix: Any) -> Tensor:
    if matrix.ndim != 2 or matrix.dtype.kind not in "fiub":
        raise ValueError(
            f"{name} is a SciPy matrix of type {matrix.dtype} and shape {matrix.shape}"
        )
    csr = matrix.tocsr()
    csr.sum_duplicates()
    return torch.sparse_csr_tensor(
        torch.from_numpy(csr.indptr.astype(np.int64)),
        torch.from_numpy(csr.indices.astype(np.int64)),
        torch.from_numpy(csr.data.astype(np.float32)),
        csr.shape,
        check_invariants=True,
    )


def as_labels(name: str, value: Any, count: int) -> Tensor:
    """Return labels: (count,) or (count, T), int64 for integers, float32 for other numbers.

    Raises:
        TypeError: the value is sparse, or not an array.
        ValueError: the shape or dtype is wrong, an integer is not a class, or a number is infinite.
    """
    labels = to_array(name, value)
    check_length(name, labels, count, dimensions=(1, 2))
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind not in "fiub":
        raise ValueError(
            f"{name} has type {labels.dtype}\n\nhint: labels are numbers; "
            "`labels, classes = pandas.Series(labels).factorize(sort=True)` maps other values to "
            "classes"
        )
    check_classes(name, labels)
    if labels.dtype.kind == "f" and np.isinf(labels).any():
        place = tuple(int(i) for i in np.argwhere(np.isinf(labels))[0])
        raise ValueError(
            f"{name}: node {place[0]} has the label {labels[place]}\n\n"
            "hint: numbers to predict are finite; NaN marks a node without a label"
        )
    dtype = np.float32 if labels.dtype.kind == "f" else np.int64
    return torch.from_numpy(writable(np.ascontiguousarray(labels, dtype)))


def check_classes(name: str, labels: NDArray[Any]) -> None:
    """Check that integer labels are classes or -1; others are not checked.

    Raises:
        ValueError: a label is below -1, or larger than `max_classes` allows.
    """
    if labels.dtype.kind not in "iu" or not labels.size:
        return
    most = max_classes(len(labels)) - 1
    if labels.min() >= -1 and labels.max() <= most:
        return
    is_wrong = labels > most
    if labels.dtype.kind == "i":
        is_wrong |= labels < -1
    place = tuple(int(i) for i in np.argwhere(is_wrong)[0])
    raise ValueError(
        f"{name}: node {place[0]} has the label {labels[place]}, which is not a class (classes "
        f"start at 0 and are at most {most})\n\nhint: -1 marks a node without a label; "
        "`classes, labels = numpy.unique(labels, return_inverse=True)` maps other values to "
        "classes; numbers to predict are floating-point"
    )


def as_split(name: str, value: Any, count: int) -> dict[str, Tensor]:
    """Return the int64 ids of "train", "valid" and "test".

    Args:
        name: of the split, for messages.
        value: for each part ids or a mask; or one of these words, or None, for each node.
        count: number of nodes.

    Raises:
        TypeError: `value` is neither a dict nor words.
        ValueError: a name, an id or a shape is wrong, or a node is in two parts or twice in one.
    """
    if not isinstance(value, Mapping):
        return split_of_words(name, value, count)
    split: dict[str, Tensor] = {}
    for key, given in value.items():
        part, own = part_of(key), f"{name}[{key!r}]"
        if part is None or part in split:
            raise ValueError(f"{name} has the key {key!r}\n\nhint: train, valid and test")
        ids = to_array(own, given)
        if ids.dtype == bool:
            check_length(own, ids, count, dimensions=(1,))
            ids = np.flatnonzero(ids)
        if ids.dtype == np.uint8 or (ids.ndim == 1 and is_mask(ids, count)):
            raise ValueError(
                f"{own} has type {ids.dtype}, which may be ids or a mask\n\n"
                "hint: convert a mask to bool, and ids to int64"
            )
        if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
            raise ValueError(f"{own} has shape {ids.shape}, type {ids.dtype}: not ids or a mask")
        ids = ids.astype(np.int64)
        if (place := first_true((ids < 0) | (ids >= count))) is not None:
            raise ValueError(
                f"{own} contains the node {ids[place]}, but the type has {count} nodes"
            )
        split[part] = torch.from_numpy(ids)
    check_parts(name, split, count)
    return split


def check_parts(name: str, split: Mapping[str, Tensor], count: int) -> None:
    """Check that each node is at most once in a split.

    Raises:
        ValueError: a node is in two parts or twice in one.
    """
    owner = np.zeros(count, np.uint8)  # 1 + index of the part of each node
    for number, part in enumerate(SPLITS, start=1):
        if part in split:
            check_once(split[part].numpy(), owner, number, name)


def split_of_words(name: str, value: Any, count: int) -> dict[str, Tensor]:
    """Return the int64 ids of "train", "valid" and "test" from one of these words for each node.

    Raises:
        TypeError: the values are not words.
        ValueError: a word or the shape is wrong.
    """
    words = to_array(name, value)
    if words.dtype.kind not in "UO":
        raise TypeError(
            f"{name} is {describe(value)}\n\n"
            'hint: a dict with node ids or masks for "train", "valid" and "test", or one of these '
            "words for each node"
        )
    check_length(name, words, count, dimensions=(1,))
    numbers: dict[Any, int] = {}
    for word in set(words.tolist()):
        part = part_of(word)
        if part is None and str(word).lower() not in ("", "none", "nan", "<na>", "nat"):
            raise ValueError(
                f"{name} has the word {word!r:.100}\n\nhint: train, valid (or val) and test; use "
                "None for nodes in no part"
            )
        numbers[word] = -1 if part is None else SPLITS.index(part)
    parts = np.array([numbers[word] for word in words.tolist()], np.int64)
    return {part: torch.from_numpy(np.flatnonzero(parts == i)) for i, part in enumerate(SPLITS)}


def check_length(name: str, values: NDArray[Any], count: int, dimensions: tuple[int, ...]) -> None:
    """Check the length and the number of dimensions of an array.

    Args:
        name: of the array, for the message.
        values: the array.
        count: its length, the number of nodes or edges of the type.
        dimensions: the valid numbers of dimensions.

    Raises:
        ValueError: its length or its number of dimensions is another one.
    """
    if values.ndim not in dimensions or len(values) != count:
        raise _wrong_length(name, values.shape, count)


def _wrong_length(name: str, shape: tuple[int, ...], count: int) -> ValueError:
    return ValueError(
        f"{name} has shape {shape}, but the type has {count} nodes or edges\n\n"
        "hint: one row for each, in the order of their ids"
    )


def first_true(is_wrong: NDArray[np.bool_]) -> int | None:
    """Return the first position that is True; None if there is none."""
    return int(is_wrong.argmax()) if is_wrong.any() else None


def writable(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array that torch can share: not read-only and without negative strides."""
    is_shared = array.flags.writeable and all(step >= 0 for step in array.strides)
    return array if is_shared else array.copy()
