"""Split edges into training, validation and test sets for link prediction.

Edges between the same two nodes stay together, whatever their direction and however often they are
there, so that the reverse of an edge that is to be foretold is not in the graph either.

Letters: N nodes, E edges, G pairs of nodes with an edge.
"""

from dataclasses import dataclass

import numpy as np

from gcnzc.datasets.rows import Array
from gcnzc.datasets.source import PARTS, LinkParts, clean_links
from gcnzc.graph.graph import Graph
from gcnzc.kernels.sample.exclude import is_sorted, sort_columns
from gcnzc.kernels.sample.negatives import sample_negatives

# far from any epoch of a training, so that its negatives are others
EPOCH = 2**32 - 1


MAX_NODES = 2**31  # two ids make a key of 64 bits


@dataclass(frozen=True)
class EdgeShares:
    """How edges are split.

    Raises:
        ValueError: the shares are not above 0, or leave nothing to train on.
    """

    valid: float = 0.05  # of the pairs of nodes with an edge
    test: float = 0.10
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.valid > 0 and self.test > 0 and self.valid + self.test < 1):
            raise ValueError(
                f"shares of {self.valid} and {self.test} of the edges for validation and test\n\n"
                "hint: both are above 0, and less than 1 together; 0.05 and 0.1 are usual"
            )


def with_sorted_columns(graph: Graph) -> Graph:
    """The graph with the sources of each column in ascending order; itself if they are."""
    graph.check()
    indptr, indices = graph.indptr.numpy(), graph.indices.numpy()
    if is_sorted(indptr, indices):
        return graph
    return Graph(indptr, sort_columns(indptr, indices)[0], check=False)


def split_edges(
    graph: Graph, shares: EdgeShares, where: str = "the graph"
) -> tuple[Graph, LinkParts]:
    """Take edges out of `graph` for validation and test.

    Args:
        graph: below 2**31 nodes. An edge from a node to itself stays in it, and is in no part.
        shares: how many, and by which seed.
        where: named in errors.

    Returns:
        The graph with the edges of the training part alone, its columns sorted; and the parts. If
        every edge of `graph` has its reverse, each pair of nodes is in a part once, in a direction
        that is drawn; else each different edge is. As many negatives as edges are drawn for
        validation and test, uniformly, among the pairs without an edge in `graph`.

    Raises:
        ValueError: the graph has too many nodes, or so few edges that a part gets none, or hardly
            a pair without one.
    """
    num_nodes = graph.num_nodes
    if num_nodes >= MAX_NODES:
        raise ValueError(
            f"{where} has {num_nodes} nodes, and its edges cannot be split\n\n"
            f"hint: up to {MAX_NODES - 1} are"
        )
    sources, targets = (part.numpy().astype(np.int64) for part in graph.edges())
    is_loop = sources == targets
    low, high = np.minimum(sources, targets), np.maximum(sources, targets)
    of_edges = low * num_nodes + high
    pairs_G = np.unique(of_edges[~is_loop])
    random = np.random.Generator(np.random.Philox(key=shares.seed % 2**64))
    part_G = _parts(len(pairs_G), shares, random, where)
    edges = _targets(sources, targets, is_loop, pairs_G, part_G, num_nodes, random)

    kept = is_loop.copy()
    kept[~is_loop] = part_G[np.searchsorted(pairs_G, of_edges[~is_loop])] == 0
    ends = np.concatenate([[0], kept.cumsum()])[graph.indptr.numpy()]
    left = Graph(ends, graph.indices.numpy()[kept], check=False)

    whole = with_sorted_columns(graph)
    counts = [edges[part].shape[1] for part in PARTS[1:]]
    drawn = sample_negatives(
        whole.indptr.numpy(),
        whole.indices.numpy(),
        np.zeros(sum(counts), np.int64),
        np.arange(sum(counts)),
        1,
        "both",
        True,
        shares.seed,
        EPOCH,
    )
    others = dict(zip(PARTS[1:], np.split(drawn, counts[:1], axis=1), strict=True))
    name = f"valid {shares.valid:g}, test {shares.test:g}, seed {shares.seed}"
    found = clean_links(LinkParts(edges, others, "auc", name), num_nodes, where)
    return with_sorted_columns(left), found


def _parts(num_pairs: int, shares: EdgeShares, random: np.random.Generator, where: str) -> Array:
    """(G,) the number of each pair's part in PARTS."""
    valid, test = int(num_pairs * shares.valid), int(num_pairs * shares.test)
    if valid == 0 or test == 0:
        raise ValueError(
            f"{where} has edges between {num_pairs} pairs of nodes, of which {valid} are for "
            f"validation and {test} for test\n\nhint: larger shares; training needs all three parts"
        )
    order = random.permutation(num_pairs)
    part_G = np.zeros(num_pairs, np.uint8)
    part_G[order[:valid]] = 1
    part_G[order[valid : valid + test]] = 2
    return part_G


def _targets(
    sources: Array,
    targets: Array,
    is_loop: Array,
    pairs_G: Array,
    part_G: Array,
    num_nodes: int,
    random: np.random.Generator,
) -> dict[str, Array]:
    """The edges of each part, each once."""
    directed = np.unique(sources[~is_loop] * num_nodes + targets[~is_loop])
    both = np.stack(np.divmod(directed, num_nodes))
    if len(directed) == 2 * len(pairs_G):
        both = np.stack(np.divmod(pairs_G, num_nodes))
        turned = random.integers(0, 2, len(pairs_G), dtype=np.bool_)
        both = np.where(turned, both[::-1], both)
    of_pair = np.searchsorted(pairs_G, both.min(axis=0) * num_nodes + both.max(axis=0))
    return {part: both[:, part_G[of_pair] == number] for number, part in enumerate(PARTS)}
