"""Transpose a block: the edges of each source.

A stable counting sort. Sums over it have a fixed order, so the backward pass of an aggregation is
the same whatever the number of threads, and each row of a gradient is written once.

Letters: S sources, T targets, E edges of the block.
"""

from dataclasses import dataclass
from typing import Any

import torch
from numba import njit
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gcnzc.kernels.buffers import Pool

# page faults of new memory would cost more than the sort
_empty = Pool().empty


@dataclass(frozen=True)
class Transposed:
    """The out-edges of every source, as CSR; on the device of the block."""

    indptr: Tensor  # (S + 1,) of the dtype of the block's indptr
    targets: Tensor  # (E,) of the dtype of the block's indices
    edges: Tensor  # (E,) of the dtype of the block's indptr: where each edge is in the block


def transpose_reference(indptr: Tensor, indices: Tensor, num_sources: int) -> Transposed:
    """What `transpose` must equal; it is also what runs on a GPU."""
    in_order, edges = torch.sort(indices, stable=True)
    bounds = torch.arange(num_sources + 1, device=indices.device, dtype=indices.dtype)
    # not by repeating targets: edges behind those of the last target have none
    target_of = torch.searchsorted(indptr[1:].contiguous(), edges.to(indptr.dtype), right=True)
    return Transposed(
        torch.searchsorted(in_order, bounds).to(indptr.dtype),
        target_of.to(indices.dtype),
        edges.to(indptr.dtype),
    )


@njit(nogil=True, cache=True)
def _transpose(indptr_T, indices_E, out_S, targets_E, edges_E):
    num_sources = len(out_S) - 1
    out_S[:] = 0
    # counted one place on, so that after the running sum out_S[s + 1] is where s begins, and after
    # all edges are placed it is where s ends
    for e in range(len(indices_E)):
        s = indices_E[e] + 2
        if s <= num_sources:
            out_S[s] += 1
    for s in range(2, num_sources + 1):
        out_S[s] += out_S[s - 1]
    for t in range(len(indptr_T) - 1):
        for e in range(indptr_T[t], indptr_T[t + 1]):
            s = indices_E[e] + 1
            place = out_S[s]
            out_S[s] = place + 1
            targets_E[place] = t
            edges_E[place] = e


_made: Any = WeakIdKeyDictionary()


def transpose(indptr: Tensor, indices: Tensor, num_sources: int) -> Transposed:
    """Return the block's out-edges by source; made once for the tensors of a block, then kept.

    Args:
        indptr: (T + 1,) int32 or int64.
        indices: (E,) int32 or int64 in [0, S), not checked. Those behind the last target's edges
            are S, and in no source's out-edges.
        num_sources: S.

    Returns:
        Kept for as long as `indices` lives, unless one of the two tensors is written to.
    """
    state = (id(indptr), indptr._version, indices._version, num_sources)
    known = _made.get(indices)
    if known is not None and known[0] == state:
        return known[2]
    if indices.device.type == "cpu":
        made = Transposed(
            _empty(num_sources + 1, indptr.dtype),
            _empty(len(indices), indices.dtype),
            _empty(len(indices), indptr.dtype),
        )
        arrays = (indptr, indices, made.indptr, made.targets, made.edges)
        _transpose(*(array.numpy() for array in arrays))
    else:
        made = transpose_reference(indptr, indices, num_sources)
    # indptr is held so that its id stays its own
    _made[indices] = (state, indptr, made)
    return made
