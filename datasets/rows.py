"""Feature tables that are read in chunks of rows, so that they may exceed memory.

Notation: N rows, D columns.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
# `allocate(name, size, dtype)` returns a writable (size,) array in memory or in a mapped file
Allocate: TypeAlias = Callable[[str, int, Any], Array]
# `progress(what, done, total)` with counts of bytes, rows or edges; total is 0 if unknown
Progress: TypeAlias = Callable[[str, int, int], None]

# larger chunks are not faster to read, and a pipeline of four stages holds several of them; with
# smaller chunks, csv files with thousands of columns are read at half the speed
CHUNK_BYTES = 1 << 24
# a larger number of columns means that the file is damaged
MAX_COLUMNS = 1 << 24
# largest ratio of the standard deviations of columns without a warning
MAX_RATIO = 1000

_log = logging.getLogger("gcnzc")


# dtypes that numpy lacks or that are quantized, and the integer dtype of the same width in files
CODES: dict[str, type[np.integer[Any]]] = {
    "bfloat16": np.uint16,
    "float8_e4m3fn": np.uint8,
    "float8_e5m2": np.uint8,
    "int8": np.int8,
}


def allocate_in_memory(name: str, size: int, dtype: Any) -> Array:
    """Allocate an array in memory, as an `Allocate`.

    Raises:
        RuntimeError: there is not enough memory.
    """
    try:
        return np.empty(size, dtype)
    except MemoryError:
        wanted = size * np.dtype(dtype).itemsize
        raise RuntimeError(
            f"not enough memory for {name}: {wanted:,} bytes\n\n"
            "hint: `gcnzc prepare` writes a folder that is memory-mapped instead of read"
        ) from None


def no_progress(what: str, done: int, total: int) -> None:
    """A `Progress` that does nothing."""


@dataclass(frozen=True)
class Csr:
    """A sparse matrix in CSR format: row `i` has `values[indptr[i] : indptr[i + 1]]`."""

    indptr: Array  # (N + 1,) integers
    indices: Array  # (nnz,) integers in [0, D)
    values: Array  # (nnz,)


@dataclass(frozen=True)
class QuantizedRows:
    """Quantized features: a value is its code times the scale of its row or column block.

    Attributes:
        array: (N, D) codes, in the integer dtype `CODES[dtype]`.
        dtype: of the codes, a key of `CODES`.
        scales: (N,) float32, or (ceil(D / scale_columns),); None if codes are the values.
        scale_columns: number of columns that share a scale; None for one scale per row.
    """

    array: Array
    dtype: str
    scales: Array | None
    scale_columns: int | None


@dataclass(frozen=True)
class Rows:
    """A table of (N, D) values that is read sequentially, any number of times.

    Attributes:
        num_rows: N.
        num_columns: D.
        dtype: of the values.
        chunks: `chunks(allocate)` yields consecutive (n, D) arrays, N rows in total. An array is
            valid until the next one is requested, which may overwrite it.
        where: name of the table in error messages.
        csr: the same values as CSR, if the source is sparse.
        codes: the quantized values, if the source is quantized.
        locate: `locate(row, column)` describes where a value is stored, for messages; None names
            `where`, the row and the column.
    """

    num_rows: int
    num_columns: int
    dtype: np.dtype
    chunks: Callable[[Allocate], Iterator[Array]]
    where: str
    csr: Csr | None = None
    codes: QuantizedRows | None = None
    locate: Callable[[int, int], str] | None = None


def as_bytes(array: Array) -> memoryview:
    """Return the bytes of an array in C order, without a copy if the array is C-contiguous."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def chunk_rows(num_columns: int, itemsize: int) -> int:
    """Return the number of rows in a chunk of about `CHUNK_BYTES`."""
    return max(1, CHUNK_BYTES // max(1, num_columns * itemsize))


def rows_from_array(array: Array, where: str) -> Rows:
    """Make `Rows` from an (N, D) array, memory-mapped or not.

    Raises:
        ValueError: the array is not two-dimensional or not numeric.
    """
    if array.ndim != 2 or array.dtype.kind not in "fiub":
        raise ValueError(
            f"{where} has shape {array.shape} and type {array.dtype}, not a table of numbers"
            "\n\nhint: features are (nodes, columns), floating point or integers"
        )
    step = chunk_rows(array.shape[1], array.dtype.itemsize)

    def chunks(allocate: Allocate) -> Iterator[Array]:
        for begin in range(0, len(array), step):
            yield array[begin : begin + step]

    return Rows(array.shape[0], array.shape[1], array.dtype, chunks, where)


def rows_from_csr(csr: Csr, num_columns: int, where: str) -> Rows:
    """Make `Rows` that convert a CSR matrix to dense rows; duplicate entries are summed.

    Raises:
        ValueError: the offsets decrease, or a column index is out of range.
    """
    num_rows = len(csr.indptr) - 1
    if any(part.ndim != 1 for part in (csr.indptr, csr.indices, csr.values)) or any(
        part.dtype.kind not in "iu" for part in (csr.indptr, csr.indices)
    ):
        raise ValueError(
            f"{where}: the CSR arrays indptr, indices and values have the shapes "
            f"{csr.indptr.shape}, {csr.indices.shape} and {csr.values.shape} and the types "
            f"{csr.indptr.dtype}, {csr.indices.dtype} and {csr.values.dtype}\n\n"
            "hint: all are vectors; indptr and indices are integers"
        )
    if not 0 <= num_columns <= MAX_COLUMNS:
        raise ValueError(
            f"{where}: rows of {num_columns:,} columns\n\n"
            f"hint: the stored shape is (rows, columns), with at most {MAX_COLUMNS:,} columns"
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
            f"{where}: the offsets of the sparse rows do not increase from 0 to the number of "
            f"values, {len(csr.values):,}\n\nhint: the archive is damaged; download or write it "
            "again"
        )
    if len(csr.indices) and (csr.indices.min() < 0 or csr.indices.max() >= num_columns):
        raise ValueError(
            f"{where}: column indices are from {csr.indices.min()} to {csr.indices.max()}, but "
            f"there are {num_columns} columns\n\nhint: the stored shape is (rows, columns)"
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


def rows_from_codes(codes: QuantizedRows, where: str) -> Rows:
    """Make `Rows` that dequantize codes to float32."""
    num_rows, num_columns = codes.array.shape
    step, scales, per = chunk_rows(num_columns, 4), codes.scales, codes.scale_columns

    def chunks(allocate: Allocate) -> Iterator[Array]:
        for begin in range(0, num_rows, step):
            part = slice(begin, begin + step)
            # a copy, because torch warns about read-only memory
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
    """Return the numpy dtype of stored features.

    Args:
        rows: the features.
        wanted: name of the requested dtype; None keeps codes and float16, otherwise float32.
    """
    if wanted is not None:
        return np.dtype(CODES.get(wanted, wanted))
    if rows.codes is not None:
        return rows.codes.array.dtype
    return np.dtype(np.float16 if rows.dtype == np.float16 else np.float32)


def normalize_rows(rows: Rows) -> Rows:
    """Return `Rows` with each row divided by the sum of its absolute values.

    Rows of zeros are unchanged. The dtype is float32.
    """
    csr = rows.csr
    if csr is not None:
        lengths = np.diff(csr.indptr)
        sums = np.zeros(rows.num_rows)
        np.add.at(sums, np.repeat(np.arange(rows.num_rows), lengths), np.abs(csr.values))
        values = (csr.values / np.repeat(_divisors(sums), lengths)).astype(np.float32)
        return rows_from_csr(Csr(csr.indptr, csr.indices, values), rows.num_columns, rows.where)

    def chunks(allocate: Allocate) -> Iterator[Array]:
        for chunk in rows.chunks(allocate):
            sums = np.abs(chunk).sum(axis=1, dtype=np.float64, keepdims=True)
            yield chunk / _divisors(sums).astype(np.float32)

    return replace(rows, chunks=chunks, dtype=np.dtype(np.float32), codes=None)


def _divisors(sums: Array) -> Array:
    return np.where(sums == 0, 1, sums)


def convert_chunks(
    rows: Rows, dtype: np.dtype, allow_nan: bool, allocate: Allocate, progress: Progress
) -> Iterator[Array]:
    """Yield the chunks of `rows` converted to `dtype` and validated.

    Raises:
        ValueError: a value is not finite and `allow_nan` is False, a finite value overflows
            `dtype`, or the number of rows is not `rows.num_rows`.
    """
    done = 0
    for chunk in rows.chunks(allocate):
        if chunk.shape[1] != rows.num_columns or done + len(chunk) > rows.num_rows:
            raise ValueError(_wrong_count(rows, f"more than {done:,}"))
        if done == 0:
            _warn_of_scales(chunk, rows.where)
        yield cast_finite(chunk, dtype, allow_nan, rows.where, done, rows.locate)
        done += len(chunk)
        progress("features", done, rows.num_rows)
    if done != rows.num_rows:
        raise ValueError(_wrong_count(rows, f"{done:,}"))


def _warn_of_scales(chunk: Array, where: str) -> None:
    """Warn if columns differ much in scale, in the first rows."""
    with np.errstate(invalid="ignore", over="ignore"):
        scales = chunk.std(axis=0, dtype=np.float64)
    scales = scales[scales > 0]  # not of constant columns
    if len(scales) and scales.max() > MAX_RATIO * scales.min():
        text = "warning: %s: the standard deviations of columns differ by a factor of %.0f; "
        text += "standardize the columns, since those with the largest values dominate"
        _log.warning(text, where, scales.max() / scales.min())


def cast_finite(
    chunk: Array,
    dtype: np.dtype,
    allow_nan: bool,
    where: str,
    first_row: int = 0,
    locate: Callable[[int, int], str] | None = None,
) -> Array:
    """Convert a chunk to `dtype` and check that it is finite, see `convert_chunks`.

    `first_row` is the index of its first row, and `locate` that of `Rows`, for the message.
    """
    with np.errstate(over="ignore"):
        cast = chunk.astype(dtype, copy=False)
    good = np.isfinite(cast)
    if good.all():
        return cast
    bad = ~good & np.isfinite(chunk)
    if bad.any():
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        found = f"{where}: {chunk[place]} in row {first_row + place[0]}"
        if locate is not None:
            found = f"{locate(first_row + place[0], place[-1])}: {chunk[place]}"
        wider = "" if dtype == np.float32 else "store the features as float32, or "
        raise ValueError(f"{found} is too large for {dtype}\n\nhint: {wider}scale the features")
    if not allow_nan:
        place = tuple(int(i) for i in np.argwhere(~good)[0])
        found = f"{where}: {chunk[place]} in row {first_row + place[0]}, column {place[-1]}"
        if locate is not None:
            found = f"{locate(first_row + place[0], place[-1])}: {chunk[place]}"
        raise ValueError(
            f"{found}\n\nhint: repair the features; `gcnzc prepare` and `gcnzc train` accept them "
            "with --allow-nan"
        )
    return cast


def _wrong_count(rows: Rows, found: str) -> str:
    return (
        f"{rows.where} has {found} rows of features for {rows.num_rows:,} nodes\n\n"
        "hint: features have one row for each node, in the order of the node ids"
    )
