"""Sample in-edges of a node: uniformly or by weight, with or without replacement.

Positions are below the number of eligible edges of the node, and are written to `out` from
`out[first]` on, since a slice of `out` for each node takes time. The random words are Philox
4x32-10 with a key of the edge type and the subgraph, counted by (node, hop, epoch, draw).
"""

import numpy as np
from numba import int64, njit, uint64

from gcnzc.kernels.philox import MASK, philox4x32
from gcnzc.kernels.sample.cpu import CHUNK_DESTINATIONS, MAX_COMPARED, choose_distinct
from gcnzc.kernels.sample.hetero_layout import EPOCH, HOP, REPLACE

MAX_DEGREE = 2**32 - 1  # largest number of edges of a destination in a chunk


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
def random_words(quad, node, options, key_0, key_1):
    """Return four random words for draws 4 * quad to 4 * quad + 3 of a node at a hop."""
    high = (node >> 32) | (options[HOP] << 16)
    return philox4x32(quad, node & MASK, high, options[EPOCH], key_0, key_1)


@njit(cache=True, nogil=True)
def new_chunk():
    """Allocate a chunk, of which each column is a destination.

    Returns:
        (5, columns) uint32: low and high halves of the counter, two words of the key, and the
        number of edges; (MAX_COMPARED, more columns) uint32 for the sampled positions; and
        (columns,) uint32, scratch memory. The rows of positions are padded by a cache line, so
        that the elements of a column are in different cache sets.
    """
    return (
        np.empty((5, CHUNK_DESTINATIONS), np.uint32),
        np.empty((MAX_COMPARED, CHUNK_DESTINATIONS + 16), np.uint32),
        np.empty(CHUNK_DESTINATIONS, np.uint32),
    )


@njit(cache=True, nogil=True)
def add_to_chunk(chunk, place, node, size, options, key_0, key_1):
    """Write a destination with `size` eligible edges to column `place` of a chunk."""
    columns = chunk[0]
    columns[0, place] = node & MASK
    columns[1, place] = (node >> 32) | (options[HOP] << 16)
    columns[2, place] = key_0
    columns[3, place] = key_1
    columns[4, place] = size


@njit(cache=True, nogil=True)
def sample_chunk(chunk, count, fanout, options):
    """Sample as `sample_uniform` does for many destinations at once, in loops that LLVM vectorizes.

    Args:
        chunk: from `new_chunk`; its first `count` columns are destinations with more than `fanout`
            edges, or at least one when sampling with replacement, and at most `MAX_DEGREE`.
            Column i of its second array receives `fanout` positions.
        count: number of destinations.
        fanout: of 1 to `MAX_COMPARED`.
        options: (NUM_OPTIONS,) int64.
    """
    columns, words, is_duplicate = chunk
    low, high, key_0, key_1, sizes = columns[0], columns[1], columns[2], columns[3], columns[4]
    epoch = options[EPOCH]
    for quad in range((fanout + 3) // 4):
        for i in range(count):
            w0, w1, w2, w3 = philox4x32(quad, low[i], high[i], epoch, key_0[i], key_1[i])
            words[4 * quad, i] = w0
            words[4 * quad + 1, i] = w1
            words[4 * quad + 2, i] = w2
            words[4 * quad + 3, i] = w3
    if options[REPLACE]:
        for draw in range(fanout):
            for i in range(count):
                words[draw, i] = (uint64(words[draw, i]) * uint64(sizes[i])) >> uint64(32)
    else:
        choose_distinct(sizes, count, fanout, words, is_duplicate)


@njit(cache=True, nogil=True)
def sample_uniform(size, fanout, node, options, key_0, key_1, bits, out, first):
    """Sample `fanout` of more than `fanout` positions, with Floyd's algorithm or replacement.

    Args:
        size: number of edges; with replacement at least 1, otherwise more than `fanout`.
        fanout: number of positions to sample.
        node: destination, of the counter.
        options: (NUM_OPTIONS,) int64.
        key_0, key_1: words of the key, below 2**32.
        bits: uint64 with at least `size` bits, zero before and after; unused with replacement.
        out: int64, receives `fanout` positions below `size`.
        first: where in `out`.
    """
    replace = options[REPLACE] != 0
    for quad in range((fanout + 3) // 4):
        words = random_words(quad, node, options, key_0, key_1)
        for draw in range(4 * quad, min(4 * quad + 4, fanout)):
            last = size - 1 if replace else size - fanout + draw
            position = int64((words[draw - 4 * quad] * uint64(last + 1)) >> uint64(32))
            if not replace:
                if bits[position >> 6] >> uint64(position & 63) & uint64(1):
                    position = last
                bits[position >> 6] |= uint64(1) << uint64(position & 63)
            out[first + draw] = position
    if not replace:
        for draw in range(fanout):
            bits[out[first + draw] >> 6] = 0


@njit(cache=True, nogil=True)
def uniform_of(word):
    """Return a number in (0, 1) from a random word."""
    return (float(word) + 0.5) * 2.0**-32


@njit(cache=True, nogil=True)
def sample_weighted(weights, fanout, node, options, key_0, key_1, scratch, out, first):
    """Sample positions with probabilities proportional to their weights; return their number.

    Without replacement: the `fanout` smallest of -log(u) / weight, in this order, where u is
    uniform (Efraimidis and Spirakis, 2006, https://doi.org/10.1016/j.ipl.2005.11.003). With
    replacement: by inversion of the cumulative sum. Edges of weight 0 are never sampled.
    """
    if options[REPLACE]:
        total = 0.0
        for i in range(len(weights)):
            total += weights[i]
            scratch[i] = total
        if not total > 0.0:
            return 0
        for quad in range((fanout + 3) // 4):
            words = random_words(quad, node, options, key_0, key_1)
            for draw in range(4 * quad, min(4 * quad + 4, fanout)):
                wanted = uniform_of(words[draw - 4 * quad]) * total
                place = np.searchsorted(scratch[: len(weights)], wanted, side="right")
                # rounding may reach the total; an edge of weight 0 has an empty interval
                place = min(place, len(weights) - 1)
                while weights[place] == 0.0:
                    place -= 1
                out[first + draw] = place
        return fanout
    count = 0
    for quad in range((len(weights) + 3) // 4):
        words = random_words(quad, node, options, key_0, key_1)
        for i in range(4 * quad, min(4 * quad + 4, len(weights))):
            if weights[i] == 0.0:
                continue
            rank = -np.log(uniform_of(words[i - 4 * quad])) / weights[i]
            if count == fanout and rank >= scratch[count - 1]:
                continue
            place = count if count < fanout else count - 1
            while place > 0 and scratch[place - 1] > rank:
                scratch[place] = scratch[place - 1]
                out[first + place] = out[first + place - 1]
                place -= 1
            scratch[place], out[first + place] = rank, i
            count = min(count + 1, fanout)
    return count


@njit(cache=True, nogil=True)
def take_all(weights, size, out, first):
    """Take all positions, or those with a weight; return their number."""
    count = 0
    for i in range(size):
        out[first + count] = i
        if not len(weights) or weights[i] > 0.0:
            count += 1
    return count
