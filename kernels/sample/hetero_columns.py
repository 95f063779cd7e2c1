"""Find the eligible in-edges of the destinations of a hop, by offsets, times and exclusion.

`gcnzc.kernels.sample.hetero_layout` describes the tables that the kernels take.

Notation: T node types, R edge types, F destinations (frontier nodes) of a hop over all edge types.
"""

import numpy as np
from numba import int64, njit

from gcnzc.kernels.memory import prefetch
from gcnzc.kernels.sample.hetero_layout import (
    ALWAYS,
    BEGIN,
    DST,
    EDGE_TIME,
    END,
    EXCLUDED,
    HAS_WIDE_INDICES,
    INDICES,
    INDPTR,
    IS_TEMPORAL,
    LAST,
    NODE_TIME,
    NODES,
    NUM_DST,
    NUM_EDGES,
    NUM_EXCLUDED,
    NUM_SRC,
    REPLACE,
    SUBGRAPHS,
    WEIGHT,
    float32s,
    indices_of,
    int64s,
    source_at,
)


@njit(cache=True, nogil=True)
def num_before(excluded, position):
    """Return the number of excluded edges before a position."""
    low, high = int64(0), int64(len(excluded))
    while low < high:
        middle = (low + high) >> 1
        if excluded[middle] < position:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def num_remaining(excluded, begin, end):
    """Return the number of edges from `begin` to `end` that are not excluded."""
    if len(excluded) == 0:
        return end - begin
    return end - begin - (num_before(excluded, end) - num_before(excluded, begin))


