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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gcnzc.arguments import (
    THREADS_LIMIT,
    IdsLike,
    as_ids,
    check_device,
    check_epoch,
    check_flag,
    check_integer,
    check_kind,
    check_number,
    check_seed,
    describe,
)
from gcnzc.background import step_back
from gcnzc.graph import Graph
from gcnzc.kernels.buffers import Pool
from gcnzc.sampler import Batch, Block, Sampler, check_graph, check_range
from gcnzc.streams import CudaStreams
from gcnzc.table import FeatureTable, can_read_host
from gcnzc.timeline import Span
from gcnzc.transfer import Sent, Transfer

# a dropped iterator waits this long for its threads, each of which ends after its present batch
JOIN_S = 30.0
# Each thread holds a batch of up to hundreds of megabytes. Without a model two threads on two cores
# make 1.6 times as many batches as one, and three no more; beside a model any number does.
MOST_THREADS = 4
# with these as well, the batches are the same
SHARED = ("batch_size", "world_size")
# what states of all versions have
REQUIRED = {"seed", "num_seeds", "num_items", "shuffle", "drop_last", "seeds_crc32", "items_crc32"}
# batches are begun by a loop over these many
AHEAD_LIMIT = 2**16

# the number of an iterator whose progress no longer counts
NOBODY = -1

_names = count()


class Samples(Protocol):
    """What draws neighbourhoods: `gcnzc.Sampler`, or another engine behind the same door.

    If it has an attribute `thread_safe` that is False, one thread at a time samples. If it has
    `num_items`, its seeds are numbers below that, of edges say, and not ids of nodes. If it has
    `pool`, of `gcnzc.kernels.buffers`, a loader for a GPU puts there where batches should lie. If
    it has `settings`, a dict of plain values, the state of a loader has these values, and only a
    loader whose sampler has the same ones resumes it. A batch that comes with labels keeps them.
    """

    def sample(self, seeds: Tensor, epoch: int) -> Batch:
        """The neighbourhood of `seeds`, without features and labels."""


def order(seeds: Tensor, seed: int, epoch: int) -> Tensor:
    """The epoch's order of `seeds`, the same on every worker.

    A permutation by NumPy's generator over Philox 4x64, keyed by (seed, epoch).

    Args:
        seeds: (S,) on the host.
        seed: of the run; any integer, of which the low 64 bits count.
        epoch: counted from 0.
    """
    key = np.array([seed % 2**64, epoch], np.uint64)
    shuffled = np.random.Generator(np.random.Philox(key=key)).permutation(len(seeds))
    return seeds[torch.from_numpy(shuffled)]


