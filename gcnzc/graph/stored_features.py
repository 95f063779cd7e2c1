"""Feature files of prepared folders: choose the format, write and memory-map them."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from gcnzc.datasets import store
from gcnzc.datasets.rows import (
    CODES,
    Allocate,
    Array,
    Csr,
    Progress,
    QuantizedRows,
    Rows,
    allocate_in_memory,
    cast_finite,
    convert_chunks,
    no_progress,
    rows_from_array,
    stored_dtype,
)
from gcnzc.datasets.source import Source
from gcnzc.datasets.store import Prepared
from gcnzc.features.pcie_traffic import choose_pitch
from gcnzc.features.table import FeatureTable
from gcnzc.kernels.finite import are_finite
from gcnzc.kernels.gather.quantize import MAX_CODE, SCALE_COLUMNS, compute_scales, largest, quantize
from gcnzc.system.arguments import check_choice

FeatureDtype: TypeAlias = Literal[
    "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"
]


ScaleKind: TypeAlias = Literal["row", "columns"]


# returns the chunks of features, converted to a dtype
Chunks: TypeAlias = Callable[[DTypeLike], Iterator[Array]]


# dtypes that are stored with scales
SCALED_DTYPES = tuple(str(dtype).removeprefix("torch.") for dtype in MAX_CODE)


@dataclass(frozen=True)
class FeatureLayout:
    """The requested storage of features; see `gcnzc.prepare` for the defaults."""

    dtype: FeatureDtype | None = None
    scales: ScaleKind = "row"
    is_sparse: bool = False
    pitch_bytes: int | None = None


@dataclass(frozen=True)
class StoredFormat:
    """The storage format of features."""

    dtype: np.dtype  # of the file
    name: str  # dtype of the stored values, for example "bfloat16" in a file of uint16
    scales: ScaleKind | None = None  # for quantized features
    scale_columns: int | None = None  # columns that share a scale
    codes: QuantizedRows | None = None  # quantized features of the source, to be copied unchanged
    is_sparse: bool = False  # CSR arrays instead of a table of rows
    pitch_bytes: int = 0  # from row to row of a table
    pitch_reason: str = ""

    @property
    def is_coded(self) -> bool:
        """Whether values are stored as codes: quantized, or with a dtype that numpy lacks."""
        return self.name in CODES

    def describe(self, num_columns: int, *, finite: bool, normalized: bool) -> dict[str, Any]:
        """Describe features in this format for meta.json."""
        kind = "sparse" if self.is_sparse else "codes" if self.is_coded else "dense"
        pitch = (None, None) if self.is_sparse else (self.pitch_bytes, self.pitch_reason)
        found = {"kind": kind, "columns": num_columns, "dtype": self.name}
        found |= {"pitch_bytes": pitch[0], "pitch_reason": pitch[1]}
        found |= {"finite": finite, "normalized": normalized}
        if self.is_coded:
            found |= {"scales": self.scales, "scale_columns": self.scale_columns}
        return found


def choose_format(rows: Rows, layout: FeatureLayout) -> StoredFormat:
    """Choose the storage format of features.

    Raises:
        ValueError: the dtype or the kind of scales is unknown; scales of columns are requested for
            a dtype without scales; sparse storage is requested for quantized or dense features; or
            the pitch is smaller than a row or not a multiple of the dtype's size.
    """
    storage = _choose_dtype(rows, layout.dtype, layout.scales)
    _check_layout(rows, storage, layout)
    pitch, reason = _choose_row_pitch(rows, storage.dtype, layout.pitch_bytes)
    return replace(storage, is_sparse=layout.is_sparse, pitch_bytes=pitch, pitch_reason=reason)


def _choose_dtype(rows: Rows, wanted: FeatureDtype | None, scales: ScaleKind) -> StoredFormat:
    """Choose the format of values for a requested dtype; None keeps the dtype where possible."""
    if wanted is not None:
        check_choice("feature_dtype", wanted, get_args(FeatureDtype))
    check_choice("scales", scales, get_args(ScaleKind))
    name, dtype = wanted, stored_dtype(rows, wanted)
    if wanted is None and rows.codes is not None:
        name = cast(FeatureDtype, rows.codes.dtype)
    if scales == "columns" and wanted not in SCALED_DTYPES:
        raise ValueError(
            f"{wanted or 'unchanged features'} cannot have scales of columns\n\n"
            f"hint: the dtypes with scales are {', '.join(SCALED_DTYPES)}"
        )
    if name is None or name not in CODES:
        return StoredFormat(dtype, str(dtype))
    if wanted is None and rows.codes is not None and rows.codes.scales is not None:
        per = rows.codes.scale_columns
        return StoredFormat(dtype, name, "row" if per is None else "columns", per, rows.codes)
    if name not in SCALED_DTYPES:
        return StoredFormat(dtype, name)
    return StoredFormat(dtype, name, scales, SCALE_COLUMNS if scales == "columns" else None)


def _check_layout(rows: Rows, storage: StoredFormat, layout: FeatureLayout) -> None:
    """Raise a ValueError if features cannot be stored as requested."""
    dtype, sparse, pitch_bytes = storage.dtype, layout.is_sparse, layout.pitch_bytes
    if sparse and storage.is_coded:
        raise ValueError(
            f"sparse features cannot be stored as {storage.name}\n\n"
            "hint: omit --sparse-features, or store them as float16"
        )
    if sparse and rows.csr is None:
        raise ValueError(
            f"{rows.where} has dense features, which cannot be stored as sparse\n\n"
            "hint: omit --sparse-features"
        )
    if pitch_bytes and (
        sparse or pitch_bytes < _row_bytes(rows, dtype) or pitch_bytes % dtype.itemsize
    ):
        raise ValueError(
            f"rows of {_row_bytes(rows, dtype)} bytes of {dtype} cannot have a pitch of "
            f"{pitch_bytes} bytes\n\nhint: the pitch is at least the size of a row, a multiple of "
            f"{dtype.itemsize} bytes, and for dense features only"
        )


def _choose_row_pitch(rows: Rows, dtype: np.dtype, pitch_bytes: int | None) -> tuple[int, str]:
    """Return the row pitch in bytes and the reason for it, which `meta.json` records."""
    row_bytes = _row_bytes(rows, dtype)
    if pitch_bytes is None and row_bytes:
        return choose_pitch(row_bytes, dtype.itemsize)
    return pitch_bytes or row_bytes, "as asked"


def _row_bytes(rows: Rows, dtype: np.dtype) -> int:
    return rows.num_columns * dtype.itemsize


def write_features(
    writer: store.Writer,
    rows: Rows,
    storage: StoredFormat,
    allow_nan: bool,
    allocate: Allocate,
    progress: Progress,
) -> bool:
    """Write features in the format that `choose_format` returned.

    Returns:
        Whether all values are finite.

    Raises:
        ValueError: a value is not finite and `allow_nan` is False or the format has scales; or a
            value is too large for the dtype.
    """
    if storage.is_sparse:
        return _write_sparse(writer, rows, storage, allow_nan)

    def chunks(dtype: DTypeLike) -> Iterator[Array]:
        return convert_chunks(rows, np.dtype(dtype), allow_nan, allocate, progress)

    if storage.is_coded:
        return _write_codes(writer, rows, storage, chunks, allocate)
    all_finite = True

    def checked_chunks() -> Iterator[Array]:
        nonlocal all_finite
        for chunk in chunks(storage.dtype):
            if allow_nan and all_finite:
                all_finite = bool(np.isfinite(chunk).all())
            yield chunk

    writer.save_rows("features.npy", rows, storage.dtype, storage.pitch_bytes, checked_chunks())
    return all_finite


def _write_codes(
    writer: store.Writer, rows: Rows, storage: StoredFormat, read: Chunks, allocate: Allocate
) -> bool:
    """Write features as codes, with scales if the format has them.

    Returns:
        Whether all values are finite.
    """
    if storage.codes is not None and storage.codes.scales is not None:
        codes = rows_from_array(storage.codes.array, rows.where)
        chunks = codes.chunks(allocate)
        writer.save_rows("features.npy", codes, storage.dtype, storage.pitch_bytes, chunks)
        writer.save("features_scales.npy", storage.codes.scales)
        return True
    all_finite, dtype, per = True, getattr(torch, storage.name), storage.scale_columns
    scales = torch.empty(0)
    if storage.scales == "row":
        scales = torch.from_numpy(allocate("scales", rows.num_rows, np.float32))
    elif per is not None:
        maxima = torch.zeros(-(-rows.num_columns // per))
        for chunk in _float32_chunks(rows, storage, read):
            maxima = torch.maximum(maxima, largest(chunk, per))
        scales = compute_scales(maxima, dtype)

    def quantized_chunks() -> Iterator[Array]:
        nonlocal all_finite
        done = 0
        for chunk in _float32_chunks(rows, storage, read):
            part = slice(done, done + len(chunk))
            if storage.scales is None:
                codes = chunk.to(dtype)
                all_finite = all_finite and bool(are_finite(chunk))
                _check_in_range(codes, chunk, storage, rows.where, done)
            elif per is None:
                scales[part] = compute_scales(largest(chunk), dtype)
                codes = quantize(chunk, scales[part], dtype)
            else:
                codes = quantize(chunk, scales, dtype, per)
            done = part.stop
            # numpy has no such dtype, so the file has integers of the same width
            integers = torch.int8 if dtype.itemsize == 1 else torch.int16
            yield codes.view(integers).numpy().view(storage.dtype)

    chunks = quantized_chunks()
    writer.save_rows("features.npy", rows, storage.dtype, storage.pitch_bytes, chunks)
    if storage.scales is not None:
        writer.save("features_scales.npy", scales.numpy())
    return all_finite


def _float32_chunks(rows: Rows, storage: StoredFormat, read: Chunks) -> Iterator[Tensor]:
    """Yield the rows as float32; with scales, raise a ValueError for values that are not finite."""
    done = 0
    for chunk in read(np.float32):
        if storage.scales is not None and not (is_finite := np.isfinite(chunk)).all():
            row, column = (int(i) for i in np.argwhere(~is_finite)[0])
            raise ValueError(
                f"{rows.where}: {chunk[row, column]} in row {done + row}, column {column}, but "
                f"{storage.name} with scales requires finite values\n\n"
                "hint: repair the features, or store them as float16"
            )
        done += len(chunk)
        yield to_tensor(np.ascontiguousarray(chunk))


def _check_in_range(
    codes: Tensor, chunk: Tensor, storage: StoredFormat, where: str, first_row: int
) -> None:
    bad = codes.isinf() & chunk.isfinite()
    if bad.any():
        row, column = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{where}: {float(chunk[row, column])} in row {first_row + row} is too large for "
            f"{storage.name}\n\nhint: store the features as float32, or scale them"
        )


def _write_sparse(writer: store.Writer, rows: Rows, storage: StoredFormat, allow_nan: bool) -> bool:
    """Write sparse features as CSR arrays; return whether all values are finite."""
    assert rows.csr is not None
    csr = rows.csr
    values = cast_finite(csr.values, storage.dtype, allow_nan, rows.where)
    # torch requires the same dtype for both
    index_dtype = np.int32 if max(len(values), rows.num_columns) < 2**31 else np.int64
    writer.save("features_indptr.npy", csr.indptr.astype(index_dtype, copy=False))
    writer.save("features_indices.npy", csr.indices.astype(index_dtype, copy=False))
    writer.save("features_values.npy", values)
    return not allow_nan or bool(np.isfinite(values).all())


def read_features(rows: Rows | None, allow_nan: bool, allocate: Allocate) -> Tensor | None:
    """Read features into memory from `allocate`; return None without features."""
    if rows is None:
        return None
    dtype = stored_dtype(rows, None)
    table = allocate("features", rows.num_rows * rows.num_columns, dtype)
    table = table.reshape(rows.num_rows, rows.num_columns)
    done = 0
    for chunk in convert_chunks(rows, dtype, allow_nan, allocate_in_memory, no_progress):
        table[done : done + len(chunk)] = chunk
        done += len(chunk)
    return to_tensor(table)


def map_features(opened: Prepared) -> tuple[Tensor | None, FeatureTable | None]:
    """Memory-map the features of a prepared folder; see `features_to_tensors`."""
    fields = opened.meta["features"]
    return features_to_tensors(
        (opened.features, opened.csr, opened.codes),
        0 if fields is None else fields["columns"],
        len(opened.labels),
    )


def features_to_tensors(
    opened: tuple[Array | None, Csr | None, QuantizedRows | None], columns: int, num_rows: int
) -> tuple[Tensor | None, FeatureTable | None]:
    """Return the arrays of `gcnzc.datasets.store.open_features` as tensors.

    Returns:
        The features as a tensor and None; or None and a `FeatureTable`, if they are quantized.
    """
    features, csr, codes = opened
    if csr is not None:
        return _sparse(csr, num_rows, columns), None
    if codes is not None:
        # not every torch version supports unsigned integers
        integers = codes.array.view(f"i{codes.array.itemsize}")
        numbers = to_tensor(integers).view(getattr(torch, codes.dtype))
        if codes.scales is None:
            return numbers, None
        return None, FeatureTable(numbers, to_tensor(codes.scales), codes.scale_columns)
    return None if features is None else to_tensor(features), None


def _sparse(csr: Csr, num_rows: int, num_columns: int) -> Tensor:
    size = (num_rows, num_columns)
    indptr, indices, values = to_tensor(csr.indptr), to_tensor(csr.indices), to_tensor(csr.values)
    with warnings.catch_warnings():
        # torch warns once that sparse CSR support is in beta
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
        return torch.sparse_csr_tensor(indptr, indices, values, size, check_invariants=False)


def to_tensor(array: Array) -> Tensor:
    """Return a tensor that shares the memory of `array`, which may be read-only."""
    return to_tensors({"": array})[""]


def to_tensors(arrays: Mapping[str, Array]) -> dict[str, Tensor]:
    """Return tensors that share the memory of `arrays`, which may be read-only."""
    tensors = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for name, array in arrays.items():
            tensors[name] = torch.from_numpy(array)
    return tensors


def feature_rows(source: Source | Prepared, given: str | Path | Array | None) -> Rows | None:
    """Return the rows of `given`, a `.npy` path or an array; by default those of the source."""
    rows: Rows | None
    if given is None:
        rows = source.rows if isinstance(source, Prepared) else source.features
    elif isinstance(given, str | Path):
        rows = rows_from_array(_open_npy(Path(given)), str(given))
    else:
        rows = rows_from_array(np.asarray(given), "features")
    num_nodes = len(source.labels) if isinstance(source, Prepared) else source.num_nodes
    if rows is not None and rows.num_rows != num_nodes:
        raise ValueError(
            f"{rows.where} has {rows.num_rows:,} rows of features for {num_nodes:,} nodes\n\n"
            "hint: features have one row for each node, in the order of the node ids"
        )
    if rows is not None and rows.num_columns == 0:
        raise ValueError(
            f"{rows.where} has features of 0 columns for {num_nodes:,} nodes\n\n"
            "hint: features have at least one column; a graph without features has no such array"
        )
    return rows


def _open_npy(path: Path) -> Array:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}\n\nhint: give the path of a .npy file of features")
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"{path} is not a .npy file of numbers: {error}\n\nhint: `numpy.save` writes one"
        ) from None
    return array
