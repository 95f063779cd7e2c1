"""Find the eligible in-edges of a chunk of destinations, by offsets, times and exclusion.

An edge type's excluded edges are (K,) int64 positions, ascending and different. The positions of
the remaining edges of a column are counted without them.
"""

import numpy as np
from numba import int64, njit

import gcnzc.kernels.sample.layout as field
from gcnzc.kernels.memory import prefetch
from gcnzc.kernels.sample.layout import float32s, indices_of, int64s


@njit(inline="always")
def num_sampled(degree, fanout, replace):
    """Return an upper bound for the number of edges that are sampled of a column."""
    if fanout < 0 or degree == 0:
        return degree
    return fanout if replace else min(degree, fanout)


@njit(cache=True, nogil=True)
def begin_chunk(indptr, num_edges, nodes, destination, fanout, replace, begins, degrees):
    """Read the offsets of the next destinations, up to the size of a chunk.

    Returns:
        The numbers of destinations and of edges to sample, the largest degree, and whether all
        offsets are in range.
    """
    size = total = longest = signs = int64(0)
    limit = min(field.CHUNK_DESTINATIONS, len(nodes) - destination)
    while size < limit and total < field.CHUNK_EDGES:
        node = nodes[destination + size]
        begin, end = indptr[node], indptr[node + 1]
        degree = end - begin
        signs |= begin | end | degree | (num_edges - end)
        begins[size], degrees[size] = begin, degree
        total += num_sampled(degree, fanout, replace)
        longest = max(longest, degree)
        size += 1
    return size, total, longest, signs >= 0


@njit(cache=True, nogil=True)
def filter_chunk(relation, num_src, fanout, options, latest, begins, degrees, firsts, size):
    """Leave only the eligible edges of a chunk: not too late, and not excluded.

    Args:
        relation: (NUM_RELATION_COLUMNS,) int64.
        num_src: number of nodes of the type of the sources.
        fanout: of the chunk.
        options: (NUM_OPTIONS,) int64.
        latest: latest time of each destination; empty if times do not count.
        begins, degrees: first edge and number of edges of each destination; changed.
        firsts: receives the number of excluded edges before the first edge of each destination, -1
            if there are none among its edges.
        size: number of destinations.

    Returns:
        The number of edges to sample, the largest degree, and whether all sources that were read
        are in range.
    """
    excluded = int64s(relation[field.EXCLUDED], relation[field.NUM_EXCLUDED])
    weights = float32s(relation[field.WEIGHT], relation[field.NUM_EDGES])
    total = longest = int64(0)
    if len(latest) and not _cut_by_time(relation, num_src, latest, begins, degrees, size):
        return total, longest, False
    for i in range(size):
        begin, degree = begins[i], degrees[i]
        first = last = _num_before(excluded, begin)
        while last < len(excluded) and excluded[last] < begin + degree:
            last += 1
        degree -= last - first
        if len(latest) and options[field.TEMPORAL] == field.LAST and 0 < fanout < degree:
            num_last = _find_last(weights, excluded, first, begin, degree, fanout)
            begins[i] = remaining_position(excluded, first, begin, degree - num_last)
            degree, first = num_last, _num_before(excluded, begins[i])
        firsts[i] = first if first < last else -1
        degrees[i] = degree
        total += num_sampled(degree, fanout, options[field.REPLACE] != 0)
        longest = max(longest, degree)
    return total, longest, True


