"""Softmax over the in-edges of every target, per attention head.

`weight[e] = softmax of leaky_relu(score_source[s] + score_target[t])` over the edges `e = s -> t`
of each `t`: the attention weights of Veličković et al., 2018, https://arxiv.org/abs/1710.10903.

Notation: S sources, T targets, E edges of the block, H heads.
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
    empty_rows,
    first_target,
    prefetch_row,
    sum_dtype,
    sum_rows,
)
from gcnzc.kernels.structure.transpose import transpose
from gcnzc.kernels.threads import parallel_for

PREFETCH_EDGES = 16  # edges ahead for which scores are prefetched


EDGES = 32  # edges that a GPU program loads at once


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


@njit(nogil=True, cache=True)
def _edge_softmax(indptr, indices, score_S, score_T, slope, weight_E, num_heads, begin, end):
    H, row_bytes = num_heads, num_heads * score_S.itemsize
    max_H = np.empty(H, dtype=weight_E.dtype)
    # float64, which is cheap for one sum per head, so that its rounding error does not matter
    total = np.empty(H, dtype=np.float64)
    for t in range(first_target(indptr, begin), first_target(indptr, end)):
        max_H[:] = -np.inf
        total[:] = 0
        target_H = score_T[t * H : (t + 1) * H]
        for upcoming in range(
            indptr[t] + PREFETCH_EDGES, min(indptr[t + 1] + PREFETCH_EDGES, len(indices))
        ):
            prefetch_row(score_S.ctypes.data + indices[upcoming] * row_bytes, row_bytes)
        for e in range(indptr[t], indptr[t + 1]):
            s = np.int64(indices[e])
            source_H = score_S[s * H : (s + 1) * H]
            weight_H = weight_E[e * H : (e + 1) * H]
            for h in range(H):
                score = source_H[h] + target_H[h]
                weight_H[h] = score if score > 0 else score * slope
                max_H[h] = max(max_H[h], weight_H[h])
        for e in range(indptr[t], indptr[t + 1]):
            weight_H = weight_E[e * H : (e + 1) * H]
            for h in range(H):
                weight_H[h] = np.exp(weight_H[h] - max_H[h])
                total[h] += weight_H[h]
        for e in range(indptr[t], indptr[t + 1]):
            weight_H = weight_E[e * H : (e + 1) * H]
            for h in range(H):
                weight_H[h] /= total[h]


@njit(nogil=True, cache=True, fastmath={"contract"})
def _edge_softmax_grad(
    indptr, indices, score_S, score_T, slope, weight_E, grad_E, out_E, out_T, num_heads, begin, end
):  # fmt: skip
    H, row_bytes = num_heads, num_heads * score_S.itemsize
    total, sum_H = np.empty(H, dtype=np.float64), np.empty(H, dtype=np.float64)
    for t in range(first_target(indptr, begin), first_target(indptr, end)):
        total[:] = 0
        sum_H[:] = 0
        target_H = score_T[t * H : (t + 1) * H]
        for upcoming in range(
            indptr[t] + PREFETCH_EDGES, min(indptr[t + 1] + PREFETCH_EDGES, len(indices))
        ):
            prefetch_row(score_S.ctypes.data + indices[upcoming] * row_bytes, row_bytes)
        for e in range(indptr[t], indptr[t + 1]):
            for h in range(H):
                total[h] += np.float64(weight_E[e * H + h]) * grad_E[e * H + h]
        for e in range(indptr[t], indptr[t + 1]):
            s = np.int64(indices[e])
            source_H = score_S[s * H : (s + 1) * H]
            for h in range(H):
                grad = weight_E[e * H + h] * (grad_E[e * H + h] - total[h])
                if not source_H[h] + target_H[h] > 0:
                    grad *= slope
                out_E[e * H + h] = grad
                sum_H[h] += grad
        out_T[t * H : (t + 1) * H] = sum_H


# blocks are views of one buffer, whose alignments differ between minibatches
@triton.jit(do_not_specialize=["indptr", "indices"])
def _edge_softmax_triton(
    indptr, indices, score_S, score_T, slope, weight_E, num_heads, SUM: tl.constexpr,
    HEADS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS)
    head_mask = heads < num_heads
    first = tl.load(indptr + t).to(tl.int64)
    last = tl.load(indptr + t + 1).to(tl.int64)
    target_H = tl.load(score_T + t * num_heads + heads, mask=head_mask, other=0.0)
    max_H = tl.full([HEADS], float("-inf"), SUM)
    total_H = tl.zeros([HEADS], SUM)
    # the scores are read again in every pass, so that a target may have any number of edges
    for round in tl.static_range(3):
        for begin in range(first, last, EDGES):
            edge = begin + tl.arange(0, EDGES)
            edge_mask = edge < last
            mask = edge_mask[:, None] & head_mask[None, :]
            s = tl.load(indices + edge, mask=edge_mask, other=0).to(tl.int64)
            offsets = s[:, None] * num_heads + heads[None, :]
            score_EH = tl.load(score_S + offsets, mask=mask, other=0.0) + target_H[None, :]
            score_EH = tl.where(score_EH > 0, score_EH, score_EH * slope)
            score_EH = tl.where(edge_mask[:, None], score_EH, float("-inf"))
            if round == 0:
                max_H = tl.maximum(max_H, tl.max(score_EH, 0))
            else:
                weight_EH = tl.exp(score_EH - max_H[None, :])
                if round == 1:
                    total_H += tl.sum(weight_EH, 0)
                else:
                    out = weight_E + edge[:, None] * num_heads + heads[None, :]
                    tl.store(out, weight_EH / total_H[None, :], mask=mask)


# blocks are views of one buffer, whose alignments differ between minibatches
@triton.jit(do_not_specialize=["indptr", "indices"])
def _edge_softmax_grad_triton(
    indptr, indices, score_S, score_T, slope, weight_E, grad_E, out_E, out_T, num_heads,
    SUM: tl.constexpr, HEADS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS)
    head_mask = heads < num_heads
    first = tl.load(indptr + t).to(tl.int64)
    last = tl.load(indptr + t + 1).to(tl.int64)
    target_H = tl.load(score_T + t * num_heads + heads, mask=head_mask, other=0.0)
    total_H = tl.zeros([HEADS], SUM)
    out_H = tl.zeros([HEADS], SUM)
    for round in tl.static_range(2):
        for begin in range(first, last, EDGES):
            edge = begin + tl.arange(0, EDGES)
            edge_mask = edge < last
            mask = edge_mask[:, None] & head_mask[None, :]
            offsets = edge[:, None] * num_heads + heads[None, :]
            weight_EH = tl.load(weight_E + offsets, mask=mask, other=0.0)
            grad_EH = tl.load(grad_E + offsets, mask=mask, other=0.0)
            if round == 0:
                total_H += tl.sum(weight_EH * grad_EH, 0)
            else:
                s = tl.load(indices + edge, mask=edge_mask, other=0).to(tl.int64)
                source = score_S + s[:, None] * num_heads + heads[None, :]
                score_EH = tl.load(source, mask=mask, other=0.0) + target_H[None, :]
                grad_EH = weight_EH * (grad_EH - total_H[None, :])
                grad_EH = tl.where(score_EH > 0, grad_EH, grad_EH * slope)
                tl.store(out_E + offsets, grad_EH, mask=mask)
                out_H += tl.sum(grad_EH, 0)
    tl.store(out_T + t * num_heads + heads, out_H, mask=head_mask)


def edge_softmax_forward(
    indptr: Tensor, indices: Tensor, score_S: Tensor, score_T: Tensor, slope: float
) -> Tensor:
    """Compute `edge_softmax` of contiguous float32 or float64 scores, without a gradient."""
    num_targets, num_heads = score_T.shape
    if score_S.is_cuda:
        weight_E = score_S.new_empty(len(indices), num_heads)
        return edge_softmax_triton(indptr, indices, score_S, score_T, slope, weight_E)
    weight_E = empty_rows((len(indices), num_heads), score_S.dtype)
    parallel_for(
        _edge_softmax,
        num_targets + len(indices),
        *(a.numpy() for a in (indptr, indices)),
        *(a.view(-1).numpy() for a in (score_S, score_T)),
        score_S.numpy().dtype.type(slope),
        weight_E.view(-1).numpy(),
        num_heads,
        grain_size=GRAIN_SIZE,
    )
    return weight_E


def edge_softmax_triton(
    indptr: Tensor,
    indices: Tensor,
    score_S: Tensor,
    score_T: Tensor,
    slope: float,
    weight_E: Tensor,
) -> Tensor:
    """Fill `weight_E` on a GPU, with one program per target, and return it."""
    num_targets, num_heads = score_T.shape
    heads = triton.next_power_of_2(num_heads)
    with torch.cuda.device_of(weight_E):
        _edge_softmax_triton[(num_targets,)](
            indptr, indices, score_S, score_T, slope, weight_E, num_heads,
            sum_dtype(score_S)[1], heads, EDGES,
        )  # fmt: skip
    return weight_E


def edge_softmax_backward(
    indptr: Tensor,
    indices: Tensor,
    score_S: Tensor,
    score_T: Tensor,
    slope: float,
    weight_E: Tensor,
    grad_E: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the gradient of `edge_softmax`.

    Returns:
        The gradient of each edge's score (E, H), and of `score_T` (T, H), its sum over in-edges.
    """
    num_targets, num_heads = score_T.shape
    out_T = torch.empty_like(score_T)
    if score_S.is_cuda:
        out_E = torch.empty_like(weight_E)
        tensors = (score_S, score_T, slope, weight_E, grad_E, out_E, out_T)
        return edge_softmax_backward_triton(indptr, indices, *tensors)
    out_E = empty_rows(weight_E.shape, weight_E.dtype)
    parallel_for(
        _edge_softmax_grad,
        num_targets + len(indices),
        *(a.numpy() for a in (indptr, indices)),
        *(a.view(-1).numpy() for a in (score_S, score_T)),
        score_S.numpy().dtype.type(slope),
        *(a.view(-1).numpy() for a in (weight_E, grad_E, out_E, out_T)),
        num_heads,
        grain_size=GRAIN_SIZE,
    )
    return out_E, out_T


