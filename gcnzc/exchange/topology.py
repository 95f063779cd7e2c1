"""Communication graphs, matchings and mixing matrices of decentralized algorithms.

In a decentralized algorithm, each rank averages with its neighbours in a graph, or with one peer at
a time. The functions have no state and do not communicate. Random choices are functions of a seed
and a round, so all ranks compute the same result.

A graph is a list of edges (i, j) of ranks with i < j, in ascending order. A matching is a graph in
which each rank has at most one edge.

    GRAPHS["ring"](4)                         # [(0, 1), (0, 3), (1, 2), (2, 3)]
    maximum_matching(4, GRAPHS["ring"](4))    # such as [(0, 1), (2, 3)]

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
    ranks = range(world_size)
    return sort_edges((rank, (rank + each) % world_size) for each in offsets for rank in ranks)


def sort_edges(pairs: Iterable[Edge]) -> list[Edge]:
    """Return pairs of ranks as a graph: each edge once, without those from a rank to itself."""
    return sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]})


GRAPHS: Mapping[str, Callable[[int], list[Edge]]] = {
    "ring": lambda count: circulant(count, [1]),
    "exponential": lambda count: circulant(count, [1 << n for n in range(count.bit_length())]),
    "complete": lambda count: circulant(count, range(1, count)),
}
"""by name, functions that return a graph of W ranks; more graphs than these have a parameter"""


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
    labels = component_labels(world_size, graph)
    if other := next(filter(labels.__getitem__, range(world_size)), 0):
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


def component_labels(world_size: int, edges: Sequence[Edge]) -> list[int]:
    """Return a number for each rank, equal for ranks that a path connects; 0 for rank 0."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    ends = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    adjacency = coo_array((np.ones(len(edges)), tuple(ends)), (world_size, world_size))
    labels: list[int] = connected_components(adjacency, directed=False)[1].tolist()
    return labels


def color_edges(edges: Iterable[Edge]) -> list[list[Edge]]:
    """Divide a graph into matchings; an even ring into 2, an odd ring into 3.

    The number of matchings is less than twice the largest number of neighbours of a rank.
    """
    matchings: list[list[Edge]] = []
    used: list[set[int]] = []
    for edge in edges:
        free = (number for number, ranks in enumerate(used) if not ranks.intersection(edge))
        number = next(free, len(used))
        if number == len(used):
            matchings.append([])
            used.append(set())
        matchings[number].append(edge)
        used[number].update(edge)
    return matchings


def round_robin(world_size: int) -> Iterator[list[Edge]]:
    """Yield matchings that have each pair of ranks once: W - 1 perfect ones, or W if W is odd.

    With an even W, the pairs of round r are the ranks i and j with i + j = r modulo W - 1, and the
    last rank with the rank i for which 2 i = r modulo W - 1. With an odd W, the rounds are those of
    W + 1 ranks without the last rank.
    """
    modulus = world_size - 1 + world_size % 2
    for number in range(modulus if world_size > 1 else 0):
        pairs = [(low, (number - low) % modulus) for low in range(modulus)]
        matching = [(low, high) for low, high in pairs if low < high]
        if world_size % 2 == 0:
            matching += [(low, world_size - 1) for low, high in pairs if low == high]
        yield sorted(matching)


def find_peer(matching: Iterable[Edge], rank: int) -> int | None:
    """Return the peer of a rank in a matching; None if it has no edge."""
    return next((sum(edge) - rank for edge in matching if rank in edge), None)


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


def _find_edges(is_edge: NDArray[np.bool_]) -> list[Edge]:
    """Return the pairs of ranks for which a symmetric matrix (W, W) is True."""
    low, high = np.nonzero(np.triu(is_edge, 1))
    return list(zip(low.tolist(), high.tolist(), strict=True))


def bottleneck_threshold(bandwidth: Matrix) -> float:
    """Return a threshold for `bandwidth_matching`: half of the best bottleneck of a matching.

    Among the matchings with the largest number of edges, the best bottleneck is the largest
    bandwidth of a matching's slowest edge. Half of it allows for errors of measured bandwidths.

    Args:
        bandwidth: (W, W), symmetric.
    """
    world_size = len(bandwidth)
    edges = _find_edges(bandwidth > 0)
    if not edges:
        return 0.0
    largest = len(maximum_matching(world_size, edges))
    values = sorted({float(bandwidth[edge]) for edge in edges})
    begin, end = 0, len(values)
    # the largest value whose edges have such a matching
    while end - begin > 1:
        middle = (begin + end) // 2
        matching = maximum_matching(world_size, _find_edges(bandwidth >= values[middle]))
        begin, end = (middle, end) if len(matching) == largest else (begin, middle)
    return NEAR_BEST * values[begin]


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
    idle = round % world_size if world_size % 2 else None
    usable = [edge for edge in _find_edges(bandwidth > 0) if idle not in edge]
    is_recent = (last_met != NEVER) & (last_met >= round - window)
    labels = component_labels(world_size, _find_edges(is_recent))
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
