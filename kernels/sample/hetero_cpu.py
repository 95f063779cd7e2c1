"""Sample one hop of a heterogeneous neighbourhood on CPUs, for all edge types in one numba kernel.

`gcnzc.kernels.sample.hetero_layout` describes the tables that the kernels take.

Notation: T node types, R edge types, F destinations (frontier nodes) of a hop over all edge types.
"""

import numpy as np
from numba import int64, njit

from gcnzc.kernels.memory import prefetch
from gcnzc.kernels.sample.cpu import (
    CHUNK_DESTINATIONS,
    CHUNK_EDGES,
    MAX_COMPARED,
    is_any_out_of_range,
)
from gcnzc.kernels.sample.hetero_choice import (
    MAX_DEGREE,
    add_to_chunk,
    new_chunk,
    sample_chunk,
    sample_uniform,
    sample_weighted,
    take_all,
)
from gcnzc.kernels.sample.hetero_columns import (
    GROUP,
    copy_remaining,
    find_columns_of,
    num_before,
    num_remaining,
    num_sampled,
    remaining_position,
)
from gcnzc.kernels.sample.hetero_layout import (
    BEGIN,
    COL,
    COUNT,
    DST,
    EDGE,
    EDGE_IDS,
    END,
    EXCLUDED,
    FIRST_KEY,
    HAS_WIDE_INDICES,
    INDICES,
    IS_DISJOINT,
    IS_TEMPORAL,
    KEY_0,
    KEY_1,
    NODES,
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


@njit(cache=True, nogil=True)
def _fill_chunk(chunk, nodes, sizes, subgraphs, tree_keys, relation, fanout, options):
    """Write the destinations to sample edges of, with more than `fanout`; return their number."""
    count = 0
    for i in range(len(nodes)):
        if sizes[i] > fanout or (options[REPLACE] and sizes[i] > 0):
            tree = subgraphs[i] if len(subgraphs) else int64(0)
            key_0 = relation[KEY_0] ^ tree_keys[tree, 0]
            key_1 = relation[KEY_1] ^ tree_keys[tree, 1]
            add_to_chunk(chunk, count, nodes[i], sizes[i], options, key_0, key_1)
            count += 1
    return count


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
    chunk = new_chunk()
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
        replace, is_weighted = options[REPLACE] != 0, len(weights) > 0
        index_bytes = 8 if relation[HAS_WIDE_INDICES] else 4
        begin = own[BEGIN]
        while begin < own[END]:
            # bounds of the chunk
            end, total, longest = begin, int64(0), int64(0)
            while end < min(own[END], begin + CHUNK_DESTINATIONS) and total < CHUNK_EDGES:
                size = sizes[first[r] + end - own[BEGIN]]
                total += num_sampled(size, fanout, options[REPLACE])
                longest = max(longest, size)
                end += 1
            if total > len(positions):
                positions = np.empty(2 * total, np.int64)
            in_chunk = not is_weighted and 0 < fanout <= MAX_COMPARED and longest <= MAX_DEGREE
            if is_weighted:
                if longest > len(scratch):
                    scratch = np.empty(2 * longest, np.float64)
                if len(excluded) and longest > len(remaining_weights):
                    remaining_weights = np.empty(2 * longest, np.float32)
            elif not in_chunk and fanout > 0 and longest > 64 * len(bits):
                bits = np.zeros((longest + 63) // 64, np.uint64)
            if in_chunk:
                count = _fill_chunk(
                    chunk,
                    nodes[begin:end],
                    sizes[first[r] + begin - own[BEGIN] :],
                    subgraphs[begin:end],
                    tree_keys,
                    relation,
                    fanout,
                    options,
                )
                sample_chunk(chunk, count, fanout, options)
            known = outputs[r, NUM_SAMPLED]
            col = int64s(outputs[r, COL], known + total)
            filled = num_chosen = int64(0)
            for i in range(begin, end):
                place = first[r] + i - own[BEGIN]
                start, size = begins[place], sizes[place]
                if size == 0:
                    continue
                own_weights = weights[start : start + size] if is_weighted else weights
                before = num_before(excluded, start)
                if is_weighted and len(excluded):
                    copy_remaining(weights, excluded, before, start, size, remaining_weights)
                    own_weights = remaining_weights[:size]
                count = fanout
                if fanout < 0 or (size <= fanout and not replace):
                    count = take_all(own_weights, size, positions, filled)
                elif in_chunk:
                    for draw in range(fanout):
                        positions[filled + draw] = chunk[1][draw, num_chosen]
                    num_chosen += 1
                else:
                    tree = subgraphs[i] if len(subgraphs) else int64(0)
                    key_0 = relation[KEY_0] ^ tree_keys[tree, 0]
                    key_1 = relation[KEY_1] ^ tree_keys[tree, 1]
                    if is_weighted:
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
                if len(excluded):
                    for k in range(filled, filled + count):
                        positions[k] = remaining_position(excluded, before, start, positions[k])
                else:
                    for k in range(filled, filled + count):
                        positions[k] += start
                for k in range(filled, filled + count):
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
    # several loops with few operations, over data that stay in a cache
    if len(wide):
        for k in range(total):
            row[k] = wide[positions[k]]
    else:
        for k in range(total):
            row[k] = narrow[positions[k]]
    if is_any_out_of_range(row[:total], relation[NUM_SRC]):
        return False
    if len(ids):
        for k in range(total):
            prefetch(relation[EDGE_IDS] + 8 * positions[k])
    for k in range(total):
        row[k] += other[FIRST_KEY]
    if options[IS_DISJOINT]:
        for k in range(total):
            row[k] += subgraphs[col[k]] * num_keys
    if len(direct_table):
        for k in range(total):
            prefetch(int64(direct_table.ctypes.data) + 4 * row[k])
    else:
        for k in range(total):
            prefetch(int64(hash_table.ctypes.data) + 16 * slot_of(row[k], len(hash_table)))
    count = other[COUNT]
    nodes = int64s(other[NODES], count + total + 1)
    trees = int64s(other[SUBGRAPHS], count + total + 1)
    if len(direct_table):
        count = _relabel_direct(row, other[FIRST_KEY], base, direct_table, nodes, count)
    else:
        count = _relabel_hashed(
            row, col, subgraphs, trees, num_keys, other[FIRST_KEY], base, hash_table, nodes, count
        )
    if len(edge) and len(ids):
        for k in range(total):
            edge[k] = ids[positions[k]]
    elif len(edge):
        for k in range(total):
            edge[k] = positions[k]
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
    begins, ends = np.empty(GROUP, np.int64), np.empty(GROUP, np.int64)
    for r in range(len(relations)):
        relation = relations[r]
        own, other = types[relation[DST]], types[relation[SRC]]
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
            if i % GROUP == 0:
                num_columns = min(GROUP, own[COUNT] - i)
                invalid = find_columns_of(
                    relation, own, i, num_columns, is_temporal, seed_times, begins, ends
                )
                if invalid >= 0:
                    return r, nodes[i + invalid]
            for position in range(begins[i % GROUP], ends[i % GROUP]):
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
