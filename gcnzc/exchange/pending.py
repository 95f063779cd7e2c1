"""Started requests over processes: their handles, and the threads that execute them."""

import atexit
import os
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any
from weakref import WeakSet

import torch

from gcnzc.exchange.collectives import Collective
from gcnzc.exchange.engine import Need
from gcnzc.exchange.errors import BlockedByReceive, ConnectionBroken
from gcnzc.exchange.requests import First, Receive
from gcnzc.system.streams import CudaStreams


class Pending:
    """The handle of a started request.

    Args:
        wait: waits for its end, and returns its answer; raises ConnectionBroken.
        find_need: returns the request of a peer that it waits for, if any.
        future: its end, if it is on a channel; `First` waits for it.
    """

    def __init__(
        self,
        wait: Callable[[], Any],
        find_need: Callable[[], Need | None] = lambda: None,
        future: Any = None,
    ) -> None:
        self.find_need, self.future = find_need, future
        self.is_on_channel, self.is_abandoned = future is not None, False
        self._wait: Callable[[], Any] | None = wait
        self._answer: Any = None

    def result(self) -> Any:
        """Wait until it has ended, and return the answer."""
        if self._wait is not None:
            self._answer = self._wait()
            # it refers to memory of the request; and gloo would wait for another message
            self._wait = None
        return self._answer


def find_first_need(request: First) -> Need | None:
    """Return the requests of peers that a `First` waits for; None if it ends by itself."""
    needs: list[Any] = [each.find_need() for each in request.pending]
    if request.seconds is not None or not all(needs):
        return None
    if len(needs) == 1:
        return needs[0]
    return needs[0]._replace(is_for_all=False, alternatives=[tuple(need[:3]) for need in needs])


def wait_for_first(request: First) -> int | None:
    """Return the index of a request that has ended; see `First`."""
    futures = [each.future for each in request.pending]
    # an ended wait does not affect the requests, unlike the time limit of gloo's waits, which
    # closes the connection
    limit = request.seconds
    if limit is not None and limit > threading.TIMEOUT_MAX:
        limit = None
    ended, _ = wait(futures, limit, FIRST_COMPLETED)
    return next((index for index, each in enumerate(futures) if each in ended), None)


class ChannelThread:
    """The thread of a channel, which runs its tasks one after the other.

    Args:
        name: the name of the channel.
        find_need: returns the request of a peer that the channel's collective waits for.
        abort: ends all waits over the connections of the channel.
    """

    def __init__(
        self, name: str, find_need: Callable[[], Need | None], abort: Callable[[], None]
    ) -> None:
        self.threads = ThreadPoolExecutor(1, f"gcnzc-exchange-{name}")
        self._find_channel_need, self.abort = find_need, abort
        self.num_started = self.num_finished = 0
        self.receives: list[Future[Any]] = []  # tasks without a time limit
        self.received: Pending | None = None  # that the thread waits for
        self.streams: CudaStreams | None = None
        self.stream: Any = None
        _THREADS.add(self)

    @property
    def is_busy(self) -> bool:
        """Whether it has unfinished tasks."""
        return self.num_started > self.num_finished

    def find_need(self) -> Need | None:
        """Return the request of a peer that the current request waits for."""
        received = self.received
        return self._find_channel_need() if received is None else received.find_need()

    def start(self, work: Callable[[], Any], started: Any, timeout_s: float) -> Pending:
        """Run a task for a request or algorithm that was started, and return its handle.

        With CUDA, an algorithm runs on a stream of this channel, which first waits for the work
        that is queued on the caller's stream; the result's stream waits for that of the algorithm.

        Args:
            work: the task.
            started: the request or algorithm.
            timeout_s: the time limit of a wait.
        """
        if isinstance(started, Receive):
            pending = self._submit(work, timeout_s, limit_s=timeout_s)
            self.receives.append(pending.future)
            return pending
        if isinstance(started, Collective):
            ready = torch.cuda.current_stream().record_event() if started.is_on_gpu else None
            return self._submit(lambda: _run_after(ready, work), timeout_s)
        if not torch.cuda.is_initialized():
            return self._submit(work, timeout_s)
        if self.streams is None:
            self.streams = CudaStreams(torch.device("cuda", torch.cuda.current_device()))
            self.stream = self.streams.new()
        streams, stream = self.streams, self.stream
        queued = streams.current().record()

        def run_on_stream() -> Any:
            stream.wait(queued)
            answers: list[Any] = []
            stream.do(lambda: answers.append(work()))
            return answers[0], stream.record()

        def finish(result: tuple[Any, Any]) -> Any:
            answer, done = result
            streams.current().wait(done)
            return answer

        return self._submit(run_on_stream, timeout_s, finish=finish)

    def _submit(
        self,
        work: Callable[[], Any],
        timeout_s: float,
        limit_s: float | None = None,
        finish: Callable[[Any], Any] = lambda answer: answer,
    ) -> Pending:
        """Run a function in the thread; `finish` returns the answer for its result.

        Receives have no time limit in the thread, since gloo would close the connections to all
        ranks then; the wait for what follows them has that of the group.
        """
        before = self.pending_receives()

        def count() -> Any:
            try:
                return work()
            finally:
                self.num_finished += 1

        def wait_for_end() -> Any:
            for receive in before:
                if receive in wait([receive], timeout_s).not_done:
                    limit = TimeoutError("an earlier receive on this channel has no message")
                    raise BlockedByReceive from limit
            try:
                return finish(future.result(limit_s))
            except FutureTimeout:
                raise ConnectionBroken from TimeoutError("no message within the time limit")

        self.num_started += 1
        future = self.threads.submit(count)
        return Pending(wait_for_end, self.find_need, future)

    def pending_receives(self) -> list[Future[Any]]:
        """Return the receives that have not ended."""
        self.receives = [each for each in self.receives if not each.done()]
        return list(self.receives)

    def receive(self, pending: Pending) -> Any:
        """Wait for a message in this thread, and return the answer."""
        self.received = pending
        try:
            return pending.result()
        finally:
            self.received = None

    def close(self) -> None:
        """Stop the thread."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.end_receives()

    def end_receives(self) -> None:
        """End receives; otherwise the thread may wait forever, and the process for the thread."""
        if self.is_busy and self.pending_receives():
            self.abort()


def _run_after(ready: Any, work: Callable[[], Any]) -> Any:
    if ready is not None:
        ready.synchronize()
    return work()


_THREADS: "WeakSet[ChannelThread]" = WeakSet()
"""the threads of this process"""
# a forked process does not have them
os.register_at_fork(after_in_child=_THREADS.clear)


def _end_all_receives() -> None:
    for thread in list(_THREADS):
        thread.end_receives()


# before the interpreter waits for the threads of executors, unlike functions of `atexit`
getattr(threading, "_register_atexit", atexit.register)(_end_all_receives)
