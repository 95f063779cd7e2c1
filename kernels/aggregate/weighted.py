"""Weighted sums of the rows of in-neighbours (SpMM), per attention head.

`out[t, h] = sum of weight[e, h] * x[s, h] over the edges e = s -> t`. A row of `x` has F columns
for each head, or F columns that all heads share. The gradient of `x` is the same sum over the
transposed block; the gradient of a weight is the dot product of two rows (SDDMM).

Notation: S sources, T targets, E edges of the block, H heads, F columns per head. A suffix names
the axes: `weight_EH` is (E, H). The numba kernels get flattened arrays.
"""

from math import gcd
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numba import njit
from torch import Tensor
from torch.autograd.function import once_differentiable

from gcnzc.kernels.aggregate import (
    GRAIN_SIZE,
    check_block,
    check_device,
    empty_rows,
    first_target,
    make_rows_contiguous,
    prefetch_distance,
    prefetch_row,
    readable_rows,
    sum_dtype,
    vector_elements,
)
from gcnzc.kernels.aggregate.rows import add_rows, clear_row, dot, round_row
from gcnzc.kernels.half_precision import item_bytes, kind_of
from gcnzc.kernels.structure.transpose import transpose
from gcnzc.kernels.threads import parallel_for

EDGES = 8  # edges that a GPU program loads at once


BLOCK = 128  # columns of a GPU program


