"""Tables of features that are read in chunks of rows, so that they may exceed memory.

Letters: N rows, D columns.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
# `allocate(name, size, dtype)` gives a writable (size,) array: memory, or a file's
Allocate: TypeAlias = Callable[[str, int, Any], Array]
# `progress(what, done, total)`: bytes, rows or edges; total is 0 where nobody knows it
Progress: TypeAlias = Callable[[str, int, int], None]

# a few chunks are alive at once in a pipeline of four steps; larger ones read no faster, smaller
# ones read csv with thousands of columns at half the speed
CHUNK_BYTES = 1 << 24
# a row with more is a damaged number
MOST_COLUMNS = 1 << 24


# types that numpy lacks, or that stand for something else with a scale; a file has integers as wide
CODES: dict[str, type[np.integer[Any]]] = {
    "bfloat16": np.uint16,
    "float8_e4m3fn": np.uint8,
    "float8_e5m2": np.uint8,
    "int8": np.int8,
}


def in_memory(name: str, size: int, dtype: Any) -> Array:
    """The `Allocate` whose arrays are plain memory.

    Raises:
        RuntimeError: there is not that much.
    """
    try:
        return np.empty(size, dtype)
    except MemoryError:
        wanted = size * np.dtype(dtype).itemsize
        raise RuntimeError(
            f"no memory for {name}: {wanted:,} bytes\n\n"
            "hint: `gcnzc prepare` writes a folder that is opened without being read into memory"
        ) from None


def no_progress(what: str, done: int, total: int) -> None:
    """The `Progress` that tells nobody."""


@dataclass(frozen=True)
class Csr:
    """Rows with few values other than zero: row `i` has `values[indptr[i] : indptr[i + 1]]`."""

    indptr: Array  # (N + 1,) integers
    indices: Array  # (nnz,) integers in [0, D)
    values: Array  # (nnz,)


@dataclass(frozen=True)
class Codes:
    """Values in fewer bytes: the number of a code, times the scale of its row or columns."""

    array: Array  # (N, D), of the integers that `CODES` gives for `dtype`
    dtype: str
    scales: Array | None  # (N,) float32, or (ceil(D / scale_columns),); None: codes are the values
    scale_columns: int | None  # that share a scale; None: each row has its own


@dataclass(frozen=True)
class Rows:
    """(N, D) values that are read in order, as often as asked."""

    num_rows: int
    num_columns: int
    dtype: np.dtype
    # chunks(allocate): (n, D) arrays that together have N rows; each may be overwritten by the next
    chunks: Callable[[Allocate], Iterator[Array]]
    where: str  # named in errors
    csr: Csr | None = None  # the same values, where they came sparse
    codes: Codes | None = None  # what they were made from, where they came as codes


def as_bytes(array: Array) -> memoryview:
    """The bytes of an array in the order of its elements; a copy if they do not lie so."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def chunk_rows(num_columns: int, itemsize: int) -> int:
    """How many rows make a chunk."""
    return max(1, CHUNK_BYTES // max(1, num_columns * itemsize))


def rows_of_array(array: Array, where: str) -> Rows:
    """The rows of an (N, D) array, memory-mapped or not.

    Raises:
        ValueError: it is no table of numbers.
    """
    if array.ndim != 2 or array.dtype.kind not in "fiub":
        raise ValueError(
            f"{where} has shape {array.shape} and type {array.dtype}, which is no table of numbers"
            "\n\nhint: features are (nodes, columns), floating point or integers"
        )
    step = chunk_rows(array.shape[1], array.dtype.itemsize)

    def chunks(allocate: Allocate) -> Iterator[Array]:
        for begin in range(0, len(array), step):
            yield array[begin : begin + step]

    return Rows(array.shape[0], array.shape[1], array.dtype, chunks, where)


def rows_of_csr(csr: Csr, num_columns: int, where: str) -> Rows:
    """The dense rows of a sparse table; equal positions in a row are added up, as scipy does.

    Raises:
        ValueError: offsets fall, or positions are outside the columns.
    """
    num_rows = len(csr.indptr) - 1
    if any(part.ndim != 1 for part in (csr.indptr, csr.indices, csr.values)) or any(
        part.dtype.kind not in "iu" for part in (csr.indptr, csr.indices)
    ):
        raise ValueError(
            f"{where}: the parts of sparse rows have the shapes {csr.indptr.shape}, "
            f"{csr.indices.shape} and {csr.values.shape} and the types {csr.indptr.dtype}, "
            f"{csr.indices.dtype} and {csr.values.dtype}\n\n"
            "hint: offsets and positions are vectors of integers, values are one of numbers"
        )
    if not 0 <= num_columns <= MOST_COLUMNS:
        raise ValueError(
            f"{where}: rows of {num_columns:,} columns\n\n"
            f"hint: the shape that is stored beside the values is (rows, columns), with at most "
            f"{MOST_COLUMNS:,} columns"
        )
    lengths: Array = np.diff(csr.indptr.astype(np.int64))
    if (
        num_rows < 0
        or csr.indptr[0] != 0
        or csr.indptr[-1] != len(csr.indices)
        or len(csr.indices) != len(csr.values)
        or (lengths < 0).any()
    ):
        raise ValueError(
            f"{where}: the offsets of the sparse rows do not rise from 0 to the number of values, "
            f"{len(csr.values):,}\n\nhint: the archive is broken; get it again"
        )
    if len(csr.indices) and (csr.indices.min() < 0 or csr.indices.max() >= num_columns):
        raise ValueError(
            f"{where}: columns {csr.indices.min()} to {csr.indices.max()} are named, but there are "
            f"{num_columns}\n\nhint: the shape that is stored beside the values is (rows, columns)"
        )
    step = chunk_rows(num_columns, csr.values.dtype.itemsize)

    def chunks(allocate: Allocate) -> Iterator[Array]:
        for begin in range(0, num_rows, step):
            end = min(begin + step, num_rows)
            part = slice(csr.indptr[begin], csr.indptr[end])
            dense = np.zeros((end - begin, num_columns), csr.values.dtype)
            firsts = np.repeat(np.arange(end - begin) * num_columns, lengths[begin:end])
            np.add.at(dense.reshape(-1), firsts + csr.indices[part], csr.values[part])
            yield dense

    return Rows(num_rows, num_columns, csr.values.dtype, chunks, where, csr)


def rows_of_codes(codes: Codes, where: str) -> Rows:
    """The float32 rows that codes stand for."""
    num_rows, num_columns = codes.array.shape
    step, scales, per = chunk_rows(num_columns, 4), codes.scales, codes.scale_columns

    def chunks(allocate: Allocate) -> Iterator[Array]:
        for begin in range(0, num_rows, step):
            part = slice(begin, begin + step)
            # a copy, since torch warns of memory that is read-only
            numbers = torch.from_numpy(np.array(codes.array[part]))
            chunk = numbers.view(getattr(torch, codes.dtype)).float().numpy()
            if scales is None:
                yield chunk
            elif per is None:
                yield chunk * scales[part, None]
            else:
                yield chunk * np.repeat(scales, per)[:num_columns]

    return Rows(num_rows, num_columns, np.dtype(np.float32), chunks, where, codes=codes)


def stored_dtype(rows: Rows, wanted: str | None) -> np.dtype:
    """The type that a file has for features: `wanted`, else as they are if codes or float16.

    All else is float32.
    """
    if wanted is not None:
        return np.dtype(CODES.get(wanted, wanted))
    if rows.codes is not None:
        return rows.codes.array.dtype
    return np.dtype(np.float16 if rows.dtype == np.float16 else np.float32)


def normalized(rows: Rows) -> Rows:
    """Each row divided by the sum of its absolute values, as is usual for bags of words.

    Rows of nothing but zeros stay; integers and float16 become float32.
    """
    csr = rows.csr
    if csr is not None:
        lengths = np.diff(csr.indptr)
        sums = np.zeros(rows.num_rows)
        np.add.at(sums, np.repeat(np.arange(rows.num_rows), lengths), np.abs(csr.values))
        values = (csr.values / np.repeat(_divisors(sums), lengths)).astype(np.float32)
        return rows_of_csr(Csr(csr.indptr, csr.indices, values), rows.num_columns, rows.where)

    def chunks(allocate: Allocate) -> Iterator[Array]:
        for chunk in rows.chunks(allocate):
            sums = np.abs(chunk).sum(axis=1, dtype=np.float64, keepdims=True)
            yield chunk / _divisors(sums).astype(np.float32)

    return replace(rows, chunks=chunks, dtype=np.dtype(np.float32), codes=None)


def _divisors(sums: Array) -> Array:
    return np.where(sums == 0, 1, sums)


def converted(
    rows: Rows, dtype: np.dtype, allow_nan: bool, allocate: Allocate, progress: Progress
) -> Iterator[Array]:
    """The chunks of `rows` as `dtype`, each looked at.

    Raises:
        ValueError: a number is not finite and `allow_nan` is False, a finite one is not finite as
            `dtype`, or there are more or fewer rows than stated.
    """
    done = 0
    for chunk in rows.chunks(allocate):
        if chunk.shape[1] != rows.num_columns or done + len(chunk) > rows.num_rows:
            raise ValueError(_wrong_count(rows, f"more than {done:,}"))
        yield finite(chunk, dtype, allow_nan, rows.where, done)
        done += len(chunk)
        progress("features", done, rows.num_rows)
    if done != rows.num_rows:
        raise ValueError(_wrong_count(rows, f"{done:,}"))


def finite(chunk: Array, dtype: np.dtype, allow_nan: bool, where: str, first_row: int = 0) -> Array:
    """`chunk` as `dtype`; see `converted`. `first_row` is where it begins, for the message."""
    with np.errstate(over="ignore"):
        cast = chunk.astype(dtype, copy=False)
    good = np.isfinite(cast)
    if good.all():
        return cast
    bad = ~good & np.isfinite(chunk)
    if bad.any():
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"{where}: {chunk[place]} in row {first_row + place[0]} is too large for {dtype}\n\n"
            "hint: keep the features as float32, or scale them"
        )
    if not allow_nan:
        place = tuple(int(i) for i in np.argwhere(~good)[0])
        raise ValueError(
            f"{where}: {chunk[place]} in row {first_row + place[0]}, column {place[-1]}\n\n"
            "hint: mend the features, or allow such numbers with --allow-nan"
        )
    return cast


def _wrong_count(rows: Rows, found: str) -> str:
    return (
        f"{rows.where} has {found} rows of features for {rows.num_rows:,} nodes\n\n"
        "hint: there is one row for each node, in the order of the node ids"
    )
