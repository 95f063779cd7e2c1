"""Gather rows from a feature cache and, for the others, from host memory.

Hits and misses are told apart within the one kernel of `gcnzc.kernels.gather.gpu`. A CPU has every
row at hand and gathers as ever; here it counts how many of the rows a GPU would have found.

Letters: N rows in the table, D columns, H hot rows, B rows asked for.
"""

import os
from math import gcd

import numpy as np
import torch
from numba import njit
from torch import Tensor

from gcnzc.kernels.gather import CHECK, FROM_CODES, gpu
from gcnzc.kernels.gather.cached_rows import CachedRows
from gcnzc.kernels.gather.gpu import KernelConfig
from gcnzc.kernels.gather.lanes import LINE_BYTES
from gcnzc.kernels.gather.overlap import check_apart

SLOT_BYTES = 4  # on the GPU, for each row of the table


def gather_cached_reference(table: Tensor, ids: Tensor, hot: Tensor, copies: Tensor) -> Tensor:
    """What `gather_cached` must equal, bit for bit; `copies` (H, D) are of rows `hot` (H,)."""
    rows = table.clone()
    rows[hot] = copies
    return rows[ids]


def gather_cached(
    table: Tensor,
    ids: Tensor,
    hot: CachedRows,
    out: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    scale_columns: int | None = None,
    way: KernelConfig | None = None,
) -> Tensor:
    """Return `table[ids]`, read from the copies where there are any; or what its codes stand for.

    Args:
        table: (N, D), each row contiguous, page-locked on the host.
        ids: (B,) int32 or int64 in [0, N), on the GPU that the copies are for; checked if the
            environment has GCNZC_CHECK_IDS. Under Triton's interpreter all may lie on the host.
        hot: made of this table by `gcnzc.kernels.gather.cached_rows.hot_rows`, or split over
        several GPUs. out: (B, D) to write into, each row contiguous, where `ids` lie; of the dtype
            of `table`, or with scales of float32, float16 or bfloat16; allocated if None.
        scales: of a table of codes, where `ids` lie; see `gcnzc.kernels.gather.gather`.
        scale_columns: see there.
        way: see there.

    Returns:
        (B, D), ready for work queued later on the current stream.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or `out` shares memory with what is read.
        IndexError: an id is outside, and ids are checked.
    """
    device = hot.memory.device
    if ids.ndim != 1 or ids.dtype not in (torch.int32, torch.int64) or ids.device != device:
        raise ValueError(
            f"gather_hot: ids must be one row of int32 or int64 on {device}, where the hot rows "
            f"are, not {ids.dtype} of shape {tuple(ids.shape)} on {ids.device}\n\n"
            "hint: move the ids with .to()"
        )
    if len(hot.slots) != len(table):
        raise ValueError(
            f"gather_hot: the hot rows are of a table of {len(hot.slots)} rows, not of {len(table)}"
            "\n\nhint: hot_rows(table, ids, device) copies them"
        )
    shape = (len(ids), table.shape[1])
    dtypes = (table.dtype,) if scales is None else FROM_CODES
    if out is not None and (
        tuple(out.shape) != shape
        or out.dtype not in dtypes
        or out.device != device
        or (shape[1] > 1 and out.stride(1) != 1)
        or (shape[0] > 1 and out.stride(0) < shape[1])
    ):
        raise ValueError(
            f"gather_hot: out must be {shape} {dtypes[0]} on {device} with contiguous rows, not "
            f"{tuple(out.shape)} {out.dtype} on {out.device} with strides {out.stride()}\n\n"
            "hint: leave it away, or make it with torch.empty"
        )
    if out is not None:
        check_apart("gather_cached", out, table=table, ids=ids, scales=scales, copies=hot.memory)
    checked = bool(os.environ.get(CHECK))
    return gpu.gather_rows(
        table,
        ids,
        out,
        hot=hot,
        scales=scales,
        scale_columns=scale_columns,
        way=way,
        checked=checked,
    )


def room_bytes(table: Tensor) -> int:
    """The most bytes that the copy of one row takes on a GPU: it lies in its lines as the row does.

    Args:
        table: (N, D), each row contiguous.
    """
    size = table.element_size()
    row_bytes, begin = table.shape[1] * size, table.data_ptr() % LINE_BYTES
    # a single row may have any stride
    step = gcd(table.stride(0) * size, LINE_BYTES) if len(table) > 1 else LINE_BYTES
    furthest = LINE_BYTES - step + begin % step
    return -(-(furthest + row_bytes) // LINE_BYTES) * LINE_BYTES


def mark(hot: Tensor, num_rows: int) -> Tensor:
    """One bit a row, 1 for the hot ones: (N // 64 + 1,) int64.

    Args:
        hot: (H,) int64 in [0, N), on the host.
        num_rows: N.
    """
    flags = np.zeros((num_rows // 64 + 1) * 64, np.uint8)
    flags[hot.numpy()] = 1
    # the first row is the lowest bit, whatever the order of a machine's bytes
    return torch.from_numpy(np.packbits(flags, bitorder="little").view("<i8").astype(np.int64))


@njit(nogil=True, cache=True)
def _count_marked(words, num_rows, ids):
    found = np.int64(0)
    for i in range(len(ids)):
        # unsigned: a negative id is a large one, and no place counts from the end
        row = np.uint64(ids[i])
        if row >= num_rows:
            return np.int64(-1)
        word = words[row >> np.uint64(6)]
        found += np.int64((word >> (row & np.uint64(63))) & np.uint64(1))
    return found


def count_marked(bits: Tensor, num_rows: int, ids: Tensor) -> int:
    """How many of `ids` have their bit in `bits`; -1 if one is outside [0, N). All on the host."""
    return int(_count_marked(bits.numpy().view(np.uint64), np.uint64(num_rows), ids.numpy()))


@njit(nogil=True, cache=True)
def _count_into(counts, ids):
    for i in range(len(ids)):
        counts[ids[i]] += 1


def count_into(counts: Tensor, ids: Tensor) -> None:
    """Add 1 to `counts` (N,) int32 at each of `ids`, in [0, N) and not checked; all on the host."""
    _count_into(counts.numpy(), ids.numpy())
