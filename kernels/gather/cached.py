"""Gather rows from a feature cache on the GPU, and the other rows from host memory.

The kernel of `gcnzc.kernels.gather.gpu` reads hits and misses in a single launch. The CPU functions
here count cache hits and accesses.

Notation: N rows in the table, D columns, H cached rows, B gathered rows.
"""

import os
from math import gcd

import numpy as np
import torch
from numba import njit
from torch import Tensor

from gcnzc.kernels.gather import CHECK, DEQUANTIZED_DTYPES, gpu
from gcnzc.kernels.gather.cached_rows import CachedRows
from gcnzc.kernels.gather.gpu import KernelConfig
from gcnzc.kernels.gather.lanes import LINE_BYTES
from gcnzc.kernels.gather.overlap import check_no_overlap

SLOT_BYTES = 4  # bytes of the slot index on the GPU, for each row of the table


def gather_cached_reference(table: Tensor, ids: Tensor, cached: Tensor, copies: Tensor) -> Tensor:
    """Reference for `gather_cached`, where `copies` (H, D) are the copies of rows `cached` (H,)."""
    rows = table.clone()
    rows[cached] = copies
    return rows[ids]


def gather_cached(
    table: Tensor,
    ids: Tensor,
    cached: CachedRows,
    out: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    scale_columns: int | None = None,
    config: KernelConfig | None = None,
) -> Tensor:
    """Return `table[ids]`, reading cached rows from GPU memory; dequantized if `scales` are given.

    Args:
        table: (N, D), each row contiguous, page-locked on the host.
        ids: (B,) int32 or int64 in [0, N), on the GPU of the cache; checked if the environment
            variable GCNZC_CHECK_IDS is set. Under Triton's interpreter all tensors may be on the
            host.
        cached: cached rows of this table, from `gcnzc.kernels.gather.cached_rows.make_cached_rows`
            or sharded over several GPUs.
        out: (B, D) on the device of `ids`, each row contiguous, written; with the dtype of `table`,
            or, with scales, float32, float16 or bfloat16. A new tensor if None.
        scales: for a table of codes, on the device of `ids`; see `gcnzc.kernels.gather.gather`.
        scale_columns: see `gcnzc.kernels.gather.gather`.
        config: see `gcnzc.kernels.gather.gather`.

    Returns:
        (B, D), computed on the current stream.

    Raises:
        ValueError: a shape, dtype or device does not match, or `out` overlaps a tensor that is
            read.
        IndexError: ids are checked, and one is outside [0, N).
    """
    device = cached.memory.device
    if ids.ndim != 1 or ids.dtype not in (torch.int32, torch.int64) or ids.device != device:
        raise ValueError(
            f"gather_cached: ids must be one row of int32 or int64 on {device}, where the cached "
            f"rows are, not {ids.dtype} of shape {tuple(ids.shape)} on {ids.device}"
        )
    if len(cached.slots) != len(table):
        raise ValueError(
            f"gather_cached: the cached rows are of a table of {len(cached.slots)} rows, not of "
            f"{len(table)}"
        )
    shape = (len(ids), table.shape[1])
    dtypes = (table.dtype,) if scales is None else DEQUANTIZED_DTYPES
    if out is not None and (
        tuple(out.shape) != shape
        or out.dtype not in dtypes
        or out.device != device
        or (shape[1] > 1 and out.stride(1) != 1)
        or (shape[0] > 1 and out.stride(0) < shape[1])
    ):
        raise ValueError(
            f"gather_cached: out must be {shape} {dtypes[0]} on {device} with contiguous rows, not "
            f"{tuple(out.shape)} {out.dtype} on {out.device} with strides {out.stride()}"
        )
    if out is not None:
        check_no_overlap(
            "gather_cached", out, table=table, ids=ids, scales=scales, copies=cached.memory
        )
    checked = bool(os.environ.get(CHECK))
    return gpu.gather_rows(
        table,
        ids,
        out,
        cached=cached,
        scales=scales,
        scale_columns=scale_columns,
        config=config,
        checked=checked,
    )


def padded_row_bytes(table: Tensor) -> int:
    """Return an upper bound of the bytes that a cached row takes on a GPU, in whole lines.

    A copy has the same offset from a 128 B line as the row itself.

    Args:
        table: (N, D), each row contiguous.
    """
    size = table.element_size()
    row_bytes, begin = table.shape[1] * size, table.data_ptr() % LINE_BYTES
    # a single row may have any stride
    step = gcd(table.stride(0) * size, LINE_BYTES) if len(table) > 1 else LINE_BYTES
    max_offset = LINE_BYTES - step + begin % step
    return -(-(max_offset + row_bytes) // LINE_BYTES) * LINE_BYTES


def make_bitmap(cached: Tensor, num_rows: int) -> Tensor:
    """Return a bitmap of the cached rows: (N // 64 + 1,) int64, one bit for each row.

    Args:
        cached: (H,) int64 in [0, N), on the host.
        num_rows: N.
    """
    flags = np.zeros((num_rows // 64 + 1) * 64, np.uint8)
    flags[cached.numpy()] = 1
    # the first row is the lowest bit, whatever the machine's byte order
    return torch.from_numpy(np.packbits(flags, bitorder="little").view("<i8").astype(np.int64))


@njit(nogil=True, cache=True)
def _count_in_bitmap(words, num_rows, ids):
    found = np.int64(0)
    for i in range(len(ids)):
        # unsigned, so that a negative id is out of range and does not index from the end
        row = np.uint64(ids[i])
        if row >= num_rows:
            return np.int64(-1)
        word = words[row >> np.uint64(6)]
        found += np.int64((word >> (row & np.uint64(63))) & np.uint64(1))
    return found


def count_in_bitmap(bits: Tensor, num_rows: int, ids: Tensor) -> int:
    """Return how many of `ids` are set in a bitmap; -1 if one is outside [0, N). On the host."""
    return int(_count_in_bitmap(bits.numpy().view(np.uint64), np.uint64(num_rows), ids.numpy()))


@njit(nogil=True, cache=True)
def _add_counts(counts, ids):
    for i in range(len(ids)):
        counts[ids[i]] += 1


def add_counts(counts: Tensor, ids: Tensor) -> None:
    """Add 1 to `counts` (N,) int32 at each of `ids`, in [0, N) and not checked; all on the host."""
    _add_counts(counts.numpy(), ids.numpy())