def usual_threads(world_size: int = 1) -> int:
    """Worker threads of a loader that is told no number: one per core, but four at most.

    Workers on one machine share its cores. How many there are is what LOCAL_WORLD_SIZE says in the
    environment, as torchrun sets it; without it, all `world_size`.
    """
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return max(1, min((os.cpu_count() or 1) // workers, MOST_THREADS))


@dataclass(frozen=True)
class Shares:
    """Who takes which seeds of an epoch's order, at which step.

    A step takes the next `world_size * batch_size` seeds, the last step what is left. Worker r of W
    takes those from m * r // W to m * (r + 1) // W of the m seeds of a step: `batch_size` each, but
    at the last step. So all workers have the same number of steps, every seed is used once, and W
    workers together take what one worker with a W times larger batch would. A last step with fewer
    seeds than workers takes some from the step before it, so that no worker goes without.

    Raises:
        TypeError: an argument of another type.
        ValueError: there are too few seeds, or rank, world size or batch size make no sense.
    """

    num_seeds: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False  # leave out a last step that is not full
    done: int = 0  # seeds at the beginning of the order that others have used
    may_be_empty: bool = False  # accept an epoch without steps

    def __post_init__(self) -> None:
        ranks = "ranks are counted from 0 to world_size - 1"
        checked = {
            "batch_size": check_integer("batch_size", self.batch_size, 1),
            "world_size": check_integer("world_size", self.world_size, 1),
            "rank": check_integer("rank", self.rank, 0, hint=ranks),
            "drop_last": check_flag("drop_last", self.drop_last),
        }
        for name, value in checked.items():
            # NumPy's numbers become Python's, which any checkpoint format can store
            object.__setattr__(self, name, value)
        if self.rank >= self.world_size:
            raise ValueError(
                f"rank is {self.rank} with a world_size of {self.world_size}\n\nhint: {ranks}"
            )
        if self.done:
            # the rest of an epoch is shared, however little it is
            return
        if self.may_be_empty and len(self) == 0:
            return
        if self.num_seeds < self.world_size:
            raise ValueError(
                f"{self.num_seeds} seeds for {self.world_size} workers: some would have none\n\n"
                "hint: use as many workers as seeds at most"
            )
        if self.drop_last and self.num_seeds < self._step_seeds:
            raise ValueError(
                f"{self.num_seeds} seeds do not fill one step of {self.world_size} batches with a "
                f"batch_size of {self.batch_size}, and drop_last leaves out the rest\n\n"
                "hint: drop_last=False, or a smaller batch_size"
            )
        left = self.num_seeds % self._step_seeds
        if not self.drop_last and self.batch_size == 1 and left:
            raise ValueError(
                f"{self.num_seeds} seeds in batches of 1 for {self.world_size} workers: {left} are "
                "left for the last step, in which every worker needs one\n\n"
                "hint: drop_last=True, or batch_size=2"
            )

    def resumed(self, done: int, batch_size: int, world_size: int) -> "Shares":
        """Return rank 0's shares with other sizes, after `done` seeds of the epoch were used."""
        return replace(self, rank=0, done=done, batch_size=batch_size, world_size=world_size)

    @property
    def _step_seeds(self) -> int:
        return self.world_size * self.batch_size

    def __len__(self) -> int:
        full, left = divmod(self.num_seeds - self.done, self._step_seeds)
        return full + (left > 0 and not self.drop_last)

    def at(self, step: int) -> slice:
        """Where in the order this worker's seeds of a step lie."""
        begin, end = self.begin(step), self.begin(step + 1)
        seeds, rank, world_size = end - begin, self.rank, self.world_size
        return slice(begin + seeds * rank // world_size, begin + seeds * (rank + 1) // world_size)

    def begin(self, step: int) -> int:
        """Where in the order the seeds of all workers of a step begin."""
        begin = self.done + step * self._step_seeds
        if step == len(self):
            return min(self.num_seeds, begin)
        # after others there may be fewer seeds than workers; some go without
        return min(begin, max(self.num_seeds - self.world_size, self.done))

    def weight(self, step: int) -> float:
        """This worker's seeds of a step, over the mean seeds of the workers."""
        mine, seeds = self.at(step), self.begin(step + 1) - self.begin(step)
        return (mine.stop - mine.start) * self.world_size / seeds


class Loader:
    """Batches of seeds with their neighbourhoods, features and labels.

    Iterating gives the batches of one epoch. The next iteration gives the next epoch, unless the
    last one was left early: then it begins again, or `set_epoch` says which. Each iterator has its
    own threads, which end with it: after the last batch, `break`, an exception, or Ctrl-C.

    A batch's tensors live for as long as anything refers to them; their memory is then used again.
    On a GPU they are ready for work that is queued later on the stream that was current when the
    batch was handed out, and that stream alone is waited for before the memory is used again.

    Args:
        graph: on the host.
        table: rows of features, one per node; None leaves `batch.x` out. For a GPU they lie there,
            or inside `gcnzc.pinned`; if `gcnzc.table.can_read_host` is False of it, or if they are
            sparse, anywhere on the host, and worker threads gather what is then copied.
        seeds: (S,) ids of nodes, all different, as a tensor, an array or a list; or what else the
            sampler takes.
        fanouts: as `gcnzc.Sampler` takes them; unused if `sampler` is given.
        batch_size: seeds of a batch of one worker.
        labels: (N,) or (N, T), one row per node, a tensor or an array; None leaves `batch.y` out.
        device: where batches are handed out.
        shuffle: take the seeds of an epoch as `order` puts them, not as they are.
        drop_last: leave out a last step that is not full.
        seed: of the order and, unless `sampler` is given, of the sampling; an integer of 64 bits.
        rank, world_size: this worker's number and how many there are; `Shares` says who takes what.
        threads: worker threads, each of which makes whole batches; as `usual_threads` says if None.
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
        self.sampler = Sampler(graph, fanouts, seed) if sampler is None else _checked(sampler)
        limit = getattr(self.sampler, "num_items", None)
        may_be_empty = check_flag("may_be_empty", may_be_empty)
        self.seeds = _demand_seeds(seeds, graph, limit, may_be_empty)
        # worker threads pick them
        self.labels = _demand_labels(graph, labels)
        _demand_rows(graph, table)
        self.copied_share = _demand_share(copied_share)
        self.device = _demand_device(check_device("device", device), table, copied_share)
        self.shuffle = check_flag("shuffle", shuffle)
        self.in_degrees = check_flag("in_degrees", in_degrees)
        self.shares = Shares(
            *(len(self.seeds), batch_size, rank, world_size, drop_last), may_be_empty=may_be_empty
        )
        self.threads, self.ahead = _demand_threads(threads, ahead, self.sampler, world_size)
        priority = check_integer("priority", priority, most=0, hint="-1 or 0")
        self._transfer = self._open_transfer(priority) if self.device.type == "cuda" else None
        self._host = Pool() if self._transfer is None else self._transfer.host
        safe = getattr(self.sampler, "thread_safe", True)
        self._sampling: AbstractContextManager = nullcontext() if safe else threading.Lock()
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

    def read_in_place(self, nodes: Tensor) -> Tensor:
        """Those of a batch's nodes whose rows the device reads; the CPU gathers the others."""
        return nodes if self._transfer is None else self._transfer.read_in_place(nodes)

    def __iter__(self) -> "Batches":
        begin, self._resume_at = self._resume_at, 0
        self._position = begin
        self._iterators += 1
        seeds = order(self.seeds, self.seed, self._epoch) if self.shuffle else self.seeds
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

    def _open_transfer(self, priority: int) -> Transfer:
        # a GPU that cannot read the rows is sent what the CPU gathered
        table = self.table
        sent = _is_sent(self.device, table) or (table is not None and table.is_sparse)
        share = 1.0 if sent else self.copied_share
        streams = CudaStreams(self.device)
        transfer = Transfer(streams, table, share, priority, most=self.ahead + 1)
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
    """

    def __init__(
        self, loader: Loader, number: int, epoch: int, steps: Iterator[Tensor], begin: int = 0
    ) -> None:
        self._loader, self._number, self._epoch = loader, number, epoch
        self._steps = steps
        self._position = begin
        if loader._transfer is not None:
            # the table may still be on its way there
            loader._transfer.begin()
        self._name = f"gcnzc-loader-{next(_names)}-"
        self._executor = ThreadPoolExecutor(loader.threads, self._name, initializer=step_back)
        self._coming: deque[Future[Batch | Sent]] = deque()
        for _ in range(loader.ahead):
            self._begin_next()

    def __next__(self) -> Batch:
        if not self._coming:
            number = self._number
            self.close()
            self._loader._ended(number)
            raise StopIteration
        try:
            made = self._coming.popleft().result()
        except BaseException:
            # the batch's own error, or Ctrl-C while waiting
            self.close()
            raise
        self._begin_next()
        self._position += 1
        self._loader._handed_out(self._number, self._position)
        return self._loader._handed_over(made)

    def close(self) -> None:
        """End the threads, each after the batch it is making. No more batches come after this."""
        self._number = NOBODY
        self._coming.clear()
        self._steps = iter(())
        self._executor.shutdown(wait=False, cancel_futures=True)
        # Not `wait=True`: a garbage collection may call this in one of these very threads.
        for thread in threading.enumerate():
            if thread.name.startswith(self._name) and thread is not threading.current_thread():
                thread.join(JOIN_S)

    def __del__(self) -> None:
        if hasattr(self, "_coming"):
            self.close()

    def _begin_next(self) -> None:
        # tasks refer to the loader and not to this, which may thus be dropped while they run
        seeds = next(self._steps, None)
        if seeds is not None:
            self._coming.append(self._executor.submit(self._loader._make, seeds, self._epoch))


def _thread() -> str:
    # ThreadPoolExecutor counts its threads at the end of their names
    return f"loader {threading.current_thread().name.rsplit('_', 1)[-1]}"


def check_state(
    state: Mapping[str, Any], same: Mapping[str, Any], num_items: int
) -> dict[str, int]:
    """Check the state that a loader is to resume.

    Args:
        state: of a loader.
        same: what the state must have in common with the loader that resumes it. States of older
            versions lack settings of samplers, which are then not compared.
        num_items: seeds of the loader that resumes it.

    Returns:
        epoch, position, done, batch_size and world_size, as integers in their ranges; `position`
        may still be beyond the epoch's end, see `check_position`.

    Raises:
        TypeError: the state is no mapping, or one of the numbers no integer.
        ValueError: something is missing, out of range, or not the same.
    """
    hint = "load what state_dict() of a loader gave"
    check_kind("state", state, Mapping, hint)
    needed = {"epoch", "position", "done", *SHARED, *(same.keys() & REQUIRED)}
    if missing := needed - state.keys():
        raise ValueError(f"the state lacks {', '.join(sorted(missing))}\n\nhint: {hint}")
    for name, mine in same.items():
        if name in state and not _is_equal(state[name], mine):
            raise ValueError(
                f"the state is of a loader with {name} {describe(state[name])}, not "
                f"{describe(mine)}\n\nhint: resume with the options of the run that was saved"
            )
    return {
        "epoch": check_epoch("state['epoch']", state["epoch"]),
        "position": check_integer("state['position']", state["position"], 0, hint=hint),
        "done": check_integer("state['done']", state["done"], 0, num_items, hint),
        "batch_size": check_integer("state['batch_size']", state["batch_size"], 1, hint=hint),
        "world_size": check_integer("state['world_size']", state["world_size"], 1, hint=hint),
    }


def check_position(position: int, num_steps: int | None) -> None:
    """Check that a state's position is within its epoch; not checked if `num_steps` is None.

    Raises:
        ValueError: it is.
    """
    if num_steps is not None and position > num_steps:
        raise ValueError(
            f"state['position'] is {position}, but the epoch has {num_steps} batches\n\n"
            "hint: load what state_dict() of a loader gave"
        )


def _is_equal(value: object, mine: object) -> bool:
    """Whether two settings are equal; a tuple may have become a list, and a bool an int."""
    if isinstance(mine, list):
        return isinstance(value, list | tuple) and list(value) == mine
    return isinstance(value, int | str | np.integer) and bool(value == mine)


def _checked(sampler: Samples) -> Samples:
    if not callable(getattr(sampler, "sample", None)):
        raise TypeError(
            f"sampler is {describe(sampler)}, which has no method sample(seeds, epoch)\n\n"
            "hint: gcnzc.Sampler, gcnzc.LinkSampler or DglSampler; None takes the fan-outs"
        )
    return sampler


def _demand_seeds(
    seeds: IdsLike, graph: Graph, num_items: int | None, may_be_empty: bool
) -> Tensor:
    found = as_ids("seeds", seeds, "a mask becomes ids by .nonzero().flatten()")
    found = found.cpu().contiguous()
    if len(found) == 0:
        if may_be_empty:
            return found
        raise ValueError("seeds is empty: no seeds, so no batches\n\nhint: is the split empty?")
    if num_items is None:
        check_range("seeds", found, graph.num_nodes, "the graph has {} nodes", "ids of nodes")
    else:
        check_range("seeds", found, num_items, "the sampler has {} items", "its items")
    ordered = found.sort().values
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice) > 0:
        raise ValueError(
            f"seeds: seed {int(twice[0])} occurs twice ({len(twice)} seeds too many)\n\n"
            "hint: seeds.unique()"
        )
    return found


def _demand_share(copied_share: float) -> float:
    return check_number(
        "copied_share",
        copied_share,
        lambda share: 0 <= share <= 1,
        "it is a share of a batch's rows, from 0 to 1; 0 lets the GPU read all rows by itself",
    )


def _demand_device(
    device: torch.device, table: FeatureTable | None, copied_share: float
) -> torch.device:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device}: batches go to cpu or cuda\n\nhint: device='cpu'")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                f"device {device}: torch sees no CUDA device\n\n"
                "hint: device='cpu', or `nvidia-smi` and a CUDA build of torch"
            )
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
    _demand_device_rows(device, table, copied_share)
    return device


def _demand_device_rows(
    device: torch.device, table: FeatureTable | None, copied_share: float
) -> None:
    if table is None or table.device == device or _is_sent(device, table):
        return
    if table.device.type == "cuda":
        raise ValueError(
            f"a table on {table.device} cannot be gathered on {device}\n\n"
            f"hint: FeatureTable(rows.to('{device}'))"
        )
    if table.is_sparse or copied_share == 1:
        return
    if not (table.rows.is_pinned() or table.rows.numel() == 0):
        raise ValueError(
            f"a table on the host cannot be read from {device}, because its memory is not "
            "page-locked\n\nhint: `with gcnzc.pinned(rows) as table:`; or copied_share=1, for "
            "the CPU to gather all rows"
        )


def _is_sent(device: torch.device, table: FeatureTable | None) -> bool:
    if device.type != "cuda" or table is None or table.device.type != "cpu":
        return False
    # what somebody else locked is read in place, whatever could be locked here
    locked = not table.is_sparse and table.rows.is_pinned()
    return not (locked or can_read_host(device))


def _demand_threads(
    threads: int | None, ahead: int | None, sampler: Samples, world_size: int
) -> tuple[int, int]:
    hint = "None takes the default"
    if threads is None:
        threads = usual_threads(world_size)
    threads = check_integer("threads", threads, 1, THREADS_LIMIT, hint)
    if not getattr(sampler, "thread_safe", True):
        threads = 1
    if ahead is None:
        ahead = threads + 1
    return threads, check_integer("ahead", ahead, 1, AHEAD_LIMIT, hint)


def _demand_rows(graph: Graph, table: FeatureTable | None) -> None:
    if table is not None and table.num_rows != graph.num_nodes:
        raise ValueError(
            f"the table has {table.num_rows} rows, but the graph {graph.num_nodes} nodes\n\n"
            "hint: one row of features per node is needed"
        )


def _demand_labels(graph: Graph, labels: Tensor | NDArray[Any] | None) -> Tensor | None:
    if labels is None:
        return None
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "biuf":
        # torch warns of memory that may not be written
        labels = torch.from_numpy(np.require(labels, requirements=["C", "W"]))
    if not isinstance(labels, Tensor):
        raise TypeError(
            f"labels is {describe(labels)}\n\n"
            "hint: a tensor or an array of one row per node, or None"
        )
    if labels.ndim == 0 or len(labels) != graph.num_nodes:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} for a graph of {graph.num_nodes} nodes\n\n"
            "hint: one row of labels per node is needed, of any number for nodes without a label"
        )
    return labels.cpu()
