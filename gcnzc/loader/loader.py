"""Minibatch loader: shuffles the seeds, and prefetches batches with their features.

Each thread prepares whole batches: it samples neighbours, gathers features and selects
labels, in compiled code that releases the GIL and runs in parallel to the model. For a GPU,
`gcnzc.loader.transfer` queues the copies and the gather on CUDA streams. Neither the batches nor
their order depends on the number of threads.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.kernels.buffers import Pool
from gcnzc.kernels.threads import ForkSafeLock
from gcnzc.loader.base import MinibatchLoader, thread_label
from gcnzc.loader.checks import (
    check_labels,
    check_loader_device,
    check_priority,
    check_sampler,
    check_seeds,
    check_share,
    check_table,
    choose_copied_share,
)
from gcnzc.loader.seed_order import (
    SeedOrder,
)
from gcnzc.loader.transfer import PendingBatch
from gcnzc.sampling.batch import Batch, Block
from gcnzc.sampling.neighbor import Sampler, SamplerProtocol, check_graph
from gcnzc.system.arguments import (
    IdsLike,
    check_device,
    check_flag,
    check_kind,
    check_seed,
)
from gcnzc.system.spans import Span

# attributes of the loader that `__reduce__` passes to the constructor, besides the shares
OPTIONS = (
    *("graph", "table", "seeds", "labels", "device", "shuffle", "seed", "threads", "ahead"),
    *("sampler", "copied_share", "priority", "in_degrees", "seed_order", "parts"),
)


class Loader(MinibatchLoader[Batch]):
    """Load batches of seeds with their neighbourhoods, features and labels.

    Each iteration over the loader yields the batches of one epoch, and the next iteration those of
    the next epoch. If an iteration stops early, the next one starts the same epoch again, unless
    `set_epoch` sets another; the drop-in loaders start the next epoch instead. If the epoch was
    resumed with another batch size or world size, only its part after that point is repeated.

    Each iterator has its own threads, which end after the last batch, on an exception or Ctrl-C, on
    `close`, and when the iterator is deleted, for example after a `break`. Several threads may
    share an iterator; each batch goes to one of them. A forked child process may iterate over a
    loader whose device is the CPU. An iterator works only in the process that created it.

    `copy.deepcopy` and `pickle` create a loader with the same arguments and the same position. The
    copy of rows on the host is in ordinary memory, not page-locked or mapped, so a loader whose GPU
    reads dense rows from host memory cannot be copied; construct another with the same table.

    Use a batch on the stream that was current when it was yielded. To use it on another stream,
    make that stream wait for the current one first. Synchronize with the other stream before you
    drop the last reference to the batch: its memory is reused without waiting for that stream.

    Args:
        graph: the graph whose neighbours are sampled, on the host.
        table: features, one row per node; None for batches without `x`. For a GPU, put the rows in
            its memory or page-lock them with `gcnzc.pinned`. Sparse rows, and rows the GPU cannot
            read (see `gcnzc.features.can_read_host`), are gathered on the host and copied.
        seeds: (S,) unique node ids, as a tensor, an array or a list. If `sampler` has the attribute
            `num_items`, they are indices of its items, such as edges, in [0, num_items).
        fanouts: number of neighbours sampled per node in each layer, input layer first, the reverse
            of PyG's `num_neighbors`; see `gcnzc.Sampler`. Unused if `sampler` is given; pass `()`.
        batch_size: number of seeds in a batch of one rank.
        labels: (N,) or (N, T), one row per node, a tensor or an array; None for batches without
            `y`.
        device: device of the batches.
        shuffle: shuffle the seeds each epoch. Default: True, unlike torch's `DataLoader`.
        drop_last: drop the last step if it is not full; a step has one batch on each rank.
        seed: random seed of the shuffling and, unless `sampler` is given, of the sampling; a 64-bit
            integer.
        rank, world_size: this process's rank and the number of ranks, among which the seeds are
            divided; see `Shares`. They are not read from torchrun or torch.distributed: by default
            every process gets all seeds, as with the loaders of PyG and DGL.
        threads: number of threads that prepare batches. Default: one per core, at most four; ranks
            on one machine share its cores. Always 1 if the sampler is not `thread_safe`.
        ahead: number of batches that are prefetched: ready or in preparation. Default: one more
            than `threads`.
        sampler: samples the neighbourhoods. Default: `gcnzc.Sampler(graph, fanouts, seed)`.
        copied_share: fraction of each batch's rows, from 0 to 1, that a thread gathers on the host,
            and the copy engine copies; the gather kernel reads the others. With 1 the table need
            not be page-locked. Does not change the batches; unused if the table is on `device`.
        priority: CUDA priority of the streams that copy and gather batches, at most 0. 0 is the
            default priority of CUDA streams; -1 is higher.
        in_degrees: add the in-degrees of nodes to the blocks, for models such as GCN. Otherwise
            such a model computes them on the host, which synchronizes with the GPU.
        may_be_empty: allow an epoch with no batches: there are no seeds, or `drop_last` drops the
            only step.
        seed_order: the seeds on which each rank trains in an epoch: random seeds ("shuffled"); one
            of `world_size` random chunks, another one in each epoch ("rotating"); or those of its
            part of the graph ("local"). In each of them an epoch is one pass over all seeds by all
            ranks together. See `gcnzc.loader.seed_order`.
        parts: with `seed_order="local"`, (N,) the part of each node in [0, world_size), as a
            tensor, an array or a list, the same on every rank; see `gcnzc.graph.partition_graph`.
            Rank r trains on the seeds of part r. Seeds of parts with more seeds than the others
            move to other ranks, so that all have equally many. If `sampler` has the attribute
            `num_items`, the part of each item.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or does not fit another.
    """

    def __init__(
        self,
        graph: Graph,
        table: FeatureTable | None,
        seeds: IdsLike,
        fanouts: Sequence[int],
        batch_size: int,
        labels: Tensor | NDArray[Any] | None = None,
        device: torch.device | str = "cpu",
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        threads: int | None = None,
        ahead: int | None = None,
        sampler: SamplerProtocol | None = None,
        copied_share: float = 0.0,
        priority: int = 0,
        in_degrees: bool = False,
        may_be_empty: bool = False,
        seed_order: SeedOrder = "shuffled",
        parts: IdsLike | None = None,
    ) -> None:
        set_by_subclass = set(vars(self))
        check_graph(graph)
        if table is not None:
            check_kind("table", table, FeatureTable, "gcnzc.FeatureTable(rows), or None")
        self.graph = graph
        self.table = table
        seed = check_seed("seed", seed)
        self.sampler = Sampler(graph, fanouts, seed) if sampler is None else check_sampler(sampler)
        limit = getattr(self.sampler, "num_items", None)
        seeds = check_seeds(seeds, graph.num_nodes, limit, check_flag("may_be_empty", may_be_empty))
        # labels stay on the host, where the loader's threads select the rows of a batch
        self.labels = check_labels(labels, graph.num_nodes, "nodes")
        check_table(graph, table)
        self.copied_share = check_share(copied_share)
        self.device = check_loader_device(check_device("device", device), table, copied_share)
        self.in_degrees = check_flag("in_degrees", in_degrees)
        self._set_order(
            seeds,
            graph.num_nodes if limit is None else limit,
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
        self.priority = check_priority(priority)
        if self.device.type == "cuda":
            share = choose_copied_share(self.device, table, self.copied_share)
            self._transfer = self._open_transfer(table, share, self.priority)
        self._host_pool = Pool() if self._transfer is None else self._transfer.host
        safe = getattr(self.sampler, "thread_safe", True)
        self._sampling_lock: AbstractContextManager = nullcontext() if safe else ForkSafeLock()
        self._remember_own_attributes(set_by_subclass)

    def _constructor(self) -> tuple[type["Loader"], dict[str, Any]]:
        return Loader, {name: getattr(self, name) for name in OPTIONS} | {"fanouts": ()}

    def nodes_read_in_place(self, nodes: Tensor) -> Tensor:
        """Return the nodes of a batch whose rows the GPU's gather kernel reads in place.

        The rows of the others are gathered on the host and copied. On a CPU, return all nodes.
        """
        return nodes if self._transfer is None else self._transfer.nodes_read_in_place(nodes)

    def _prepare(self, seeds: Tensor, epoch: int) -> Batch | PendingBatch[Batch]:
        """Prepare one batch, in one of the loader's threads."""
        began_s = time.perf_counter()
        with self._sampling_lock:
            batch = self.sampler.sample(seeds, epoch)
        batch.items = seeds
        if self.in_degrees:
            batch.blocks = self._with_degrees(batch.blocks)
        sampled_s, thread = time.perf_counter(), thread_label()
        batch.times["sample_s"] = sampled_s - began_s
        batch.spans = [Span("sample", thread, began_s, sampled_s)]
        if self.labels is not None and batch.y is None:
            y = self._host_pool.empty((len(batch.seeds), *self.labels.shape[1:]), self.labels.dtype)
            batch.y = torch.index_select(self.labels, 0, batch.seeds, out=y)
        if self._transfer is not None:
            return self._transfer.start(batch)
        batch.x = self._gather(batch)
        ended_s = time.perf_counter()
        batch.times["gather_s"] = ended_s - sampled_s
        batch.spans.append(Span("gather", thread, sampled_s, ended_s))
        return batch

    def _with_degrees(self, blocks: tuple[Block, ...]) -> tuple[Block, ...]:
        # the nodes of every block are a prefix of those of the input layer's block
        nodes, indptr = blocks[0].nodes, self.graph.indptr
        degrees = self._host_pool.empty(nodes.shape, indptr.dtype)
        torch.index_select(indptr[1:], 0, nodes, out=degrees)
        degrees -= indptr[:-1][nodes]
        return tuple(replace(block, degrees=degrees[: block.num_src]) for block in blocks)

    def _gather(self, batch: Batch) -> Tensor | None:
        if self.table is None:
            return None
        shape = (len(batch.nodes), self.table.num_columns)
        out = self._host_pool.empty(shape, self.table.dtype)
        return self.table.gather(batch.nodes, out, threads=1)
