"""Generate a graph with planted communities, for which the best possible accuracy is known.

The model is a degree-corrected stochastic block model (Karrer and Newman, Phys. Rev. E 83, 2011,
https://arxiv.org/abs/1008.3926) with features, drawn in this order:

1. Each node `i` has a community `c_i`, drawn with the probabilities `p_k`, and independently a
   weight `w_i` from a truncated power law `P(w) ~ w^-exponent`, in levels with a ratio of 1.1.
2. Its features are `x_i = m_c + z`: the mean of its community, of length `separation` and random
   direction, and standard normal noise.
3. Its label is `c_i`, or, with probability `noise`, another class, each with equal probability.
4. For each edge the first end `u` is drawn with probability `w_u / W`, where `W` is the sum of all
   weights, and the second end `v` with probability
   `w_v (affinity [c_u = c_v] / W_c + (1 - affinity) / W)`, where `W_c` is the sum of the weights in
   `u`'s community. The expected share of edges inside communities is `homophily`.

**The best possible accuracy** is that of an oracle on the test nodes. To predict the label of one
node, the oracle knows `x_i`, all edges, weights and parameters, and the true community of *every
other node*. This is more than any model knows that is trained on features, edges and the labels of
other nodes: given the communities of the other nodes, their features and labels contain no further
information about `c_i`. The oracle predicts the community of largest posterior probability, which
is also the most probable label if `1 - noise > noise / (K - 1)`. So no model has a higher expected
accuracy; the standard error due to the random test labels is below `0.5 / sqrt(test nodes)`. The
log posterior is, up to a constant,

    log p_k - |x_i - m_k|^2 / 2                                      features
    + sum over edges (i, j) of log(affinity [k = c_j] / W_k + (1 - affinity) / W)
    + M_k (log(affinity / W_k + (1 - affinity) / W) - log(affinity / W'_k + (1 - affinity) / W))

where `W'_k` is the weight of community `k` without node `i`, `W_k = W'_k + w_i`, and `M_k` is the
number of edges inside `k` that do not touch `i`; each of these is slightly less probable if `i` is
in the community. An edge from `i` to itself is an edge inside its community, whichever that is.

Notation: N nodes, E edges, K classes, L levels of weight, D features, S nodes that the oracle
predicts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from gcnzc.datasets.alias import AliasTable
from gcnzc.datasets.generated import (
    CHUNK_EDGES,
    COMMUNITIES,
    EDGES,
    FEATURES,
    LABELS,
    MEANS,
    SPLIT_SHARES,
    Chunks,
    Generated,
    generate_rows,
    random_split,
    random_stream,
)
from gcnzc.datasets.rows import Array, Progress, allocate_in_memory, no_progress
from gcnzc.datasets.source import node_dtype

LEVEL_RATIO = 1.1  # ratio of adjacent weights: finer than the spread of degrees of equal weights
LARGEST_SHARE = 0.1  # limit for a node's expected degree, as a fraction of the nodes
# limit for S * K: all test nodes of a graph of ogbn-arxiv's size, and in larger graphs enough nodes
# for a standard error of 0.2 %
MAX_POSTERIOR_VALUES = 1 << 23
_CHUNK_NODES = 1 << 20


@dataclass(frozen=True)
class BlockModel:
    """The model's parameters, and the community and weight of every node."""

    shares: Array  # (K,) probabilities of the communities, with a sum of 1
    means: Array  # (K, D) float32
    weights: Array  # (L,) weights of the levels, ascending
    affinity: float  # probability that an edge is drawn inside the first end's community
    community: Array  # (N,) in [0, K)
    level: Array  # (N,) in [0, L)
    sizes: Array  # (K, L): number of nodes of each community and level

    @property
    def mass(self) -> Array:
        """The sum of the weights in each community, (K,)."""
        return self.sizes @ self.weights


