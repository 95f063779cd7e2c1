"""Gather rows by CPU threads: `out[i] = table[ids[i]]`.

A gather is a copy whose reads jump, so it should run at a copy's speed: the rows some way ahead are
prefetched, and the result is written by streaming stores of whole 64 B lines.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from gcnzc.kernels.gather.quantize import spread
from gcnzc.kernels.memory import (
    LINE_BYTES,
    fence,
    lines_on_stack,
    load_int32,
    load_int64,
    move_64,
    move_256,
    move_few,
    prefetch_once,
    stream_64,
    stream_256,
    stream_512,
)
from gcnzc.kernels.threads import parallel_for

# bytes that are asked for before they are needed; bench/gather.py says why
AHEAD_BYTES = 8192


# rows from this width on have their starts asked for earlier, so many at a time
WIDE_BYTES = 2048


STARTS = 16


# from here on the result would not stay in cache anyway: half of the last level's usual size
STREAM_BYTES = 1 << 24


# fewer bytes than this are not worth a thread
GRAIN_BYTES = 1 << 18


@njit(nogil=True, cache=True, inline="always")
def _load_id(ids, id_bytes, i):
    if id_bytes == 8:
        return load_int64(ids + i * 8)
    return load_int32(ids + i * 4)


@njit(nogil=True, cache=True)
def _copy_rows(
    table, table_stride, num_rows, row_bytes, ids, id_bytes, out, out_stride, ahead, bad, begin, end
):
    # any width, any stride, ordinary stores
    for i in range(begin, end):
        row = _load_id(ids, id_bytes, i)
        if not 0 <= row < num_rows:
            bad[0] = 1
            return
        later = table + _load_id(ids, id_bytes, min(i + ahead, end - 1)) * table_stride
        from_ = table + row * table_stride
        to = out + i * out_stride
        done = 0
        while done + 4 * LINE_BYTES <= row_bytes:
            for line in range(0, 4 * LINE_BYTES, LINE_BYTES):
                prefetch_once(later + done + line)
            move_256(to + done, from_ + done)
            done += 4 * LINE_BYTES
        while done + LINE_BYTES <= row_bytes:
            prefetch_once(later + done)
            move_64(to + done, from_ + done)
            done += LINE_BYTES
        prefetch_once(later + row_bytes - 1)
        move_few(to + done, from_ + done, row_bytes - done)


@njit(nogil=True, cache=True, inline="always")
def _ask_for_starts(table, table_stride, ids, id_bytes, begin, end):
    # Where pages lie is looked up for many rows at once, instead of when each row is reached.
    for i in range(begin, end):
        prefetch_once(table + _load_id(ids, id_bytes, i) * table_stride)


@njit(nogil=True, cache=True)
def _stream_rows(
    table, table_stride, num_rows, row_bytes, ids, id_bytes, out, ahead, bad, begin, end
):
    # Rows of 64 B and more that follow each other in `out`. A line of `out` that two rows share is
    # put together in `edge`, and streamed one row later, when its stores have reached the cache.
    edge = lines_on_stack() + LINE_BYTES
    waiting = 0
    for i in range(begin, end):
        if row_bytes >= WIDE_BYTES and (i - begin) % STARTS == 0:
            starts = min(i + STARTS, end)
            _ask_for_starts(table, table_stride, ids, id_bytes, starts, min(starts + STARTS, end))
        row = _load_id(ids, id_bytes, i)
        if not 0 <= row < num_rows:
            bad[0] = 1
            return
        later = table + _load_id(ids, id_bytes, min(i + ahead, end - 1)) * table_stride
        from_ = table + row * table_stride
        to = out + i * row_bytes
        done = -to & (LINE_BYTES - 1)
        if done > 0:
            if i == begin:
                move_few(to, from_, done)
            else:
                move_64(edge + LINE_BYTES - done, from_)
                waiting = to + done - LINE_BYTES
            # what follows asks from `done` on
            prefetch_once(later)
        # Several lines at once: a load that follows a store closely may have to wait for it. Eights
        # bring 15 % more at 512 and 768 B, fours 20 % more at 256 and 400 B, and neither harms.
        while done + 8 * LINE_BYTES <= row_bytes:
            for line in range(0, 8 * LINE_BYTES, LINE_BYTES):
                prefetch_once(later + done + line)
            stream_512(to + done, from_ + done)
            done += 8 * LINE_BYTES
        while done + 4 * LINE_BYTES <= row_bytes:
            for line in range(0, 4 * LINE_BYTES, LINE_BYTES):
                prefetch_once(later + done + line)
            stream_256(to + done, from_ + done)
            done += 4 * LINE_BYTES
        while done + LINE_BYTES <= row_bytes:
            prefetch_once(later + done)
            stream_64(to + done, from_ + done)
            done += LINE_BYTES
        prefetch_once(later + row_bytes - 1)
        if waiting:
            stream_64(waiting, edge)
            waiting = 0
        rest = row_bytes - done
        if rest > 0:
            if i == end - 1:
                move_few(to + done, from_ + done, rest)
            else:
                move_64(edge + rest - LINE_BYTES, from_ + row_bytes - LINE_BYTES)
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
    ahead,
    bad,
    begin,
    end,
):
    # `table` is the address of `codes`. Codes are numbers, or places in `values` if there are any.
    for i in range(begin, end):
        row = _load_id(ids, id_bytes, i)
        if not 0 <= row < num_rows:
            bad[0] = 1
            return
        later = table + _load_id(ids, id_bytes, min(i + ahead, end - 1)) * stride
        for line in range(0, columns, LINE_BYTES):
            prefetch_once(later + line)
        prefetch_once(later + columns - 1)
        if by_row:
            prefetch_once(scales.ctypes.data + _load_id(ids, id_bytes, min(i + ahead, end - 1)) * 4)
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
    """Write what the codes of rows stand for into `out`; all lie on the host.

    Args:
        table: (N, D) of codes, each row contiguous; neither N nor D is 0.
        scales: see `gcnzc.kernels.gather.quantize`.
        scale_columns: of a block of columns that share a scale; None for a scale of each row.
        ids: (B,) int32 or int64, at least one.
        out: (B, D) float32, each row contiguous.
        threads: how many share the work; `torch.get_num_threads()` if None.

    Returns:
        Whether every id is in [0, N); else `out` may be half written.
    """
    (num_rows, columns), num_ids = table.shape, ids.shape[0]
    ids = ids.contiguous()
    bad = np.zeros(1, np.int64)
    values = _values(table.dtype)
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
        spread(scales, columns, scale_columns).reshape(-1).contiguous().numpy(),
        scale_columns is None,
        max(1, AHEAD_BYTES // columns),
        bad,
    )
    grain_size = max(1, GRAIN_BYTES // (columns * out.element_size()))
    parallel_for(_dequantize_rows, num_ids, *args, threads=threads, grain_size=grain_size)
    return not bad[0]


@lru_cache
def _values(dtype: torch.dtype) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The number of each code of one byte with an exponent; nothing where codes are numbers."""
    if dtype == torch.int8:
        return np.empty(0, np.float32)
    return torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()


