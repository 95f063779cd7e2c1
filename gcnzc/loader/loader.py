"""Minibatch loader: shuffles the seeds, and prefetches batches with their features.

Each thread prepares whole batches: it samples neighbours, gathers features and selects
labels, in compiled code that releases the GIL and runs in parallel to the model. For a GPU,
`gcnzc.loader.transfer` queues the copies and the gather on CUDA streams. Neither the batches nor
their order depends on the number of threads.
"""

import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.graph.times import as_times
from gcnzc.kernels.buffers import Pool
from gcnzc.kernels.threads import ForkSafeLock
from gcnzc.loader.checks import (
    check_labels,
    check_loader_device,
    check_priority,
    check_sampler,
    check_seed_nodes,
    check_seeds,
    check_share,
    check_tables,
    check_threads,
    choose_copied_share,
)
from gcnzc.loader.seed_order import (
    Division,
    SeedOrder,
    check_order,
    check_parts,
    chunk_offset,
    order_seeds,
    resumed_division,
)
from gcnzc.loader.seeds import Shares
from gcnzc.loader.state import PARTITION, check_position, check_state, plain_settings
from gcnzc.loader.transfer import PendingBatch, Transfer
from gcnzc.sampling.batch import Block
from gcnzc.sampling.hetero import HeteroBatch, build_hetero_blocks
from gcnzc.sampling.neighbor import Sampler, check_graph
from gcnzc.system.arguments import (
    IdsLike,
    check_device,
    check_epoch,
    check_flag,
    check_integer,
    check_seed,
)
from gcnzc.system.spans import Span
from gcnzc.system.streams import CudaStreams
from gcnzc.system.threads import use_batch_scheduling

# seconds that `Batches.close` waits for each thread to finish its current batch
JOIN_TIMEOUT_S = 30.0

# `Batches._number` of closed iterators and of those from `batches_of`: `state_dict` ignores them
UNTRACKED = -1

_executor_numbers = count()

# attributes of the loader that `__reduce__` passes to the constructor, besides the shares
OPTIONS = (
    *("graph", "table", "labels", "device", "shuffle", "seed", "threads", "ahead", "sampler"),
    *("copied_share", "priority", "in_degrees", "seed_order", "parts", "seed_times"),
)
# attributes of `loader.shares` that it passes
SHARE_OPTIONS = ("batch_size", "rank", "world_size", "drop_last", "may_be_empty")


