"""The engine over processes: each request is executed before the algorithm continues.

Small collectives are gcnzc's and large ones the process group's own. A channel executes
collectives one after the other; the threads of channels execute what is started on them.
"""

import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gcnzc.exchange.agreement import CurrentWait, StallMonitor, mismatch
from gcnzc.exchange.collectives import Collective, as_bytes, doubling_gather
from gcnzc.exchange.engine import (
    ABORT_TAG,
    NO_HEADER,
    Engine,
    Need,
    Task,
    channel_sequence,
    message_tag,
)
from gcnzc.exchange.errors import Cause, ConnectionBroken, WorkerLost, network
from gcnzc.exchange.heartbeat import HeartbeatMonitor, describe_rank, explain
from gcnzc.exchange.pending import ChannelThread, Pending, find_first_need, wait_for_first
from gcnzc.exchange.process_group import Members, start_builtin, wait_for_work
from gcnzc.exchange.requests import (
    Algorithm,
    Exchange,
    First,
    Message,
    Receive,
    Request,
    Send,
    Start,
    StoreRequest,
    Wait,
    require,
)
from gcnzc.exchange.store import StoredKeys

T = TypeVar("T")

# maximum number of intervals kept until `pop_request_intervals` or `pop_overlapped_intervals`
TIMES_KEPT = 10_000
# how many pairs of successive requests a channel stores
PAIRS_KEPT = 4096
# at least one of this many requests of a channel has a header; the barrier that sends it takes
# about as long as a short collective of torch
CHECK_EVERY = 128
# time limit of a wait that has none: gloo's waits have one
UNLIMITED_S = 3e7


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
        self.keys = StoredKeys(store)
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
                self.monitor.stop(error.cause)
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
        threads = list(self.threads.items())
        return [channel_sequence(name) for name, thread in threads if thread.is_busy]

    def abort(self) -> None:
        """Close this rank's gloo connections, which ends its waits and those of its peers."""
        for channel in list(self.channels.values()):
            channel.abort()

    # requests

    def exchange(self, task: Task, request: Collective) -> bool:
        """See `Engine`."""
        is_started = task.channel is not None
        channel = self.channels[task.channel or ""]
        execute = partial(channel.execute, request, task.caller, is_started=is_started)
        task.answer = self.execute(task, execute, request, channel.find_need)
        return True

    def start_message(
        self, task: Task, message: Message, channel: str | None, request: Request
    ) -> Pending:
        """See `Engine`."""
        limit_s = UNLIMITED_S if task.channel is not None else self.timeout_s
        start = partial(self.channels[channel or ""].start_message, message, task.caller, limit_s)
        return self.execute(task, start, request, is_wait=False)

    def start_task(
        self, task: Task, algorithm: Algorithm[Any], started: Any, channel: str, request: Start
    ) -> Pending:
        """See `Engine`."""
        new = Task(algorithm, channel, task.caller)
        start = partial(self._start_in_thread, new, started, self.channels[channel])
        return self.execute(task, start, request, is_wait=False)

    def _start_in_thread(self, task: Task, started: Any, channel: "Channel") -> Pending:
        if isinstance(started, Collective) and self.is_nccl(started):
            # NCCL runs it on its own stream, without a thread
            return Pending(channel.start_builtin(started))
        thread = self.threads.get(channel.name)
        if thread is None:
            thread = ChannelThread(channel.name, channel.find_need, channel.abort)
            self.threads[channel.name] = thread
        return thread.start(partial(self.run_task, task), started, self.timeout_s)

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
        answer = partial(self.keys.answer, request, self.timeout_s)
        task.answer = self.execute(task, answer, request)
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
            self.monitor.stop(Cause(f"the ranks' requests do not match: {reason}"))
            return mismatch(reason)
        limit = f"; the time limit of a wait is {self.timeout_s:g} s"
        # NCCL has the time limit of its process group
        hint = (error.hint or self.remedy) + (limit if self.backend == "gloo" else "")
        text, cause = explain(self.monitor, error.__cause__)
        who = describe_rank(self.rank, self.ranks)
        in_step = "" if self.monitor.step is None else f" in step {self.monitor.step}"
        what = f"{who} waited {waited_s:.0f} s{in_step} for {request.describe()}"
        lost = WorkerLost(f"{what}: {text}\n\nhint: {hint}")
        lost.cause = cause
        return lost

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
            self.monitor.stop(Cause("its group is closed"))
            # otherwise the other ranks would wait for the time limit
            self.abort()
        raise RuntimeError(
            f"rank {self.rank} requests {what} of a group that is closed\n\n"
            "hint: call finalize() and everything else that communicates before close(), the end "
            "of `with init_group()`, and destroy_process_group()"
        )


