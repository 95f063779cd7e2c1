"""Channels: execute requests one after the other over a process group of torch.distributed."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gcnzc.exchange.agreement import (
    ABORT_TAG,
    Header,
    Need,
    RequestLog,
    channel_sequence,
    message_tag,
)
from gcnzc.exchange.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Mean,
    ReduceScatter,
    SendReceive,
    Sum,
    as_bytes,
    from_bytes,
    send_and_wait,
    start_receive,
)
from gcnzc.exchange.errors import BlockedByReceive, ConnectionBroken, network
from gcnzc.exchange.ledger import Ledger
from gcnzc.exchange.requests import (
    Abandon,
    Algorithm,
    Compute,
    First,
    Message,
    Receive,
    ReceiveAny,
    Request,
    Scratch,
    Send,
    Wait,
    check_kind,
    check_on_channels,
    require,
)
from gcnzc.system.streams import CudaStreams

T = TypeVar("T")

# torch 2.13 renames these functions, and warns about the old names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# how many pairs of successive requests a channel stores
PAIRS_KEPT = 4096
# at least one of this many requests of a channel has a header; the barrier that sends it takes
# about as long as a short collective of torch
CHECK_EVERY = 128
# maximum number of intervals kept until `pop_request_intervals` or `pop_overlapped_intervals`
TIMES_KEPT = 10_000
# time limit of a wait that has none: gloo's waits have one
UNLIMITED_S = 3e7


class Connection:
    """The ranks of a group, and what its channels have in common."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        backend: str,
        ranks: Sequence[int] | None,
        timeout_s: float,
    ) -> None:
        self.rank, self.world_size, self.backend = rank, world_size, backend
        self.is_subgroup, self.timeout_s = ranks is not None, timeout_s
        self.ranks = list(range(world_size)) if ranks is None else list(ranks)
        """the members' ranks in torch.distributed's default group"""
        self.caller = ""
        """the current caller of the algorithm that `run` executes; empty if it has none"""
        self.ledger, self.log = Ledger(), RequestLog(rank)
        # start and end of each request on a channel's thread, by time.perf_counter
        self.overlapped: deque[tuple[float, float]] = deque(maxlen=TIMES_KEPT)

    def is_nccl(self, request: Request) -> bool:
        """Whether NCCL executes a request, which has the time limit of its process group."""
        return self.backend == "nccl" and request.is_on_gpu

    def limit_s(self, request: Request) -> float | None:
        """Return the time limit of a wait in seconds; None for NCCL."""
        return None if self.is_nccl(request) else self.timeout_s


def barrier(rank: int, world_size: int) -> Algorithm[None]:
    """Wait until all ranks have called it, by a dissemination barrier of ⌈log2 W⌉ rounds."""
    rounds, distance = [], 1
    while distance < world_size:
        before, after = (rank - distance) % world_size, (rank + distance) % world_size
        token = torch.zeros(1, dtype=torch.uint8)
        rounds.append((after, (yield from start_receive(token, before))))
        distance *= 2
    for after, receive in rounds:
        yield from send_and_wait(torch.zeros(1, dtype=torch.uint8), after, receive)


def new_process_group(group: Connection, name: str) -> Any:
    """Create the process group of a channel; None to use torch.distributed's default one.

    A default process group without a backend for tensors on the host, as that of
    `init_process_group("nccl")`, is not used. The new ones have its backends, and gloo.

    Args:
        group: the ranks, all of which call this.
        name: the name of the channel; empty for the default channel.
    """
    backends = None
    if dist.is_initialized() and "cpu:" not in (config := dist.get_backend_config()):
        backends = f"cpu:gloo,{config}"
    options: dict[str, Any] = {"timeout": timedelta(seconds=group.timeout_s), "backend": backends}
    if group.is_subgroup:
        # ranks outside the group do not call this
        return dist.new_group(group.ranks, use_local_synchronization=True, **options)
    return dist.new_group(**options) if name or backends else None


