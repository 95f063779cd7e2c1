"""Convert CSC to an edge list (COO).

The conversion runs in the calling thread: the loader's threads already run in parallel, and
further threads would compete with the model for cores.

Notation: T targets, E edges.
"""

import torch
from numba import njit
from torch import Tensor


def csc_to_coo_reference(indptr: Tensor, indices: Tensor, first: int = 0) -> Tensor:
    """Reference for `csc_to_coo`."""
    targets = torch.arange(len(indptr) - 1).repeat_interleave(indptr.diff())
    return torch.stack([indices.long(), targets])[:, int(indptr[first]) :]


@njit(nogil=True, cache=True)
def _csc_to_coo(indptr, indices, first, src_E, dst_E):
    begin = indptr[first]
    for target in range(first, len(indptr) - 1):
        for edge in range(indptr[target], indptr[target + 1]):
            src_E[edge - begin] = indices[edge]
            dst_E[edge - begin] = target


def csc_to_coo(indptr: Tensor, indices: Tensor, out: Tensor, first: int = 0) -> Tensor:
    """Write the sources and targets of the edges in CSC order, from column `first` on.

    Args:
        indptr: (T + 1,) int64 on the host.
        indices: (E,) int32 or int64 sources, on the host.
        out: (2, edges) int64 on the host, with as many edges as the columns from `first` on have;
            its rows need not be adjacent in memory.
        first: the first column to convert.

    Returns:
        `out`.
    """
    _csc_to_coo(indptr.numpy(), indices.numpy(), first, out[0].numpy(), out[1].numpy())
    return out
