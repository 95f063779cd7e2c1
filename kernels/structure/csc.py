"""From an edge list to CSC: a stable counting sort by destination.

A plain counting sort writes each edge to a random place, which misses the cache once the graph
is larger than it. Here the edges are first dealt out into buckets of neighbouring destinations, by
the high bits of the destination, and then sorted bucket by bucket inside the cache. Both steps
keep the order of the list, so the result does not depend on the number of threads.

Beside the result lie two bytes an edge (the low bits of its destination) and one bucket a thread.

Letters: N nodes, E edges, P buckets, S segments of the edge list.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from gcnzc.kernels.threads import parallel_for

Array = NDArray[Any]


# the remedy for numbers that no graph has
VERIFY = "hint: `gcnzc info DATA --verify` says which file of a prepared folder is damaged"


# one run of the edge list: its sources and destinations, made when asked for
Segment = Callable[[], tuple[Array, Array]]


SEGMENT_EDGES = 1 << 21  # edges a segment should have: small beside the graph, large beside P


LOW_BITS = 16  # of a destination, kept per edge while it lies in its bucket


# a bucket that holds more than this share of the edges is sorted from the edge list once more,
# so that the threads' buckets together stay an eighth of the result
SHARE_OF_BUCKETS = 8


def csc_reference(src: Array, dst: Array, num_nodes: int) -> tuple[Array, Array]:
    """What `csc` must equal: `(indptr, indices)` by numpy's stable sort."""
    indptr = np.concatenate([[0], np.bincount(dst, minlength=num_nodes).cumsum()])
    return indptr, src[np.argsort(dst, kind="stable")]


def index_dtype(num_nodes: int) -> type[np.signedinteger]:
    """The narrowest of int32 and int64 that can number `num_nodes` nodes."""
    return np.int32 if num_nodes < 2**31 else np.int64


def slices(src: Array, dst: Array) -> list[Segment]:
    """The segments of an edge list that lies in memory or is memory-mapped."""

    def run(begin: int) -> Segment:
        return lambda: (src[begin : begin + SEGMENT_EDGES], dst[begin : begin + SEGMENT_EDGES])

    return [run(begin) for begin in range(0, len(src), SEGMENT_EDGES)]


def columns(indptr: Array, indices: Array, *, reverse: bool = False) -> list[Segment]:
    """The segments of a CSC graph's edges, `indices[e] -> column of e`, or of their reverse."""
    num_edges, dtype = len(indices), index_dtype(len(indptr) - 1)

    def run(begin: int) -> Segment:
        def edges() -> tuple[Array, Array]:
            end = min(begin + SEGMENT_EDGES, num_edges)
            column = np.empty(end - begin, dtype)
            _columns(indptr, begin, column)
            row = indices[begin:end]
            return (column, row) if reverse else (row, column)

        return edges

    return [run(begin) for begin in range(0, num_edges, SEGMENT_EDGES)]


def loops(num_nodes: int) -> list[Segment]:
    """The segments of one self loop per node."""

    def run(begin: int) -> Segment:
        def edges() -> tuple[Array, Array]:
            end = min(begin + SEGMENT_EDGES, num_nodes)
            nodes = np.arange(begin, end, dtype=index_dtype(num_nodes))
            return nodes, nodes

        return edges

    return [run(begin) for begin in range(0, num_nodes, SEGMENT_EDGES)]


@njit(nogil=True, cache=True)
def _columns(indptr, begin, column_E):
    node = np.searchsorted(indptr, begin, side="right") - 1
    for i in range(len(column_E)):
        while indptr[node + 1] <= begin + i:
            node += 1
        column_E[i] = node


@njit(nogil=True, cache=True)
def _count(src_E, dst_E, num_nodes, shift, drop_loops, count_P):
    """Count the edges of each bucket; the first edge out of range, or -1."""
    for i in range(len(src_E)):
        source, target = src_E[i], dst_E[i]
        if source < 0 or source >= num_nodes or target < 0 or target >= num_nodes:
            return i
        if not (drop_loops and source == target):
            count_P[target >> shift] += 1
    return -1


