"""Channels: execute requests one after the other over a process group of torch.distributed."""

import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gcnzc.exchange.agreement import Header, Need, channel_sequence
from gcnzc.exchange.choices import Choices
from gcnzc.exchange.collectives.messages import send_and_wait, start_receive
from gcnzc.exchange.collectives.subgroup import Subgroup
from gcnzc.exchange.messenger import Messenger
from gcnzc.exchange.request_checks import EXCHANGE, STARTED, check_kind
from gcnzc.exchange.requests import (
    BUILTIN,
    Algorithm,
    Collective,
    Compute,
    Message,
    ReceiveAny,
    Request,
    Scratch,
    Send,
)
from gcnzc.exchange.staging import StagingBuffers
from gcnzc.exchange.started_requests import (
    UNLIMITED_S,
    AlgorithmOnStream,
    AnyOnChannel,
    Background,
    PendingCollective,
    PendingMessage,
    network,
)
from gcnzc.system.streams import CudaStreams

if TYPE_CHECKING:
    from gcnzc.exchange.group import Group

# A barrier: all ranks wait until all have called it.


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


T = TypeVar("T")


# torch 2.13 renames these functions, and warns about the old names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# how many pairs of successive requests a channel stores
PAIRS_KEPT = 4096


# at least one of this many requests of a channel has a header; the barrier that sends it takes
# about as long as a short collective of torch
CHECK_EVERY = 128


def new_process_group(group: "Group", name: str) -> Any:
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


class BuiltinCollectives:
    """The collectives of a process group of torch.distributed, with the ranks of a group.

    Each method starts a collective, and returns its work.
    """

    def __init__(self, group: "Group", process_group: Any) -> None:
        self.group, self.process_group = group, process_group
        self.options = {"group": process_group, "async_op": True}

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.group.world_size

    def all_reduce(self, values: Tensor) -> Any:
        """All-reduce (n,) in place with a sum."""
        return dist.all_reduce(values, **self.options)

    def broadcast(self, values: Tensor, root: int) -> Any:
        """Broadcast (n,) from one rank of the group, in place."""
        return dist.broadcast(values, self.group.ranks[root], **self.options)

    def all_gather(self, rows: Tensor, values: Tensor) -> Any:
        """All-gather `values`, (n,), to `rows`, (W n,)."""
        return _all_gather(rows, values, **self.options)

    def reduce_scatter(self, share: Tensor, values: Tensor) -> Any:
        """Reduce-scatter `values`, (n,), to `share`, (n / W,), with a sum."""
        return _reduce_scatter(share, values, **self.options)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_sizes: list[int] | None = None,
        sent_sizes: list[int] | None = None,
    ) -> Any:
        """Exchange the parts of `sent`, which have these sizes; None divides it equally."""
        return dist.all_to_all_single(received, sent, received_sizes, sent_sizes, **self.options)

    def send_receive(self, sent: Tensor, received: Tensor, peer: int) -> Any:
        """Send a tensor to one rank of the group, and receive another from it."""
        peer = self.group.ranks[peer]
        operations = [
            dist.P2POp(dist.isend, sent, peer, self.process_group),
            dist.P2POp(dist.irecv, received, peer, self.process_group),
        ]
        return dist.batch_isend_irecv(operations)[-1]


