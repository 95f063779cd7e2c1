"""Generate graphs chunk by chunk from a seed, with any number of threads.

Each chunk of edges or features has its own random stream with the key (seed, purpose, chunk), so
that a graph depends only on its seed, and memory only on the chunk size. `planted` has communities
and a known bound for the accuracy, `rmat` power-law degrees at any scale, and `digits` is small
real data.

Planted communities
-------------------

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

Notation: N nodes, E edges as stored, 2**B the next power of two of N, K classes, D features,
L levels of weight, S nodes that the oracle predicts; R distributions and V slots of an alias table.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from gcnzc.datasets.rows import (
    Allocate,
    Array,
    Progress,
    Rows,
    allocate_in_memory,
    chunk_rows,
    no_progress,
    rows_from_array,
)
from gcnzc.datasets.source import SPLITS, EdgeDefaults, Metric, has_label, node_dtype

T = TypeVar("T")
U = TypeVar("U")

# small enough that about ten temporary arrays of a chunk stay in a core's cache, large enough to
# amortize numpy calls of 1 us each
CHUNK_EDGES = 1 << 16
# fractions of the nodes in each split, as in ogbn-arxiv
SPLIT_SHARES: Mapping[str, float] = {"train": 0.54, "valid": 0.18, "test": 0.28}
# purposes of random streams
PARTITION, COMMUNITIES, LABELS, MEANS, FEATURES, EDGES, NAMES = range(7)


@dataclass(frozen=True)
class Generated:
    """A generated dataset, as a `gcnzc.datasets.source.Source`; each edge is stored once."""

    name: str
    num_nodes: int
    num_edges: int
    num_classes: int
    node_labels: Array  # (N,) integers in [0, num_classes)
    parts: Mapping[str, Array]  # "train", "valid", "test": node ids, ascending
    edge_chunks: "Chunks[Array]"  # (2, n) int64 sources and targets, E columns in total
    features: Rows
    best_accuracy: float | None = None  # upper bound for the accuracy of any model, if known
    origin: dict[str, Any] = field(default_factory=dict)  # generator and parameters
    metric: Metric = "accuracy"
    mapping: Path | None = None
    split_name: str = "random"

    def edge_defaults(self) -> EdgeDefaults:
        """Return both directions, because each edge is stored once."""
        return EdgeDefaults(True, "keep", "each edge is stored once")

    def edges(self, allocate: Allocate, progress: Progress) -> tuple[Array, Array]:
        """See `Source.edges`."""
        dtype = node_dtype(self.num_nodes)
        src = allocate("sources", self.num_edges, dtype)
        dst = allocate("destinations", self.num_edges, dtype)
        done = 0
        for ends in self.edge_chunks():
            src[done : done + ends.shape[1]], dst[done : done + ends.shape[1]] = ends
            done += ends.shape[1]
            progress("edges", done, self.num_edges)
        return src, dst

    def labels(self) -> Array:
        """Return the labels, (N,) int64."""
        return self.node_labels.astype(np.int64)

    def split(self) -> dict[str, Array]:
        """Return the node ids of each split, ascending."""
        return dict(self.parts)


def random_stream(seed: int, what: int, chunk: int = 0) -> np.random.Generator:
    """Return the random generator of one chunk, for one purpose such as `EDGES`."""
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence([seed, what, chunk])))


def map_in_order(make: Callable[[int], T], count: int, threads: int | None = None) -> Iterator[T]:
    """Yield `make(0)` to `make(count - 1)` in order, computed in advance by a thread pool.

    Args:
        make: called once for each index, from several threads at once.
        count: number of calls.
        threads: number of threads; None uses all cores available to this process.
    """
    threads = threads or len(os.sched_getaffinity(0))
    if threads == 1 or count == 1:
        yield from map(make, range(count))
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="gcnzc-generate") as pool:
        pending: deque[Future[T]] = deque()
        try:
            for index in range(count):
                pending.append(pool.submit(make, index))
                if len(pending) > threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


@dataclass(frozen=True)
class Chunks(Generic[T]):
    """An iterable of `make(chunk, begin, end)` for the chunks of `range(total)`, reusable."""

    make: Callable[[int, int, int], T]  # called from several threads at once
    total: int
    step: int
    threads: int | None = None

    def __call__(self) -> Iterator[T]:
        """Yield the results for all chunks in order."""
        return map_in_order(self._make_chunk, -(-self.total // self.step), self.threads)

    def then(self, finish: Callable[[T], U]) -> "Chunks[U]":
        """Return chunks to which `finish` is applied, on the thread that made the chunk."""
        return Chunks(
            lambda chunk, begin, end: finish(self.make(chunk, begin, end)),
            self.total,
            self.step,
            self.threads,
        )

    def _make_chunk(self, chunk: int) -> T:
        return self.make(chunk, chunk * self.step, min((chunk + 1) * self.step, self.total))


def generate_rows(
    make: Callable[[int, int, int], Array],
    num_rows: int,
    num_columns: int,
    where: str,
    threads: int | None = None,
) -> Rows:
    """Return (num_rows, num_columns) float32 `Rows` that `make(chunk, begin, end)` computes."""
    chunks = Chunks(make, num_rows, chunk_rows(num_columns, 4), threads)
    return Rows(num_rows, num_columns, np.dtype(np.float32), lambda allocate: chunks(), where)


def random_split(seed: int, num_nodes: int, shares: Mapping[str, float]) -> dict[str, Array]:
    """Split the nodes at random into "train", "valid" and "test", with at least one node in each.

    Args:
        seed: of the split.
        num_nodes: N.
        shares: fraction of the nodes in each split.

    Raises:
        ValueError: there are fewer nodes than splits, or the shares exceed 1.
    """
    # rounding the ends of the splits, not their sizes, assigns all nodes if the shares add up to 1
    ends = np.round(np.cumsum([shares[part] for part in SPLITS]) * num_nodes).astype(np.int64)
    sizes = np.maximum(1, np.diff(ends, prepend=0))
    # the largest split gives up the nodes that were added to empty ones
    sizes[sizes.argmax()] -= max(0, sizes.sum() - num_nodes)
    if ends[-1] > num_nodes or sizes.min() < 1:
        raise ValueError(
            f"{num_nodes} nodes cannot be split by {dict(shares)}\n\n"
            "hint: use at least one node for each split, and shares with a sum of at most 1"
        )
    order = (
        random_stream(seed, PARTITION)
        .permutation(num_nodes)
        .astype(node_dtype(num_nodes), copy=False)
    )
    bounds = np.cumsum(sizes)
    return {
        part: np.sort(ids).astype(np.int64)
        for part, ids in zip(SPLITS, np.split(order[: bounds[-1]], bounds[:-1]), strict=True)
    }


def are_percentages(values: Any) -> bool:
    """Whether `values` has three positive integers, one for each split, of at most 100 in all."""
    return (
        isinstance(values, Sequence)
        and len(values) == len(SPLITS)
        and all(type(value) is int and value > 0 for value in values)
        and sum(values) <= 100
    )


def split_labelled(
    labels: Array, percentages: Sequence[int], seed: int, ids: Array | None = None
) -> dict[str, Array]:
    """Split the nodes with a label at random into "train", "valid" and "test".

    Args:
        labels: validated labels of the N nodes.
        percentages: of these nodes in each split; see `are_percentages`.
        seed: of the split.
        ids: (N,) names of the nodes; the split of nodes with names does not depend on their
            numbers.

    Returns:
        The node ids of each split, ascending.

    Raises:
        ValueError: there are fewer nodes with a label than splits.
    """
    nodes = np.flatnonzero(has_label(labels))
    if ids is not None:
        nodes = nodes[np.argsort(ids[nodes], kind="stable")]
    shares = {part: each / 100 for part, each in zip(SPLITS, percentages, strict=True)}
    parts = random_split(seed, len(nodes), shares)
    return {part: np.sort(nodes[places]) for part, places in parts.items()}


@dataclass(frozen=True)
class AliasTable:
    """Alias tables of discrete distributions over the values 0, 1, ..., with individual lengths.

    They sample in constant time, by Walker's alias method with Vose's construction (IEEE Trans.
    Software Eng. 17, 1991). Each value has a slot of equal width, which it shares with at most one
    other value.
    """

    start: Array  # (R,) int64: first slot of each row
    length: Array  # (R,) float64: number of slots, as a factor for uniform random numbers
    keep: Array  # (V,) float64: probability of the slot's own value
    other: Array  # (V,) int64: the other value of the slot

    @classmethod
    def from_weights(cls, rows: Sequence[Array]) -> "AliasTable":
        """Build tables for rows of (n,) non-negative weights; zeros give a uniform distribution."""
        slots = [_slots(np.asarray(weights, np.float64)) for weights in rows]
        lengths = np.array([len(keep) for keep, _ in slots])
        return cls(
            lengths.cumsum() - lengths,
            lengths.astype(np.float64),
            np.concatenate([keep for keep, _ in slots]),
            np.concatenate([other for _, other in slots]),
        )

    def draw(self, random: np.random.Generator, size: int, rows: Array | None = None) -> Array:
        """Sample (size,) int64 values.

        Args:
            random: generator.
            size: number of samples.
            rows: (size,) distribution of each sample; None samples all from the first one.
        """
        position = random.random(size)
        position *= self.length[0] if rows is None else np.take(self.length, rows)
        value = position.astype(np.int64)
        position -= value
        slot = value if rows is None else np.take(self.start, rows) + value
        is_own = position < np.take(self.keep, slot)
        return np.where(is_own, value, np.take(self.other, slot))


def _slots(weights: Array) -> tuple[Array, Array]:
    total = weights.sum()
    keep = weights / total * len(weights) if total > 0 else np.ones(len(weights))
    other = np.arange(len(weights))
    small = np.flatnonzero(keep < 1).tolist()
    large = np.flatnonzero(keep >= 1).tolist()
    while small and large:
        filled, donor = small.pop(), large[-1]
        other[filled] = donor
        keep[donor] -= 1 - keep[filled]
        if keep[donor] < 1:
            small.append(large.pop())
    # the remaining slots are full, up to rounding
    keep[small + large] = 1
    return keep, other


QUADRANTS = (0.57, 0.19, 0.19, 0.05)  # (0, 0), (0, 1), (1, 0), (1, 1): Graph500's
# bits of both end nodes that one sample determines: tables of 4**6 values fit into the L1 cache and
# take half the time of 4**3
GROUP_BITS = 6


def rmat(
    num_nodes: int,
    num_edges: int,
    num_features: int,
    num_classes: int,
    *,
    seed: int = 0,
    quadrants: tuple[float, float, float, float] = QUADRANTS,
    shares: Mapping[str, float] = SPLIT_SHARES,
    name: str = "rmat",
    threads: int | None = None,
) -> Generated:
    """Generate an R-MAT graph, for benchmarks at scale: a recursive choice of quadrants.

    Source: Chakrabarti, Zhan, Faloutsos, SDM 2004, with the parameters of Graph500
    (https://graph500.org/?page_id=12). Degrees are skewed and hubs are connected with hubs, at any
    size; there are no communities. Features and labels are random and independent.

    Args:
        num_nodes: N. If it is not a power of two, 2**B - N nodes get the edges of two ids.
        num_edges: E undirected edges, each stored once, with some duplicates and self loops.
        num_features: D, uniform in [-1, 1).
        num_classes: K; labels are uniform, so that the best possible accuracy is 1 / K.
        seed: of all random choices; the result does not depend on the number of threads.
        quadrants: probabilities of (0, 0), (0, 1), (1, 0), (1, 1) for each bit of both end nodes.
        shares: fractions of the nodes in train, valid and test.
        name: of the dataset.
        threads: number of threads; None uses all cores.

    Raises:
        ValueError: an argument is out of range.
    """
    if num_classes < 1:
        raise ValueError(f"{num_classes} classes\n\nhint: at least 1 class is required")
    if min(quadrants) < 0 or abs(sum(quadrants) - 1) > 1e-9:
        raise ValueError(f"quadrants are {quadrants}\n\nhint: four probabilities that add up to 1")
    parts = random_split(seed, num_nodes, shares)
    labels = random_stream(seed, LABELS).integers(
        num_classes, size=num_nodes, dtype=np.min_scalar_type(num_classes - 1)
    )

    def features(chunk: int, begin: int, end: int) -> Array:
        rows = random_stream(seed, FEATURES, chunk).random((end - begin, num_features), np.float32)
        rows *= 2
        rows -= 1
        return rows

    return Generated(
        name,
        num_nodes,
        num_edges,
        num_classes,
        labels,
        parts,
        _rmat_edges(num_nodes, num_edges, seed, quadrants, threads),
        generate_rows(features, num_nodes, num_features, f"{name}'s features", threads),
        1 / num_classes,
        {"generator": "rmat", "seed": seed, "quadrants": list(quadrants)},
    )


def _rmat_edges(
    num_nodes: int,
    num_edges: int,
    seed: int,
    quadrants: tuple[float, float, float, float],
    threads: int | None,
) -> Chunks[Array]:
    num_bits = (num_nodes - 1).bit_length()
    groups = [GROUP_BITS] * (num_bits // GROUP_BITS)
    if num_bits % GROUP_BITS:
        groups.append(num_bits % GROUP_BITS)
    tables = {bits: _table(quadrants, bits) for bits in set(groups)}
    factors = (random_stream(seed, NAMES).integers(1 << num_bits, size=2) | 1).tolist()

    def make_chunk(chunk: int, begin: int, end: int) -> Array:
        random = random_stream(seed, EDGES, chunk)
        ends = np.zeros((2, end - begin), np.int64)
        for bits in groups:
            pair = tables[bits].draw(random, end - begin)
            ends <<= bits
            ends[0] |= pair >> bits
            ends[1] |= pair & ((1 << bits) - 1)
        permute_ids(ends, num_bits, factors)
        return np.subtract(ends, num_nodes, out=ends, where=ends >= num_nodes)

    return Chunks(make_chunk, num_edges, CHUNK_EDGES, threads)


def permute_ids(ids: Array, num_bits: int, factors: list[int]) -> None:
    """Apply a permutation of [0, 2**num_bits) to ids in place, so that hubs get scattered ids.

    `factors` must be odd.
    """
    for factor in factors:
        ids *= factor
        ids &= (1 << num_bits) - 1
        ids ^= ids >> (num_bits + 1) // 2


def _table(quadrants: tuple[float, float, float, float], bits: int) -> AliasTable:
    """Build the table to sample `source * 2**bits + destination`."""
    one = np.array(quadrants).reshape(2, 2)
    matrix = np.ones((1, 1))
    for _ in range(bits):
        matrix = np.kron(matrix, one)
    return AliasTable.from_weights([matrix.reshape(-1)])


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
    edges = _planted_edges(blocks, num_edges, seed, threads)
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


def _planted_edges(
    blocks: BlockModel, num_edges: int, seed: int, threads: int | None
) -> Chunks[Array]:
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


# scikit-learn contains 1,797 images of 8 x 8 pixels (Alpaydin and Kaynak, "Optical Recognition of
# Handwritten Digits", UCI, 1998, CC BY 4.0)
NUM_CLASSES = 10
LARGEST_PIXEL = 16


def digits(*, neighbours: int = 8, seed: int = 0, name: str = "digits") -> Generated:
    """Build the k-nearest-neighbour graph of the digits, by Euclidean distance.

    Args:
        neighbours: k, at least 1. An edge between mutual neighbours is stored once.
        seed: of the split: 60 % train, 20 % valid, 20 % test.
        name: of the dataset.

    Raises:
        ValueError: `neighbours` is out of range.
    """
    # on use: few processes build this graph, and the import takes longer than torch's
    from sklearn.datasets import load_digits
    from sklearn.neighbors import NearestNeighbors

    pixels, labels = load_digits(return_X_y=True)
    num_nodes = len(pixels)
    if not 1 <= neighbours < num_nodes:
        raise ValueError(
            f"{neighbours} neighbours of {num_nodes} images\n\n"
            f"hint: neighbours is from 1 to {num_nodes - 1}"
        )
    nearest = NearestNeighbors(n_neighbors=neighbours, algorithm="brute").fit(pixels)
    found = nearest.kneighbors(return_distance=False).reshape(-1)
    ends = np.stack([np.repeat(np.arange(num_nodes), neighbours), found])
    ends = np.unique(np.sort(ends, axis=0), axis=1)
    return Generated(
        name,
        num_nodes,
        ends.shape[1],
        NUM_CLASSES,
        labels,
        random_split(seed, num_nodes, {"train": 0.6, "valid": 0.2, "test": 0.2}),
        Chunks(lambda chunk, begin, end: ends[:, begin:end], ends.shape[1], ends.shape[1], 1),
        rows_from_array((pixels / LARGEST_PIXEL).astype(np.float32), f"{name}'s features"),
        None,
        {"generator": "digits", "seed": seed, "neighbours": neighbours, "licence": "CC BY 4.0"},
    )
