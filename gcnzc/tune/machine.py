"""Measurements on this machine: gathers and loading of one table and graph."""

import math
import time
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.graph.dataset import Dataset
from gcnzc.graph.graph import Graph
from gcnzc.kernels.gather.gpu import KernelConfig, gather_rows
from gcnzc.loader.loader import Loader
from gcnzc.loader.seeds import epoch_order
from gcnzc.sampling.neighbor import Sampler
from gcnzc.tune import pcie_bench

BATCHES = 12  # of the loader that are timed at a time; all of `THREADS` but 8 divide it


LEAST_S, MOST_EPOCHS = 0.3, 50  # that the loader is timed for, as many times over as that takes


KERNEL_BATCHES = 4  # whose rows a GPU gathers at a time


CHECKED_IDS = 1000


USUAL_DEGREE, USUAL_BYTES, USUAL_MOST_ROWS = 10, 1 << 27, 1 << 19


@dataclass(frozen=True)
class Case:
    """What a run would do."""

    name: str
    graph: Graph
    table: FeatureTable  # on the host
    seeds: Tensor  # (S,) ids of training nodes
    labels: Tensor | None
    fanouts: tuple[int, ...]
    batch_size: int
    seed: int = 0
    is_real: bool = True  # or a graph at random, of which no hot set can be predicted


@dataclass(frozen=True)
class LoaderSettings:
    """Settings of a `Loader` and of the GPU's gather in it."""

    threads: int
    ahead: int
    copied_share: float = 0.0
    way: KernelConfig | None = None


class Bench(Protocol):
    """What is timed. All times are seconds, for one minibatch on average."""

    has_gpu: bool  # that reads the host's memory

    def gather_s(self, way: KernelConfig) -> float:
        """The GPU's own gather of the rows."""

    def copy_s(self) -> float:
        """The copy engine's copy of as many bytes."""

    def host_s(self, threads: int) -> float:
        """The CPU's gather of the rows into memory that the copy engine reads."""

    def batch_s(self, loading: LoaderSettings) -> float:
        """The whole loader, from one minibatch handed out to the next, without a model."""


