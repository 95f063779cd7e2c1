"""Clusters and parts of a graph: move nodes to neighbouring labels, assign them, and contract.

The kernels are sequential and use integers only, so results are the same on every machine.

Notation: N nodes, E edges, L labels (clusters or parts). A graph is `indptr` (N + 1,) and `indices`
(E,), with each edge in both directions; `weights` is (E,), or (0,) if all edges have the weight 1.
"""

from typing import Any, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]


def propagate_labels_reference(
    indptr: Array,
    indices: Array,
    weights: Array,
    order: Array,
    size: Array,
    load: Array,
    max_sizes: Array,
    max_loads: Array,
    labels: Array,
) -> int:
    """Reference for `propagate_labels`."""
    sizes, loads = (
        np.bincount(labels, each, len(max_sizes)).astype(np.int64) for each in (size, load)
    )
    moves = 0
    for node in order.tolist():
        gains: dict[int, int] = {}
        for edge in range(indptr[node], indptr[node + 1]):
            if indices[edge] != node:
                label = int(labels[indices[edge]])
                gains[label] = gains.get(label, 0) + (int(weights[edge]) if len(weights) else 1)
        own = int(labels[node])
        has_room = (sizes + size[node] <= max_sizes) & (loads + load[node] <= max_loads)
        is_overloaded = sizes[own] > max_sizes[own] or (
            load[node] > 0 and loads[own] > max_loads[own]
        )
        best, best_gain = own, -1 if is_overloaded else gains.get(own, 0)
        for label, gain in gains.items():
            is_better = gain > best_gain or (
                gain == best_gain and best != own and sizes[label] < sizes[best]
            )
            if label != own and has_room[label] and is_better:
                best, best_gain = label, gain
        if is_overloaded and best == own:
            has_room[own] = False
            if has_room.any():
                best = int(np.argmax(np.where(has_room, max_loads - loads, -1)))
        if best != own:
            labels[node] = best
            sizes[own] -= size[node]
            loads[own] -= load[node]
            sizes[best] += size[node]
            loads[best] += load[node]
            moves += 1
    return moves


@njit(nogil=True, cache=True)
def _propagate_labels(
    indptr, indices, weights_E, order_N, size_N, load_N, max_sizes_L, max_loads_L, labels_N
):  # fmt: skip
    num_labels = len(max_sizes_L)
    sizes_L = np.zeros(num_labels, np.int64)
    loads_L = np.zeros(num_labels, np.int64)
    for node in range(len(labels_N)):
        sizes_L[labels_N[node]] += size_N[node]
        loads_L[labels_N[node]] += load_N[node]
    gains_L = np.zeros(num_labels, np.int64)
    found_L = np.empty(num_labels, np.int64)
    is_weighted = len(weights_E) > 0
    moves = 0
    for node in order_N:
        num_found = 0
        for edge in range(indptr[node], indptr[node + 1]):
            if indices[edge] == node:
                continue
            label = labels_N[indices[edge]]
            if gains_L[label] == 0:
                found_L[num_found] = label
                num_found += 1
            gains_L[label] += weights_E[edge] if is_weighted else 1
        own, size, load = labels_N[node], size_N[node], load_N[node]
        is_overloaded = sizes_L[own] > max_sizes_L[own] or (
            load > 0 and loads_L[own] > max_loads_L[own]
        )
        best, best_gain = own, np.int64(-1) if is_overloaded else gains_L[own]
        for i in range(num_found):
            label = found_L[i]
            gain = gains_L[label]
            gains_L[label] = 0
            if (
                label == own
                or sizes_L[label] + size > max_sizes_L[label]
                or loads_L[label] + load > max_loads_L[label]
            ):
                continue
            if gain > best_gain or (
                gain == best_gain and best != own and sizes_L[label] < sizes_L[best]
            ):
                best, best_gain = label, gain
        if is_overloaded and best == own:
            most_left = np.int64(-1)
            for label in range(num_labels):
                left = max_loads_L[label] - loads_L[label]
                if (
                    label != own
                    and left >= load
                    and left > most_left
                    and sizes_L[label] + size <= max_sizes_L[label]
                ):
                    best, most_left = label, left
        if best != own:
            labels_N[node] = best
            sizes_L[own] -= size
            loads_L[own] -= load
            sizes_L[best] += size
            loads_L[best] += load
            moves += 1
    return moves


