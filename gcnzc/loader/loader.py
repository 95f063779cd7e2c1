"""Mini-batch loader: shuffles the seeds, and prefetches batches with their features.

Worker threads make whole batches: they sample, gather features and select labels, all in compiled
code that runs in parallel to the model. For a GPU, `transfer` queues the copies and the gather
there. Batches are yielded in order, so they do not depend on the number of threads.
"""

import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from gcnzc.kernels.buffers import Pool
from gcnzc.kernels.threads import ForkSafeLock
from gcnzc.loader.checks import (
    check_labels,
    check_loader_device,
    check_rows,
    check_seeds,
    check_share,
    check_threads,
    checked,
    is_copied,
)
from gcnzc.loader.seeds import Shares, epoch_order
from gcnzc.loader.state import SHARED, check_position, check_state
from gcnzc.loader.transfer import Sent, Transfer
from gcnzc.sampling.batch import Batch, Block
from gcnzc.sampling.neighbor import Sampler, check_graph
from gcnzc.sampling.protocol import Samples
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
from gcnzc.system.threads import lower_priority

# a dropped iterator waits this long for its threads, each of which ends after its present batch
JOIN_S = 30.0


# the number of an iterator whose progress no longer counts
NOBODY = -1


# arguments of a loader that are its attributes, or attributes of its `shares`
OPTIONS = (
    *("graph", "table", "seeds", "labels", "device", "shuffle", "seed", "threads", "ahead"),
    *("sampler", "copied_share", "priority", "in_degrees"),
)
SHARE_OPTIONS = ("batch_size", "rank", "world_size", "drop_last", "may_be_empty")


_names = count()