@njit(cache=True, nogil=True)
def _cut_by_time(relation, num_src, latest, begins, degrees, size):
    """Shorten columns sorted by time to the edges up to `latest`; return whether all are valid.

    The binary searches run in lockstep, since the reads of one search depend on each other, and
    those of different searches do not. An edge is as late as the later of its own time and that of
    its source.
    """
    edge_times = int64s(relation[field.EDGE_TIME], relation[field.NUM_EDGES])
    node_times = int64s(relation[field.NODE_TIME], num_src)
    narrow, wide = indices_of(relation)
    index_bytes = int64(8) if relation[field.IS_WIDE] else int64(4)
    lows, ends = np.empty((2, field.CHUNK_DESTINATIONS), np.int64)
    # the columns whose searches have not ended, and the sources that they compare with
    still_open, sources = np.empty((2, field.CHUNK_DESTINATIONS), np.int64)
    num_open = 0
    for i in range(size):
        lows[i], ends[i] = begins[i], begins[i] + degrees[i]
        still_open[num_open] = i
        num_open += 1 if degrees[i] > 0 else 0
    while num_open:
        for j in range(num_open):
            i = still_open[j]
            middle = (lows[i] + ends[i]) >> 1
            if len(edge_times):
                prefetch(relation[field.EDGE_TIME] + 8 * middle)
            if len(node_times):
                prefetch(relation[field.INDICES] + index_bytes * middle)
        if len(node_times):
            for j in range(num_open):
                i = still_open[j]
                middle = (lows[i] + ends[i]) >> 1
                source = wide[middle] if len(wide) else int64(narrow[middle])
                if source < 0 or source >= num_src:
                    return False
                sources[i] = source
                prefetch(relation[field.NODE_TIME] + 8 * source)
        before, num_open = num_open, 0
        for j in range(before):
            i = still_open[j]
            middle = (lows[i] + ends[i]) >> 1
            found = edge_times[middle] if len(edge_times) else int64(field.ALWAYS)
            if len(node_times):
                found = max(found, node_times[sources[i]])
            is_past = found <= latest[i]
            lows[i] = middle + 1 if is_past else lows[i]
            ends[i] = ends[i] if is_past else middle
            still_open[num_open] = i
            num_open += 1 if lows[i] < ends[i] else 0
    for i in range(size):
        degrees[i] = ends[i] - begins[i]
    return True


@njit(cache=True, nogil=True)
def _find_last(weights, excluded, first, begin, degree, fanout):
    """Return how many of the last remaining edges include `fanout` of a weight above 0."""
    if not len(weights):
        return min(fanout, degree)
    found = 0
    for num_last in range(1, degree + 1):
        position = remaining_position(excluded, first, begin, degree - num_last)
        found += 1 if weights[position] > 0.0 else 0
        if found == fanout:
            return num_last
    return degree


@njit(inline="always")
def _num_before(excluded, position):
    """Return the number of excluded edges before a position."""
    # a binary search without branches, which are unpredictable
    low, size = int64(0), int64(len(excluded))
    while size > 0:
        half = (size + 1) >> 1
        low += half if excluded[low + half - 1] < position else 0
        size -= half
    return low


@njit(cache=True, nogil=True)
def remaining_position(excluded, first, begin, index):
    """Return the position of a remaining edge of a column.

    Args:
        excluded: (K,) int64.
        first: number of excluded edges before `begin`.
        begin: first position of the column.
        index: number of remaining edges of the column before this edge.
    """
    low, high = first, int64(len(excluded))
    while low < high:
        middle = (low + high) >> 1
        if excluded[middle] - begin - (middle - first) <= index:
            low = middle + 1
        else:
            high = middle
    return begin + index + low - first


@njit(cache=True, nogil=True)
def copy_remaining(values, excluded, first, begin, degree, out):
    """Copy the values of the first `degree` remaining edges of a column to `out`."""
    place, position = first, begin
    for i in range(degree):
        while place < len(excluded) and excluded[place] == position:
            place += 1
            position += 1
        out[i] = values[position]
        position += 1


@njit(cache=True, nogil=True)
def skip_excluded(relation, begins, firsts, size, positions, ends):
    """Map positions among the remaining edges of each destination to positions among all edges."""
    excluded = int64s(relation[field.EXCLUDED], relation[field.NUM_EXCLUDED])
    index_bytes = int64(8) if relation[field.IS_WIDE] else int64(4)
    filled = int64(0)
    for i in range(size):
        if firsts[i] >= 0:
            for edge in range(filled, ends[i]):
                index = positions[edge] - begins[i]
                positions[edge] = remaining_position(excluded, firsts[i], begins[i], index)
                prefetch(relation[field.INDICES] + index_bytes * positions[edge])
        filled = ends[i]
