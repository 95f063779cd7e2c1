"""Sample in-edges of a chunk of destinations: uniformly or by weight, with or without replacement.

The positions of a destination count its eligible edges, from its first one on. The random words are
Philox 4x32-10 with a key of the edge type and the subgraph, counted by (draw, node, hop, epoch).

Up to the fanout `MAX_COMPARED` a position is compared with all positions sampled before it, for
many destinations at once; beyond it, the positions of a destination are marked in a bitmap.
"""

import numpy as np
from numba import int64, njit, uint32, uint64

import gcnzc.kernels.sample.layout as field
from gcnzc.kernels.memory import prefetch
from gcnzc.kernels.philox import MASK, philox4x32
from gcnzc.kernels.sample.columns import copy_remaining
from gcnzc.kernels.sample.layout import float32s, int64s

MAX_COMPARED = 64


@njit(cache=True, nogil=True)
def subgraph_keys(nodes, times, key_0, key_1, out):
    """Write two random words for each seed of disjoint subgraphs: a function of node and time.

    Args:
        nodes: (S,) int64 seeds of one type.
        times: (S,) int64, or empty.
        key_0, key_1: key of the node type, below 2**32.
        out: (S, 2) int64.
    """
    for i in range(len(nodes)):
        node, time = nodes[i], times[i] if len(times) else int64(0)
        words = philox4x32(
            node & MASK, (node >> 32) & MASK, time & MASK, (time >> 32) & MASK, key_0, key_1
        )
        out[i, 0], out[i, 1] = words[0], words[1]


@njit(cache=True, nogil=True)
def new_scratch(has_own_keys):
    """Allocate the arrays that `sample_chunk` uses; `has_own_keys` is for disjoint subgraphs."""
    return (
        np.empty(field.CHUNK_DESTINATIONS, np.uint32),
        np.empty(field.CHUNK_DESTINATIONS, np.uint32),
        np.empty(field.CHUNK_DESTINATIONS, np.uint32),
        # padded by a cache line, so that the elements of a column are in different cache sets
        np.empty((MAX_COMPARED, field.CHUNK_DESTINATIONS + 16), np.uint32),
        np.empty(field.CHUNK_DESTINATIONS, np.uint32),
        np.empty((2, field.CHUNK_DESTINATIONS if has_own_keys else 0), np.uint32),
    )


