"""Measure gathers and loading of minibatches on this machine, for one graph and table."""

import math
import time
from dataclasses import dataclass, replace

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

BATCHES = 12  # minibatches per timed epoch; a multiple of most numbers of threads in `THREADS`


# least time of a measurement, and most epochs to reach it
MIN_MEASURED_S, MAX_EPOCHS = 0.3, 50


KERNEL_BATCHES = 4  # minibatches per timed gather on a GPU


CHECKED_IDS = 1000


DEFAULT_DEGREE, DEFAULT_TABLE_BYTES, DEFAULT_MAX_ROWS = 10, 1 << 27, 1 << 19


@dataclass(frozen=True)
class Case:
    """The workload to measure: a graph, a table and the options of a loader."""

    name: str
    graph: Graph
    table: FeatureTable  # on the host
    seeds: Tensor  # (S,) ids of training nodes
    labels: Tensor | None
    fanouts: tuple[int, ...]
    batch_size: int
    is_real: bool = True  # False for a random graph, for which hit rates cannot be predicted


@dataclass(frozen=True)
class LoaderSettings:
    """Settings of a `gcnzc.Loader` and of its gather kernel."""

    threads: int
    ahead: int
    copied_share: float = 0.0
    kernel_config: KernelConfig | None = None


class Machine:
    """Measurements on this machine; all return mean seconds per minibatch.

    Args:
        case: the workload; for a GPU, its table must be inside `gcnzc.pinned`.
        device: device that receives the minibatches.
        gpu: the GPU, if it can read host memory.
    """

    def __init__(self, case: Case, device: torch.device, gpu: pcie_bench.Gpu | None) -> None:
        self.case, self.device, self.gpu = case, device, gpu
        self.has_gpu = gpu is not None
        seeds = epoch_order(case.seeds, 0, 0)
        self.seeds = seeds[: BATCHES * case.batch_size]
        self._checked: set[KernelConfig] = set()
        self._epochs: int | None = None  # number of epochs to measure
        if gpu is not None:
            self._prepare(seeds, gpu)

    def _prepare(self, seeds: Tensor, gpu: pcie_bench.Gpu) -> None:
        case = self.case
        sampler = Sampler(case.graph, case.fanouts)
        parts = seeds.split(case.batch_size)[:KERNEL_BATCHES]
        self.host_ids = [sampler.sample(part, 0).nodes for part in parts]
        self.ids = [nodes.to(gpu.device) for nodes in self.host_ids]
        longest, columns = max(map(len, self.ids)), case.table.num_columns
        self.out = torch.empty(longest, columns, dtype=case.table.dtype, device=gpu.device)
        rows = case.table.rows
        pin = gpu.device.type == "cuda"
        self.staging = torch.empty(longest, columns, dtype=rows.dtype, pin_memory=pin)
        self.copied = torch.empty_like(self.staging, device=gpu.device)

    def gather_s(self, kernel_config: KernelConfig) -> float:
        """Time the GPU's zero-copy gather of the rows from host memory."""
        assert self.gpu is not None, "there is a GPU"
        if kernel_config not in self._checked:
            self._check_rows(kernel_config)
        taken_s = self.gpu.seconds(lambda: [self._gather(ids, kernel_config) for ids in self.ids])
        return taken_s / len(self.ids)

    def copy_s(self) -> float:
        """Time a copy of the same number of bytes from page-locked memory to the GPU."""
        assert self.gpu is not None, "there is a GPU"

        def copy() -> None:
            for ids in self.ids:
                self.copied[: len(ids)].copy_(self.staging[: len(ids)], non_blocking=True)

        return self.gpu.seconds(copy) / len(self.ids)

    def host_s(self, threads: int) -> float:
        """Time the CPU's gather of the rows into page-locked memory."""
        plain = FeatureTable(self.case.table.rows)
        begin_s = time.perf_counter()
        for ids in self.host_ids:
            plain.gather(ids, self.staging[: len(ids)], threads=threads)
        return (time.perf_counter() - begin_s) / len(self.host_ids)

    def batch_s(self, loading: LoaderSettings) -> float:
        """Time the loader from one minibatch to the next, without a model."""
        case = self.case
        loader = Loader(
            case.graph,
            replace(case.table, kernel_config=loading.kernel_config),
            self.seeds,
            case.fanouts,
            case.batch_size,
            labels=case.labels,
            device=self.device,
            shuffle=False,
            threads=loading.threads,
            ahead=loading.ahead,
            copied_share=loading.copied_share,
        )
        # warm-up, which allocates the buffers that later epochs reuse
        self._epoch_s(loader)
        if self._epochs is None:
            self._epochs = min(MAX_EPOCHS, math.ceil(MIN_MEASURED_S / self._epoch_s(loader)))
        taken_s = sum(self._epoch_s(loader) for _ in range(self._epochs))
        return taken_s / (self._epochs * len(loader))

    def _epoch_s(self, loader: Loader) -> float:
        # the same minibatches for each measurement
        loader.set_epoch(0)
        begin_s = time.perf_counter()
        for batch in loader:
            del batch
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begin_s

    def _gather(self, ids: Tensor, kernel_config: KernelConfig | None) -> Tensor:
        table = self.case.table
        return gather_rows(
            table.rows,
            ids,
            self.out[: len(ids)],
            scales=table.scales_on(ids.device),
            scale_columns=table.scale_columns,
            config=kernel_config,
        )

    def _check_rows(self, kernel_config: KernelConfig) -> None:
        some = self.host_ids[0][:CHECKED_IDS]
        expected = self.case.table.gather(some)
        found = self._gather(some.to(self.out.device), kernel_config).cpu()
        pcie_bench.check_rows(found, expected, f"with {kernel_config}", self.device)
        self._checked.add(kernel_config)


def case_of(data: Dataset, fanouts: tuple[int, ...], batch_size: int) -> Case:
    """Return the workload of training on a dataset.

    Raises:
        ValueError: the dataset has no features.
    """
    if data.table is None or data.table.num_columns == 0:
        raise ValueError(
            f"{data.name} has no features to gather\n\n"
            f"hint: `gcnzc prepare {data.folder} DEST --embed 64` computes features from its edges"
        )
    seeds = data.split.get("train", torch.empty(0))
    if len(seeds) == 0:
        # a dataset for link prediction has no labelled nodes
        seeds = torch.arange(data.graph.num_nodes)
    return Case(data.name, data.graph, data.table, seeds, data.labels, fanouts, batch_size)


def default_case(row_bytes: int, fanouts: tuple[int, ...], batch_size: int) -> Case:
    """Return a synthetic workload: a random graph with a table of float32 rows.

    Args:
        row_bytes: size of a row, a multiple of 4.
        fanouts: see `gcnzc.Sampler`.
        batch_size: seeds per minibatch.
    """
    num_rows = max(1024, min(DEFAULT_MAX_ROWS, DEFAULT_TABLE_BYTES // row_bytes))
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(num_rows, (2, DEFAULT_DEGREE * num_rows), generator=generator)
    graph = Graph.from_edges(edges[0], edges[1], num_rows)
    # ones are written, so that every page is allocated
    table = FeatureTable(torch.ones(num_rows, row_bytes // 4))
    name = f"{num_rows:,} rows of {row_bytes} B, random graph"
    nodes = torch.randperm(num_rows, generator=generator)
    return Case(name, graph, table, nodes, None, fanouts, batch_size, is_real=False)
