"""Sample one hop of a heterogeneous neighbourhood on CPUs, for all edge types in one numba kernel.

`gcnzc.kernels.sample.hetero_layout` describes the tables that the kernels take.

Notation: T node types, R edge types, F destinations (frontier nodes) of a hop over all edge types.
"""

import numpy as np
from numba import int64, njit

from gcnzc.kernels.memory import prefetch
from gcnzc.kernels.sample.hetero_choice import (
    MAX_COMPARED,
    sample_uniform,
    sample_weighted,
    take_all,
)
from gcnzc.kernels.sample.hetero_exclude import (
    copy_remaining,
    num_before,
    num_remaining,
    remaining_position,
)
from gcnzc.kernels.sample.hetero_layout import (
    ALWAYS,
    BEGIN,
    COL,
    COUNT,
    DST,
    EDGE,
    EDGE_IDS,
    EDGE_TIME,
    END,
    EXCLUDED,
    FIRST_KEY,
    HAS_WIDE_INDICES,
    INDICES,
    INDPTR,
    IS_DISJOINT,
    IS_TEMPORAL,
    KEY_0,
    KEY_1,
    LAST,
    NODE_TIME,
    NODES,
    NUM_DST,
    NUM_EDGES,
    NUM_EXCLUDED,
    NUM_SAMPLED,
    NUM_SRC,
    REPLACE,
    ROW,
    SRC,
    SUBGRAPHS,
    WEIGHT,
    find_local,
    float32s,
    indices_of,
    int64s,
    slot_of,
    source_at,
)

# destinations, and approximate number of edges, that are processed at once, so that their data stay
# in the processor's caches
CHUNK_DESTINATIONS = 256


CHUNK_EDGES = 4096


PREFETCH_DISTANCE = 16  # destinations ahead for which offsets are prefetched


@njit(cache=True, nogil=True)
def _end_of_past(relation, begin, end, time):
    """Return the first position of a column, sorted by time, whose edge is later than `time`.

    An edge is as late as the later of its own time and the time of its source. Returns -1 if a
    source is out of range.
    """
    edge_times = int64s(relation[EDGE_TIME], relation[NUM_EDGES])
    node_times = int64s(relation[NODE_TIME], relation[NUM_SRC])
    narrow, wide = indices_of(relation)
    low, high = begin, end
    while low < high:
        middle = (low + high) >> 1
        found = ALWAYS
        if len(edge_times):
            found = edge_times[middle]
        if len(node_times):
            source = source_at(narrow, wide, middle)
            if source < 0 or source >= len(node_times):
                return int64(-1)
            found = max(found, node_times[source])
        if found <= time:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def _column(relation, indptr, node, is_temporal, time):
    """Return the bounds of the eligible edges into `node`; begin is -1 if the graph is invalid."""
    if node < 0 or node >= relation[NUM_DST]:
        return int64(-1), int64(-1)
    begin, end = indptr[node], indptr[node + 1]
    if not 0 <= begin <= end <= relation[NUM_EDGES]:
        return int64(-1), int64(-1)
    if is_temporal and (relation[EDGE_TIME] != 0 or relation[NODE_TIME] != 0):
        end = _end_of_past(relation, begin, end, time)
        if end < 0:
            return int64(-1), int64(-1)
    return begin, end


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
    for r in range(len(relations)):
        fanout, total, relation = fanouts[r], int64(0), relations[r]
        totals[r] = 0
        if fanout == 0:
            continue
        has_times = relation[EDGE_TIME] != 0 or relation[NODE_TIME] != 0
        own = types[relation[DST]]
        indptr = int64s(relation[INDPTR], relation[NUM_DST] + 1)
        excluded = int64s(relation[EXCLUDED], relation[NUM_EXCLUDED])
        nodes = int64s(own[NODES], own[END])
        subgraphs = int64s(own[SUBGRAPHS], own[END])
        for i in range(own[BEGIN], own[END]):
            if i + PREFETCH_DISTANCE < own[END]:
                prefetch(relation[INDPTR] + 8 * nodes[i + PREFETCH_DISTANCE])
            time = seed_times[subgraphs[i]] if is_temporal else int64(0)
            begin, end = _column(relation, indptr, nodes[i], is_temporal, time)
            if begin < 0:
                return r, nodes[i]
            size = num_remaining(excluded, begin, end)
            if options[LAST] and has_times and 0 < fanout < size:
                before = num_before(excluded, begin)
                begin = remaining_position(excluded, before, begin, size - fanout)
                size = fanout
            place = first[r] + i - own[BEGIN]
            begins[place], sizes[place] = begin, size
            total += _num_sampled(size, fanout, options[REPLACE])
        totals[r] = total
    return -1, int64(-1)


@njit(cache=True, nogil=True)
def _num_sampled(size, fanout, replace):
    if fanout < 0 or size == 0:
        return size
    return fanout if replace else min(size, fanout)


