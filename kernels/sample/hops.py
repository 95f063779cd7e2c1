"""Sample all hops of all edge types in one compiled call, as CSC.

The result of a batch is a few vectors, each with a region for every node type or edge type:

- ids: int64, T regions of the sampled nodes, the seeds first, then R regions of offsets by
  destination;
- trees: (T regions) int64, the subgraph of each node; only of disjoint subgraphs;
- indices: (R regions) int32, local ids of the sources, in the order of the destinations;
- edge ids: like indices, int64; only if they are wanted.

With `once`, a destination gets in-edges of each edge type at one hop only, and destinations are
numbered in the order of the hops. The region of an edge type is therefore one growing CSC over all
destinations, and the block of every layer is a prefix of it. Otherwise, every hop has its own CSC
of all destinations that are known before it, and the CSCs of the hops are adjacent in the region.

If a region is too small, the kernel returns before it writes, and resumes when the caller has moved
the regions to larger vectors.

Each table from keys to local ids has slots with stamps, which are `base` plus a local id. A stamp
below `base` is of an earlier batch, so tables are not cleared between batches. Of the three tables,
two are empty: a direct table of an int32 stamp for each key; a hash table whose 8 B slots have the
low half of the key in their high half, and the stamp in their low half; and, for keys of more than
32 bits, a hash table of a key and a stamp.
"""

import numpy as np
from numba import int64, njit, uint64

import gcnzc.kernels.sample.layout as field
from gcnzc.kernels.memory import prefetch
from gcnzc.kernels.sample.choose import (
    MAX_COMPARED,
    new_scratch,
    sample_chunk,
    sample_weighted_chunk,
)
from gcnzc.kernels.sample.columns import begin_chunk, filter_chunk, skip_excluded
from gcnzc.kernels.sample.layout import indices_of, int64s, prefetch_element

PREFETCH_DISTANCE = 64  # edges ahead for which table slots are prefetched

SLOTS_PER_NODE = 2  # hash tables are at most half full, so that a probe ends after one or two slots


# Indices of the hot loops are unsigned: numba tests whether a signed one counts from the end.
@njit(cache=True, nogil=True)
def _gather(indices, positions):
    """Replace the positions of edges by their sources."""
    for i in range(len(positions)):
        positions[i] = indices[uint64(positions[i])]


@njit(cache=True, nogil=True)
def _is_any_out_of_range(ids, end):
    """Return whether an id is outside [0, end).

    This is a separate, vectorized pass over ids that are still in a cache. As part of the loop that
    reads them from the graph it would take several times as long.
    """
    signs = int64(0)
    for i in range(len(ids)):
        signs |= ids[i] | (end - 1 - ids[i])
    return signs < 0


@njit(inline="always")
def _slot(key, num_slots):
    # Fibonacci hashing: the top bits of a product with 2**64 / golden ratio
    product = uint64(key) * uint64(0x9E3779B97F4A7C15)
    return int64(((product >> uint64(32)) * uint64(num_slots)) >> uint64(32))


@njit(cache=True, nogil=True)
def _relabel_direct(sources, table, base, nodes, count, local_ids):
    """Write the local ids of `sources`, and append new nodes to `nodes`.

    Every slot is written, changed or not, to avoid unpredictable branches.

    Returns:
        The number of nodes: `count` plus the number of new nodes.
    """
    for i in range(min(PREFETCH_DISTANCE, len(sources))):
        prefetch_element(table, sources[i])
    for i in range(len(sources)):
        if i + PREFETCH_DISTANCE < len(sources):
            prefetch_element(table, sources[i + PREFETCH_DISTANCE])
        source = sources[i]
        stamp = int64(table[uint64(source)])
        new = stamp < base
        stamp = base + count if new else stamp
        table[uint64(source)] = stamp
        nodes[uint64(count)] = source
        count += 1 if new else 0
        local_ids[i] = stamp - base
    return count


