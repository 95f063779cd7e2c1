"""Gather rows of a feature table: `out[i] = table[ids[i]]`.

On a GPU the table may stay in page-locked host memory. The GPU then reads the rows it needs over
the bus by itself: no CPU thread copies them, and no staging buffer holds them. The idea is
PyTorch-Direct's (Min et al., VLDB 2021, https://arxiv.org/abs/2103.03330).

On a CPU a gather is a copy whose reads jump, so it should run at a copy's speed: the rows some way
ahead are prefetched, and the result is written by streaming stores of whole 64 B lines.

Rows are copied as bytes, whatever their dtype, so all three ways agree bit for bit.

Letters: N rows in the table, D columns, B rows asked for; P columns after joining bytes.
"""

import contextlib

import numpy as np
import torch
import triton
import triton.language as tl
from numba import njit
from torch import Tensor

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
from gcnzc.kernels.threads import in_parts

# bytes that are asked for before they are needed; bench/gather.py says why
AHEAD_BYTES = 8192
# rows from this width on have their starts asked for earlier, so many at a time
WIDE_BYTES = 2048
STARTS = 16
# from here on the result would not stay in cache anyway: half of the last level's usual size
STREAM_BYTES = 1 << 24
# fewer bytes than this are not worth a thread
PART_BYTES = 1 << 18
BLOCK = 128  # columns per program on a GPU


def gather_reference(table: Tensor, ids: Tensor) -> Tensor:
    """What `gather` must equal, bit for bit."""
    return table[ids.to(table.device)].to(ids.device)


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


