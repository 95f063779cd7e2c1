"""Features in files: formats, writing and mapping."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from gcnzc.datasets import store
from gcnzc.datasets.rows import (
    CODES,
    Allocate,
    Array,
    Codes,
    Csr,
    Progress,
    Rows,
    converted,
    finite,
    in_memory,
    no_progress,
    rows_of_array,
    stored_dtype,
)
from gcnzc.datasets.store import Prepared
from gcnzc.features.pcie_traffic import choose_pitch
from gcnzc.features.table import FeatureTable
from gcnzc.kernels.finite import are_finite
from gcnzc.kernels.gather.quantize import LARGEST, SCALE_COLUMNS, largest, quantize, scales_of

FeatureDtype: TypeAlias = Literal[
    "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"
]


ScaleKind: TypeAlias = Literal["row", "columns"]


# types whose numbers mean something with a scale only
SCALED = tuple(str(dtype).removeprefix("torch.") for dtype in LARGEST)


@dataclass(frozen=True)
class StoredFormat:
    """How features are stored."""

    dtype: np.dtype  # of the file
    name: str  # of the type of its numbers
    scales: ScaleKind | None = None  # of codes
    scale_columns: int | None = None
    codes: Codes | None = None  # to be taken over as they are

    @property
    def is_coded(self) -> bool:
        """Whether the file's type is another than that of its numbers, or numbers have scales."""
        return self.name in CODES


def form_of(rows: Rows, wanted: FeatureDtype | None, scales: ScaleKind) -> StoredFormat:
    """Choose how features are stored: their dtype, and the scales of codes."""
    name, dtype = wanted, stored_dtype(rows, wanted)
    if wanted is None and rows.codes is not None:
        name = cast(FeatureDtype, rows.codes.dtype)
    if scales == "columns" and wanted not in SCALED:
        raise ValueError(
            f"{wanted or 'features as they are'} and scales of columns do not go together\n\n"
            f"hint: the types that are scaled are {', '.join(SCALED)}"
        )
    if name is None or name not in CODES:
        return StoredFormat(dtype, str(dtype))
    if wanted is None and rows.codes is not None and rows.codes.scales is not None:
        per = rows.codes.scale_columns
        return StoredFormat(dtype, name, "row" if per is None else "columns", per, rows.codes)
    if name not in SCALED:
        return StoredFormat(dtype, name)
    return StoredFormat(dtype, name, scales, SCALE_COLUMNS if scales == "columns" else None)


def check_layout(
    rows: Rows | None, form: StoredFormat | None, sparse: bool, pitch_bytes: int | None
) -> bool:
    """Demand that the features can be kept as asked; whether they are kept sparse."""
    if rows is None or form is None:
        return False
    dtype = form.dtype
    if sparse and form.is_coded:
        raise ValueError(
            f"sparse features cannot be kept as {form.name}\n\n"
            "hint: leave out --sparse-features, or keep them as float16"
        )
    if sparse and rows.csr is None:
        raise ValueError(
            f"{rows.where} has dense features, which cannot be kept sparse\n\n"
            "hint: leave out --sparse-features"
        )
    if pitch_bytes and (
        sparse or pitch_bytes < _row_bytes(rows, dtype) or pitch_bytes % dtype.itemsize
    ):
        raise ValueError(
            f"rows of {_row_bytes(rows, dtype)} bytes of {dtype} cannot lie {pitch_bytes} bytes "
            "apart\n\nhint: the pitch of dense rows is at least their size, and whole numbers fit"
        )
    return sparse


def pitch_of(rows: Rows | None, dtype: np.dtype | None, pitch_bytes: int | None) -> tuple[int, str]:
    """How far apart rows are to lie, and why."""
    if rows is None or dtype is None:
        return 0, ""
    row_bytes = _row_bytes(rows, dtype)
    if pitch_bytes is None and row_bytes:
        return choose_pitch(row_bytes, dtype.itemsize)
    return pitch_bytes or row_bytes, "as asked"


def _row_bytes(rows: Rows, dtype: np.dtype) -> int:
    return rows.num_columns * dtype.itemsize


def write_dense(
    writer: store.Writer,
    rows: Rows,
    form: StoredFormat,
    pitch_bytes: int,
    allow_nan: bool,
    allocate: Allocate,
    progress: Progress,
) -> bool:
    """Write the rows; whether all of them were finite."""
    all_finite, dtype = True, form.dtype

    def looked_at() -> Iterator[Array]:
        nonlocal all_finite
        for chunk in converted(rows, dtype, allow_nan, allocate, progress):
            if allow_nan and all_finite:
                all_finite = bool(np.isfinite(chunk).all())
            yield chunk

    writer.save_rows("features.npy", rows, dtype, pitch_bytes, looked_at())
    return all_finite