@njit(nogil=True, cache=True)
def _deal(src_E, dst_E, shift, drop_loops, head_P, indices_E, low_E):
    """Write each edge behind those already in its bucket."""
    mask = (1 << shift) - 1
    for i in range(len(src_E)):
        source, target = src_E[i], dst_E[i]
        if drop_loops and source == target:
            continue
        bucket = target >> shift
        place = head_P[bucket]
        head_P[bucket] = place + 1
        indices_E[place] = source
        low_E[place] = target & mask


@njit(nogil=True, cache=True)
def _sort_buckets(start_P, shift, largest, low_E, indptr_N, indices_E, begin, end):
    """Sort each bucket of at most `largest` edges that starts in `[begin, end)`; point into all."""
    num_nodes, num_edges = len(indptr_N) - 1, len(indices_E)
    head = np.empty(1 << shift, np.int64)
    held = np.empty(largest, indices_E.dtype)
    bucket = np.searchsorted(start_P[:-1], begin, side="left")
    while bucket < len(start_P) - 1:
        start, stop = start_P[bucket], start_P[bucket + 1]
        # empty buckets behind the last edge belong to the last part
        if start >= end and end < num_edges:
            break
        first = bucket << shift
        last = min(first + (1 << shift), num_nodes)
        head[:] = 0
        for e in range(start, stop):
            head[low_E[e]] += 1
        total = start
        for node in range(first, last):
            count = head[node - first]
            head[node - first] = total
            total += count
            indptr_N[node + 1] = total
        if stop - start <= largest:
            for e in range(start, stop):
                held[e - start] = indices_E[e]
            for e in range(start, stop):
                place = head[low_E[e]]
                head[low_E[e]] = place + 1
                indices_E[place] = held[e - start]
        bucket += 1


@njit(nogil=True, cache=True)
def _scatter(src_E, dst_E, drop_loops, first, last, head_N, indices_E):
    """Write the edges into nodes `[first, last)` behind those already in their columns."""
    for i in range(len(src_E)):
        source, target = src_E[i], dst_E[i]
        if target >= first and target < last and not (drop_loops and source == target):
            place = head_N[target - first]
            head_N[target - first] = place + 1
            indices_E[place] = source


