"""Started requests over processes: messages, tasks of the threads of channels, and their waits."""

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from gcnzc.exchange.collectives import Collective, as_bytes
from gcnzc.exchange.errors import BlockedByReceive, ConnectionBroken, network
from gcnzc.exchange.process_group import Channel, wait_for_work
from gcnzc.exchange.request_log import Need, RequestLog, message_tag
from gcnzc.exchange.requests import First, Message, Receive, ReceiveAny, Send, require
from gcnzc.system.streams import CudaStreams

# time limit of a wait that has none: gloo's waits have one
UNLIMITED_S = 3e7


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
        future: "Future[Any] | None" = None,
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
    alternatives = [
        each
        for need in needs
        for each in need.alternatives or [(need.peer, need.sequence, need.number)]
    ]
    peer, sequence, number = alternatives[0]
    return Need(peer, sequence, number, alternatives=alternatives)


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


# messages of algorithms


def start_message(
    channel: Channel, message: Message, caller: str, *, is_limited: bool = True
) -> Pending:
    """Start a `Send`, `Receive` or `ReceiveAny`.

    Args:
        channel: the channel.
        message: the message; a tensor on a GPU is copied through the host over gloo.
        caller: the caller; empty for none.
        is_limited: whether a wait has the time limit of the group.

    Raises:
        ValueError: see `Message.check`; or a `ReceiveAny` over NCCL has a tensor on a GPU.
    """
    ranks, is_send = channel.ranks, isinstance(message, Send)
    message.check(ranks.rank, ranks.world_size)
    is_nccl = ranks.is_nccl(message)
    if message.is_on_gpu and not is_nccl:
        return _start_staged(channel, message, caller)
    if isinstance(message, ReceiveAny):
        return start_any(channel, message, caller)
    peer: int = message.peer  # type: ignore[attr-defined]
    data, sequence = as_bytes(message.values), message.sequence(ranks.rank, channel.name, caller)
    header = ranks.log.record(sequence, message, caller, is_ordered=message.tag is None)
    tag, start = message_tag(header, len(data)), dist.isend if is_send else dist.irecv
    with network():
        work = start(data, ranks.ranks[peer], channel.process_group, tag)
    if is_send:
        ranks.ledger.add("Send", len(data))
    limit_s = ranks.timeout_s if is_limited else UNLIMITED_S

    def finish() -> Any:
        wait_for_work(work, None if is_nccl else limit_s)
        return None if is_send else message.values

    need = Need(peer, sequence, header.number)
    return Pending(finish, lambda: need)


def _start_staged(channel: Channel, message: Message, caller: str) -> Pending:
    """Start a message with a copy of its values in page-locked memory."""
    values, free = message.values, channel.buffers.find(message.values, pinned=True)
    host = free.pop()
    if isinstance(message, Send):
        host.view(values.shape).copy_(values)
    pending = start_message(channel, replace(message, values=host), caller)  # type: ignore[type-var]

    def finish() -> Any:
        answer = pending.result()
        if answer is not None:
            values.copy_(host.view(values.shape))
            answer = (values, answer[1]) if isinstance(message, ReceiveAny) else values
        free.append(host)
        return answer

    return Pending(finish, pending.find_need)


