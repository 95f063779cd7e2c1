"""Iterate over minibatches that threads prefetch in order."""

import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

from gcnzc.system.threads import use_batch_scheduling

if TYPE_CHECKING:
    from gcnzc.loader.base import MinibatchLoader

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