def weighted_spmm_reference(indptr: Tensor, indices: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """Reference for `weighted_spmm`, in the precision of `x`; differentiable."""
    num_targets = len(indptr) - 1
    target_of = torch.repeat_interleave(
        torch.arange(num_targets, device=x.device), indptr.diff(), output_size=len(indices)
    )
    rows = weight[:, :, None] * x[indices.long()]
    return x.new_zeros(num_targets, *rows.shape[1:]).index_add(0, target_of, rows)


@njit(nogil=True, cache=True)
def _weighted_spmm(
    indptr, indices, edges, weight_EH, x, row_bytes, head_bytes, out, out_heads, num_heads,
    num_cols, kind, out_kind, distance, begin, end,
):  # fmt: skip
    H, num_edges = num_heads, len(indices)
    is_half = item_bytes(out_kind) == 2
    weight_bytes = H * weight_EH.itemsize
    part_bytes = num_cols * item_bytes(kind)
    source_bytes = (H - 1) * head_bytes + part_bytes
    # bytes to the next head's sum; 0 if the heads are summed
    sum_step = num_cols * weight_EH.itemsize if out_heads > 1 else 0
    out_cols = out_heads * num_cols
    # float32 sums of a target, which are rounded to bfloat16 or float16 once
    sums = np.empty(out_cols if is_half else 0, dtype=weight_EH.dtype)
    for t in range(first_target(indptr, begin), first_target(indptr, end)):
        e, last = indptr[t], indptr[t + 1]
        for upcoming in range(e + distance, min(last + distance, num_edges)):
            prefetch_row(x + indices[upcoming] * row_bytes, source_bytes)
            if len(edges):
                weight = edges[upcoming] * weight_bytes
                prefetch_row(weight_EH.ctypes.data + weight, weight_bytes)
        out_row = out + t * out_cols * item_bytes(out_kind)
        sum_row = sums.ctypes.data if is_half else out_row
        clear_row(sum_row, out_cols, weight_EH.dtype.type(0))
        # four rows at a time, to read and write the sums once for them
        while e + 4 <= last:
            e0, e1, e2, e3 = e, e + 1, e + 2, e + 3
            x0, x1 = x + indices[e0] * row_bytes, x + indices[e1] * row_bytes
            x2, x3 = x + indices[e2] * row_bytes, x + indices[e3] * row_bytes
            if len(edges):
                e0, e1, e2, e3 = edges[e0], edges[e1], edges[e2], edges[e3]
            for h in range(H):
                head_offset = h * head_bytes
                w0, w1 = weight_EH[e0 * H + h], weight_EH[e1 * H + h]
                w2, w3 = weight_EH[e2 * H + h], weight_EH[e3 * H + h]
                rows = x0 + head_offset, x1 + head_offset, x2 + head_offset, x3 + head_offset
                add_rows(sum_row + h * sum_step, num_cols, rows, (w0, w1, w2, w3), kind)
            e += 4
        while e < last:
            x0 = x + indices[e] * row_bytes
            e0 = edges[e] if len(edges) else e
            for h in range(H):
                row = (x0 + h * head_bytes,)
                weights = (weight_EH[e0 * H + h],)
                add_rows(sum_row + h * sum_step, num_cols, row, weights, kind)
            e += 1
        round_row(out_row, sum_row, out_cols, out_kind)


@njit(nogil=True, cache=True)
def _sddmm(
    indptr, indices, x, row_bytes, head_bytes, y, out_EH, num_heads, num_cols, kind, distance,
    begin, end,
):  # fmt: skip
    H, num_edges = num_heads, len(indices)
    part_bytes = num_cols * item_bytes(kind)
    source_bytes = (H - 1) * head_bytes + part_bytes
    zero = out_EH.dtype.type(0)
    for t in range(first_target(indptr, begin), first_target(indptr, end)):
        first, last = indptr[t], indptr[t + 1]
        for upcoming in range(first + distance, min(last + distance, num_edges)):
            prefetch_row(x + indices[upcoming] * row_bytes, source_bytes)
        for e in range(first, last):
            row, other = x + indices[e] * row_bytes, y + t * H * part_bytes
            for h in range(H):
                out_EH[e * H + h] = dot(row, other, num_cols, zero, kind)
                row += head_bytes
                other += part_bytes


def weighted_spmm_numba(
    indptr: Tensor,
    indices: Tensor,
    edges: Tensor | None,
    weight_EH: Tensor,
    x: Tensor,
    out_heads: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `weighted_spmm` on the CPU, without checks and without a gradient.

    Args:
        indptr: (T + 1,).
        indices: (E,) rows of `x`.
        edges: (E,) the row of `weight_EH` of each edge; edge e has row e if None.
        weight_EH: (E, H) contiguous, float64 if `x` is, otherwise float32.
        x: (S, H, F) of a dtype in `KINDS`, or (S, 1, F) shared by all heads.
        out_heads: H, or 1 to sum over the heads.
        dtype: of the result: that of `x`, or that of `weight_EH`, which is not rounded. Default:
            that of `x`.

    Returns:
        (T, out_heads, F).
    """
    num_targets, num_heads, num_cols = len(indptr) - 1, weight_EH.shape[1], x.shape[2]
    x = make_rows_contiguous(x)
    out = empty_rows((num_targets, out_heads, num_cols), dtype or x.dtype)
    parallel_for(
        _weighted_spmm,
        num_targets + len(indices),
        indptr.numpy(),
        indices.numpy(),
        (indptr[:0] if edges is None else edges).numpy(),
        weight_EH.view(-1).numpy(),
        x.data_ptr(),
        x.stride(0) * x.itemsize,
        x.stride(1) * x.itemsize if x.shape[1] > 1 else 0,
        out.data_ptr(),
        out_heads,
        num_heads,
        num_cols,
        kind_of(x.dtype),
        kind_of(out.dtype),
        prefetch_distance(x.shape[1] * num_cols * x.itemsize),
        grain_size=GRAIN_SIZE,
    )
    return out


def sddmm_numba(indptr: Tensor, indices: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the (E, H) dot products of `x[s, h]` and `y[t, h]` for each edge (SDDMM).

    Args:
        indptr: (T + 1,).
        indices: (E,) rows of `x`.
        x: (S, H, F) of a dtype in `KINDS`, or (S, 1, F) shared by all heads.
        y: (T, H, F) of the same dtype, contiguous.

    The products are float64 if `x` is, otherwise float32.
    """
    num_targets, num_heads, num_cols = y.shape
    x = make_rows_contiguous(x)
    out_EH = empty_rows((len(indices), num_heads), sum_dtype(x)[0])
    parallel_for(
        _sddmm,
        num_targets + len(indices),
        indptr.numpy(),
        indices.numpy(),
        x.data_ptr(),
        x.stride(0) * x.itemsize,
        x.stride(1) * x.itemsize if x.shape[1] > 1 else 0,
        y.data_ptr(),
        out_EH.view(-1).numpy(),
        num_heads,
        num_cols,
        kind_of(x.dtype),
        prefetch_distance(x.shape[1] * num_cols * x.itemsize),
        grain_size=GRAIN_SIZE,
    )
    return out_EH


# not specialized for the alignment of a block's arrays: it may differ between minibatches, as they
# may be views, and each alignment would be compiled separately
@triton.jit(do_not_specialize=["indptr", "indices", "edges"])
def _weighted_spmm_triton(
    indptr, indices, edges, weight_EH, x, out, num_heads,
    num_cols, row_stride, head_stride,  # all three in vectors of VECTOR elements
    out_heads, HAS_EDGES: tl.constexpr, SUM: tl.constexpr, EDGES: tl.constexpr,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    out_head = tl.program_id(1)
    cols = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    # as products with VECTOR, so that Triton can infer that rows consist of whole vectors
    col_mask = cols < num_cols * VECTOR
    first = tl.load(indptr + t).to(tl.int64)
    last = tl.load(indptr + t + 1).to(tl.int64)
    sum_EF = tl.zeros([EDGES, BLOCK], SUM)
    for begin in range(first, last, EDGES):
        edge = begin + tl.arange(0, EDGES)
        edge_mask = edge < last
        mask = edge_mask[:, None] & col_mask[None, :]
        # int64 before the multiply: 2**31 elements is only 8 GB of float32
        s = tl.load(indices + edge, mask=edge_mask, other=0).to(tl.int64)
        if HAS_EDGES:
            edge = tl.load(edges + edge, mask=edge_mask, other=0).to(tl.int64)
        # all heads if they are summed, otherwise the head of this program
        for h in range(out_head, num_heads, out_heads):
            weight = tl.load(weight_EH + edge * num_heads + h, mask=edge_mask, other=0.0)
            row_offsets = (s * row_stride + h * head_stride) * VECTOR
            offsets = row_offsets[:, None] + cols[None, :]
            sum_EF += weight[:, None] * tl.load(x + offsets, mask=mask, other=0.0).to(SUM)
    offsets = (t * out_heads + out_head) * num_cols * VECTOR + cols
    tl.store(out + offsets, tl.sum(sum_EF, 0), mask=col_mask)


# not specialized for the alignment of a block's arrays: it may differ between minibatches, as they
# may be views, and each alignment would be compiled separately
@triton.jit(do_not_specialize=["indptr", "indices"])
def _sddmm_triton(
    indptr, indices, x, y, out_EH, num_heads,
    num_cols, row_stride, head_stride,  # all three in vectors of VECTOR elements
    SUM: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    first = tl.load(indptr + t).to(tl.int64)
    last = tl.load(indptr + t + 1).to(tl.int64)
    for begin in range(first, last, EDGES):
        edge = begin + tl.arange(0, EDGES)
        edge_mask = edge < last
        s = tl.load(indices + edge, mask=edge_mask, other=0).to(tl.int64)
        sum_E = tl.zeros([EDGES], SUM)
        row_offsets = (s * row_stride + h * head_stride) * VECTOR
        y_begin = (t * num_heads + h) * num_cols * VECTOR
        for start in range(0, num_cols * VECTOR, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            col_mask = cols < num_cols * VECTOR
            mask = edge_mask[:, None] & col_mask[None, :]
            x_EF = tl.load(x + row_offsets[:, None] + cols[None, :], mask=mask, other=0.0).to(SUM)
            y_F = tl.load(y + y_begin + cols, mask=col_mask, other=0.0).to(SUM)
            sum_E += tl.sum(x_EF * y_F[None, :], 1)
        tl.store(out_EH + edge * num_heads + h, sum_E, mask=edge_mask)


def weighted_spmm_triton(
    indptr: Tensor,
    indices: Tensor,
    edges: Tensor | None,
    weight_EH: Tensor,
    x: Tensor,
    out_heads: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`weighted_spmm_numba` on a GPU; one program per target, head and block of columns."""
    num_targets, num_heads, num_cols = len(indptr) - 1, weight_EH.shape[1], x.shape[2]
    x = make_rows_contiguous(x)
    out = x.new_empty(num_targets, out_heads, num_cols, dtype=dtype or x.dtype)
    head_stride = x.stride(1) if x.shape[1] > 1 else 0
    grid = (num_targets, out_heads, triton.cdiv(num_cols, BLOCK))
    vector = vector_elements(x, num_cols)
    sizes = num_cols // vector, x.stride(0) // vector, head_stride // vector
    with torch.cuda.device_of(out):
        _weighted_spmm_triton[grid](
            indptr, indices, indptr if edges is None else edges, weight_EH, x, out, num_heads,
            *sizes, out_heads, edges is not None, sum_dtype(x)[1], EDGES, BLOCK, vector,
        )  # fmt: skip
    return out


def sddmm_triton(indptr: Tensor, indices: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """`sddmm_numba` on a GPU; one program per target and head."""
    num_targets, num_heads, num_cols = y.shape
    x = make_rows_contiguous(x)
    dtype, triton_dtype = sum_dtype(x)
    out_EH = torch.empty(len(indices), num_heads, dtype=dtype, device=x.device)
    head_stride = x.stride(1) if x.shape[1] > 1 else 0
    vector = gcd(vector_elements(x, num_cols), vector_elements(y, num_cols))
    sizes = num_cols // vector, x.stride(0) // vector, head_stride // vector
    with torch.cuda.device_of(out_EH):
        _sddmm_triton[(num_targets, num_heads)](
            indptr, indices, x, y, out_EH, num_heads, *sizes,
            triton_dtype, EDGES, BLOCK, vector,
        )  # fmt: skip
    return out_EH


class _WeightedSpmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indptr: Tensor, indices: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        rows = readable_rows(x)
        weight_EH = weight.to(sum_dtype(x)[0]).contiguous()
        ctx.save_for_backward(indptr, indices, weight_EH, rows)
        ctx.dtypes = weight.dtype, x.dtype
        run = weighted_spmm_triton if x.is_cuda else weighted_spmm_numba
        return run(indptr, indices, None, weight_EH, rows, weight.shape[1]).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        indptr, indices, weight_EH, x = ctx.saved_tensors
        weight_dtype, x_dtype = ctx.dtypes
        grad = grad.to(x.dtype).contiguous()
        grad_weight = grad_x = None
        if ctx.needs_input_grad[2]:
            sddmm = sddmm_triton if x.is_cuda else sddmm_numba
            grad_weight = sddmm(indptr, indices, x, grad).to(weight_dtype)
        if ctx.needs_input_grad[3]:
            block = transpose(indptr, indices, len(x))
            run = weighted_spmm_triton if x.is_cuda else weighted_spmm_numba
            grad_x = run(block.indptr, block.targets, block.edges, weight_EH, grad, x.shape[1])
            grad_x = grad_x.to(x_dtype)
        return None, None, grad_weight, grad_x


def weighted_spmm(indptr: Tensor, indices: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """Sum the rows of each target's in-neighbours, weighted per edge and head.

    Differentiable once, in `weight` and `x`. The result does not depend on the number of threads.
    bfloat16 and float16 inputs are accumulated in float32 and rounded once; float32 weights are not
    rounded.

    Args:
        indptr: (T + 1,) int32 or int64, the CSC pointers: the first edge of each target.
        indices: (E,) int32 or int64 sources in [0, S). They are not checked: an id out of range
            reads out of bounds.
        weight: (E, H) floating point.
        x: (S, H, F) floating point on the same device, or (S, 1, F): rows shared by all heads,
            which are then stored once.

    Returns:
        (T, H, F) with the dtype of `x`; zeros for a target without edges.

    Raises:
        ValueError: a shape, dtype or device does not match.
    """
    check_block("weighted_spmm", indptr, indices, x)
    if weight.dim() != 2 or len(weight) != len(indices):
        raise ValueError(
            f"weighted_spmm: weight has shape {tuple(weight.shape)}, not ({len(indices)}, heads)"
        )
    check_device("weighted_spmm", "weight", weight, x.device)
    if x.dim() != 3 or x.shape[1] not in (1, weight.shape[1]):
        raise ValueError(
            f"weighted_spmm: x has shape {tuple(x.shape)}; for {weight.shape[1]} heads it must be "
            f"(sources, {weight.shape[1]} or 1, columns)"
        )
    # indptr is always int64, so that kernels are not compiled a second time for int32
    return _WeightedSpmm.apply(indptr.long(), indices, weight, x)
