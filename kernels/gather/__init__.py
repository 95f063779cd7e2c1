"""Gather rows of a feature table: `out[i] = table[ids[i]]`.

On a GPU the table may stay in page-locked host memory. The GPU then reads the rows directly over
the PCIe bus (zero-copy): no CPU thread copies them, and there is no staging buffer. The idea is
from PyTorch-Direct (Min et al., VLDB 2021, https://arxiv.org/abs/2103.03330).

Rows are copied as bytes, whatever their dtype, so the reference and the implementations in `cpu`
and `gpu` give the same bits. Quantized rows (see `quantize`) are dequantized after they were read,
so that codes are transferred over the bus: `out[i] = table[ids[i]] * scale`.

Notation: N rows in the table, D columns, B gathered rows.
"""

import os

import torch
from torch import Tensor

from gcnzc.kernels.gather import cpu, gpu
from gcnzc.kernels.gather.gpu import KernelConfig
from gcnzc.kernels.gather.overlap import check_no_overlap
from gcnzc.kernels.gather.quantize import MAX_CODE, dequantize_reference

# environment variable: check ids on a GPU too, which synchronizes each gather
CHECK = "GCNZC_CHECK_IDS"


# dtypes to which codes can be dequantized
DEQUANTIZED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def gather_reference(
    table: Tensor, ids: Tensor, scales: Tensor | None = None, scale_columns: int | None = None
) -> Tensor:
    """Reference for `gather`, which must match it bit for bit."""
    # as bytes, since torch 2.4 cannot index float8 tensors
    stored = table.view(torch.uint8) if table.element_size() == 1 else table
    rows = stored[ids.to(table.device)].to(ids.device).view(table.dtype)
    if scales is None:
        return rows
    row_scales = scales if scale_columns else scales[ids.to(scales.device)]
    return dequantize_reference(rows, row_scales.to(ids.device), scale_columns)


def gather_numba(
    table: Tensor,
    ids: Tensor,
    out: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    scale_columns: int | None = None,
    threads: int | None = None,
) -> Tensor:
    """`gather` with all tensors on the host."""
    _check(table, ids)
    _check_scales(table, ids, scales, scale_columns)
    out = _out(table, ids, out, scales)
    if out.numel() == 0:
        _check_ids(table, ids)
    elif scales is None:
        if not cpu.gather_rows(table, ids, out, threads):
            _check_ids(table, ids)
    else:
        products = out if out.dtype == torch.float32 else torch.empty(out.shape)
        if table.shape[0] == 0 or not cpu.dequantize_rows(
            table, scales, scale_columns, ids, products, threads
        ):
            _check_ids(table, ids)
        if products is not out:
            out.copy_(products)
    return out