class StagingBuffers:
    """Host buffers of a channel, which later requests of the same size reuse."""

    def __init__(self) -> None:
        self.free: dict[Any, list[Tensor]] = {}
        self.lent: list[tuple[Any, Tensor]] = []
        self.num_allocated = 0

    def lend(self, values: Tensor, *, pinned: bool = False, is_kept: bool = False) -> Tensor:
        """Return a host buffer (n,) with the size and dtype of `values`.

        Args:
            values: of n elements.
            pinned: whether the buffer is page-locked.
            is_kept: whether the caller returns the buffer with `give_back`; otherwise `take_back`
                returns it.
        """
        key = (values.numel(), values.dtype, pinned)
        free = self.free.setdefault(key, [])
        if not free:
            self.num_allocated += 1
            free.append(_allocate(values, pinned=pinned))
        buffer = free.pop()
        if not is_kept:
            self.lent.append((key, buffer))
        return buffer

    def copy_to_host(self, values: Tensor) -> Tensor:
        """Copy `values` to page-locked memory; wait until they are computed and copied."""
        return self.lend(values, pinned=True).view(values.shape).copy_(values)

    def give_back(self, buffer: Tensor, *, pinned: bool) -> None:
        """Return a buffer that was lent with `is_kept`, for reuse."""
        self.free[buffer.numel(), buffer.dtype, pinned].append(buffer)

    def take_back(self) -> None:
        """Take back all lent buffers, except those lent with `is_kept`, for reuse."""
        for key, buffer in self.lent:
            self.free[key].append(buffer)
        self.lent.clear()


def _allocate(values: Tensor, *, pinned: bool) -> Tensor:
    """Allocate (n,) like `values`, page-locked if `pinned` and if possible."""
    try:
        return torch.empty(values.numel(), dtype=values.dtype, pin_memory=pinned)
    except RuntimeError:
        return torch.empty(values.numel(), dtype=values.dtype)


# the handles of started requests, and waits for them


class Pending:
    """A message, or a collective of the process group, that has started.

    Args:
        work: the work of torch.distributed; None if there is none.
        finish: returns the answer after the work has ended.
        limit_s: time limit of a wait in seconds; None for NCCL, which has its own limit.
        need: the request of the peer that a message waits for.
        keep: memory that must not be freed until the message is sent or received.
    """

    def __init__(
        self,
        work: Any,
        finish: Callable[[], Any],
        limit_s: float | None,
        need: Need | None = None,
        keep: Any = None,
    ) -> None:
        self.work, self.finish, self.limit_s = work, finish, limit_s
        self.need, self.keep = need, keep
        self.is_ended, self.answer = False, None

    def find_need(self) -> Need | None:
        """Return the request of the peer that it waits for."""
        return self.need

    def result(self) -> Any:
        """Wait until it has ended, and return the answer."""
        if not self.is_ended:
            # gloo would wait for another message
            self._wait()
            self.answer = self.finish()
            self.is_ended, self.keep = True, None
        return self.answer

    def _wait(self) -> None:
        if self.work is not None:
            _wait(self.work, self.limit_s)


class PendingAny(Pending):
    """A receive from any rank that has started.

    gloo ends a wait for a message of any rank only by a message, and a time limit would close the
    connections to all ranks. So a daemon thread waits, and the caller waits for the thread.

    Args:
        work: the work of torch.distributed.
        finish: returns the answer for the rank that has sent the message.
        keep: memory that must not be freed until the message is received.
        find_need: returns the requests of which one ends the wait.
        limit_s: time limit of a wait in seconds.
    """

    def __init__(
        self,
        work: Any,
        finish: Callable[[int], Any],
        keep: Any,
        find_need: Callable[[], Need],
        limit_s: float,
    ) -> None:
        self.source: Future[int] = Future()
        self._find_need = find_need
        # the thread may outlive this object, but not the memory that is written
        thread = threading.Thread(target=_wait_for_any, args=(work, self.source, keep), daemon=True)
        thread.start()
        super().__init__(work, lambda: finish(self.source.result()), limit_s, None, keep)

    def find_need(self) -> Need:
        """Return the requests of which one ends the wait."""
        return self._find_need()

    def _wait(self) -> None:
        try:
            self.source.result(self.limit_s)
        except FutureTimeout:
            limit = TimeoutError("no rank has sent such a message within the time limit")
            raise ConnectionBroken from limit

    def abort(self) -> None:
        """End the wait with an error."""
        error = ConnectionBroken()
        error.__cause__ = RuntimeError("the connections of this rank are closed")
        with suppress(InvalidStateError):
            self.source.set_exception(error)


def _wait_for_any(work: Any, source: "Future[int]", keep: Any) -> None:
    with suppress(InvalidStateError):
        try:
            _wait(work, UNLIMITED_S)
            source.set_result(work._source_rank())
        except ConnectionBroken as error:
            source.set_exception(error)


