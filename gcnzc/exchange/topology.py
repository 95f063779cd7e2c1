"""Communication graphs, matchings and mixing matrices of decentralized algorithms.

In a decentralized algorithm, each rank averages with its neighbours in a graph, or with one peer at
a time. The functions have no state and do not communicate. Random choices are functions of a seed
and a round, so all ranks compute the same result.

A graph is a list of edges (i, j) of ranks with i < j, in ascending order. A matching is a graph in
which each rank has at most one edge.

    ring(4)                           # [(0, 1), (0, 3), (1, 2), (2, 3)]
    maximum_matching(4, ring(4))      # such as [(0, 1), (2, 3)]

Notation: W ranks, B (W, W) bandwidths, L (W, W) the Laplacian of a graph.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Edge: TypeAlias = tuple[int, int]
Matrix: TypeAlias = NDArray[np.float64]

NEVER = -1
"""the entry of `last_met` for two ranks that have not been a pair"""

NEAR_BEST = 0.5
"""default bandwidth threshold, as a fraction of the best bottleneck of a matching"""


def ring(world_size: int) -> list[Edge]:
    """Return the graph in which each rank r is connected to r - 1 and r + 1, modulo W."""
    return circulant(world_size, [1])


def exponential(world_size: int) -> list[Edge]:
    """Return the graph in which each rank r is connected to r ± 1, 2, 4, ..., modulo W."""
    return circulant(world_size, [1 << power for power in range(world_size.bit_length())])


def complete(world_size: int) -> list[Edge]:
    """Return the graph in which all pairs of ranks are connected."""
    return circulant(world_size, range(1, world_size))


def regular(world_size: int, degree: int) -> list[Edge]:
    """Return a connected graph in which each rank is connected to its nearest `degree` ranks.

    Args:
        world_size: W.
        degree: the number of neighbours of each rank: 2 to W - 1, and even if W is odd. Also 1 for
            two ranks.

    Raises:
        ValueError: there is no such graph.
    """
    is_connected = degree >= 2 or world_size == 2 == degree + 1
    if not (is_connected and degree < world_size and degree * world_size % 2 == 0):
        raise ValueError(
            f"a graph of {world_size} ranks with {degree} neighbors each\n\n"
            "hint: use 2 to W - 1 neighbors, and an even number for an odd number of ranks"
        )
    opposite = [world_size // 2] if degree % 2 else []
    return circulant(world_size, [*range(1, degree // 2 + 1), *opposite])


def circulant(world_size: int, offsets: Iterable[int]) -> list[Edge]:
    """Return the graph in which each rank r is connected to r ± each offset, modulo W."""
    if world_size < 1:
        raise ValueError(f"a graph of {world_size} ranks\n\nhint: use at least 1 rank")
    pairs = {
        (rank, (rank + offset) % world_size) for offset in offsets for rank in range(world_size)
    }
    return sort_edges(pairs)


def sort_edges(pairs: Iterable[Edge]) -> list[Edge]:
    """Return pairs of ranks as a graph: each edge once, without those from a rank to itself."""
    return sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]})


# graphs by name; more than these have a parameter
GRAPHS: Mapping[str, Callable[[int], list[Edge]]] = {
    "ring": ring,
    "exponential": exponential,
    "complete": complete,
}


def check_graph(world_size: int, edges: Iterable[Edge]) -> list[Edge]:
    """Check that a graph of the caller connects all ranks, and return it in ascending order.

    Raises:
        ValueError: an edge has a rank that does not exist, or the graph is not connected.
    """
    graph = sort_edges(edges)
    for edge in graph:
        if edge[0] < 0 or edge[1] >= world_size:
            raise ValueError(
                f"the edge {edge} in a graph of {world_size} ranks\n\n"
                f"hint: ranks are 0 to {world_size - 1}"
            )
    other = next(filter(None, component_labels(world_size, graph)), 0)
    if other:
        raise ValueError(
            f"a graph that does not connect rank 0 and rank {other}\n\n"
            "hint: add edges until there is a path between any two ranks"
        )
    return graph


def neighbors(world_size: int, edges: Iterable[Edge]) -> list[list[int]]:
    """Return the neighbours of each rank, in ascending order."""
    found: list[list[int]] = [[] for _ in range(world_size)]
    for low, high in edges:
        found[low].append(high)
        found[high].append(low)
    return [sorted(each) for each in found]


def component_labels(world_size: int, edges: Iterable[Edge]) -> list[int]:
    """Return, for each rank, the smallest rank that it is connected to by a path, or itself."""
    labels = list(range(world_size))

    def root(rank: int) -> int:
        while labels[rank] != rank:
            labels[rank] = labels[labels[rank]]
            rank = labels[rank]
        return rank

    for edge in edges:
        low, high = sorted(map(root, edge))
        labels[high] = low
    return [root(rank) for rank in range(world_size)]


def is_connected(world_size: int, edges: Iterable[Edge]) -> bool:
    """Whether there is a path between any two ranks."""
    return not any(component_labels(world_size, edges))


def color_edges(edges: Iterable[Edge]) -> list[list[Edge]]:
    """Divide a graph into matchings; an even ring into 2, an odd ring into 3.

    The number of matchings is less than twice the largest number of neighbours of a rank.
    """
    pending = list(edges)
    matchings: list[list[Edge]] = []
    while pending:
        matching: list[Edge] = []
        used: set[int] = set()
        for edge in pending:
            if not used.intersection(edge):
                matching.append(edge)
                used.update(edge)
        pending = [edge for edge in pending if edge not in matching]
        matchings.append(matching)
    return matchings


def round_robin(world_size: int) -> Iterator[list[Edge]]:
    """Yield matchings that have each pair of ranks once: W - 1 perfect ones, or W if W is odd.

    With an even W, the pairs of round r are the ranks i and j with i + j = r modulo W - 1, and the
    last rank with the rank i for which 2 i = r modulo W - 1. With an odd W, the rounds are those of
    W + 1 ranks without the last rank.
    """
    modulus = world_size - 1 + world_size % 2
    for number in range(modulus if world_size > 1 else 0):
        matching: list[Edge] = []
        for low in range(modulus):
            high = (number - low) % modulus
            if low < high:
                matching.append((low, high))
            elif low == high and world_size % 2 == 0:
                matching.append((low, world_size - 1))
        yield sorted(matching)


def find_peer(matching: Iterable[Edge], rank: int) -> int | None:
    """Return the peer of a rank in a matching; None if it has no edge."""
    for low, high in matching:
        if rank in (low, high):
            return high if rank == low else low
    return None


def random_words(seed: int, round: int, count: int, stream: int = 0) -> NDArray[np.uint64]:
    """Return random 64-bit words (count,), a function of (seed, round, stream).

    NumPy documents that the raw words of its Philox generator do not change between versions.

    Args:
        seed: any integer of at most 64 bits.
        round: at least 0.
        count: the number of words.
        stream: distinguishes the words of several uses, at least 0.
    """
    generator = np.random.Philox(key=seed % (1 << 64), counter=[0, 0, stream, round])
    return np.asarray(generator.random_raw(count), dtype=np.uint64)


def idle_rank(world_size: int, round: int) -> int | None:
    """Return the rank without a peer in a round: `round` mod W if W is odd, None otherwise."""
    return round % world_size if world_size % 2 else None


def maximum_matching(
    world_size: int, edges: Sequence[Edge], seed: int = 0, *, round: int = 0, stream: int = 0
) -> list[Edge]:
    """Return a random matching with the largest number of edges of the graph.

    Args:
        world_size: W.
        edges: the graph.
        seed, round, stream: select the random weights of the edges; see `random_words`.
    """
    words = random_words(seed, round, len(edges), stream)
    greedy = _greedy_matching(edges, words)
    reachable = {rank for edge in edges for rank in edge}
    if 2 * len(greedy) >= len(reachable) - 1:
        # no matching has more edges; the search for one takes O(W^3) operations
        return greedy
    import networkx

    graph = networkx.Graph()
    graph.add_nodes_from(range(world_size))
    for edge, word in zip(edges, words.tolist(), strict=True):
        # integers, so that sums of weights are exact
        graph.add_edge(*edge, weight=word >> 32)
    return sort_edges(networkx.max_weight_matching(graph, maxcardinality=True))


def _greedy_matching(edges: Sequence[Edge], words: NDArray[np.uint64]) -> list[Edge]:
    """Take the edges in the order of random words, if both ranks have no edge yet."""
    used: set[int] = set()
    matching: list[Edge] = []
    for index in np.argsort(words, kind="stable").tolist():
        if not used.intersection(edges[index]):
            matching.append(edges[index])
            used.update(edges[index])
    return sorted(matching)


def usable_edges(bandwidth: Matrix, threshold: float = 0.0) -> list[Edge]:
    """Return the pairs of ranks whose `bandwidth` (W, W) is above 0 and at least a threshold."""
    low, high = np.nonzero(np.triu((bandwidth > 0) & (bandwidth >= threshold), 1))
    return list(zip(low.tolist(), high.tolist(), strict=True))


def bottleneck_threshold(bandwidth: Matrix) -> float:
    """Return a threshold for `bandwidth_matching`: half of the best bottleneck of a matching.

    Among the matchings with the largest number of edges, the best bottleneck is the largest
    bandwidth of a matching's slowest edge. Half of it allows for errors of measured bandwidths.

    Args:
        bandwidth: (W, W), symmetric.
    """
    world_size = len(bandwidth)
    edges = usable_edges(bandwidth)
    if not edges:
        return 0.0
    largest = len(maximum_matching(world_size, edges))
    values = sorted({float(bandwidth[edge]) for edge in edges})
    begin, end = 0, len(values)
    # the largest value whose edges have such a matching
    while end - begin > 1:
        middle = (begin + end) // 2
        matching = maximum_matching(world_size, usable_edges(bandwidth, values[middle]))
        begin, end = (middle, end) if len(matching) == largest else (begin, middle)
    return NEAR_BEST * values[begin]


def recent_edges(last_met: NDArray[np.int64], round: int, window: int) -> list[Edge]:
    """Return the pairs of the `window` rounds before a round.

    Args:
        last_met: (W, W), symmetric: the last round in which two ranks were a pair, or `NEVER`.
        round: the current round, from 0.
        window: the number of rounds.
    """
    is_recent = (last_met != NEVER) & (last_met >= round - window)
    low, high = np.nonzero(np.triu(is_recent, 1))
    return list(zip(low.tolist(), high.tolist(), strict=True))


def bandwidth_matching(
    bandwidth: Matrix,
    last_met: NDArray[np.int64],
    seed: int,
    *,
    round: int,
    window: int,
    threshold: float,
) -> list[Edge]:
    """Return the matching of SAPS-PSGD: fast pairs, and pairs that keep the ranks connected.

    If the pairs of the last `window` rounds connect all ranks, the candidates are the
    pairs with a bandwidth of at least `threshold`. Otherwise they are the pairs of different
    components. The matching has the largest number of random candidates; ranks that are left over
    are matched with each other by any pairs with a bandwidth above 0. If W is odd, rank `round` mod
    W is idle.

    If all bandwidths are above 0 and `window` is at least W / 2, the pairs of any 2 * `window`
    consecutive rounds connect all ranks: in each of the last `window` of them, either the recent
    pairs connect all ranks, or a new pair joins two components.

    Tang, Shi and Chu, "Communication-Efficient Decentralized Learning with Sparsification and
    Adaptive Peer Selection" (2020, https://arxiv.org/abs/2002.09692).

    Args:
        bandwidth: (W, W), symmetric; 0 for pairs that cannot communicate.
        last_met: (W, W), symmetric: the last round in which two ranks were a pair, or `NEVER`.
        seed: random seed of the matchings.
        round: the number of the matching, from 0.
        window: the number of rounds after which pairs are not recent.
        threshold: the bandwidth from which pairs are candidates.
    """
    world_size = len(bandwidth)
    idle = idle_rank(world_size, round)
    usable = [edge for edge in usable_edges(bandwidth) if idle not in edge]
    labels = component_labels(world_size, recent_edges(last_met, round, window))
    if len(set(labels)) == 1:
        candidates = [edge for edge in usable if bandwidth[edge] >= threshold]
    else:
        candidates = [(low, high) for low, high in usable if labels[low] != labels[high]]
    matching = maximum_matching(world_size, candidates, seed, round=round)
    used = {rank for edge in matching for rank in edge}
    left = [edge for edge in usable if not used.intersection(edge)]
    return sorted([*matching, *maximum_matching(world_size, left, seed, round=round, stream=1)])


def metropolis_weights(world_size: int, edges: Sequence[Edge]) -> Matrix:
    """Return the Metropolis-Hastings mixing matrix (W, W) of a graph.

        M_ij = 1 / (1 + max(degree_i, degree_j))   for each edge
        M_ii = 1 - sum_(j != i) M_ij

    It is symmetric, and its rows and columns sum to 1. Ranks without an edge keep their values.
    """
    degrees = [len(each) for each in neighbors(world_size, edges)]
    matrix = np.zeros((world_size, world_size))
    for low, high in edges:
        matrix[low, high] = matrix[high, low] = 1 / (1 + max(degrees[low], degrees[high]))
    return matrix + np.diag(1 - matrix.sum(1))


def laplacian(
    world_size: int, edges: Iterable[Edge], rates: Mapping[Edge, float] | float = 1.0
) -> Matrix:
    """Return the Laplacian (W, W), the sum of rate_ij (e_i - e_j) (e_i - e_j)^T over the edges.

    Args:
        world_size: W.
        edges: the graph.
        rates: the rate of each edge, such as its exchanges in a unit of time, or one for all edges.
    """
    matrix = np.zeros((world_size, world_size))
    for low, high in edges:
        rate = rates[low, high] if isinstance(rates, Mapping) else rates
        matrix[[low, high], [low, high]] += rate
        matrix[[low, high], [high, low]] -= rate
    return matrix


def inverse_connectivity(laplacian: Matrix) -> float:
    """Return chi_1, the inverse of the second smallest eigenvalue of a Laplacian (W, W).

    Nabli, Belilovsky and Oyallon, "A2CiD2: Accelerating Asynchronous Communication in Decentralized
    Deep Learning" (2023, https://arxiv.org/abs/2306.08289).

    Args:
        laplacian: of a connected graph of at least 2 ranks.
    """
    return float(1 / np.linalg.eigvalsh(laplacian)[1])


def maximal_resistance(laplacian: Matrix, edges: Iterable[Edge]) -> float:
    """Return chi_2, half of the largest effective resistance of an edge.

        chi_2 = 1/2 max_ij (e_i - e_j)^T L^+ (e_i - e_j)

    See `inverse_connectivity` for the source. chi_2 is at most chi_1.

    Args:
        laplacian: L, of a connected graph.
        edges: the edges of the graph, at least one.
    """
    inverse = np.linalg.pinv(laplacian, hermitian=True)
    return 0.5 * max(
        float(inverse[low, low] + inverse[high, high] - 2 * inverse[low, high])
        for low, high in edges
    )