def csc(
    segments: Sequence[Segment],
    num_nodes: int,
    *,
    without_loops: int = 0,
    threads: int | None = None,
) -> tuple[Array, Array]:
    """Sort edges by destination, those of one destination in the order of the list.

    Args:
        segments: the edge list in runs, each giving (E,) sources and (E,) destinations, int32 or
            int64; each is asked for two or three times.
        num_nodes: nodes are 0 to num_nodes - 1.
        without_loops: leave out the edges from a node to itself in this many first segments.
        threads: how many at once; `torch.get_num_threads()` if None.

    Returns:
        `indptr` (N + 1,) int64 and `indices` (E,) int32, or int64 from 2**31 nodes on.

    Raises:
        ValueError: an edge has an end that is no node.
    """
    shift = min(LOW_BITS, max(0, (num_nodes - 1).bit_length() - 8))
    num_buckets = (num_nodes + (1 << shift) - 1) >> shift
    if threads is None:
        threads = torch.get_num_threads()
    place_SP = np.zeros((len(segments), num_buckets), np.int64)
    wrong_S = np.full(len(segments), -1, np.int64)

    def count(begin: int, end: int) -> None:
        for s in range(begin, end):
            wrong_S[s] = _count(*segments[s](), num_nodes, shift, s < without_loops, place_SP[s])

    parallel_for(count, len(segments), threads=threads, grain_size=1)
    _check_in_range(segments, wrong_S, num_nodes)

    # bucket by bucket, and inside a bucket segment by segment
    ends_PS = place_SP.T.reshape(-1).cumsum().reshape(num_buckets, len(segments))
    place_SP[:] = ends_PS.T - place_SP
    num_edges = int(ends_PS[-1, -1]) if ends_PS.size else 0
    start_P = np.append(place_SP[0] if len(segments) else [], num_edges).astype(np.int64)
    indptr = np.zeros(num_nodes + 1, np.int64)
    indices = np.empty(num_edges, index_dtype(num_nodes))
    if num_edges == 0:
        return indptr, indices
    low_E = np.empty(num_edges, np.uint16)

    def deal(begin: int, end: int) -> None:
        for s in range(begin, end):
            _deal(*segments[s](), shift, s < without_loops, place_SP[s], indices, low_E)

    parallel_for(deal, len(segments), threads=threads, grain_size=1)
    sizes = np.diff(start_P)
    limit = max(1 << 16, num_edges // (SHARE_OF_BUCKETS * threads))
    largest = int(sizes[sizes <= limit].max(initial=0))
    parallel_for(
        _sort_buckets, num_edges, start_P, shift, largest, low_E, indptr, indices, threads=threads
    )
    large = np.flatnonzero(sizes > limit)

    def scatter(begin: int, end: int) -> None:
        for bucket in large[begin:end]:
            first, last = int(bucket) << shift, min((int(bucket) + 1) << shift, num_nodes)
            head = indptr[first:last].copy()
            for s, segment in enumerate(segments):
                _scatter(*segment(), s < without_loops, first, last, head, indices)

    parallel_for(scatter, len(large), threads=threads, grain_size=1)
    return indptr, indices


def _check_in_range(segments: Sequence[Segment], wrong_S: Array, num_nodes: int) -> None:
    for s in np.flatnonzero(wrong_S >= 0).tolist():
        src, dst = segments[s]()
        source, target = int(src[wrong_S[s]]), int(dst[wrong_S[s]])
        raise ValueError(
            f"an edge goes from {source} to {target}, but the graph has {num_nodes} nodes\n\n"
            f"hint: nodes are numbered from 0 to {num_nodes - 1}"
        )


@njit(nogil=True, cache=True)
def _sort_columns(indptr_N, indices_E, count_N, begin, end):
    """Sort each column, and move its distinct ids to its front."""
    for node in range(begin, end):
        column = indices_E[indptr_N[node] : indptr_N[node + 1]]
        column.sort()
        count = 0
        for source in column:
            if count == 0 or source != column[count - 1]:
                column[count] = source
                count += 1
        count_N[node + 1] = count


@njit(nogil=True, cache=True)
def _move_columns(indptr_N, indices_E, new_indptr_N, new_indices_E, begin, end):
    for node in range(begin, end):
        old, new = indptr_N[node], new_indptr_N[node]
        for i in range(new_indptr_N[node + 1] - new):
            new_indices_E[new + i] = indices_E[old + i]


def coalesced(indptr: Array, indices: Array, *, threads: int | None = None) -> tuple[Array, Array]:
    """Sort the ids of each column and keep one of each. `indices` is used up."""
    num_nodes = len(indptr) - 1
    new_indptr = np.zeros_like(indptr)
    parallel_for(_sort_columns, num_nodes, indptr, indices, new_indptr, threads=threads)
    np.cumsum(new_indptr, out=new_indptr)
    if new_indptr[-1] == indptr[-1]:
        return indptr, indices
    new_indices = np.empty(int(new_indptr[-1]), indices.dtype)
    parallel_for(
        _move_columns, num_nodes, indptr, indices, new_indptr, new_indices, threads=threads
    )
    return new_indptr, new_indices


@njit(nogil=True, cache=True)
def _first_descent(indptr_N, begin, end):
    for node in range(begin, end):
        if indptr_N[node + 1] < indptr_N[node]:
            return node
    return -1


@njit(nogil=True, cache=True)
def _first_outside(indices_E, num_nodes, begin, end):
    for e in range(begin, end):
        if indices_E[e] < 0 or indices_E[e] >= num_nodes:
            return e
    return -1


def first_descent(indptr: Array, *, threads: int | None = None) -> int:
    """The first node whose column ends before it starts, or -1."""
    return _first(_first_descent, len(indptr) - 1, indptr, threads=threads)


def first_outside(indices: Array, num_nodes: int, *, threads: int | None = None) -> int:
    """The first place in `indices` with a number that is no node, or -1."""
    return _first(_first_outside, len(indices), indices, num_nodes, threads=threads)


def _first(search: Callable[..., int], num_items: int, *args: Any, threads: int | None) -> int:
    found: list[int] = []

    def part(begin: int, end: int) -> None:
        place = search(*args, begin, end)
        if place >= 0:
            found.append(place)

    parallel_for(part, num_items, threads=threads)
    return min(found, default=-1)