class Machine:
    """The `Bench` that this machine is.

    Args:
        case: what is done; for a GPU with its table inside `gcnzc.pinned`.
        device: that gets the minibatches.
        where: the GPU, if it reads the table by itself.
    """

    def __init__(self, case: Case, device: torch.device, where: pcie_bench.Gpu | None) -> None:
        self.case, self.device, self.where = case, device, where
        self.has_gpu = where is not None
        seeds = epoch_order(case.seeds, case.seed, 0)
        self.seeds = seeds[: BATCHES * case.batch_size]
        self._checked: set[KernelConfig] = set()
        self._epochs: int | None = None  # that make a time long enough to count
        if where is not None:
            self._prepare(seeds, where)

    def _prepare(self, seeds: Tensor, where: pcie_bench.Gpu) -> None:
        case = self.case
        sampler = Sampler(case.graph, case.fanouts, case.seed)
        parts = seeds.split(case.batch_size)[:KERNEL_BATCHES]
        self.host_ids = [sampler.sample(part, 0).nodes for part in parts]
        self.ids = [nodes.to(where.device) for nodes in self.host_ids]
        longest, columns = max(map(len, self.ids)), case.table.num_columns
        self.out = torch.empty(longest, columns, dtype=case.table.dtype, device=where.device)
        rows = case.table.rows
        pin = where.device.type == "cuda"
        self.staging = torch.empty(longest, columns, dtype=rows.dtype, pin_memory=pin)
        self.copied = torch.empty_like(self.staging, device=where.device)

    def gather_s(self, way: KernelConfig) -> float:
        """See `Bench`."""
        assert self.where is not None, "there is a GPU"
        if way not in self._checked:
            self._check_rows(way)
        taken_s = self.where.seconds(lambda: [self._gather(ids, way) for ids in self.ids])
        return taken_s / len(self.ids)

    def copy_s(self) -> float:
        """See `Bench`."""
        assert self.where is not None, "there is a GPU"

        def copy() -> None:
            for ids in self.ids:
                self.copied[: len(ids)].copy_(self.staging[: len(ids)], non_blocking=True)

        return self.where.seconds(copy) / len(self.ids)

    def host_s(self, threads: int) -> float:
        """See `Bench`."""
        plain = FeatureTable(self.case.table.rows)
        begin_s = time.perf_counter()
        for ids in self.host_ids:
            plain.gather(ids, self.staging[: len(ids)], threads=threads)
        return (time.perf_counter() - begin_s) / len(self.host_ids)

    def batch_s(self, loading: LoaderSettings) -> float:
        """See `Bench`."""
        case = self.case
        loader = Loader(
            case.graph,
            replace(case.table, way=loading.way),
            self.seeds,
            case.fanouts,
            case.batch_size,
            labels=case.labels,
            device=self.device,
            shuffle=False,
            seed=case.seed,
            threads=loading.threads,
            ahead=loading.ahead,
            copied_share=loading.copied_share,
        )
        # once for the memory that the loader then uses again
        self._epoch_s(loader)
        if self._epochs is None:
            self._epochs = min(MOST_EPOCHS, math.ceil(LEAST_S / self._epoch_s(loader)))
        taken_s = sum(self._epoch_s(loader) for _ in range(self._epochs))
        return taken_s / (self._epochs * len(loader))

    def _epoch_s(self, loader: Loader) -> float:
        # the same minibatches each time
        loader.set_epoch(0)
        begin_s = time.perf_counter()
        for batch in loader:
            del batch
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begin_s

    def _gather(self, ids: Tensor, way: KernelConfig | None) -> Tensor:
        table = self.case.table
        return gather_rows(
            table.rows,
            ids,
            self.out[: len(ids)],
            scales=table.scales_on(ids.device),
            scale_columns=table.scale_columns,
            config=way,
        )

    def _check_rows(self, way: KernelConfig) -> None:
        some = self.host_ids[0][:CHECKED_IDS]
        expected = self.case.table.gather(some)
        found = self._gather(some.to(self.out.device), way).cpu()
        if not torch.equal(found.view(torch.uint8), expected.view(torch.uint8)):
            raise RuntimeError(
                f"a gather as {way} brought wrong rows on {self.device}\n\n"
                "hint: `pytest -m gpu` finds the kernel that fails"
            )
        self._checked.add(way)


def case_of(data: Dataset, fanouts: tuple[int, ...], batch_size: int) -> Case:
    """The case of training on `data`.

    Raises:
        ValueError: it has no features.
    """
    if data.table is None or data.table.num_columns == 0:
        raise ValueError(
            f"{data.name} has no features to gather\n\n"
            f"hint: `gcnzc embed {data.folder} DEST` makes some from its edges"
        )
    seeds = data.split.get("train", torch.empty(0))
    if len(seeds) == 0:
        # of a graph whose edges are what is learned
        seeds = torch.arange(data.graph.num_nodes)
    return Case(data.name, data.graph, data.table, seeds, data.labels, fanouts, batch_size)


def default_case(row_bytes: int, fanouts: tuple[int, ...], batch_size: int) -> Case:
    """A table of float32 rows that begin on lines, and a graph at random.

    Args:
        row_bytes: of a row, a multiple of 4.
        fanouts: see `gcnzc.Sampler`.
        batch_size: seeds of a minibatch.

    Raises:
        ValueError: `row_bytes` are not whole elements.
    """
    if row_bytes < 4 or row_bytes % 4:
        raise ValueError(
            f"rows of {row_bytes} bytes are not whole elements of float32\n\n"
            "hint: 512 are ogbn-papers100M's rows, 400 ogbn-products'"
        )
    num_rows = max(1024, min(USUAL_MOST_ROWS, USUAL_BYTES // row_bytes))
    chooser = torch.Generator().manual_seed(0)
    edges = torch.randint(num_rows, (2, USUAL_DEGREE * num_rows), generator=chooser)
    graph = Graph.from_edges(edges[0], edges[1], num_rows)
    # written, so that every page is there
    table = FeatureTable(torch.ones(num_rows, row_bytes // 4))
    name = f"{num_rows:,} rows of {row_bytes} B at random"
    nodes = torch.randperm(num_rows, generator=chooser)
    return Case(name, graph, table, nodes, None, fanouts, batch_size, is_real=False)