def _wait(work: Any, limit_s: float | None) -> None:
    """Wait for work of torch.distributed; `limit_s` is None for NCCL, which has its own limit."""
    with network():
        if limit_s is None:
            # with a time limit, the host would poll until the device has finished
            work.wait()
        else:
            # gloo's messages have no other time limit; after a timeout the connection is closed
            work.wait(timedelta(seconds=limit_s))


class Background:
    """A request or an algorithm that runs on a channel's thread.

    Args:
        future: its end.
        receives: the receives that run before it, which have no time limit on their thread.
        find_need: returns the request of a peer that it waits for.
        timeout_s: time limit of the group, for receives.
        limit_s: time limit of a wait in seconds; None for collectives, which have their own.
        finish: returns the answer for the result of the thread.
    """

    def __init__(
        self,
        future: Future[Any],
        receives: Sequence[Future[Any]],
        find_need: Callable[[], Need | None],
        timeout_s: float,
        limit_s: float | None = None,
        finish: Callable[[Any], Any] = lambda answer: answer,
    ) -> None:
        self.future, self.receives, self.find_need = future, receives, find_need
        self.timeout_s, self.limit_s, self.finish = timeout_s, limit_s, finish

    def result(self) -> Any:
        """Wait for the answer, and return it."""
        for receive in self.receives:
            if receive in wait([receive], self.timeout_s).not_done:
                limit = TimeoutError("an earlier receive on this channel has no message")
                raise BlockedByReceive from limit
        self.receives = ()
        try:
            return self.finish(self.future.result(self.limit_s))
        except FutureTimeout:
            raise ConnectionBroken from TimeoutError("no message within the time limit")


class AnyOnChannel(Background):
    """A receive from any rank on a channel, which has a thread of its own."""

    def __init__(self, pending: PendingAny, timeout_s: float) -> None:
        super().__init__(pending.source, (), pending.find_need, timeout_s)
        self.pending = pending

    def result(self) -> Any:
        """Wait until a message is received, and return the answer."""
        return self.pending.result()


def find_first_need(request: First) -> Need | None:
    """Return the requests of peers that a `First` waits for; None if it ends by itself."""
    needs = [each.find_need() for each in request.pending]
    if request.seconds is not None or not all(needs):
        return None
    found = [need for need in needs if need is not None]
    if len(found) == 1:
        return found[0]
    alternatives = [
        each
        for need in found
        for each in need.alternatives or [(need.peer, need.sequence, need.number)]
    ]
    peer, sequence, number = alternatives[0]
    return Need(peer, sequence, number, alternatives=alternatives)


def wait_for_first(request: First) -> int | None:
    """Return the index of a request that has ended; see `First`."""
    check_on_channels(request, Background)
    futures = [each.future for each in request.pending]
    # an ended wait does not affect the requests, unlike the time limit of gloo's waits, which
    # closes the connection
    limit = request.seconds
    if limit is not None and limit > threading.TIMEOUT_MAX:
        limit = None
    ended, _ = wait(futures, limit, FIRST_COMPLETED)
    return next((index for index, each in enumerate(futures) if each in ended), None)


def abandon(request: Abandon) -> None:
    """Check an `Abandon`; `Channel.close` ends receives that have no message."""
    check_on_channels(request, Background)