@njit(cache=True, nogil=True)
def sample_columns(
    relations,
    types,
    options,
    fanouts,
    tree_keys,
    first,
    begins,
    sizes,
    outputs,
    num_keys,
    base,
    direct_table,
    hash_table,
):
    """Sample the edges of a hop from the columns that `find_columns` found.

    Args:
        relations, types, options, fanouts, first, begins, sizes: as in `find_columns`; the arrays
            of nodes have one element more than nodes can be sampled. Nodes are appended, and
            `types` gets their numbers.
        tree_keys: (S, 2) int64 below 2**32: random words of the subgraphs, or one row of zeros.
        outputs: (R, NUM_OUT_COLUMNS) int64, addresses of int64 arrays that are large enough.
        num_keys: number of nodes of all types: the distance between keys of subgraphs.
        base, direct_table, hash_table: from node keys to local ids; see `Workspace`.

    Returns:
        -1 and -1; or an edge type and a node whose sources are out of range.
    """
    positions = np.empty(CHUNK_EDGES, np.int64)
    scratch = np.empty(CHUNK_EDGES, np.float64)
    bits = np.zeros(1, np.uint64)
    remaining_weights = np.empty(1, np.float32)
    is_disjoint = options[IS_DISJOINT] != 0
    for r in range(len(relations)):
        fanout, relation = fanouts[r], relations[r]
        if fanout == 0:
            continue
        own, other = types[relation[DST]], types[relation[SRC]]
        nodes = int64s(own[NODES], own[END])
        subgraphs = int64s(own[SUBGRAPHS], own[END])
        narrow, wide = indices_of(relation)
        weights = float32s(relation[WEIGHT], relation[NUM_EDGES])
        ids = int64s(relation[EDGE_IDS], relation[NUM_EDGES])
        excluded = int64s(relation[EXCLUDED], relation[NUM_EXCLUDED])
        index_bytes = 8 if relation[HAS_WIDE_INDICES] else 4
        begin = own[BEGIN]
        while begin < own[END]:
            # bounds of the chunk
            end, total, longest = begin, int64(0), int64(0)
            while end < min(own[END], begin + CHUNK_DESTINATIONS) and total < CHUNK_EDGES:
                size = sizes[first[r] + end - own[BEGIN]]
                total += _num_sampled(size, fanout, options[REPLACE])
                longest = max(longest, size)
                end += 1
            if total > len(positions):
                positions = np.empty(2 * total, np.int64)
            if len(weights) and longest > len(scratch):
                scratch = np.empty(2 * longest, np.float64)
            if len(weights) and len(excluded) and longest > len(remaining_weights):
                remaining_weights = np.empty(2 * longest, np.float32)
            if fanout > MAX_COMPARED and longest > 64 * len(bits):
                bits = np.zeros((longest + 63) // 64, np.uint64)
            known = outputs[r, NUM_SAMPLED]
            col = int64s(outputs[r, COL], known + total)
            filled = int64(0)
            for i in range(begin, end):
                place = first[r] + i - own[BEGIN]
                start, size = begins[place], sizes[place]
                if size == 0:
                    continue
                tree = subgraphs[i] if is_disjoint else int64(0)
                key_0 = relation[KEY_0] ^ tree_keys[tree, 0]
                key_1 = relation[KEY_1] ^ tree_keys[tree, 1]
                own_weights = weights[start : start + size] if len(weights) else weights
                before = num_before(excluded, start)
                if len(weights) and len(excluded):
                    copy_remaining(weights, excluded, before, start, size, remaining_weights)
                    own_weights = remaining_weights[:size]
                count = fanout
                if fanout < 0 or (size <= fanout and not options[REPLACE]):
                    count = take_all(own_weights, size, positions, filled)
                elif len(weights):
                    count = sample_weighted(
                        own_weights,
                        fanout,
                        nodes[i],
                        options,
                        key_0,
                        key_1,
                        scratch,
                        positions,
                        filled,
                    )
                else:
                    sample_uniform(
                        size, fanout, nodes[i], options, key_0, key_1, bits, positions, filled
                    )
                for k in range(filled, filled + count):
                    positions[k] = (
                        remaining_position(excluded, before, start, positions[k])
                        if len(excluded)
                        else start + positions[k]
                    )
                    prefetch(relation[INDICES] + index_bytes * positions[k])
                    col[known + k] = i
                filled += count
            if not _relabel(
                relation,
                other,
                options,
                positions[:filled],
                narrow,
                wide,
                ids,
                subgraphs,
                outputs[r],
                num_keys,
                base,
                direct_table,
                hash_table,
            ):
                return r, nodes[begin]
            begin = end
    return -1, int64(-1)


@njit(cache=True, nogil=True)
def _relabel_direct(row, first_key, base, table, nodes, count):
    """Replace keys by local ids, and append new nodes; return the number of nodes.

    Every slot is written, changed or not, to avoid unpredictable branches.
    """
    for k in range(len(row)):
        key = row[k]
        stamp = int64(table[key])
        new = stamp < base
        stamp = base + count if new else stamp
        table[key] = stamp
        nodes[count] = key - first_key
        count += 1 if new else 0
        row[k] = stamp - base
    return count


@njit(cache=True, nogil=True)
def _relabel_hashed(
    row, col, subgraphs, trees, num_keys, first_key, base, table, nodes, count
):  # fmt: skip
    """`_relabel_direct` with the hash table, also for disjoint subgraphs.

    The only unpredictable branch is taken if the first slot has another key, which is rare.
    """
    for k in range(len(row)):
        key = row[k]
        slot = slot_of(key, len(table))
        stamp = table[slot, 1]
        if stamp >= base and table[slot, 0] != key:
            while stamp >= base and table[slot, 0] != key:
                slot = (slot + 1) & (len(table) - 1)
                stamp = table[slot, 1]
        new = stamp < base
        stamp = base + count if new else stamp
        table[slot, 0], table[slot, 1] = key, stamp
        node = key - first_key
        if len(trees):
            tree = subgraphs[col[k]]
            trees[count] = tree
            node -= tree * num_keys
        nodes[count] = node
        count += 1 if new else 0
        row[k] = stamp - base
    return count


@njit(cache=True, nogil=True)
def _relabel(
    relation,
    other,
    options,
    positions,
    narrow,
    wide,
    ids,
    subgraphs,
    output,
    num_keys,
    base,
    direct_table,
    hash_table,
):
    """Write the local ids and edge ids of a chunk, and append new nodes.

    Returns:
        Whether all sources are in range.
    """
    known, total = output[NUM_SAMPLED], len(positions)
    row = int64s(output[ROW], known + total)[known:]
    col = int64s(output[COL], known + total)[known:]
    edge = int64s(output[EDGE], known + total)[known:]
    is_disjoint = options[IS_DISJOINT] != 0
    for k in range(total):
        source = source_at(narrow, wide, positions[k])
        if source < 0 or source >= relation[NUM_SRC]:
            return False
        key = other[FIRST_KEY] + source
        if is_disjoint:
            key += subgraphs[col[k]] * num_keys
        if len(direct_table):
            prefetch(int64(direct_table.ctypes.data) + 4 * key)
        else:
            prefetch(int64(hash_table.ctypes.data) + 16 * slot_of(key, len(hash_table)))
        if len(ids):
            prefetch(relation[EDGE_IDS] + 8 * positions[k])
        row[k] = key
    count = other[COUNT]
    nodes = int64s(other[NODES], count + total + 1)
    trees = int64s(other[SUBGRAPHS], count + total + 1)
    if len(direct_table):
        count = _relabel_direct(row, other[FIRST_KEY], base, direct_table, nodes, count)
    else:
        count = _relabel_hashed(
            row, col, subgraphs, trees, num_keys, other[FIRST_KEY], base, hash_table, nodes, count
        )
    for k in range(len(edge)):
        edge[k] = ids[positions[k]] if len(ids) else positions[k]
    other[COUNT] = count
    output[NUM_SAMPLED] = known + total
    return True


@njit(cache=True, nogil=True)
def induce_edges(
    relations, types, options, seed_times, outputs, num_keys, base, direct_table, hash_table
):  # fmt: skip
    """Find all eligible edges among the sampled nodes of the same subgraph, but excluded ones.

    Outputs with address 0 are counted and not written.

    Returns:
        -1 and -1; or an edge type and a node whose offsets or sources are out of range.
    """
    is_temporal = options[IS_TEMPORAL] != 0
    for r in range(len(relations)):
        relation = relations[r]
        own, other = types[relation[DST]], types[relation[SRC]]
        indptr = int64s(relation[INDPTR], relation[NUM_DST] + 1)
        nodes = int64s(own[NODES], own[COUNT])
        subgraphs = int64s(own[SUBGRAPHS], own[COUNT])
        narrow, wide = indices_of(relation)
        ids = int64s(relation[EDGE_IDS], relation[NUM_EDGES])
        excluded = int64s(relation[EXCLUDED], relation[NUM_EXCLUDED])
        capacity = outputs[r, NUM_SAMPLED]
        row, col = int64s(outputs[r, ROW], capacity), int64s(outputs[r, COL], capacity)
        edge = int64s(outputs[r, EDGE], capacity)
        count = 0
        for i in range(own[COUNT]):
            time = seed_times[subgraphs[i]] if is_temporal else int64(0)
            begin, end = _column(relation, indptr, nodes[i], is_temporal, time)
            if begin < 0:
                return r, nodes[i]
            for position in range(begin, end):
                if num_remaining(excluded, position, position + 1) == 0:
                    continue
                source = source_at(narrow, wide, position)
                if source < 0 or source >= relation[NUM_SRC]:
                    return r, nodes[i]
                key = other[FIRST_KEY] + source
                if options[IS_DISJOINT]:
                    key += subgraphs[i] * num_keys
                local, _ = find_local(key, base, direct_table, hash_table)
                if local < 0:
                    continue
                if len(row):
                    row[count], col[count] = local, i
                if len(edge):
                    edge[count] = ids[position] if len(ids) else position
                count += 1
        outputs[r, NUM_SAMPLED] = count
    return -1, int64(-1)