def write_codes(
    writer: store.Writer,
    rows: Rows,
    form: StoredFormat,
    pitch_bytes: int,
    allow_nan: bool,
    allocate: Allocate,
    progress: Progress,
) -> bool:
    """Write codes, and their scales if they have any; whether all numbers were finite."""
    if form.codes is not None and form.codes.scales is not None:
        kept = rows_of_array(form.codes.array, rows.where)
        writer.save_rows("features.npy", kept, form.dtype, pitch_bytes, kept.chunks(allocate))
        writer.save("features_scales.npy", form.codes.scales)
        return True
    all_finite, dtype, per = True, getattr(torch, form.name), form.scale_columns
    scales = torch.empty(0)
    if form.scales == "row":
        scales = torch.from_numpy(allocate("scales", rows.num_rows, np.float32))
    elif per is not None:
        most = torch.zeros(-(-rows.num_columns // per))
        for chunk in _exact_chunks(rows, form, allow_nan, allocate, progress):
            most = torch.maximum(most, largest(chunk, per))
        scales = scales_of(most, dtype)

    def coded() -> Iterator[Array]:
        nonlocal all_finite
        done = 0
        for chunk in _exact_chunks(rows, form, allow_nan, allocate, progress):
            part = slice(done, done + len(chunk))
            if form.scales is None:
                codes = chunk.to(dtype)
                all_finite = all_finite and bool(are_finite(chunk))
                _check_in_range(codes, chunk, form, rows.where, done)
            elif per is None:
                scales[part] = scales_of(largest(chunk), dtype)
                codes = quantize(chunk, scales[part], dtype)
            else:
                codes = quantize(chunk, scales, dtype, per)
            done = part.stop
            # numpy knows integers of the same width
            integers = torch.int8 if dtype.itemsize == 1 else torch.int16
            yield codes.view(integers).numpy().view(form.dtype)

    writer.save_rows("features.npy", rows, form.dtype, pitch_bytes, coded())
    if form.scales is not None:
        writer.save("features_scales.npy", scales.numpy())
    return all_finite


def _exact_chunks(
    rows: Rows, form: StoredFormat, allow_nan: bool, allocate: Allocate, progress: Progress
) -> Iterator[Tensor]:
    """The rows as float32, which are finite if they are to have scales."""
    done = 0
    for chunk in converted(rows, np.dtype(np.float32), allow_nan, allocate, progress):
        if allow_nan and form.scales is not None and not (good := np.isfinite(chunk)).all():
            row, column = (int(i) for i in np.argwhere(~good)[0])
            raise ValueError(
                f"{rows.where}: {chunk[row, column]} in row {done + row}, column {column}, but "
                f"{form.name} with scales holds finite numbers alone\n\n"
                "hint: mend the features, or keep them as float16"
            )
        done += len(chunk)
        yield to_tensor(np.ascontiguousarray(chunk))


def _check_in_range(
    codes: Tensor, chunk: Tensor, form: StoredFormat, where: str, first_row: int
) -> None:
    bad = codes.isinf() & chunk.isfinite()
    if bad.any():
        row, column = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{where}: {float(chunk[row, column])} in row {first_row + row} is too large for "
            f"{form.name}\n\nhint: keep the features as float32, or scale them"
        )


def write_sparse(
    writer: store.Writer,
    rows: Rows,
    form: StoredFormat,
    pitch_bytes: int,
    allow_nan: bool,
    allocate: Allocate,
    progress: Progress,
) -> bool:
    """Write the CSR parts; whether all values were finite."""
    assert rows.csr is not None
    csr = rows.csr
    values = finite(csr.values, form.dtype, allow_nan, rows.where)
    # torch wants one type for both
    kind = np.int32 if max(len(values), rows.num_columns) < 2**31 else np.int64
    writer.save("features_indptr.npy", csr.indptr.astype(kind, copy=False))
    writer.save("features_indices.npy", csr.indices.astype(kind, copy=False))
    writer.save("features_values.npy", values)
    return not allow_nan or bool(np.isfinite(values).all())


def features_in_memory(rows: Rows | None, allow_nan: bool, allocate: Allocate) -> Tensor | None:
    """Read features into memory from `allocate`; None without features."""
    if rows is None:
        return None
    dtype = stored_dtype(rows, None)
    table = allocate("features", rows.num_rows * rows.num_columns, dtype)
    table = table.reshape(rows.num_rows, rows.num_columns)
    done = 0
    for chunk in converted(rows, dtype, allow_nan, in_memory, no_progress):
        table[done : done + len(chunk)] = chunk
        done += len(chunk)
    return to_tensor(table)


def mapped_features(opened: Prepared) -> tuple[Tensor | None, FeatureTable | None]:
    """The features if they are numbers, and the table of them if they are codes with scales."""
    if opened.csr is not None:
        columns = opened.meta["features"]["columns"]
        return _sparse(opened.csr, len(opened.labels), columns), None
    if opened.codes is not None:
        codes = opened.codes
        # not every torch knows integers without a sign
        integers = codes.array.view(f"i{codes.array.itemsize}")
        numbers = to_tensor(integers).view(getattr(torch, codes.dtype))
        if codes.scales is None:
            return numbers, None
        return None, FeatureTable(numbers, to_tensor(codes.scales), codes.scale_columns)
    return None if opened.features is None else to_tensor(opened.features), None


def _sparse(csr: Csr, num_rows: int, num_columns: int) -> Tensor:
    size = (num_rows, num_columns)
    indptr, indices, values = to_tensor(csr.indptr), to_tensor(csr.indices), to_tensor(csr.values)
    with warnings.catch_warnings():
        # torch says once that sparse CSR is in beta
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
        return torch.sparse_csr_tensor(indptr, indices, values, size, check_invariants=False)


def to_tensor(array: Array) -> Tensor:
    """A tensor on the memory of `array`, which may be read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