def gather_triton(
    table: Tensor,
    ids: Tensor,
    out: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    scale_columns: int | None = None,
    config: KernelConfig | None = None,
) -> Tensor:
    """`gather` with `ids`, `out` and `scales` on a GPU, and the table there or page-locked.

    Under Triton's interpreter all tensors may be on the host.
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
        table, ids, out, scales=scales, scale_columns=scale_columns, config=config, checked=checked
    )


def gather(
    table: Tensor,
    ids: Tensor,
    out: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    scale_columns: int | None = None,
    threads: int | None = None,
    config: KernelConfig | None = None,
) -> Tensor:
    """Return `table[ids]` on the device of `ids`, dequantized if `scales` are given.

    Args:
        table: (N, D) of any dtype, each row contiguous; on the device of `ids`, or page-locked on
            the host. It may be memory-mapped, read-only, or a view of a wider tensor.
        ids: (B,) int32 or int64 in [0, N). They are checked on the host, and on a GPU if the
            environment variable GCNZC_CHECK_IDS is set; otherwise an id out of range reads out of
            bounds.
        out: (B, D) with the dtype of `table`, each row contiguous, on the device of `ids`; written.
            A new tensor if None; reuse one where possible, since page faults of new memory take
            longer than the gather. With `scales`, it is float32, float16 or bfloat16, to which
            products are rounded; float32 if None.
        scales: float32, contiguous, on the device of `ids`, for a table of int8, float8_e4m3fn or
            float8_e5m2 codes: (N,), one for each row, or (ceil(D / scale_columns),).
        scale_columns: number of adjacent columns that share a scale; None for a scale per row.
        threads: number of threads on the host; `torch.get_num_threads()` if None.
        config: configuration of the GPU kernel, see `gcnzc.kernels.gather.gpu.KernelConfig`.

    Returns:
        (B, D), which is `out` if it was given. On a GPU it is computed on the current stream; other
        streams must synchronize with it.

    Raises:
        ValueError: a shape or dtype does not match, the device of `ids` cannot read `table`, or
            `out` overlaps a tensor that is read.
        IndexError: ids are checked, and one is outside [0, N); `out` may then be partly written.
    """
    if ids.device.type == "cpu":
        return gather_numba(
            table, ids, out, scales=scales, scale_columns=scale_columns, threads=threads
        )
    return gather_triton(table, ids, out, scales=scales, scale_columns=scale_columns, config=config)


def _check(table: Tensor, ids: Tensor) -> None:
    # NumPy's strides of an empty array are 0
    if table.ndim != 2 or (table.numel() > 0 and table.shape[1] > 1 and table.stride(1) != 1):
        raise ValueError(
            f"gather: rows must be contiguous in a table of two dimensions, not of shape "
            f"{tuple(table.shape)} and strides {table.stride()}"
        )
    if ids.ndim != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"gather: ids must be one row of int32 or int64, not {ids.dtype} of shape "
            f"{tuple(ids.shape)}"
        )
    if ids.device.type == "cpu" and table.device.type != "cpu":
        raise ValueError(f"gather: ids on {ids.device} cannot choose rows on {table.device}")


def _check_scales(
    table: Tensor, ids: Tensor, scales: Tensor | None, scale_columns: int | None
) -> None:
    if scales is None:
        return
    num_rows, num_columns = table.shape
    count = num_rows if scale_columns is None else -(-num_columns // scale_columns)
    fits = scales.dtype == torch.float32 and tuple(scales.shape) == (count,)
    if table.dtype not in MAX_CODE or not fits or not scales.is_contiguous():
        raise ValueError(
            f"gather: {table.dtype} of shape {tuple(table.shape)} cannot be scaled by "
            f"{scales.dtype} of shape {tuple(scales.shape)}, with scale_columns {scale_columns}"
        )
    if scales.device != ids.device:
        raise ValueError(f"gather: scales on {scales.device} for ids on {ids.device}")


def _out(table: Tensor, ids: Tensor, out: Tensor | None, scales: Tensor | None) -> Tensor:
    shape = (ids.shape[0], table.shape[1])
    dtypes = (table.dtype,) if scales is None else DEQUANTIZED_DTYPES
    if out is None:
        return torch.empty(shape, dtype=dtypes[0], device=ids.device)
    matches = tuple(out.shape) == shape and out.dtype in dtypes and out.device == ids.device
    has_disjoint_rows = shape[0] <= 1 or out.stride(0) >= shape[1]
    if not (matches and has_disjoint_rows and (shape[1] <= 1 or out.stride(1) == 1)):
        raise ValueError(
            f"gather: out must be {shape} {dtypes[0]} on {ids.device} with contiguous rows, "
            f"not {tuple(out.shape)} {out.dtype} on {out.device} with strides {out.stride()}"
        )
    check_no_overlap("gather", out, table=table, ids=ids, scales=scales)
    return out


def _check_ids(table: Tensor, ids: Tensor) -> None:
    outside = ids[(ids < 0) | (ids >= table.shape[0])]
    if len(outside) > 0:
        raise IndexError(
            f"gather: id {int(outside[0])} is not in a table of {table.shape[0]} rows "
            f"({len(outside)} of {len(ids)} ids are outside)"
        )
