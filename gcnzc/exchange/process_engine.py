"""The engine over processes: each request is executed before the algorithm continues.

Small collectives are gcnzc's and large ones the process group's own. The threads of channels
execute what is started on them.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

from gcnzc.exchange.agreement import CurrentWait, StallMonitor, mismatch
from gcnzc.exchange.collectives import Collective
from gcnzc.exchange.engine import Engine, Task
from gcnzc.exchange.errors import ConnectionBroken, WorkerLost
from gcnzc.exchange.heartbeat import HeartbeatMonitor, explain, worker_lost
from gcnzc.exchange.pending import (
    ChannelThread,
    Pending,
    abort,
    find_first_need,
    start_any,
    start_message,
    wait_for_first,
)
from gcnzc.exchange.process_group import Channel
from gcnzc.exchange.request_log import Need
from gcnzc.exchange.requests import (
    Algorithm,
    Exchange,
    First,
    Message,
    ReceiveAny,
    Request,
    Start,
    StoreRequest,
    check_kind,
    yield_request,
)
from gcnzc.exchange.store import StoreRequests

T = TypeVar("T")

# maximum number of intervals kept until `pop_request_intervals` or `pop_overlapped_intervals`
TIMES_KEPT = 10_000


def run(algorithm: Algorithm[T], group: "ProcessEngine") -> T:
    """Run a distributed algorithm together with the other ranks, and return its result.

    Args:
        algorithm: a generator of requests. Its collectives must be the same on all ranks, in the
            same order. Each `Send` needs a `Receive` on its peer.
        group: the ranks. Tensors of requests are on the host or on this rank's GPU, and must be
            ready on its current stream; the results are ready on that stream too.

    Raises:
        WorkerLost: another rank did not respond in time, or has ended; the message names it if
            the heartbeats show which one it is.
        RequestMismatch: the ranks made different requests; raised on all of them.
    """
    return group.run(algorithm)


class ProcessEngine(Engine):
    """Executes the requests of this process; see `gcnzc.exchange.Group`."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        backend: str,
        store: Any,
        timeout_s: float,
        ranks: Sequence[int] | None,
        remedy: str,
    ) -> None:
        super().__init__(rank, world_size)
        self.backend, self.store, self.timeout_s = backend, store, timeout_s
        self.ranks = list(range(world_size)) if ranks is None else list(ranks)
        """the members' ranks in torch.distributed's default group"""
        self.is_subgroup, self.remedy, self.is_closed = ranks is not None, remedy, False
        # an RLock: nested calls of the same thread are allowed, and acquiring it is a single C call
        self._running, self._process = threading.RLock(), os.getpid()
        # start and end of each wait for the result of a request, and of each collective of a
        # channel's thread, by time.perf_counter
        self.waits: deque[tuple[float, float]] = deque(maxlen=TIMES_KEPT)
        self.overlapped: deque[tuple[float, float]] = deque(maxlen=TIMES_KEPT)
        self.channels: dict[str, Channel] = {}
        self.threads: dict[str, ChannelThread] = {}
        self.stored = StoreRequests(store, timeout_s)
        self.monitor: HeartbeatMonitor | None = None
        self.stall_monitor: StallMonitor | None = None

    def is_nccl(self, request: Exchange) -> bool:
        """Whether NCCL executes a request, which has the time limit of its process group."""
        return self.backend == "nccl" and request.is_on_gpu

    def run(self, algorithm: Algorithm[T]) -> T:
        """Run a distributed algorithm; see `gcnzc.exchange.run`.

        Raises:
            RuntimeError: the group is closed or not connected; another thread runs an algorithm on
                it; or this process is a fork of the one that connected the group.
        """
        self.check_process()
        if not self._running.acquire(blocking=False):
            raise RuntimeError(
                f"thread {threading.current_thread().name} of rank {self.rank} started an "
                "algorithm on a group while another thread runs one\n\nhint: use a group in one "
                "thread at a time, and overlap requests with Start"
            )
        try:
            return self.run_task(Task(algorithm))
        except WorkerLost as error:
            if self.monitor is not None:
                is_follow_up, ranks = error.is_follow_up, error.reason_ranks
                self.monitor.stop(error.reason, is_follow_up=is_follow_up, ranks=ranks)
            raise
        finally:
            self._running.release()

    def run_task(self, task: Task) -> Any:
        """Run a task, and return its result."""
        self.advance(task)
        error, task.error = task.error, None
        if error is None:
            return task.answer
        try:
            raise error
        finally:
            # its traceback refers to this frame
            del error

    def check_process(self) -> None:
        """Check that this process has connected the group; raises RuntimeError."""
        if self.backend and os.getpid() != self._process:
            raise RuntimeError(
                f"process {os.getpid()} uses the group of rank {self.rank}, which process "
                f"{self._process} has connected\n\nhint: communicate in the process that called "
                "init_group(); a process that it forks has no connections"
            )

    def count_step(self, num_steps: int) -> None:
        """Set the step of error messages at the begin of an optimizer step.

        Args:
            num_steps: the number of steps that the optimizer has taken. The step is larger if a
                group has several optimizers, because it also increases with each call.
        """
        monitor = self.monitor
        if monitor is not None and monitor.is_step_counted:
            monitor.step, monitor.activity = max(monitor.step or 0, num_steps) + 1, "training"

    def find_busy_sequences(self) -> list[str]:
        """Return the names of the request sequences of channels with unfinished tasks."""
        return [each.channel.sequence for each in list(self.threads.values()) if each.is_busy]

    def abort(self) -> None:
        """Close this rank's gloo connections, which ends its waits and those of its peers."""
        for channel in list(self.channels.values()):
            abort(channel)

    # requests

    def run_collective(self, task: Task, request: Any) -> bool:
        """See `Engine`."""
        if not isinstance(request, Collective):
            check_kind(request, Collective, "an algorithm yields")
        is_started = task.channel is not None
        channel = self.channels[task.channel or ""]
        execute = partial(channel.execute, request, task.caller, is_started=is_started)
        task.answer = self.execute(task, execute, request, channel.find_need)
        return True

    def start_message(
        self, task: Task, message: Message, channel: str | None, request: Request
    ) -> Pending:
        """See `Engine`."""
        is_limited = task.channel is None
        on = self.channels[channel or ""]
        start = partial(start_message, on, message, task.caller, is_limited=is_limited)
        return self.execute(task, start, request, is_wait=False)

    def start_task(self, task: Task, started: Any, channel: str, request: Start) -> Pending:
        """See `Engine`."""
        start = partial(self._start_in_thread, task, started, self.channels[channel])
        return self.execute(task, start, request, is_wait=False)

    def _start_in_thread(self, task: Task, started: Any, channel: Channel) -> Pending:
        if isinstance(started, ReceiveAny):
            started.check(self.rank, self.world_size)
            return start_any(channel, started, task.caller, is_on_channel=True)
        if isinstance(started, Collective):
            started.check(self.world_size)
            if self.is_nccl(started):
                # NCCL runs it on its own stream, without a thread
                return Pending(channel.start_nccl(started))
        thread = self.threads.get(channel.name)
        if thread is None:
            thread = self.threads[channel.name] = ChannelThread(channel)
        algorithm = started if isinstance(started, Generator) else yield_request(started)
        new = Task(algorithm, channel.name, task.caller)
        return thread.start(partial(self.run_task, new), started)

    def wait_for(self, task: Task, pending: Pending, request: Request) -> bool:
        """See `Engine`."""
        if task.channel is not None:
            task.answer = self.threads[task.channel].receive(pending)
        else:
            task.answer = self.execute(task, pending.result, request, pending.find_need)
        return True

    def wait_for_any(self, task: Task, request: First) -> bool:
        """See `Engine`."""
        find_need = partial(find_first_need, request)
        task.answer = self.execute(task, partial(wait_for_first, request), request, find_need)
        return True

    def use_store(self, task: Task, request: StoreRequest) -> bool:
        """See `Engine`."""
        task.answer = self.execute(task, partial(self.stored.execute, request), request)
        return True

    def execute(
        self,
        task: Task,
        function: Callable[[], T],
        request: Request,
        find_need: Callable[[], Need | None] = lambda: None,
        *,
        is_wait: bool = True,
    ) -> T:
        """Execute a request; if the network fails, raise an error that names the cause.

        Args:
            task: the task that makes the request. In the thread of a channel, errors of the network
                are explained by the `Wait` for the task.
            function: executes it.
            request: the request.
            find_need: returns the request of a peer that this request waits for, if any.
            is_wait: whether to record the time of this request.
        """
        began = time.perf_counter()
        if task.channel is not None:
            answer = function()
            if self.world_size > 1 and is_wait:
                self.overlapped.append((began, time.perf_counter()))
            return answer
        if self.world_size > 1 and (self.is_closed or not self.backend):
            self._reject(request)
        if self.stall_monitor is not None:
            self.stall_monitor.wait = CurrentWait(began, request, find_need)
        try:
            answer = function()
            if self.world_size > 1 and is_wait:
                self.waits.append((began, time.perf_counter()))
            return answer
        except ConnectionBroken as error:
            waited_s = time.perf_counter() - began
            raise self._explain(error, request, waited_s) from error.__cause__
        finally:
            if self.stall_monitor is not None:
                self.stall_monitor.wait = None

    def _explain(self, error: ConnectionBroken, request: Request, waited_s: float) -> RuntimeError:
        """Return the error of a request that failed."""
        assert self.monitor is not None, "a single rank has no connections"
        assert self.stall_monitor is not None, "a connected group has a stall monitor"
        if reason := self.stall_monitor.find_reason():
            self.monitor.stop(f"the ranks' requests do not match: {reason}")
            return mismatch(reason)
        failure = explain(self.monitor, error.__cause__)
        limit = f"; the time limit of a wait is {self.timeout_s:g} s"
        # NCCL has the time limit of its process group
        hint = (error.hint or self.remedy) + (limit if self.backend == "gloo" else "")
        return worker_lost(self.monitor, waited_s, request.describe(), failure, hint)

    def _reject(self, request: Request) -> NoReturn:
        """Raise the error of a request to a group that is not connected, or closed."""
        what = request.describe()
        if not self.backend:
            raise RuntimeError(
                f"rank {self.rank} of {self.world_size} is not connected, so it cannot execute "
                f"{what}\n\nhint: initialize torch.distributed before an optimizer is unpickled, "
                "or load its state_dict() into a new one"
            )
        if self.monitor is not None:
            self.monitor.stop("its group is closed")
            # otherwise the other ranks would wait for the time limit
            self.abort()
        raise RuntimeError(
            f"rank {self.rank} requests {what} of a group that is closed\n\n"
            "hint: call finalize() and everything else that communicates before close(), the end "
            "of `with init_group()`, and destroy_process_group()"
        )
