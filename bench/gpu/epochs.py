"""Measure epochs of training on a GPU with different methods of loading, and their stages.

These are parts of `bench/gpu/suite.py`. The graphs are generated with the numbers of nodes, edges,
columns and training nodes of ogbn-products and ogbn-papers100M, and with power-law degrees. The
features are random bytes, because times do not depend on them. All methods train on the same
minibatches with the same number of loading threads. They alternate: a round is some minibatches of
an epoch with each method. The seconds of an epoch are the median time of a minibatch times their
number.

An epoch takes at least as long as the slowest of three stages, which are measured in the same
rounds: `sampling`; `transfer`, zero-copy without a model; and `compute`, the model on a minibatch
that is on the GPU.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from typing import Any, Protocol

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

import gcnzc
from gcnzc.features.cache import cached
from gcnzc.features.table import FeatureTable
from gcnzc.loader.loader import Loader
from gcnzc.loader.transfer import Transfer
from gcnzc.sampling.batch import Batch
from gcnzc.system.spans import Span, Stage
from gcnzc.system.streams import CudaStreams, clock_of
from gcnzc.train.tracing import overlap_share
from gcnzc.tune import pcie_bench

CLASSES = 47
CACHED_SHARE = 0.2
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
ROW_BYTES = (400, 512, 2408)


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


PRODUCTS = Shape("ogbn-products", 2_449_029, 123_718_280, 100, 196_615)
PAPERS = Shape("ogbn-papers100M", 111_059_956, 1_615_685_872, 128, 1_207_179)
SHAPES = (PRODUCTS, PAPERS)
SMALL = (Shape("small", 900, 9000, 12, 600, 2, 1, batch_size=20, fanouts=(3, 2), hidden=8),)


class Bench(Protocol):
    """The part of `bench.gpu.suite.Bench` that this module uses."""

    where: pcie_bench.Gpu
    device: torch.device
    recorded: bool

    def record(self, part: str, case: dict[str, object], **derived: object) -> None:
        """Record one line of results."""


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

    def seconds(self, bench: Bench, number: int) -> float:
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
    bench: Bench, work: Work, tables: dict[str, FeatureTable], shares: tuple[float, ...]
) -> dict[str, Method]:
    """Return the methods that are compared, by name."""
    exact = tables["float32"]

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

    def copied(name: str, share: float) -> Method:
        return Method(work.loader(tables[name], copied_share=share), train)

    [resident] = islice(work.loader(exact), 1)
    methods = {
        "sampling": Method(work.loader(None), nothing),
        "transfer": Method(work.loader(exact), nothing),
        "compute": Method(resident, train),
        "CPU index, pageable copy": Method(work.loader(None), index),
        "CPU gather, page-locked copy": copied("float32", 1.0),
        "CPU gather, page-locked copy, float16": copied("float16", 1.0),
        "zero-copy, blocking": Method(work.loader(None), block),
        "zero-copy": copied("float32", 0.0),
        "zero-copy, float16": copied("float16", 0.0),
        "zero-copy, int8": copied("int8", 0.0),
        f"zero-copy, {CACHED_SHARE:.0%} cached": copied("cached", 0.0),
    }
    for share in shares:
        methods[f"two engines, {share:.0%} by the copy engine"] = copied("float32", share)
    if "device" in tables:
        methods["all features on the GPU"] = copied("device", 0.0)
    return methods


def tables_of(
    bench: Bench, work: Work, memory: Tensor, *, fits: bool
) -> Iterator[tuple[str, FeatureTable]]:
    """Yield tables of each dtype in the same memory, one with a cache, and one on the GPU.

    Args:
        bench: see `Bench`.
        work: the model and its minibatches.
        memory: page-locked, for float32 rows of all nodes.
        fits: whether the GPU has memory for all features.
    """
    shape = work.shape
    size = shape.num_nodes * shape.num_columns

    def rows(dtype: torch.dtype) -> Tensor:
        flat = memory[: size * dtype.itemsize].view(dtype)
        return flat.view(shape.num_nodes, shape.num_columns)

    exact = FeatureTable(rows(torch.float32))
    yield "float32", exact
    yield "float16", FeatureTable(rows(torch.float16))
    yield "int8", FeatureTable(rows(torch.int8), torch.full((shape.num_nodes,), 0.01))
    # rows are ranked by how often they are sources
    popularity = torch.bincount(work.graph.indices[: 1 << 27].long(), minlength=shape.num_nodes)
    yield "cached", cached(exact, CACHED_SHARE, popularity, device=bench.device)
    if fits:
        yield "device", exact.to(bench.device)


def measure_epochs(bench: Bench, locked: Callable[..., Any], shapes: tuple[Shape, ...]) -> None:
    """Measure all methods on all shapes, for GraphSAGE and GAT.

    Args:
        bench: see `Bench`.
        locked: `random_bytes` of bench/gpu/suite.py.
        shapes: shapes of the graphs.
    """
    for shape in shapes:
        graph = graph_of(shape)
        with locked(shape.num_nodes * shape.num_columns * 4) as memory:
            for model in ("SAGE", "GAT"):
                work = Work(bench, shape, graph, model)
                # the features of the larger graph do not fit into the memory of most GPUs
                tables = dict(tables_of(bench, work, memory, fits=shape is not PAPERS))
                methods = methods_of(bench, work, tables, (0.2, 0.4))
                found: dict[str, list[float]] = {name: [] for name in methods}
                for round_index in range(shape.rounds + 1):
                    for name, method in methods.items():
                        seconds = method.seconds(bench, shape.batches)
                        # the first round compiles kernels and allocates memory
                        if round_index > 0:
                            found[name].append(seconds)
                record_epochs(bench, work, model, found)
                del methods, tables, work


def record_epochs(bench: Bench, work: Work, model: str, found: dict[str, list[float]]) -> None:
    """Record one line for each method, with its time relative to the slowest stage and others."""
    shape, batches = work.shape, -(-work.shape.num_seeds // work.shape.batch_size)
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    longest = max(medians[name] for name in ("sampling", "transfer", "compute"))
    baseline = medians["CPU index, pageable copy"]
    case: dict[str, object] = {
        "shape": shape.name,
        "num_nodes": shape.num_nodes,
        "num_edges": work.graph.num_edges,
        "num_columns": shape.num_columns,
        "model": model,
        "fanouts": list(shape.fanouts),
        "threads": num_threads(),
        "batches": shape.batches,
    }
    for name, seconds in medians.items():
        bench.record(
            "epoch",
            {"method": name} | case,
            batch_s=seconds,
            spread_s=max(found[name]) - min(found[name]),
            epoch_s=seconds * batches,
            times_longest_part=seconds / longest,
            faster_than_cpu_index=baseline / seconds,
            share_of_all_on_gpu=(
                medians["all features on the GPU"] / seconds
                if "all features on the GPU" in medians
                else None
            ),
        )


def measure_overlap(bench: Bench, locked: Callable[..., Any], shape: Shape) -> None:
    """Measure how much of the gather overlaps with compute, by look-ahead and priority."""
    graph = graph_of(shape)
    with locked(shape.num_nodes * shape.num_columns * 4) as memory:
        work = Work(bench, shape, graph, "SAGE")
        [(_, table)] = islice(tables_of(bench, work, memory, fits=False), 1)
        now = clock_of(bench.device)
        for ahead in (1, 2, 4, 8, 16):
            for priority in (0, -1):
                stages: list[Stage] = []
                spans: list[Span] = []

                def step(
                    batch: Batch, stages: list[Stage] = stages, spans: list[Span] = spans
                ) -> None:
                    begin = now()
                    assert batch.x is not None, "the loader has a table"
                    work.step(batch, batch.x)
                    stages.extend([*batch.stages, Stage("compute", "model", begin, now())])
                    spans.extend(batch.spans)

                method = Method(work.loader(table, ahead=ahead, priority=priority), step)
                method.seconds(bench, 1)
                stages.clear()
                spans.clear()
                batch_s = method.seconds(bench, shape.batches)
                spans += [stage.span() for stage in stages]
                bench.record(
                    "overlap",
                    {"shape": shape.name, "ahead": ahead, "priority": priority},
                    batch_s=batch_s,
                    gather_under_compute=overlap_share(spans, "gather", "compute"),
                    gather_s=sum(s.end_s - s.begin_s for s in spans if s.name == "gather"),
                    compute_s=sum(s.end_s - s.begin_s for s in spans if s.name == "compute"),
                )


def measure_two_engines(
    bench: Bench,
    memory: Tensor,
    bounds: Callable[[Tensor], dict[str, tuple[int, Callable[[], object]]]],
    payload_bytes: int,
    batches: int,
) -> None:
    """Measure bytes per second of simultaneous reads and copies, by copied share.

    Args:
        bench: see `Bench`.
        memory: page-locked memory for the table.
        bounds: `Bench.bounds` of bench/gpu/suite.py: dense reads, and a copy by the copy engine.
        payload_bytes: bytes of the rows of one minibatch.
        batches: minibatches of a round.
    """
    rates = pcie_bench.measure_rates(bounds(memory), bench.where.seconds, 5)
    for row_bytes in ROW_BYTES:
        table = FeatureTable(memory[: len(memory) // row_bytes * row_bytes].view(-1, row_bytes))
        table = FeatureTable(table.rows.view(torch.float32))
        num_ids = max(1, payload_bytes // row_bytes)
        sampled = [torch.randint(table.num_rows, (num_ids,)) for _ in range(4)]
        for threads in (1, 4, 12):
            for share in SHARES:
                transfer = Transfer(
                    CudaStreams(bench.device), table, share, max_pending=threads + 2
                )
                with started_batches(transfer, sampled, threads) as send:
                    send(batches // 2)
                    torch.cuda.synchronize()
                    began_s = time.perf_counter()
                    send(batches)
                    torch.cuda.synchronize()
                    seconds = time.perf_counter() - began_s
                rate = batches * num_ids * row_bytes / seconds
                bench.record(
                    "two_engines",
                    {"row_bytes": row_bytes, "copied_share": share, "threads": threads},
                    payload_bytes_per_s=rate,
                    share_of_copy_engine=rate / rates["copy engine"],
                    share_of_dense_read=rate / rates["dense read"],
                )


@contextmanager
def started_batches(
    transfer: Transfer, sampled: list[Tensor], threads: int
) -> Iterator[Callable[[int], None]]:
    """Yield a function that copies a number of batches, started by several threads."""

    def batch(number: int) -> Batch:
        ids = transfer.host.empty(sampled[0].shape, torch.int64)
        ids.copy_(sampled[number % len(sampled)])
        return Batch(ids, ids[:0], ())

    with ThreadPoolExecutor(threads) as executor:

        def send(number: int) -> None:
            for pending in executor.map(lambda n: transfer.start(batch(n)), range(number)):
                transfer.wait(pending)

        transfer.order_after_current_stream()
        yield send
    transfer.close()


def parts(locked: Callable[..., Any], *, small: bool) -> dict[str, Callable[[Any], None]]:
    """Return the measurements of this module, for bench/gpu/suite.py."""
    shapes = SMALL if small else SHAPES

    def two_engines(bench: Any) -> None:
        with locked(bench.scale.table_bytes) as memory:
            measure_two_engines(
                bench, memory, bench.bounds, bench.scale.payload_bytes, 4 if small else 40
            )

    return {
        "two-engine": two_engines,
        "overlap": lambda bench: measure_overlap(bench, locked, shapes[0]),
        "epoch": partial(measure_epochs, locked=locked, shapes=shapes[:1]),
        "epoch-large": partial(measure_epochs, locked=locked, shapes=shapes[1:]),
    }
