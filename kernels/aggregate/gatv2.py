"""GATv2 aggregation: attention scores of both rows of an edge, softmax, and a weighted sum.

The GATv2 layer of Brody et al., "How Attentive are Graph Attention Networks?", 2022,
https://arxiv.org/abs/2105.14491, without its linear layers. The score of an edge s -> t is
`sum of a * leaky_relu(x[s] + y[t])` over the columns of a head.

No kernel stores a row per edge: memory is proportional to S, T and E, not to E * F. The gradients
need one sum per node and head, of g, the gradient of the score, times d, the derivative of the
LeakyReLU (1 or the slope):

    p[t] = sum of g d over the in-edges of t,  q[s] = sum of g d over the out-edges of s
    gradient of y = a p,  of x = a q,  of a = sum of y p over targets + sum of x q over sources

The last follows from `leaky_relu(z) = d z` with `z = x[s] + y[t]`. Each of p and q is written once,
by one thread, in a fixed order of summation.

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
    empty_rows,
    first_target,
    prefetch_distance,
    prefetch_row,
    readable_rows,
    sum_dtype,
    vector_elements,
)
from gcnzc.kernels.aggregate.dropout import dropout as drop
from gcnzc.kernels.aggregate.edge_softmax import edge_softmax_backward, edge_softmax_forward
from gcnzc.kernels.aggregate.gat import add_self_loops_reference, checked_self_loops
from gcnzc.kernels.aggregate.rows import add_leaky_slopes, leaky_dot
from gcnzc.kernels.aggregate.weighted import (
    sddmm_numba,
    sddmm_triton,
    weighted_spmm_numba,
    weighted_spmm_reference,
    weighted_spmm_triton,
)
from gcnzc.kernels.half_precision import as_array, item_bytes, kind_of, widened
from gcnzc.kernels.structure.transpose import transpose
from gcnzc.kernels.threads import parallel_for

EDGES = 8  # edges that a GPU program loads at once


BLOCK = 128  # columns of a GPU program


# rows of a partial sum over all nodes; a constant, so that threads do not change the order
PARTIAL_ROWS = 256


def gatv2_aggregate_reference(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    y: Tensor,
    a: Tensor,
    negative_slope: float = 0.2,
    self_loops: bool = True,
) -> Tensor:
    """Reference for `gatv2_aggregate` without dropout, in the precision of `x`; differentiable."""
    num_targets = len(indptr) - 1
    targets = torch.arange(num_targets, dtype=indices.dtype, device=indices.device)
    if self_loops:
        indptr, indices = add_self_loops_reference(indptr, indices, targets)
    target_of = torch.repeat_interleave(targets.long(), indptr.diff(), output_size=len(indices))
    z_EHF = x[indices.long()] + y[target_of]
    score_EH = (torch.nn.functional.leaky_relu(z_EHF, negative_slope) * a).sum(-1)
    max_TH = torch.full_like(y[:, :, 0], -torch.inf).scatter_reduce(
        0, target_of[:, None].expand_as(score_EH), score_EH.detach(), "amax"
    )
    weight_EH = (score_EH - max_TH[target_of]).exp()
    total_TH = torch.zeros_like(max_TH).index_add(0, target_of, weight_EH)
    return weighted_spmm_reference(indptr, indices, weight_EH / total_TH[target_of], x)


@njit(nogil=True, cache=True)
def _leaky_scores(
    indptr, indices, x, y, a, slope, score_EH, num_heads, num_cols, kind, distance, begin, end
):  # fmt: skip
    H, num_edges = num_heads, len(indices)
    part_bytes = num_cols * item_bytes(kind)
    row_bytes = H * part_bytes
    for t in range(first_target(indptr, begin), first_target(indptr, end)):
        first, last = indptr[t], indptr[t + 1]
        for upcoming in range(first + distance, min(last + distance, num_edges)):
            prefetch_row(x + indices[upcoming] * row_bytes, row_bytes)
        for e in range(first, last):
            row, own, factor = x + indices[e] * row_bytes, y + t * row_bytes, a
            for h in range(H):
                score_EH[e * H + h] = leaky_dot(factor, row, own, num_cols, slope, kind)
                row += part_bytes
                own += part_bytes
                factor += num_cols * score_EH.itemsize


@njit(nogil=True, cache=True)
def _sum_leaky_slopes(
    indptr, indices, edges, grad_EH, x, y, slope, out, num_heads, num_cols, kind, distance, begin,
    end,
):  # fmt: skip
    H, num_edges = num_heads, len(indices)
    part_bytes, out_bytes = num_cols * item_bytes(kind), num_cols * out.itemsize
    row_bytes = H * part_bytes
    for t in range(first_target(indptr, begin), first_target(indptr, end)):
        e, last = indptr[t], indptr[t + 1]
        for upcoming in range(e + distance, min(last + distance, num_edges)):
            prefetch_row(x + indices[upcoming] * row_bytes, row_bytes)
            if len(edges):
                prefetch_row(grad_EH.ctypes.data + edges[upcoming] * H * out.itemsize, out.itemsize)
        out[t * H * num_cols : (t + 1) * H * num_cols] = 0
        # four rows at a time, to read and write out once for them
        while e + 4 <= last:
            e0, e1, e2, e3 = e, e + 1, e + 2, e + 3
            x0, x1 = x + indices[e0] * row_bytes, x + indices[e1] * row_bytes
            x2, x3 = x + indices[e2] * row_bytes, x + indices[e3] * row_bytes
            if len(edges):
                e0, e1, e2, e3 = edges[e0], edges[e1], edges[e2], edges[e3]
            for h in range(H):
                at = h * part_bytes
                g = (
                    grad_EH[e0 * H + h], grad_EH[e1 * H + h],
                    grad_EH[e2 * H + h], grad_EH[e3 * H + h],
                )  # fmt: skip
                rows = x0 + at, x1 + at, x2 + at, x3 + at
                own, sum_row = t * row_bytes + at, out.ctypes.data + (t * H + h) * out_bytes
                add_leaky_slopes(sum_row, y + own, num_cols, rows, g, slope, kind)
            e += 4
        while e < last:
            x0 = x + indices[e] * row_bytes
            e0 = edges[e] if len(edges) else e
            for h in range(H):
                own, rows = t * row_bytes + h * part_bytes, (x0 + h * part_bytes,)
                sum_row, g0 = out.ctypes.data + (t * H + h) * out_bytes, (grad_EH[e0 * H + h],)
                add_leaky_slopes(sum_row, y + own, num_cols, rows, g0, slope, kind)
            e += 1


@njit(nogil=True, cache=True, fastmath={"contract"})
def _sum_products(one, other, partial, num_rows, num_cols, begin, end):
    for part in range(begin, end):
        sum_F = partial[part]
        sum_F[:] = 0
        for n in range(part * PARTIAL_ROWS, min((part + 1) * PARTIAL_ROWS, num_rows)):
            left = one[n * num_cols : (n + 1) * num_cols]
            right = other[n * num_cols : (n + 1) * num_cols]
            for f in range(num_cols):
                sum_F[f] += np.float64(widened(left[f])) * right[f]


def sum_products(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum over rows of `one * other`, two contiguous (n, H, F) tensors: (H, F).

    Args:
        one: of a dtype in `KINDS`.
        other: float64 if `one` is, otherwise float32; the dtype of the result.
    """
    if one.is_cuda:
        return (one * other).sum(0)
    num_rows, num_cols = len(one), one[0].numel() if len(one) else 0
    partial = np.zeros((-(-num_rows // PARTIAL_ROWS), num_cols))
    parallel_for(
        _sum_products,
        len(partial),
        as_array(one),
        as_array(other),
        partial,
        num_rows,
        num_cols,
        grain_size=4,
    )
    if num_rows == 0:
        return other.new_zeros(other.shape[1:])
    return torch.from_numpy(partial.sum(0)).to(other.dtype).view(other.shape[1:])


def leaky_scores_numba(
    indptr: Tensor, indices: Tensor, x: Tensor, y: Tensor, a: Tensor, slope: float
) -> Tensor:
    """Return the (E, H) scores `sum of a * leaky_relu(x[s] + y[t])` of the edges.

    Args:
        indptr: (T + 1,).
        indices: (E,) rows of `x`.
        x: (S, H, F) of a dtype in `KINDS`, contiguous, like `y` and `a`.
        y: (T, H, F) of the same dtype.
        a: (H, F) float64 if `x` is, otherwise float32; the dtype of the scores.
        slope: of the LeakyReLU.
    """
    num_targets, num_heads, num_cols = y.shape
    score_EH = empty_rows((len(indices), num_heads), a.dtype)
    parallel_for(
        _leaky_scores,
        num_targets + len(indices),
        indptr.numpy(),
        indices.numpy(),
        *(rows.data_ptr() for rows in (x, y, a)),
        score_EH.numpy().dtype.type(slope),
        score_EH.view(-1).numpy(),
        num_heads,
        num_cols,
        kind_of(x.dtype),
        prefetch_distance(num_heads * num_cols * x.itemsize),
        grain_size=GRAIN_SIZE,
    )
    return score_EH


def sum_leaky_slopes_numba(
    indptr: Tensor,
    indices: Tensor,
    edges: Tensor | None,
    grad_EH: Tensor,
    x: Tensor,
    y: Tensor,
    slope: float,
) -> Tensor:
    """Return the sums of `g * d(x[s] + y[t])` over the in-edges of each target: (T, H, F).

    d is the derivative of the LeakyReLU.

    Args:
        indptr: (T + 1,).
        indices: (E,) rows of `x`.
        edges: (E,) the row of `grad_EH` of each edge; edge e has row e if None.
        grad_EH: (E, H) contiguous, like `x` and `y`; float64 if `x` is, otherwise float32, the
            dtype of the sums.
        x: (S, H, F) of a dtype in `KINDS`.
        y: (T, H, F) of the same dtype.
        slope: of the LeakyReLU.
    """
    num_targets, num_heads, num_cols = y.shape
    out = empty_rows(tuple(y.shape), grad_EH.dtype)
    parallel_for(
        _sum_leaky_slopes,
        num_targets + len(indices),
        indptr.numpy(),
        indices.numpy(),
        (indptr[:0] if edges is None else edges).numpy(),
        grad_EH.view(-1).numpy(),
        x.data_ptr(),
        y.data_ptr(),
        grad_EH.numpy().dtype.type(slope),
        out.view(-1).numpy(),
        num_heads,
        num_cols,
        kind_of(x.dtype),
        prefetch_distance(num_heads * num_cols * x.itemsize),
        grain_size=GRAIN_SIZE,
    )
    return out


# not specialized for the alignment of a block's arrays: it may differ between minibatches, as they
# may be views, and each alignment would be compiled separately
@triton.jit(do_not_specialize=["indptr", "indices"])
def _leaky_scores_triton(
    indptr, indices, x, y, a, slope: tl.float64, score_EH, num_heads,
    num_cols,  # in vectors of VECTOR elements
    SUM: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    first = tl.load(indptr + t).to(tl.int64)
    last = tl.load(indptr + t + 1).to(tl.int64)
    # rounded once, to the dtype of the rows
    exact_slope = tl.full([1, 1], slope, SUM)
    for begin in range(first, last, EDGES):
        edge = begin + tl.arange(0, EDGES)
        edge_mask = edge < last
        # int64 before the multiply: 2**31 elements is only 8 GB of float32
        s = tl.load(indices + edge, mask=edge_mask, other=0).to(tl.int64)
        sum_E = tl.zeros([EDGES], SUM)
        x_begin = (s * num_heads + h) * num_cols * VECTOR
        y_begin = (t * num_heads + h) * num_cols * VECTOR
        for start in range(0, num_cols * VECTOR, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            col_mask = cols < num_cols * VECTOR
            mask = edge_mask[:, None] & col_mask[None, :]
            z_EF = tl.load(x + x_begin[:, None] + cols[None, :], mask=mask, other=0.0).to(SUM)
            z_EF += tl.load(y + y_begin + cols, mask=col_mask, other=0.0).to(SUM)[None, :]
            a_F = tl.load(a + h * num_cols * VECTOR + cols, mask=col_mask, other=0.0)
            sum_E += tl.sum(tl.where(z_EF > 0, z_EF, z_EF * exact_slope) * a_F[None, :], 1)
        tl.store(score_EH + edge * num_heads + h, sum_E, mask=edge_mask)


# not specialized for the alignment of a block's arrays: it may differ between minibatches, as they
# may be views, and each alignment would be compiled separately
@triton.jit(do_not_specialize=["indptr", "indices", "edges"])
def _sum_leaky_slopes_triton(
    indptr, indices, edges, grad_EH, x, y, slope: tl.float64, out, num_heads,
    num_cols,  # in vectors of VECTOR elements
    HAS_EDGES: tl.constexpr, SUM: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    cols = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    # as products with VECTOR, so that Triton can infer that rows consist of whole vectors
    col_mask = cols < num_cols * VECTOR
    first = tl.load(indptr + t).to(tl.int64)
    last = tl.load(indptr + t + 1).to(tl.int64)
    exact_slope = tl.full([1, 1], slope, SUM)
    own = (t * num_heads + h) * num_cols * VECTOR + cols
    y_F = tl.load(y + own, mask=col_mask, other=0.0).to(SUM)
    sum_EF = tl.zeros([EDGES, BLOCK], SUM)
    for begin in range(first, last, EDGES):
        edge = begin + tl.arange(0, EDGES)
        edge_mask = edge < last
        mask = edge_mask[:, None] & col_mask[None, :]
        # int64 before the multiply: 2**31 elements is only 8 GB of float32
        s = tl.load(indices + edge, mask=edge_mask, other=0).to(tl.int64)
        if HAS_EDGES:
            edge = tl.load(edges + edge, mask=edge_mask, other=0).to(tl.int64)
        g_E = tl.load(grad_EH + edge * num_heads + h, mask=edge_mask, other=0.0)
        row_offsets = (s * num_heads + h) * num_cols * VECTOR
        z_EF = tl.load(x + row_offsets[:, None] + cols[None, :], mask=mask, other=0.0).to(SUM)
        z_EF += y_F[None, :]
        sum_EF += tl.where(z_EF > 0, g_E[:, None], g_E[:, None] * exact_slope)
    tl.store(out + own, tl.sum(sum_EF, 0), mask=col_mask)


def leaky_scores_triton(
    indptr: Tensor, indices: Tensor, x: Tensor, y: Tensor, a: Tensor, slope: float
) -> Tensor:
    """`leaky_scores_numba` on a GPU; one program per target and head."""
    num_targets, num_heads, num_cols = y.shape
    score_EH = a.new_empty(len(indices), num_heads)
    vector = gcd(*(vector_elements(rows, num_cols) for rows in (x, y)))
    with torch.cuda.device_of(score_EH):
        _leaky_scores_triton[(num_targets, num_heads)](
            indptr, indices, x, y, a, slope, score_EH, num_heads, num_cols // vector,
            sum_dtype(x)[1], EDGES, BLOCK, vector,
        )  # fmt: skip
    return score_EH


def sum_leaky_slopes_triton(
    indptr: Tensor,
    indices: Tensor,
    edges: Tensor | None,
    grad_EH: Tensor,
    x: Tensor,
    y: Tensor,
    slope: float,
) -> Tensor:
    """`sum_leaky_slopes_numba` on a GPU; one program per target, head and block of columns."""
    num_targets, num_heads, num_cols = y.shape
    out = grad_EH.new_empty(y.shape)
    grid = (num_targets, num_heads, triton.cdiv(num_cols, BLOCK))
    vector = gcd(*(vector_elements(rows, num_cols) for rows in (x, y)))
    with torch.cuda.device_of(out):
        _sum_leaky_slopes_triton[grid](
            indptr, indices, indptr if edges is None else edges, grad_EH, x, y, slope, out,
            num_heads, num_cols // vector, edges is not None, sum_dtype(x)[1], EDGES, BLOCK, vector,
        )  # fmt: skip
    return out


class _GATv2(torch.autograd.Function):
    # one function for scores and sums, so that the two terms of the gradient of x are added before
    # they are rounded to 16 bits
    @staticmethod
    def forward(
        ctx: Any,
        indptr: Tensor,
        indices: Tensor,
        x: Tensor,
        y: Tensor,
        a: Tensor,
        slope: float,
        dropout: float,
        seed: int,
    ) -> Tensor:
        dtype, _ = sum_dtype(x)
        rows, own_rows = (readable_rows(each).contiguous() for each in (x, y))
        wide_a = a.to(dtype).contiguous()
        run = leaky_scores_triton if x.is_cuda else leaky_scores_numba
        score_EH = run(indptr, indices, rows, own_rows, wide_a, slope)
        # a softmax of scores that are given per edge: edge e reads row e, and a slope of 1 is the
        # identity
        numbers = torch.arange(len(indices), device=x.device)
        zero_TH = score_EH.new_zeros(y.shape[:2])
        weight_EH = edge_softmax_forward(indptr, numbers, score_EH, zero_TH, 1.0)
        dropped_EH = drop(weight_EH, dropout, seed) if dropout else weight_EH
        ctx.save_for_backward(indptr, indices, rows, own_rows, wide_a, weight_EH, dropped_EH)
        ctx.options, ctx.dtypes = (slope, dropout, seed), (x.dtype, y.dtype, a.dtype)
        spmm = weighted_spmm_triton if x.is_cuda else weighted_spmm_numba
        return spmm(indptr, indices, None, dropped_EH, rows, x.shape[1]).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        indptr, indices, x, y, a, weight_EH, dropped_EH = ctx.saved_tensors
        slope, dropout, seed = ctx.options
        grad = grad.to(x.dtype).contiguous()
        sddmm = sddmm_triton if x.is_cuda else sddmm_numba
        grad_EH = sddmm(indptr, indices, x, grad)
        if dropout:
            grad_EH = drop(grad_EH, dropout, seed)
        numbers = torch.arange(len(indices), device=x.device)
        zero_TH = weight_EH.new_zeros(y.shape[:2])
        # with a slope of 1, the gradient does not depend on the scores
        grad_EH, _ = edge_softmax_backward(
            indptr, numbers, weight_EH, zero_TH, 1.0, weight_EH, grad_EH
        )
        run = sum_leaky_slopes_triton if x.is_cuda else sum_leaky_slopes_numba
        target_sums = run(indptr, indices, None, grad_EH, x, y, slope)
        block = transpose(indptr, indices, len(x))
        source_sums = run(block.indptr, block.targets, block.edges, grad_EH, y, x, slope)
        grad_a = sum_products(x, source_sums) + sum_products(y, target_sums)
        spmm = weighted_spmm_triton if x.is_cuda else weighted_spmm_numba
        edges = block.indptr, block.targets, block.edges
        grad_x = spmm(*edges, dropped_EH, grad, x.shape[1], weight_EH.dtype)
        wide = grad_x.add_(source_sums.mul_(a)), target_sums.mul_(a), grad_a
        grads = [each.to(dtype) for each, dtype in zip(wide, ctx.dtypes, strict=True)]
        return None, None, *grads, None, None, None


def gatv2_aggregate(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    y: Tensor,
    a: Tensor,
    negative_slope: float = 0.2,
    self_loops: bool = True,
    *,
    self_index: Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """Sum the rows of each target's in-neighbours, weighted by the attention of GATv2, per head.

    Differentiable once, in `x`, `y` and `a`. The result does not depend on the number of threads.
    bfloat16 and float16 inputs are accumulated in float32 with float32 weights, and rounded once.

    Args:
        indptr: (T + 1,) int32 or int64, the CSC pointers: the first edge of each target.
        indices: (E,) int32 or int64 sources in [0, S). They are not checked: an id out of range
            reads out of bounds.
        x: (S, H, F) floating point, the projected rows of the sources.
        y: (T, H, F) of the same dtype, the projected rows of the targets for the scores.
        a: (H, F) of the same dtype, or float32 if that is 16-bit; the attention vectors.
        negative_slope: of the LeakyReLU.
        self_loops: add one self loop per target, and ignore the self loops of the block.
        self_index: (T,) int32 or int64, the index in [0, S) of each target among the sources, for
            its self loop; target t is source t if None. The values are checked on the CPU only.
        dropout: probability in [0, 1) that an attention weight is zeroed, after the softmax.
        seed: 64-bit seed of the dropout.

    Returns:
        (T, H, F) with the dtype of `x`; zeros for a target without edges.

    Raises:
        ValueError: the block and the rows do not match; on the CPU, an element of `self_index` is
            outside [0, S); or `dropout` is outside [0, 1), or rounds to 1.
    """
    check_block("gatv2_aggregate", indptr, indices, x)
    if self_loops:
        indptr, indices = checked_self_loops("gatv2_aggregate", indptr, indices, x, self_index)
    # indptr is always int64, so that kernels are not compiled a second time for int32
    return _GATv2.apply(indptr.long(), indices, x, y, a, negative_slope, dropout, seed)
