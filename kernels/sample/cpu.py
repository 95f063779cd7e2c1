"""Neighbour sampling on CPUs, with numba."""

import numpy as np
from numba import int64, njit, uint32, uint64

from gcnzc.kernels.memory import prefetch
from gcnzc.kernels.philox import philox4x32
from gcnzc.kernels.sample.exclude import num_excluded, original_position

# destinations, and approximate number of edges, that are processed at once, so that their data stay
# in the processor's caches
CHUNK_DESTINATIONS = 256


CHUNK_EDGES = 4096


PREFETCH_DISTANCE = 64  # edges ahead for which table slots are prefetched


LINE_IDS = 8  # 8 B ids in a cache line


# Up to this fanout a position is compared with all positions sampled before it, for many
# destinations at once; beyond it, the positions of a destination are marked in a bitmap.
MAX_COMPARED = 64


# the hash table is at most half full, so that a probe ends after one or two slots
SLOTS_PER_NODE = 2


# fields of `progress`; INVALID_NODE is a node with invalid offsets or neighbours, or -1
HOP, DESTINATION, NODES, EDGES, INVALID_NODE, NEED_INDPTR, NEED_NODES, NEED_EDGES = range(8)


@njit(cache=True, nogil=True)
def _prefetch_element(array, position):
    prefetch(int64(array.ctypes.data) + position * array.itemsize)


@njit(cache=True, nogil=True)
def choose_distinct(degrees, num_sampled, fanout, words, is_duplicate):
    """Floyd's algorithm for many destinations at once, in loops that LLVM vectorizes.

    Column i of `words` has `fanout` random words below 2**32, and receives as many different
    positions below `degrees[i]`, which is greater than `fanout`.
    """
    for draw in range(fanout):
        for i in range(num_sampled):
            below = degrees[i] - uint32(fanout - draw - 1)
            words[draw, i] = (uint64(words[draw, i]) * uint64(below)) >> uint64(32)
            is_duplicate[i] = 0
        for earlier in range(draw):
            for i in range(num_sampled):
                is_duplicate[i] |= words[earlier, i] == words[draw, i]
        for i in range(num_sampled):
            if is_duplicate[i]:
                words[draw, i] = degrees[i] - uint32(fanout - draw)


