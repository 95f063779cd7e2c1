"""Softmax over the in-edges of every target, per attention head.

`weight[e] = softmax of leaky_relu(score_source[s] + score_target[t])` over the edges `e = s -> t`
of each `t`: the attention weights of Veličković et al., 2018, https://arxiv.org/abs/1710.10903.

Notation: S sources, T targets, E edges of the block, H heads. A suffix names the axes: `score_SH`
is (S, H). The numba kernels get flattened arrays.
"""

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
    prefetch_row,
    sum_dtype,
    sum_rows,
)
from gcnzc.kernels.exponential import exp_nonpositive
from gcnzc.kernels.structure.transpose import transpose
from gcnzc.kernels.threads import parallel_for

# scores are prefetched for as many edges ahead as a core can wait for at once
PREFETCH_EDGES = 16

# the loads of several edges of a target overlap in a GPU program
EDGES = 32


def edge_softmax_reference(
    indptr: Tensor, indices: Tensor, score_source: Tensor, score_target: Tensor, slope: float
) -> Tensor:
    """Reference for `edge_softmax`, in the precision of the scores; differentiable."""
    target_of = torch.repeat_interleave(
        torch.arange(len(indptr) - 1, device=indices.device),
        indptr.diff(),
        output_size=len(indices),
    )
    score_EH = torch.nn.functional.leaky_relu(
        score_source[indices.long()] + score_target[target_of], slope
    )
    wide_EH = target_of[:, None].expand_as(score_EH)
    max_TH = torch.full_like(score_target, -torch.inf)
    max_TH = max_TH.scatter_reduce(0, wide_EH, score_EH.detach(), "amax")
    weight_EH = (score_EH - max_TH[target_of]).exp()
    total_TH = torch.zeros_like(score_target).index_add(0, target_of, weight_EH)
    return weight_EH / total_TH[target_of]


@njit(nogil=True, cache=True, forceinline=True, error_model="numpy")
def _softmax_of_target(
    first, last, indices, score_SH, target_H, slope, weight, max_H, total_H, inverse_H, H
):  # fmt: skip
    """Compute the softmax of the edges from `first` to `last`, whose weights are `weight`."""
    max_H[:] = -np.inf
    total_H[:] = 0
    for e in range(first, last):
        source = np.int64(indices[e]) * H
        for h in range(H):
            score = score_SH[source + h] + target_H[h]
            score = score if score > 0 else score * slope
            weight[(e - first) * H + h] = score
            max_H[h] = max(max_H[h], score)
    for e in range(0, len(weight), H):
        for h in range(H):
            weight[e + h] -= max_H[h]
    # all edges and heads in one loop, which is vectorized
    for i in range(len(weight)):
        weight[i] = exp_nonpositive(weight[i])
    for e in range(0, len(weight), H):
        for h in range(H):
            total_H[h] += weight[e + h]
    # not zero if the target has edges, since the largest score has the weight exp(0)
    for h in range(H):
        inverse_H[h] = 1 / total_H[h]
    for e in range(0, len(weight), H):
        for h in range(H):
            weight[e + h] *= inverse_H[h]


@njit(nogil=True, cache=True)
def _edge_softmax(indptr, indices, score_SH, score_TH, slope, weight_EH, num_heads, begin, end):
    H, row_bytes = num_heads, num_heads * score_SH.itemsize
    max_H, inverse_H = np.empty(H, dtype=weight_EH.dtype), np.empty(H, dtype=weight_EH.dtype)
    # float64: one sum per head costs little, and its rounding error is then negligible
    total_H = np.empty(H, dtype=np.float64)
    for t in range(first_target(indptr, begin), first_target(indptr, end)):
        first, last = indptr[t], indptr[t + 1]
        for upcoming in range(first + PREFETCH_EDGES, min(last + PREFETCH_EDGES, len(indices))):
            prefetch_row(score_SH.ctypes.data + indices[upcoming] * row_bytes, row_bytes)
        target_H, weight = score_TH[t * H : (t + 1) * H], weight_EH[first * H : last * H]
        # with a constant number of heads, the loops over them are unrolled
        if H == 4:
            _softmax_of_target(
                first, last, indices, score_SH, target_H, slope, weight, max_H, total_H,
                inverse_H, 4,
            )  # fmt: skip
        elif H == 8:
            _softmax_of_target(
                first, last, indices, score_SH, target_H, slope, weight, max_H, total_H,
                inverse_H, 8,
            )  # fmt: skip
        else:
            _softmax_of_target(
                first, last, indices, score_SH, target_H, slope, weight, max_H, total_H,
                inverse_H, H,
            )  # fmt: skip


