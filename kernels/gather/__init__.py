"""Gather rows of a feature table: `out[i] = table[ids[i]]`.

On a GPU the table may stay in page-locked host memory. The GPU then reads the rows it needs over
the bus by itself: no CPU thread copies them, and no staging buffer holds them. The idea is
PyTorch-Direct's (Min et al., VLDB 2021, https://arxiv.org/abs/2103.03330).

Rows are copied as bytes, whatever their dtype, so all three ways agree bit for bit. How they are
copied is told in `gather_cpu` and `gather_gpu`. Rows of codes (see `quantize`) are multiplied by
their scales on the way, so that it is codes that cross the bus: `out[i] = table[ids[i]] * scale`.

Letters: N rows in the table, D columns, B rows asked for.
"""

import os

import torch
from torch import Tensor

from gcnzc.kernels.gather import cpu, gpu
from gcnzc.kernels.gather.gpu import KernelConfig
from gcnzc.kernels.gather.overlap import check_apart
from gcnzc.kernels.gather.quantize import LARGEST, dequantize_reference

# with this in the environment ids are looked at on a GPU too, and each gather is waited for
CHECK = "GCNZC_CHECK_IDS"


# what a gather can make of codes
FROM_CODES = (torch.float32, torch.float16, torch.bfloat16)


def gather_reference(
    table: Tensor, ids: Tensor, scales: Tensor | None = None, scale_columns: int | None = None
) -> Tensor:
    """What `gather` must equal, bit for bit."""
    # as bytes: torch 2.4 does not index codes of 8 bits
    plain = table.view(torch.uint8) if table.element_size() == 1 else table
    rows = plain[ids.to(table.device)].to(ids.device).view(table.dtype)
    if scales is None:
        return rows
    of_ids = scales if scale_columns else scales[ids.to(scales.device)]
    return dequantize_reference(rows, of_ids.to(ids.device), scale_columns)


def gather_numba(
    table: Tensor,
    ids: Tensor,
    out: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    scale_columns: int | None = None,
    threads: int | None = None,
) -> Tensor:
    """`gather` on the host: all arguments lie there. See `gather`."""
    _check(table, ids)
    _check_scales(table, ids, scales, scale_columns)
    out = _out(table, ids, out, scales)
    if out.numel() == 0:
        _check_ids(table, ids)
    elif scales is None:
        if not cpu.gather_rows(table, ids, out, threads):
            _check_ids(table, ids)
    else:
        exact = out if out.dtype == torch.float32 else torch.empty(out.shape)
        if table.shape[0] == 0 or not cpu.dequantize_rows(
            table, scales, scale_columns, ids, exact, threads
        ):
            _check_ids(table, ids)
        if exact is not out:
            out.copy_(exact)
    return out


def gather_triton(
    table: Tensor,
    ids: Tensor,
    out: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    scale_columns: int | None = None,
    way: KernelConfig | None = None,
) -> Tensor:
    """`gather` on a GPU: `ids`, `out` and `scales` lie there, the table there or page-locked.

    Under Triton's interpreter all may lie on the host. See `gather`.
    """
    _check(table, ids)
    _check_scales(table, ids, scales, scale_columns)
    if table.device != ids.device and not table.is_pinned():
        raise ValueError(
            f"gather: a table on {table.device} cannot be read from {ids.device}, because its "
            "memory is not page-locked\n\n"
            "hint: open it with gcnzc.pinned(rows), or move it with .to()"
        )
    out = _out(table, ids, out, scales)
    checked = bool(os.environ.get(CHECK))
    return gpu.gather_rows(
        table, ids, out, scales=scales, scale_columns=scale_columns, way=way, checked=checked
    )