def edge_softmax_backward_triton(
    indptr: Tensor,
    indices: Tensor,
    score_S: Tensor,
    score_T: Tensor,
    slope: float,
    weight_E: Tensor,
    grad_E: Tensor,
    out_E: Tensor,
    out_T: Tensor,
) -> tuple[Tensor, Tensor]:
    """Fill `out_E` and `out_T` on a GPU, with one program per target, and return them."""
    num_targets, num_heads = score_T.shape
    heads = triton.next_power_of_2(num_heads)
    with torch.cuda.device_of(out_E):
        _edge_softmax_grad_triton[(num_targets,)](
            indptr, indices, score_S, score_T, slope, weight_E, grad_E, out_E, out_T, num_heads,
            sum_dtype(score_S)[1], heads, EDGES,
        )  # fmt: skip
    return out_E, out_T


class _EdgeSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, indptr: Tensor, indices: Tensor, score_S: Tensor, score_T: Tensor, slope: float
    ) -> Tensor:
        dtype, _ = sum_dtype(score_S)
        wide_S, wide_T = (score.to(dtype).contiguous() for score in (score_S, score_T))
        weight_E = edge_softmax_forward(indptr, indices, wide_S, wide_T, slope)
        ctx.save_for_backward(indptr, indices, wide_S, wide_T, weight_E)
        ctx.slope, ctx.dtype = slope, score_S.dtype
        return weight_E.to(score_S.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        indptr, indices, score_S, score_T, weight_E = ctx.saved_tensors
        grad_E = grad.to(weight_E.dtype).contiguous()
        grad_E, grad_T = edge_softmax_backward(
            indptr, indices, score_S, score_T, ctx.slope, weight_E, grad_E
        )
        block = transpose(indptr, indices, len(score_S))
        grad_S = sum_rows(block.indptr, block.edges, grad_E)
        return None, None, grad_S.to(ctx.dtype), grad_T.to(ctx.dtype), None


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
        (E, H) with the dtype of the scores.

    Raises:
        ValueError: a shape, dtype or device does not match.
    """
    check_block("edge_softmax", indptr, indices, score_source)
    expected = (len(indptr) - 1, score_source.shape[1])
    if score_target.shape != expected or score_target.dtype != score_source.dtype:
        raise ValueError(
            f"edge_softmax: score_target has shape {tuple(score_target.shape)} and dtype "
            f"{score_target.dtype}, not {expected} and {score_source.dtype}"
        )
    # always int64, so that kernels are compiled once
    return _EdgeSoftmax.apply(indptr.long(), indices, score_source, score_target, negative_slope)