class Batches(Iterator[Any]):
    """Iterator over batches with given seeds, in order, prefetched by threads of its own.

    The threads end after the last batch, on an exception, on `close`, or when the iterator is
    deleted. Several threads may share the iterator: each batch goes to one of them.

    Raises:
        RuntimeError: by `next`, in a process that was forked from the one that created it.
    """

    def __init__(
        self,
        loader: "Loader",
        number: int,
        epoch: int,
        seeds: Iterator[Tensor],
        begin: int = 0,
    ) -> None:
        self._loader, self._number, self._epoch = loader, number, epoch
        self._seeds, self._position = seeds, begin
        self._process = os.getpid()
        # held by the thread that waits for the next batch
        self._next_lock = threading.Lock()
        loader._begin_iteration()
        self._name = f"gcnzc-loader-{next(_executor_numbers)}-"
        self._executor = ThreadPoolExecutor(
            loader.threads, self._name, initializer=use_batch_scheduling
        )
        self._pending: deque[Future[Any]] = deque()
        for _ in range(loader.ahead):
            self._submit_next()

    def __next__(self) -> Any:
        self._check_process()
        with self._next_lock:
            prepared = self._take()
        return self._loader._complete(prepared)

    def _take(self) -> Any:
        if not self._pending:
            number = self._number
            self.close()
            self._loader._finish_epoch(number)
            raise StopIteration
        future = self._pending.popleft()
        try:
            prepared = future.result()
        except BaseException as error:
            if isinstance(error, CancelledError) and future.cancelled():
                # another thread has closed the iterator
                raise StopIteration from None
            # an exception in the thread, or Ctrl-C while waiting
            self.close()
            if isinstance(error, StopIteration):
                raise stop_iteration_error("the sampler") from error
            raise
        self._submit_next()
        self._position += 1
        self._loader._record_progress(self._number, self._position)
        return prepared

    def close(self) -> None:
        """End the threads, each after its current batch; the iterator yields no more batches."""
        self._number = UNTRACKED
        self._pending.clear()
        self._seeds = iter(())
        if self._process != os.getpid():
            # the threads exist in the parent only, and one may hold the executor's lock
            return
        self._executor.shutdown(wait=False, cancel_futures=True)
        # not `wait=True`: garbage collection may call this in one of the threads to be joined
        for thread in threading.enumerate():
            if thread.name.startswith(self._name) and thread is not threading.current_thread():
                thread.join(JOIN_TIMEOUT_S)

    def __del__(self) -> None:
        if hasattr(self, "_pending"):
            self.close()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError(
                f"this iterator belongs to process {self._process}, whose threads do not "
                f"exist in the forked process {os.getpid()}\n\n"
                "hint: call iter(loader) in the child process, or start the child with "
                'multiprocessing.get_context("spawn")'
            )

    def _submit_next(self) -> None:
        # tasks hold no reference to the iterator, so that it can be deleted while they run
        seeds = next(self._seeds, None)
        if seeds is not None:
            self._pending.append(self._executor.submit(self._loader._prepare, seeds, self._epoch))


def stop_iteration_error(function: str) -> RuntimeError:
    """Return the error to raise instead of a StopIteration, which would silently end the epoch.

    Args:
        function: the user's function that raised it.
    """
    return RuntimeError(
        f"{function} raised StopIteration, so a minibatch is missing\n\n"
        "hint: the cause is often next(iterator) of an iterator that is exhausted; "
        "next(iterator, None) returns None instead"
    )