@njit(inline="always")
def _probe(entry, key, base):
    """Return the local id of a slot, -1 if it is free else 0, and nonzero if it has another key.

    There are no branches, since new nodes are unpredictable.
    """
    local = (entry & 0xFFFFFFFF) - base
    free = local >> 63
    other = ((entry >> 32) ^ key) & 0xFFFFFFFF & ~free
    return local, free, other


@njit(cache=True, nogil=True)
def _relabel_hashed(sources, table, first_key, base, nodes, count, local_ids):
    """`_relabel_direct` with a hash table with linear probing, whose size is a power of two.

    The only branch is taken if the first slot has another key, which is rare.
    """
    for i in range(min(PREFETCH_DISTANCE, len(sources))):
        prefetch_element(table, _slot(first_key + sources[i], len(table)))
    for i in range(len(sources)):
        if i + PREFETCH_DISTANCE < len(sources):
            ahead = first_key + sources[i + PREFETCH_DISTANCE]
            prefetch_element(table, _slot(ahead, len(table)))
        key = first_key + sources[i]
        slot = _slot(key, len(table))
        local, free, other = _probe(table[slot], key, base)
        # with `while` alone, the loop is twice as slow
        if other != 0:
            while other != 0:
                slot = (slot + 1) & (len(table) - 1)
                local, free, other = _probe(table[slot], key, base)
        local += (count - local) & free
        table[slot] = (key << 32) | (base + local)
        nodes[uint64(count)] = sources[i]
        count -= free
        local_ids[i] = local
    return count


@njit(inline="always")
def _find_wide(table, key, base):
    """Return the slot of a 64-bit key, and its stamp, which is below `base` if the slot is free."""
    slot = _slot(key, len(table))
    stamp = table[slot, 1]
    if stamp >= base and table[slot, 0] != key:
        while stamp >= base and table[slot, 0] != key:
            slot = (slot + 1) & (len(table) - 1)
            stamp = table[slot, 1]
    return slot, stamp


@njit(cache=True, nogil=True)
def _relabel_wide(
    sources, table, first_key, num_keys, base, nodes, trees, count, local_ids, ends, size, own_trees
):  # fmt: skip
    """`_relabel_hashed` for 64-bit keys; `own_trees` are the subgraphs of `size` destinations."""
    edge = 0
    for i in range(size):
        shift = first_key + (own_trees[i] * num_keys if len(own_trees) else int64(0))
        while edge < ends[i]:
            sources[edge] += shift
            prefetch(int64(table.ctypes.data) + 16 * _slot(sources[edge], len(table)))
            edge += 1
    edge = 0
    for i in range(size):
        tree = own_trees[i] if len(own_trees) else int64(0)
        shift = first_key + tree * num_keys
        while edge < ends[i]:
            key = sources[edge]
            slot, stamp = _find_wide(table, key, base)
            new = stamp < base
            stamp = base + count if new else stamp
            table[slot, 0], table[slot, 1] = key, stamp
            nodes[count] = key - shift
            if len(trees):
                trees[count] = tree
            count += 1 if new else 0
            local_ids[edge] = stamp - base
            edge += 1
    return count


@njit(cache=True, nogil=True)
def _find_local(key, base, tables):
    """Return the local id of a key, negative if it is not known, and its slot."""
    direct_table, hash_table, wide_table = tables
    if len(direct_table):
        return int64(direct_table[key]) - base, key
    if len(wide_table):
        slot, stamp = _find_wide(wide_table, key, base)
        return stamp - base, slot
    slot = _slot(key, len(hash_table))
    local, _, other = _probe(hash_table[slot], key, base)
    while other != 0:
        slot = (slot + 1) & (len(hash_table) - 1)
        local, _, other = _probe(hash_table[slot], key, base)
    return local, slot


@njit(cache=True, nogil=True)
def _insert(types, known, nodes, trees, tables, num_keys, base):
    """Insert the known nodes; duplicates get the first local id. Return whether there are any."""
    direct_table, hash_table, wide_table = tables
    has_duplicates = False
    for t in range(len(types)):
        for i in range(known[t]):
            at = types[t, field.NODE_FIRST] + i
            key = types[t, field.FIRST_KEY] + nodes[at]
            if len(trees):
                key += trees[at] * num_keys
            local, slot = _find_local(key, base, tables)
            if local >= 0:
                has_duplicates = True
            elif len(direct_table):
                direct_table[slot] = base + i
            elif len(wide_table):
                wide_table[slot, 0], wide_table[slot, 1] = key, base + i
            else:
                hash_table[slot] = (key << 32) | (base + i)
    return has_duplicates