class StagingBuffers:
    """Host buffers of a channel, which later requests of the same size reuse."""

    def __init__(self) -> None:
        self.free: defaultdict[Any, list[Tensor]] = defaultdict(list)
        self.lent: list[tuple[list[Tensor], Tensor]] = []

    def take(self, values: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return a buffer (n,) for `values` of n elements, page-locked if possible.

        Returns:
            The free buffers of this size and dtype, to which it is returned, and the buffer.
        """
        free = self.free[values.numel(), values.dtype]
        if free:
            return free, free.pop()
        try:
            return free, torch.empty(values.numel(), dtype=values.dtype, pin_memory=True)
        except RuntimeError:
            return free, torch.empty(values.numel(), dtype=values.dtype)

    def copy_to_host(self, values: Tensor) -> Tensor:
        """Copy `values` to a buffer until `take_back`; wait until they are computed and copied."""
        self.lent.append(self.take(values))
        return self.lent[-1][1].view(values.shape).copy_(values)

    def take_back(self) -> None:
        """Take back all lent buffers for reuse."""
        for free, buffer in self.lent:
            free.append(buffer)
        self.lent.clear()


class Channel:
    """Executes collectives one after the other, over its own process group.

    Args:
        engine: the ranks of the group.
        name: the name of the channel; empty for the default channel.
        process_group: of torch.distributed; None for its default one.
    """

    def __init__(self, engine: ProcessEngine, name: str, process_group: Any) -> None:
        hint = "use another name: messages name so the channel of requests that are not started"
        require(name != "default", 'the channel name "default" is reserved', hint)
        self.engine, self.name, self.process_group = engine, name, process_group
        self.sequence = channel_sequence(name)
        self.buffers = StagingBuffers()
        self.header = NO_HEADER  # of the current request
        self.pairs: set[tuple[str, str]] = set()  # of successive requests
        self.need: Need | None = None  # of a collective of the process group
        self.peer: int | None = None  # that a message of a collective waits for
        self.is_from_all = False  # whether that collective needs the requests of all ranks

    def find_need(self) -> Need | None:
        """Return the request of a peer that the current collective waits for."""
        peer = self.peer
        if peer is None:
            return self.need
        return Need(peer, self.sequence, self.header.number, is_for_all=self.is_from_all)

    def execute(self, request: Collective, caller: str, *, is_started: bool) -> Any:
        """Execute a request together with the other ranks, and return its answer.

        Args:
            request: the same on all ranks.
            caller: the caller; empty for none.
            is_started: whether this channel's thread executes it.
        """
        engine, kind = self.engine, type(request).__name__
        if engine.is_nccl(request):
            if not self.name:
                # other channels record no NCCL requests, since the order of threads may differ;
                # the digest of this one is part of later headers
                engine.log.record(self.sequence, request, caller)
            return self.start_builtin(request)()
        before = self.header.words
        self.header = engine.log.record(self.sequence, request, caller)
        pair = before, self.header.words
        is_checked = pair not in self.pairs or self.header.number % CHECK_EVERY == 0
        if len(self.pairs) >= PAIRS_KEPT:
            self.pairs.clear()
        self.pairs.add(pair)
        is_on_gpu = request.is_on_gpu
        staged = request.copy_to_host(self.buffers.copy_to_host) if is_on_gpu else request
        if engine.world_size > 1 and request.is_builtin(is_started=is_started):
            answer = self._run_builtin(staged, is_checked=is_checked)
        else:
            engine.ledger.add(kind, requests=1)
            algorithm = staged.messages(engine.rank, engine.world_size, is_builtin=False)
            answer = self._run_messages(algorithm, kind, is_from_all=request.is_from_all)
        if is_on_gpu:
            answer = request.copy_answer(answer)
        self.buffers.take_back()
        return answer

    def check_agreement(self, words: str, caller: str) -> None:
        """Wait until all ranks have made the same call, described by `words`, with a barrier."""
        self.header = self.engine.log.record(self.sequence, words, caller)
        self._run_barrier()

    def _run_barrier(self) -> None:
        """Run a barrier, whose messages have the header of the current request.

        A gather of one byte from each rank takes ⌈log2 W⌉ rounds, as a dissemination barrier does.
        """
        token = torch.zeros(1, dtype=torch.uint8)
        algorithm = doubling_gather(token, self.engine.rank, self.engine.world_size)
        self._run_messages(algorithm, "", is_from_all=True)

    def _run_messages(self, algorithm: Algorithm[Any], kind: str, *, is_from_all: bool) -> Any:
        """Run a collective by its messages, and return its answer.

        Small collectives spend their time here, so this function calls torch.distributed's process
        group directly, and has no function of its own for a message.

        Args:
            algorithm: yields `Send` and `Receive`, and `Start` and `Wait` of these two.
            kind: the kind of request that the ledger counts the messages for; empty for none.
            is_from_all: see `Collective`; a rank that has not made the request may then be another
                one than the rank of the message.

        Raises:
            ConnectionBroken: a connection broke, or a message took longer than the group's limit.
        """
        self.is_from_all, header = is_from_all, self.header
        process_group: Any = self.process_group or dist.group.WORLD
        limit = timedelta(seconds=self.engine.timeout_s)
        tags: dict[int, int] = {}
        num_sent = bytes_sent = 0
        answer: Any = None
        step: Any
        values: Any
        try:
            while True:
                try:
                    step = algorithm.send(answer)
                except StopIteration as stop:
                    return stop.value
                step_type = type(step)
                if step_type is Wait:
                    work, self.peer, answer = step.pending
                else:
                    is_message = step_type is Send or step_type is Receive
                    message = step if is_message else step.request
                    values, peer = message.values, message.peer
                    num_bytes = values.nbytes
                    tag = tags.get(num_bytes)
                    if tag is None:
                        tag = tags[num_bytes] = message_tag(header, num_bytes)
                    try:
                        if type(message) is Send:
                            work = process_group.send([values], peer, tag)
                            num_sent += 1
                            bytes_sent += num_bytes
                            values = None
                        else:
                            work = process_group.recv([values], peer, tag)
                    except RuntimeError as error:
                        raise ConnectionBroken from error
                    if not is_message:
                        answer = work, peer, values
                        continue
                    self.peer, answer = peer, values
                try:
                    work.wait(limit)
                except RuntimeError as error:
                    raise ConnectionBroken from error
        finally:
            self.peer = None
            if kind:
                self.engine.ledger.add(kind, bytes_sent, num_sent)

    def _run_builtin(self, request: Collective, *, is_checked: bool) -> Any:
        """Execute `request` with the process group's own collective, which has no headers.

        If `is_checked`, a barrier, whose messages have headers, precedes it: if the request follows
        the previous one for the first time on this channel, and for one of `CHECK_EVERY` requests.
        If one rank waits in the barrier and another in a collective, their requests are compared.
        A mismatch elsewhere starts different gloo collectives, which may end a process or compute a
        wrong result; a header shows it fewer than `CHECK_EVERY` requests later.
        """
        engine = self.engine
        if is_checked:
            self._run_barrier()
        peer = (engine.rank + 1) % engine.world_size
        self.need = Need(peer, self.sequence, self.header.number, is_for_all=True)
        answer = self.start_builtin(request, engine.timeout_s)()
        self.need = None
        return answer

    def start_builtin(self, request: Collective, limit_s: float | None = None) -> Callable[[], Any]:
        """Start the process group's own collective; return a function that waits for its answer.

        Args:
            request: the collective.
            limit_s: the time limit of the wait; None for NCCL, which has its own.
        """
        engine = self.engine
        sent_bytes = round(request.sent_bytes(engine.rank, engine.world_size))
        engine.ledger.add(type(request).__name__, sent_bytes, requests=1)
        work, finish = start_builtin(
            request, Members(engine.rank, engine.ranks, self.process_group)
        )

        def wait() -> Any:
            if work is not None:
                wait_for_work(work, limit_s)
            return finish()

        return wait

    def start_message(self, message: Message, caller: str, limit_s: float) -> Pending:
        """Start a message of an algorithm.

        Args:
            message: the message; a tensor on a GPU is copied through the host over gloo.
            caller: the caller; empty for none.
            limit_s: the time limit of a wait over gloo.
        """
        engine, is_send, is_nccl = self.engine, isinstance(message, Send), False
        if message.is_on_gpu:
            is_nccl = engine.is_nccl(message)
            if not is_nccl:
                return self._start_staged(message, caller, limit_s)
        data, sequence = as_bytes(message.values), message.sequence(engine.rank, self.name)
        header = engine.log.record(sequence, message, caller)
        tag, start = message_tag(header, len(data)), dist.isend if is_send else dist.irecv
        with network():
            work = start(data, engine.ranks[message.peer], self.process_group, tag)
        if is_send:
            engine.ledger.add("Send", len(data), 1)

        def finish() -> Any:
            wait_for_work(work, None if is_nccl else limit_s)
            return None if is_send else message.values

        need = Need(message.peer, sequence, header.number)
        return Pending(finish, lambda: need)

    def _start_staged(self, message: Message, caller: str, limit_s: float) -> Pending:
        """Start a message with a copy of its values in page-locked memory."""
        values, (free, host) = message.values, self.buffers.take(message.values)
        if isinstance(message, Send):
            host.view(values.shape).copy_(values)
        staged: Any = replace(message, values=host)  # type: ignore[type-var]
        pending = self.start_message(staged, caller, limit_s)

        def finish() -> Any:
            answer = pending.result()
            if answer is not None:
                answer = values.copy_(host.view(values.shape))
            free.append(host)
            return answer

        return Pending(finish, pending.find_need)

    def abort(self) -> None:
        """End all waits over the connections of the process group."""
        process_group: Any = self.process_group or dist.group.WORLD
        if process_group is None:
            # it is destroyed
            return
        # ValueError: it is being destroyed
        with suppress(RuntimeError, ValueError):
            # gloo closes all connections when a wait times out, and has no other call to do so
            peer = (self.engine.rank + 1) % self.engine.world_size
            work: Any = process_group.recv([torch.empty(1)], peer, ABORT_TAG)
            work.wait(timedelta(milliseconds=1))
