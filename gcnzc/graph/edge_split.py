"""Split edges into training, validation and test sets for link prediction.

All edges between the same two nodes go into the same split, in both directions and with all their
duplicates, so that the graph does not contain the reverse of a held-out edge.

Notation: N nodes, E edges, G pairs of nodes with an edge.
"""

from dataclasses import dataclass

import numpy as np

from gcnzc.datasets.rows import Array
from gcnzc.datasets.source import SPLITS, EdgeSplitArrays, clean_edge_split
from gcnzc.graph.graph import Graph
from gcnzc.kernels.sample.exclude import is_sorted, sort_columns

MAX_NODES = 2**31  # a pair of ids must fit into a 64-bit key


@dataclass(frozen=True)
class EdgeShares:
    """Fractions of the edges to hold out for validation and test.

    Args:
        valid: fraction of the pairs of nodes with an edge that is held out for validation.
        test: fraction that is held out for test.
        seed: of the random split and its negative edges.

    Raises:
        ValueError: a fraction is not above 0, or nothing is left to train on.
    """

    valid: float = 0.05
    test: float = 0.10
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.valid > 0 and self.test > 0 and self.valid + self.test < 1):
            raise ValueError(
                f"shares of {self.valid} and {self.test} of the edges for validation and test\n\n"
                "hint: both must be above 0 and their sum below 1, for example 0.05 and 0.1"
            )


def with_sorted_columns(graph: Graph) -> Graph:
    """Return the graph with the sources of each column sorted; `graph` itself if they are."""
    graph.check()
    indptr, indices = graph.indptr.numpy(), graph.indices.numpy()
    if is_sorted(indptr, indices):
        return graph
    return Graph(indptr, sort_columns(indptr, indices)[0], check=False)


def split_edges(
    graph: Graph, shares: EdgeShares, where: str = "the graph"
) -> tuple[Graph, EdgeSplitArrays]:
    """Remove validation and test edges from `graph` and draw negative edges for them.

    Args:
        graph: with fewer than 2**31 nodes. Self loops stay in the graph and are in no split.
        shares: the fractions to hold out, and the seed.
        where: name of the graph in error messages.

    Returns:
        The graph with the training edges only and sorted columns, and the edge split. If `graph`
        contains the reverse of every edge, each pair of nodes is in a split once, in a random
        direction; otherwise each distinct directed edge is. Validation and test get as many
        negatives as edges, drawn uniformly from the pairs of two nodes without an edge in `graph`.
        No pair is drawn twice, and if `graph` contains the reverse of every edge, in one direction
        only.

    Raises:
        ValueError: the graph has too many nodes, too few edges for three non-empty splits, or
            fewer pairs without an edge than negatives.
    """
    graph.check_untyped()
    num_nodes = graph.num_nodes
    if num_nodes >= MAX_NODES:
        raise ValueError(
            f"{where} has {num_nodes} nodes, too many for an edge split\n\n"
            f"hint: graphs of up to {MAX_NODES - 1} nodes can be split"
        )
    sources, targets = (part.numpy().astype(np.int64) for part in graph.coo())
    is_loop = sources == targets
    low, high = np.minimum(sources, targets), np.maximum(sources, targets)
    pair_keys = low * num_nodes + high
    pairs_G = _distinct(pair_keys[~is_loop])
    random = np.random.Generator(np.random.Philox(key=shares.seed % 2**64))
    part_G = _assign_splits(len(pairs_G), shares, random, where)

    keys = _distinct((sources * num_nodes + targets)[~is_loop])
    is_symmetric = len(keys) == 2 * len(pairs_G)
    if is_symmetric:
        keys = pairs_G
    ends = np.stack(np.divmod(keys, num_nodes))
    part = part_G[np.searchsorted(pairs_G, ends.min(axis=0) * num_nodes + ends.max(axis=0))]
    if is_symmetric:
        ends = _flip_at_random(ends, random)
    edges = {name: ends[:, part == index] for index, name in enumerate(SPLITS)}

    is_training = is_loop.copy()
    is_training[~is_loop] = part_G[np.searchsorted(pairs_G, pair_keys[~is_loop])] == 0
    indptr = np.concatenate([[0], is_training.cumsum()])[graph.indptr.numpy()]
    training_graph = Graph(indptr, graph.indices.numpy()[is_training], check=False)

    counts = [edges[name].shape[1] for name in SPLITS[1:]]
    pairs = _sample_other_pairs(keys, num_nodes, sum(counts), is_symmetric, random, where)
    negatives = dict(zip(SPLITS[1:], np.split(pairs, counts[:1], axis=1), strict=True))
    name = f"valid {shares.valid:g}, test {shares.test:g}, seed {shares.seed}"
    split = EdgeSplitArrays(edges, negatives, "auc", name)
    return with_sorted_columns(training_graph), clean_edge_split(split, num_nodes, where)