@njit(cache=True, nogil=True)
def _sample_small_fanout(low, high, degrees, num_sampled, fanout, key, words, is_duplicate):
    """Sample `fanout` positions below `degrees[i]` into column i of `words`."""
    key_0, key_1, epoch = key[0], key[1], key[2]
    for quad in range((fanout + 3) // 4):
        for i in range(num_sampled):
            w0, w1, w2, w3 = philox4x32(quad, low[i], high[i], epoch, key_0, key_1)
            words[4 * quad, i] = w0
            words[4 * quad + 1, i] = w1
            words[4 * quad + 2, i] = w2
            words[4 * quad + 3, i] = w3
    choose_distinct(degrees, num_sampled, fanout, words, is_duplicate)


@njit(cache=True, nogil=True)
def _sample_large_fanout(low, high, degree, fanout, key, bits, positions):
    """Floyd's algorithm for one destination with a bitmap, which is zero before and after."""
    for quad in range((fanout + 3) // 4):
        words = philox4x32(quad, low, high, key[2], key[0], key[1])
        for draw in range(4 * quad, min(4 * quad + 4, fanout)):
            last = degree - fanout + draw
            position = int64((words[draw - 4 * quad] * uint64(last + 1)) >> uint64(32))
            if bits[position >> 6] >> uint64(position & 63) & uint64(1):
                position = last
            bits[position >> 6] |= uint64(1) << uint64(position & 63)
            positions[draw] = position
    for position in positions[:fanout]:
        bits[position >> 6] = 0


@njit(cache=True, nogil=True)
def _relabel_direct(sources, table, base, nodes, count, local_ids):
    """Write the local ids of `sources`, and append new nodes to `nodes`.

    The slot of a node holds its stamp, which is `base` plus its local id; a stamp below `base` is
    from an earlier batch. Every slot is written, changed or not, to avoid unpredictable branches.

    Returns:
        The number of nodes: `count` plus the number of new nodes.
    """
    for i in range(min(PREFETCH_DISTANCE, len(sources))):
        _prefetch_element(table, sources[i])
    for i in range(len(sources)):
        if i + PREFETCH_DISTANCE < len(sources):
            _prefetch_element(table, sources[i + PREFETCH_DISTANCE])
        source = sources[i]
        stamp = int64(table[source])
        new = stamp < base
        stamp = base + count if new else stamp
        table[source] = stamp
        nodes[count] = source
        count += 1 if new else 0
        local_ids[i] = stamp - base
    return count


@njit(cache=True, nogil=True)
def _slot(node, num_slots):
    # Fibonacci hashing: the top bits of a product with 2**64 / golden ratio
    product = uint64(node) * uint64(0x9E3779B97F4A7C15)
    return int64(((product >> uint64(32)) * uint64(num_slots)) >> uint64(32))


@njit(cache=True, nogil=True)
def _probe(entry, source, base, nodes, has_wide_ids):
    """Decode a slot without branches, since new nodes are unpredictable.

    Returns:
        `local`: the local id; `free`: -1 if the slot is free, else 0; `other`: nonzero if the slot
        is occupied by another node.
    """
    local = (entry & 0xFFFFFFFF) - base
    free = local >> 63
    other = ((entry >> 32) ^ source) & 0xFFFFFFFF & ~free
    # ids that differ by a multiple of 2**32 have the same low half; numba removes this branch when
    # the argument is None
    if has_wide_ids is not None:
        other = (nodes[local & ~free] ^ source) & ~free
    return local, free, other


@njit(cache=True, nogil=True)
def _relabel_hashed(sources, table, base, nodes, count, local_ids, has_wide_ids):
    """`_relabel_direct` with a hash table with linear probing, whose size is a power of two.

    A slot holds the low half of an id in its high half, and the stamp in its low half; it is free
    if the stamp is below `base`. The only branch is taken if the first slot holds another node,
    which is rare.
    """
    for i in range(min(PREFETCH_DISTANCE, len(sources))):
        _prefetch_element(table, _slot(sources[i], len(table)))
    for i in range(len(sources)):
        if i + PREFETCH_DISTANCE < len(sources):
            _prefetch_element(table, _slot(sources[i + PREFETCH_DISTANCE], len(table)))
        source = sources[i]
        slot = _slot(source, len(table))
        local, free, other = _probe(table[slot], source, base, nodes, has_wide_ids)
        # with `while` alone, the loop is twice as slow
        if other != 0:
            while other != 0:
                slot = (slot + 1) & (len(table) - 1)
                local, free, other = _probe(table[slot], source, base, nodes, has_wide_ids)
        local += (count - local) & free
        table[slot] = (source << 32) | (base + local)
        nodes[count] = source
        count -= free
        local_ids[i] = local
    return count


@njit(cache=True, nogil=True)
def insert_nodes(direct_table, hash_table, base, nodes, count, has_wide_ids):
    """Insert the first `count` nodes with their positions; duplicates get the first position.

    Returns:
        The number of nodes that were inserted: those that were not in the table before.
    """
    inserted = 0
    for position in range(count):
        node = nodes[position]
        if len(direct_table):
            if direct_table[node] < base:
                direct_table[node] = base + position
                inserted += 1
        else:
            slot = _slot(node, len(hash_table))
            _, free, other = _probe(hash_table[slot], node, base, nodes, has_wide_ids)
            while other != 0:
                slot = (slot + 1) & (len(hash_table) - 1)
                _, free, other = _probe(hash_table[slot], node, base, nodes, has_wide_ids)
            if free:
                hash_table[slot] = (node << 32) | (base + position)
                inserted += 1
    return inserted


@njit(cache=True, nogil=True)
def _relabel_self_loops(nodes, destination, ends, chunk_size, local_ids):
    """Give the self loops of destinations that occur twice their own local ids."""
    edge = 0
    for i in range(chunk_size):
        while edge < ends[i]:
            if nodes[local_ids[edge]] == nodes[destination + i]:
                local_ids[edge] = destination + i
            edge += 1


@njit(cache=True, nogil=True)
def _sample_chunk(
    nodes, begins, degrees, hop, fanout, key, scratch, bits, indices, positions, ends
):  # fmt: skip
    """Sample the edges of a chunk of destinations: write their positions and each one's end.

    The sources of the edges are prefetched as the positions are written, and have arrived when the
    chunk is complete. This is twice as fast as prefetching 64 elements ahead while reading them.
    """
    low, high, sampled_degrees, words, is_duplicate = scratch
    if 0 <= fanout <= MAX_COMPARED:
        num_sampled = 0
        for i in range(len(nodes)):
            if degrees[i] > fanout:
                low[num_sampled] = nodes[i] & 0xFFFFFFFF
                high[num_sampled] = (nodes[i] >> 32) | (hop << 16)
                sampled_degrees[num_sampled] = degrees[i]
                num_sampled += 1
        _sample_small_fanout(
            low, high, sampled_degrees, num_sampled, fanout, key, words, is_duplicate
        )
    filled = 0
    column = 0
    for i in range(len(nodes)):
        begin, degree = begins[i], degrees[i]
        if fanout < 0 or degree <= fanout:
            for position in range(degree):
                positions[filled + position] = begin + position
                if position % LINE_IDS == 0:
                    _prefetch_element(indices, begin + position)
            filled += degree
        elif fanout <= MAX_COMPARED:
            for draw in range(fanout):
                position = begin + words[draw, column]
                positions[filled + draw] = position
                _prefetch_element(indices, position)
            column += 1
            filled += fanout
        else:
            chosen_positions = positions[filled : filled + fanout]
            half, rest = nodes[i] & 0xFFFFFFFF, (nodes[i] >> 32) | (hop << 16)
            _sample_large_fanout(half, rest, degree, fanout, key, bits, chosen_positions)
            for draw in range(fanout):
                chosen_positions[draw] += begin
                _prefetch_element(indices, chosen_positions[draw])
            filled += fanout
        ends[i] = filled


@njit(cache=True, nogil=True)
def _skip_excluded(excluded, destination, begins, ends, chunk_size, positions):
    """Map positions among the edges that are not excluded to positions among all edges."""
    first, kept_before, removed = excluded
    filled = 0
    for i in range(chunk_size):
        if num_excluded(first, removed, destination + i) > 0:
            for edge in range(filled, ends[i]):
                kept = positions[edge] - begins[i]
                positions[edge] = begins[i] + original_position(
                    first, kept_before, removed, destination + i, kept
                )
        filled = ends[i]


@njit(cache=True, nogil=True)
def is_any_out_of_range(ids, end):
    """Return whether an id is outside [0, end).

    This is a separate, vectorized pass over ids that are still in a cache. As part of the loop that
    reads them from the graph it would take several times as long.
    """
    signs = int64(0)
    for i in range(len(ids)):
        signs |= ids[i] | (end - 1 - ids[i])
    return signs < 0


@njit(cache=True, nogil=True)
def _find_invalid_source(sources, ends, end):
    """Return the first destination of a chunk with a source that is out of range."""
    invalid = 0
    while 0 <= sources[invalid] < end:
        invalid += 1
    destination = 0
    while ends[destination] <= invalid:
        destination += 1
    return destination


@njit(cache=True, nogil=True)
def _find_invalid_column(begins, degrees, num_edges):
    """Return the first destination of a chunk whose offsets are out of range, or -1."""
    for i in range(len(begins)):
        # num_edges - begins[i] cannot overflow, since begins[i] is checked first
        if not (0 <= begins[i] <= num_edges and 0 <= degrees[i] <= num_edges - begins[i]):
            return i
    return -1


@njit(cache=True, nogil=True)
def _begin_chunk(indptr, destinations, destination, fanout, excluded, begins, degrees):
    """Read the offsets of the next destinations, up to the size of a chunk.

    Returns:
        The numbers of destinations and of edges of the chunk, and its largest degree.
    """
    chunk_size = total = longest = 0
    while (
        chunk_size < CHUNK_DESTINATIONS
        and total < CHUNK_EDGES
        and destination + chunk_size < len(destinations)
    ):
        node = destinations[destination + chunk_size]
        begin, degree = indptr[node], indptr[node + 1] - indptr[node]
        # numba removes this branch when the argument is None
        if excluded is not None:
            degree -= num_excluded(excluded[0], excluded[2], destination + chunk_size)
        begins[chunk_size], degrees[chunk_size] = begin, degree
        total += degree if fanout < 0 else min(degree, fanout)
        longest = max(longest, degree)
        chunk_size += 1
    return chunk_size, total, longest


@njit(cache=True, nogil=True)
def _new_scratch():
    """Allocate the arrays of `_sample_small_fanout` for a chunk."""
    return (
        np.empty(CHUNK_DESTINATIONS, np.uint32),
        np.empty(CHUNK_DESTINATIONS, np.uint32),
        np.empty(CHUNK_DESTINATIONS, np.uint32),
        # padded by a cache line, so that the elements of a column are in different cache sets
        np.empty((MAX_COMPARED, CHUNK_DESTINATIONS + 16), np.uint32),
        np.empty(CHUNK_DESTINATIONS, np.uint32),
    )


@njit(cache=True, nogil=True)
def sample_hops(
    indptr,
    indices,
    fanouts,
    key,
    excluded,
    once,
    has_duplicates,
    direct_table,
    hash_table,
    base,
    has_wide_ids,
    out,
    progress,
    num_nodes,
    num_edges,
):
    """Resume sampling from `progress`; return whether the batch is complete.

    Otherwise a buffer is too small, and `progress` has the needed sizes, or a node has offsets or
    neighbours out of range, and `progress` has the node. Offsets and neighbours are checked here,
    where they are read, since a graph may be a mapped file that has not been checked as a whole.
    """
    nodes, out_indptr, out_indices, out_edge_ids = out
    hop, destination = progress[HOP], progress[DESTINATION]
    count, edges = progress[NODES], progress[EDGES]
    begins = np.empty(CHUNK_DESTINATIONS, np.int64)
    degrees = np.empty(CHUNK_DESTINATIONS, np.int64)
    ends = np.empty(CHUNK_DESTINATIONS, np.int64)
    scratch = _new_scratch()
    positions = np.empty(CHUNK_EDGES + 64 * CHUNK_DESTINATIONS, np.int64)
    bits = np.zeros(1, np.uint64)
    capacity = len(nodes)
    if not len(direct_table):
        capacity = min(capacity, len(hash_table) // SLOTS_PER_NODE)
    done = True
    while hop < len(fanouts) and done:
        fanout, num_destinations = fanouts[hop], num_nodes[hop]
        # the offsets of all hops are concatenated, each with its own leading zero
        first = hop
        for i in range(hop):
            first += num_nodes[i]
        if len(out_indptr) < first + num_destinations + 1:
            progress[NEED_INDPTR] = first + num_destinations + 1
            done = False
            break
        # with `once`, destinations of earlier hops get no further edges
        num_sampled_before = num_nodes[hop - 1] if once and hop > 0 else 0
        out_indptr[first : first + num_sampled_before + 1] = 0
        destination = max(destination, num_sampled_before)
        while destination < num_destinations:
            chunk_size, total, longest = _begin_chunk(
                indptr, nodes[:num_destinations], destination, fanout, excluded, begins, degrees
            )
            invalid = _find_invalid_column(begins[:chunk_size], degrees[:chunk_size], len(indices))
            if invalid >= 0:
                progress[INVALID_NODE], progress[NODES] = nodes[destination + invalid], count
                return False
            if count + total > capacity or edges + total > len(out_indices):
                progress[NEED_NODES], progress[NEED_EDGES] = count + total, edges + total
                done = False
                break
            # prefetch the offsets of the next chunk
            last = destination + chunk_size
            for i in range(last, min(last + CHUNK_DESTINATIONS, num_destinations)):
                _prefetch_element(indptr, nodes[i])
            if total > len(positions):
                positions = np.empty(2 * total, np.int64)
            if fanout > MAX_COMPARED and longest > 64 * len(bits):
                bits = np.zeros((longest + 63) // 64, np.uint64)
            _sample_chunk(
                nodes[destination:last],
                begins,
                degrees,
                hop,
                fanout,
                key,
                scratch,
                bits,
                indices,
                positions,
                ends,
            )
            # only columns of seeds have excluded edges, and seeds are the first destinations
            if excluded is not None and destination < len(excluded[0]) - 1:
                _skip_excluded(excluded, destination, begins, ends, chunk_size, positions)
            for i in range(chunk_size):
                out_indptr[first + destination + i + 1] = edges - num_edges[hop] + ends[i]
            if len(out_edge_ids):
                # numba compiles an assignment of slices with error messages, which takes seconds
                for i in range(total):
                    out_edge_ids[edges + i] = positions[i]
            sources = positions[:total]
            for i in range(total):
                sources[i] = indices[positions[i]]
            if is_any_out_of_range(sources, len(indptr) - 1):
                invalid = _find_invalid_source(sources, ends, len(indptr) - 1)
                progress[INVALID_NODE], progress[NODES] = nodes[destination + invalid], count
                return False
            local_ids = out_indices[edges : edges + total]
            if len(direct_table):
                count = _relabel_direct(sources, direct_table, base, nodes, count, local_ids)
            else:
                count = _relabel_hashed(
                    sources, hash_table, base, nodes, count, local_ids, has_wide_ids
                )
            if has_duplicates:
                _relabel_self_loops(nodes, destination, ends, chunk_size, local_ids)
            edges += total
            destination += chunk_size
        if done:
            hop += 1
            destination = 0
            num_nodes[hop], num_edges[hop] = count, edges
    progress[HOP], progress[DESTINATION] = hop, destination
    progress[NODES], progress[EDGES] = count, edges
    return done
