"""Dot-product attention over in-edges whose columns form groups with a common softmax.

The attention of heterogeneous graph transformers (Hu et al., 2020,
https://arxiv.org/abs/2003.01332, equations 3 to 5): each destination has a query for each relation,
and one softmax over the in-edges of all relations.

Notation: S sources, C columns, G groups of adjacent columns, E edges, H heads, D columns of a key,
F columns of a value.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gcnzc.kernels.aggregate import check_block, sum_dtype
from gcnzc.kernels.aggregate.edge_softmax import edge_softmax_backward, edge_softmax_forward
from gcnzc.kernels.aggregate.weighted import (
    sddmm_numba,
    sddmm_triton,
    weighted_spmm,
    weighted_spmm_numba,
    weighted_spmm_reference,
    weighted_spmm_triton,
)
from gcnzc.kernels.structure.transpose import transpose


def dot_attention_reference(
    indptr: Tensor,
    indices: Tensor,
    group_indptr: Tensor,
    keys: Tensor,
    queries: Tensor,
    values: Tensor,
) -> Tensor:
    """Reference for `dot_attention`, in the precision of the values; differentiable."""

    def owners(offsets: Tensor) -> Tensor:
        each = torch.arange(len(offsets) - 1, device=offsets.device)
        return each.repeat_interleave(offsets.diff(), output_size=len(indices))

    score_EH = (keys[indices.long()] * queries[owners(indptr)]).sum(2)
    group_of = owners(group_indptr)
    wide_EH = group_of[:, None].expand_as(score_EH)
    max_GH = score_EH.new_full((len(group_indptr) - 1, score_EH.shape[1]), -torch.inf)
    max_GH = max_GH.scatter_reduce(0, wide_EH, score_EH.detach(), "amax")
    weight_EH = (score_EH - max_GH[group_of]).exp()
    total_GH = torch.zeros_like(max_GH).index_add(0, group_of, weight_EH)
    return weighted_spmm_reference(indptr, indices, weight_EH / total_GH[group_of], values)


class _EdgeScores(torch.autograd.Function):
    """The (E, H) dot products of keys and queries."""

    @staticmethod
    def forward(ctx: Any, indptr: Tensor, indices: Tensor, keys: Tensor, queries: Tensor) -> Tensor:
        queries = queries.contiguous()
        ctx.save_for_backward(indptr, indices, keys, queries)
        run = sddmm_triton if keys.is_cuda else sddmm_numba
        return run(indptr, indices, keys, queries)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        indptr, indices, keys, queries = ctx.saved_tensors
        grad, heads = grad.contiguous(), grad.shape[1]
        run = weighted_spmm_triton if keys.is_cuda else weighted_spmm_numba
        grad_keys = grad_queries = None
        if ctx.needs_input_grad[2]:
            block = transpose(indptr, indices, len(keys))
            grad_keys = run(block.indptr, block.targets, block.edges, grad, queries, heads)
        if ctx.needs_input_grad[3]:
            grad_queries = run(indptr, indices, None, grad, keys, heads)
        return None, None, grad_keys, grad_queries


class _GroupSoftmax(torch.autograd.Function):
    """The softmax of (E, H) scores within each group of edges."""

    @staticmethod
    def forward(ctx: Any, group_indptr: Tensor, scores: Tensor) -> Tensor:
        # `edge_softmax` with the edges as sources, no term of the targets, and a LeakyReLU of slope
        # 1, which is the identity
        edges = torch.arange(len(scores), dtype=group_indptr.dtype, device=scores.device)
        zeros = scores.new_zeros(len(group_indptr) - 1, scores.shape[1])
        weight_EH = edge_softmax_forward(group_indptr, edges, scores, zeros, 1.0)
        ctx.save_for_backward(group_indptr, edges, scores, zeros, weight_EH)
        return weight_EH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group_indptr, edges, scores, zeros, weight_EH = ctx.saved_tensors
        grad_EH, _ = edge_softmax_backward(
            group_indptr, edges, scores, zeros, 1.0, weight_EH, grad.contiguous()
        )
        return None, grad_EH


def dot_attention(
    indptr: Tensor,
    indices: Tensor,
    group_indptr: Tensor,
    keys: Tensor,
    queries: Tensor,
    values: Tensor,
) -> Tensor:
    """Sum the values of in-neighbours, weighted by the softmax of dot products of keys and queries.

    Differentiable once, in keys, queries and values. The result does not depend on the number of
    threads. bfloat16 and float16 inputs have float32 scores and weights, and are rounded once.

    Args:
        indptr: (C + 1,) int32 or int64, the CSC pointers: the first edge of each column.
        indices: (E,) int32 or int64 sources in [0, S). They are not checked: an id out of range
            reads out of bounds.
        group_indptr: (G + 1,) int32 or int64: the first edge of each group. Together the groups
            have all edges. Not checked.
        keys: (S, H, D) floating point.
        queries: (C, H, D) of the same dtype; scores are not scaled.
        values: (S, H, F) of the same dtype.

    Returns:
        (C, H, F) sums over the edges of each column, whose weights sum to 1 over each group; zeros
        for a column without edges.

    Raises:
        ValueError: the block and the keys do not match.
    """
    check_block("dot_attention", indptr, indices, keys)
    # always int64, so that kernels are not compiled a second time for int32
    indptr, group_indptr = indptr.long(), group_indptr.long()
    scores = _EdgeScores.apply(indptr, indices, keys, queries)
    weight = _GroupSoftmax.apply(group_indptr, scores.to(sum_dtype(keys)[0]))
    return weighted_spmm(indptr, indices, weight, values)