@njit(cache=True, nogil=True)
def remaining_position(excluded, first, begin, index):
    """Return the position of a remaining edge of a column.

    Args:
        excluded: (K,) int64 positions, ascending and different.
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
def copy_remaining(values, excluded, first, begin, size, out):
    """Copy the values of the first `size` remaining edges of a column to `out`."""
    place, position = first, begin
    for i in range(size):
        while place < len(excluded) and excluded[place] == position:
            place += 1
            position += 1
        out[i] = values[position]
        position += 1


GROUP = 64  # destinations whose columns are found at once


@njit(cache=True, nogil=True)
def _find_ends(relation, times, begins, ends, count):
    """Shorten columns that are sorted by time to their edges that are not too late.

    An edge is as late as the later of its own time and the time of its source. The binary searches
    of all columns run in lockstep, since the reads of one search depend on each other,
    and those of different searches do not.

    Args:
        relation: (NUM_COLUMNS,) int64 of an edge type with times.
        times: (GROUP,) int64 latest time of each column.
        begins: (GROUP,) int64 first positions of the columns, not changed.
        ends: (GROUP,) int64.
        count: number of columns.

    Returns:
        A column with a source out of range, or -1.
    """
    edge_times = int64s(relation[EDGE_TIME], relation[NUM_EDGES])
    node_times = int64s(relation[NODE_TIME], relation[NUM_SRC])
    narrow, wide = indices_of(relation)
    index_bytes = 8 if relation[HAS_WIDE_INDICES] else 4
    lows, open_columns = np.empty(GROUP, np.int64), np.empty(GROUP, np.int64)
    sources = np.empty(GROUP, np.int64)
    num_open = 0
    for i in range(count):
        lows[i] = begins[i]
        open_columns[num_open] = i
        num_open += 1 if begins[i] < ends[i] else 0
    while num_open:
        for j in range(num_open):
            i = open_columns[j]
            middle = (lows[i] + ends[i]) >> 1
            if len(edge_times):
                prefetch(relation[EDGE_TIME] + 8 * middle)
            if len(node_times):
                prefetch(relation[INDICES] + index_bytes * middle)
        if len(node_times):
            for j in range(num_open):
                i = open_columns[j]
                source = source_at(narrow, wide, (lows[i] + ends[i]) >> 1)
                if source < 0 or source >= len(node_times):
                    return i
                sources[i] = source
                prefetch(relation[NODE_TIME] + 8 * source)
        still_open = 0
        for j in range(num_open):
            i = open_columns[j]
            middle = (lows[i] + ends[i]) >> 1
            found = edge_times[middle] if len(edge_times) else ALWAYS
            if len(node_times):
                found = max(found, node_times[sources[i]])
            is_past = found <= times[i]
            lows[i] = middle + 1 if is_past else lows[i]
            ends[i] = ends[i] if is_past else middle
            open_columns[still_open] = i
            still_open += 1 if lows[i] < ends[i] else 0
        num_open = still_open
    return -1


@njit(cache=True, nogil=True)
def find_columns_of(relation, own, first_node, count, is_temporal, seed_times, begins, ends):
    """Write the bounds of the eligible edges into `count` destinations, at most `GROUP`.

    Args:
        relation: (NUM_COLUMNS,) int64.
        own: (NUM_TYPE_COLUMNS,) int64 of the type of the destinations.
        first_node: position of the first destination among the sampled nodes.
        count: number of destinations.
        is_temporal: whether edges have to be eligible by time.
        seed_times: (S,) int64.
        begins, ends: (GROUP,) int64.

    Returns:
        A destination, counted from the first one, whose column is invalid; or -1.
    """
    last = first_node + count
    nodes = int64s(own[NODES], last)
    indptr = int64s(relation[INDPTR], relation[NUM_DST] + 1)
    for i in range(count):
        node = nodes[first_node + i]
        if node < 0 or node >= relation[NUM_DST]:
            return i
        begins[i], ends[i] = indptr[node], indptr[node + 1]
        if not 0 <= begins[i] <= ends[i] <= relation[NUM_EDGES]:
            return i
    if is_temporal and (relation[EDGE_TIME] != 0 or relation[NODE_TIME] != 0):
        subgraphs, times = int64s(own[SUBGRAPHS], last), np.empty(GROUP, np.int64)
        for i in range(count):
            times[i] = seed_times[subgraphs[first_node + i]]
        return _find_ends(relation, times, begins, ends, count)
    return -1


@njit(cache=True, nogil=True)
def find_columns(relations, types, options, fanouts, seed_times, first, begins, sizes, totals):
    """Find the eligible in-edges of all destinations of a hop.

    Args:
        relations: (R, NUM_COLUMNS) int64.
        types: (T, NUM_TYPE_COLUMNS) int64.
        options: (NUM_OPTIONS,) int64.
        fanouts: (R,) int64 of this hop.
        seed_times: (S,) int64 times of the subgraphs; empty unless the sampling is temporal.
        first: (R,) int64: position in `begins` of the first destination of each edge type.
        begins: (F,) int64, receives the first eligible position of each destination.
        sizes: (F,) int64, receives the number of eligible edges that are not excluded.
        totals: (R,) int64, receives upper bounds for the number of sampled edges.

    Returns:
        -1 and -1; or an edge type and a node whose offsets or sources are out of range.
    """
    is_temporal = options[IS_TEMPORAL] != 0
    column_begins, column_ends = np.empty(GROUP, np.int64), np.empty(GROUP, np.int64)
    for r in range(len(relations)):
        fanout, total, relation = fanouts[r], int64(0), relations[r]
        totals[r] = 0
        if fanout == 0:
            continue
        is_last = options[LAST] != 0 and (relation[EDGE_TIME] != 0 or relation[NODE_TIME] != 0)
        own = types[relation[DST]]
        excluded = int64s(relation[EXCLUDED], relation[NUM_EXCLUDED])
        weights = float32s(relation[WEIGHT], relation[NUM_EDGES])
        nodes = int64s(own[NODES], own[END])
        for group in range(own[BEGIN], own[END], GROUP):
            count = min(GROUP, own[END] - group)
            for i in range(group + count, min(group + count + GROUP, own[END])):
                prefetch(relation[INDPTR] + 8 * nodes[i])
            invalid = find_columns_of(
                relation, own, group, count, is_temporal, seed_times, column_begins, column_ends
            )
            if invalid >= 0:
                return r, nodes[group + invalid]
            for i in range(count):
                begin, end = column_begins[i], column_ends[i]
                size = num_remaining(excluded, begin, end)
                if is_last and 0 < fanout < size:
                    before = num_before(excluded, begin)
                    num_last = find_last(weights, excluded, before, begin, size, fanout)
                    begin = remaining_position(excluded, before, begin, size - num_last)
                    size = num_last
                place = first[r] + group - own[BEGIN] + i
                begins[place], sizes[place] = begin, size
                total += num_sampled(size, fanout, options[REPLACE])
        totals[r] = total
    return -1, int64(-1)


@njit(cache=True, nogil=True)
def find_last(weights, excluded, before, begin, size, fanout):
    """Return how many of the last edges of a column include `fanout` that can be sampled.

    Args:
        weights: (E,) float32, or empty; edges of weight 0 are not sampled.
        excluded: see `remaining_position`.
        before: the number of excluded positions before `begin`.
        begin: the first position of the column.
        size: the number of edges of the column that are not excluded.
        fanout: at least 1.

    Returns:
        At most `size`; `size` if the column has fewer such edges.
    """
    if not len(weights):
        return min(fanout, size)
    found = 0
    for num_last in range(1, size + 1):
        position = remaining_position(excluded, before, begin, size - num_last)
        found += 1 if weights[position] > 0.0 else 0
        if found == fanout:
            return num_last
    return size


@njit(cache=True, nogil=True)
def num_sampled(size, fanout, replace):
    """Return an upper bound for the number of edges that are sampled of a column."""
    if fanout < 0 or size == 0:
        return size
    return fanout if replace else min(size, fanout)
