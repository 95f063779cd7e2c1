"""From CSC to an edge list.

One pass by the calling thread alone: threads that make minibatches side by side are not to start
others, which would wait for work where the model could run.

Letters: T targets, E edges.
"""

import torch
from numba import njit
from torch import Tensor


def edges_reference(indptr: Tensor, indices: Tensor, first: int = 0) -> Tensor:
    """What `edges` must equal."""
    targets = torch.arange(len(indptr) - 1).repeat_interleave(indptr.diff())
    return torch.stack([indices.long(), targets])[:, int(indptr[first]) :]


@njit(nogil=True, cache=True)
def _edges(indptr, indices, first, src_E, dst_E):
    begin = indptr[first]
    for target in range(first, len(indptr) - 1):
        for edge in range(indptr[target], indptr[target + 1]):
            src_E[edge - begin] = indices[edge]
            dst_E[edge - begin] = target


def edges(indptr: Tensor, indices: Tensor, out: Tensor, first: int = 0) -> Tensor:
    """Write the sources and targets of the columns from `first` on, column by column.

    Args:
        indptr: (T + 1,) int64 on the host.
        indices: (E,) int32 or int64 sources, on the host.
        out: (2, E) int64 on the host, E without the edges of columns before `first`; rows may be
            apart.
        first: the first column.

    Returns:
        `out`.
    """
    _edges(indptr.numpy(), indices.numpy(), first, out[0].numpy(), out[1].numpy())
    return out