@njit(nogil=True, cache=True, forceinline=True, fastmath={"contract"})
def _grad_of_target(
    first, last, indices, score_SH, target_H, slope, weight, grad, out, out_H, total_H, sum_H, H
):
    """Compute the gradients of the scores of one target, given those of its weights, `grad`."""
    total_H[:] = 0
    sum_H[:] = 0
    for e in range(0, len(weight), H):
        for h in range(H):
            total_H[h] += np.float64(weight[e + h]) * grad[e + h]
    for e in range(first, last):
        source, row = np.int64(indices[e]) * H, (e - first) * H
        for h in range(H):
            value = weight[row + h] * (grad[row + h] - total_H[h])
            if not score_SH[source + h] + target_H[h] > 0:
                value *= slope
            out[row + h] = value
            sum_H[h] += value
    for h in range(H):
        out_H[h] = sum_H[h]


@njit(nogil=True, cache=True)
def _edge_softmax_grad(
    indptr, indices, score_SH, score_TH, slope, weight_EH, grad_EH, out_EH, out_TH, num_heads,
    begin, end,
):  # fmt: skip
    H, row_bytes = num_heads, num_heads * score_SH.itemsize
    total_H, sum_H = np.empty(H, dtype=np.float64), np.empty(H, dtype=np.float64)
    for t in range(first_target(indptr, begin), first_target(indptr, end)):
        first, last = indptr[t], indptr[t + 1]
        for upcoming in range(first + PREFETCH_EDGES, min(last + PREFETCH_EDGES, len(indices))):
            prefetch_row(score_SH.ctypes.data + indices[upcoming] * row_bytes, row_bytes)
        target_H, out_H = score_TH[t * H : (t + 1) * H], out_TH[t * H : (t + 1) * H]
        weight, grad = weight_EH[first * H : last * H], grad_EH[first * H : last * H]
        out = out_EH[first * H : last * H]
        # with a constant number of heads, the loops over them are unrolled
        if H == 4:
            _grad_of_target(
                first, last, indices, score_SH, target_H, slope, weight, grad, out, out_H,
                total_H, sum_H, 4,
            )  # fmt: skip
        elif H == 8:
            _grad_of_target(
                first, last, indices, score_SH, target_H, slope, weight, grad, out, out_H,
                total_H, sum_H, 8,
            )  # fmt: skip
        else:
            _grad_of_target(
                first, last, indices, score_SH, target_H, slope, weight, grad, out, out_H,
                total_H, sum_H, H,
            )  # fmt: skip


# not specialized for the alignment of a block's arrays: it may differ between minibatches, as they
# may be views, and each alignment would be compiled separately
@triton.jit(do_not_specialize=["indptr", "indices"])
def _edge_softmax_triton(
    indptr, indices, score_SH, score_TH, slope: tl.float64, weight_EH, num_heads,
    SUM: tl.constexpr, HEADS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS)
    head_mask = heads < num_heads
    first = tl.load(indptr + t).to(tl.int64)
    last = tl.load(indptr + t + 1).to(tl.int64)
    target_H = tl.load(score_TH + t * num_heads + heads, mask=head_mask, other=0.0)
    # rounded once, to the dtype of the scores
    exact_slope = tl.full([1, 1], slope, SUM)
    max_H = tl.full([HEADS], float("-inf"), SUM)
    total_H = tl.zeros([HEADS], SUM)
    # the scores are read again in every pass, so that a target may have any number of edges
    for pass_index in tl.static_range(3):
        for begin in range(first, last, EDGES):
            edge = begin + tl.arange(0, EDGES)
            edge_mask = edge < last
            mask = edge_mask[:, None] & head_mask[None, :]
            s = tl.load(indices + edge, mask=edge_mask, other=0).to(tl.int64)
            offsets = s[:, None] * num_heads + heads[None, :]
            score = tl.load(score_SH + offsets, mask=mask, other=0.0) + target_H[None, :]
            score = tl.where(score > 0, score, score * exact_slope)
            score = tl.where(edge_mask[:, None], score, float("-inf"))
            if pass_index == 0:
                max_H = tl.maximum(max_H, tl.max(score, 0))
            else:
                numerator = tl.exp(score - max_H[None, :])
                if pass_index == 1:
                    total_H += tl.sum(numerator, 0)
                else:
                    out = weight_EH + edge[:, None] * num_heads + heads[None, :]
                    tl.store(out, numerator / total_H[None, :], mask=mask)