def gather(
    table: Tensor,
    ids: Tensor,
    out: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    scale_columns: int | None = None,
    threads: int | None = None,
    way: KernelConfig | None = None,
) -> Tensor:
    """Return `table[ids]` on the device of `ids`, or what its codes stand for.

    Args:
        table: (N, D) of any dtype, each row contiguous; on the device of `ids`, or page-locked on
            the host. It may be memory-mapped, read-only, or a view of something wider.
        ids: (B,) int32 or int64 in [0, N). Checked on the host; on a GPU only if GCNZC_CHECK_IDS is
            set in the environment, and else an id outside reads foreign memory.
        out: (B, D) to write into, of the dtype of `table`, each row contiguous, on the device of
            `ids`; allocated if None. Fresh memory costs more than the gather: keep it. With
            `scales` it is float32 if None, and float16 and bfloat16 are taken too, to which
            products are rounded.
        scales: float32, contiguous, on the device of `ids`; `table` then holds int8, float8_e4m3fn
            or float8_e5m2. (N,), one for each row, or (ceil(D / scale_columns),).
        scale_columns: how many columns share a scale, for all rows; None if it is each row's own.
        threads: how many share the work on the host; `torch.get_num_threads()` if None.
        way: how a GPU's threads share the work, see `gcnzc.kernels.gather.gpu.KernelConfig`.

    Returns:
        (B, D), which is `out` if that was given. On a GPU it is ready for work queued later on the
        current stream; other streams must wait for it.

    Raises:
        ValueError: shapes or dtypes do not fit, `table` is where the device of `ids` cannot read
            it, or `out` shares memory with what is read.
        IndexError: an id is outside [0, N); `out` may then be half written.
    """
    if ids.device.type == "cpu":
        return gather_numba(
            table, ids, out, scales=scales, scale_columns=scale_columns, threads=threads
        )
    return gather_triton(table, ids, out, scales=scales, scale_columns=scale_columns, way=way)


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


def _check_scales(
    table: Tensor, ids: Tensor, scales: Tensor | None, scale_columns: int | None
) -> None:
    if scales is None:
        return
    (num_rows, num_columns), per = table.shape, scale_columns
    count = num_rows if per is None else -(-num_columns // per)
    fits = scales.dtype == torch.float32 and tuple(scales.shape) == (count,)
    if table.dtype not in LARGEST or not fits or not scales.is_contiguous():
        raise ValueError(
            f"gather: {table.dtype} of shape {tuple(table.shape)} cannot be scaled by "
            f"{scales.dtype} of shape {tuple(scales.shape)}, with scale_columns {per}\n\n"
            "hint: int8 or float8 codes with one float32 for each row, or for each block of columns"
        )
    if scales.device != ids.device:
        raise ValueError(
            f"gather: scales on {scales.device} for ids on {ids.device}\n\n"
            "hint: move the scales with .to(ids.device); FeatureTable does so by itself"
        )


def _out(table: Tensor, ids: Tensor, out: Tensor | None, scales: Tensor | None) -> Tensor:
    shape = (ids.shape[0], table.shape[1])
    dtypes = (table.dtype,) if scales is None else FROM_CODES
    if out is None:
        return torch.empty(shape, dtype=dtypes[0], device=ids.device)
    like = tuple(out.shape) == shape and out.dtype in dtypes and out.device == ids.device
    apart = shape[0] <= 1 or out.stride(0) >= shape[1]
    if not (like and apart and (shape[1] <= 1 or out.stride(1) == 1)):
        raise ValueError(
            f"gather: out must be {shape} {dtypes[0]} on {ids.device} with contiguous rows, "
            f"not {tuple(out.shape)} {out.dtype} on {out.device} with strides {out.stride()}\n\n"
            "hint: leave it away, or make it with torch.empty"
        )
    check_apart("gather", out, table=table, ids=ids, scales=scales)
    return out


def _check_ids(table: Tensor, ids: Tensor) -> None:
    outside = ids[(ids < 0) | (ids >= table.shape[0])]
    if len(outside) > 0:
        raise IndexError(
            f"gather: id {int(outside[0])} is not in a table of {table.shape[0]} rows "
            f"({len(outside)} of {len(ids)} ids are outside)\n\n"
            "hint: is the table that of another graph?"
        )
