"""Negative sampling for link prediction: random pairs of nodes, optionally only non-edges.

The random words of Philox 4x32-10 have the seed as key, and the epoch, the id of the positive edge
and the index of the negative as counter. A negative therefore does not depend on the batch, the
order, the thread or the process. Two words give a node: the high half of their product with N,
whose probability differs from 1 / N by a factor of at most 1 +- N / 2**64.

A rejected pair is sampled again, up to 32 times in all. After that the next valid destination is
taken, counting upward from the last one; for "both", the next sources are tried as well if a source
has no valid destination. Negatives that may not be later than their edge are sampled from the first
nodes by time in the same way.

Notation: N nodes, P positive edges, K negatives for each.
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


# a hop number that the neighbour sampler's counters never have, so that the random words differ
NEGATIVE_MARK = 0xFFFF


MAX_NODES = 2**32 - 1


def sample_negative_reference(
    item: int, draw: int, attempt: int, num_nodes: int, seed: int, epoch: int
) -> tuple[int, int]:
    """Return the destination and the source of one attempt: a reference in plain Python."""
    counter = (
        draw * TRIES + attempt,
        item & 0xFFFFFFFF,
        (item >> 32) | (NEGATIVE_MARK << 16),
        epoch,
    )
    w0, w1, w2, w3 = (int(word) for word in philox4x32_reference(*counter, *split_key(seed)))
    return ((w1 << 32) | w0) * num_nodes >> 64, ((w3 << 32) | w2) * num_nodes >> 64


@njit(cache=True, nogil=True)
def _below(low, high, num_nodes):
    carry = (low * uint64(num_nodes)) >> uint64(32)
    return int64((high * uint64(num_nodes) + carry) >> uint64(32))


@njit(cache=True, nogil=True)
def _is_negative(indptr, indices, source, target, is_bipartite=False):
    is_loop = source == target and not is_bipartite
    return not is_loop and not has_edge(indptr, indices, source, target)


@njit(cache=True, nogil=True)
def _node_at(order, place):
    return int64(order[place]) if len(order) else int64(place)


@njit(cache=True, nogil=True)
def _sample_negatives(
    indptr,
    indices,
    sources,
    items,
    num_negatives,
    both,
    strict,
    is_bipartite,
    first,
    order,
    num_eligible,
    key,
    out,
):
    """Write the negatives; return the index of an edge without any, or -1.

    The destinations of edge i are the first `num_eligible[i]` nodes of `order`. If both are empty,
    they are all nodes by their ids.
    """
    num_nodes = len(indptr) - 1
    key_0, key_1, epoch = key[0], key[1], key[2]
    for i in range(len(items)):
        low, high = items[i] & 0xFFFFFFFF, (items[i] >> 32) | (NEGATIVE_MARK << 16)
        count = int64(num_eligible[i]) if len(order) else int64(num_nodes)
        for draw in range(num_negatives):
            source = place = target = int64(0)
            found = False
            for attempt in range(TRIES):
                counter = (first + draw) * TRIES + attempt
                w0, w1, w2, w3 = philox4x32(counter, low, high, epoch, key_0, key_1)
                place = _below(w0, w1, count)
                target = _node_at(order, place)
                source = _below(w2, w3, num_nodes) if both else int64(sources[i])
                if not strict or _is_negative(indptr, indices, source, target, is_bipartite):
                    found = True
                    break
            more_sources = num_nodes if both else 1
            while not found and more_sources > 0:
                for _ in range(count):
                    place = place + 1 if place + 1 < count else 0
                    target = _node_at(order, place)
                    if _is_negative(indptr, indices, source, target, is_bipartite):
                        found = True
                        break
                if not found:
                    more_sources -= 1
                    source = source + 1 if source + 1 < num_nodes else 0
            if not found:
                return i
            out[0, i * num_negatives + draw] = source
            out[1, i * num_negatives + draw] = target
    return -1


def sample_negatives(
    indptr: Array,
    indices: Array,
    sources: Array,
    items: Array,
    num_negatives: int,
    kind: Kind,
    strict: bool,
    seed: int,
    epoch: int,
    is_bipartite: bool = False,
    first: int = 0,
) -> Array:
    """Sample `num_negatives` negatives for each positive edge.

    Args:
        indptr: (N + 1,) int64.
        indices: (E,) int32 or int64, each column ascending; used only if `strict`.
        sources: (P,) int64 in [0, N), or ids of another node type: the sources of the positive
            edges.
        items: (P,) int64 in [0, 2**48): ids of the positive edges, which select random words.
        num_negatives: K, below 2**27.
        kind: "uniform" keeps the source and samples the destination; "both" samples both nodes.
        strict: reject edges of the graph and self loops.
        seed: 64-bit seed.
        epoch: in [0, 2**32).
        is_bipartite: the sources are nodes of another type, so that no pair is a self loop; only
            for "uniform".
        first: index of the first of the K negatives among the negatives of an edge, so that
            several calls sample parts of them; `first + K` is below 2**27.

    Returns:
        (2, P * K) int64 sources and destinations; the K negatives of an edge are adjacent.

    Raises:
        ValueError: the graph has no nodes or 2**32 nodes or more, or with `strict` there is no
            valid pair.
    """
    num_nodes = len(indptr) - 1
    if not 0 < num_nodes <= MAX_NODES:
        raise ValueError(f"negative sampling in a graph of {num_nodes} nodes")
    key = np.array([*split_key(seed), epoch], np.uint64)
    out = np.empty((2, len(items) * num_negatives), np.int64)
    both = kind == "both"
    all_nodes = np.empty(0, np.int64)
    failed = _sample_negatives(
        indptr,
        indices,
        sources,
        items,
        num_negatives,
        both,
        strict,
        is_bipartite,
        first,
        all_nodes,
        all_nodes,
        key,
        out,
    )
    if failed >= 0:
        pairs = (
            "every pair of nodes" if kind == "both" else f"node {sources[failed]} and all others"
        )
        raise ValueError(
            f"there is no negative: the graph has edges between {pairs}\n\n"
            "hint: strict=False (on the command line --no-strict-negatives) allows negatives "
            "that are edges of the graph"
        )
    return out


def sample_timed_negatives(
    indptr: Array,
    indices: Array,
    sources: Array,
    items: Array,
    num_negatives: int,
    order: Array,
    num_eligible: Array,
    strict: bool,
    seed: int,
    epoch: int,
    is_bipartite: bool = False,
    first: int = 0,
) -> tuple[Array, int | None]:
    """Sample `num_negatives` destinations for each positive edge among the eligible nodes.

    The negatives of an edge do not depend on the nodes that are not eligible for it.

    Args:
        indptr, indices, sources, items, num_negatives, strict, seed, epoch, is_bipartite,
            first: see `sample_negatives`.
        order: (N,) int64 nodes by time, the earliest first.
        num_eligible: (P,) int64 in [1, N]: for each edge, how many of the first nodes of `order`
            are eligible.

    Returns:
        (2, P * K) int64 sources and destinations, and the index of an edge without a valid
        destination, or None.
    """
    key = np.array([*split_key(seed), epoch], np.uint64)
    out = np.empty((2, len(items) * num_negatives), np.int64)
    failed = _sample_negatives(
        indptr,
        indices,
        sources,
        items,
        num_negatives,
        False,
        strict,
        is_bipartite,
        first,
        order,
        num_eligible,
        key,
        out,
    )
    return out, None if failed < 0 else int(failed)


@njit(cache=True, nogil=True)
def _in_batch_negatives(indptr, indices, edges, num_negatives, strict, out):
    count = 0
    num_edges = edges.shape[1]
    for i in range(num_edges):
        source, own_target = edges[0, i], edges[1, i]
        for draw in range(num_negatives):
            target = edges[1, (i + 1 + draw) % num_edges]
            if target == own_target or (
                strict and not _is_negative(indptr, indices, source, target)
            ):
                continue
            out[0, count] = source
            out[1, count] = target
            count += 1
    return count


def in_batch_negatives(
    indptr: Array, indices: Array, edges: Array, num_negatives: int, strict: bool
) -> Array:
    """Pair each edge's source with the destinations of the next edges of the batch.

    Args:
        indptr: (N + 1,) int64.
        indices: (E,) int32 or int64, each column ascending; used only if `strict`.
        edges: (2, P) int64 sources and destinations; the first edge follows the last one.
        num_negatives: K, the number of following edges; all other edges if there are fewer.
        strict: drop pairs that are edges of the graph or self loops.

    Returns:
        (2, at most P * K) int64 sources and destinations, without pairs equal to the edge itself.
    """
    num_negatives = min(num_negatives, max(0, edges.shape[1] - 1))
    out = np.empty((2, edges.shape[1] * num_negatives), np.int64)
    count = _in_batch_negatives(indptr, indices, edges, num_negatives, strict, out)
    return out[:, :count]