def propagate_labels(
    indptr: Array,
    indices: Array,
    weights: Array,
    order: Array,
    size: Array,
    load: Array,
    max_sizes: Array,
    max_loads: Array,
    labels: Array,
) -> int:
    """Move nodes to the label of most of their neighbours, within the limits of the labels.

    This is a round of size-constrained label propagation (Meyerhenke, Sanders and Schulz, 2014,
    https://arxiv.org/abs/1402.3281). A node moves if another label has a larger sum of edge weights
    to its neighbours than its own, and room for it. Of several such labels with equal sums, it
    moves to the smallest one. If a label is larger than its limit, its nodes move to the best other
    label with room, or if no neighbour has one, to that with the most room for load; so do nodes
    with a load if the label has too much load.

    Args:
        indptr: (N + 1,) int64.
        indices: (E,) int32 or int64 in [0, N), not checked.
        weights: (E,) or (0,) int64, positive.
        order: int64 nodes in the order in which they are visited.
        size: (N,) int64 size of each node.
        load: (N,) int64 load of each node.
        max_sizes: (L,) int64 limit of the sum of sizes of each label.
        max_loads: (L,) int64 limit of the sum of loads of each label.
        labels: (N,) int64 in [0, L), not checked; written to.

    Returns:
        The number of nodes that moved.
    """
    return int(
        _propagate_labels(indptr, indices, weights, order, size, load, max_sizes, max_loads, labels)
    )


def assign_labels_reference(
    indptr: Array,
    indices: Array,
    weights: Array,
    order: Array,
    size: Array,
    load: Array,
    max_sizes: Array,
    max_loads: Array,
) -> Array:
    """Reference for `assign_labels`."""
    num_nodes, num_labels = len(indptr) - 1, len(max_sizes)
    weights = weights if len(weights) else np.ones(len(indices), np.int64)
    target = np.repeat(np.arange(num_nodes), np.diff(indptr))
    degrees = np.bincount(target, weights, num_nodes).astype(np.int64)
    labels = np.full(num_nodes, -1)
    sizes, loads, degree_sums = (np.zeros(num_labels, np.int64) for _ in range(3))
    for node in order.tolist():
        columns = slice(indptr[node], indptr[node + 1])
        known = labels[indices[columns]]
        gains = np.zeros(num_labels, np.int64)
        np.add.at(gains, known[known >= 0], weights[columns][known >= 0])
        scores = gains * weights.sum() - degrees[node] * degree_sums
        has_room = (sizes + size[node] <= max_sizes) & (loads + load[node] <= max_loads)
        if not has_room.any():
            # the label with the smallest load, or of several the smallest one
            scores, has_room = -sizes, loads == loads.min()
        candidates = [label for label in range(num_labels) if has_room[label]]
        best = min(candidates, key=lambda label: (-scores[label], sizes[label], label))
        labels[node] = best
        sizes[best] += size[node]
        loads[best] += load[node]
        degree_sums[best] += degrees[node]
    return labels


@njit(nogil=True, cache=True)
def _assign_labels(
    indptr, indices, weights_E, order_N, size_N, load_N, max_sizes_L, max_loads_L, labels_N
):  # fmt: skip
    num_labels = len(max_sizes_L)
    sizes_L = np.zeros(num_labels, np.int64)
    loads_L = np.zeros(num_labels, np.int64)
    degrees_L = np.zeros(num_labels, np.int64)
    gains_L = np.zeros(num_labels, np.int64)
    is_weighted = len(weights_E) > 0
    total = weights_E.sum() if is_weighted else np.int64(len(indices))
    labels_N[:] = -1
    for node in order_N:
        gains_L[:] = 0
        degree = np.int64(0)
        for edge in range(indptr[node], indptr[node + 1]):
            weight = weights_E[edge] if is_weighted else np.int64(1)
            degree += weight
            label = labels_N[indices[edge]]
            if label >= 0:
                gains_L[label] += weight
        best, best_score = -1, np.int64(0)
        for label in range(num_labels):
            if (
                sizes_L[label] + size_N[node] > max_sizes_L[label]
                or loads_L[label] + load_N[node] > max_loads_L[label]
            ):
                continue
            score = gains_L[label] * total - degree * degrees_L[label]
            if (
                best < 0
                or score > best_score
                or (score == best_score and sizes_L[label] < sizes_L[best])
            ):
                best, best_score = label, score
        if best < 0:
            best = 0
            for label in range(1, num_labels):
                if loads_L[label] < loads_L[best] or (
                    loads_L[label] == loads_L[best] and sizes_L[label] < sizes_L[best]
                ):
                    best = label
        labels_N[node] = best
        sizes_L[best] += size_N[node]
        loads_L[best] += load_N[node]
        degrees_L[best] += degree