# not specialized for the alignment of a block's arrays: it may differ between minibatches, as they
# may be views, and each alignment would be compiled separately
@triton.jit(do_not_specialize=["indptr", "indices"])
def _edge_softmax_grad_triton(
    indptr, indices, score_SH, score_TH, slope: tl.float64, weight_EH, grad_EH, out_EH, out_TH,
    num_heads, SUM: tl.constexpr, HEADS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS)
    head_mask = heads < num_heads
    first = tl.load(indptr + t).to(tl.int64)
    last = tl.load(indptr + t + 1).to(tl.int64)
    target_H = tl.load(score_TH + t * num_heads + heads, mask=head_mask, other=0.0)
    exact_slope = tl.full([1, 1], slope, SUM)
    total_H = tl.zeros([HEADS], SUM)
    out_H = tl.zeros([HEADS], SUM)
    for pass_index in tl.static_range(2):
        for begin in range(first, last, EDGES):
            edge = begin + tl.arange(0, EDGES)
            edge_mask = edge < last
            mask = edge_mask[:, None] & head_mask[None, :]
            offsets = edge[:, None] * num_heads + heads[None, :]
            weight = tl.load(weight_EH + offsets, mask=mask, other=0.0)
            grad = tl.load(grad_EH + offsets, mask=mask, other=0.0)
            if pass_index == 0:
                total_H += tl.sum(weight * grad, 0)
            else:
                s = tl.load(indices + edge, mask=edge_mask, other=0).to(tl.int64)
                source = score_SH + s[:, None] * num_heads + heads[None, :]
                score = tl.load(source, mask=mask, other=0.0) + target_H[None, :]
                grad = weight * (grad - total_H[None, :])
                grad = tl.where(score > 0, grad, grad * exact_slope)
                tl.store(out_EH + offsets, grad, mask=mask)
                out_H += tl.sum(grad, 0)
    tl.store(out_TH + t * num_heads + heads, out_H, mask=head_mask)


def edge_softmax_forward(
    indptr: Tensor, indices: Tensor, score_SH: Tensor, score_TH: Tensor, slope: float
) -> Tensor:
    """Compute `edge_softmax` without a gradient.

    Args:
        indptr: (T + 1,) int64, the CSC pointers: the first edge of each target.
        indices: (E,) int32 or int64 sources in [0, S).
        score_SH: (S, H) float32 or float64, contiguous.
        score_TH: (T, H) of the same dtype and device, contiguous.
        slope: negative slope of the LeakyReLU.

    Returns:
        (E, H) with the dtype of the scores.
    """
    num_targets, num_heads = score_TH.shape
    if score_SH.is_cuda:
        weight_EH = score_SH.new_empty(len(indices), num_heads)
        return edge_softmax_triton(indptr, indices, score_SH, score_TH, slope, weight_EH)
    weight_EH = empty_rows((len(indices), num_heads), score_SH.dtype)
    parallel_for(
        _edge_softmax,
        num_targets + len(indices),
        *(a.numpy() for a in (indptr, indices)),
        *(a.view(-1).numpy() for a in (score_SH, score_TH)),
        score_SH.numpy().dtype.type(slope),
        weight_EH.view(-1).numpy(),
        num_heads,
        grain_size=GRAIN_SIZE,
    )
    return weight_EH


def edge_softmax_triton(
    indptr: Tensor,
    indices: Tensor,
    score_SH: Tensor,
    score_TH: Tensor,
    slope: float,
    weight_EH: Tensor,
) -> Tensor:
    """Fill `weight_EH` on a GPU, with one program per target, and return it."""
    num_targets, num_heads = score_TH.shape
    heads = triton.next_power_of_2(num_heads)
    with torch.cuda.device_of(weight_EH):
        _edge_softmax_triton[(num_targets,)](
            indptr, indices, score_SH, score_TH, slope, weight_EH, num_heads,
            sum_dtype(score_SH)[1], heads, EDGES,
        )  # fmt: skip
    return weight_EH