@njit(cache=True, nogil=True)
def _relabel_self_loops(nodes, destination, ends, size, local_ids):
    """Give the self loops of destinations that occur twice their own local ids."""
    edge = 0
    for i in range(size):
        while edge < ends[i]:
            if nodes[local_ids[edge]] == nodes[destination + i]:
                local_ids[edge] = destination + i
            edge += 1


@njit(cache=True, nogil=True)
def _keep_known(
    relation, source_type, num_keys, base, tables, own_trees, positions, ends, size, local_ids
):  # fmt: skip
    """Keep the edges from known nodes, and write their local ids.

    Returns:
        The number of edges that are left; -1 if a source is out of range.
    """
    narrow, wide = indices_of(relation)
    count = edge = int64(0)
    for i in range(size):
        first_key = source_type[field.FIRST_KEY]
        if len(own_trees):
            first_key += own_trees[i] * num_keys
        while edge < ends[i]:
            position = positions[edge]
            source = wide[position] if len(wide) else int64(narrow[position])
            if source < 0 or source >= source_type[field.NUM_NODES]:
                return int64(-1)
            local, _ = _find_local(first_key + source, base, tables)
            if local >= 0:
                positions[count], local_ids[count] = position, local
                count += 1
            edge += 1
        ends[i] = count
    return count


@njit(cache=True, nogil=True)
def _stop(progress, status, place, where, needed):
    """Write why the kernel stops, and the hop, relation and destination where it resumes."""
    progress[field.STATUS], progress[field.WHERE], progress[field.NEEDED] = status, where, needed
    progress[field.HOP], progress[field.RELATION], progress[field.DESTINATION] = place


