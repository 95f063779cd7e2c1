"""The base of the loaders: the order and shares of seeds, and iterators that prefetch batches."""

import os
import threading
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.loader.checks import check_threads
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
from gcnzc.system.arguments import (
    IdsLike,
    check_epoch,
    check_flag,
    check_integer,
    check_seed,
)
from gcnzc.system.streams import CudaStreams
from gcnzc.system.threads import use_batch_scheduling

B = TypeVar("B")

# seconds that `Batches.close` waits for each thread to finish its current batch
JOIN_TIMEOUT_S = 30.0

# `Batches._number` of closed iterators and of those from `batches_of`: `state_dict` ignores them
UNTRACKED = -1

_executor_numbers = count()


class Batches(Iterator[B], Generic[B]):
    """Iterator over batches with given seeds, in order, prefetched by threads of its own.

    The threads end after the last batch, on an exception, on `close`, or when the iterator is
    deleted. Several threads may share the iterator: each batch goes to one of them.

    Raises:
        RuntimeError: by `next`, in a process that was forked from the one that created it.
    """

    def __init__(
        self,
        loader: "MinibatchLoader[B]",
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

    def __next__(self) -> B:
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


# attributes of `loader.shares` that `__reduce__` passes to the constructor
SHARE_OPTIONS = ("batch_size", "rank", "world_size", "drop_last", "may_be_empty")


class MinibatchLoader(ABC, Generic[B]):
    """Base class of the loaders whose threads prepare minibatches of seeds, in order.

    A subclass calls `_set_order` in its constructor, and then `_remember_own_attributes`. It
    prepares a minibatch in `_prepare`, which the threads call. For a GPU, it sets `_transfer` to
    the result of `_open_transfer`, and starts the transfer of the minibatch in `_prepare`.
    """

    sampler: Any
    device: torch.device
    # copies minibatches to a GPU; None on a CPU
    _transfer: Transfer | None
    # number of elements that `parts` has, one for each possible seed
    _num_items: int

    def _set_order(
        self,
        seeds: Tensor,
        num_items: int,
        batch_size: int,
        *,
        shuffle: bool,
        drop_last: bool,
        seed: int,
        rank: int,
        world_size: int,
        threads: int | None,
        ahead: int | None,
        may_be_empty: bool,
        seed_order: SeedOrder,
        parts: IdsLike | None,
    ) -> None:
        """Check and keep the arguments that divide the seeds into minibatches.

        Args:
            seeds: (S,) int64 on the host, checked.
            num_items: number of elements of `parts`.
            batch_size, shuffle, drop_last, seed, rank, world_size, threads, ahead, may_be_empty,
                seed_order, parts: see `gcnzc.Loader`.

        Raises:
            TypeError, ValueError: an argument is invalid.
        """
        self.seeds, self._num_items = seeds, num_items
        self.seed = check_seed("seed", seed)
        self.shuffle = check_flag("shuffle", shuffle)
        self.shares = Shares(
            *(len(self.seeds), batch_size, rank, world_size, drop_last),
            may_be_empty=check_flag("may_be_empty", may_be_empty),
        )
        self.seed_order = check_order(seed_order, self.shuffle, parts)
        self.parts = parts
        # the division of an epoch's seeds among the ranks; another one in a resumed epoch
        sizes = self.shares.batch_size, self.shares.world_size
        self._own_division = self._division_of(*sizes, parts)
        self._division = self._own_division
        self.threads, self.ahead = check_threads(threads, ahead, self.sampler, world_size)
        self._transfer = None
        self._epoch = 0
        # number of batches of this epoch that the newest iterator has yielded
        self._position = 0
        # the step at which the next iterator starts
        self._resume_at = 0
        # number of the iterator whose progress counts; increased to ignore the earlier iterators
        self._tracked_iterator = 0

    def _remember_own_attributes(self, set_by_subclass: set[str]) -> None:
        # `__reduce__` also copies attributes of a subclass, set before or after this constructor
        self._own_attributes = (vars(self).keys() | {"_own_attributes"}) - set_by_subclass

    @abstractmethod
    def _prepare(self, seeds: Tensor, epoch: int) -> Any:
        """Prepare the minibatch of some seeds, in one of the loader's threads."""

    def _open_transfer(
        self,
        table: FeatureTable | Mapping[str, FeatureTable] | None,
        copied_share: float | Mapping[str, float],
        priority: int,
    ) -> Transfer:
        """Return a `Transfer` to `device`, and let the sampler use its page-locked memory."""
        streams = CudaStreams(self.device)
        transfer = Transfer(streams, table, copied_share, priority, max_pending=self.ahead + 1)
        if hasattr(self.sampler, "pool"):
            # page-locked memory, from which the copy engine copies asynchronously
            self.sampler.pool = transfer.host
        return transfer

    def _complete(self, prepared: Any) -> B:
        """Return a prepared minibatch, in the thread that iterates."""
        if not isinstance(prepared, PendingBatch):
            found: B = prepared
            return found
        assert self._transfer is not None, "only batches on a GPU are pending"
        return self._transfer.wait(prepared)

    def _begin_iteration(self) -> None:
        """Called when an iterator is created, before its threads start."""
        if self._transfer is not None:
            # a table may still be in the process of being copied to the GPU
            self._transfer.order_after_current_stream()

    @abstractmethod
    def _constructor(self) -> tuple[type["MinibatchLoader[B]"], dict[str, Any]]:
        """Return the class whose constructor makes a copy, and its arguments without the shares."""

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
        kind, options = self._constructor()
        shares = {name: getattr(self.shares, name) for name in SHARE_OPTIONS}
        of_subclass = {k: v for k, v in vars(self).items() if k not in self._own_attributes}
        state = self.state_dict(), self._division
        return _construct, (type(self), kind, options | shares, *state), of_subclass

    def __iter__(self) -> "Batches[B]":
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

    def batches_of(self, seeds: Iterable[Tensor], epoch: int) -> "Batches[B]":
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
        found = check_parts(parts, self._num_items, world_size).numpy()[self.seeds.numpy()]
        return Division(batch_size, world_size, torch.from_numpy(found))


def _construct(
    cls: Any,
    kind: Any,
    options: Mapping[str, Any],
    state: Mapping[str, Any],
    division: Division,
) -> Any:
    loader = cls.__new__(cls)
    # a subclass may take other arguments
    kind.__init__(loader, **options)
    loader._division = division
    loader.load_state_dict(state)
    return loader


def thread_label() -> str:
    """Return the name of a loader's thread in timelines."""
    # ThreadPoolExecutor appends the number of each thread to its name
    return f"loader {threading.current_thread().name.rsplit('_', 1)[-1]}"
