"""Find edges in sorted columns, and exclude edges from sampling.

In a column with ascending sources an edge is found by binary search, and duplicate edges are
adjacent, so the edges to exclude from a column form a few ranges. A position among the remaining
edges is mapped to a position among all edges by adding the lengths of the ranges before it.

Notation: N nodes, E edges, S seeds, P pairs, R ranges.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from gcnzc.kernels.threads import parallel_for

Array = NDArray[Any]


@dataclass(frozen=True)
class ExcludedEdges:
    """The ranges of edges that are excluded from each of S columns, in ascending order."""

    first: Array  # (S + 1,) int64: the ranges of column i are first[i] to first[i + 1] - 1
    kept_before: Array  # (R,) int64: the column's edges before the range that are not excluded
    removed: Array  # (R,) int64: the column's excluded edges up to the end of the range


def exclude_edges_reference(indptr: Array, indices: Array, nodes: Array, edges: set) -> list[Array]:
    """Return the positions of the edges that remain in each column of `nodes`.

    `edges` is the set of (source, node) pairs to exclude.
    """
    return [
        np.array(
            [e for e in range(*indptr[n : n + 2]) if (int(indices[e]), int(n)) not in edges],
            np.int64,
        )
        for n in nodes
    ]


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
def _ranges(indptr, indices, nodes, locals_P, sources_P, first, kept_before, removed):
    """Write the ranges of the pairs' edges; return the number of ranges."""
    count = pair = 0
    for i in range(len(nodes)):
        begin, end = indptr[nodes[i]], indptr[nodes[i] + 1]
        first[i] = count
        num_excluded_so_far = 0
        position = begin
        while pair < len(locals_P) and locals_P[pair] == i:
            low = lower_bound(indices, position, end, sources_P[pair])
            high = lower_bound(indices, low, end, sources_P[pair] + 1)
            if high > low:
                kept_before[count] = low - begin - num_excluded_so_far
                num_excluded_so_far += high - low
                removed[count] = num_excluded_so_far
                count += 1
            position = high
            pair += 1
    first[len(nodes)] = count
    return count


def exclude_edges(
    indptr: Array, indices: Array, nodes: Array, locals_: Array, sources: Array
) -> ExcludedEdges:
    """Find the ranges of edges to exclude so that no edge between the given pairs is sampled.

    Args:
        indptr: (N + 1,) int64.
        indices: (E,) int32 or int64, each column ascending.
        nodes: (S,) int64 in [0, N).
        locals_: (P,) int64 in [0, S): the position in `nodes` of each pair's destination.
        sources: (P,) int64 in [0, N): each pair's source. Pairs without an edge have no effect; a
            pair may occur several times.

    Returns:
        The ranges, to pass to `gcnzc.kernels.sample.sample` with `nodes` as seeds.
    """
    num_nodes = len(indptr) - 1
    keys = np.unique(locals_ * num_nodes + sources)
    first = np.empty(len(nodes) + 1, np.int64)
    kept_before, removed = np.empty((2, len(keys)), np.int64)
    pairs = keys // num_nodes, keys % num_nodes
    count = _ranges(indptr, indices, nodes, *pairs, first, kept_before, removed)
    return ExcludedEdges(first, kept_before[:count], removed[:count])


@njit(cache=True, nogil=True)
def num_excluded(first, removed, column):
    """Return the number of edges excluded from a column; 0 for columns without ranges."""
    if column >= len(first) - 1 or first[column] == first[column + 1]:
        return 0
    return removed[first[column + 1] - 1]


@njit(cache=True, nogil=True)
def original_position(first, kept_before, removed, column, kept):
    """Map a position among a column's remaining edges to a position among all its edges."""
    begin, end = first[column], first[column + 1]
    # binary search for the last range that begins at or before the edge
    while begin < end:
        middle = (begin + end) >> 1
        if kept_before[middle] <= kept:
            begin = middle + 1
        else:
            end = middle
    return kept if begin == first[column] else kept + removed[begin - 1]
