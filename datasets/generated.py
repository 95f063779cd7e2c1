"""Graphs that are generated chunk by chunk from a seed, with any number of threads.

Each chunk of edges or features has its own random stream with the key (seed, purpose, chunk), so
that a graph depends only on its seed, and memory only on the chunk size.

Notation: N nodes, E edges as stored.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from gcnzc.datasets.rows import Allocate, Array, Progress, Rows, chunk_rows
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