class Loader:
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

    A batch of a graph without types is a `gcnzc.Batch`. A graph with types, also with one node type
    and one edge type, has batches of the class `gcnzc.sampling.HeteroBatch`, with `blocks`, `x`,
    `y` and, for link prediction, `pairs`; their `items` are positions in the given `seeds`.

    Args:
        graph: the graph whose neighbours are sampled, on the host.
        table: features, one row per node; None for batches without `x`. For a graph with types, a
            dict by node type; `x` has the types in it. None is for those of the graph. For a GPU,
            put the rows in its memory, cache them with `gcnzc.cached`, or page-lock them with
            `gcnzc.pinned`. Sparse rows, and rows the GPU cannot read (see
            `gcnzc.features.can_read_host`), are gathered on the host and copied.
        seeds: (S,) unique node ids, as a tensor, an array or a list. For a graph with types, a pair
            of a node type and ids, which may occur several times. If `sampler` has the attribute
            `num_items`, they are indices of its items, such as edges, in [0, num_items), and None
            is for all of them.
        fanouts: number of neighbours sampled per node in each layer, input layer first, the reverse
            of PyG's `num_neighbors`; see `gcnzc.Sampler`. Unused if `sampler` is given; pass `()`.
        batch_size: number of seeds in a batch of one rank.
        labels: (N,) or (N, T), one row per node, a tensor or an array; None for batches without
            `y`. For a graph with types, one row for each seed, in the order of `seeds`.
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
        in_degrees: of a graph without types, add the in-degrees of nodes to the blocks, for models
            such as GCN. Otherwise such a model computes them on the host, which synchronizes with
            the GPU.
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
            `num_items`, the part of each item; for seeds of a graph with types, of each seed.
        seed_times: for a graph with types and temporal sampling (S,) times of the seeds, in the
            order of `seeds`: integers in the unit of the graph's times; or dates, which are rounded
            down to this unit, if `graph.time_unit` is set. Default: those of the nodes.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or does not fit another.
    """

    def __init__(
        self,
        graph: Graph,
        table: FeatureTable | Mapping[str, FeatureTable] | None,
        seeds: IdsLike | tuple[str, IdsLike] | None,
        fanouts: Sequence[int] | Mapping[Any, Sequence[int]],
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
        sampler: Any = None,
        copied_share: float = 0.0,
        priority: int = 0,
        in_degrees: bool = False,
        may_be_empty: bool = False,
        seed_order: SeedOrder = "shuffled",
        parts: IdsLike | None = None,
        seed_times: Any = None,
    ) -> None:
        set_by_subclass = set(vars(self))
        check_graph(graph)
        self.graph = graph
        has_types = graph.has_types
        self._tables = check_tables(graph, table, has_types)
        self.table = self._tables if has_types else table
        self.seed = check_seed("seed", seed)
        may_be_empty = check_flag("may_be_empty", may_be_empty)
        self.sampler: Any = check_sampler(sampler)
        if sampler is None:
            self.sampler = Sampler(graph, fanouts, self.seed)
        # a subclass may return subgraphs of other classes
        is_own = type(self.sampler) is Sampler and not has_types
        if is_own and self.sampler.subgraph_type != "directional":
            raise ValueError(
                f"the sampler's subgraph_type is {self.sampler.subgraph_type!r}, and a loader of a "
                "graph without types needs blocks\n\nhint: 'directional'"
            )
        num_items = getattr(self.sampler, "num_items", None)
        # of a graph with types: the node type of the seeds, and their ids in the order of `seeds`
        self._node_type, self._ids = "", None
        # labels stay on the host, where the loader's threads select the rows of a batch
        if has_types and num_items is None:
            self._node_type, self._ids = check_seed_nodes(seeds, graph, may_be_empty)
            num_items = len(self._ids)
            self.seeds = torch.arange(num_items)
            self.labels = check_labels(labels, num_items, "seeds")
        else:
            if has_types and labels is not None:
                raise ValueError(
                    "labels are of seed nodes, and the sampler samples pairs of nodes\n\n"
                    "hint: a LinkSampler labels its pairs"
                )
            given: Any = torch.arange(num_items) if seeds is None and num_items else seeds
            self.seeds = check_seeds(given, graph.num_nodes, num_items, may_be_empty)
            self.labels = check_labels(labels, graph.num_nodes, "nodes")
        self.seed_times = self._check_seed_times(seed_times)
        self.copied_share = check_share(copied_share)
        device = check_device("device", device)
        self.device = check_loader_device(device, self._tables, self.copied_share)
        self.in_degrees = check_flag("in_degrees", in_degrees)
        if has_types and self.in_degrees:
            raise ValueError(
                "in_degrees is True, but the blocks of a graph with types have no in-degrees\n\n"
                "hint: in_degrees=False"
            )
        self.shuffle = check_flag("shuffle", shuffle)
        self.shares = Shares(
            *(len(self.seeds), batch_size, rank, world_size, drop_last), may_be_empty=may_be_empty
        )
        self.seed_order = check_order(seed_order, self.shuffle, parts)
        self.parts = parts
        # number of elements of `parts`, one for each possible seed
        self._num_items = graph.num_nodes if num_items is None else num_items
        # the division of an epoch's seeds among the ranks; another one in a resumed epoch
        sizes = self.shares.batch_size, self.shares.world_size
        self._own_division = self._division_of(*sizes, parts)
        self._division = self._own_division
        self.threads, self.ahead = check_threads(threads, ahead, self.sampler, world_size)
        self.priority = check_priority(priority)
        self._epoch = 0
        # number of batches of this epoch that the newest iterator has yielded
        self._position = 0
        # the step at which the next iterator starts
        self._resume_at = 0
        # number of the iterator whose progress counts; increased to ignore the earlier iterators
        self._tracked_iterator = 0
        # copies batches to a GPU
        self._transfer = self._open_transfer(self._tables) if self.device.type == "cuda" else None
        self._host_pool = Pool() if self._transfer is None else self._transfer.host
        safe = getattr(self.sampler, "thread_safe", True)
        self._sampling_lock: AbstractContextManager = nullcontext() if safe else ForkSafeLock()
        # `__reduce__` also copies attributes of a subclass, set before or after this constructor
        self._own_attributes = (vars(self).keys() | {"_own_attributes"}) - set_by_subclass

    def _check_seed_times(self, given: Any) -> Tensor | None:
        if self._ids is None or getattr(self.sampler, "temporal", None) is None:
            if given is not None:
                reason = "the sampler ignores times"
                if getattr(self.sampler, "temporal", None) is not None:
                    reason = "the seeds of a graph without types have the times of their nodes"
                raise ValueError(f"seed_times are given, but {reason}")
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

    def _open_transfer(self, tables: Mapping[str, FeatureTable]) -> Transfer:
        """Return a `Transfer` to `device`, and let the sampler use its page-locked memory."""
        shares = {
            name: choose_copied_share(self.device, table, self.copied_share)
            for name, table in tables.items()
        }
        streams, max_pending = CudaStreams(self.device), self.ahead + 1
        transfer = Transfer(streams, tables, shares, self.priority, max_pending)
        if hasattr(self.sampler, "pool"):
            # page-locked memory, from which the copy engine copies asynchronously
            self.sampler.pool = transfer.host
        return transfer

    def nodes_read_in_place(self, nodes: Tensor) -> Tensor:
        """Return the nodes of a batch whose rows the GPU's gather kernel reads in place.

        The rows of the others are gathered on the host and copied. On a CPU, return all nodes.
        """
        return nodes if self._transfer is None else self._transfer.nodes_read_in_place(nodes)

    def _prepare(self, seeds: Tensor, epoch: int) -> Any:
        """Prepare one batch, in one of the loader's threads."""
        began_s = time.perf_counter()
        with self._sampling_lock:
            batch = self._sample(seeds, epoch)
        batch.items = seeds
        if isinstance(batch, HeteroBatch):
            batch.blocks = build_hetero_blocks(batch, empty=self._host_pool.empty)
        elif self.in_degrees:
            batch.blocks = self._with_degrees(batch.blocks)
        sampled_s, thread = time.perf_counter(), thread_label()
        batch.times["sample_s"] = sampled_s - began_s
        batch.spans = [Span("sample", thread, began_s, sampled_s)]
        if self.labels is not None and batch.y is None:
            rows = seeds if self._ids is not None else batch.seeds
            y = self._host_pool.empty((len(rows), *self.labels.shape[1:]), self.labels.dtype)
            batch.y = torch.index_select(self.labels, 0, rows, out=y)
        if self._transfer is not None:
            return self._transfer.start(batch)
        nodes = batch.node_ids()
        batch.set_features({each: self._gather(each, nodes[each]) for each in self._tables})
        ended_s = time.perf_counter()
        batch.times["gather_s"] = ended_s - sampled_s
        batch.spans.append(Span("gather", thread, sampled_s, ended_s))
        return batch

    def _sample(self, seeds: Tensor, epoch: int) -> Any:
        if self._ids is None:
            return self.sampler.sample(seeds, epoch)
        times = () if self.seed_times is None else (self.seed_times[seeds],)
        return self.sampler.sample((self._node_type, self._ids[seeds]), epoch, *times)

    def _with_degrees(self, blocks: tuple[Block, ...]) -> tuple[Block, ...]:
        # the nodes of every block are a prefix of those of the input layer's block
        nodes, indptr = blocks[0].nodes, self.graph.indptr
        degrees = self._host_pool.empty(nodes.shape, indptr.dtype)
        torch.index_select(indptr[1:], 0, nodes, out=degrees)
        degrees -= indptr[:-1][nodes]
        return tuple(replace(block, degrees=degrees[: block.num_src]) for block in blocks)

    def _gather(self, node_type: str, nodes: Tensor) -> Tensor:
        table = self._tables[node_type]
        out = self._host_pool.empty((len(nodes), table.num_columns), table.dtype)
        return table.gather(nodes, out, threads=1)

    def _complete(self, prepared: Any) -> Any:
        """Return a prepared minibatch, in the thread that iterates."""
        if not isinstance(prepared, PendingBatch):
            return prepared
        assert self._transfer is not None, "only batches on a GPU are pending"
        return self._transfer.wait(prepared)

    def _begin_iteration(self) -> None:
        """Called when an iterator is created, before its threads start."""
        if self._transfer is not None:
            # a table may still be in the process of being copied to the GPU
            self._transfer.order_after_current_stream()

    def __len__(self) -> int:
        """Return the number of batches of an epoch, the same on every rank.

        An epoch resumed with another batch size or world size has only batches of the unused seeds.
        """
        return len(self.shares)

    @property
    def epoch(self) -> int:
        """The epoch of the iteration in progress, or else of the next one; counted from 0."""
        return self._epoch

    @property
    def resume_step(self) -> int:
        """The step at which the next iteration starts, from 0 to `len(loader)`.

        It is 0, unless a state from the middle of an epoch was loaded, with the same batch size and
        world size, and no iteration has started since. For the position of the iteration in
        progress, see `state_dict`.
        """
        return self._resume_at

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which determines its order and its neighbours.

        Args:
            epoch: from 0 to 2**32 - 1. If a state with the same epoch was just loaded, the next
                iteration still resumes at the state's position.

        Raises:
            TypeError: `epoch` is not an integer.
            ValueError: `epoch` is out of range.
        """
        epoch = check_epoch("epoch", epoch)
        if epoch != self._epoch:
            self._begin_epoch(epoch)
            self._resume_at = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position as plain values.

        The batch that was yielded last counts as used: a resumed loader starts with the next one.
        With several iterators, the position is that of the newest one.
        """
        progress = {"position": self._position, "done": self.shares.seeds_done}
        partition = {name: getattr(self.shares, name) for name in PARTITION}
        division = self._division.settings() if self.seed_order != "shuffled" else {}
        return {
            "epoch": self._epoch,
            **progress,
            **partition,
            **division,
            **self._settings_to_match(),
        }

    def load_state_dict(self, state: Mapping[str, Any], parts: IdsLike | None = None) -> None:
        """Resume at the position of `state`, with the same batches bit for bit.

        With another world size or batch size, the unused seeds of the epoch are divided anew among
        the ranks: none is used twice, and none is lost except those that `drop_last` drops. With
        another world size, the chunks or parts of `seed_order` apply again from the next epoch.

        Args:
            state: returned by `state_dict`.
            parts: with `seed_order="local"` and another world size, the `parts` of the loader with
                which the epoch of `state` began.

        Raises:
            TypeError: `state` is not a mapping, or one of its values has another type.
            ValueError: `state` is not the state of a loader, or differs from this loader in `seed`,
                `shuffle`, `drop_last`, `seeds`, `seed_order`, `parts` or a setting of the sampler,
                such as `fanouts`.
        """
        numbers = check_state(state, self._settings_to_match(), len(self.seeds))
        partition = {name: numbers[name] for name in PARTITION}
        done, position = numbers["done"], numbers["position"]
        before = self.shares.resumed(done, **partition)
        check_position(position, len(before))
        if partition != {name: getattr(self.shares, name) for name in PARTITION}:
            done, position = before.step_start(position), 0
        division = self._own_division
        # if no seed of the epoch was used, it begins with the division of this loader
        if self.seed_order != "shuffled" and (done or position):
            others = [self._division]
            if parts is not None:
                world_size = check_integer(
                    "state['order_world_size']", state.get("order_world_size"), 1
                )
                others.append(self._division_of(1, world_size, parts))
            division = resumed_division(state, division, others)
        self._begin_epoch(numbers["epoch"])
        self.shares = replace(self.shares, seeds_done=done)
        self._position = self._resume_at = position
        self._division = division

    def __reduce__(self) -> tuple[Any, ...]:
        options = {name: getattr(self, name) for name in OPTIONS}
        options |= {name: getattr(self.shares, name) for name in SHARE_OPTIONS}
        options["seeds"] = self.seeds if self._ids is None else (self._node_type, self._ids)
        of_subclass = {k: v for k, v in vars(self).items() if k not in self._own_attributes}
        state = self.state_dict(), self._division
        return _construct, (type(self), options, *state), of_subclass

    def __iter__(self) -> Batches:
        begin, self._resume_at = self._resume_at, 0
        self._position = begin
        self._tracked_iterator += 1
        # Always a copy of `self.seeds`: users may write to `items` of a batch, a view of the copy.
        seeds, shares = self.seeds, self.shares
        if self.shuffle:
            order = self.seed_order, seeds, self.seed, self._epoch, self._division
            seeds = order_seeds(*order, drop_last=shares.drop_last)
        else:
            seeds = seeds.clone()
        batch_seeds = (seeds[shares.seed_range(step)] for step in range(begin, len(shares)))
        return Batches(self, self._tracked_iterator, self._epoch, batch_seeds, begin)

    def batches_of(self, seeds: Iterable[Tensor], epoch: int) -> Batches:
        """Return an iterator over the batches of given seeds, in the given order.

        It does not change the epoch or the state of this loader.

        Args:
            seeds: for each batch (S,) int64 on the host; consumed as batches are prefetched.
            epoch: passed to the sampler; in [0, 2**32).
        """
        return Batches(self, UNTRACKED, epoch, iter(seeds))

    def _settings_to_match(self) -> dict[str, Any]:
        """Return the settings that `load_state_dict` requires to be equal in a state."""
        times = self.seed_times
        return {
            "seed": self.seed,
            "num_seeds": len(self.seeds),
            "shuffle": int(self.shuffle),
            "seed_order": self.seed_order,
            "drop_last": int(self.shares.drop_last),
            "seeds_crc32": zlib.crc32(
                (self.seeds if self._ids is None else self._ids).numpy().data
            ),
            "seed_type": self._node_type,
            "seed_times_crc32": zlib.crc32(b"" if times is None else times.numpy().data),
            **plain_settings(getattr(self.sampler, "settings", {})),
        }

    def _record_progress(self, iterator_number: int, position: int) -> None:
        if iterator_number == self._tracked_iterator:
            self._position = position

    def _finish_epoch(self, iterator_number: int) -> None:
        if iterator_number == self._tracked_iterator:
            self._begin_epoch(self._epoch + 1)

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._position, self._division = epoch, 0, self._own_division
        offset = chunk_offset(self.seed_order, epoch, self.shares.world_size)
        self.shares = replace(self.shares, seeds_done=0, offset=offset)
        # progress of an iterator of the previous epoch no longer counts
        self._tracked_iterator += 1

    def _division_of(self, batch_size: int, world_size: int, parts: IdsLike | None) -> Division:
        if parts is None:
            return Division(batch_size, world_size)
        found = check_parts(parts, self._num_items, world_size).numpy()[self.seeds.numpy()]
        return Division(batch_size, world_size, torch.from_numpy(found))


def _construct(
    cls: type[Loader],
    options: Mapping[str, Any],
    state: Mapping[str, Any],
    division: Division,
) -> Loader:
    loader = cls.__new__(cls)
    # a subclass may take other arguments
    Loader.__init__(loader, fanouts=(), **options)
    loader._division = division
    loader.load_state_dict(state)
    return loader


def thread_label() -> str:
    """Return the name of a loader's thread in timelines."""
    # ThreadPoolExecutor appends the number of each thread to its name
    return f"loader {threading.current_thread().name.rsplit('_', 1)[-1]}"
