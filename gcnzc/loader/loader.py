"""Minibatch loader: shuffles the seeds, and prefetches batches with their features.

Each thread prepares whole batches: it samples neighbours, gathers features and selects
labels, in compiled code that releases the GIL and runs in parallel to the model. For a GPU,
`gcnzc.loader.transfer` queues the copies and the gather on CUDA streams. Neither the batches nor
their order depends on the number of threads.
"""

import threading
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from gcnzc._moved import renamed_attribute
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.kernels.buffers import Pool
from gcnzc.kernels.threads import ForkSafeLock
from gcnzc.loader.batches import UNTRACKED, Batches
from gcnzc.loader.checks import (
    check_labels,
    check_loader_device,
    check_sampler,
    check_seeds,
    check_share,
    check_table,
    check_threads,
    is_copied,
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
from gcnzc.loader.state import PARTITION, check_position, check_state
from gcnzc.loader.transfer import PendingBatch, Transfer
from gcnzc.sampling.batch import Batch, Block
from gcnzc.sampling.neighbor import Sampler, check_graph
from gcnzc.sampling.protocol import SamplerProtocol
from gcnzc.system.arguments import (
    IdsLike,
    check_device,
    check_epoch,
    check_flag,
    check_integer,
    check_kind,
    check_seed,
)
from gcnzc.system.spans import Span
from gcnzc.system.streams import CudaStreams

# attributes of the loader, and of `loader.shares`, that `__reduce__` passes to the constructor
OPTIONS = (
    *("graph", "table", "seeds", "labels", "device", "shuffle", "seed", "threads", "ahead"),
    *("sampler", "copied_share", "priority", "in_degrees", "seed_order", "parts"),
)
SHARE_OPTIONS = ("batch_size", "rank", "world_size", "drop_last", "may_be_empty")


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
            divided; see `Shares`.
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
        self.seed = check_seed("seed", seed)
        self.sampler = Sampler(graph, fanouts, seed) if sampler is None else check_sampler(sampler)
        limit = getattr(self.sampler, "num_items", None)
        may_be_empty = check_flag("may_be_empty", may_be_empty)
        self.seeds = check_seeds(seeds, graph, limit, may_be_empty)
        # labels stay on the host, where the loader's threads select the rows of a batch
        self.labels = check_labels(graph, labels)
        check_table(graph, table)
        self.copied_share = check_share(copied_share)
        self.device = check_loader_device(check_device("device", device), table, copied_share)
        self.shuffle = check_flag("shuffle", shuffle)
        self.in_degrees = check_flag("in_degrees", in_degrees)
        self.shares = Shares(
            *(len(self.seeds), batch_size, rank, world_size, drop_last), may_be_empty=may_be_empty
        )
        self.seed_order = check_order(seed_order, self.shuffle, parts)
        self.parts = parts
        # the division of an epoch's seeds among the ranks; another one in a resumed epoch
        sizes = self.shares.batch_size, self.shares.world_size
        self._own_division = self._division_of(*sizes, parts)
        self._division = self._own_division
        self.threads, self.ahead = check_threads(threads, ahead, self.sampler, world_size)
        self.priority = check_integer(
            "priority", priority, most=0, hint="0, or -1 for a higher priority"
        )
        self._transfer = self._open_transfer() if self.device.type == "cuda" else None
        self._host_pool = Pool() if self._transfer is None else self._transfer.host
        safe = getattr(self.sampler, "thread_safe", True)
        self._sampling_lock: AbstractContextManager = nullcontext() if safe else ForkSafeLock()
        self._epoch = 0
        # number of batches of this epoch that the newest iterator has yielded
        self._position = 0
        # the step at which the next iterator starts
        self._resume_at = 0
        # number of the iterator whose progress counts; increased to ignore the earlier iterators
        self._tracked_iterator = 0
        # `__reduce__` also copies attributes of a subclass, set before or after this constructor
        self._own_attributes = (vars(self).keys() | {"_own_attributes"}) - set_by_subclass

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

    # old name, until 0.3
    position = renamed_attribute("position", "resume_step")

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which determines its order and its neighbours.

        Args:
            epoch: from 0 to 2**32 - 1. If a state with the same epoch was just loaded, the next
                iteration still resumes at the state's position.

        Raises:
            TypeError: `epoch` is no integer.
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
        shares = {name: getattr(self.shares, name) for name in SHARE_OPTIONS}
        of_subclass = {k: v for k, v in vars(self).items() if k not in self._own_attributes}
        state = self.state_dict(), self._division
        return _construct, (type(self), options | shares, *state), of_subclass

    def nodes_read_in_place(self, nodes: Tensor) -> Tensor:
        """Return the nodes of a batch whose rows the GPU's gather kernel reads in place.

        The rows of the others are gathered on the host and copied. On a CPU, return all nodes.
        """
        return nodes if self._transfer is None else self._transfer.nodes_read_in_place(nodes)

    def __iter__(self) -> "Batches":
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

    def batches_of(self, seeds: Iterable[Tensor], epoch: int) -> "Batches":
        """Return an iterator over the batches of given seeds, in the given order.

        It does not change the epoch or the state of this loader.

        Args:
            seeds: for each batch (S,) int64 on the host; consumed as batches are prefetched.
            epoch: passed to the sampler; in [0, 2**32).
        """
        return Batches(self, UNTRACKED, epoch, iter(seeds))

    def _settings_to_match(self) -> dict[str, Any]:
        """Return the settings that `load_state_dict` requires to be equal in a state."""
        return {
            "seed": self.seed,
            "num_seeds": len(self.seeds),
            "shuffle": int(self.shuffle),
            "seed_order": self.seed_order,
            "drop_last": int(self.shares.drop_last),
            "seeds_crc32": zlib.crc32(self.seeds.numpy().data),
            **getattr(self.sampler, "settings", {}),
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
        num_items = getattr(self.sampler, "num_items", self.graph.num_nodes)
        found = check_parts(parts, num_items, world_size).numpy()[self.seeds.numpy()]
        return Division(batch_size, world_size, torch.from_numpy(found))

    def _open_transfer(self) -> Transfer:
        # the CPU gathers all rows if the GPU cannot read them, or if they are sparse
        table = self.table
        copy_all = is_copied(self.device, table) or (table is not None and table.is_sparse)
        share = 1.0 if copy_all else self.copied_share
        streams = CudaStreams(self.device)
        transfer = Transfer(streams, table, share, self.priority, max_pending=self.ahead + 1)
        if hasattr(self.sampler, "pool"):
            # page-locked memory, from which the copy engine copies asynchronously
            self.sampler.pool = transfer.host
        return transfer

    def _prepare(self, seeds: Tensor, epoch: int) -> Batch | PendingBatch:
        """Prepare one batch, in one of the loader's threads."""
        began_s = time.perf_counter()
        with self._sampling_lock:
            batch = self.sampler.sample(seeds, epoch)
        batch.items = seeds
        if self.in_degrees:
            batch.blocks = self._with_degrees(batch.blocks)
        sampled_s, thread = time.perf_counter(), _thread_label()
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

    def _wait_on_current_stream(self, prepared: Batch | PendingBatch) -> Batch:
        if isinstance(prepared, Batch):
            return prepared
        assert self._transfer is not None, "only batches on a GPU are pending"
        return self._transfer.wait(prepared)


def _construct(
    cls: type[Loader], options: Mapping[str, Any], state: Mapping[str, Any], division: Division
) -> Loader:
    loader = cls.__new__(cls)
    # a subclass may take other arguments
    Loader.__init__(loader, **options, fanouts=())
    loader._division = division
    loader.load_state_dict(state)
    return loader


def _thread_label() -> str:
    # ThreadPoolExecutor appends the number of each thread to its name
    return f"loader {threading.current_thread().name.rsplit('_', 1)[-1]}"