def _flat(rows: Tensor) -> Tensor:
    """All elements from the first row to the last: rows may lie apart."""
    num_rows, columns = rows.shape
    # a single row may have any stride
    span = (num_rows - 1) * rows.stride(0) + columns if num_rows > 1 else columns
    return rows.as_strided((span,), (1,))


def gather_rows(table: Tensor, ids: Tensor, out: Tensor, threads: int | None = None) -> bool:
    """Write the rows into `out`; all lie on the host.

    Args:
        table: (N, D), each row contiguous.
        ids: (B,) int32 or int64.
        out: (B, D), each row contiguous, of the dtype of `table`.
        threads: how many share the work; `torch.get_num_threads()` if None.

    Returns:
        Whether every id is in [0, N); else `out` may be half written.
    """
    num_ids, row_bytes = ids.shape[0], table.shape[1] * table.element_size()
    ids = ids.contiguous()
    bad = np.zeros(1, np.int64)
    # rows of one column, or a single row, may have any stride at all
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
    ahead = max(1, AHEAD_BYTES // row_bytes)
    grain_size = max(1, GRAIN_BYTES // row_bytes)
    whole = out_stride == row_bytes and row_bytes >= LINE_BYTES
    if whole and num_ids * row_bytes >= STREAM_BYTES:
        parallel_for(
            _stream_rows, num_ids, *head, ahead, bad, threads=threads, grain_size=grain_size
        )
    else:
        parallel_for(
            _copy_rows,
            num_ids,
            *head,
            out_stride,
            ahead,
            bad,
            threads=threads,
            grain_size=grain_size,
        )
    return not bad[0]
