"""A graph with planted communities whose best possible accuracy is known.

The model is a degree-corrected stochastic block model (Karrer and Newman, Phys. Rev. E 83, 2011,
https://arxiv.org/abs/1008.3926) with features, drawn in this order:

1. every node `i` has a community `c_i`, drawn from the shares `p_k`, and, apart from that, a weight
   `w_i` with a power law `P(w) ~ w^-exponent`, cut off, in steps of a tenth;
2. its features are `x_i = m_c + z`: the mean of its community, of length `separation` and random
   direction, and standard normal noise;
3. its label is `c_i`, or, with probability `noise`, one of the other classes, all alike;
4. every edge takes its first end `u` with probability `w_u / W`, where `W` is the sum of all
   weights, and its second end `v` with probability
   `w_v (loyal [c_u = c_v] / W_c + (1 - loyal) / W)`, where `W_c` is the sum of the weights in `u`'s
   community. The share of edges inside communities is `homophily` on average.

**The best possible accuracy** is that of an oracle on the test nodes. For one node the oracle knows
`x_i`, every edge, every weight, every parameter, and the true community of *every other node*: more
than any model that is trained on features, edges and the labels of other nodes can know, for given
the communities of the others, their features and labels say nothing more about `c_i`. It answers
with the community of largest posterior, which is also the likeliest label as long as
`1 - noise > noise / (K - 1)`. So no model is right more often, but for chance in drawing the test
labels, whose standard error is below `0.5 / sqrt(test nodes)`. The posterior is, up to a constant,

    log p_k - |x_i - m_k|^2 / 2                                      features
    + sum over edges (i, j) of log(loyal [k = c_j] / W_k + (1 - loyal) / W)
    + M_k (log(loyal / W_k + (1 - loyal) / W) - log(loyal / W'_k + (1 - loyal) / W))

where `W'_k` is the weight of community `k` without node `i`, `W_k = W'_k + w_i`, and `M_k` counts
the edges inside `k` that do not touch `i`, each a little less likely if `i` shares the community.
An edge from `i` to itself counts as one to its own community, whichever that is.

Letters: N nodes, E edges, K classes, L levels of weight, D features, S nodes the oracle is asked.
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

LEVEL_RATIO = 1.1  # of neighbouring weights: finer than the spread of the degrees they lead to
LARGEST_SHARE = 0.1  # of all nodes, that a node may expect as neighbours
# (S, K) numbers of the oracle are kept at once: all test nodes of ogbn-arxiv's shape, and of larger
# graphs as many as make a standard error of 0.2 %
MAX_POSTERIOR_VALUES = 1 << 23
_CHUNK_NODES = 1 << 20


@dataclass(frozen=True)
class BlockModel:
    """The model's parameters, and the community and weight of every node."""

    shares: Array  # (K,) of the communities, add up to 1
    means: Array  # (K, D) float32
    weights: Array  # (L,) of the levels, ascending
    loyal: float
    community: Array  # (N,) in [0, K)
    level: Array  # (N,) in [0, L)
    sizes: Array  # (K, L): nodes of each community and level

    @property
    def mass(self) -> Array:
        """(K,): the sum of the weights in each community."""
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
    """A graph with planted communities; the module's first lines have the model.

    Args:
        num_nodes: N.
        num_edges: E, each to be used in both directions. A few are equal, and a few are self loops.
        num_features: D.
        num_classes: K, at least 2.
        seed: of every random choice; the number of threads has no part in the result.
        homophily: share of the edges inside communities, as expected.
        noise: share of the labels that are not the community.
        separation: length of the communities' means, in standard deviations of the noise.
        exponent: of the power law of expected degrees, above 2.
        shares: of the nodes in train, valid and test.
        name: of the graph.
        threads: all cores if None.
        progress: told of the edges that the oracle has looked at.

    Raises:
        ValueError: a number is outside its range.
    """
    parts = random_split(seed, num_nodes, shares)
    blocks = _draw_blocks(
        num_nodes, num_edges, num_features, num_classes, seed, homophily, separation, exponent
    )
    if not 0 <= noise < 1 - 1 / num_classes:
        raise ValueError(
            f"noise is {noise}\n\nhint: from 0 to below {1 - 1 / num_classes:.3g}, where labels "
            f"of {num_classes} classes would say nothing"
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
    asked = parts["test"][: max(1, MAX_POSTERIOR_VALUES // num_classes)]
    scores = log_posterior(blocks, asked, edges, features.chunks(allocate_in_memory), progress)
    return Generated(
        name,
        num_nodes,
        num_edges,
        num_classes,
        labels,
        parts,
        edges,
        features,
        float((scores.argmax(axis=1) == labels[asked]).mean()),
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
            f"{num_classes} classes for {num_nodes} nodes\n\nhint: 2 or more, and as many nodes"
        )
    if not exponent > 2:
        raise ValueError(
            f"exponent is {exponent}\n\nhint: above 2, or a few nodes have almost all edges"
        )
    means = random_stream(seed, MEANS).standard_normal((num_classes, num_features))
    means *= separation / np.linalg.norm(means, axis=1, keepdims=True)
    # the largest class has three times the nodes of the smallest
    shares = np.linspace(1.5, 0.5, num_classes) / num_classes
    bounds = _weight_bounds(num_nodes, num_edges, exponent)
    levels = AliasTable.of([-np.diff(bounds ** (1 - exponent))])
    classes = AliasTable.of([shares])
    num_levels = len(bounds) - 1
    community = np.empty(num_nodes, np.min_scalar_type(num_classes - 1))
    level = np.empty(num_nodes, np.min_scalar_type(num_levels - 1))
    sizes = np.zeros(num_classes * num_levels, np.int64)
    for chunk, begin in enumerate(range(0, num_nodes, _CHUNK_NODES)):
        random = random_stream(seed, COMMUNITIES, chunk)
        size = min(_CHUNK_NODES, num_nodes - begin)
        its_class, its_level = classes.draw(random, size), levels.draw(random, size)
        community[begin : begin + size], level[begin : begin + size] = its_class, its_level
        sizes += np.bincount(its_class * num_levels + its_level, minlength=len(sizes))
    blocks = BlockModel(
        shares,
        means.astype(np.float32),
        np.sqrt(bounds[1:] * bounds[:-1]),
        0.0,
        community,
        level,
        sizes.reshape(num_classes, num_levels),
    )
    return replace(blocks, loyal=_loyal(blocks.mass, homophily))


def _weight_bounds(num_nodes: int, num_edges: int, exponent: float) -> Array:
    """(L + 1,): where the levels end; the least weight is 1."""
    # beyond the last less than one node is expected
    tried = np.geomspace(LEVEL_RATIO, max(2.0, num_nodes ** (1 / (exponent - 1))), 1000)
    mean = (1 - tried ** (2 - exponent)) / (1 - tried ** (1 - exponent))
    mean *= (exponent - 1) / (exponent - 2)
    largest_degree = 2 * num_edges / num_nodes * tried / mean
    allowed = int(np.searchsorted(largest_degree, LARGEST_SHARE * num_nodes))
    largest = float(tried[max(0, allowed - 1)])
    return np.geomspace(1, largest, 1 + max(1, round(np.log(largest) / np.log(LEVEL_RATIO))))


def _loyal(mass: Array, homophily: float) -> float:
    """The probability of a second end in the community of the first by intention."""
    by_chance = float(((mass / mass.sum()) ** 2).sum())
    if not by_chance <= homophily <= 1:
        raise ValueError(
            f"homophily is {homophily}\n\nhint: from {by_chance:.3g}, which chance makes, to 1"
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
    # the nodes of a cell, which is a community and level, in one run
    cell = np.multiply(blocks.community, num_levels, dtype=np.min_scalar_type(blocks.sizes.size))
    cell += blocks.level
    members = np.argsort(cell, kind="stable").astype(node_dtype(num_nodes))
    length = blocks.sizes.reshape(-1)
    start = length.cumsum() - length
    mass = blocks.sizes * blocks.weights
    # row 0 draws any cell, row 1 + k one of community k
    cells = AliasTable.of([mass.reshape(-1), *mass])
    first_cell = np.concatenate([[0], np.arange(len(mass)) * num_levels])

    def nodes_of(random: np.random.Generator, cell: Array) -> Array:
        place = random.random(len(cell))
        place *= np.take(length, cell)
        return np.take(members, np.take(start, cell) + place.astype(np.int64))

    def chunk_of(chunk: int, begin: int, end: int) -> Array:
        random, size = random_stream(seed, EDGES, chunk), end - begin
        ends = np.empty((2, size), np.int64)
        cell = cells.draw(random, size)
        ends[0] = nodes_of(random, cell)
        # the first end's community if the second end stays in it, else any
        row = np.where(random.random(size) < blocks.loyal, cell // num_levels + 1, 0)
        cell = cells.draw(random, size, row)
        cell += np.take(first_cell, row)
        ends[1] = nodes_of(random, cell)
        return ends

    return Chunks(chunk_of, num_edges, CHUNK_EDGES, threads)


def log_posterior(
    blocks: BlockModel,
    asked: Array,
    edges: Chunks[Array],
    features: Iterator[Array],
    progress: Progress = no_progress,
) -> Array:
    """What the oracle knows of each node's community; see the module's first lines.

    Args:
        blocks: the model and what it drew.
        asked: (S,) nodes, ascending.
        edges: all edges in (2, n) chunks.
        features: (n, D) chunks of rows from node 0 on, read until the last node that is asked for.
        progress: told of the edges.

    Returns:
        (S, K) float64, the same constant left out of all numbers of a row.
    """
    num_classes = len(blocks.shares)
    touching, loops, inside = _count(blocks, asked, edges, progress)
    mass = blocks.mass
    # no edge between communities is expected at homophily 1: one would be proof enough
    apart = max((1 - blocks.loyal) / mass.sum(), np.finfo(float).tiny)
    usual = np.log(blocks.shares) - (blocks.means.astype(np.float64) ** 2).sum(axis=1) / 2
    scores = np.empty((len(asked), num_classes))
    begin = done = 0
    for rows in features:
        stop = int(np.searchsorted(asked, begin + len(rows)))
        some = slice(done, stop)
        weight = blocks.weights[blocks.level[asked[some]]][:, None]
        is_own = np.arange(num_classes) == blocks.community[asked[some]][:, None]
        without = mass - weight * is_own
        near = touching[some] + loops[some, None]
        others = inside - is_own * near
        joined = np.log(blocks.loyal / (without + weight) + apart)
        # a community of this node alone has no mass and no other edges
        with np.errstate(divide="ignore", invalid="ignore"):
            diluted = others * (joined - np.log(blocks.loyal / without + apart))
        scores[some] = rows[asked[some] - begin] @ blocks.means.T
        scores[some] += usual + near * joined - touching[some] * np.log(apart)
        scores[some] += np.where(others > 0, diluted, 0)
        begin, done = begin + len(rows), stop
        if done == len(asked):
            break
    return scores


def _count(
    blocks: BlockModel, asked: Array, edges: Chunks[Array], progress: Progress
) -> tuple[Array, Array, Array]:
    """Look at all edges once.

    Returns:
        (S, K): edges between a node that is asked for and another of each community; (S,): edges
        from it to itself; (K,): edges inside each community.
    """
    num_classes = len(blocks.shares)
    position = np.full(int(asked[-1]) + 1, -1, np.int32)
    position[asked] = np.arange(len(asked))

    def look(ends: Array) -> tuple[Array, Array, Array, int]:
        communities = np.take(blocks.community, ends)
        is_loop = ends[0] == ends[1]
        together = communities[0][communities[0] == communities[1]]
        slots, loops = [], []
        for near in (0, 1):
            edge = np.flatnonzero(ends[near] < len(position))
            place = np.take(position, ends[near][edge])
            edge, place = edge[place >= 0], place[place >= 0]
            loop = is_loop[edge]
            loops.append(place[loop])
            slots.append(
                np.multiply(place, num_classes, dtype=np.int64)[~loop]
                + communities[1 - near][edge[~loop]]
            )
        # both ends of a loop are the same node
        return (
            np.concatenate(slots),
            loops[0],
            np.bincount(together, minlength=num_classes),
            ends.shape[1],
        )

    touching = np.zeros(len(asked) * num_classes, np.int32)
    loops = np.zeros(len(asked), np.int32)
    one = np.int32(1)  # of the type of what it is added to: another costs forty times as long
    inside = np.zeros(num_classes, np.int64)
    done = 0
    for its_slots, its_loops, its_inside, size in edges.then(look)():
        np.add.at(touching, its_slots, one)
        np.add.at(loops, its_loops, one)
        inside += its_inside
        done += size
        progress("edges", done, edges.total)
    return touching.reshape(len(asked), num_classes), loops, inside