def edge_softmax_backward(
    indptr: Tensor,
    indices: Tensor,
    score_SH: Tensor,
    score_TH: Tensor,
    slope: float,
    weight_EH: Tensor,
    grad_EH: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the gradient of `edge_softmax`.

    Args:
        indptr, indices, score_SH, score_TH, slope: as in `edge_softmax_forward`.
        weight_EH: (E, H), the result of `edge_softmax_forward`.
        grad_EH: (E, H), the gradient of the weights, contiguous.

    Returns:
        The gradient of each edge's score (E, H), and of `score_TH` (T, H), its sum over in-edges.
    """
    num_targets, num_heads = score_TH.shape
    out_TH = torch.empty_like(score_TH)
    if score_SH.is_cuda:
        out_EH = torch.empty_like(weight_EH)
        tensors = (score_SH, score_TH, slope, weight_EH, grad_EH, out_EH, out_TH)
        return edge_softmax_backward_triton(indptr, indices, *tensors)
    out_EH = empty_rows(weight_EH.shape, weight_EH.dtype)
    parallel_for(
        _edge_softmax_grad,
        num_targets + len(indices),
        *(a.numpy() for a in (indptr, indices)),
        *(a.view(-1).numpy() for a in (score_SH, score_TH)),
        score_SH.numpy().dtype.type(slope),
        *(a.view(-1).numpy() for a in (weight_EH, grad_EH, out_EH, out_TH)),
        num_heads,
        grain_size=GRAIN_SIZE,
    )
    return out_EH, out_TH


def edge_softmax_backward_triton(
    indptr: Tensor,
    indices: Tensor,
    score_SH: Tensor,
    score_TH: Tensor,
    slope: float,
    weight_EH: Tensor,
    grad_EH: Tensor,
    out_EH: Tensor,
    out_TH: Tensor,
) -> tuple[Tensor, Tensor]:
    """Fill `out_EH` and `out_TH` on a GPU, with one program per target, and return them."""
    num_targets, num_heads = score_TH.shape
    heads = triton.next_power_of_2(num_heads)
    with torch.cuda.device_of(out_EH):
        _edge_softmax_grad_triton[(num_targets,)](
            indptr, indices, score_SH, score_TH, slope, weight_EH, grad_EH, out_EH, out_TH,
            num_heads, sum_dtype(score_SH)[1], heads, EDGES,
        )  # fmt: skip
    return out_EH, out_TH


class _EdgeSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, indptr: Tensor, indices: Tensor, score_SH: Tensor, score_TH: Tensor, slope: float
    ) -> Tensor:
        dtype, _ = sum_dtype(score_SH)
        wide_SH, wide_TH = (score.to(dtype).contiguous() for score in (score_SH, score_TH))
        weight_EH = edge_softmax_forward(indptr, indices, wide_SH, wide_TH, slope)
        ctx.save_for_backward(indptr, indices, wide_SH, wide_TH, weight_EH)
        ctx.slope, ctx.dtype = slope, score_SH.dtype
        return weight_EH.to(score_SH.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        indptr, indices, score_SH, score_TH, weight_EH = ctx.saved_tensors
        grad_EH = grad.to(weight_EH.dtype).contiguous()
        grad_EH, grad_TH = edge_softmax_backward(
            indptr, indices, score_SH, score_TH, ctx.slope, weight_EH, grad_EH
        )
        block = transpose(indptr, indices, len(score_SH))
        grad_SH = sum_rows(block.indptr, block.edges, grad_EH)
        return None, None, grad_SH.to(ctx.dtype), grad_TH.to(ctx.dtype), None


def edge_softmax(
    indptr: Tensor,
    indices: Tensor,
    score_source: Tensor,
    score_target: Tensor,
    negative_slope: float = 0.2,
) -> Tensor:
    """Compute attention weights: the softmax of edge scores over the in-edges of each target.

    Differentiable once, in both scores. The result does not depend on the number of threads. Half
    precision is computed in float32 and rounded once.

    Args:
        indptr: (T + 1,) int32 or int64, the CSC pointers: the first edge of each target.
        indices: (E,) int32 or int64 sources in [0, S). They are not checked: an id out of range
            reads out of bounds.
        score_source: (S, H) floating point.
        score_target: (T, H) of the same dtype and device.
        negative_slope: of the LeakyReLU.

    Returns:
        (E, H) with the dtype of the scores. Rows from `indptr[-1]` on, such as the padding of
        `add_self_loops`, are not initialized.

    Raises:
        ValueError: a shape, dtype or device does not match.
    """
    check_block("edge_softmax", indptr, indices, score_source)
    if score_source.dim() != 2:
        raise ValueError(
            f"edge_softmax: score_source has shape {tuple(score_source.shape)}; it must be "
            "(sources, heads)"
        )
    expected = (len(indptr) - 1, score_source.shape[1])
    if score_target.shape != expected or score_target.dtype != score_source.dtype:
        raise ValueError(
            f"edge_softmax: score_target has shape {tuple(score_target.shape)} and dtype "
            f"{score_target.dtype}, not {expected} and {score_source.dtype}"
        )
    check_device("edge_softmax", "score_target", score_target, score_source.device)
    # indptr is always int64, so that kernels are not compiled a second time for int32
    return _EdgeSoftmax.apply(indptr.long(), indices, score_source, score_target, negative_slope)
