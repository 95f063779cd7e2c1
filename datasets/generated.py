"""Graphs that are generated part by part from a seed, by any number of threads.

Every chunk of edges or of features has a random stream of its own, keyed by (seed, what, chunk), so
that a graph depends on its seed alone, and memory on the size of a chunk.

Letters: N nodes, E edges as stored.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from gcnzc.datasets.rows import Allocate, Array, Progress, Rows, chunk_rows
from gcnzc.datasets.source import PARTS, EdgeDefaults, Metric, node_dtype

T = TypeVar("T")
U = TypeVar("U")

# a chunk's ten or so temporary arrays should stay in a core's cache; numpy's calls cost 1 us each
CHUNK_EDGES = 1 << 16
# of the nodes in each part, as in ogbn-arxiv
SHARES: Mapping[str, float] = {"train": 0.54, "valid": 0.18, "test": 0.28}
# what a random stream is for
PARTITION, COMMUNITIES, LABELS, MEANS, FEATURES, EDGES, NAMES = range(7)


@dataclass(frozen=True)
class Generated:
    """A graph with labels and features; a `gcnzc.datasets.source.Source`. Each edge comes once."""

    name: str
    num_nodes: int
    num_edges: int
    num_classes: int
    node_labels: Array  # (N,) integers in [0, num_classes)
    parts: Mapping[str, Array]  # train, valid, test: ids of nodes, ascending
    edge_chunks: "Chunks[Array]"  # (2, n) int64 sources and destinations, E columns together
    features: Rows
    best_accuracy: float | None = None  # what no model can pass, where it is known
    origin: dict[str, Any] = field(default_factory=dict)  # generator and parameters
    metric: Metric = "accuracy"
    mapping: Path | None = None
    split_name: str = "random"

    def usual(self) -> EdgeDefaults:
        """Both directions."""
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
        """(N,) int64."""
        return self.node_labels.astype(np.int64)

    def split(self) -> dict[str, Array]:
        """Ids of the nodes of each part, ascending."""
        return dict(self.parts)


def stream(seed: int, what: int, chunk: int = 0) -> np.random.Generator:
    """The random numbers of one chunk of one thing."""
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence([seed, what, chunk])))


def in_order(make: Callable[[int], T], count: int, threads: int | None = None) -> Iterator[T]:
    """`make(0)` to `make(count - 1)` in order, a few of them made ahead on threads.

    Args:
        make: called once for each index, by several threads at once.
        count: how many.
        threads: all cores that this process may use if None.
    """
    threads = threads or len(os.sched_getaffinity(0))
    if threads == 1 or count == 1:
        yield from map(make, range(count))
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="gcnzc-generate") as pool:
        waiting: deque[Future[T]] = deque()
        try:
            for index in range(count):
                waiting.append(pool.submit(make, index))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


@dataclass(frozen=True)
class Chunks(Generic[T]):
    """What `make(chunk, begin, end)` makes of the chunks of `range(total)`, as often as asked."""

    make: Callable[[int, int, int], T]  # called by several threads at once
    total: int
    step: int
    threads: int | None = None

    def __call__(self) -> Iterator[T]:
        """All of it, in order."""
        return in_order(self._one, -(-self.total // self.step), self.threads)

    def then(self, finish: Callable[[T], U]) -> "Chunks[U]":
        """The same chunks, each passed through `finish` on its thread."""
        return Chunks(
            lambda chunk, begin, end: finish(self.make(chunk, begin, end)),
            self.total,
            self.step,
            self.threads,
        )

    def _one(self, chunk: int) -> T:
        return self.make(chunk, chunk * self.step, min((chunk + 1) * self.step, self.total))


def computed_rows(
    make: Callable[[int, int, int], Array],
    num_rows: int,
    num_columns: int,
    where: str,
    threads: int | None = None,
) -> Rows:
    """(num_rows, num_columns) float32 rows, of which `make(chunk, begin, end)` makes some."""
    chunks = Chunks(make, num_rows, chunk_rows(num_columns, 4), threads)
    return Rows(num_rows, num_columns, np.dtype(np.float32), lambda allocate: chunks(), where)


def random_parts(seed: int, num_nodes: int, shares: Mapping[str, float]) -> dict[str, Array]:
    """Disjoint parts of the nodes, each with its share of them and at least one node.

    Raises:
        ValueError: there are not as many nodes as parts, or the shares exceed 1.
    """
    # rounding where parts end, and not their sizes, leaves no node out if the shares add up to 1
    ends = np.round(np.cumsum([shares[part] for part in PARTS]) * num_nodes).astype(np.int64)
    sizes = np.maximum(1, np.diff(ends, prepend=0))
    # what too small a part was given, the largest can spare
    sizes[sizes.argmax()] -= max(0, sizes.sum() - num_nodes)
    if ends[-1] > num_nodes or sizes.min() < 1:
        raise ValueError(
            f"{num_nodes} nodes cannot be split by {dict(shares)}\n\n"
            "hint: at least one node in each part, and shares that add up to 1 or less"
        )
    drawn = stream(seed, PARTITION).permutation(num_nodes).astype(node_dtype(num_nodes), copy=False)
    bounds = np.cumsum(sizes)
    return {
        part: np.sort(ids).astype(np.int64)
        for part, ids in zip(PARTS, np.split(drawn[: bounds[-1]], bounds[:-1]), strict=True)
    }