def _assign_splits(
    num_pairs: int, shares: EdgeShares, random: np.random.Generator, where: str
) -> Array:
    """Assign each pair of nodes to a split: (G,) uint8 indices into `SPLITS`."""
    valid, test = int(num_pairs * shares.valid), int(num_pairs * shares.test)
    if valid == 0 or test == 0:
        raise ValueError(
            f"{where} has edges between {num_pairs} pairs of nodes, which gives {valid} for "
            f"validation and {test} for test\n\nhint: use larger shares; each split needs edges"
        )
    order = random.permutation(num_pairs)
    part_G = np.zeros(num_pairs, np.uint8)
    part_G[order[:valid]] = 1
    part_G[order[valid : valid + test]] = 2
    return part_G


def _distinct(keys: Array) -> Array:
    """Return the distinct keys, all at least 0, ascending; `np.unique` hashes, which is slower."""
    keys = np.sort(keys)
    return keys[np.diff(keys, prepend=-1) > 0]


def _flip_at_random(pairs: Array, random: np.random.Generator) -> Array:
    """Return (2, G) pairs, each in a random direction."""
    is_flipped = random.integers(0, 2, pairs.shape[1], dtype=np.bool_)
    return np.where(is_flipped, pairs[::-1], pairs)


def _sample_other_pairs(
    keys: Array,
    num_nodes: int,
    count: int,
    is_symmetric: bool,
    random: np.random.Generator,
    where: str,
) -> Array:
    """Sample distinct pairs of two nodes without an edge, uniformly.

    Args:
        keys: source * N + target of each edge, ascending; the source is the lower id if
            `is_symmetric`.
        num_nodes: N.
        count: number of pairs, at most as many as edges.
        is_symmetric: a pair and its reverse are the same.
        random: the generator.
        where: name of the graph in error messages.

    Returns:
        (2, count) int64.

    Raises:
        ValueError: there are fewer pairs.
    """
    num_free = num_nodes * (num_nodes - 1) // (2 if is_symmetric else 1) - len(keys)
    if num_free < count:
        raise ValueError(
            f"{where} has {num_free} pairs of nodes without an edge, fewer than the {count} "
            "negatives of the validation and test edges\n\nhint: "
            + (
                "hold out fewer edges: smaller shares, --valid-edges and --test-edges"
                if num_free > 1
                else "almost all pairs have an edge, so none can be predicted; prepare the graph "
                "without edge_split, and without --task link"
            )
        )
    if num_free < max(2 * count, len(keys)):
        # few pairs are left, and N**2 is at most about 6 E
        is_free = np.triu(np.ones((num_nodes, num_nodes), bool), 1)
        if not is_symmetric:
            is_free |= is_free.T
        is_free.reshape(-1)[keys] = False
        found = np.flatnonzero(is_free)
    else:
        # of each round's pairs, half or more have no edge, and half or more of those are new
        found = np.empty(0, np.int64)
        while len(found) < count:
            ends = random.integers(0, num_nodes, (2, 2 * count))
            if is_symmetric:
                ends.sort(axis=0)
            ends = ends[:, ends[0] != ends[1]]
            found = _distinct(np.concatenate([found, ends[0] * num_nodes + ends[1]]))
            found = found[keys[np.searchsorted(keys, found) % len(keys)] != found]
    pairs = np.stack(np.divmod(random.permutation(found)[:count], num_nodes))
    return _flip_at_random(pairs, random) if is_symmetric else pairs
