"""The permutation that sorts an edge list into CSC order.

Notation: N nodes, E edges.
"""

import numpy as np
import torch
from numba import njit
from torch import Tensor


def csc_order_reference(dst: Tensor) -> Tensor:
    """Reference for `csc_order`."""
    return torch.argsort(dst, stable=True)


@njit(nogil=True, cache=True)
def _csc_order(dst_E, head_N, out_E):
    for edge in range(len(dst_E)):
        position = head_N[dst_E[edge]]
        head_N[dst_E[edge]] = position + 1
        out_E[position] = edge


def csc_order(indptr: Tensor, dst: Tensor) -> Tensor:
    """Return the permutation that sorts an edge list as `gcnzc.Graph.from_edges` does.

    Args:
        indptr: (N + 1,) int64 on the host: the offset of each node's column.
        dst: (E,) int32 or int64 on the host, targets in [0, N), not checked; may be strided.

    Returns:
        (E,) int64 positions in the list, in CSC order.
    """
    out = torch.empty(len(dst), dtype=torch.int64)
    # `dst` may be a strided view, such as a row of an (E, 2) tensor
    _csc_order(np.asarray(dst.numpy()), indptr[:-1].numpy().copy(), out.numpy())
    return out
