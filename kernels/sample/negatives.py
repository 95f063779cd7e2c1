"""Sample negatives: pairs of nodes that are not edges, if required.

Each negative is drawn by Philox 4x32-10, keyed by the seed and counted by the epoch, the number of
the edge that it is drawn for and the number of the draw, so it is the same in whatever batch,
order, thread or process it is drawn. Two words make a node's number: the high half of their product
with N, whose probabilities are within N / 2**64 of uniform, relatively.

A pair that may not be is drawn again, 32 times at most; then the next destination that may be is
taken, counted upward from the last one drawn, for "both" with the next source where one has none.

Letters: N nodes, P edges to draw for, K draws for each.
"""

from typing import Any, Literal, TypeAlias

import numpy as np
from numba import int64, njit, uint64
from numpy.typing import NDArray

from gcnzc.kernels.philox import philox4x32, philox4x32_reference, split_key
from gcnzc.kernels.sample.exclude import has_edge

Array = NDArray[Any]


Kind: TypeAlias = Literal["uniform", "both"]


TRIES = 32


# in the place where the neighbour sampler's counters have the hop, of which there are never so many
MARK = 0xFFFF


MAX_NODES = 2**32 - 1


def draw_reference(
    item: int, draw: int, attempt: int, num_nodes: int, seed: int, epoch: int
) -> tuple[int, int]:
    """The destination and the source of one try, with Python's own integers."""
    counter = (draw * TRIES + attempt, item & 0xFFFFFFFF, (item >> 32) | (MARK << 16), epoch)
    w0, w1, w2, w3 = (int(word) for word in philox4x32_reference(*counter, *split_key(seed)))
    return ((w1 << 32) | w0) * num_nodes >> 64, ((w3 << 32) | w2) * num_nodes >> 64


@njit(cache=True, nogil=True)
def _below(low, high, num_nodes):
    carried = (low * uint64(num_nodes)) >> uint64(32)
    return int64((high * uint64(num_nodes) + carried) >> uint64(32))


@njit(cache=True, nogil=True)
def _may_be(indptr, indices, source, target):
    return source != target and not has_edge(indptr, indices, source, target)


@njit(cache=True, nogil=True)
def _draw(indptr, indices, sources, items, per_item, both, strict, key, out):
    """Write the negatives; the place of an edge that has none, or -1."""
    num_nodes = len(indptr) - 1
    key_0, key_1, epoch = key[0], key[1], key[2]
    for i in range(len(items)):
        low, high = items[i] & 0xFFFFFFFF, (items[i] >> 32) | (MARK << 16)
        for draw in range(per_item):
            source = target = int64(0)
            found = False
            for attempt in range(TRIES):
                counter = draw * TRIES + attempt
                w0, w1, w2, w3 = philox4x32(counter, low, high, epoch, key_0, key_1)
                target = _below(w0, w1, num_nodes)
                source = _below(w2, w3, num_nodes) if both else int64(sources[i])
                if not strict or _may_be(indptr, indices, source, target):
                    found = True
                    break
            more_sources = num_nodes if both else 1
            while not found and more_sources > 0:
                for _ in range(num_nodes):
                    target = target + 1 if target + 1 < num_nodes else 0
                    if _may_be(indptr, indices, source, target):
                        found = True
                        break
                if not found:
                    more_sources -= 1
                    source = source + 1 if source + 1 < num_nodes else 0
            if not found:
                return i
            out[0, i * per_item + draw] = source
            out[1, i * per_item + draw] = target
    return -1


def sample_negatives(
    indptr: Array,
    indices: Array,
    sources: Array,
    items: Array,
    per_item: int,
    kind: Kind,
    strict: bool,
    seed: int,
    epoch: int,
) -> Array:
    """Draw `per_item` negatives for each edge.

    Args:
        indptr: (N + 1,) int64.
        indices: (E,) int32 or int64, each column ascending; looked at if `strict`.
        sources: (P,) int64 in [0, N): where the edges begin.
        items: (P,) int64 in [0, 2**48): their numbers, which count the choices.
        per_item: K, below 2**27.
        kind: "uniform" keeps the source and draws the destination; "both" draws both ends.
        strict: neither edges of the graph nor a node with itself.
        seed: the key, of 64 bits.
        epoch: in [0, 2**32).

    Returns:
        (2, P * K) int64 sources and destinations, those of one edge side by side.

    Raises:
        ValueError: the graph has 2**32 nodes or more, or none; or `strict` leaves nothing to draw.
    """
    num_nodes = len(indptr) - 1
    if not 0 < num_nodes <= MAX_NODES:
        raise ValueError(
            f"negatives in a graph of {num_nodes} nodes\n\nhint: 1 to {MAX_NODES} are drawn from"
        )
    key = np.array([*split_key(seed), epoch], np.uint64)
    out = np.empty((2, len(items) * per_item), np.int64)
    wrong = _draw(indptr, indices, sources, items, per_item, kind == "both", strict, key, out)
    if wrong >= 0:
        who = "every pair of nodes" if kind == "both" else f"node {sources[wrong]} with every other"
        raise ValueError(
            f"no negative can be drawn: there are edges of {who}\n\n"
            "hint: draw negatives that may be edges"
        )
    return out


@njit(cache=True, nogil=True)
def _in_batch(indptr, indices, edges, per_item, strict, out):
    count = 0
    num_edges = edges.shape[1]
    for i in range(num_edges):
        source, own = edges[0, i], edges[1, i]
        for draw in range(per_item):
            target = edges[1, (i + 1 + draw) % num_edges]
            if target == own or (strict and not _may_be(indptr, indices, source, target)):
                continue
            out[0, count] = source
            out[1, count] = target
            count += 1
    return count


def in_batch(indptr: Array, indices: Array, edges: Array, per_item: int, strict: bool) -> Array:
    """Set each edge's source beside the destinations of the edges that follow in the batch.

    Args:
        indptr: (N + 1,) int64.
        indices: (E,) int32 or int64, each column ascending; looked at if `strict`.
        edges: (2, P) int64; behind the last edge comes the first.
        per_item: K, how many of those that follow; all others if there are no more.
        strict: leave out pairs that are edges of the graph or a node with itself.

    Returns:
        (2, at most P * K) int64 sources and destinations, without pairs that are the edge itself.
    """
    per_item = min(per_item, max(0, edges.shape[1] - 1))
    out = np.empty((2, edges.shape[1] * per_item), np.int64)
    count = _in_batch(indptr, indices, edges, per_item, strict, out)
    return out[:, :count]
