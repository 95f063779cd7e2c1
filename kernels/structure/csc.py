"""Build CSC from an edge list, with a stable counting sort by target.

A plain counting sort writes each edge to a random position, which misses the cache for large
graphs. Here the edges are first partitioned into buckets of neighbouring targets, by the high
bits of the target, and then each bucket is sorted in the cache. Both steps are stable, so the
result does not depend on the number of threads.

The temporary memory is two bytes per edge (the low bits of its target) and one bucket per
thread.

Notation: N nodes, E edges, P buckets, S segments of the edge list.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from gcnzc.kernels.threads import parallel_for

Array = NDArray[Any]


# for graphs with invalid offsets or ids
VERIFY_HINT = "hint: `gcnzc info DATA --verify` says which file of a prepared folder is damaged"


# a segment of an edge list: a function that returns its sources and targets
Segment = Callable[[], tuple[Array, Array]]


SEGMENT_EDGES = 1 << 21  # edges of a segment: far fewer than a graph has, and far more than P


LOW_BITS = 16  # low bits of a target, stored for each edge while it is in its bucket


# buckets with more than 1 / (BUCKET_SHARE * threads) of the edges are sorted from the edge list
# instead of a copy, so that the copies of all threads take at most an eighth of the result
BUCKET_SHARE = 8


def csc_reference(src: Array, dst: Array, num_nodes: int) -> tuple[Array, Array]:
    """Reference for `build_csc`: return `(indptr, indices)` from numpy's stable sort."""
    indptr = np.concatenate([[0], np.bincount(dst, minlength=num_nodes).cumsum()])
    return indptr, src[np.argsort(dst, kind="stable")]


def index_dtype(num_nodes: int) -> type[np.signedinteger]:
    """Return the smaller of int32 and int64 that can represent the ids of `num_nodes` nodes."""
    return np.int32 if num_nodes < 2**31 else np.int64


def edge_list_segments(src: Array, dst: Array) -> list[Segment]:
    """Return the segments of an edge list in memory or in a memory-mapped file."""

    def make_segment(begin: int) -> Segment:
        return lambda: (src[begin : begin + SEGMENT_EDGES], dst[begin : begin + SEGMENT_EDGES])

    return [make_segment(begin) for begin in range(0, len(src), SEGMENT_EDGES)]


def csc_segments(indptr: Array, indices: Array, *, reverse: bool = False) -> list[Segment]:
    """Return the segments of a CSC graph's edges, `indices[e] -> column of e`, or reversed."""
    num_edges, dtype = len(indices), index_dtype(len(indptr) - 1)

    def make_segment(begin: int) -> Segment:
        def edges() -> tuple[Array, Array]:
            end = min(begin + SEGMENT_EDGES, num_edges)
            column = np.empty(end - begin, dtype)
            _columns(indptr, begin, column)
            row = indices[begin:end]
            return (column, row) if reverse else (row, column)

        return edges

    return [make_segment(begin) for begin in range(0, num_edges, SEGMENT_EDGES)]


def self_loop_segments(num_nodes: int) -> list[Segment]:
    """Return the segments of an edge list with one self loop per node."""

    def make_segment(begin: int) -> Segment:
        def edges() -> tuple[Array, Array]:
            end = min(begin + SEGMENT_EDGES, num_nodes)
            nodes = np.arange(begin, end, dtype=index_dtype(num_nodes))
            return nodes, nodes

        return edges

    return [make_segment(begin) for begin in range(0, num_nodes, SEGMENT_EDGES)]


@njit(nogil=True, cache=True)
def _columns(indptr, begin, column_E):
    node = np.searchsorted(indptr, begin, side="right") - 1
    for i in range(len(column_E)):
        while indptr[node + 1] <= begin + i:
            node += 1
        column_E[i] = node


