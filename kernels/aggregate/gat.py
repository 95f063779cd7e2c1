"""GAT aggregation: self loops, softmax over in-edges, and a weighted sum.

The GAT layer of Veličković et al., 2018, https://arxiv.org/abs/1710.10903, without its linear
layers.

Notation: S sources, T targets, E edges of the block, H heads, F columns per head.
"""

import torch
from numba import njit
from torch import Tensor

from gcnzc.kernels.aggregate import check_block, check_device, sum_dtype
from gcnzc.kernels.aggregate.dropout import dropout as drop
from gcnzc.kernels.aggregate.edge_softmax import edge_softmax, edge_softmax_reference
from gcnzc.kernels.aggregate.weighted import weighted_spmm, weighted_spmm_reference
from gcnzc.kernels.structure.block_cache import BlockCache


def gat_aggregate_reference(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    score_source: Tensor,
    score_target: Tensor,
    negative_slope: float = 0.2,
    self_loops: bool = True,
) -> Tensor:
    """Reference for `gat_aggregate` without dropout, in the precision of `x`; differentiable."""
    if self_loops:
        self_index = torch.arange(len(indptr) - 1, dtype=indices.dtype, device=indices.device)
        indptr, indices = add_self_loops_reference(indptr, indices, self_index)
    weight = edge_softmax_reference(indptr, indices, score_source, score_target, negative_slope)
    return weighted_spmm_reference(indptr, indices, weight, x)


def add_self_loops_reference(
    indptr: Tensor, indices: Tensor, self_index: Tensor
) -> tuple[Tensor, Tensor]:
    """Reference for `add_self_loops`, without the padding that it has on a GPU."""
    targets = torch.arange(len(self_index), device=indices.device)
    target_of = torch.repeat_interleave(targets, indptr.diff(), output_size=len(indices))
    is_other = indices != self_index[target_of]
    order = torch.sort(torch.cat([target_of[is_other], targets]), stable=True)
    bounds = torch.arange(len(self_index) + 1, device=indices.device)
    return (
        torch.searchsorted(order.values, bounds),
        torch.cat([indices[is_other], self_index])[order.indices],
    )


@njit(nogil=True, cache=True)
def _add_self_loops(indptr, indices, self_index, out_indptr, out_indices):
    position = 0
    out_indptr[0] = 0
    for t in range(len(self_index)):
        for e in range(indptr[t], indptr[t + 1]):
            out_indices[position] = indices[e]
            # `position` does not advance after a self loop, so the next edge overwrites it
            position += indices[e] != self_index[t]
        out_indices[position] = self_index[t]
        position += 1
        out_indptr[t + 1] = position


def add_self_loops_torch(
    indptr: Tensor, indices: Tensor, self_index: Tensor, num_sources: int
) -> tuple[Tensor, Tensor]:
    """`add_self_loops` in torch operations that do not synchronize the host with the device.

    The number of self loops in the block is known only on the device, so the result has room for
    E + T edges.
    """
    num_edges, num_targets = len(indices), len(self_index)
    edges = torch.arange(num_edges, device=indices.device, dtype=indptr.dtype)
    target_of = torch.searchsorted(indptr[1:].contiguous(), edges, right=True)
    is_loop = indices == self_index.index_select(0, target_of)
    kept_before = torch.nn.functional.pad(torch.cumsum(~is_loop, 0), (1, 0))
    targets = torch.arange(num_targets + 1, device=indices.device)
    out_indptr = kept_before.index_select(0, indptr) + targets
    # The position of an edge that is kept is the number of kept edges before it, plus one new self
    # loop for each earlier target. The block's own self loops move to the end, as padding.
    loops_before = edges - kept_before[:-1]
    position = torch.where(is_loop, out_indptr[-1] + loops_before, kept_before[:-1] + target_of)
    out_indices = indices.new_empty(num_edges + num_targets)
    out_indices.scatter_(0, position, indices.masked_fill(is_loop, num_sources))
    return out_indptr, out_indices.scatter_(0, out_indptr[1:] - 1, self_index)


