"""Minibatch loader of heterogeneous graphs: typed blocks, features by node type, and labels.

Each thread prepares whole minibatches, as those of `gcnzc.Loader`. For a GPU,
`gcnzc.loader.transfer` queues the copies and the gathers on CUDA streams. Neither the minibatches
nor their order depends on the number of threads.
"""

import time
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.graph.times import as_times
from gcnzc.kernels.buffers import Pool
from gcnzc.loader.base import MinibatchLoader, thread_label
from gcnzc.loader.checks import (
    check_labels,
    check_priority,
    check_seeds,
    check_share,
    check_tables_device,
    choose_copied_share,
)
from gcnzc.loader.seed_order import SeedOrder
from gcnzc.loader.state import plain_settings
from gcnzc.loader.transfer import PendingBatch
from gcnzc.sampling.hetero import HeteroBatch, HeteroSampler, build_hetero_blocks
from gcnzc.sampling.hetero_link import HeteroLinkSampler
from gcnzc.sampling.neighbor import check_range
from gcnzc.system.arguments import IdsLike, as_ids, check_device, check_kind, describe
from gcnzc.system.spans import Span

# attributes of the loader that `__reduce__` passes to the constructor, besides the shares
OPTIONS = (
    *("sampler", "labels", "seed_times", "device", "shuffle", "seed", "threads", "ahead"),
    *("copied_share", "priority", "seed_order", "parts"),
)


class HeteroLoader(MinibatchLoader[HeteroBatch]):
    """Load minibatches of a heterogeneous graph: neighbourhoods, features and labels.

    A minibatch is a `gcnzc.sampling.HeteroBatch` with `blocks`, `x`, `y`, `items` and, for link
    prediction, `pairs`. Epochs, iterators, threads, ranks and states are those of `gcnzc.Loader`.

    On a GPU, all tensors of a minibatch but `items` are on the GPU. Minibatches are prefetched:
    they are copied asynchronously, and the GPU gathers features from page-locked tables in place,
    as for `gcnzc.Loader`. Use a minibatch on the stream that was current when it was yielded; see
    `gcnzc.Loader` for other streams.

    Args:
        sampler: samples the neighbourhoods: a `HeteroSampler` for seed nodes, or a
            `HeteroLinkSampler` for pairs of one edge type.
        seeds: for a `HeteroSampler`, a pair of a node type and (S,) ids of its nodes, as a tensor,
            an array or a list. For a `HeteroLinkSampler`, (S,) unique indices of its seed edges;
            None for all.
        batch_size: number of seeds in a minibatch of one rank.
        labels: (S,) or (S, T), one row for each seed node in the order of `seeds`; None for
            minibatches without `y`.
        seed_times: (S,) times of the seed nodes in the order of `seeds`, for temporal sampling:
            integers in the unit of the graph's times; or dates, which are rounded down to this
            unit, if `graph.time_unit` is set. Default: those of the nodes.
        tables: features by node type. Default: those of the graph. Node types without a table are
            not in `x`. For a GPU, put the rows of each table in its memory, cache them with
            `gcnzc.cached`, or page-lock them with `gcnzc.pinned`. Sparse rows, and rows the GPU
            cannot read (see `gcnzc.features.can_read_host`), are gathered on the host and copied.
        device: device of the minibatches.
        copied_share: fraction of each node type's rows, from 0 to 1, that a thread gathers on the
            host, and the copy engine copies; the gather kernel reads the others. With 1 the tables
            need not be page-locked. Does not change the minibatches; unused for tables on `device`.
        priority: CUDA priority of the streams that copy and gather minibatches, see `gcnzc.Loader`.
        shuffle, drop_last, seed, rank, world_size, threads, ahead, may_be_empty, seed_order: see
            `gcnzc.Loader`. `seed` is of the order of the seeds; the sampler has its own.
        parts: with `seed_order="local"`, (S,) the part of each seed in [0, world_size); for a
            `HeteroLinkSampler`, of each of its seed edges.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or does not fit another.
    """

    def __init__(
        self,
        sampler: HeteroSampler | HeteroLinkSampler,
        seeds: tuple[str, IdsLike] | IdsLike | None,
        batch_size: int,
        *,
        labels: Any = None,
        seed_times: Any = None,
        tables: Mapping[str, FeatureTable] | None = None,
        device: torch.device | str = "cpu",
        copied_share: float = 0.0,
        priority: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        threads: int | None = None,
        ahead: int | None = None,
        may_be_empty: bool = False,
        seed_order: SeedOrder = "shuffled",
        parts: IdsLike | None = None,
    ) -> None:
        set_by_subclass = set(vars(self))
        if not isinstance(sampler, HeteroSampler | HeteroLinkSampler):
            raise TypeError(f"sampler is {describe(sampler)}, not a HeteroSampler")
        self.sampler: HeteroSampler | HeteroLinkSampler = sampler
        self.graph: Graph = sampler.graph
        self.tables = _check_tables(self.graph, tables)
        self.copied_share = check_share(copied_share)
        self.device = check_tables_device(
            check_device("device", device), self.tables, self.copied_share
        )
        self.priority = check_priority(priority)
        if isinstance(sampler, HeteroLinkSampler):
            if labels is not None or seed_times is not None:
                name = "labels" if labels is not None else "seed_times"
                raise ValueError(
                    f"{name} are of seed nodes, and the sampler samples pairs of nodes\n\n"
                    "hint: HeteroLinkSampler has the times of its edges, and labels its pairs"
                )
            count = sampler.num_items
            given: Any = torch.arange(count) if seeds is None else seeds
            self._node_type, self._ids = "", check_seeds(given, count, count, may_be_empty=True)
            self.labels = self.seed_times = None
            order, num_items = self._ids, sampler.num_items
        else:
            self._node_type, self._ids = _check_seed_nodes(seeds, self.graph, may_be_empty)
            self.labels = check_labels(labels, len(self._ids), "seeds")
            self.seed_times = self._check_seed_times(seed_times)
            order, num_items = torch.arange(len(self._ids)), len(self._ids)
        self._set_order(
            order,
            num_items,
            batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            rank=rank,
            world_size=world_size,
            threads=threads,
            ahead=ahead,
            may_be_empty=may_be_empty,
            seed_order=seed_order,
            parts=parts,
        )
        if self.device.type == "cuda":
            shares = {
                name: choose_copied_share(self.device, table, self.copied_share)
                for name, table in self.tables.items()
            }
            self._transfer = self._open_transfer(self.tables, shares, self.priority)
        self._host_pool = Pool() if self._transfer is None else self._transfer.host
        self._remember_own_attributes(set_by_subclass)

    def _constructor(self) -> tuple[type["HeteroLoader"], dict[str, Any]]:
        options = {name: getattr(self, name) for name in OPTIONS}
        seeds = (self._node_type, self._ids) if self._node_type else self._ids
        return HeteroLoader, options | {"seeds": seeds, "tables": self.tables}

    def _settings_to_match(self) -> dict[str, Any]:
        times = b"" if self.seed_times is None else self.seed_times.numpy().tobytes()
        return {
            **super()._settings_to_match(),
            "seeds_crc32": zlib.crc32(self._ids.numpy().data),
            "seed_times_crc32": zlib.crc32(times),
            "seed_type": self._node_type,
            **plain_settings(self.sampler.settings),
        }

    def _check_seed_times(self, given: Any) -> Tensor | None:
        sampler = self.sampler
        assert isinstance(sampler, HeteroSampler)
        if sampler.temporal is None:
            if given is not None:
                raise ValueError("seed_times are given, but the sampler ignores times")
            return None
        if given is not None:
            unit = self.graph.time_unit
            return as_times("seed_times", given, len(self._ids), unit, is_limit=True)
        own = self.graph.nodes(self._node_type).time
        if own is None:
            raise ValueError(
                f"the seeds of node type {self._node_type!r} have no times, since the type has none"
            )
        return own[self._ids]

    def _prepare(self, seeds: Tensor, epoch: int) -> HeteroBatch | PendingBatch[HeteroBatch]:
        """Prepare one minibatch, in one of the loader's threads."""
        began_s = time.perf_counter()
        batch = self._sample(seeds, epoch)
        batch.blocks = build_hetero_blocks(batch, empty=self._host_pool.empty)
        batch.items = seeds
        sampled_s, thread = time.perf_counter(), thread_label()
        batch.times["sample_s"] = sampled_s - began_s
        batch.spans = [Span("sample", thread, began_s, sampled_s)]
        if self._transfer is not None:
            return self._transfer.start(batch)
        batch.x = {name: self._gather(name, batch.nodes[name]) for name in self.tables}
        ended_s = time.perf_counter()
        batch.times["gather_s"] = ended_s - sampled_s
        batch.spans.append(Span("gather", thread, sampled_s, ended_s))
        return batch

    def _sample(self, seeds: Tensor, epoch: int) -> HeteroBatch:
        if isinstance(self.sampler, HeteroLinkSampler):
            return self.sampler.sample(seeds, epoch)
        times = None if self.seed_times is None else self.seed_times[seeds]
        batch = self.sampler.sample((self._node_type, self._ids[seeds]), epoch, times)
        if self.labels is not None:
            shape = (len(seeds), *self.labels.shape[1:])
            out = self._host_pool.empty(shape, self.labels.dtype)
            batch.y = torch.index_select(self.labels, 0, seeds, out=out)
        return batch

    def _gather(self, node_type: str, nodes: Tensor) -> Tensor:
        table = self.tables[node_type]
        out = self._host_pool.empty((len(nodes), table.num_columns), table.dtype)
        return table.gather(nodes, out, threads=1)