def gather_numba(
    table: Tensor, ids: Tensor, out: Tensor | None = None, *, threads: int | None = None
) -> Tensor:
    """`gather` on the host: all arguments lie there. See `gather`."""
    _check(table, ids)
    out = _out(table, ids, out)
    num_ids, row_bytes = ids.shape[0], table.shape[1] * table.element_size()
    if num_ids == 0 or row_bytes == 0:
        _check_ids(table, ids)
        return out
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
    least = max(1, PART_BYTES // row_bytes)
    whole = out_stride == row_bytes and row_bytes >= LINE_BYTES
    if whole and num_ids * row_bytes >= STREAM_BYTES:
        in_parts(_stream_rows, num_ids, *head, ahead, bad, threads=threads, least=least)
    else:
        in_parts(_copy_rows, num_ids, *head, out_stride, ahead, bad, threads=threads, least=least)
    if bad[0]:
        _check_ids(table, ids)
    return out


@triton.jit
def _gather(
    table_NP,
    ids_B,
    out_BP,
    num_cols: tl.constexpr,
    table_stride: tl.constexpr,
    out_stride: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    # int64 before the multiply: 2**31 elements is only 8 GB of float32
    row = tl.load(ids_B + i).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < num_cols
    values = tl.load(table_NP + row * table_stride + cols, mask=inside)
    tl.store(out_BP + i * out_stride + cols, values, mask=inside)


def gather_triton(table: Tensor, ids: Tensor, out: Tensor | None = None) -> Tensor:
    """`gather` on a GPU: `ids` and `out` lie there, the table there or page-locked on the host.

    Under Triton's interpreter all may lie on the host. See `gather`.
    """
    _check(table, ids)
    if table.device != ids.device and not table.is_pinned():
        raise ValueError(
            f"gather: a table on {table.device} cannot be read from {ids.device}, because its "
            "memory is not page-locked\n\n"
            "hint: open it with gcnzc.pinned(rows), or move it with .to()"
        )
    out = _out(table, ids, out)
    if ids.shape[0] == 0 or table.shape[1] == 0:
        return out
    word = _word(table, out)
    # a single column may have any stride, which a view of other words would not take
    table_NP = table.as_strided(table.shape, (table.stride(0), 1)).view(word)
    out_BP = out.as_strided(out.shape, (out.stride(0), 1)).view(word)
    ids = ids.contiguous()
    grid = (ids.shape[0], triton.cdiv(table_NP.shape[1], BLOCK))
    on_gpu = out.device.type == "cuda"
    with torch.cuda.device(out.device) if on_gpu else contextlib.nullcontext():
        _gather[grid](
            table_NP,
            ids,
            out_BP,
            table_NP.shape[1],
            table_NP.stride(0),
            out_BP.stride(0),
            BLOCK,
        )
    return out


def gather(
    table: Tensor, ids: Tensor, out: Tensor | None = None, *, threads: int | None = None
) -> Tensor:
    """Return `table[ids]` on the device of `ids`.

    Args:
        table: (N, D) of any dtype, each row contiguous; on the device of `ids`, or page-locked on
            the host. It may be memory-mapped, read-only, or a view of something wider.
        ids: (B,) int32 or int64 in [0, N). Checked on the host; on a GPU they are not, and an id
            outside reads foreign memory.
        out: (B, D) to write into, of the dtype of `table`, each row contiguous, on the device of
            `ids`; allocated if None. Fresh memory costs more than the gather: keep it.
        threads: how many share the work on the host; `torch.get_num_threads()` if None.

    Returns:
        (B, D), which is `out` if that was given. On a GPU it is ready for work queued later on the
        current stream; other streams must wait for it.

    Raises:
        ValueError: shapes or dtypes do not fit, or `table` is where the device of `ids` cannot
            read it.
        IndexError: an id is outside [0, N); `out` may then be half written.
    """
    if ids.device.type == "cpu":
        return gather_numba(table, ids, out, threads=threads)
    return gather_triton(table, ids, out)


def _check(table: Tensor, ids: Tensor) -> None:
    if table.ndim != 2 or (table.shape[1] > 1 and table.stride(1) != 1):
        raise ValueError(
            f"gather: rows must be contiguous in a table of two dimensions, not of shape "
            f"{tuple(table.shape)} and strides {table.stride()}\n\nhint: .contiguous() makes a copy"
        )
    if ids.ndim != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"gather: ids must be one row of int32 or int64, not {ids.dtype} of shape "
            f"{tuple(ids.shape)}\n\nhint: a mask becomes ids with .nonzero().flatten()"
        )
    if ids.device.type == "cpu" and table.device.type != "cpu":
        raise ValueError(
            f"gather: ids on {ids.device} cannot choose rows on {table.device}\n\n"
            "hint: move the ids with .to(table.device)"
        )


def _out(table: Tensor, ids: Tensor, out: Tensor | None) -> Tensor:
    shape = (ids.shape[0], table.shape[1])
    if out is None:
        return torch.empty(shape, dtype=table.dtype, device=ids.device)
    like = tuple(out.shape) == shape and out.dtype == table.dtype and out.device == ids.device
    apart = shape[0] <= 1 or out.stride(0) >= shape[1]
    if not (like and apart and (shape[1] <= 1 or out.stride(1) == 1)):
        raise ValueError(
            f"gather: out must be {shape} {table.dtype} on {ids.device} with contiguous rows, "
            f"not {tuple(out.shape)} {out.dtype} on {out.device} with strides {out.stride()}\n\n"
            "hint: leave it away, or make it with torch.empty"
        )
    return out


def _check_ids(table: Tensor, ids: Tensor) -> None:
    outside = ids[(ids < 0) | (ids >= table.shape[0])]
    if len(outside) > 0:
        raise IndexError(
            f"gather: id {int(outside[0])} is not in a table of {table.shape[0]} rows "
            f"({len(outside)} of {len(ids)} ids are outside)\n\n"
            "hint: is the table that of another graph?"
        )


def _word(table: Tensor, out: Tensor) -> torch.dtype:
    # the widest integers that rows can be cut into: bits pass through them unchanged
    sizes = [table.shape[1] * table.element_size(), table.data_ptr(), out.data_ptr()]
    sizes += [t.stride(0) * t.element_size() for t in (table, out)]
    for word in (torch.int64, torch.int32, torch.int16):
        if all(size % word.itemsize == 0 for size in sizes):
            return word
    return torch.int8
