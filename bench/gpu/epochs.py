"""Measure epochs of training on a GPU with different methods of loading, and their stages.

These are parts of `bench/gpu/suite.py`. The graphs are generated with the numbers of nodes, edges,
columns and training nodes of ogbn-products and ogbn-papers100M, and with power-law degrees. The
features are random bytes, because times do not depend on them. All methods train on the same
minibatches with the same number of loading threads. They alternate: a round is some minibatches of
an epoch with each method. The seconds of an epoch are the median time of a minibatch times their
number. They are recorded after each round: the newest line of a case has all rounds so far.

An epoch takes at least as long as the slowest of three stages, which are measured in the same
rounds: `sampling`; `transfer`, zero-copy without a model; and `compute`, the model on a minibatch
that is on the GPU.

`--quick` measures SAGE on products (`epoch`) and on a quarter of papers100M (`epoch-large`), with
the same degrees, widths and minibatches. Prediction for 16 cores and an H200, in seconds: 30 to
compile the sampler and the kernels of the model; products 5 for graph and features, papers100M 20,
of which locking 14 GB at 2 to 4 GB/s takes 4 to 7; and for each graph 35 for a warm-up, three
rounds and the overlap, at 50 minibatches for each of 7 methods, 15 ms each and 60 ms for `CPU
index`. Together 125.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, repeat
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

import gcnzc
from bench.gpu.base import Bench, random_bytes
from gcnzc.features.cache import cached
from gcnzc.features.table import FeatureTable
from gcnzc.loader.loader import Loader
from gcnzc.sampling.batch import Batch
from gcnzc.system.spans import Stage
from gcnzc.system.streams import clock_of
from gcnzc.train.tracing import overlap_share

CLASSES = 47
CACHED_SHARE = 0.2
# the method whose time is divided by that of a line, by the name of the ratio
RELATIVE = {
    "sampling_share": "sampling",
    "transfer_share": "transfer",
    "compute_share": "compute",
    "faster_than_cpu_gather": "CPU gather, page-locked copy",
    "faster_than_cpu_index": "CPU index, pageable copy",
    "share_of_all_on_gpu": "all features on the GPU",
}


@dataclass(frozen=True)
class Shape:
    """The numbers of a public dataset, and how many of its minibatches are measured."""

    name: str
    num_nodes: int
    num_edges: int
    num_columns: int
    num_seeds: int
    batches: int = 24  # of a round
    rounds: int = 3
    batch_size: int = 1024
    fanouts: tuple[int, ...] = (15, 10, 5)
    hidden: int = 256
    scale: float = 1.0  # of the graph


PRODUCTS = Shape("ogbn-products", 2_449_029, 123_718_280, 100, 196_615)
PAPERS = Shape("ogbn-papers100M", 111_059_956, 1_615_685_872, 128, 1_207_179)
QUARTER = replace(
    PAPERS, num_nodes=27_764_989, num_edges=403_921_468, num_seeds=301_795, scale=0.25
)
SMALL = Shape("small", 900, 9000, 12, 600, 2, 1, batch_size=20, fanouts=(3, 2), hidden=8)
SHAPES = {"full": (PRODUCTS, PAPERS), "quick": (PRODUCTS, QUARTER), "small": (SMALL,)}


@numba.njit(parallel=True, cache=True)
def _sources(indices: NDArray[np.int32], num_nodes: int, step: int) -> None:
    """Sample sources whose popularity is a power of their rank, with ranks in random order."""
    for edge in numba.prange(len(indices)):
        # splitmix64
        bits = np.uint64(edge) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        share = np.float64(bits >> np.uint64(11)) / 2**53
        rank = np.int64(num_nodes * share * share * share)
        indices[edge] = rank * step % num_nodes


def graph_of(shape: Shape) -> gcnzc.Graph:
    """Return a graph of a shape: Pareto in-degrees, power-law sources."""
    rng = np.random.default_rng(0)
    weights = rng.pareto(1.8, shape.num_nodes).astype(np.float32) + 0.3
    degrees = (weights * (shape.num_edges / weights.sum(dtype=np.float64))).astype(np.int64)
    indptr = np.zeros(shape.num_nodes + 1, np.int64)
    np.cumsum(degrees, out=indptr[1:])
    indices = np.empty(indptr[-1], np.int32)
    # prime to any number of nodes above
    _sources(indices, shape.num_nodes, 982_451_653)
    return gcnzc.Graph(torch.from_numpy(indptr), torch.from_numpy(indices))


class Work:
    """A model, and the minibatches of a shape on which it trains."""

    def __init__(self, bench: Bench, shape: Shape, graph: gcnzc.Graph, model: str) -> None:
        torch.manual_seed(0)
        kind: Callable[..., torch.nn.Module] = getattr(gcnzc.models, model)
        self.device, self.shape, self.graph = bench.device, shape, graph
        sizes = (shape.num_columns, shape.hidden, CLASSES)
        self.model = kind(*sizes, num_layers=len(shape.fanouts))
        self.model.to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        stride = shape.num_nodes // shape.num_seeds
        self.seeds = torch.arange(shape.num_seeds) * stride
        self.labels = torch.arange(shape.num_nodes, dtype=torch.int32).remainder_(CLASSES).long()

    def loader(self, table: FeatureTable | None, **options: Any) -> Loader:
        """Return a loader of the minibatches."""
        shape = self.shape
        return Loader(
            self.graph,
            table,
            self.seeds,
            list(shape.fanouts),
            shape.batch_size,
            labels=self.labels,
            device=self.device,
            **{"threads": num_threads()} | options,
        )

    def case(self) -> dict[str, object]:
        """Return the fields of a record that distinguish the graph, the model and minibatches."""
        return {
            "shape": self.shape.name,
            "scale": self.shape.scale,
            "num_nodes": self.shape.num_nodes,
            "num_edges": self.graph.num_edges,
            "num_columns": self.shape.num_columns,
            "model": type(self.model).__name__,
            "fanouts": list(self.shape.fanouts),
            "loader_threads": num_threads(),
            "batches": self.shape.batches,
        }

    def step(self, batch: Batch, x: Tensor) -> None:
        """Train on one minibatch."""
        assert batch.y is not None, "the loader has labels"
        loss = cross_entropy(self.model(batch.blocks, x.float()), batch.y)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()


def num_threads() -> int:
    """Return the number of loading threads: two less than the cores, up to 12."""
    return max(1, min(12, torch.get_num_threads() - 2))


class Method:
    """Minibatches without end, and the function that is called with each."""

    def __init__(self, source: Loader | Batch, step: Callable[[Batch], object]) -> None:
        self.step = step
        if isinstance(source, Batch):
            self.ahead, self.batches = 1, repeat(source)
        else:
            # minibatches that were prefetched while other methods were measured are not timed
            self.ahead = source.ahead + source.threads
            self.batches = chain.from_iterable(repeat(source))

    def seconds(self, number: int) -> float:
        """Measure the seconds per minibatch over a number of minibatches."""
        for batch in islice(self.batches, self.ahead):
            self.step(batch)
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for batch in islice(self.batches, number):
            self.step(batch)
        torch.cuda.synchronize()
        return (time.perf_counter() - began_s) / number


def methods_of(
    bench: Bench, work: Work, memory: Tensor, *, further: bool
) -> dict[str, Callable[[], Method]]:
    """Return functions that start the methods that are compared, by name.

    Args:
        bench: see `Bench`.
        work: the model and its minibatches.
        memory: page-locked, for float32 rows of all nodes.
        further: add methods that transfer fewer bytes, use both engines, or do not overlap.
    """
    exact = table_of(work, memory, torch.float32)

    def train(batch: Batch) -> None:
        assert batch.x is not None, "the loader has a table"
        work.step(batch, batch.x)

    def nothing(batch: Batch) -> None:
        pass

    def index(batch: Batch) -> None:
        # as in most training loops: features are indexed and copied when they are needed
        work.step(batch, exact.rows[batch.nodes.cpu()].to(work.device))

    def block(batch: Batch) -> None:
        x = exact.gather(batch.nodes)
        torch.cuda.synchronize()
        work.step(batch, x)

    def resident() -> Method:
        [batch] = islice(work.loader(exact), 1)
        return Method(batch, train)

    def copied(table: FeatureTable, share: float) -> Method:
        return Method(work.loader(table, copied_share=share), train)

    def with_cache() -> Method:
        # rows are ranked by how often they are sources
        sources = work.graph.indices[: 1 << 27].long()
        popularity = torch.bincount(sources, minlength=work.shape.num_nodes)
        return copied(cached(exact, CACHED_SHARE, popularity, device=bench.device), 0.0)

    methods: dict[str, Callable[[], Method]] = {
        "zero-copy": lambda: copied(exact, 0.0),
        "CPU gather, page-locked copy": lambda: copied(exact, 1.0),
        "CPU index, pageable copy": lambda: Method(work.loader(None), index),
        "all features on the GPU": lambda: copied(exact.to(bench.device), 0.0),
        "sampling": lambda: Method(work.loader(None), nothing),
        "transfer": lambda: Method(work.loader(exact), nothing),
        "compute": resident,
    }
    if not further:
        return methods
    half = table_of(work, memory, torch.float16)
    codes = table_of(work, memory, torch.int8)
    return methods | {
        "CPU gather, page-locked copy, float16": lambda: copied(half, 1.0),
        "zero-copy, blocking": lambda: Method(work.loader(None), block),
        "zero-copy, float16": lambda: copied(half, 0.0),
        "zero-copy, int8": lambda: copied(codes, 0.0),
        f"zero-copy, {CACHED_SHARE:.0%} cached": with_cache,
        "two engines, 20% by the copy engine": lambda: copied(exact, 0.2),
        "two engines, 40% by the copy engine": lambda: copied(exact, 0.4),
    }


def table_of(work: Work, memory: Tensor, dtype: torch.dtype) -> FeatureTable:
    """Return a table of a dtype, with scales if it is int8, at the start of the memory."""
    shape = work.shape
    flat = memory[: shape.num_nodes * shape.num_columns * dtype.itemsize].view(dtype)
    scales = torch.full((shape.num_nodes,), 0.01) if dtype == torch.int8 else None
    return FeatureTable(flat.view(shape.num_nodes, shape.num_columns), scales)


def measure_epochs(bench: Bench, shapes: slice) -> None:
    """Measure methods on some shapes of a scale, and the overlap of zero-copy."""
    is_quick = bench.scale_name == "quick"
    for shape in SHAPES[bench.scale_name][shapes]:
        with bench.attempt("epoch", {"shape": shape.name, "scale": shape.scale}):
            began_s = time.perf_counter()
            graph = graph_of(shape)
            graph_s = time.perf_counter() - began_s
            with random_bytes(shape.num_nodes * shape.num_columns * 4) as memory:
                features_s = time.perf_counter() - began_s - graph_s
                print(shape.name, f"graph {graph_s:.1f} s, features {features_s:.1f} s", flush=True)
                for model in ("SAGE",) if is_quick else ("SAGE", "GAT"):
                    work = Work(bench, shape, graph, model)
                    measure_model(bench, work, memory, further=not is_quick)
                # gathers of the last minibatches, whose loaders have ended, may still read it
                torch.cuda.synchronize()


def measure_model(bench: Bench, work: Work, memory: Tensor, *, further: bool) -> None:
    """Measure methods for a model, and after the first round the overlap of zero-copy."""
    case = work.case()
    methods: dict[str, Method] = {}
    for name, start in methods_of(bench, work, memory, further=further).items():
        with bench.attempt("epoch", {"method": name} | case):
            method = start()
            # compiles kernels and allocates memory
            method.seconds(1)
            methods[name] = method
    found: dict[str, list[float]] = {name: [] for name in methods}
    for round_index in range(work.shape.rounds):
        for name, method in methods.items():
            with bench.attempt("epoch", {"method": name} | case):
                found[name].append(method.seconds(work.shape.batches))
        record_epochs(bench, work, case, found)
        if round_index == 0:
            with bench.attempt("overlap", case):
                record_overlap(bench, work, table_of(work, memory, torch.float32))


def record_epochs(
    bench: Bench, work: Work, case: dict[str, object], found: dict[str, list[float]]
) -> None:
    """Record one line for each method, with its time relative to the slowest stage and others."""
    batches = -(-work.shape.num_seeds // work.shape.batch_size)
    medians = {name: statistics.median(seconds) for name, seconds in found.items() if seconds}
    for name, seconds in medians.items():
        bench.record(
            "epoch",
            {"method": name} | case,
            batch_s=seconds,
            spread_s=max(found[name]) - min(found[name]),
            rounds=len(found[name]),
            epoch_s=seconds * batches,
            # None if the other was not measured
            **{
                field: medians[other] / seconds if other in medians else None
                for field, other in RELATIVE.items()
            },
        )


def record_overlap(bench: Bench, work: Work, table: FeatureTable) -> None:
    """Record the time of gathers by zero-copy, and how much of it is under compute."""
    now = clock_of(bench.device)
    stages: list[list[Stage]] = []  # of each minibatch

    def step(batch: Batch) -> None:
        begin = now()
        assert batch.x is not None, "the loader has a table"
        work.step(batch, batch.x)
        stages.append([*batch.stages, Stage("compute", "model", begin, now())])

    loader = work.loader(table)
    method = Method(loader, step)
    method.seconds(1)
    batch_s = method.seconds(work.shape.batches)
    # not of minibatches that were prefetched while nothing was computed
    spans = [stage.span() for stage in chain(*stages[-work.shape.batches :])]
    bench.record(
        "overlap",
        work.case() | {"ahead": loader.ahead, "priority": loader.priority},
        batch_s=batch_s,
        gather_under_compute=overlap_share(spans, "gather", "compute"),
        gather_s=sum(s.end_s - s.begin_s for s in spans if s.name == "gather"),
        compute_s=sum(s.end_s - s.begin_s for s in spans if s.name == "compute"),
    )


PARTS: dict[str, Callable[[Bench], None]] = {
    "epoch": partial(measure_epochs, shapes=slice(0, 1)),
    "epoch-large": partial(measure_epochs, shapes=slice(1, None)),
}
