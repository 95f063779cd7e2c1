"""Build CSC for the edges of one type between two node types, with columns sorted by time.

Notation: E edges, M sources, N destinations.
"""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from gcnzc.kernels.structure.csc import index_dtype
from gcnzc.kernels.threads import parallel_for

Array = NDArray[Any]


ALWAYS = -(2**63)  # the time of edges and sources without a time


@njit(nogil=True, cache=True)
def _count(src, dst, num_src, num_dst, indptr):
    """Count the edges of each column; return the first edge out of range, or -1."""
    for e in range(len(src)):
        if src[e] < 0 or src[e] >= num_src or dst[e] < 0 or dst[e] >= num_dst:
            return e
        indptr[dst[e] + 1] += 1
    return -1


@njit(nogil=True, cache=True)
def _scatter(src, dst, head, indices, order):
    for e in range(len(src)):
        position = head[dst[e]]
        head[dst[e]] = position + 1
        indices[position] = src[e]
        order[position] = e


@njit(nogil=True, cache=True)
def _time(edge_time, node_time, edge, source):
    time = ALWAYS
    if len(edge_time):
        time = edge_time[edge]
    if len(node_time):
        time = max(time, node_time[source])
    return time


@njit(nogil=True, cache=True)
def _sort_columns(indptr, indices, order, edge_time, node_time, begin, end):
    for node in range(begin, end):
        first, last = indptr[node], indptr[node + 1]
        times = np.empty(last - first, np.int64)
        is_sorted = True
        for i in range(len(times)):
            edge = order[first + i]
            times[i] = _time(edge_time, node_time, edge, indices[first + i])
            is_sorted = is_sorted and (i == 0 or times[i - 1] <= times[i])
        if not is_sorted:
            by_time = np.argsort(times, kind="mergesort")
            own_indices, own_order = indices[first:last].copy(), order[first:last].copy()
            for i in range(len(times)):
                indices[first + i] = own_indices[by_time[i]]
                order[first + i] = own_order[by_time[i]]


@njit(nogil=True, cache=True)
def _find_unsorted(indptr, indices, edge_time, node_time):
    for node in range(len(indptr) - 1):
        before = ALWAYS
        for position in range(indptr[node], indptr[node + 1]):
            time = _time(edge_time, node_time, position, indices[position])
            if time < before:
                return node, position, before, time
            before = time
    return -1, -1, ALWAYS, ALWAYS


def bipartite_csc(src: Array, dst: Array, num_src: int, num_dst: int) -> tuple[Array, Array, Array]:
    """Build CSC from an edge list; the edges of a column keep the order of the list.

    Args:
        src: (E,) sources, int32 or int64.
        dst: (E,) destinations, int32 or int64.
        num_src: M.
        num_dst: N.

    Returns:
        `indptr` (N + 1,) int64; `indices` (E,) sources, int32 or int64; and `order` (E,) int64, the
        positions of these edges in the list.

    Raises:
        IndexError: an edge is out of range; the exception's argument is its position.
    """
    indptr = np.zeros(num_dst + 1, np.int64)
    invalid = _count(src, dst, num_src, num_dst, indptr)
    if invalid >= 0:
        raise IndexError(int(invalid))
    np.cumsum(indptr, out=indptr)
    indices, order = np.empty(len(src), index_dtype(num_src)), np.empty(len(src), np.int64)
    _scatter(src, dst, indptr[:-1].copy(), indices, order)
    return indptr, indices, order


def sort_by_time(
    indptr: Array, indices: Array, order: Array, edge_time: Array | None, node_time: Array | None
) -> None:
    """Sort each column by the later of the times of the edge and of its source, in place.

    The sort is stable.

    Args:
        indptr: (N + 1,) valid offsets.
        indices: (E,) valid sources.
        order: (E,) positions in `edge_time`, permuted like `indices`.
        edge_time: (E,) int64; None for edges without times.
        node_time: (M,) int64; None for sources without times.
    """
    arrays = (indptr, indices, order, _or_empty(edge_time), _or_empty(node_time))
    parallel_for(_sort_columns, len(indptr) - 1, *arrays)


def find_unsorted(
    indptr: Array, indices: Array, edge_time: Array | None, node_time: Array | None
) -> tuple[int, int, int, int] | None:
    """Return where a column is not sorted by time, or None.

    Args:
        indptr: (N + 1,) valid offsets.
        indices: (E,) valid sources.
        edge_time: (E,) int64 times of the edges in `indices`, or None.
        node_time: (M,) int64, or None.

    Returns:
        The destination, the position of an edge that is earlier than the one before it, and the
        times of both.
    """
    found = _find_unsorted(indptr, indices, _or_empty(edge_time), _or_empty(node_time))
    return None if found[0] < 0 else (int(found[0]), int(found[1]), int(found[2]), int(found[3]))


def _or_empty(times: Array | None) -> Array:
    return np.empty(0, np.int64) if times is None else times
