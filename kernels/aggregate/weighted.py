"""Weighted sums of the rows of in-neighbours, head by head.

`out[t, h] = sum of weight[e, h] * x[s, h] over the edges e = s -> t`. The rows may have a part for
each head, or one part that all heads share. The gradient of `x` is the same sum over the block
turned round; that of a weight is the product of two rows.

Letters: S sources, T targets, E edges of the block, H heads, F columns a head.
"""

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from numba import njit
from torch import Tensor
from torch.autograd.function import once_differentiable

from gcnzc.kernels.aggregate import (
    GRAIN_SIZE,
    by_rows,
    check_block,
    empty_rows,
    first_target,
    prefetch_row,
    rows_ahead,
    sum_dtype,
    vector_elements,
)
from gcnzc.kernels.aggregate.rows import add_rows, product
from gcnzc.kernels.structure.transpose import transpose
from gcnzc.kernels.threads import parallel_for

EDGES = 8  # edges a GPU program reads at once


BLOCK = 128  # columns of a GPU program


def weighted_spmm_reference(indptr: Tensor, indices: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """What `weighted_spmm` computes, in the precision of `x`; differentiable."""
    num_targets = len(indptr) - 1
    target_of = torch.repeat_interleave(
        torch.arange(num_targets, device=x.device), indptr.diff(), output_size=len(indices)
    )
    rows = weight[:, :, None] * x[indices.long()]
    return x.new_zeros(num_targets, *rows.shape[1:]).index_add(0, target_of, rows)


@njit(nogil=True, cache=True)
def _weighted_spmm(
    indptr, indices, edges, weight_E, x, row_bytes, head_bytes, out, out_heads, num_heads, num_cols,
    ahead, begin, end,
):  # fmt: skip
    H, num_edges = num_heads, len(indices)
    part_bytes, weight_bytes = num_cols * out.itemsize, H * out.itemsize
    wanted_bytes = (H - 1) * head_bytes + part_bytes
    # how far the next head's sum is: nowhere if they are added up
    out_step = part_bytes if out_heads > 1 else 0
    for t in range(first_target(indptr, begin), first_target(indptr, end)):
        e, last = indptr[t], indptr[t + 1]
        for soon in range(e + ahead, min(last + ahead, num_edges)):
            prefetch_row(x + indices[soon] * row_bytes, wanted_bytes)
            if len(edges):
                weight = edges[soon] * weight_bytes
                prefetch_row(weight_E.ctypes.data + weight, weight_bytes)
        out[t * out_heads * num_cols : (t + 1) * out_heads * num_cols] = 0
        into = out.ctypes.data + t * out_heads * part_bytes
        # four rows of x for each reading and writing of out
        while e + 4 <= last:
            e0, e1, e2, e3 = e, e + 1, e + 2, e + 3
            x0, x1 = x + indices[e0] * row_bytes, x + indices[e1] * row_bytes
            x2, x3 = x + indices[e2] * row_bytes, x + indices[e3] * row_bytes
            if len(edges):
                e0, e1, e2, e3 = edges[e0], edges[e1], edges[e2], edges[e3]
            for h in range(H):
                at = h * head_bytes
                w0, w1 = weight_E[e0 * H + h], weight_E[e1 * H + h]
                w2, w3 = weight_E[e2 * H + h], weight_E[e3 * H + h]
                rows = x0 + at, x1 + at, x2 + at, x3 + at
                add_rows(into + h * out_step, num_cols, rows, (w0, w1, w2, w3))
            e += 4
        while e < last:
            x0 = x + indices[e] * row_bytes
            e0 = edges[e] if len(edges) else e
            for h in range(H):
                row = (x0 + h * head_bytes,)
                add_rows(into + h * out_step, num_cols, row, (weight_E[e0 * H + h],))
            e += 1


@njit(nogil=True, cache=True)
def _products(
    indptr, indices, x, row_bytes, head_bytes, y, out_E, num_heads, num_cols, ahead, begin, end
):  # fmt: skip
    H, num_edges = num_heads, len(indices)
    part_bytes = num_cols * out_E.itemsize
    wanted_bytes = (H - 1) * head_bytes + part_bytes
    zero = out_E.dtype.type(0)
    for t in range(first_target(indptr, begin), first_target(indptr, end)):
        first, last = indptr[t], indptr[t + 1]
        for soon in range(first + ahead, min(last + ahead, num_edges)):
            prefetch_row(x + indices[soon] * row_bytes, wanted_bytes)
        for e in range(first, last):
            row, other = x + indices[e] * row_bytes, y + t * H * part_bytes
            for h in range(H):
                out_E[e * H + h] = product(row, other, num_cols, zero)
                row += head_bytes
                other += part_bytes


def weighted_spmm_numba(
    indptr: Tensor,
    indices: Tensor,
    edges: Tensor | None,
    weight_E: Tensor,
    x: Tensor,
    out_heads: int,
) -> Tensor:
    """Weigh on the CPU.

    Args:
        indptr: (T + 1,).
        indices: (E,) rows of `x`.
        edges: (E,) rows of `weight_E`; in order if None.
        weight_E: (E, H) float32 or float64, contiguous.
        x: (S, H, F) of the same dtype, or (S, 1, F) shared by all heads.
        out_heads: H, or 1 to add the heads up.

    Returns:
        (T, out_heads, F).
    """
    num_targets, num_heads, num_cols = len(indptr) - 1, weight_E.shape[1], x.shape[2]
    x = by_rows(x)
    out = empty_rows((num_targets, out_heads, num_cols), x.dtype)
    parallel_for(
        _weighted_spmm,
        num_targets + len(indices),
        indptr.numpy(),
        indices.numpy(),
        (indptr[:0] if edges is None else edges).numpy(),
        weight_E.view(-1).numpy(),
        x.data_ptr(),
        x.stride(0) * x.itemsize,
        x.stride(1) * x.itemsize if x.shape[1] > 1 else 0,
        out.view(-1).numpy(),
        out_heads,
        num_heads,
        num_cols,
        rows_ahead(x.shape[1] * num_cols * x.itemsize),
        grain_size=GRAIN_SIZE,
    )
    return out


def products_numba(indptr: Tensor, indices: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return (E, H) `sum of x[s, h] * y[t, h]` for each edge; `y` is (T, H, F) and contiguous."""
    num_targets, num_heads, num_cols = y.shape
    x = by_rows(x)
    out_E = empty_rows((len(indices), num_heads), x.dtype)
    parallel_for(
        _products,
        num_targets + len(indices),
        indptr.numpy(),
        indices.numpy(),
        x.data_ptr(),
        x.stride(0) * x.itemsize,
        x.stride(1) * x.itemsize if x.shape[1] > 1 else 0,
        y.data_ptr(),
        out_E.view(-1).numpy(),
        num_heads,
        num_cols,
        rows_ahead(x.shape[1] * num_cols * x.itemsize),
        grain_size=GRAIN_SIZE,
    )
    return out_E


# blocks are views of one buffer, whose alignments differ between minibatches
@triton.jit(do_not_specialize=["indptr", "indices", "edges"])
def _weighted_spmm_triton(
    indptr, indices, edges, weight_E, x, out, num_heads,
    num_cols, row_stride, head_stride,  # all three in vectors of VECTOR elements
    out_heads, HAS_EDGES: tl.constexpr, SUM: tl.constexpr, EDGES: tl.constexpr,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    out_head = tl.program_id(1)
    cols = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    # products with VECTOR, from which the compiler knows that rows begin and end with whole vectors
    inside = cols < num_cols * VECTOR
    first = tl.load(indptr + t).to(tl.int64)
    last = tl.load(indptr + t + 1).to(tl.int64)
    sum_EF = tl.zeros([EDGES, BLOCK], SUM)
    for begin in range(first, last, EDGES):
        edge = begin + tl.arange(0, EDGES)
        there = edge < last
        mask = there[:, None] & inside[None, :]
        # int64 before the multiply: 2**31 elements is only 8 GB of float32
        s = tl.load(indices + edge, mask=there, other=0).to(tl.int64)
        if HAS_EDGES:
            edge = tl.load(edges + edge, mask=there, other=0).to(tl.int64)
        # heads that are added up, or the one of this program
        for h in range(out_head, num_heads, out_heads):
            weight = tl.load(weight_E + edge * num_heads + h, mask=there, other=0.0)
            begins = (s * row_stride + h * head_stride) * VECTOR
            at = begins[:, None] + cols[None, :]
            sum_EF += weight[:, None] * tl.load(x + at, mask=mask, other=0.0)
    at = (t * out_heads + out_head) * num_cols * VECTOR + cols
    tl.store(out + at, tl.sum(sum_EF, 0), mask=inside)


# blocks are views of one buffer, whose alignments differ between minibatches
@triton.jit(do_not_specialize=["indptr", "indices"])
def _products_triton(
    indptr, indices, x, y, out_E, num_heads,
    num_cols, row_stride, head_stride,  # all three in vectors of VECTOR elements
    SUM: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    first = tl.load(indptr + t).to(tl.int64)
    last = tl.load(indptr + t + 1).to(tl.int64)
    for begin in range(first, last, EDGES):
        edge = begin + tl.arange(0, EDGES)
        there = edge < last
        s = tl.load(indices + edge, mask=there, other=0).to(tl.int64)
        sum_E = tl.zeros([EDGES], SUM)
        begins = (s * row_stride + h * head_stride) * VECTOR
        y_begin = (t * num_heads + h) * num_cols * VECTOR
        for start in range(0, num_cols * VECTOR, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            inside = cols < num_cols * VECTOR
            mask = there[:, None] & inside[None, :]
            x_EF = tl.load(x + begins[:, None] + cols[None, :], mask=mask, other=0.0)
            y_F = tl.load(y + y_begin + cols, mask=inside, other=0.0)
            sum_E += tl.sum(x_EF * y_F[None, :], 1)
        tl.store(out_E + edge * num_heads + h, sum_E, mask=there)


def weighted_spmm_triton(
    indptr: Tensor,
    indices: Tensor,
    edges: Tensor | None,
    weight_E: Tensor,
    x: Tensor,
    out_heads: int,
) -> Tensor:
    """`weighted_spmm_numba` on a GPU: one program per target, head and block of columns."""
    num_targets, num_heads, num_cols = len(indptr) - 1, weight_E.shape[1], x.shape[2]
    x = by_rows(x)
    out = x.new_empty(num_targets, out_heads, num_cols)
    head_stride = x.stride(1) if x.shape[1] > 1 else 0
    grid = (num_targets, out_heads, triton.cdiv(num_cols, BLOCK))
    vector = vector_elements(x, num_cols)
    sizes = num_cols // vector, x.stride(0) // vector, head_stride // vector
    with torch.cuda.device_of(out):
        _weighted_spmm_triton[grid](
            indptr, indices, indptr if edges is None else edges, weight_E, x, out, num_heads,
            *sizes, out_heads, edges is not None, sum_dtype(x)[1], EDGES, BLOCK, vector,
        )  # fmt: skip
    return out


def products_triton(indptr: Tensor, indices: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """`products_numba` on a GPU: one program per target and head."""
    num_targets, num_heads, num_cols = y.shape
    x = by_rows(x)
    out_E = x.new_empty(len(indices), num_heads)
    head_stride = x.stride(1) if x.shape[1] > 1 else 0
    vector = gcd(vector_elements(x, num_cols), vector_elements(y, num_cols))
    sizes = num_cols // vector, x.stride(0) // vector, head_stride // vector
    with torch.cuda.device_of(out_E):
        _products_triton[(num_targets, num_heads)](
            indptr, indices, x, y, out_E, num_heads, *sizes,
            sum_dtype(x)[1], EDGES, BLOCK, vector,
        )  # fmt: skip
    return out_E


class _WeightedSpmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indptr: Tensor, indices: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        dtype, _ = sum_dtype(x)
        weight_E, wide_x = weight.to(dtype).contiguous(), x.to(dtype)
        ctx.save_for_backward(indptr, indices, weight_E, wide_x)
        ctx.dtypes = weight.dtype, x.dtype
        run = weighted_spmm_triton if x.is_cuda else weighted_spmm_numba
        return run(indptr, indices, None, weight_E, wide_x, weight.shape[1]).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        indptr, indices, weight_E, x = ctx.saved_tensors
        weight_dtype, x_dtype = ctx.dtypes
        grad = grad.to(x.dtype).contiguous()
        grad_weight = grad_x = None
        if ctx.needs_input_grad[2]:
            products = products_triton if x.is_cuda else products_numba
            grad_weight = products(indptr, indices, x, grad).to(weight_dtype)
        if ctx.needs_input_grad[3]:
            block = transpose(indptr, indices, len(x))
            run = weighted_spmm_triton if x.is_cuda else weighted_spmm_numba
            grad_x = run(block.indptr, block.targets, block.edges, weight_E, grad, x.shape[1])
            grad_x = grad_x.to(x_dtype)
        return None, None, grad_weight, grad_x


def weighted_spmm(indptr: Tensor, indices: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """Return, for each target and head, the weighted sum over its in-edges.

    Differentiable in `weight` and `x`, once. The same bits for any number of threads. Half
    precision is summed in float32 and rounded once.

    Args:
        indptr: (T + 1,) int32 or int64, where the edges of each target begin.
        indices: (E,) int32 or int64 sources in [0, S). Not checked.
        weight: (E, H) floating point.
        x: (S, H, F) floating point on the same device, or (S, 1, F): one row shared by all heads,
            which is then read once.

    Returns:
        (T, H, F) of the dtype of `x`; a target without edges gets zeros.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    check_block("weigh", indptr, indices, x)
    if weight.dim() != 2 or len(weight) != len(indices):
        raise ValueError(
            f"weigh: weight has shape {tuple(weight.shape)}, not ({len(indices)}, heads)"
        )
    if x.dim() != 3 or x.shape[1] not in (1, weight.shape[1]):
        raise ValueError(
            f"weigh: x has shape {tuple(x.shape)}; for {weight.shape[1]} heads it must be "
            f"(sources, {weight.shape[1]} or 1, columns)"
        )
    # one type of pointers, so that kernels are compiled once
    return _WeightedSpmm.apply(indptr.long(), indices, weight, x)
