"""Find edges in sorted columns, such as those to exclude from sampling.

In a column with ascending sources an edge is found by binary search, and duplicates are adjacent.

Notation: N nodes, E edges, P pairs.
"""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from gcnzc.kernels.threads import parallel_for

Array = NDArray[Any]


@njit(cache=True, nogil=True)
def lower_bound(indices, begin, end, source):
    """Return the first position in [begin, end) of an id not below `source`, or `end`."""
    while begin < end:
        middle = (begin + end) >> 1
        if indices[middle] < source:
            begin = middle + 1
        else:
            end = middle
    return begin


@njit(cache=True, nogil=True)
def has_edge(indptr, indices, source, target):
    """Return whether there is an edge from `source` to `target`, in sorted columns."""
    end = indptr[target + 1]
    position = lower_bound(indices, indptr[target], end, source)
    return position < end and indices[position] == source


@njit(cache=True, nogil=True)
def _are_edges(indptr, indices, sources, targets, out, begin, end):
    for i in range(begin, end):
        out[i] = has_edge(indptr, indices, sources[i], targets[i])


def are_edges(
    indptr: Array, indices: Array, sources: Array, targets: Array, *, threads: int | None = None
) -> Array:
    """Return (P,) bool: whether there is an edge from each source to its target.

    The columns must be sorted.
    """
    out = np.empty(len(sources), np.bool_)
    parallel_for(_are_edges, len(out), indptr, indices, sources, targets, out, threads=threads)
    return out


@njit(cache=True, nogil=True)
def _find_unsorted_column(indptr, indices, found, begin, end):
    for node in range(begin, end):
        for e in range(indptr[node] + 1, indptr[node + 1]):
            if indices[e] < indices[e - 1]:
                found[0] = True
                return


@njit(cache=True, nogil=True)
def _sort_columns(indptr, indices, out, order, begin, end):
    for node in range(begin, end):
        first, last = indptr[node], indptr[node + 1]
        if len(order):
            positions = np.argsort(indices[first:last], kind="mergesort")
            for i in range(last - first):
                order[first + i] = first + positions[i]
                out[first + i] = indices[first + positions[i]]
        else:
            out[first:last] = indices[first:last]
            out[first:last].sort()


def is_sorted(indptr: Array, indices: Array, *, threads: int | None = None) -> bool:
    """Return whether the sources of every column are in ascending order, with duplicates."""
    found = np.zeros(1, np.bool_)
    parallel_for(_find_unsorted_column, len(indptr) - 1, indptr, indices, found, threads=threads)
    return not found[0]


def sort_columns(
    indptr: Array, indices: Array, *, order: bool = False, threads: int | None = None
) -> tuple[Array, Array | None]:
    """Return a copy of `indices` with the sources of each column in ascending order.

    Args:
        indptr: (N + 1,) int64.
        indices: (E,) int32 or int64.
        order: also return the original position of each edge; the sort is then stable.
        threads: number of threads; `torch.get_num_threads()` if None.

    Returns:
        (E,) sources, and (E,) int64 positions or None.
    """
    out = np.empty_like(indices)
    positions = np.empty(len(indices) if order else 0, np.int64)
    parallel_for(_sort_columns, len(indptr) - 1, indptr, indices, out, positions, threads=threads)
    return out, positions if order else None


@njit(cache=True, nogil=True)
def _find_edges(indptr, indices, sources, targets, begins, counts):
    for i in range(len(sources)):
        end = indptr[targets[i] + 1]
        begins[i] = lower_bound(indices, indptr[targets[i]], end, sources[i])
        counts[i] = lower_bound(indices, begins[i], end, sources[i] + 1) - begins[i]


def find_edges_reference(indptr: Array, indices: Array, sources: Array, targets: Array) -> Array:
    """Reference for `find_edges`."""
    pairs = set(zip(sources.tolist(), targets.tolist(), strict=True))
    owners = np.arange(len(indptr) - 1).repeat(np.diff(indptr))
    edges = zip(indices.tolist(), owners.tolist(), strict=True)
    return np.array([e for e, edge in enumerate(edges) if edge in pairs], np.int64)


def find_edges(indptr: Array, indices: Array, sources: Array, targets: Array) -> Array:
    """Return the positions of all edges between pairs of nodes.

    Args:
        indptr: (N + 1,) int64.
        indices: (E,) int32 or int64, each column ascending.
        sources: (P,) int64 in [0, N).
        targets: (P,) int64 in [0, N). Pairs without an edge have no effect; a pair may occur
            several times.

    Returns:
        int64 positions in `indices`, ascending.
    """
    num_nodes = len(indptr) - 1
    keys = np.unique(targets * num_nodes + sources)
    begins, counts = np.empty((2, len(keys)), np.int64)
    _find_edges(indptr, indices, keys % num_nodes, keys // num_nodes, begins, counts)
    first = np.cumsum(counts) - counts
    return np.repeat(begins - first, counts) + np.arange(counts.sum())
