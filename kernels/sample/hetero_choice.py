"""Sample in-edges of a node: uniformly or by weight, with or without replacement.

Positions are below the number of eligible edges of the node, and are written to `out` from
`out[first]` on, since a slice of `out` for each node takes time. The random words are Philox
4x32-10 with a key of the edge type and the subgraph, counted by (node, hop, epoch, draw).
"""

import numpy as np
from numba import int64, njit, uint64

from gcnzc.kernels.philox import MASK, philox4x32
from gcnzc.kernels.sample.hetero_layout import EPOCH, HOP, REPLACE

# up to this fanout a position is compared with all positions sampled before it, beyond it positions
# are marked in a bitmap
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
def random_words(quad, node, options, key_0, key_1):
    """Return four random words for draws 4 * quad to 4 * quad + 3 of a node at a hop."""
    high = (node >> 32) | (options[HOP] << 16)
    return philox4x32(quad, node & MASK, high, options[EPOCH], key_0, key_1)


@njit(cache=True, nogil=True)
def sample_uniform(size, fanout, node, options, key_0, key_1, bits, out, first):
    """Sample `fanout` of more than `fanout` positions, with Floyd's algorithm or replacement."""
    replace = options[REPLACE] != 0
    is_marked = fanout > MAX_COMPARED and not replace
    for quad in range((fanout + 3) // 4):
        words = random_words(quad, node, options, key_0, key_1)
        for draw in range(4 * quad, min(4 * quad + 4, fanout)):
            last = size - 1 if replace else size - fanout + draw
            position = int64((words[draw - 4 * quad] * uint64(last + 1)) >> uint64(32))
            if is_marked:
                if bits[position >> 6] >> uint64(position & 63) & uint64(1):
                    position = last
                bits[position >> 6] |= uint64(1) << uint64(position & 63)
            elif not replace:
                for earlier in range(draw):
                    if out[first + earlier] == position:
                        position = last
                        break
            out[first + draw] = position
    if is_marked:
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
