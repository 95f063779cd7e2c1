"""The permutation from an edge list to CSC.

Letters: N nodes, E edges.
"""

import numpy as np
import torch
from numba import njit
from torch import Tensor


def csc_order_reference(dst: Tensor) -> Tensor:
    """What `csc_order` must equal."""
    return torch.argsort(dst, stable=True)


@njit(nogil=True, cache=True)
def _order(dst_E, head_N, out_E):
    for edge in range(len(dst_E)):
        place = head_N[dst_E[edge]]
        head_N[dst_E[edge]] = place + 1
        out_E[place] = edge


def csc_order(indptr: Tensor, dst: Tensor) -> Tensor:
    """The edges of a list, as the columns of `gcnzc.Graph.from_edges` keep them.

    Args:
        indptr: (N + 1,) int64 on the host: where each node's column begins.
        dst: (E,) int32 or int64 on the host, destinations in [0, N), not checked; may be strided.

    Returns:
        (E,) int64 places in the list.
    """
    out = torch.empty(len(dst), dtype=torch.int64)
    # a view as a plain array: its strides may be those of a row of (2, E)
    _order(np.asarray(dst.numpy()), indptr[:-1].numpy().copy(), out.numpy())
    return out
