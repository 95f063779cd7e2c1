"""Gather rows of a feature table: `out[i] = table[ids[i]]`.

On a GPU the table may stay in page-locked host memory. The GPU then reads the rows it needs over
the bus by itself: no CPU thread copies them, and no staging buffer holds them. The idea is
PyTorch-Direct's (Min et al., VLDB 2021, https://arxiv.org/abs/2103.03330).

Rows are copied as bytes, whatever their dtype, so all three ways agree bit for bit. How they are
copied is told in `gather_cpu` and `gather_gpu`.

Letters: N rows in the table, D columns, B rows asked for.
"""

import os

import torch
from torch import Tensor

from gcnzc.kernels import gather_cpu, gather_gpu

# with this in the environment ids are looked at on a GPU too, and each gather is waited for
CHECK = "GCNZC_CHECK_IDS"


def gather_reference(table: Tensor, ids: Tensor) -> Tensor:
    """What `gather` must equal, bit for bit."""
    return table[ids.to(table.device)].to(ids.device)


def gather_numba(
    table: Tensor, ids: Tensor, out: Tensor | None = None, *, threads: int | None = None
) -> Tensor:
    """`gather` on the host: all arguments lie there. See `gather`."""
    _check(table, ids)
    out = _out(table, ids, out)
    if out.numel() == 0 or not gather_cpu.gather_rows(table, ids, out, threads):
        _check_ids(table, ids)
    return out


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
    return gather_gpu.gather_rows(table, ids, out, checked=bool(os.environ.get(CHECK)))


def gather(
    table: Tensor, ids: Tensor, out: Tensor | None = None, *, threads: int | None = None
) -> Tensor:
    """Return `table[ids]` on the device of `ids`.

    Args:
        table: (N, D) of any dtype, each row contiguous; on the device of `ids`, or page-locked on
            the host. It may be memory-mapped, read-only, or a view of something wider.
        ids: (B,) int32 or int64 in [0, N). Checked on the host; on a GPU only if GCNZC_CHECK_IDS is
            set in the environment, and else an id outside reads foreign memory.
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
