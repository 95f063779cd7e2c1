"""Neighbor sampling on CPUs: one numba kernel per minibatch and hop."""

import numpy as np
from numba import int64, njit, uint32, uint64

from gcnzc.kernels.memory import prefetch
from gcnzc.kernels.philox import philox4x32
from gcnzc.kernels.sample.exclude import num_removed, position_of

# destinations, and about how many edges, taken at once: what they need stays in the first caches
LOT_DESTINATIONS = 256


LOT_EDGES = 4096


AHEAD = 64  # slots of a table are asked for this many edges before they are due


LINE_IDS = 8  # ids of 8 B in a line of the cache


# Up to here a position is compared with all those chosen before it, many destinations at a time;
# beyond, each destination marks its positions in a map of bits.
COMPARED = 64


# the hash table is at most half full, so that a search ends after a slot or two
SLOTS_PER_NODE = 2


# fields of `progress`; WRONG_NODE is -1 unless the graph's numbers for a node are damaged
HOP, DESTINATION, NODES, EDGES, WRONG_NODE, NEED_INDPTR, NEED_NODES, NEED_EDGES = range(8)


@njit(cache=True, nogil=True)
def _ask(array, position):
    prefetch(int64(array.ctypes.data) + position * array.itemsize)


@njit(cache=True, nogil=True)
def _draw_few(low, high, degrees, num_drawn, fanout, key, words, clash):
    """Floyd's method for many destinations at once, in loops that become vector code.

    Column i of `words` becomes the `fanout` positions of destination i below `degrees[i]`.
    """
    key_0, key_1, epoch = key[0], key[1], key[2]
    for quad in range((fanout + 3) // 4):
        for i in range(num_drawn):
            w0, w1, w2, w3 = philox4x32(quad, low[i], high[i], epoch, key_0, key_1)
            words[4 * quad, i] = w0
            words[4 * quad + 1, i] = w1
            words[4 * quad + 2, i] = w2
            words[4 * quad + 3, i] = w3
    for draw in range(fanout):
        for i in range(num_drawn):
            below = degrees[i] - uint32(fanout - draw - 1)
            words[draw, i] = (uint64(words[draw, i]) * uint64(below)) >> uint64(32)
            clash[i] = 0
        for earlier in range(draw):
            for i in range(num_drawn):
                clash[i] |= words[earlier, i] == words[draw, i]
        for i in range(num_drawn):
            if clash[i]:
                words[draw, i] = degrees[i] - uint32(fanout - draw)


@njit(cache=True, nogil=True)
def _draw_many(low, high, degree, fanout, key, bits, positions):
    """Floyd's method for one destination with a map of bits, which is left empty."""
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
def _number_directly(sources, table, base, nodes, count, places):
    """Write the local numbers of `sources`; new ones get the next, and join `nodes`.

    A node's slot holds its stamp, which is `base` plus its local number; a stamp below `base` is of
    an earlier batch. There is no branch to be foretold: every slot is written, changed or not.
    """
    for i in range(min(AHEAD, len(sources))):
        _ask(table, sources[i])
    for i in range(len(sources)):
        if i + AHEAD < len(sources):
            _ask(table, sources[i + AHEAD])
        source = sources[i]
        stamp = int64(table[source])
        new = stamp < base
        stamp = base + count if new else stamp
        table[source] = stamp
        nodes[count] = source
        count += 1 if new else 0
        places[i] = stamp - base
    return count


@njit(cache=True, nogil=True)
def _slot(node, num_slots):
    # Fibonacci hashing: the top bits of a product with 2**64 / golden ratio
    product = uint64(node) * uint64(0x9E3779B97F4A7C15)
    return int64(((product >> uint64(32)) * uint64(num_slots)) >> uint64(32))


@njit(cache=True, nogil=True)
def _look(entry, source, base, nodes, wide):
    """What a slot holds: a local number; all ones if it is free; nonzero if of another node.

    In words, since the processor cannot foretell whether a node is new.
    """
    local = (entry & 0xFFFFFFFF) - base
    free = local >> 63
    other = ((entry >> 32) ^ source) & 0xFFFFFFFF & ~free
    # ids that differ by a multiple of 2**32 share their low half; for None this is not compiled
    if wide is not None:
        other = (nodes[local & ~free] ^ source) & ~free
    return local, free, other


@njit(cache=True, nogil=True)
def _number_by_hash(sources, table, base, nodes, count, places, wide):
    """The same with a hash table of a power of two of slots, searched one by one.

    A slot holds the low half of an id above its stamp; with a stamp below `base` it is free. The
    one branch is taken where the first slot holds another node, and that is rare.
    """
    for i in range(min(AHEAD, len(sources))):
        _ask(table, _slot(sources[i], len(table)))
    for i in range(len(sources)):
        if i + AHEAD < len(sources):
            _ask(table, _slot(sources[i + AHEAD], len(table)))
        source = sources[i]
        slot = _slot(source, len(table))
        local, free, other = _look(table[slot], source, base, nodes, wide)
        # not `while` alone, which becomes twice as slow
        if other != 0:
            while other != 0:
                slot = (slot + 1) & (len(table) - 1)
                local, free, other = _look(table[slot], source, base, nodes, wide)
        local += (count - local) & free
        table[slot] = (source << 32) | (base + local)
        nodes[count] = source
        count -= free
        places[i] = local
    return count


@njit(cache=True, nogil=True)
def enter(direct, hashed, base, nodes, count, wide):
    """Number the first `count` nodes by their places; one that occurs twice by its first."""
    for place in range(count):
        node = nodes[place]
        if len(direct):
            if direct[node] < base:
                direct[node] = base + place
        else:
            slot = _slot(node, len(hashed))
            _, free, other = _look(hashed[slot], node, base, nodes, wide)
            while other != 0:
                slot = (slot + 1) & (len(hashed) - 1)
                _, free, other = _look(hashed[slot], node, base, nodes, wide)
            if free:
                hashed[slot] = (node << 32) | (base + place)


@njit(cache=True, nogil=True)
def _draw_lot(
    nodes, begins, degrees, hop, fanout, key, scratch, bits, indices, positions, ends
):  # fmt: skip
    """Write where the kept edges of a lot of destinations stand in `indices`, and their ends.

    The edges are asked for as their positions are written: by the time the lot is drawn they have
    come, which is twice as quick as to ask 64 entries ahead while they are read.
    """
    low, high, drawn_degrees, words, clash = scratch
    if 0 <= fanout <= COMPARED:
        num_drawn = 0
        for i in range(len(nodes)):
            if degrees[i] > fanout:
                low[num_drawn] = nodes[i] & 0xFFFFFFFF
                high[num_drawn] = (nodes[i] >> 32) | (hop << 16)
                drawn_degrees[num_drawn] = degrees[i]
                num_drawn += 1
        _draw_few(low, high, drawn_degrees, num_drawn, fanout, key, words, clash)
    filled = 0
    column = 0
    for i in range(len(nodes)):
        begin, degree = begins[i], degrees[i]
        if fanout < 0 or degree <= fanout:
            for position in range(degree):
                positions[filled + position] = begin + position
                if position % LINE_IDS == 0:
                    _ask(indices, begin + position)
            filled += degree
        elif fanout <= COMPARED:
            for draw in range(fanout):
                position = begin + words[draw, column]
                positions[filled + draw] = position
                _ask(indices, position)
            column += 1
            filled += fanout
        else:
            chosen = positions[filled : filled + fanout]
            half, rest = nodes[i] & 0xFFFFFFFF, (nodes[i] >> 32) | (hop << 16)
            _draw_many(half, rest, degree, fanout, key, bits, chosen)
            for draw in range(fanout):
                chosen[draw] += begin
                _ask(indices, chosen[draw])
            filled += fanout
        ends[i] = filled


@njit(cache=True, nogil=True)
def _pass_over(left, destination, begins, ends, taken, positions):
    """Turn positions among the edges that are kept into positions among all."""
    first, kept_before, removed = left
    filled = 0
    for i in range(taken):
        if num_removed(first, removed, destination + i) > 0:
            for place in range(filled, ends[i]):
                kept = positions[place] - begins[i]
                positions[place] = begins[i] + position_of(
                    first, kept_before, removed, destination + i, kept
                )
        filled = ends[i]


@njit(cache=True, nogil=True)
def _are_outside(numbers, end):
    """Whether one of the numbers is below 0 or not below `end`.

    A pass of its own over numbers that are in the first cache, which becomes vector code. As part
    of the loop that reads them from the graph it costs several times as much.
    """
    signs = int64(0)
    for i in range(len(numbers)):
        signs |= numbers[i] | (end - 1 - numbers[i])
    return signs < 0


@njit(cache=True, nogil=True)
def _first_wrong_source(sources, ends, end):
    """The first destination of a lot with a source that is no node."""
    wrong = 0
    while 0 <= sources[wrong] < end:
        wrong += 1
    place = 0
    while ends[place] <= wrong:
        place += 1
    return place


@njit(cache=True, nogil=True)
def _first_wrong_column(begins, degrees, num_edges):
    """The first destination of a lot whose edges are not those of the graph, or -1."""
    for i in range(len(begins)):
        # no number of 64 bits can wrap round once the first two are known to be in range
        if not (0 <= begins[i] <= num_edges and 0 <= degrees[i] <= num_edges - begins[i]):
            return i
    return -1


@njit(cache=True, nogil=True)
def sample_hops(
    indptr,
    indices,
    fanouts,
    key,
    left,
    once,
    direct,
    hashed,
    base,
    wide,
    out,
    progress,
    num_nodes,
    num_edges,
):
    """Go on from `progress`; False if it cannot, and then `progress` says why.

    Either a buffer is too small, or the numbers of a node lead outside the graph. All are checked
    here, where they are read first, since a graph may be a mapped file that nobody has read.
    """
    nodes, out_indptr, out_indices, out_edge_ids = out
    hop, destination = progress[HOP], progress[DESTINATION]
    count, edges = progress[NODES], progress[EDGES]
    begins = np.empty(LOT_DESTINATIONS, np.int64)
    degrees = np.empty(LOT_DESTINATIONS, np.int64)
    ends = np.empty(LOT_DESTINATIONS, np.int64)
    scratch = (
        np.empty(LOT_DESTINATIONS, np.uint32),
        np.empty(LOT_DESTINATIONS, np.uint32),
        np.empty(LOT_DESTINATIONS, np.uint32),
        # a line more, so that a column's entries fall into different sets of the cache
        np.empty((COMPARED, LOT_DESTINATIONS + 16), np.uint32),
        np.empty(LOT_DESTINATIONS, np.uint32),
    )
    positions = np.empty(LOT_EDGES + 64 * LOT_DESTINATIONS, np.int64)
    bits = np.zeros(1, np.uint64)
    room = len(nodes)
    if not len(direct):
        room = min(room, len(hashed) // SLOTS_PER_NODE)
    done = True
    while hop < len(fanouts) and done:
        fanout, num_destinations = fanouts[hop], num_nodes[hop]
        # the hops' offsets lie one behind the other, each with its own leading zero
        first = hop + num_nodes[:hop].sum()
        if len(out_indptr) < first + num_destinations + 1:
            progress[NEED_INDPTR] = first + num_destinations + 1
            done = False
            break
        # nodes of earlier hops were drawn for, and get no edges again
        drawn_before = num_nodes[hop - 1] if once and hop > 0 else 0
        out_indptr[first : first + drawn_before + 1] = 0
        destination = max(destination, drawn_before)
        while destination < num_destinations:
            taken = total = longest = 0
            while (
                taken < LOT_DESTINATIONS
                and total < LOT_EDGES
                and destination + taken < num_destinations
            ):
                node = nodes[destination + taken]
                begin, degree = indptr[node], indptr[node + 1] - indptr[node]
                # for None this is not compiled
                if left is not None:
                    degree -= num_removed(left[0], left[2], destination + taken)
                begins[taken], degrees[taken] = begin, degree
                total += degree if fanout < 0 else min(degree, fanout)
                longest = max(longest, degree)
                taken += 1
            wrong = _first_wrong_column(begins[:taken], degrees[:taken], len(indices))
            if wrong >= 0:
                progress[WRONG_NODE], progress[NODES] = nodes[destination + wrong], count
                return False
            if count + total > room or edges + total > len(out_indices):
                progress[NEED_NODES], progress[NEED_EDGES] = count + total, edges + total
                done = False
                break
            # the next lot's offsets are on their way while this lot is drawn
            last = destination + taken
            for i in range(last, min(last + LOT_DESTINATIONS, num_destinations)):
                _ask(indptr, nodes[i])
            if total > len(positions):
                positions = np.empty(2 * total, np.int64)
            if fanout > COMPARED and longest > 64 * len(bits):
                bits = np.zeros((longest + 63) // 64, np.uint64)
            _draw_lot(
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
            # the seeds come first, and no other column has edges to leave out
            if left is not None and destination < len(left[0]) - 1:
                _pass_over(left, destination, begins, ends, taken, positions)
            for i in range(taken):
                out_indptr[first + destination + i + 1] = edges - num_edges[hop] + ends[i]
            if len(out_edge_ids):
                out_edge_ids[edges : edges + total] = positions[:total]
            sources = positions[:total]
            for i in range(total):
                sources[i] = indices[positions[i]]
            if _are_outside(sources, len(indptr) - 1):
                wrong = _first_wrong_source(sources, ends, len(indptr) - 1)
                progress[WRONG_NODE], progress[NODES] = nodes[destination + wrong], count
                return False
            places = out_indices[edges : edges + total]
            if len(direct):
                count = _number_directly(sources, direct, base, nodes, count, places)
            else:
                count = _number_by_hash(sources, hashed, base, nodes, count, places, wide)
            edges += total
            destination += taken
        if done:
            hop += 1
            destination = 0
            num_nodes[hop], num_edges[hop] = count, edges
    progress[HOP], progress[DESTINATION] = hop, destination
    progress[NODES], progress[EDGES] = count, edges
    return done