def _check_tables(
    graph: Graph, given: Mapping[str, FeatureTable] | None
) -> dict[str, FeatureTable]:
    if given is None:
        own = {name: graph.nodes(name).table for name in graph.node_types}
        return {name: table for name, table in own.items() if table is not None}
    check_kind("tables", given, Mapping, "{'paper': FeatureTable(rows)}")
    for name, table in given.items():
        check_kind(f"tables[{name!r}]", table, FeatureTable, "gcnzc.FeatureTable(rows)")
        if table.num_rows != graph.nodes(name).num_nodes:
            raise ValueError(
                f"tables[{name!r}] has {table.num_rows} rows, but the type has "
                f"{graph.nodes(name).num_nodes} nodes"
            )
    return dict(given)


def _check_seed_nodes(given: Any, graph: Graph, may_be_empty: bool) -> tuple[str, Tensor]:
    if not isinstance(given, tuple) or len(given) != 2 or not isinstance(given[0], str):
        raise TypeError(f"seeds is {describe(given)}, not a pair of a node type and ids")
    node_type, ids = given
    name = f"seeds of node type {node_type!r}"
    found = as_ids(name, ids, "a mask becomes ids by .nonzero().flatten()").cpu().contiguous()
    check_range(name, found, graph.nodes(node_type).num_nodes, "it has {} nodes", "node ids")
    if len(found) == 0 and not may_be_empty:
        raise ValueError(f"{name} are empty: no batches\n\nhint: is the split empty?")
    return node_type, found