def assign_labels(
    indptr: Array,
    indices: Array,
    weights: Array,
    order: Array,
    size: Array,
    load: Array,
    max_sizes: Array,
    max_loads: Array,
) -> Array:
    """Assign nodes to labels in one pass over a stream of nodes.

    Each node gets the label with room for which the modularity increases most: the sum of edge
    weights to the label's nodes, minus the sum that is expected from the degrees. This is a form of
    Fennel (Tsourakakis et al., 2014, https://doi.org/10.1145/2556195.2556213), whose cost of a part
    is here quadratic in the sum of its degrees. If no label has room, a node gets that with the
    smallest load. Ties go to the smallest label.

    Args:
        indptr, indices, weights, size, load, max_sizes, max_loads: see `propagate_labels`.
        order: (N,) int64 permutation of the nodes.

    Returns:
        (N,) int64 labels in [0, L).
    """
    labels = np.empty(len(indptr) - 1, np.int64)
    _assign_labels(indptr, indices, weights, order, size, load, max_sizes, max_loads, labels)
    return labels


def contract_reference(
    indptr: Array, indices: Array, weights: Array, labels: Array, num_labels: int
) -> tuple[Array, Array, Array]:
    """Reference for `contract`, whose columns it returns sorted."""
    ends = np.repeat(labels, np.diff(indptr)), labels[indices]
    weights = weights if len(weights) else np.ones(len(indices), np.int64)
    between = ends[0] != ends[1]
    pairs, inverse = np.unique(
        ends[0][between] * num_labels + ends[1][between], return_inverse=True
    )
    counts = np.bincount(pairs // num_labels, minlength=num_labels)
    sums = np.bincount(inverse, weights[between], len(pairs)).astype(np.int64)
    return np.concatenate([[0], np.cumsum(counts)]), pairs % num_labels, sums


@njit(nogil=True, cache=True)
def _contract(
    indptr, indices, weights_E, labels_N, members_N, starts_L, out_indptr, out_indices, out_weights
):  # fmt: skip
    num_labels = len(starts_L) - 1
    sums_L = np.zeros(num_labels, np.int64)
    found_L = np.empty(num_labels, np.int64)
    is_weighted, is_counting = len(weights_E) > 0, len(out_indices) == 0
    out_indptr[0] = 0
    for own in range(num_labels):
        num_found = 0
        for i in range(starts_L[own], starts_L[own + 1]):
            node = members_N[i]
            for edge in range(indptr[node], indptr[node + 1]):
                label = labels_N[indices[edge]]
                if label == own:
                    continue
                if sums_L[label] == 0:
                    found_L[num_found] = label
                    num_found += 1
                sums_L[label] += weights_E[edge] if is_weighted else 1
        begin = out_indptr[own]
        for i in range(num_found):
            if not is_counting:
                out_indices[begin + i] = found_L[i]
                out_weights[begin + i] = sums_L[found_L[i]]
            sums_L[found_L[i]] = 0
        out_indptr[own + 1] = begin + num_found


def contract(
    indptr: Array, indices: Array, weights: Array, labels: Array, num_labels: int
) -> tuple[Array, Array, Array]:
    """Contract the nodes of each label to one node, without self loops.

    Args:
        indptr, indices, weights: see `propagate_labels`.
        labels: (N,) int64 in [0, L), not checked.
        num_labels: L.

    Returns:
        indptr (L + 1,), indices and weights, all int64: an edge between two labels has the sum of
        the weights of the edges between their nodes.
    """
    members = np.argsort(labels, kind="stable")
    starts = np.zeros(num_labels + 1, np.int64)
    np.cumsum(np.bincount(labels, minlength=num_labels), out=starts[1:])
    out_indptr = np.empty(num_labels + 1, np.int64)
    given = indptr, indices, weights, labels, members, starts, out_indptr
    # without room for edges, it only counts them
    out_indices, out_weights = np.empty((2, 0), np.int64)
    _contract(*given, out_indices, out_weights)
    out_indices, out_weights = np.empty((2, out_indptr[-1]), np.int64)
    _contract(*given, out_indices, out_weights)
    return out_indptr, out_indices, out_weights
