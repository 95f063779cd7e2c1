"""Find edges in sorted columns, and exclude them from sampling.

A column is sorted if its sources ascend; then an edge is found by bisection, and equal edges lie
side by side, so that the edges to leave out of a column are a few ranges of it. A position among
the edges that are kept becomes one among all by adding the length of the ranges before it.

Letters: N nodes, E edges, S seeds, P pairs, R ranges.
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
    """For each of S columns, the ranges of edges that are left out, in their order."""

    first: Array  # (S + 1,) int64: the ranges of column i are those from first[i] to first[i + 1]
    kept_before: Array  # (R,) int64 edges of the column before the range that are kept
    removed: Array  # (R,) int64 edges of the column left out up to the end of the range


def exclude_edges_reference(indptr: Array, indices: Array, nodes: Array, edges: set) -> list[Array]:
    """Of each column of `nodes`, what is kept if the (source, node) of `edges` are left out."""
    return [
        np.array(
            [e for e in range(*indptr[n : n + 2]) if (int(indices[e]), int(n)) not in edges],
            np.int64,
        )
        for n in nodes
    ]


@njit(cache=True, nogil=True)
def lower_bound(indices, begin, end, source):
    """The first place from `begin` to `end` of an ascending column that is not below `source`."""
    while begin < end:
        middle = (begin + end) >> 1
        if indices[middle] < source:
            begin = middle + 1
        else:
            end = middle
    return begin


@njit(cache=True, nogil=True)
def has_edge(indptr, indices, source, target):
    """Whether there is an edge from `source` to `target`, in sorted columns."""
    end = indptr[target + 1]
    place = lower_bound(indices, indptr[target], end, source)
    return place < end and indices[place] == source


@njit(cache=True, nogil=True)
def _are_edges(indptr, indices, sources, targets, out, begin, end):
    for i in range(begin, end):
        out[i] = has_edge(indptr, indices, sources[i], targets[i])


def are_edges(
    indptr: Array, indices: Array, sources: Array, targets: Array, *, threads: int | None = None
) -> Array:
    """(P,) bool: whether there is an edge from each source to its target, in sorted columns."""
    out = np.empty(len(sources), np.bool_)
    parallel_for(_are_edges, len(out), indptr, indices, sources, targets, out, threads=threads)
    return out


@njit(cache=True, nogil=True)
def _first_unsorted(indptr, indices, found, begin, end):
    for node in range(begin, end):
        for e in range(indptr[node] + 1, indptr[node + 1]):
            if indices[e] < indices[e - 1]:
                found[0] = True
                return


@njit(cache=True, nogil=True)
def _sort(indptr, indices, out, order, begin, end):
    for node in range(begin, end):
        first, last = indptr[node], indptr[node + 1]
        if len(order):
            places = np.argsort(indices[first:last], kind="mergesort")
            for i in range(last - first):
                order[first + i] = first + places[i]
                out[first + i] = indices[first + places[i]]
        else:
            out[first:last] = indices[first:last]
            out[first:last].sort()


def is_sorted(indptr: Array, indices: Array, *, threads: int | None = None) -> bool:
    """Whether the sources of every column ascend; equal ones may follow each other."""
    found = np.zeros(1, np.bool_)
    parallel_for(_first_unsorted, len(indptr) - 1, indptr, indices, found, threads=threads)
    return not found[0]


def sorted_columns(
    indptr: Array, indices: Array, *, order: bool = False, threads: int | None = None
) -> tuple[Array, Array | None]:
    """The columns with their sources in ascending order, as a copy.

    Args:
        indptr: (N + 1,) int64.
        indices: (E,) int32 or int64.
        order: also say where in `indices` each edge stood; equal ones stay in their order.
        threads: how many at once; `torch.get_num_threads()` if None.

    Returns:
        (E,) sources, and (E,) int64 positions or None.
    """
    out = np.empty_like(indices)
    places = np.empty(len(indices) if order else 0, np.int64)
    parallel_for(_sort, len(indptr) - 1, indptr, indices, out, places, threads=threads)
    return out, places if order else None


@njit(cache=True, nogil=True)
def _ranges(indptr, indices, nodes, locals_P, sources_P, first, kept_before, removed):
    """Write the ranges that hold the pairs; return how many there are."""
    count = pair = 0
    for i in range(len(nodes)):
        begin, end = indptr[nodes[i]], indptr[nodes[i] + 1]
        first[i] = count
        gone = 0
        place = begin
        while pair < len(locals_P) and locals_P[pair] == i:
            low = lower_bound(indices, place, end, sources_P[pair])
            high = lower_bound(indices, low, end, sources_P[pair] + 1)
            if high > low:
                kept_before[count] = low - begin - gone
                gone += high - low
                removed[count] = gone
                count += 1
            place = high
            pair += 1
    first[len(nodes)] = count
    return count


def exclude_edges(
    indptr: Array, indices: Array, nodes: Array, locals_: Array, sources: Array
) -> ExcludedEdges:
    """What to leave out of the columns of `nodes`, so that no edge of the pairs is kept.

    Args:
        indptr: (N + 1,) int64.
        indices: (E,) int32 or int64, each column ascending.
        nodes: (S,) int64 in [0, N).
        locals_: (P,) int64 in [0, S): the place in `nodes` of each pair's destination.
        sources: (P,) int64 in [0, N): its source. Pairs that are no edges leave nothing out; a pair
            may occur several times.

    Returns:
        The ranges, which `gcnzc.kernels.sample.sample` takes for the same `nodes` as seeds.
    """
    num_nodes = len(indptr) - 1
    keys = np.unique(locals_ * num_nodes + sources)
    first = np.empty(len(nodes) + 1, np.int64)
    kept_before, removed = np.empty((2, len(keys)), np.int64)
    wanted = keys // num_nodes, keys % num_nodes
    count = _ranges(indptr, indices, nodes, *wanted, first, kept_before, removed)
    return ExcludedEdges(first, kept_before[:count], removed[:count])


@njit(cache=True, nogil=True)
def num_removed(first, removed, column):
    """How many edges are left out of a column; none beyond the last that is told of."""
    if column >= len(first) - 1 or first[column] == first[column + 1]:
        return 0
    return removed[first[column + 1] - 1]


@njit(cache=True, nogil=True)
def position_of(first, kept_before, removed, column, kept):
    """Where the edge number `kept` of those that are kept stands among all of its column."""
    begin, end = first[column], first[column + 1]
    # the last range that begins at or before it
    while begin < end:
        middle = (begin + end) >> 1
        if kept_before[middle] <= kept:
            begin = middle + 1
        else:
            end = middle
    return kept if begin == first[column] else kept + removed[begin - 1]