@njit(nogil=True, cache=True)
def _count(src_E, dst_E, num_nodes, shift, drop_loops, count_P):
    """Count the edges of each bucket; return the first edge out of range, or -1."""
    for i in range(len(src_E)):
        source, target = src_E[i], dst_E[i]
        if source < 0 or source >= num_nodes or target < 0 or target >= num_nodes:
            return i
        if not (drop_loops and source == target):
            count_P[target >> shift] += 1
    return -1


@njit(nogil=True, cache=True)
def _scatter_to_buckets(src_E, dst_E, shift, drop_loops, head_P, indices_E, low_E):
    """Append each edge to its bucket."""
    mask = (1 << shift) - 1
    for i in range(len(src_E)):
        source, target = src_E[i], dst_E[i]
        if drop_loops and source == target:
            continue
        bucket = target >> shift
        position = head_P[bucket]
        head_P[bucket] = position + 1
        indices_E[position] = source
        low_E[position] = target & mask


@njit(nogil=True, cache=True)
def _sort_buckets(start_P, shift, largest, low_E, indptr_N, indices_E, begin, end):
    """Sort the buckets that start in `[begin, end)`, and write their part of `indptr_N`.

    Buckets of more than `largest` edges are not sorted.
    """
    num_nodes, num_edges = len(indptr_N) - 1, len(indices_E)
    head = np.empty(1 << shift, np.int64)
    bucket_indices = np.empty(largest, indices_E.dtype)
    bucket = np.searchsorted(start_P[:-1], begin, side="left")
    while bucket < len(start_P) - 1:
        start, stop = start_P[bucket], start_P[bucket + 1]
        # empty buckets after the last edge belong to the last range
        if start >= end and end < num_edges:
            break
        first = bucket << shift
        last = min(first + (1 << shift), num_nodes)
        head[:] = 0
        for e in range(start, stop):
            head[low_E[e]] += 1
        offset = start
        for node in range(first, last):
            count = head[node - first]
            head[node - first] = offset
            offset += count
            indptr_N[node + 1] = offset
        if stop - start <= largest:
            for e in range(start, stop):
                bucket_indices[e - start] = indices_E[e]
            for e in range(start, stop):
                position = head[low_E[e]]
                head[low_E[e]] = position + 1
                indices_E[position] = bucket_indices[e - start]
        bucket += 1


@njit(nogil=True, cache=True)
def _scatter(src_E, dst_E, drop_loops, first, last, head_N, indices_E):
    """Append the edges into the nodes `[first, last)` to their columns."""
    for i in range(len(src_E)):
        source, target = src_E[i], dst_E[i]
        if target >= first and target < last and not (drop_loops and source == target):
            position = head_N[target - first]
            head_N[target - first] = position + 1
            indices_E[position] = source


