"""Transpose a block: group its edges by source.

This is a stable counting sort, so sums over the out-edges of a source have a fixed order: the
gradient of an aggregation does not depend on the number of threads, and each of its rows is written
once.

Notation: S sources, T targets, E edges of the block.
"""

from dataclasses import dataclass

import torch
from numba import njit
from torch import Tensor

from gcnzc.kernels.buffers import Pool
from gcnzc.kernels.structure.block_cache import BlockCache

# page faults of newly allocated memory would take longer than the sort
_empty = Pool().empty


@dataclass(frozen=True)
class Transposed:
    """The out-edges of every source in CSR format, on the device of the block."""

    indptr: Tensor  # (S + 1,) with the dtype of the block's indptr
    targets: Tensor  # (E,) with the dtype of the block's indices
    edges: Tensor  # (E,) with the dtype of the block's indptr: position of each edge in the block


def transpose_reference(indptr: Tensor, indices: Tensor, num_sources: int) -> Transposed:
    """Reference for `transpose`, and its implementation on a GPU."""
    sorted_sources, edges = torch.sort(indices, stable=True)
    bounds = torch.arange(num_sources + 1, device=indices.device, dtype=indices.dtype)
    # by search instead of by repeating targets, since padding edges have no target
    target_of = torch.searchsorted(indptr[1:].contiguous(), edges.to(indptr.dtype), right=True)
    return Transposed(
        torch.searchsorted(sorted_sources, bounds).to(indptr.dtype),
        target_of.to(indices.dtype),
        edges.to(indptr.dtype),
    )


@njit(nogil=True, cache=True)
def _transpose(indptr_T, indices_E, out_S, targets_E, edges_E):
    num_sources = len(out_S) - 1
    out_S[:] = 0
    # the counts are shifted by two, so that after the cumulative sum out_S[s + 1] is the start of
    # source s; each edge that is placed increments it, so that it ends as the end of source s
    for e in range(len(indices_E)):
        s = indices_E[e] + 2
        if s <= num_sources:
            out_S[s] += 1
    for s in range(2, num_sources + 1):
        out_S[s] += out_S[s - 1]
    for t in range(len(indptr_T) - 1):
        for e in range(indptr_T[t], indptr_T[t + 1]):
            s = indices_E[e] + 1
            position = out_S[s]
            out_S[s] = position + 1
            targets_E[position] = t
            edges_E[position] = e


_transposed_blocks: BlockCache[Transposed] = BlockCache()


def transpose(indptr: Tensor, indices: Tensor, num_sources: int) -> Transposed:
    """Return the out-edges of each source of a block.

    The result is cached as long as `indices` exists, and recomputed if one of the two tensors was
    written to.

    Args:
        indptr: (T + 1,) int32 or int64.
        indices: (E,) int32 or int64 in [0, S), not checked. Elements after the last target's edges
            are padding with the value S, and are in no source's out-edges.
        num_sources: S.
    """
    return _transposed_blocks.get(
        indptr, indices, num_sources, lambda: _transpose_block(indptr, indices, num_sources)
    )


def _transpose_block(indptr: Tensor, indices: Tensor, num_sources: int) -> Transposed:
    if indices.device.type != "cpu":
        return transpose_reference(indptr, indices, num_sources)
    transposed = Transposed(
        _empty(num_sources + 1, indptr.dtype),
        _empty(len(indices), indices.dtype),
        _empty(len(indices), indptr.dtype),
    )
    arrays = (indptr, indices, transposed.indptr, transposed.targets, transposed.edges)
    _transpose(*(array.numpy() for array in arrays))
    return transposed
