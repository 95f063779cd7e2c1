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
from gcnzc.kernels.sample.negatives import sample_negatives

# no training run gets this far, so training never draws the evaluation negatives
EPOCH = 2**32 - 1


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
        negatives as edges, drawn uniformly from the pairs without an edge in `graph`.

    Raises:
        ValueError: the graph has too many nodes, too few edges for three non-empty splits, or
            almost no pairs without an edge.
    """
    num_nodes = graph.num_nodes
    if num_nodes >= MAX_NODES:
        raise ValueError(
            f"{where} has {num_nodes} nodes, too many for an edge split\n\n"
            f"hint: graphs of up to {MAX_NODES - 1} nodes can be split"
        )
    sources, targets = (part.numpy().astype(np.int64) for part in graph.edges())
    is_loop = sources == targets
    low, high = np.minimum(sources, targets), np.maximum(sources, targets)
    pair_keys = low * num_nodes + high
    pairs_G = np.unique(pair_keys[~is_loop])
    random = np.random.Generator(np.random.Philox(key=shares.seed % 2**64))
    part_G = _assign_splits(len(pairs_G), shares, random, where)
    edges = _collect_split_edges(sources, targets, is_loop, pairs_G, part_G, num_nodes, random)

    is_training = is_loop.copy()
    is_training[~is_loop] = part_G[np.searchsorted(pairs_G, pair_keys[~is_loop])] == 0
    indptr = np.concatenate([[0], is_training.cumsum()])[graph.indptr.numpy()]
    training_graph = Graph(indptr, graph.indices.numpy()[is_training], check=False)

    sorted_graph = with_sorted_columns(graph)
    counts = [edges[part].shape[1] for part in SPLITS[1:]]
    negatives = sample_negatives(
        sorted_graph.indptr.numpy(),
        sorted_graph.indices.numpy(),
        np.zeros(sum(counts), np.int64),
        np.arange(sum(counts)),
        1,
        "both",
        True,
        shares.seed,
        EPOCH,
    )
    negatives_of = dict(zip(SPLITS[1:], np.split(negatives, counts[:1], axis=1), strict=True))
    name = f"valid {shares.valid:g}, test {shares.test:g}, seed {shares.seed}"
    split = EdgeSplitArrays(edges, negatives_of, "auc", name)
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


def _collect_split_edges(
    sources: Array,
    targets: Array,
    is_loop: Array,
    pairs_G: Array,
    part_G: Array,
    num_nodes: int,
    random: np.random.Generator,
) -> dict[str, Array]:
    """Return the (2, E) distinct edges of each split."""
    directed = np.unique(sources[~is_loop] * num_nodes + targets[~is_loop])
    both = np.stack(np.divmod(directed, num_nodes))
    if len(directed) == 2 * len(pairs_G):
        both = np.stack(np.divmod(pairs_G, num_nodes))
        is_reversed = random.integers(0, 2, len(pairs_G), dtype=np.bool_)
        both = np.where(is_reversed, both[::-1], both)
    pair = np.searchsorted(pairs_G, both.min(axis=0) * num_nodes + both.max(axis=0))
    return {part: both[:, part_G[pair] == index] for index, part in enumerate(SPLITS)}