class Channel:
    """Executes requests one after the other, over its own process group."""

    def __init__(self, group: "Group", name: str, process_group: Any) -> None:
        if name == "default":
            raise ValueError(
                'the channel name "default" is reserved, since messages name the channel of '
                "requests that are not started so\n\nhint: use another name"
            )
        self.group, self.process_group = group, process_group
        self.builtin = BuiltinCollectives(group, process_group)
        self.buffers = StagingBuffers()
        self.threads: ThreadPoolExecutor | None = None
        self.streams: CudaStreams | None = None
        self.stream: Any = None
        self.sequence = channel_sequence(name)
        self.name = name
        self.caller = ""  # of the current request
        self.lock = threading.Lock()
        self.header = Header(0, 0, "")  # of the current request
        self.pairs: set[tuple[str, str]] = set()  # of successive requests
        self.need: Need | None = None  # of a collective of the process group
        self.received: PendingMessage | None = None  # that this channel's thread waits for
        self.messenger = Messenger(self)
        self.num_started = self.num_finished = 0  # tasks of this channel's thread
        self.receives: list[Future[Any]] = []  # of these tasks, those without a time limit

    @property
    def is_busy(self) -> bool:
        """Whether its thread has unfinished tasks."""
        return self.num_started > self.num_finished

    def find_need(self) -> Need | None:
        """Return the request of a peer that the current request waits for."""
        received = self.received
        if received is not None:
            return received.find_need()
        return self.need or self.messenger.find_need()

    def set_caller(self, name: str) -> str:
        """Set the caller of the requests that follow, and return the previous one."""
        before, self.caller = self.caller, name
        return before

    def start(self, request: Request | Algorithm[Any]) -> Any:
        """Start a request, or an algorithm, in the background."""
        if isinstance(request, Generator):
            return self._start_algorithm(request)
        if isinstance(request, Message):
            if request.is_on_gpu:
                raise ValueError(
                    f"{request.describe()} on a channel has a tensor on a GPU\n\n"
                    "hint: copy it to the host, or start the message without a channel"
                )
            if type(request) is Send:
                return self.start_message(request, self.group.caller)
            if type(request) is ReceiveAny:
                return AnyOnChannel(self.messenger.start_any(request, self.group.caller), self)
            receive = request
            future = self._submit(lambda: self._receive(receive))
            pending = Background(future, self, is_receive=True)
            self.receives.append(future)
            return pending
        check_kind(request, STARTED, "the start of")
        assert isinstance(request, Collective | Subgroup), "messages and algorithms are above"
        if isinstance(request, Collective):
            request.check(self.group.world_size)
        is_nccl = self.group.backend == "nccl" and request.is_on_gpu
        if is_nccl and isinstance(request, Collective):
            # NCCL runs it on its own stream, without a thread
            return self._nccl(request)
        ready = torch.cuda.current_stream().record_event() if request.is_on_gpu else None
        return Background(self._submit(lambda: self._run_after(ready, request)), self)

    def pending_receives(self) -> tuple["Future[Any]", ...]:
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

    def _run_after(self, ready: Any, request: Collective | Subgroup) -> Any:
        if ready is not None:
            ready.synchronize()
        return self._run_timed(request)

    def _run_timed(self, request: Collective | Subgroup) -> Any:
        """Execute `request` on this channel's thread, and record its time."""
        began = time.perf_counter()
        answer = self.execute(request, self.group.choices.in_background)
        if self.group.world_size > 1:
            self.group.overlapped.append((began, time.perf_counter()))
        return answer

    def _start_algorithm(self, algorithm: Algorithm[Any]) -> Any:
        """Run an algorithm on this channel's thread, and with CUDA on this channel's stream.

        The stream first waits for the work queued on the caller's stream. The result's stream waits
        for the work of the algorithm.
        """
        if not torch.cuda.is_initialized():
            return Background(self._submit(lambda: self._run_algorithm(algorithm)), self)
        if self.streams is None:
            self.streams = CudaStreams(torch.device("cuda", torch.cuda.current_device()))
            self.stream = self.streams.new()
        stream, ready = self.stream, self.streams.current().record()

        def on_stream() -> Any:
            stream.wait(ready)
            answers: list[Any] = []
            stream.do(lambda: answers.append(self._run_algorithm(algorithm)))
            return answers[0], stream.record()

        return AlgorithmOnStream(self._submit(on_stream), self)

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
        check_kind(request, EXCHANGE, "a started algorithm yields")
        return self._run_timed(request)

    def execute(self, request: Collective | Subgroup, choices: Choices | None = None) -> Any:
        """Execute a request together with the other ranks, and return its answer.

        Args:
            request: the same on all ranks.
            choices: selects the algorithm; None uses those of the group.
        """
        group = self.group
        if isinstance(request, Subgroup):
            return self._execute_subgroup(request, choices or group.choices)
        request.check(group.world_size)
        is_on_gpu = request.is_on_gpu
        if group.backend == "nccl" and is_on_gpu:
            if not self.name:
                # other channels record no NCCL requests, since the order of threads may differ;
                # the digest of this one is part of later headers
                group.log.record_collective(self.name, request, self.caller)
            return self._nccl(request).result()
        kind = request.name
        with self.lock:
            group.ledger.count(kind)
            before = self.header.words
            self.header = group.log.record_collective(self.name, request, self.caller)
            is_checked = self._add_pair(before, self.header.words)
            is_checked |= self.header.number % CHECK_EVERY == 0
            staged = request.copy_to_host(self.buffers) if is_on_gpu else request
            name = (choices or group.choices).find(staged, group.world_size)
            if name == BUILTIN and group.world_size > 1:
                sent = round(request.sent_bytes(name, group.rank, group.world_size))
                group.ledger.add(kind, sent, 0)
                answer = self._run_builtin(staged, is_checked=is_checked)
            else:
                algorithm = staged.messages(name, group.rank, group.world_size)
                answer = self.messenger.run(
                    algorithm,
                    kind,
                    self.sequence,
                    self.header,
                    is_from_all=request.is_from_all,
                )
            if is_on_gpu:
                answer = request.copy_answer(answer)
            self.buffers.take_back()
        return answer

    def _execute_subgroup(self, request: Subgroup, choices: Choices) -> Any:
        """Execute a collective of some ranks by messages, and return its answer."""
        group, collective, is_on_gpu = self.group, request.request, request.is_on_gpu
        request.check(group.rank, group.world_size)
        with self.lock:
            group.ledger.count(request.name)
            # `self.header` does not change: other ranks have not made this request
            header = group.log.record_collective(self.name, request, self.caller)
            staged = collective.copy_to_host(self.buffers) if is_on_gpu else collective
            name = choices.find(staged, len(request.ranks))
            algorithm = request.messages(name, group.rank, staged)
            sequence = request.sequence(self.name)
            answer = self.messenger.run(algorithm, request.name, sequence, header)
            if is_on_gpu:
                answer = collective.copy_answer(answer)
            self.buffers.take_back()
        return answer

    def _add_pair(self, before: str, words: str) -> bool:
        """Whether these two requests follow each other for the first time on this channel."""
        if len(self.pairs) >= PAIRS_KEPT:
            self.pairs.clear()
        count = len(self.pairs)
        self.pairs.add((before, words))
        return len(self.pairs) > count

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

    def _run_barrier(self) -> None:
        """Run a barrier, whose messages have the header of the current request."""
        algorithm = barrier(self.group.rank, self.group.world_size)
        self.messenger.run(algorithm, "", self.sequence, self.header, is_from_all=True)

    def check_agreement(self, words: str) -> None:
        """Wait until all ranks have made the same call, described by `words`, with a barrier."""
        with self.lock:
            self.header = self.group.log.record(self.sequence, words, caller=self.caller)
            self._run_barrier()

    def _receive(self, request: Message) -> Any:
        """Receive a message on this channel's thread, without a time limit.

        gloo would close the channel's connections to all ranks after the time limit of a wait.
        `Wait` has the time limit of the group, and `First` its own.
        """
        work = self.messenger.start(request, self.caller)
        work.limit_s = UNLIMITED_S
        self.received = work
        try:
            return work.result()
        finally:
            self.received = None

    def start_message(self, request: Message, caller: str) -> PendingMessage:
        """Start a `Send`, `Receive` or `ReceiveAny` of the algorithm itself."""
        return self.messenger.start(request, caller)

    def abort(self) -> None:
        """End all waits over this channel's connections."""
        self.messenger.abort()

    def _nccl(self, request: Collective) -> "PendingCollective":
        group, kind = self.group, request.name
        group.ledger.count(kind)
        name = group.choices.find(request, group.world_size)
        sent = round(request.sent_bytes(name, group.rank, group.world_size))
        group.ledger.add(kind, sent, 0)
        return self._start_builtin(request)

    def _start_builtin(self, request: Collective) -> "PendingCollective":
        """Start the process group's own collective."""
        work, finish = request.start_builtin(self.builtin)
        return PendingCollective(work, finish, self._limit_s(request))

    def _limit_s(self, request: Collective | Message) -> float | None:
        """Return the time limit of a wait in seconds; None for NCCL, which has its own limit."""
        is_nccl = self.group.backend == "nccl" and request.is_on_gpu
        return None if is_nccl else self.group.timeout_s

    def close(self) -> None:
        """Stop the thread that executes requests in the background."""
        if self.threads is not None:
            self.threads.shutdown(wait=False, cancel_futures=True)
        if self.is_busy and self.pending_receives():
            # otherwise its thread would wait forever, and the process for the thread
            self.abort()