@njit(cache=True, nogil=True)
def _choose(low, high, degrees, count, fanout, replace, epoch, key, own_keys, words, is_duplicate):
    """Write `fanout` positions below `degrees[i]` to column i of `words`, in vectorized loops."""
    own_0, own_1 = own_keys[0], own_keys[1]
    key_0, key_1 = key
    for quad in range((fanout + 3) // 4):
        if len(own_0):
            for i in range(count):
                w0, w1, w2, w3 = philox4x32(quad, low[i], high[i], epoch, own_0[i], own_1[i])
                words[4 * quad, i] = w0
                words[4 * quad + 1, i] = w1
                words[4 * quad + 2, i] = w2
                words[4 * quad + 3, i] = w3
            continue
        for i in range(count):
            w0, w1, w2, w3 = philox4x32(quad, low[i], high[i], epoch, key_0, key_1)
            words[4 * quad, i] = w0
            words[4 * quad + 1, i] = w1
            words[4 * quad + 2, i] = w2
            words[4 * quad + 3, i] = w3
    if replace:
        for draw in range(fanout):
            for i in range(count):
                words[draw, i] = (uint64(words[draw, i]) * uint64(degrees[i])) >> uint64(32)
        return
    # Floyd's algorithm
    for draw in range(fanout):
        for i in range(count):
            below = degrees[i] - uint32(fanout - draw - 1)
            words[draw, i] = (uint64(words[draw, i]) * uint64(below)) >> uint64(32)
            is_duplicate[i] = 0
        for earlier in range(draw):
            for i in range(count):
                is_duplicate[i] |= words[earlier, i] == words[draw, i]
        for i in range(count):
            if is_duplicate[i]:
                words[draw, i] = degrees[i] - uint32(fanout - draw)


@njit(cache=True, nogil=True)
def _choose_many(low, high, degree, fanout, replace, epoch, key, bits, positions):
    """`_choose` for one destination and any fanout; `bits` are zero before and after."""
    for quad in range((fanout + 3) // 4):
        words = philox4x32(quad, low, high, epoch, key[0], key[1])
        for draw in range(4 * quad, min(4 * quad + 4, fanout)):
            last = degree - 1 if replace else degree - fanout + draw
            position = int64((words[draw - 4 * quad] * uint64(last + 1)) >> uint64(32))
            if not replace:
                if bits[position >> 6] >> uint64(position & 63) & uint64(1):
                    position = last
                bits[position >> 6] |= uint64(1) << uint64(position & 63)
            positions[draw] = position
    if not replace:
        for draw in range(fanout):
            bits[positions[draw] >> 6] = 0


@njit(inline="always")
def _key_of(relation, trees, tree_keys, i):
    """Return the key of the edge type, and in disjoint subgraphs of that of a destination."""
    if len(trees):
        tree = trees[i]
        return relation[field.KEY_0] ^ tree_keys[tree, 0], relation[field.KEY_1] ^ tree_keys[
            tree, 1
        ]
    return relation[field.KEY_0], relation[field.KEY_1]


@njit(cache=True, nogil=True)
def sample_chunk(
    nodes, begins, degrees, trees, tree_keys, hop, fanout, options, relation, scratch, bits,
    positions, ends,
):  # fmt: skip
    """Write the positions of the edges of a chunk, and prefetch their sources.

    The sources have arrived when the chunk is complete. This is twice as fast as prefetching them
    64 elements ahead while reading them.

    Args:
        nodes: (C,) int64 destinations.
        begins, degrees: (C,) int64 first eligible edge and number of eligible edges.
        trees: (C,) int64 numbers of their subgraphs, or empty.
        tree_keys: (S, 2) int64 random words of the subgraphs.
        hop, fanout: of the chunk.
        options: (NUM_OPTIONS,) int64.
        relation: (NUM_RELATION_COLUMNS,) int64.
        scratch: from `new_scratch`.
        bits: uint64 with a bit for each edge of a column if `fanout` exceeds `MAX_COMPARED`.
        positions: int64, receives the positions in the arrays of the edge type.
        ends: (C,) int64, receives the end of each destination's positions.

    Returns:
        The number of positions.
    """
    low, high, sampled_degrees, words, is_duplicate, own_keys = scratch
    replace, epoch = options[field.REPLACE] != 0, options[field.EPOCH]
    address, index_bytes = (
        relation[field.INDICES],
        int64(8) if relation[field.IS_WIDE] else int64(4),
    )
    least = int64(0) if replace else fanout
    is_compared = 0 <= fanout <= MAX_COMPARED
    if is_compared:
        count = 0
        for i in range(len(nodes)):
            low[count] = nodes[i] & MASK
            high[count] = (nodes[i] >> 32) | (hop << 16)
            sampled_degrees[count] = degrees[i]
            if len(trees):
                key_0, key_1 = _key_of(relation, trees, tree_keys, i)
                own_keys[0, count], own_keys[1, count] = key_0, key_1
            count += 1 if degrees[i] > least else 0
        key = relation[field.KEY_0], relation[field.KEY_1]
        _choose(
            low, high, sampled_degrees, count, fanout, replace, epoch, key, own_keys, words,
            is_duplicate,
        )  # fmt: skip
    filled = column = int64(0)
    for i in range(len(nodes)):
        begin, degree = begins[i], degrees[i]
        if fanout < 0 or degree <= least:
            for position in range(degree):
                positions[filled + position] = begin + position
                if position % field.LINE_IDS == 0:
                    prefetch(address + index_bytes * (begin + position))
            filled += degree
        elif is_compared:
            for draw in range(fanout):
                position = begin + words[draw, uint64(column)]
                positions[uint64(filled + draw)] = position
                prefetch(address + index_bytes * position)
            column += 1
            filled += fanout
        else:
            chosen = positions[filled : filled + fanout]
            node_low, node_high = nodes[i] & MASK, (nodes[i] >> 32) | (hop << 16)
            key = _key_of(relation, trees, tree_keys, i)
            _choose_many(node_low, node_high, degree, fanout, replace, epoch, key, bits, chosen)
            for draw in range(fanout):
                chosen[draw] += begin
                prefetch(address + index_bytes * chosen[draw])
            filled += fanout
        ends[i] = filled
    return filled


@njit(cache=True, nogil=True)
def sample_weighted_chunk(
    nodes, begins, degrees, firsts, trees, tree_keys, hop, fanout, options, relation, ranks,
    remaining, positions, ends,
):  # fmt: skip
    """`sample_chunk` for an edge type with weights; edges of weight 0 are never sampled.

    `firsts` are from `filter_chunk` if edges are excluded. `ranks` and `remaining` are scratch
    memory of as many elements as the longest column.
    """
    weights = float32s(relation[field.WEIGHT], relation[field.NUM_EDGES])
    excluded = int64s(relation[field.EXCLUDED], relation[field.NUM_EXCLUDED])
    index_bytes = int64(8) if relation[field.IS_WIDE] else int64(4)
    filled = int64(0)
    for i in range(len(nodes)):
        begin, degree = begins[i], degrees[i]
        own_weights = weights[begin : begin + degree]
        if len(excluded) and firsts[i] >= 0:
            copy_remaining(weights, excluded, firsts[i], begin, degree, remaining)
            own_weights = remaining[:degree]
        chosen = positions[filled:]
        if fanout < 0 or (degree <= fanout and not options[field.REPLACE]):
            count = int64(0)
            for position in range(degree):
                chosen[count] = position
                count += 1 if own_weights[position] > 0.0 else 0
        else:
            node_low, node_high = nodes[i] & MASK, (nodes[i] >> 32) | (hop << 16)
            counter = (node_low, node_high, options[field.EPOCH])
            key = _key_of(relation, trees, tree_keys, i)
            if options[field.REPLACE]:
                count = _choose_by_weight_again(own_weights, fanout, counter, key, ranks, chosen)
            else:
                count = _choose_by_weight(own_weights, fanout, counter, key, ranks, chosen)
        for k in range(count):
            chosen[k] += begin
            prefetch(relation[field.INDICES] + index_bytes * chosen[k])
        filled += count
        ends[i] = filled
    return filled


@njit(inline="always")
def _uniform_of(word):
    """Return a number in (0, 1) from a random word."""
    return (float(word) + 0.5) * 2.0**-32


@njit(cache=True, nogil=True)
def _choose_by_weight(weights, fanout, counter, key, ranks, out):
    """Sample positions with probabilities proportional to their weights; return their number.

    They are those of the `fanout` smallest values of -log(u) / weight, in this order, where u is
    uniform (Efraimidis and Spirakis, 2006, https://doi.org/10.1016/j.ipl.2005.11.003).
    """
    low, high, epoch = counter
    count = int64(0)
    for quad in range((len(weights) + 3) // 4):
        words = philox4x32(quad, low, high, epoch, key[0], key[1])
        for i in range(4 * quad, min(4 * quad + 4, len(weights))):
            if weights[i] == 0.0:
                continue
            rank = -np.log(_uniform_of(words[i - 4 * quad])) / weights[i]
            if count == fanout and rank >= ranks[count - 1]:
                continue
            place = count if count < fanout else count - 1
            while place > 0 and ranks[place - 1] > rank:
                ranks[place], out[place] = ranks[place - 1], out[place - 1]
                place -= 1
            ranks[place], out[place] = rank, i
            count = min(count + 1, fanout)
    return count


@njit(cache=True, nogil=True)
def _choose_by_weight_again(weights, fanout, counter, key, sums, out):
    """`_choose_by_weight` with replacement: by inversion of the cumulative sum."""
    low, high, epoch = counter
    total = 0.0
    for i in range(len(weights)):
        total += weights[i]
        sums[i] = total
    if not total > 0.0:
        return int64(0)
    for quad in range((fanout + 3) // 4):
        words = philox4x32(quad, low, high, epoch, key[0], key[1])
        for draw in range(4 * quad, min(4 * quad + 4, fanout)):
            wanted = _uniform_of(words[draw - 4 * quad]) * total
            place = np.searchsorted(sums[: len(weights)], wanted, side="right")
            # rounding may reach the total; an edge of weight 0 has an empty interval
            place = min(place, len(weights) - 1)
            while weights[place] == 0.0:
                place -= 1
            out[draw] = place
    return int64(fanout)