class Channel:
    """Executes requests one after the other, over its own process group.

    Args:
        group: the ranks.
        name: the name of the channel; empty for the default channel.
        process_group: of torch.distributed; None for its default one.
    """

    def __init__(self, group: Connection, name: str, process_group: Any) -> None:
        require(
            name != "default",
            'the channel name "default" is reserved, since messages name the channel of requests '
            "that are not started so",
            "use another name",
        )
        self.group, self.name, self.process_group = group, name, process_group
        self.sequence = channel_sequence(name)
        self.buffers = StagingBuffers()
        self.threads: ThreadPoolExecutor | None = None
        self.streams: CudaStreams | None = None
        self.stream: Any = None
        self.lock = threading.Lock()
        self.caller = ""  # of the current request
        self.header = Header(0, 0, "")  # of the current request
        self.pairs: set[tuple[str, str]] = set()  # of successive requests
        self.need: Need | None = None  # of a collective of the process group
        self.peer: int | None = None  # that a message of a collective waits for
        self.is_from_all = False  # whether that collective needs the requests of all ranks
        self.received: Pending | None = None  # that this channel's thread waits for
        self.any_receives: set[PendingAny] = set()  # that have not ended
        self.num_started = self.num_finished = 0  # tasks of this channel's thread
        self.receives: list[Future[Any]] = []  # of these tasks, those without a time limit

    @property
    def is_busy(self) -> bool:
        """Whether its thread has unfinished tasks."""
        return self.num_started > self.num_finished

    def find_need(self) -> Need | None:
        """Return the request of a peer that the current request waits for."""
        received, peer = self.received, self.peer
        if received is not None:
            return received.find_need()
        if peer is None:
            return self.need
        return Need(peer, self.sequence, self.header.number, is_for_all=self.is_from_all)

    # collectives

    def execute(self, request: Collective, *, is_started: bool = False) -> Any:
        """Execute a request together with the other ranks, and return its answer.

        Args:
            request: the same on all ranks.
            is_started: whether this channel's thread executes it.
        """
        group, kind = self.group, request.name
        request.check(group.world_size)
        if group.is_nccl(request):
            if not self.name:
                # other channels record no NCCL requests, since the order of threads may differ;
                # the digest of this one is part of later headers
                group.log.record_collective(self.name, request, self.caller)
            return self._start_nccl(request).result()
        with self.lock:
            group.ledger.count(kind)
            before = self.header.words
            self.header = group.log.record_collective(self.name, request, self.caller)
            is_checked = self._add_pair(before, self.header.words)
            is_checked |= self.header.number % CHECK_EVERY == 0
            is_on_gpu = request.is_on_gpu
            staged = request.copy_to_host(self.buffers.copy_to_host) if is_on_gpu else request
            if group.world_size > 1 and request.is_builtin(is_started=is_started):
                group.ledger.add(kind, self._sent_bytes(request), 0)
                answer = self._run_builtin(staged, is_checked=is_checked)
            else:
                algorithm = staged.messages(group.rank, group.world_size, is_builtin=False)
                answer = self._run_messages(algorithm, kind, is_from_all=request.is_from_all)
            if is_on_gpu:
                answer = request.copy_answer(answer)
            self.buffers.take_back()
        return answer

    def _sent_bytes(self, request: Collective) -> int:
        return round(request.sent_bytes(self.group.rank, self.group.world_size))

    def check_agreement(self, words: str) -> None:
        """Wait until all ranks have made the same call, described by `words`, with a barrier."""
        with self.lock:
            self.header = self.group.log.record(self.sequence, words, caller=self.caller)
            self._run_barrier()

    def _run_barrier(self) -> None:
        """Run a barrier, whose messages have the header of the current request."""
        algorithm = barrier(self.group.rank, self.group.world_size)
        self._run_messages(algorithm, "", is_from_all=True)

    def _add_pair(self, before: str, words: str) -> bool:
        """Whether these two requests follow each other for the first time on this channel."""
        if len(self.pairs) >= PAIRS_KEPT:
            self.pairs.clear()
        count = len(self.pairs)
        self.pairs.add((before, words))
        return len(self.pairs) > count

    def _run_messages(self, algorithm: Algorithm[Any], kind: str, *, is_from_all: bool) -> Any:
        """Run a collective by its messages, and return its answer.

        Small collectives spend their time here, so this function calls torch.distributed's process
        group directly, and has no function of its own for a message.

        Args:
            algorithm: yields `Scratch`, `Send` and `Receive`, and `Start` and `Wait` of these two.
            kind: the kind of request that the ledger counts the messages for; empty for none.
            is_from_all: see `Collective`; a rank that has not made the request may then be another
                one than the rank of the message.

        Raises:
            ConnectionBroken: a connection broke, or a message took longer than the group's limit.
        """
        self.is_from_all, header, buffers = is_from_all, self.header, self.buffers
        process_group: Any = self.process_group or dist.group.WORLD
        limit = timedelta(seconds=self.group.timeout_s)
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
                elif step_type is Scratch:
                    answer = buffers.lend(step.values)
                    continue
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
                self.group.ledger.add(kind, bytes_sent, num_sent)

    def _run_builtin(self, request: Collective, *, is_checked: bool) -> Any:
        """Execute `request` with the process group's own collective, which has no headers.

        If `is_checked`, a barrier, whose messages have headers, precedes it: if the request follows
        the previous one for the first time on this channel, and for one of `CHECK_EVERY` requests.
        If one rank waits in the barrier and another in a collective, their requests are compared.
        A mismatch elsewhere starts different gloo collectives, which may end a process or compute a
        wrong result; a header shows it fewer than `CHECK_EVERY` requests later.
        """
        group, header = self.group, self.header
        if is_checked:
            self._run_barrier()
        peer = (group.rank + 1) % group.world_size
        self.need = Need(peer, self.sequence, header.number, is_for_all=True)
        with network():
            work = self._start_builtin(request)
        answer = work.result()
        self.need = None
        return answer

    def _start_builtin(self, request: Collective) -> Pending:
        """Start the process group's own collective."""
        work, finish = _BUILTIN[type(request)](request, self)
        return Pending(work, finish, self.group.limit_s(request))

    def _start_nccl(self, request: Collective) -> Pending:
        self.group.ledger.count(request.name)
        self.group.ledger.add(request.name, self._sent_bytes(request), 0)
        return self._start_builtin(request)

    # messages of the algorithm itself

    def start_message(self, request: Message, caller: str) -> Pending:
        """Start a `Send`, `Receive` or `ReceiveAny`.

        Raises:
            ValueError: see `Message.check`; or a `ReceiveAny` over NCCL has a tensor on a GPU.
        """
        group, buffers, is_any = self.group, self.buffers, isinstance(request, ReceiveAny)
        request.check(group.rank, group.world_size)
        if group.is_nccl(request) or not request.is_on_gpu:
            if is_any and request.is_on_gpu:
                raise ValueError(
                    f"{request.describe()} over NCCL has a tensor on a GPU\n\n"
                    "hint: receive into a tensor on the host, and send from one"
                )
            return self._start_message(request, caller)
        values = request.values
        host = buffers.lend(values, pinned=True, is_kept=True)
        if isinstance(request, Send):
            host.view(values.shape).copy_(values)
        work = self._start_message(replace(request, values=host), caller)  # type: ignore[type-var]
        finish = work.finish

        def copy_and_finish() -> Any:
            answer = finish()
            if answer is not None:
                values.copy_(host.view(values.shape))
                answer = (values, answer[1]) if is_any else values
            buffers.give_back(host, pinned=True)
            return answer

        work.finish = copy_and_finish
        return work

    def _start_message(self, request: Message, caller: str) -> Pending:
        if isinstance(request, ReceiveAny):
            return self._start_any(request, caller)
        assert isinstance(request, Send | Receive), "there are no other messages"
        group, data = self.group, as_bytes(request.values)
        sequence = request.sequence(group.rank, self.name, caller)
        header = group.log.record_message(request, caller, self.name)
        need, is_send = Need(request.peer, sequence, header.number), isinstance(request, Send)
        answer = None if is_send else request.values
        peer = self.process_group, message_tag(header, len(data))
        with network():
            start = dist.isend if is_send else dist.irecv
            work = start(data, group.ranks[request.peer], *peer)
        if is_send:
            group.ledger.add("Send", len(data))
        return Pending(work, lambda: answer, group.limit_s(request), need, data)

    def _start_any(self, request: ReceiveAny, caller: str) -> PendingAny:
        """Start a receive from any rank, whose values are on the host."""
        group, name = self.group, self.name
        alone = f"{request.describe()} on rank 0 of 1"
        require(group.world_size > 1, alone, "there is no other rank to send it")
        log, values, data = group.log, request.values, as_bytes(request.values)
        header = log.describe_any(request, caller)

        def find_need() -> Need:
            """Return the next message with the tag of each rank."""
            sequences = (
                (peer, request.name_sequence(peer, group.rank, name, caller))
                for peer in range(group.world_size)
                if peer != group.rank
            )
            needs = tuple((peer, each, log.count(each) + 1) for peer, each in sequences)
            return Need(*needs[0], alternatives=needs)

        def finish(source: int) -> tuple[Any, int]:
            self.any_receives.discard(work)
            sequence = request.name_sequence(source, group.rank, name, caller)
            log.record(sequence, header.words, is_ordered=False)
            return values, source

        with network():
            process_group: Any = self.process_group or dist.group.WORLD
            receive = process_group.recv_anysource([data], message_tag(header, len(data)))
        work = PendingAny(receive, finish, data, find_need, group.timeout_s)
        self.any_receives.add(work)
        return work

    # requests that this channel's thread executes

    def start(self, request: Request | Algorithm[Any]) -> Any:
        """Start a request, or an algorithm, in the background."""
        if isinstance(request, Generator):
            return self._start_algorithm(request)
        if isinstance(request, Message):
            hint = "copy it to the host, or start the message without a channel"
            on_gpu = f"{request.describe()} on a channel has a tensor on a GPU"
            require(not request.is_on_gpu, on_gpu, hint)
            caller = self.group.caller
            if type(request) is Send:
                return self.start_message(request, caller)
            if type(request) is ReceiveAny:
                request.check(self.group.rank, self.group.world_size)
                return AnyOnChannel(self._start_any(request, caller), self.group.timeout_s)
            pending = self._background(lambda: self._receive(request), self.group.timeout_s)
            self.receives.append(pending.future)
            return pending
        check_kind(request, Collective, "the start of")
        assert isinstance(request, Collective), "checked by check_kind"
        request.check(self.group.world_size)
        if self.group.is_nccl(request):
            # NCCL runs it on its own stream, without a thread
            return self._start_nccl(request)
        ready = torch.cuda.current_stream().record_event() if request.is_on_gpu else None
        return self._background(lambda: self._run_after(ready, request))

    def _background(
        self,
        function: Callable[[], Any],
        limit_s: float | None = None,
        finish: Callable[[Any], Any] = lambda answer: answer,
    ) -> Background:
        """Run a function on this channel's thread; see `Background`."""
        own = tuple(self.pending_receives()), self.find_need, self.group.timeout_s, limit_s, finish
        return Background(self._submit(function), *own)

    def pending_receives(self) -> tuple[Future[Any], ...]:
        """Return the receives on this channel's thread that have not ended."""
        self.receives = [each for each in self.receives if not each.done()]
        return tuple(self.receives)

    def _submit(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function on this channel's thread."""
        if self.threads is None:
            self.threads = ThreadPoolExecutor(1, f"gcnzc-exchange-{self.name}")
        caller = self.group.caller

        def work() -> T:
            self.caller = caller
            try:
                return function()
            finally:
                self.num_finished += 1

        self.num_started += 1
        return self.threads.submit(work)

    def _run_after(self, ready: Any, request: Collective) -> Any:
        if ready is not None:
            ready.synchronize()
        return self._run_timed(request)

    def _run_timed(self, request: Collective) -> Any:
        """Execute `request` on this channel's thread, and record its time."""
        began = time.perf_counter()
        answer = self.execute(request, is_started=True)
        if self.group.world_size > 1:
            self.group.overlapped.append((began, time.perf_counter()))
        return answer

    def _start_algorithm(self, algorithm: Algorithm[Any]) -> Any:
        """Run an algorithm on this channel's thread, and with CUDA on this channel's stream.

        The stream first waits for the work queued on the caller's stream. The result's stream waits
        for the work of the algorithm.
        """
        if not torch.cuda.is_initialized():
            return self._background(lambda: self._run_algorithm(algorithm))
        if self.streams is None:
            self.streams = CudaStreams(torch.device("cuda", torch.cuda.current_device()))
            self.stream = self.streams.new()
        streams, stream = self.streams, self.stream
        ready = streams.current().record()

        def on_stream() -> Any:
            stream.wait(ready)
            answers: list[Any] = []
            stream.do(lambda: answers.append(self._run_algorithm(algorithm)))
            return answers[0], stream.record()

        def finish(result: tuple[Any, Any]) -> Any:
            answer, done = result
            streams.current().wait(done)
            return answer

        return self._background(on_stream, finish=finish)

    def _run_algorithm(self, algorithm: Algorithm[Any]) -> Any:
        answer: Any = None
        handlers: dict[type, Callable[[Any], Any]] = {
            Scratch: lambda request: torch.empty_like(request.values),
            Compute: Compute.sleep,
        }
        while True:
            try:
                request = algorithm.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = handlers.get(type(request), self._run_exchange)(request)

    def _run_exchange(self, request: Any) -> Any:
        check_kind(request, Collective, "a started algorithm yields")
        return self._run_timed(request)

    def _receive(self, request: Message) -> Any:
        """Receive a message on this channel's thread, without a time limit.

        gloo would close the channel's connections to all ranks after the time limit of a wait.
        `Wait` has the time limit of the group, and `First` its own.
        """
        work = self.start_message(request, self.caller)
        work.limit_s = UNLIMITED_S
        self.received = work
        try:
            return work.result()
        finally:
            self.received = None

    def abort(self) -> None:
        """End all waits over the connections of the process group."""
        for each in list(self.any_receives):
            each.abort()
        process_group = self.process_group or dist.group.WORLD
        if process_group is None:
            # it is destroyed already
            return
        # ValueError: it is being destroyed
        with suppress(RuntimeError, ValueError):
            # gloo closes all connections when a wait times out, and has no other call to do so
            peer = (self.group.rank + 1) % self.group.world_size
            work: Any = process_group.recv([torch.empty(1)], peer, ABORT_TAG)
            work.wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Stop the thread that executes requests in the background."""
        if self.threads is not None:
            self.threads.shutdown(wait=False, cancel_futures=True)
        if self.is_busy and self.pending_receives():
            # otherwise its thread would wait forever, and the process for the thread
            self.abort()


# the process group's own collectives, as functions that start one, and return its work and a
# function that returns the answer after the work has ended


def _start_all_reduce(request: AllReduce, on: Channel) -> tuple[Any, Callable[[], Tensor]]:
    work = dist.all_reduce(request.values.view(-1), group=on.process_group, async_op=True)
    return work, lambda: request.finish(on.group.world_size)


def _start_broadcast(request: Broadcast, on: Channel) -> tuple[Any, Callable[[], Tensor]]:
    flat, root = as_bytes(request.values), on.group.ranks[request.root]
    work = dist.broadcast(flat, root, group=on.process_group, async_op=True)
    return work, lambda: request.copy_back(flat)


def _start_all_gather(request: AllGather, on: Channel) -> tuple[Any, Callable[[], Tensor]]:
    values, world_size = as_bytes(request.values), on.group.world_size
    rows = values.new_empty(world_size * len(values))
    work = _all_gather(rows, values, group=on.process_group, async_op=True)
    shape = world_size, *request.values.shape
    return work, lambda: from_bytes(rows, request.values, *shape)


def _start_reduce_scatter(request: ReduceScatter, on: Channel) -> tuple[Any, Callable[[], Tensor]]:
    share = request.values.new_empty(request.values.numel() // on.group.world_size)
    values = request.values.view(-1)
    work = _reduce_scatter(share, values, group=on.process_group, async_op=True)
    return work, lambda: share


def _start_all_to_all(request: AllToAll, on: Channel) -> tuple[Any, Callable[[], list[Tensor]]]:
    """Start the all-to-all of the process group, after that of the lengths if need be."""
    parts, dtype = [as_bytes(part) for part in request.parts], request.parts[0].dtype
    counts = request.counts
    if counts is None:
        # host tensors, so gloo exchanges them without a device synchronization
        lengths = torch.tensor([len(part) for part in request.parts])
        received_lengths = torch.empty_like(lengths)
        dist.all_to_all_single(received_lengths, lengths, group=on.process_group)
        counts = received_lengths.tolist()
    sizes = [count * dtype.itemsize for count in counts]
    received = parts[0].new_empty(sum(sizes))
    own = [len(part) for part in parts]
    work = dist.all_to_all_single(
        received, torch.cat(parts), sizes, own, group=on.process_group, async_op=True
    )
    # the parts have one dtype, so they are aligned for the view
    return work, lambda: [part.view(dtype) for part in received.split(sizes)]


def _start_send_receive(request: SendReceive, on: Channel) -> tuple[Any, Callable[[], Tensor]]:
    """Start a send and a receive of the process group; nothing if the peer is this rank."""
    other, values = torch.empty_like(request.values), request.values
    if request.peer == on.group.rank:
        return None, lambda: other.copy_(values)
    peer = on.group.ranks[request.peer]
    both = (dist.isend, values), (dist.irecv, other)
    operations = [dist.P2POp(start, tensor, peer, on.process_group) for start, tensor in both]
    return dist.batch_isend_irecv(operations)[-1], lambda: other


_BUILTIN: dict[type[Collective], Callable[[Any, Channel], tuple[Any, Callable[[], Any]]]] = {
    Sum: _start_all_reduce,
    Mean: _start_all_reduce,
    Broadcast: _start_broadcast,
    AllGather: _start_all_gather,
    ReduceScatter: _start_reduce_scatter,
    AllToAll: _start_all_to_all,
    SendReceive: _start_send_receive,
}