def start_any(
    channel: Channel, message: ReceiveAny, caller: str, *, is_on_channel: bool = False
) -> Pending:
    """Start a receive from any rank, which may be on a channel.

    gloo ends a wait for a message of any rank only by a message, and a time limit would close the
    connections to all ranks. So a daemon thread waits, and the caller waits for the thread.
    """
    ranks, values, data = channel.ranks, message.values, as_bytes(message.values)
    alone = f"{message.describe()} on rank 0 of 1"
    require(ranks.world_size > 1, alone, "there is no other rank to send it")
    on_gpu = f"{message.describe()} over NCCL has a tensor on a GPU"
    hint = "receive into a tensor on the host, and send from one"
    require(not message.is_on_gpu, on_gpu, hint)
    source: Future[int] = Future()

    def name_sequence(peer: int) -> str:
        return message.sequence(ranks.rank, channel.name, caller, peer)

    def find_need() -> Need:
        """Return the next message with the tag of each rank."""
        peers = [peer for peer in range(ranks.world_size) if peer != ranks.rank]
        names = [(peer, name_sequence(peer)) for peer in peers]
        needs = tuple((peer, name, ranks.log.count(name) + 1) for peer, name in names)
        return Need(*needs[0], alternatives=needs)

    def finish() -> Any:
        try:
            peer = source.result(ranks.timeout_s)
        except FutureTimeout:
            limit = TimeoutError("no rank has sent such a message within the time limit")
            raise ConnectionBroken from limit
        channel.any_receives.discard(source)
        ranks.log.record(name_sequence(peer), message, caller, is_ordered=False)
        return values, peer

    header = RequestLog().record("", message, caller)
    with network():
        work = channel.torch_group.recv_anysource([data], message_tag(header, len(data)))
    channel.any_receives.add(source)
    # the thread may outlive the handle, but not the memory that is written
    threading.Thread(target=_wait_for_any, args=(work, source, data), daemon=True).start()
    return Pending(finish, find_need, source if is_on_channel else None)


def _wait_for_any(work: Any, source: "Future[int]", memory: Any) -> None:
    with suppress(InvalidStateError):
        try:
            wait_for_work(work, UNLIMITED_S)
            source.set_result(work._source_rank())
        except ConnectionBroken as error:
            source.set_exception(error)


def abort(channel: Channel) -> None:
    """End all waits of a channel for messages with an error."""
    for source in list(channel.any_receives):
        error = ConnectionBroken()
        error.__cause__ = RuntimeError("the connections of this rank are closed")
        with suppress(InvalidStateError):
            source.set_exception(error)
    channel.abort()


class ChannelThread:
    """The thread of a channel, which runs its tasks one after the other.

    Args:
        channel: the channel.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.threads = ThreadPoolExecutor(1, f"gcnzc-exchange-{channel.name}")
        self.num_started = self.num_finished = 0
        self.receives: list[Future[Any]] = []  # tasks without a time limit
        self.received: Pending | None = None  # that the thread waits for
        self.streams: CudaStreams | None = None
        self.stream: Any = None

    @property
    def is_busy(self) -> bool:
        """Whether it has unfinished tasks."""
        return self.num_started > self.num_finished

    def find_need(self) -> Need | None:
        """Return the request of a peer that the current request waits for."""
        received = self.received
        return self.channel.find_need() if received is None else received.find_need()

    def start(self, work: Callable[[], Any], started: Any) -> Pending:
        """Run a task for a request or algorithm that was started, and return its handle.

        With CUDA, an algorithm runs on a stream of this channel, which first waits for the work
        that is queued on the caller's stream; the result's stream waits for that of the algorithm.
        """
        if isinstance(started, Receive):
            pending = self._submit(work, limit_s=self.channel.ranks.timeout_s)
            assert pending.future is not None, "it is on this channel"
            self.receives.append(pending.future)
            return pending
        if isinstance(started, Collective):
            ready = torch.cuda.current_stream().record_event() if started.is_on_gpu else None
            return self._submit(lambda: work() if ready is None else _run_after(ready, work))
        if not torch.cuda.is_initialized():
            return self._submit(work)
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

        return self._submit(run_on_stream, finish=finish)

    def _submit(
        self,
        work: Callable[[], Any],
        limit_s: float | None = None,
        finish: Callable[[Any], Any] = lambda answer: answer,
    ) -> Pending:
        """Run a function in the thread; `finish` returns the answer for its result.

        Receives have no time limit in the thread, since gloo would close the connections to all
        ranks then; the wait for what follows them has that of the group.
        """
        before, timeout_s = self.pending_receives(), self.channel.ranks.timeout_s

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
        if self.is_busy and self.pending_receives():
            # otherwise the thread would wait forever, and the process for the thread
            abort(self.channel)


def _run_after(ready: Any, work: Callable[[], Any]) -> Any:
    ready.synchronize()
    return work()
