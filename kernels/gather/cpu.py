"""Gather rows on the CPU: `out[i] = table[ids[i]]`.

To run at the speed of a copy, a gather prefetches rows ahead of their use, and writes large results
with streaming stores of whole 64 B cache lines.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from gcnzc.kernels.gather.quantize import broadcast_scales
from gcnzc.kernels.memory import (
    LINE_BYTES,
    fence,
    lines_on_stack,
    load_int32,
    load_int64,
    move_64,
    move_256,
    move_few,
    prefetch,
    stream_64,
    stream_256,
    stream_512,
)
from gcnzc.kernels.threads import parallel_for

# bytes prefetched ahead of their use; measured by bench/loading/gather.py
PREFETCH_BYTES = 8192


# for rows of at least this width, the starts of several rows are prefetched earlier
WIDE_BYTES = 2048


PREFETCHED_STARTS = 16


# results of this size do not stay in the cache: half of a typical last-level cache
STREAM_BYTES = 1 << 24


# fewest bytes for a thread
GRAIN_BYTES = 1 << 18


@njit(nogil=True, cache=True, inline="always")
def _load_id(ids, id_bytes, i):
    if id_bytes == 8:
        return load_int64(ids + i * 8)
    return load_int32(ids + i * 4)


@njit(nogil=True, cache=True)
def _copy_rows(
    table,
    table_stride,
    num_rows,
    row_bytes,
    ids,
    id_bytes,
    out,
    out_stride,
    distance,
    is_invalid,
    begin,
    end,
):
    # rows of any width and stride, with ordinary stores
    for i in range(begin, end):
        row = _load_id(ids, id_bytes, i)
        if not 0 <= row < num_rows:
            is_invalid[0] = 1
            return
        upcoming = table + _load_id(ids, id_bytes, min(i + distance, end - 1)) * table_stride
        from_ = table + row * table_stride
        to = out + i * out_stride
        done = 0
        while done + 4 * LINE_BYTES <= row_bytes:
            for line in range(0, 4 * LINE_BYTES, LINE_BYTES):
                prefetch(upcoming + done + line)
            move_256(to + done, from_ + done)
            done += 4 * LINE_BYTES
        while done + LINE_BYTES <= row_bytes:
            prefetch(upcoming + done)
            move_64(to + done, from_ + done)
            done += LINE_BYTES
        prefetch(upcoming + row_bytes - 1)
        move_few(to + done, from_ + done, row_bytes - done)


@njit(nogil=True, cache=True, inline="always")
def _prefetch_starts(table, table_stride, ids, id_bytes, begin, end):
    # starts the page-table lookups of several rows at once
    for i in range(begin, end):
        prefetch(table + _load_id(ids, id_bytes, i) * table_stride)


@njit(nogil=True, cache=True)
def _stream_rows(
    table, table_stride, num_rows, row_bytes, ids, id_bytes, out, distance, is_invalid, begin, end
):
    # Adjacent rows of at least 64 B. A line of `out` that two rows share is assembled in
    # `line_buffer`, and streamed one row later, when its stores have reached the cache.
    line_buffer = lines_on_stack() + LINE_BYTES
    pending_line = 0
    has_last_line = (table | table_stride | row_bytes | out) & (LINE_BYTES - 1) != 0
    for i in range(begin, end):
        if row_bytes >= WIDE_BYTES and (i - begin) % PREFETCHED_STARTS == 0:
            starts = min(i + PREFETCHED_STARTS, end)
            _prefetch_starts(
                table, table_stride, ids, id_bytes, starts, min(starts + PREFETCHED_STARTS, end)
            )
        row = _load_id(ids, id_bytes, i)
        if not 0 <= row < num_rows:
            is_invalid[0] = 1
            return
        upcoming = table + _load_id(ids, id_bytes, min(i + distance, end - 1)) * table_stride
        from_ = table + row * table_stride
        to = out + i * row_bytes
        done = -to & (LINE_BYTES - 1)
        if done > 0:
            if i == begin:
                move_few(to, from_, done)
            else:
                move_64(line_buffer + LINE_BYTES - done, from_)
                pending_line = to + done - LINE_BYTES
            # the loops below prefetch from `done` on
            prefetch(upcoming)
        # Several lines at once, since a load shortly after a store may wait for it. Eight lines are
        # 15 % faster at 512 and 768 B, four lines are 20 % faster at 256 and 400 B.
        while done + 8 * LINE_BYTES <= row_bytes:
            for line in range(0, 8 * LINE_BYTES, LINE_BYTES):
                prefetch(upcoming + done + line)
            stream_512(to + done, from_ + done)
            done += 8 * LINE_BYTES
        while done + 4 * LINE_BYTES <= row_bytes:
            for line in range(0, 4 * LINE_BYTES, LINE_BYTES):
                prefetch(upcoming + done + line)
            stream_256(to + done, from_ + done)
            done += 4 * LINE_BYTES
        while done + LINE_BYTES <= row_bytes:
            prefetch(upcoming + done)
            stream_64(to + done, from_ + done)
            done += LINE_BYTES
        if has_last_line:
            # the loops above prefetch whole lines from the start of the row
            prefetch(upcoming + row_bytes - 1)
        if pending_line:
            stream_64(pending_line, line_buffer)
            pending_line = 0
        rest = row_bytes - done
        if rest > 0:
            if i == end - 1:
                move_few(to + done, from_ + done, rest)
            else:
                move_64(line_buffer + rest - LINE_BYTES, from_ + row_bytes - LINE_BYTES)
    fence()


@njit(nogil=True, cache=True)
def _dequantize_rows(
    table,
    codes,
    stride,
    num_rows,
    columns,
    ids,
    id_bytes,
    out,
    out_stride,
    values,
    scales,
    by_row,
    distance,
    is_invalid,
    begin,
    end,
):
    # `table` is the address of `codes`; codes are indices of `values`, or numbers if it is empty
    for i in range(begin, end):
        row = _load_id(ids, id_bytes, i)
        if not 0 <= row < num_rows:
            is_invalid[0] = 1
            return
        upcoming = table + _load_id(ids, id_bytes, min(i + distance, end - 1)) * stride
        for line in range(0, columns, LINE_BYTES):
            prefetch(upcoming + line)
        prefetch(upcoming + columns - 1)
        if by_row:
            prefetch(scales.ctypes.data + _load_id(ids, id_bytes, min(i + distance, end - 1)) * 4)
        from_ = codes[row * stride : row * stride + columns]
        to = out[i * out_stride : i * out_stride + columns]
        if by_row:
            scale = scales[row]
            if len(values) == 0:
                for j in range(columns):
                    to[j] = np.float32(from_[j]) * scale
            else:
                for j in range(columns):
                    to[j] = values[from_[j]] * scale
        elif len(values) == 0:
            for j in range(columns):
                to[j] = np.float32(from_[j]) * scales[j]
        else:
            for j in range(columns):
                to[j] = values[from_[j]] * scales[j]


def dequantize_rows(
    table: Tensor,
    scales: Tensor,
    scale_columns: int | None,
    ids: Tensor,
    out: Tensor,
    threads: int | None = None,
) -> bool:
    """Gather rows of codes, dequantize them and write them to `out`; all tensors on the host.

    Args:
        table: (N, D) codes, each row contiguous; N and D are at least 1.
        scales: see `gcnzc.kernels.gather.quantize`.
        scale_columns: number of adjacent columns that share a scale; None for a scale per row.
        ids: (B,) int32 or int64, at least one.
        out: (B, D) float32, each row contiguous.
        threads: number of threads; `torch.get_num_threads()` if None.

    Returns:
        Whether every id is in [0, N); otherwise `out` may be partly written.
    """
    (num_rows, columns), num_ids = table.shape, ids.shape[0]
    ids = ids.contiguous()
    is_invalid = np.zeros(1, np.int64)
    values = _float8_values(table.dtype)
    codes = _flat(table).view(torch.uint8 if len(values) else torch.int8).numpy()
    args: tuple[Any, ...] = (
        table.data_ptr(),
        codes,
        table.stride(0) if num_rows > 1 else columns,
        num_rows,
        columns,
        ids.data_ptr(),
        ids.element_size(),
        _flat(out).numpy(),
        out.stride(0) if num_ids > 1 else columns,
        values,
        broadcast_scales(scales, columns, scale_columns).reshape(-1).contiguous().numpy(),
        scale_columns is None,
        max(1, PREFETCH_BYTES // columns),
        is_invalid,
    )
    grain_size = max(1, GRAIN_BYTES // (columns * out.element_size()))
    parallel_for(_dequantize_rows, num_ids, *args, threads=threads, grain_size=grain_size)
    return not is_invalid[0]


@lru_cache
def _float8_values(dtype: torch.dtype) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the number of each float8 code; an empty array for int8."""
    if dtype == torch.int8:
        return np.empty(0, np.float32)
    return torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()