def build_csc(
    segments: Sequence[Segment],
    num_nodes: int,
    *,
    num_without_loops: int = 0,
    threads: int | None = None,
) -> tuple[Array, Array]:
    """Build CSC from an edge list; the edges of a column keep the order of the list.

    Args:
        segments: the edge list in segments, each of which returns (e,) sources and (e,)
            targets, int32 or int64. Each is called twice, and once more for every bucket of
            columns that is much larger than the others.
        num_nodes: N; nodes are numbered from 0 to N - 1.
        num_without_loops: number of segments, from the first, whose self loops are removed.
        threads: number of threads; `torch.get_num_threads()` if None.

    Returns:
        `indptr` (N + 1,) int64 and `indices` (E,) int32; int64 for 2**31 nodes or more.

    Raises:
        ValueError: a source or target is out of range.
    """
    shift = min(LOW_BITS, max(0, (num_nodes - 1).bit_length() - 8))
    num_buckets = (num_nodes + (1 << shift) - 1) >> shift
    if threads is None:
        threads = torch.get_num_threads()
    offset_SP = np.zeros((len(segments), num_buckets), np.int64)
    invalid_S = np.full(len(segments), -1, np.int64)

    def count(begin: int, end: int) -> None:
        for s in range(begin, end):
            invalid_S[s] = _count(
                *segments[s](), num_nodes, shift, s < num_without_loops, offset_SP[s]
            )

    parallel_for(count, len(segments), threads=threads, grain_size=1)
    _check_in_range(segments, invalid_S, num_nodes)

    # ordered by bucket, then by segment
    ends_PS = offset_SP.T.reshape(-1).cumsum().reshape(num_buckets, len(segments))
    offset_SP[:] = ends_PS.T - offset_SP
    num_edges = int(ends_PS[-1, -1]) if ends_PS.size else 0
    start_P = np.append(offset_SP[0] if len(segments) else [], num_edges).astype(np.int64)
    indptr = np.zeros(num_nodes + 1, np.int64)
    indices = np.empty(num_edges, index_dtype(num_nodes))
    if num_edges == 0:
        return indptr, indices
    low_E = np.empty(num_edges, np.uint16)

    def scatter_to_buckets(begin: int, end: int) -> None:
        for s in range(begin, end):
            _scatter_to_buckets(
                *segments[s](), shift, s < num_without_loops, offset_SP[s], indices, low_E
            )

    parallel_for(scatter_to_buckets, len(segments), threads=threads, grain_size=1)
    sizes = np.diff(start_P)
    limit = max(1 << 16, num_edges // (BUCKET_SHARE * threads))
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
                _scatter(*segment(), s < num_without_loops, first, last, head, indices)

    parallel_for(scatter, len(large), threads=threads, grain_size=1)
    return indptr, indices


def _check_in_range(segments: Sequence[Segment], invalid_S: Array, num_nodes: int) -> None:
    for s in np.flatnonzero(invalid_S >= 0).tolist():
        src, dst = segments[s]()
        source, target = int(src[invalid_S[s]]), int(dst[invalid_S[s]])
        raise ValueError(
            f"an edge goes from {source} to {target}, but the graph has {num_nodes} nodes\n\n"
            f"hint: number the nodes from 0 to {num_nodes - 1}"
        )


@njit(nogil=True, cache=True)
def _sort_columns(indptr_N, indices_E, count_N, begin, end):
    """Sort each column in place, and move its distinct ids to its front."""
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


def coalesce(indptr: Array, indices: Array, *, threads: int | None = None) -> tuple[Array, Array]:
    """Sort the sources of each column and remove duplicates; overwrites `indices`."""
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
def _find_descent(indptr_N, begin, end):
    for node in range(begin, end):
        if indptr_N[node + 1] < indptr_N[node]:
            return node
    return -1


@njit(nogil=True, cache=True)
def _find_out_of_range(indices_E, num_nodes, begin, end):
    for e in range(begin, end):
        if indices_E[e] < 0 or indices_E[e] >= num_nodes:
            return e
    return -1


def find_descent(indptr: Array, *, threads: int | None = None) -> int:
    """Return the first node whose column ends before it begins, or -1."""
    return _find_first(_find_descent, len(indptr) - 1, indptr, threads=threads)


def find_out_of_range(indices: Array, num_nodes: int, *, threads: int | None = None) -> int:
    """Return the first position in `indices` of an id outside [0, N), or -1."""
    return _find_first(_find_out_of_range, len(indices), indices, num_nodes, threads=threads)


def _find_first(search: Callable[..., int], num_items: int, *args: Any, threads: int | None) -> int:
    found: list[int] = []

    def search_range(begin: int, end: int) -> None:
        position = search(*args, begin, end)
        if position >= 0:
            found.append(position)

    parallel_for(search_range, num_items, threads=threads)
    return min(found, default=-1)


def csc_to_coo_reference(indptr: Tensor, indices: Tensor, first: int = 0) -> Tensor:
    """Reference for `csc_to_coo`."""
    targets = torch.arange(len(indptr) - 1).repeat_interleave(indptr.diff())
    return torch.stack([indices.long(), targets])[:, int(indptr[first]) :]


# It runs in the calling thread: the loader's threads already run in parallel, and further threads
# would compete with the model for cores.
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
