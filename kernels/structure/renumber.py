"""Select columns of a graph in CSC format, and renumber their sources.

Notation: N nodes, E edges of the graph, T selected nodes.
"""

import torch
from numba import njit
from torch import Tensor

from gcnzc.kernels.threads import parallel_for

# below 4096 selected nodes, starting a thread costs more than it saves
GRAIN_SIZE = 4096


def mark_sources_reference(indptr: Tensor, indices: Tensor, nodes: Tensor) -> Tensor:
    """Reference for `mark_sources`: return the (N,) mask of the sources."""
    found = [indices[indptr[node] : indptr[node + 1]].long() for node in nodes.tolist()]
    mask = torch.zeros(len(indptr) - 1, dtype=torch.bool)
    mask[torch.cat([nodes[:0], *found])] = True
    return mask


@njit(nogil=True, cache=True)
def _mark_sources(indptr, indices, nodes_T, mask_N, begin, end):
    for t in range(begin, end):
        for e in range(indptr[nodes_T[t]], indptr[nodes_T[t] + 1]):
            # several threads may write the same value
            mask_N[indices[e]] = True


def mark_sources(indptr: Tensor, indices: Tensor, nodes: Tensor, mask: Tensor) -> None:
    """Set `mask` at the sources of the in-edges of `nodes`.

    Args:
        indptr: (N + 1,) int64 on the host: the offset of each node's column.
        indices: (E,) int32 or int64 sources in [0, N), not checked.
        nodes: (T,) int64 in [0, N), not checked.
        mask: (N,) bool, on the host.
    """
    arrays = (array.numpy() for array in (indptr, indices, nodes, mask))
    parallel_for(_mark_sources, len(nodes), *arrays, grain_size=GRAIN_SIZE)


def select_columns_reference(
    indptr: Tensor, indices: Tensor, nodes: Tensor, number_of: Tensor
) -> tuple[Tensor, Tensor]:
    """Reference for `select_columns`."""
    columns = [number_of[indices[indptr[n] : indptr[n + 1]].long()] for n in nodes.tolist()]
    sizes = torch.tensor([0, *map(len, columns)])
    return sizes.cumsum(0), torch.cat([number_of[:0], *columns])


@njit(nogil=True, cache=True)
def _select_columns(
    indptr, indices, nodes_T, number_of_N, out_indptr, out_indices, begin, end
):  # fmt: skip
    for t in range(begin, end):
        position = out_indptr[t]
        for e in range(indptr[nodes_T[t]], indptr[nodes_T[t] + 1]):
            out_indices[position] = number_of_N[indices[e]]
            position += 1


def select_columns(
    indptr: Tensor, indices: Tensor, nodes: Tensor, number_of: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the columns of `nodes`, in this order, with renumbered sources in stored order.

    Args:
        indptr: (N + 1,) int64 on the host: the offset of each node's column.
        indices: (E,) int32 or int64 sources in [0, N), not checked.
        nodes: (T,) int64 in [0, N), not checked.
        number_of: (N,) int32 or int64, the new number of each node.

    Returns:
        indptr (T + 1,) int64, and indices with the dtype of `number_of`.
    """
    out_indptr = torch.zeros(len(nodes) + 1, dtype=torch.int64)
    torch.cumsum(indptr[nodes + 1] - indptr[nodes], 0, out=out_indptr[1:])
    out_indices = torch.empty(int(out_indptr[-1]), dtype=number_of.dtype)
    arrays = (
        array.numpy() for array in (indptr, indices, nodes, number_of, out_indptr, out_indices)
    )
    parallel_for(_select_columns, len(nodes), *arrays, grain_size=GRAIN_SIZE)
    return out_indptr, out_indices