class Loader:
    """Batches of seeds with their neighbourhoods, features and labels.

    Iterating gives the batches of one epoch. The next iteration gives the next epoch, unless the
    last one was left early: then it begins again, or `set_epoch` says which. Each iterator has its
    own threads, which end with it: after the last batch, `break`, an exception, or Ctrl-C. Several
    threads may share an iterator; each batch goes to one of them. A forked child may iterate over
    the loader on the host, but an iterator works only in the process that made it.

    `copy.deepcopy` and `pickle` give a loader with the same arguments that continues where this one
    is. Rows that were page-locked or mapped from a file are ordinary memory in the copy.

    A batch's tensors live for as long as anything refers to them; their memory is then used again.
    On a GPU they are ready for work that is queued later on the stream that was current when the
    batch was handed out, and that stream alone is waited for before the memory is used again.

    Args:
        graph: on the host.
        table: rows of features, one per node; None leaves `batch.x` out. For a GPU they lie there,
            or inside `gcnzc.pinned`; if `gcnzc.features.can_read_host` is False of it, or if they
            are sparse, anywhere on the host, and worker threads gather what is then copied.
        seeds: (S,) ids of nodes, all different, as a tensor, an array or a list; or what else the
            sampler takes.
        fanouts: as `gcnzc.Sampler` takes them; unused if `sampler` is given.
        batch_size: seeds of a batch of one worker.
        labels: (N,) or (N, T), one row per node, a tensor or an array; None leaves `batch.y` out.
        device: where batches are handed out.
        shuffle: take the seeds of an epoch as `epoch_order` puts them, not as they are.
        drop_last: leave out a last step that is not full.
        seed: of the order and, unless `sampler` is given, of the sampling; an integer of 64 bits.
        rank, world_size: this worker's number and how many there are; `Shares` says who takes what.
        threads: worker threads, each of which makes whole batches; `default_threads` if None.
        ahead: batches that are begun or ready at most, besides the one that is handed out; one more
            than `threads` if None.
        sampler: draws the neighbourhoods; `gcnzc.Sampler(graph, fanouts, seed)` if None.
        copied_share: of each batch's rows, those that a worker thread gathers and the GPU's copy
            engine sends, while its threads read the others from the host: from 0 to 1, where any
            table on the host will do. It changes no bit of a batch, and nothing on a CPU.
        priority: of the GPU's streams that bring the batches, as PyTorch counts: -1 goes before
            the model's work, 0 beside it.
        in_degrees: give the blocks their nodes' degrees, which GCN needs, so that it need not wait
            for them.
        may_be_empty: an epoch without batches is no error: without seeds, or with fewer than a step
            takes and `drop_last`.

    Raises:
        TypeError: an argument of another type.
        ValueError: an argument that makes no sense, or that does not fit another.
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
        sampler: Samples | None = None,
        copied_share: float = 0.0,
        priority: int = 0,
        in_degrees: bool = False,
        may_be_empty: bool = False,
    ) -> None:
        check_graph(graph)
        if table is not None:
            check_kind("table", table, FeatureTable, "gcnzc.FeatureTable(rows), or None")
        self.graph = graph
        self.table = table
        self.seed = check_seed("seed", seed)
        self.sampler = Sampler(graph, fanouts, seed) if sampler is None else checked(sampler)
        limit = getattr(self.sampler, "num_items", None)
        may_be_empty = check_flag("may_be_empty", may_be_empty)
        self.seeds = check_seeds(seeds, graph, limit, may_be_empty)
        # worker threads pick them
        self.labels = check_labels(graph, labels)
        check_rows(graph, table)
        self.copied_share = check_share(copied_share)
        self.device = check_loader_device(check_device("device", device), table, copied_share)
        self.shuffle = check_flag("shuffle", shuffle)
        self.in_degrees = check_flag("in_degrees", in_degrees)
        self.shares = Shares(
            *(len(self.seeds), batch_size, rank, world_size, drop_last), may_be_empty=may_be_empty
        )
        self.threads, self.ahead = check_threads(threads, ahead, self.sampler, world_size)
        self.priority = check_integer("priority", priority, most=0, hint="-1 or 0")
        self._transfer = self._open_transfer() if self.device.type == "cuda" else None
        self._host = Pool() if self._transfer is None else self._transfer.host
        safe = getattr(self.sampler, "thread_safe", True)
        self._sampling: AbstractContextManager = nullcontext() if safe else ForkSafeLock()
        self._epoch = 0
        # batches of this epoch that were handed out by the iterator that was begun last
        self._position = 0
        # where the next iterator begins
        self._resume_at = 0
        self._iterators = 0

    def __len__(self) -> int:
        """Batches of an epoch, or of what was left of it, the same for every worker."""
        return len(self.shares)

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one; counted from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """The step that the next iteration begins with, of `len(loader)`."""
        return self._resume_at

    def set_epoch(self, epoch: int) -> None:
        """Begin that epoch at the next iteration: another order, other neighbours.

        Args:
            epoch: counted from 0, below 2**32. The present one, if a state was just loaded, goes
                on where that state says.

        Raises:
            TypeError: `epoch` is no integer.
            ValueError: `epoch` is out of range.
        """
        epoch = check_epoch("epoch", epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._position = self._resume_at = 0
            self.shares = replace(self.shares, done=0)
            # an iterator of the epoch before no longer counts
            self._iterators += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position as plain values, from which an equal loader can resume.

        The batch that was handed out last counts as used: a loader that takes up the state begins
        with the one after it. With several iterators, the one that was begun last counts.
        """
        done = {"position": self._position, "done": self.shares.done}
        shared = {name: getattr(self.shares, name) for name in SHARED}
        return {"epoch": self._epoch} | done | shared | self._same()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next iteration where `state` was taken, with the same batches bit for bit.

        With another number of workers or batch size, the seeds of the epoch that were not used are
        shared anew: none is lost or used twice.

        Raises:
            TypeError: `state` is no mapping, or a value of it is of another type.
            ValueError: `state` is of a loader with other seeds, order, fan-outs or other settings
                of the sampler; or is no state of a loader.
        """
        numbers = check_state(state, self._same(), len(self.seeds))
        shared = {name: numbers[name] for name in SHARED}
        done, position = numbers["done"], numbers["position"]
        before = self.shares.resumed(done, **shared)
        check_position(position, len(before))
        self.set_epoch(numbers["epoch"])
        if shared != {name: getattr(self.shares, name) for name in SHARED}:
            done, position = before.begin(position), 0
        self.shares = replace(self.shares, done=done)
        self._position = self._resume_at = position
        self._iterators += 1

    def __reduce__(self) -> tuple[Callable[..., "Loader"], tuple[Any, ...]]:
        options = {name: getattr(self, name) for name in OPTIONS}
        shares = {name: getattr(self.shares, name) for name in SHARE_OPTIONS}
        return _construct, (type(self), options | shares, self.state_dict())

    def read_in_place(self, nodes: Tensor) -> Tensor:
        """Those of a batch's nodes whose rows the device reads; the CPU gathers the others."""
        return nodes if self._transfer is None else self._transfer.read_in_place(nodes)

    def __iter__(self) -> "Batches":
        begin, self._resume_at = self._resume_at, 0
        self._position = begin
        self._iterators += 1
        seeds = epoch_order(self.seeds, self.seed, self._epoch) if self.shuffle else self.seeds
        shares = self.shares
        steps = (seeds[shares.at(step)] for step in range(begin, len(shares)))
        return Batches(self, self._iterators, self._epoch, steps, begin)

    def batches_of(self, steps: Iterable[Tensor], epoch: int) -> "Batches":
        """Batches of given seeds, in the given order.

        They do not count as progress of this loader: its epoch and its state stay what they are.

        Args:
            steps: (S,) seeds of each batch, int64 on the host; read as far ahead as batches are.
            epoch: which, with the seed, decides the sampling; in [0, 2**32).
        """
        return Batches(self, NOBODY, epoch, iter(steps))

    def _same(self) -> dict[str, Any]:
        """Return the settings that a state must have in common with this loader."""
        return {
            "seed": self.seed,
            "num_seeds": len(self.seeds),
            "shuffle": int(self.shuffle),
            "drop_last": int(self.shares.drop_last),
            "seeds_crc32": zlib.crc32(self.seeds.numpy().data),
            **getattr(self.sampler, "settings", {}),
        }

    def _handed_out(self, iterator: int, position: int) -> None:
        if iterator == self._iterators:
            self._position = position

    def _ended(self, iterator: int) -> None:
        if iterator == self._iterators:
            self._epoch += 1
            self._position = 0
            self.shares = replace(self.shares, done=0)
            self._iterators += 1

    def _open_transfer(self) -> Transfer:
        # a GPU that cannot read the rows is sent what the CPU gathered
        table = self.table
        sent = is_copied(self.device, table) or (table is not None and table.is_sparse)
        share = 1.0 if sent else self.copied_share
        streams = CudaStreams(self.device)
        transfer = Transfer(streams, table, share, self.priority, most=self.ahead + 1)
        if hasattr(self.sampler, "pool"):
            # from there the copy engine reads without a detour
            self.sampler.pool = transfer.host
        return transfer

    def _make(self, seeds: Tensor, epoch: int) -> Batch | Sent:
        # one batch, in a worker thread
        began_s = time.perf_counter()
        with self._sampling:
            batch = self.sampler.sample(seeds, epoch)
        batch.items = seeds
        if self.in_degrees:
            batch.blocks = self._with_degrees(batch.blocks)
        sampled_s, thread = time.perf_counter(), _thread()
        batch.times["sample_s"] = sampled_s - began_s
        batch.spans = [Span("sample", thread, began_s, sampled_s)]
        if self.labels is not None and batch.y is None:
            y = self._host.empty((len(batch.seeds), *self.labels.shape[1:]), self.labels.dtype)
            batch.y = torch.index_select(self.labels, 0, batch.seeds, out=y)
        if self._transfer is not None:
            return self._transfer.send(batch)
        batch.x = self._gathered(batch)
        ended_s = time.perf_counter()
        batch.times["gather_s"] = ended_s - sampled_s
        batch.spans.append(Span("gather", thread, sampled_s, ended_s))
        return batch

    def _with_degrees(self, blocks: tuple[Block, ...]) -> tuple[Block, ...]:
        # the nodes of every block are the first of the outermost's
        nodes, indptr = blocks[0].nodes, self.graph.indptr
        degrees = self._host.empty(nodes.shape, indptr.dtype)
        torch.index_select(indptr[1:], 0, nodes, out=degrees)
        degrees -= indptr[:-1][nodes]
        return tuple(replace(block, degrees=degrees[: block.num_src]) for block in blocks)

    def _gathered(self, batch: Batch) -> Tensor | None:
        if self.table is None:
            return None
        shape = (len(batch.nodes), self.table.num_columns)
        out = self._host.empty(shape, self.table.dtype)
        return self.table.gather(batch.nodes, out, threads=1)

    def _handed_over(self, made: Batch | Sent) -> Batch:
        if isinstance(made, Batch):
            return made
        assert self._transfer is not None, "batches that are sent are those of a GPU"
        return self._transfer.hand_over(made)