def add_self_loops(
    indptr: Tensor, indices: Tensor, self_index: Tensor, num_sources: int
) -> tuple[Tensor, Tensor]:
    """Return the block with exactly one self loop per target, as the last edge of the target.

    Args:
        indptr: (T + 1,) int32 or int64.
        indices: (E,) int32 or int64 sources.
        self_index: (T,) with the dtype of `indices`: the index of each target among the sources.
        num_sources: S.

    Returns:
        indptr, int64, and indices with the dtype of `indices`. On a GPU the indices have E + T
        elements; those after the last target's edges are padding with the value S.
    """
    if indices.device.type != "cpu":
        return add_self_loops_torch(indptr, indices, self_index, num_sources)
    out_indptr = torch.empty(len(indptr), dtype=torch.int64)
    out_indices = indices.new_empty(len(indices) + len(self_index))
    _add_self_loops(
        *(array.numpy() for array in (indptr, indices, self_index, out_indptr, out_indices))
    )
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
    self_index: Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """Sum the rows of each target's in-neighbours, weighted by attention, per head.

    Differentiable once, in `x` and both scores. The result does not depend on the number of
    threads. bfloat16 and float16 inputs are accumulated in float32 with float32 weights, and
    rounded once.

    Args:
        indptr: (T + 1,) int32 or int64, the CSC pointers: the first edge of each target.
        indices: (E,) int32 or int64 sources in [0, S). They are not checked: an id out of range
            reads out of bounds.
        x: (S, H, F) floating point, or (S, 1, F): rows shared by all heads.
        score_source: (S, H) floating point.
        score_target: (T, H) with the dtype of `score_source`.
        negative_slope: of the LeakyReLU.
        self_loops: add one self loop per target, and ignore the self loops of the block.
        self_index: (T,) int32 or int64, the index in [0, S) of each target among the sources, for
            its self loop; target t is source t if None. The values are checked on the CPU only.
        dropout: probability in [0, 1) that an attention weight is zeroed, after the softmax.
        seed: 64-bit seed of the dropout.

    Returns:
        (T, H, F) with the dtype of `x`; zeros for a target without edges.

    Raises:
        ValueError: a shape, dtype or device does not match; on the CPU, an element of
            `self_index` is outside [0, S); or `dropout` is outside [0, 1), or rounds to 1.
    """
    check_block("gat_aggregate", indptr, indices, x)
    if len(score_source) != len(x):
        raise ValueError(
            f"gat_aggregate: score_source has {len(score_source)} rows, but x has {len(x)}"
        )
    if self_loops:
        indptr, indices = checked_self_loops("gat_aggregate", indptr, indices, x, self_index)
    # the weights of bfloat16 and float16 scores stay float32
    source, target = (score.to(sum_dtype(score)[0]) for score in (score_source, score_target))
    weight = edge_softmax(indptr, indices, source, target, negative_slope)
    return weighted_spmm(indptr, indices, drop(weight, dropout, seed) if dropout else weight, x)


_looped_blocks: BlockCache[tuple[Tensor, Tensor]] = BlockCache()


def checked_self_loops(
    name: str, indptr: Tensor, indices: Tensor, x: Tensor, self_index: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Check `self_index`, and return the block with self loops, as `add_self_loops` does.

    If `self_index` is None, the result is cached as long as `indices` exists. It is recomputed for
    another `indptr` or number of sources, and after a write to `indptr` or `indices`.

    Args:
        name: the function that an error message names.
        indptr: (T + 1,) int32 or int64.
        indices: (E,) int32 or int64 sources.
        x: (S, H, F) rows of the sources.
        self_index: (T,) int32 or int64; target t is source t if None.
    """
    _check_self_index(name, self_index, len(indptr) - 1, x)
    if self_index is not None:
        return add_self_loops(indptr, indices, self_index.to(indices.dtype), len(x))

    def add_own() -> tuple[Tensor, Tensor]:
        targets = torch.arange(len(indptr) - 1, dtype=indices.dtype, device=indices.device)
        return add_self_loops(indptr, indices, targets, len(x))

    return _looped_blocks.get(indptr, indices, len(x), add_own)


def _check_self_index(name: str, self_index: Tensor | None, num_targets: int, x: Tensor) -> None:
    """Check that the source of each target exists, without synchronizing with a GPU."""
    if self_index is None:
        if num_targets > len(x):
            raise ValueError(f"{name}: {num_targets} targets, but x has {len(x)} sources")
        return
    check_device(name, "self_index", self_index, x.device)
    if self_index.shape != (num_targets,) or self_index.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name}: self_index has shape {tuple(self_index.shape)} and dtype "
            f"{self_index.dtype}, not ({num_targets},) and int32 or int64"
        )
    if self_index.device.type == "cpu" and num_targets:
        low, high = (int(bound) for bound in self_index.aminmax())
        if low < 0 or high >= len(x):
            raise ValueError(
                f"{name}: self_index has values from {low} to {high}, but there are "
                f"{len(x)} sources"
            )