@njit(cache=True, nogil=True)
def sample_hops(
    relations, types, fanouts, options, tables, seed_data, out, counts, progress
):  # fmt: skip
    """Sample all hops of all edge types; resume from `progress`, which receives the status.

    Offsets and sources are checked here, where they are read, since a graph may be a mapped file
    that has not been checked as a whole.

    Args:
        relations: (R, NUM_RELATION_COLUMNS) int64.
        types: (T, NUM_TYPE_COLUMNS) int64.
        fanouts: (L, R) int64.
        options: (NUM_OPTIONS,) int64; with INDUCED, `fanouts` are (1, R) of -1, and all edges among
            the nodes before hop 0 are found.
        tables: the direct table, the hash table and that of wide keys; two are empty.
        seed_data: (S, 2) int64 key words and (S,) int64 times of disjoint subgraphs.
        out: ids, indices, edge ids and trees; the latter two are empty if not wanted.
        counts: (L + 1, T) nodes before each hop, and (L + 1, R) edges likewise; the last rows are
            the nodes and edges so far.
        progress: (NUM_PROGRESS,) int64.
    """
    direct_table, hash_table, wide_table = tables
    tree_keys, seed_times = seed_data
    nodes, indices, edge_ids, trees = out
    num_nodes, num_edges = counts
    once, replace, base = options[field.ONCE] != 0, options[field.REPLACE] != 0, options[field.BASE]
    is_disjoint, is_induced = options[field.DISJOINT] != 0, options[field.INDUCED] != 0
    num_hops, num_relations = fanouts.shape
    known, filled = num_nodes[num_hops], num_edges[num_hops]
    if options[field.INSERT]:
        has_duplicates = _insert(types, known, nodes, trees, tables, options[field.NUM_KEYS], base)
        if (
            progress[field.HOP] == 0
            and progress[field.RELATION] == 0
            and progress[field.DESTINATION] < 0
        ):
            options[field.OWN_LOOPS] = options[field.OWN_LOOPS] if has_duplicates else 0
        options[field.INSERT] = 0
    begins = np.empty(field.CHUNK_DESTINATIONS, np.int64)
    degrees = np.empty(field.CHUNK_DESTINATIONS, np.int64)
    ends = np.empty(field.CHUNK_DESTINATIONS, np.int64)
    firsts = np.empty(field.CHUNK_DESTINATIONS, np.int64)
    scratch = new_scratch(is_disjoint)
    positions = np.empty(field.CHUNK_EDGES + MAX_COMPARED, np.int64)
    bits = np.zeros(1, np.uint64)
    ranks, remaining = np.empty(0, np.float64), np.empty(0, np.float32)
    latest = np.empty(field.CHUNK_DESTINATIONS, np.int64)
    for hop in range(progress[field.HOP], num_hops):
        for r in range(progress[field.RELATION], num_relations):
            relation, fanout = relations[r], fanouts[hop, r]
            s, d = relation[field.SRC], relation[field.DST]
            begin = num_nodes[hop - 1, d] if once and hop > 0 else 0
            end = num_nodes[hop, d]
            # the first offset of the hop's CSC, and the edges before it
            own_first, before = int64(0), int64(0)
            if not once:
                before = num_edges[hop, r]
                for earlier in range(hop):
                    own_first += num_nodes[earlier, d] + 1
            if own_first + end + 1 > relation[field.INDPTR_CAPACITY]:
                place = hop, r, progress[field.DESTINATION]
                _stop(progress, field.NEED_INDPTR, place, r, own_first + end + 1)
                return
            offsets = nodes[relation[field.INDPTR_FIRST] + own_first :]
            destination = progress[field.DESTINATION]
            progress[field.DESTINATION] = -1
            if destination < 0:
                destination = begin
                offsets[begin] = filled[r] - before
            if fanout == 0 or relation[field.NUM_EDGES] == 0:
                for i in range(begin, end):
                    offsets[i + 1] = filled[r] - before
                continue
            first_node, node_capacity = types[s, field.NODE_FIRST], types[s, field.NODE_CAPACITY]
            first = types[d, field.NODE_FIRST]
            destinations = nodes[first : first + end]
            own_trees = trees[first : first + (end if is_disjoint else 0)]
            num_src, first_key = types[s, field.NUM_NODES], types[s, field.FIRST_KEY]
            is_dated = options[field.TEMPORAL] and (
                relation[field.EDGE_TIME] or relation[field.NODE_TIME]
            )
            is_weighted = relation[field.WEIGHT] != 0 and not is_induced
            columns = int64s(relation[field.INDPTR], types[d, field.NUM_NODES] + 1)
            narrow, wide = indices_of(relation)
            ids = int64s(relation[field.EDGE_IDS], relation[field.NUM_EDGES])
            for i in range(destination, min(destination + field.CHUNK_DESTINATIONS, end)):
                prefetch_element(columns, destinations[i])
            while destination < end:
                size, total, longest, is_valid = begin_chunk(
                    columns, relation[field.NUM_EDGES], destinations, destination, fanout, replace,
                    begins, degrees,
                )  # fmt: skip
                last = destination + size
                chunk_trees = own_trees[destination:last]
                if is_valid and (is_dated or relation[field.NUM_EXCLUDED]):
                    for i in range(size if is_dated else 0):
                        latest[i] = seed_times[chunk_trees[i]]
                    total, longest, is_valid = filter_chunk(
                        relation, num_src, fanout, options, latest[: size if is_dated else 0],
                        begins, degrees, firsts, size,
                    )  # fmt: skip
                if not is_valid:
                    _stop(progress, field.INVALID_COLUMN, (hop, r, destination), r, 0)
                    return
                status, needed = int64(field.DONE), int64(0)
                count, edge = known[s], filled[r]
                # a node is also written when it is not new: one element more
                bound = count + total + 1
                if not is_disjoint:
                    bound = min(bound, num_nodes[0, s] + num_src + 1)
                if edge + total > relation[field.EDGE_CAPACITY]:
                    status, needed = int64(field.NEED_EDGES), edge + total
                elif is_induced:
                    pass
                elif bound > node_capacity:
                    status, needed = int64(field.NEED_NODES), bound
                elif not len(direct_table):
                    slots = SLOTS_PER_NODE * (known.sum() + bound - count)
                    if slots > max(len(wide_table), len(hash_table)):
                        status, needed = int64(field.NEED_SLOTS), slots
                if status != field.DONE:
                    where = s if status == field.NEED_NODES else r
                    _stop(progress, status, (hop, r, destination), where, needed)
                    return
                for i in range(last, min(last + field.CHUNK_DESTINATIONS, end)):
                    prefetch_element(columns, destinations[i])
                if total > len(positions):
                    positions = np.empty(2 * total, np.int64)
                if is_weighted:
                    if longest > len(ranks):
                        ranks = np.empty(2 * longest, np.float64)
                        remaining = np.empty(2 * longest, np.float32)
                    total = sample_weighted_chunk(
                        destinations[destination:last], begins, degrees, firsts, chunk_trees,
                        tree_keys, hop, fanout, options, relation, ranks, remaining, positions,
                        ends,
                    )  # fmt: skip
                else:
                    if fanout > MAX_COMPARED and longest > 64 * len(bits):
                        bits = np.zeros((longest + 63) // 64, np.uint64)
                    sample_chunk(
                        destinations[destination:last], begins, degrees, chunk_trees, tree_keys,
                        hop, fanout, options, relation, scratch, bits, positions, ends,
                    )  # fmt: skip
                if relation[field.NUM_EXCLUDED]:
                    skip_excluded(relation, begins, firsts, size, positions, ends)
                at = relation[field.EDGE_FIRST] + edge
                local_ids = indices[at : at + total]
                if is_induced:
                    total = _keep_known(
                        relation, types[s], options[field.NUM_KEYS], base, tables, chunk_trees,
                        positions, ends, size, local_ids,
                    )  # fmt: skip
                    if total < 0:
                        _stop(progress, field.INVALID_COLUMN, (hop, r, destination), r, 0)
                        return
                for i in range(size):
                    offsets[destination + i + 1] = edge - before + ends[i]
                if len(edge_ids):
                    if len(ids):
                        for i in range(total):
                            edge_ids[at + i] = ids[positions[i]]
                    else:
                        for i in range(total):
                            edge_ids[at + i] = positions[i]
                filled[r] = edge + total
                if is_induced:
                    destination = last
                    continue
                sources = positions[:total]
                if len(wide):
                    _gather(wide, sources)
                else:
                    _gather(narrow, sources)
                if _is_any_out_of_range(sources, num_src):
                    _stop(progress, field.INVALID_COLUMN, (hop, r, destination), r, 0)
                    return
                own_nodes = nodes[first_node : first_node + node_capacity]
                if len(direct_table):
                    own_table = direct_table[first_key : first_key + num_src]
                    known[s] = _relabel_direct(
                        sources, own_table, base, own_nodes, count, local_ids
                    )
                elif len(wide_table):
                    # without disjoint subgraphs, `trees` is empty
                    known[s] = _relabel_wide(
                        sources, wide_table, first_key, options[field.NUM_KEYS], base, own_nodes,
                        trees[first_node : first_node + node_capacity], count, local_ids, ends,
                        size, chunk_trees,
                    )  # fmt: skip
                else:
                    known[s] = _relabel_hashed(
                        sources, hash_table, first_key, base, own_nodes, count, local_ids
                    )
                if options[field.OWN_LOOPS] and s == d:
                    _relabel_self_loops(own_nodes, destination, ends, size, local_ids)
                destination = last
        progress[field.RELATION] = 0
        # loops, since numba compiles an assignment of slices with error messages, which takes
        # seconds
        for t in range(len(known)):
            num_nodes[hop + 1, t] = known[t]
        for r in range(num_relations):
            num_edges[hop + 1, r] = filled[r]
    progress[field.STATUS], progress[field.HOP] = field.DONE, num_hops