class Batches(Iterator[Batch]):
    """The batches of some steps, in order; made by threads of its own.

    The threads end when the batches do, with `close`, or when nobody refers to this any more.
    Several threads may share it: each batch goes to one of them.

    Raises:
        RuntimeError: by `next`, in a process that was forked from the one that made this.
    """

    def __init__(
        self, loader: Loader, number: int, epoch: int, steps: Iterator[Tensor], begin: int = 0
    ) -> None:
        self._loader, self._number, self._epoch = loader, number, epoch
        self._steps = steps
        self._position = begin
        self._process = os.getpid()
        # of the thread that waits for the next batch
        self._turn = threading.Lock()
        if loader._transfer is not None:
            # the table may still be on its way there
            loader._transfer.begin()
        self._name = f"gcnzc-loader-{next(_names)}-"
        self._executor = ThreadPoolExecutor(loader.threads, self._name, initializer=lower_priority)
        self._coming: deque[Future[Batch | Sent]] = deque()
        for _ in range(loader.ahead):
            self._begin_next()

    def __next__(self) -> Batch:
        self._check_process()
        with self._turn:
            made = self._take()
        return self._loader._handed_over(made)

    def _take(self) -> Batch | Sent:
        if not self._coming:
            number = self._number
            self.close()
            self._loader._ended(number)
            raise StopIteration
        try:
            made = self._coming.popleft().result()
        except CancelledError:
            # another thread has closed this meanwhile
            raise StopIteration from None
        except BaseException:
            # the batch's own error, or Ctrl-C while waiting
            self.close()
            raise
        self._begin_next()
        self._position += 1
        self._loader._handed_out(self._number, self._position)
        return made

    def close(self) -> None:
        """End the threads, each after the batch it is making. No more batches come after this."""
        self._number = NOBODY
        self._coming.clear()
        self._steps = iter(())
        if self._process != os.getpid():
            # the threads are the parent's, and one of them may hold the executor's lock
            return
        self._executor.shutdown(wait=False, cancel_futures=True)
        # Not `wait=True`: a garbage collection may call this in one of these very threads.
        for thread in threading.enumerate():
            if thread.name.startswith(self._name) and thread is not threading.current_thread():
                thread.join(JOIN_S)

    def __del__(self) -> None:
        if hasattr(self, "_coming"):
            self.close()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError(
                f"this iterator belongs to process {self._process}, whose threads make its batches "
                f"and do not exist in process {os.getpid()}, which was forked from it\n\n"
                "hint: call iter(loader) in the child process, or start the child with "
                'multiprocessing.get_context("spawn")'
            )

    def _begin_next(self) -> None:
        # tasks refer to the loader and not to this, which may thus be dropped while they run
        seeds = next(self._steps, None)
        if seeds is not None:
            self._coming.append(self._executor.submit(self._loader._make, seeds, self._epoch))


def _construct(cls: type[Loader], options: Mapping[str, Any], state: Mapping[str, Any]) -> Loader:
    loader = cls(**options, fanouts=())
    loader.load_state_dict(state)
    return loader


def _thread() -> str:
    # ThreadPoolExecutor counts its threads at the end of their names
    return f"loader {threading.current_thread().name.rsplit('_', 1)[-1]}"