def _flat(rows: Tensor) -> Tensor:
    """Return the memory from the first row to the end of the last one, as one dimension."""
    num_rows, columns = rows.shape
    # a single row may have any stride
    span = (num_rows - 1) * rows.stride(0) + columns if num_rows > 1 else columns
    return rows.as_strided((span,), (1,))


def gather_rows(table: Tensor, ids: Tensor, out: Tensor, threads: int | None = None) -> bool:
    """Gather rows into `out`; all tensors on the host.

    Args:
        table: (N, D), each row contiguous.
        ids: (B,) int32 or int64.
        out: (B, D) with the dtype of `table`, each row contiguous.
        threads: number of threads; `torch.get_num_threads()` if None.

    Returns:
        Whether every id is in [0, N); otherwise `out` may be partly written.
    """
    num_ids, row_bytes = ids.shape[0], table.shape[1] * table.element_size()
    ids = ids.contiguous()
    is_invalid = np.zeros(1, np.int64)
    # the stride of a single row or column is arbitrary
    out_stride = out.stride(0) * out.element_size() if num_ids > 1 else row_bytes
    head = (
        table.data_ptr(),
        table.stride(0) * table.element_size(),
        table.shape[0],
        row_bytes,
        ids.data_ptr(),
        ids.element_size(),
        out.data_ptr(),
    )
    distance = max(1, PREFETCH_BYTES // row_bytes)
    grain_size = max(1, GRAIN_BYTES // row_bytes)
    whole = out_stride == row_bytes and row_bytes >= LINE_BYTES
    if whole and num_ids * row_bytes >= STREAM_BYTES:
        parallel_for(
            _stream_rows,
            num_ids,
            *head,
            distance,
            is_invalid,
            threads=threads,
            grain_size=grain_size,
        )
    else:
        parallel_for(
            _copy_rows,
            num_ids,
            *head,
            out_stride,
            distance,
            is_invalid,
            threads=threads,
            grain_size=grain_size,
        )
    return not is_invalid[0]
