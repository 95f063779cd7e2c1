"""GAT attention: self loops, softmax over in-edges, and a weighted sum.

The layer of Veličković et al., 2018, https://arxiv.org/abs/1710.10903, between its linear maps.

Letters: S sources, T targets, E edges of the block, H heads, F columns a head.
"""

import torch
from numba import njit
from torch import Tensor

from gcnzc.kernels.aggregate import check_block
from gcnzc.kernels.aggregate.dropout import dropout as drop
from gcnzc.kernels.aggregate.edge_softmax import edge_softmax, edge_softmax_reference
from gcnzc.kernels.aggregate.weighted import weighted_spmm, weighted_spmm_reference


def gat_aggregate_reference(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    score_source: Tensor,
    score_target: Tensor,
    negative_slope: float = 0.2,
    self_loops: bool = True,
) -> Tensor:
    """What `gat_aggregate` computes without dropout, in the precision of `x`; differentiable."""
    if self_loops:
        own = torch.arange(len(indptr) - 1, dtype=indices.dtype, device=indices.device)
        indptr, indices = with_self_loops_reference(indptr, indices, own)
    weight = edge_softmax_reference(indptr, indices, score_source, score_target, negative_slope)
    return weighted_spmm_reference(indptr, indices, weight, x)


def with_self_loops_reference(
    indptr: Tensor, indices: Tensor, own: Tensor
) -> tuple[Tensor, Tensor]:
    """What `with_self_loops` must equal, on a device but for its padding."""
    targets = torch.arange(len(own), device=indices.device)
    target_of = torch.repeat_interleave(targets, indptr.diff(), output_size=len(indices))
    others = indices != own[target_of]
    order = torch.sort(torch.cat([target_of[others], targets]), stable=True)
    bounds = torch.arange(len(own) + 1, device=indices.device)
    return (
        torch.searchsorted(order.values, bounds),
        torch.cat([indices[others], own])[order.indices],
    )


@njit(nogil=True, cache=True)
def _with_self_loops(indptr, indices, own, out_indptr, out_indices):
    place = 0
    out_indptr[0] = 0
    for t in range(len(own)):
        for e in range(indptr[t], indptr[t + 1]):
            out_indices[place] = indices[e]
            # a self loop is overwritten by the next edge
            place += indices[e] != own[t]
        out_indices[place] = own[t]
        place += 1
        out_indptr[t + 1] = place


def with_self_loops_torch(
    indptr: Tensor, indices: Tensor, own: Tensor, num_sources: int
) -> tuple[Tensor, Tensor]:
    """`with_self_loops` by operations of torch, none of which makes the host wait for a device.

    Only the device knows how many loops the block has, so the indices have room for E + T edges.
    """
    num_edges, num_targets = len(indices), len(own)
    edges = torch.arange(num_edges, device=indices.device, dtype=indptr.dtype)
    target_of = torch.searchsorted(indptr[1:].contiguous(), edges, right=True)
    is_loop = indices == own.index_select(0, target_of)
    kept_before = torch.nn.functional.pad(torch.cumsum(~is_loop, 0), (1, 0))
    targets = torch.arange(num_targets + 1, device=indices.device)
    out_indptr = kept_before.index_select(0, indptr) + targets
    # one loop follows the kept edges of each target before; the block's own loops become padding
    loops_before = edges - kept_before[:-1]
    place = torch.where(is_loop, out_indptr[-1] + loops_before, kept_before[:-1] + target_of)
    out_indices = indices.new_empty(num_edges + num_targets)
    out_indices.scatter_(0, place, indices.masked_fill(is_loop, num_sources))
    return out_indptr, out_indices.scatter_(0, out_indptr[1:] - 1, own)


def with_self_loops(
    indptr: Tensor, indices: Tensor, own: Tensor, num_sources: int
) -> tuple[Tensor, Tensor]:
    """Return the block with exactly one self loop a target, behind its other edges.

    Args:
        indptr: (T + 1,) int32 or int64.
        indices: (E,) int32 or int64 sources.
        own: (T,) of the dtype of `indices`: each target's place among the sources.
        num_sources: S.

    Returns:
        indptr, int64, and indices of the dtype of `indices`. On a device the indices have E + T
        elements; those behind the last target's edges are S, which is no source.
    """
    if indices.device.type != "cpu":
        return with_self_loops_torch(indptr, indices, own, num_sources)
    out_indptr = torch.empty(len(indptr), dtype=torch.int64)
    out_indices = indices.new_empty(len(indices) + len(own))
    _with_self_loops(*(array.numpy() for array in (indptr, indices, own, out_indptr, out_indices)))
    return out_indptr, out_indices[: int(out_indptr[-1])]


def gat_aggregate(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    score_source: Tensor,
    score_target: Tensor,
    negative_slope: float = 0.2,
    self_loops: bool = True,
    *,
    own: Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """Return, for each target and head, the mean of its in-neighbours' rows by attention.

    Differentiable in `x` and both scores, once. The same bits for any number of threads.

    Args:
        indptr: (T + 1,) int32 or int64, where the edges of each target begin.
        indices: (E,) int32 or int64 sources in [0, S). Not checked.
        x: (S, H, F) floating point, or (S, 1, F): one row shared by all heads.
        score_source: (S, H).
        score_target: (T, H).
        negative_slope: of the leaky rectifier.
        self_loops: each target attends to itself too, once, whatever loops the block has.
        own: (T,) each target's place among the sources, for its self loop; if None, target t is
            source t.
        dropout: the share of the weights set to zero, after the softmax, the others scaled up.
        seed: what chooses them, 64 bits.

    Returns:
        (T, H, F) of the dtype of `x`; zeros for a target without edges.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    check_block("attend", indptr, indices, x)
    if self_loops:
        if own is None:
            own = torch.arange(len(indptr) - 1, dtype=indices.dtype, device=indices.device)
        indptr, indices = with_self_loops(indptr, indices, own.to(indices.dtype), len(x))
    weight = edge_softmax(indptr, indices, score_source, score_target, negative_slope)
    return weighted_spmm(indptr, indices, drop(weight, dropout, seed) if dropout else weight, x)