def planted(
    num_nodes: int,
    num_edges: int,
    num_features: int,
    num_classes: int,
    *,
    seed: int = 0,
    homophily: float = 0.75,
    noise: float = 0.1,
    separation: float = 2.2,
    exponent: float = 2.75,
    shares: Mapping[str, float] = SPLIT_SHARES,
    name: str = "planted",
    threads: int | None = None,
    progress: Progress = no_progress,
) -> Generated:
    """Generate a graph with planted communities, from the model in the module's docstring.

    Args:
        num_nodes: N.
        num_edges: E undirected edges, each stored once, with some duplicates and self loops.
        num_features: D.
        num_classes: K, at least 2.
        seed: of all random choices; the result does not depend on the number of threads.
        homophily: expected share of the edges inside communities.
        noise: share of the labels that differ from the community.
        separation: length of the communities' mean features, in standard deviations of the noise.
        exponent: exponent of the power law of expected degrees, above 2.
        shares: fractions of the nodes in train, valid and test.
        name: of the dataset.
        threads: number of threads; None uses all cores.
        progress: called with the number of edges that the oracle has processed.

    Raises:
        ValueError: an argument is out of range.
    """
    parts = random_split(seed, num_nodes, shares)
    blocks = _draw_blocks(
        num_nodes, num_edges, num_features, num_classes, seed, homophily, separation, exponent
    )
    if not 0 <= noise < 1 - 1 / num_classes:
        raise ValueError(
            f"noise is {noise}\n\nhint: use 0 or more, and less than {1 - 1 / num_classes:.3g}, at "
            f"which labels of {num_classes} classes are independent of the communities"
        )
    labels = _draw_labels(blocks, seed, noise)
    edges = _edges(blocks, num_edges, seed, threads)
    features = generate_rows(
        lambda chunk, begin, end: _features(blocks, seed, chunk, begin, end),
        num_nodes,
        num_features,
        f"{name}'s features",
        threads,
    )
    tested = parts["test"][: max(1, MAX_POSTERIOR_VALUES // num_classes)]
    scores = log_posterior(blocks, tested, edges, features.chunks(allocate_in_memory), progress)
    return Generated(
        name,
        num_nodes,
        num_edges,
        num_classes,
        labels,
        parts,
        edges,
        features,
        float((scores.argmax(axis=1) == labels[tested]).mean()),
        {
            "generator": "planted",
            "seed": seed,
            "homophily": homophily,
            "noise": noise,
            "separation": separation,
            "exponent": exponent,
        },
    )


def _draw_blocks(
    num_nodes: int,
    num_edges: int,
    num_features: int,
    num_classes: int,
    seed: int,
    homophily: float,
    separation: float,
    exponent: float,
) -> BlockModel:
    if num_classes < 2 or num_nodes < num_classes:
        raise ValueError(
            f"{num_classes} classes for {num_nodes} nodes\n\n"
            "hint: use 2 or more classes, and at least as many nodes"
        )
    if not exponent > 2:
        raise ValueError(
            f"exponent is {exponent}\n\n"
            "hint: use a value above 2; otherwise a few nodes have almost all edges"
        )
    means = random_stream(seed, MEANS).standard_normal((num_classes, num_features))
    means *= separation / np.linalg.norm(means, axis=1, keepdims=True)
    # the largest class has three times the nodes of the smallest
    shares = np.linspace(1.5, 0.5, num_classes) / num_classes
    bounds = _weight_bounds(num_nodes, num_edges, exponent)
    levels = AliasTable.from_weights([-np.diff(bounds ** (1 - exponent))])
    classes = AliasTable.from_weights([shares])
    num_levels = len(bounds) - 1
    community = np.empty(num_nodes, np.min_scalar_type(num_classes - 1))
    level = np.empty(num_nodes, np.min_scalar_type(num_levels - 1))
    sizes = np.zeros(num_classes * num_levels, np.int64)
    for chunk, begin in enumerate(range(0, num_nodes, _CHUNK_NODES)):
        random = random_stream(seed, COMMUNITIES, chunk)
        size = min(_CHUNK_NODES, num_nodes - begin)
        some_classes, some_levels = classes.draw(random, size), levels.draw(random, size)
        community[begin : begin + size], level[begin : begin + size] = some_classes, some_levels
        sizes += np.bincount(some_classes * num_levels + some_levels, minlength=len(sizes))
    blocks = BlockModel(
        shares,
        means.astype(np.float32),
        np.sqrt(bounds[1:] * bounds[:-1]),
        0.0,
        community,
        level,
        sizes.reshape(num_classes, num_levels),
    )
    return replace(blocks, affinity=_affinity(blocks.mass, homophily))


def _weight_bounds(num_nodes: int, num_edges: int, exponent: float) -> Array:
    """Return the bounds of the levels of weight, (L + 1,), from 1 on."""
    # less than one node is expected beyond the last candidate
    tried = np.geomspace(LEVEL_RATIO, max(2.0, num_nodes ** (1 / (exponent - 1))), 1000)
    mean = (1 - tried ** (2 - exponent)) / (1 - tried ** (1 - exponent))
    mean *= (exponent - 1) / (exponent - 2)
    largest_degree = 2 * num_edges / num_nodes * tried / mean
    allowed = int(np.searchsorted(largest_degree, LARGEST_SHARE * num_nodes))
    largest = float(tried[max(0, allowed - 1)])
    return np.geomspace(1, largest, 1 + max(1, round(np.log(largest) / np.log(LEVEL_RATIO))))


def _affinity(mass: Array, homophily: float) -> float:
    """Return the affinity for which `homophily` is the expected share of edges inside."""
    by_chance = float(((mass / mass.sum()) ** 2).sum())
    if not by_chance <= homophily <= 1:
        raise ValueError(
            f"homophily is {homophily}\n\nhint: use {by_chance:.3g} (that of random edges) to 1"
        )
    return (homophily - by_chance) / (1 - by_chance)


def _draw_labels(blocks: BlockModel, seed: int, noise: float) -> Array:
    num_classes = len(blocks.shares)
    labels = np.empty_like(blocks.community)
    for chunk, begin in enumerate(range(0, len(labels), _CHUNK_NODES)):
        random = random_stream(seed, LABELS, chunk)
        true = blocks.community[begin : begin + _CHUNK_NODES].astype(np.int64)
        step = 1 + random.integers(num_classes - 1, size=len(true))
        wrong = random.random(len(true)) < noise
        labels[begin : begin + len(true)] = np.where(wrong, (true + step) % num_classes, true)
    return labels


def _features(blocks: BlockModel, seed: int, chunk: int, begin: int, end: int) -> Array:
    random = random_stream(seed, FEATURES, chunk)
    rows = random.standard_normal((end - begin, blocks.means.shape[1]), np.float32)
    rows += blocks.means[blocks.community[begin:end]]
    return rows


def _edges(blocks: BlockModel, num_edges: int, seed: int, threads: int | None) -> Chunks[Array]:
    num_levels = len(blocks.weights)
    num_nodes = len(blocks.community)
    # nodes sorted by cell, which is a pair of a community and a level
    cell = np.multiply(blocks.community, num_levels, dtype=np.min_scalar_type(blocks.sizes.size))
    cell += blocks.level
    members = np.argsort(cell, kind="stable").astype(node_dtype(num_nodes))
    length = blocks.sizes.reshape(-1)
    start = length.cumsum() - length
    mass = blocks.sizes * blocks.weights
    # distribution 0 is over all cells, distribution 1 + k over those of community k
    cells = AliasTable.from_weights([mass.reshape(-1), *mass])
    first_cell = np.concatenate([[0], np.arange(len(mass)) * num_levels])

    def draw_nodes(random: np.random.Generator, cell: Array) -> Array:
        position = random.random(len(cell))
        position *= np.take(length, cell)
        return np.take(members, np.take(start, cell) + position.astype(np.int64))

    def make_chunk(chunk: int, begin: int, end: int) -> Array:
        random, size = random_stream(seed, EDGES, chunk), end - begin
        ends = np.empty((2, size), np.int64)
        cell = cells.draw(random, size)
        ends[0] = draw_nodes(random, cell)
        # the second end is drawn from the first end's community, or from all nodes
        row = np.where(random.random(size) < blocks.affinity, cell // num_levels + 1, 0)
        cell = cells.draw(random, size, row)
        cell += np.take(first_cell, row)
        ends[1] = draw_nodes(random, cell)
        return ends

    return Chunks(make_chunk, num_edges, CHUNK_EDGES, threads)


def log_posterior(
    blocks: BlockModel,
    nodes: Array,
    edges: Chunks[Array],
    features: Iterator[Array],
    progress: Progress = no_progress,
) -> Array:
    """Compute the log posterior of each node's community; see the module's docstring.

    Args:
        blocks: the model with the communities and weights of all nodes.
        nodes: (S,) node ids, ascending.
        edges: all edges in (2, n) chunks.
        features: (n, D) chunks of rows from node 0 on, read up to the last of `nodes`.
        progress: called with the number of edges that have been processed.

    Returns:
        (S, K) float64; each row lacks a constant term.
    """
    num_classes = len(blocks.shares)
    num_touching, num_loops, num_inside = _count_edges(blocks, nodes, edges, progress)
    mass = blocks.mass
    # at homophily 1 there are no edges between communities, and the logarithm must stay finite
    between = max((1 - blocks.affinity) / mass.sum(), np.finfo(float).tiny)
    prior = np.log(blocks.shares) - (blocks.means.astype(np.float64) ** 2).sum(axis=1) / 2
    scores = np.empty((len(nodes), num_classes))
    begin = done = 0
    for rows in features:
        stop = int(np.searchsorted(nodes, begin + len(rows)))
        some = slice(done, stop)
        weight = blocks.weights[blocks.level[nodes[some]]][:, None]
        is_own = np.arange(num_classes) == blocks.community[nodes[some]][:, None]
        mass_without = mass - weight * is_own
        num_own = num_touching[some] + num_loops[some, None]
        num_others = num_inside - is_own * num_own
        log_inside = np.log(blocks.affinity / (mass_without + weight) + between)
        # a community of this node alone has no mass and no other edges
        with np.errstate(divide="ignore", invalid="ignore"):
            dilution = num_others * (log_inside - np.log(blocks.affinity / mass_without + between))
        scores[some] = rows[nodes[some] - begin] @ blocks.means.T
        scores[some] += prior + num_own * log_inside - num_touching[some] * np.log(between)
        scores[some] += np.where(num_others > 0, dilution, 0)
        begin, done = begin + len(rows), stop
        if done == len(nodes):
            break
    return scores


def _count_edges(
    blocks: BlockModel, nodes: Array, edges: Chunks[Array], progress: Progress
) -> tuple[Array, Array, Array]:
    """Count the edges of some nodes and those inside communities, in one pass.

    Returns:
        (S, K): edges between each of `nodes` and other nodes of each community; (S,): self loops;
        (K,): edges inside each community.
    """
    num_classes = len(blocks.shares)
    index_of = np.full(int(nodes[-1]) + 1, -1, np.int32)
    index_of[nodes] = np.arange(len(nodes))

    def count_chunk(ends: Array) -> tuple[Array, Array, Array, int]:
        communities = np.take(blocks.community, ends)
        is_loop = ends[0] == ends[1]
        inside = communities[0][communities[0] == communities[1]]
        cells, loops = [], []
        for end in (0, 1):
            edge = np.flatnonzero(ends[end] < len(index_of))
            index = np.take(index_of, ends[end][edge])
            edge, index = edge[index >= 0], index[index >= 0]
            loop = is_loop[edge]
            loops.append(index[loop])
            cells.append(
                np.multiply(index, num_classes, dtype=np.int64)[~loop]
                + communities[1 - end][edge[~loop]]
            )
        # both ends of a loop are the same node, so it is counted once
        return (
            np.concatenate(cells),
            loops[0],
            np.bincount(inside, minlength=num_classes),
            ends.shape[1],
        )

    num_touching = np.zeros(len(nodes) * num_classes, np.int32)
    num_loops = np.zeros(len(nodes), np.int32)
    one = np.int32(1)  # a number of another dtype takes forty times as long to add
    num_inside = np.zeros(num_classes, np.int64)
    done = 0
    for cells, loops, inside, size in edges.then(count_chunk)():
        np.add.at(num_touching, cells, one)
        np.add.at(num_loops, loops, one)
        num_inside += inside
        done += size
        progress("edges", done, edges.total)
    return num_touching.reshape(len(nodes), num_classes), num_loops, num_inside
