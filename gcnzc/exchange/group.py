"""Groups of worker processes, and `run`, which executes distributed algorithms on them.

Only this module communicates through torch.distributed. Over gloo, `Choices` selects gcnzc's
collectives or gloo's own; tensors on a GPU are copied through reused page-locked buffers. If each
worker has a GPU of its own, NCCL executes the requests with tensors on GPUs.
"""

import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from gcnzc.exchange.agreement import (
    ABORT_TAG,
    Header,
    Need,
    RequestLog,
    StallMonitor,
    Wait,
    channel_sequence,
    message_sequence,
    message_tag,
    mismatch,
)
from gcnzc.exchange.choices import (
    BUILTIN,
    Choices,
    as_bytes,
    demand,
    expand,
    finished,
    restored,
    sent_bytes,
    vote_tensor,
)
from gcnzc.exchange.collectives import barrier
from gcnzc.exchange.ledger import Ledger
from gcnzc.exchange.meeting import met
from gcnzc.exchange.requests import (
    Algorithm,
    AllGather,
    AllToAll,
    Begin,
    Broadcast,
    Collective,
    Compute,
    End,
    Mean,
    Message,
    Receive,
    ReduceScatter,
    Request,
    Scratch,
    Send,
    Sum,
    Swap,
    Vote,
    described,
)
from gcnzc.exchange.siblings import Siblings
from gcnzc.exchange.watch import STORE_S, Keeper, Watch
from gcnzc.streams import CudaStreams

T = TypeVar("T")

# torch 2.13 renames these functions, and warns about the old names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# default time limit of a request
TIMEOUT_S = 60.0
# time limit of the rendezvous at the start: importing torch takes half a minute on busy cores
JOIN_S = 180.0
# interval of attempts to connect to a store that is not running yet
CONNECT_POLL_S = 0.3
# pairs of successive requests that a channel stores
PAIRS_KEPT = 4096
# at least one of so many requests of a channel has a header; the barrier for that takes about as
# long as a short collective of torch
CHECK_EVERY = 128
# number of the last waits and overlapped exchanges whose times are kept until they are taken
TIMES_KEPT = 10_000


class WorkerLost(RuntimeError):
    """An exchange failed, because a worker or the network failed, or a worker is far behind."""


def run(algorithm: Algorithm[T], group: "Group") -> T:
    """Run a distributed algorithm together with the other workers, and return its result.

    Args:
        algorithm: the same on every worker.
        group: the workers. Tensors of requests lie on the host or on this worker's GPU. They must
            be ready on its current stream, on which the results are ready too.

    Raises:
        WorkerLost: another worker did not respond in time, or has ended; the message names it.
        RequestMismatch: the ranks made different requests; raised on all of them.
    """
    return group.run(algorithm)


class Group:
    """A group of workers that communicate, of which this process is one.

    Args:
        rank: this worker, in [0, world_size).
        world_size: the number of workers.
        backend: "gloo" or "nccl"; "" for a single worker, which does not communicate.
        store: a store of torch.distributed that all workers share; None for a single worker.
        choices: the collective algorithm for each kind of request.
        timeout_s: time limit of a request, in seconds.
        ranks: the members' ranks in torch.distributed's default group, ascending; None if the group
            has all of these. `subgroup` sets them.
        watch: the heartbeats of all workers; made on `store` if None.
        keeper: the process that hosts the store, for error messages; None if it is not known.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        backend: str = "",
        store: Any = None,
        choices: Choices | None = None,
        timeout_s: float = TIMEOUT_S,
        ranks: Sequence[int] | None = None,
        watch: Watch | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        self.rank, self.world_size, self.backend = rank, world_size, backend
        self.store, self.is_part = store, ranks is not None
        self.ranks = list(range(world_size)) if ranks is None else list(ranks)
        self._subgroups: list[Group] = []
        self.is_closed = False
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0)) if store else 0
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if store else 1
        self.choices, self.timeout_s = choices or Choices(), timeout_s
        self.ledger = Ledger()
        # begin and end of waits of this worker's algorithms, by time.perf_counter
        self.waits: deque[tuple[float, float]] = deque(maxlen=TIMES_KEPT)
        # begin and end of exchanges that overlapped with them
        self.beside: deque[tuple[float, float]] = deque(maxlen=TIMES_KEPT)
        self.log = RequestLog(rank)
        self._channels: dict[str, _Channel] = {}
        self._own = self.channel("")
        self.watch, self.stalls = watch, None
        if store is not None:
            if watch is None:
                self.watch = Watch(store, rank, world_size, socket.gethostname(), keeper)
            self.stalls = StallMonitor(store, self.log, self._find_busy, self._abort)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Group":
        """Return the group itself, so that a copied optimizer uses the same connections."""
        return self

    def __reduce__(self) -> tuple[Callable[..., "Group"], tuple[Any, ...]]:
        """Pickle the ranks of the group; see `_unpickle_group`."""
        members = self.ranks if self.is_part else None
        return _unpickle_group, (self.rank, self.world_size, members, bool(self.backend))

    def channel(self, name: str) -> "_Channel":
        """Return the channel of a name; all workers must open their channels in the same order."""
        if name not in self._channels:
            process_group = None
            timeout = timedelta(seconds=self.timeout_s)
            if name and self.world_size > 1:
                # otherwise, if a rank does not open the channel, the others would wait forever
                self._own.agree(f"the opening of channel {name}")
            with _network():
                if self.is_part and self.backend:
                    # ranks outside the group do not call this
                    process_group = dist.new_group(
                        self.ranks, timeout=timeout, use_local_synchronization=True
                    )
                elif self.world_size > 1 and name:
                    process_group = dist.new_group(timeout=timeout)
            self._channels[name] = _Channel(self, name, process_group)
        return self._channels[name]

    def subgroup(self, ranks: Iterable[int]) -> "Group":
        """Create a group of some ranks of this one, such as those with replicas of one shard.

        Each member calls it; other ranks need not. A rank that belongs to several subgroups must
        create them in the same order as the other members do, and all members must have created
        the same number of groups of torch.distributed before. `close` of this group closes its
        subgroups too.

        Args:
            ranks: the members' ranks in this group, this rank among them. A member's rank in the
                subgroup is its position among them in ascending order, and its `local_rank` its
                position among those on its machine.

        Raises:
            ValueError: this rank is not a member, or a rank is not in this group.
            WorkerLost: not all members created the group within `timeout_s`.
        """
        members = sorted(set(ranks))
        if self.rank not in members or not 0 <= members[0] <= members[-1] < self.world_size:
            raise ValueError(
                f"rank {self.rank} of {self.world_size} cannot be in a subgroup of ranks {members}"
                "\n\nhint: only the ranks of a subgroup create it, each with the same ranks of the "
                f"group, which are 0 to {self.world_size - 1}"
            )
        rank, world_size = members.index(self.rank), len(members)
        if world_size == 1:
            return Group(choices=self.choices, timeout_s=self.timeout_s)
        made_before = sum(
            group.ranks == [self.ranks[each] for each in members] for group in self._subgroups
        )
        store = self.store
        if store is not None:
            name = "-".join(map(str, members))
            store = PrefixStore(f"subgroup {name} number {made_before}", store)
        try:
            group = Group(
                rank,
                world_size,
                self.backend,
                store,
                self.choices,
                self.timeout_s,
                [self.ranks[each] for each in members],
                keeper=self.watch.keeper if self.watch is not None else None,
            )
        except (_Broken, RuntimeError) as error:
            cause = error.__cause__ if isinstance(error, _Broken) else error
            raise WorkerLost(
                f"rank {self.rank} could not create the subgroup of ranks {members}: {cause}\n\n"
                "hint: all its ranks must create it, in the same order as other groups"
            ) from cause
        self._subgroups.append(group)
        if self.backend:
            # a launcher's LOCAL_RANK counts all workers of the machine
            group._count_local(first=self.rank - self.local_rank)
        return group

    def _count_local(self, first: int) -> None:
        """Set `local_rank` and `local_world_size`; all members call it.

        Args:
            first: the first rank of this machine in the parent group.
        """
        firsts = self.run(_vote(first))
        members = [rank for rank, each in enumerate(firsts) if each == first]
        self.local_rank, self.local_world_size = members.index(self.rank), len(members)

    def _find_busy(self) -> list[str]:
        return [each.sequence for each in list(self._channels.values()) if each.is_busy]

    def _abort(self) -> None:
        """End all waits of this rank for messages, and thereby those of its peers."""
        for channel in list(self._channels.values()):
            channel.abort()

    def at(self, step: int, doing: str) -> None:
        """Set this worker's step and activity for the error messages of other workers."""
        if self.watch is not None:
            self.watch.at(step, doing)

    def take_waits(self) -> list[tuple[float, float]]:
        """Return begin and end of each wait for other workers since the last call, in seconds.

        Times are those of `time.perf_counter`.
        """
        return _taken(self.waits)

    def take_beside(self) -> list[tuple[float, float]]:
        """Return begin and end of each overlapped exchange that ended since the last call.

        Times are those of `time.perf_counter`, in seconds. Exchanges over NCCL, which need no
        thread, are not included.
        """
        return _taken(self.beside)

    @property
    def staging_buffers(self) -> int:
        """The number of scratch and staging buffers that were allocated so far."""
        return sum(channel.memory.made for channel in self._channels.values())

    def forget_buffers(self) -> None:
        """Free the buffers that no request uses."""
        for channel in self._channels.values():
            for buffers in channel.memory.free.values():
                buffers.clear()

    def run(self, algorithm: Algorithm[T]) -> T:
        """See `run`."""
        answer = None
        while True:
            try:
                request = algorithm.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = self._answer(request)

    def _answer(self, request: Request) -> Any:
        if self.world_size > 1 and not self.backend:
            raise RuntimeError(
                f"rank {self.rank} of {self.world_size} is not connected, so it cannot answer "
                f"{described(request)}\n\nhint: initialise torch.distributed before an optimizer "
                "is unpickled, or load its state_dict() into a new one"
            )
        if isinstance(request, Compute):
            return time.sleep(request.seconds)
        if isinstance(request, Begin):
            if isinstance(request.request, Send | Receive):
                return self._own.begin_message(request.request)
            channel = self._channels.get(request.channel) or self._explained(
                lambda: self.channel(request.channel), request, self._own.find_need
            )
            return channel.begin(request.request)
        if isinstance(request, End):
            pending = request.pending
            return self._explained(pending.result, request, pending.find_need)
        if isinstance(request, Scratch):
            return torch.empty_like(request.values)
        if isinstance(request, Send | Receive):
            work = self._own.begin_message(request)
            return self._explained(work.result, request, work.find_need)
        return self._explained(lambda: self._own.answer(request), request, self._own.find_need)

    def _explained(
        self, deed: Callable[[], Any], request: Request, find_need: Callable[[], Need | None]
    ) -> Any:
        """Execute a request; if the network fails, raise an error that names the cause."""
        began = time.perf_counter()
        if self.stalls is not None:
            self.stalls.wait = Wait(began, request, find_need)
        try:
            answer = deed()
            if self.world_size > 1:
                self.waits.append((began, time.perf_counter()))
            return answer
        except _Broken as error:
            assert self.watch is not None, "only several workers have a network"
            assert self.stalls is not None, "as is what compares requests"
            if reason := self.stalls.find_reason():
                self.watch.leave(f"the ranks' requests do not match: {reason}")
                raise mismatch(reason) from error.__cause__
            waited = time.perf_counter() - began
            why = _explain(self.watch, error.__cause__)
            self.watch.leave(why)
            raise WorkerLost(
                f"worker {self.rank} waited {waited:.0f} s in step {self.watch.step} for "
                f"{described(request)}: {why}\n\n"
                "hint: the run goes on from its last checkpoint when it is started again with "
                f"--resume; the time limit is {self.timeout_s:g} s"
            ) from error.__cause__
        finally:
            if self.stalls is not None:
                self.stalls.wait = None

    def close(self) -> None:
        """End the channels' threads and the heartbeats, also of subgroups."""
        self.is_closed = True
        for group in self._subgroups:
            group.close()
        for channel in self._channels.values():
            channel.close()
        if self.stalls is not None:
            self.stalls.close()
        if self.watch is not None:
            self.watch.leave()


def _unpickle_group(
    rank: int, world_size: int, members: Sequence[int] | None, was_connected: bool
) -> Group:
    """Return the group of the same ranks of torch.distributed, or an unconnected group.

    Args:
        rank: this process's rank in the group.
        world_size: the number of ranks in the group.
        members: their ranks in torch.distributed's default group; all if None.
        was_connected: whether the pickled group had a backend.
    """
    if was_connected and dist.is_initialized():
        ranks = list(range(world_size)) if members is None else list(members)
        has_all = members is not None or dist.get_world_size() == world_size
        if has_all and ranks[rank] == dist.get_rank():
            return present() if members is None else present().subgroup(members)
    return Group(rank, world_size)


def _vote(value: int) -> Algorithm[tuple[int, ...]]:
    answer: tuple[int, ...] = yield Vote(value)
    return answer


def _taken(times: deque[tuple[float, float]]) -> list[tuple[float, float]]:
    # another thread may append to the deque meanwhile
    return [times.popleft() for _ in range(len(times))]


class _Broken(Exception):
    """The network failed; the cause is torch's error."""


def _explain(watch: Watch, error: BaseException | None) -> str:
    """Describe the missing workers, with the first line of torch's error; C++ frames may follow."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{watch.culprits()} (torch.distributed reports: {lines[0]})"


@contextmanager
def _network() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise _Broken from error


class _Work:
    """A pending message."""

    def __init__(
        self, work: Any, finish: Callable[[], Any], keep: Any, need: Need, limit_s: float | None
    ) -> None:
        # `keep`: memory that must not be freed until the message is finished
        self.work, self.finish, self.keep, self.need = work, finish, keep, need
        self.limit_s = limit_s

    def find_need(self) -> Need | None:
        return self.need

    def result(self) -> Any:
        _wait(self.work, self.limit_s)
        return self.finish()


def _wait(work: Any, limit_s: float | None) -> None:
    """Wait for work of torch.distributed; None for NCCL's, which has the process group's limit."""
    with _network():
        if limit_s is None:
            # with a time limit, the host would poll until the device is done
            work.wait()
        else:
            # gloo's messages have no other time limit; after a timeout the connection is closed
            work.wait(timedelta(seconds=limit_s))


class _Memory:
    """Buffers of a channel, kept for the next request of the same size."""

    def __init__(self) -> None:
        self.free: dict[Any, list[Tensor]] = {}
        self.lent: list[tuple[Any, Tensor]] = []
        self.made = 0

    def lend(self, values: Tensor, *, pinned: bool = False, is_kept: bool = False) -> Tensor:
        """Return a host buffer (n,) with the size and dtype of `values`, lent until `take_back`.

        With `is_kept`, it is lent until `give_back`.
        """
        key = (values.numel(), values.dtype, pinned)
        free = self.free.setdefault(key, [])
        if not free:
            self.made += 1
            free.append(_host_memory(values, pinned=pinned))
        buffer = free.pop()
        if not is_kept:
            self.lent.append((key, buffer))
        return buffer

    def give_back(self, buffer: Tensor, *, pinned: bool) -> None:
        """Return a buffer that was lent with `is_kept`."""
        self.free[buffer.numel(), buffer.dtype, pinned].append(buffer)

    def take_back(self) -> None:
        """Take back all lent buffers, except those with `is_kept`."""
        for key, buffer in self.lent:
            self.free[key].append(buffer)
        self.lent.clear()


def _host_memory(values: Tensor, *, pinned: bool) -> Tensor:
    """Allocate (n,) like `values`, page-locked if possible; copies of pageable memory block."""
    try:
        return torch.empty(values.numel(), dtype=values.dtype, pin_memory=pinned)
    except RuntimeError:
        return torch.empty(values.numel(), dtype=values.dtype)


class _Channel:
    """Executes requests one after the other, over a process group of its own."""

    def __init__(self, group: Group, name: str, process_group: Any) -> None:
        self.group, self.process_group = group, process_group
        self.memory = _Memory()
        self.threads: ThreadPoolExecutor | None = None
        self.streams: CudaStreams | None = None
        self.stream: Any = None
        self.sequence = channel_sequence(name)
        self.name = name
        self.lock = threading.Lock()
        self.header = Header(0, 0, "")  # of the current request
        self.pairs: set[tuple[str, str]] = set()  # of successive requests
        self.need: Need | None = None
        self.begun = self.ended = 0  # number of tasks of this channel's thread

    @property
    def is_busy(self) -> bool:
        """Whether its thread has unfinished tasks."""
        return self.begun > self.ended

    def find_need(self) -> Need | None:
        """Return the request of a peer that the current request waits for."""
        return self.need

    def begin(self, request: Request | Algorithm[Any]) -> Any:
        """Start a request, or an algorithm, in the background."""
        if isinstance(request, Generator):
            return self._conducted(request)
        assert not isinstance(request, Begin | End | Compute | Scratch | Send | Receive), (
            "only an exchange can be begun"
        )
        if self.group.backend == "nccl" and _on_gpu(request):
            # it runs on a stream of its own, without a thread
            return self._nccl(request)
        done = torch.cuda.current_stream().record_event() if _on_gpu(request) else None
        return _Background(self._submit(lambda: self._after(done, request)), self)

    def _submit(self, deed: Callable[[], T]) -> "Future[T]":
        """Run a function on this channel's thread."""
        if self.threads is None:
            self.threads = ThreadPoolExecutor(1, f"gcnzc-exchange-{self.name}")

        def work() -> T:
            try:
                return deed()
            finally:
                self.ended += 1

        self.begun += 1
        return self.threads.submit(work)

    def _after(self, ready: Any, request: Collective) -> Any:
        if ready is not None:
            ready.synchronize()
        return self._beside(request)

    def _beside(self, request: Collective, choices: Choices | None = None) -> Any:
        """Execute `request` on this channel's thread, and record its time."""
        began = time.perf_counter()
        answer = self.answer(request, choices)
        if self.group.world_size > 1:
            self.group.beside.append((began, time.perf_counter()))
        return answer

    def _conducted(self, algorithm: Algorithm[Any]) -> Any:
        """Run an algorithm on this channel's thread, and with CUDA on this channel's stream.

        The stream first waits for the work queued on the caller's stream. The result's stream waits
        for the work of the algorithm.
        """
        if not torch.cuda.is_initialized():
            return _Background(self._submit(lambda: self._conduct(algorithm)), self)
        if self.streams is None:
            self.streams = CudaStreams(torch.device("cuda", torch.cuda.current_device()))
            self.stream = self.streams.new()
        stream, ready = self.stream, self.streams.current().record()

        def on_stream() -> Any:
            stream.wait(ready)
            answers: list[Any] = []
            stream.do(lambda: answers.append(self._conduct(algorithm)))
            return answers[0], stream.record()

        return _Conducted(self._submit(on_stream), self)

    def _conduct(self, algorithm: Algorithm[Any]) -> Any:
        # each message of gcnzc's collectives resumes this thread, which takes the GIL from the
        # training thread; on busy cores that costs more than these collectives save here
        choices = self.group.choices.but(AllGather=BUILTIN, AllToAll=BUILTIN)
        answer: Any = None
        while True:
            try:
                request = algorithm.send(answer)
            except StopIteration as stop:
                return stop.value
            if isinstance(request, Scratch):
                answer = torch.empty_like(request.values)
            elif isinstance(request, Compute):
                time.sleep(request.seconds)
                answer = None
            else:
                answer = self._beside(request, choices)  # type: ignore[arg-type]

    def answer(self, request: Collective, choices: Choices | None = None) -> Any:
        """Execute `request` together with the other workers; None uses the group's choices."""
        group = self.group
        demand(request, group.world_size)
        if group.backend == "nccl" and _on_gpu(request):
            if not self.name:
                # other channels record no NCCL requests, since the order of threads may differ;
                # the digest of this one is part of later headers
                group.log.record_collective(self.name, request)
            return self._nccl(request).result()
        kind = type(request).__name__
        with self.lock:
            group.ledger.count(kind)
            before = self.header.words
            self.header = group.log.record_collective(self.name, request)
            is_checked = self._add_pair(before, self.header.words)
            is_checked |= self.header.number % CHECK_EVERY == 0
            staged = _Staged(request, self.memory)
            name = (choices or group.choices).of(staged.request)
            if name == BUILTIN and group.world_size > 1:
                sent = round(sent_bytes(request, group.rank, group.world_size, name))
                group.ledger.add(kind, sent, 0)
                answer = self._by_builtin(staged.request, is_checked=is_checked)
            else:
                algorithm = expand(
                    staged.request, group.rank, group.world_size, group.choices, name
                )
                answer = self._by_messages(algorithm, kind)
            answer = staged.back(answer)
            self.memory.take_back()
        return answer

    def _add_pair(self, before: str, words: str) -> bool:
        """Whether these two requests follow each other for the first time on this channel."""
        if len(self.pairs) >= PAIRS_KEPT:
            self.pairs.clear()
        count = len(self.pairs)
        self.pairs.add((before, words))
        return len(self.pairs) > count

    def _by_builtin(self, request: Collective, *, is_checked: bool) -> Any:
        """Execute `request` with the process group's own collective, which has no headers.

        If `is_checked`, a barrier, whose messages have headers, precedes it: if the request follows
        the previous one for the first time on this channel, and for one of `CHECK_EVERY` requests.
        If one rank waits in the barrier and another in a collective, their requests are compared.
        A mismatch elsewhere starts different gloo collectives, which may end a process or compute a
        wrong result; a header shows it fewer than `CHECK_EVERY` requests later.
        """
        group, header = self.group, self.header
        if is_checked:
            self._by_messages(barrier(group.rank, group.world_size), "")
        peer = (group.rank + 1) % group.world_size
        self.need = Need(peer, self.sequence, header.number, of_all=True)
        with _network():
            work = self._builtin(request)
        answer = work.result()
        self.need = None
        return answer

    def agree(self, words: str) -> None:
        """Wait until all ranks have made the same call, described by `words`, with a barrier."""
        with self.lock:
            self.header = self.group.log.record(self.sequence, words)
            self._by_messages(barrier(self.group.rank, self.group.world_size), "")

    def _by_messages(self, algorithm: Algorithm[Any], kind: str) -> Any:
        """Run a collective by its messages; the ledger counts them as `kind` unless it is empty."""
        answer: Any = None
        while True:
            try:
                step = algorithm.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = None
            if isinstance(step, Scratch):
                answer = self.memory.lend(step.values)
            elif isinstance(step, Begin):
                answer = self._message(step.request, self.sequence, self.header, kind)  # type: ignore[arg-type]
            else:
                work = (
                    step.pending
                    if isinstance(step, End)
                    else self._message(step, self.sequence, self.header, kind)  # type: ignore[arg-type]
                )
                self.need = work.need
                answer = work.result()
                self.need = None

    def begin_message(self, request: Message) -> _Work:
        """Start a `Send` or `Receive` of the algorithm itself, not of a collective."""
        group, values = self.group, request.values
        header = group.log.record_message(request)
        sequence = message_sequence(request, group.rank)
        if group.backend == "nccl" or not _on_gpu(request):
            return self._message(request, sequence, header, "Send")
        host = self.memory.lend(values, pinned=True, is_kept=True)
        if isinstance(request, Send):
            host.view(values.shape).copy_(values)
        work = self._message(replace(request, values=host), sequence, header, "Send")

        def finish() -> Tensor | None:
            answer = None if isinstance(request, Send) else values.copy_(host.view(values.shape))
            self.memory.give_back(host, pinned=True)
            return answer

        work.finish = finish
        return work

    def _message(self, request: Message, sequence: str, header: Header, kind: str) -> _Work:
        """Start to send or to receive a message."""
        data, over, values = as_bytes(request.values), self.process_group, request.values
        tag = message_tag(header, len(data))
        need = Need(request.peer, sequence, header.number)
        limit_s, peer = self._limit_s(request), self.group.ranks[request.peer]
        with _network():
            if isinstance(request, Send):
                if kind:
                    self.group.ledger.add(kind, len(data))
                work = dist.isend(data, peer, over, tag)
                return _Work(work, lambda: None, data, need, limit_s)
            work = dist.irecv(data, peer, over, tag)
            return _Work(work, lambda: values, data, need, limit_s)

    def abort(self) -> None:
        """End all waits over this channel's connections."""
        peer = self.group.ranks[(self.group.rank + 1) % self.group.world_size]
        with suppress(RuntimeError):
            # gloo closes all connections when a wait times out, and has no other call to do so
            work: Any = dist.irecv(torch.empty(1), peer, self.process_group, ABORT_TAG)
            work.wait(timedelta(milliseconds=1))

    def _nccl(self, request: Collective) -> "_Finish":
        group, kind = self.group, type(request).__name__
        group.ledger.count(kind)
        sent = round(sent_bytes(request, group.rank, group.world_size, group.choices.of(request)))
        group.ledger.add(kind, sent, 0)
        return self._builtin(request)

    def _builtin(self, request: Collective) -> "_Finish":
        """Start the process group's own collective."""
        over, world = {"group": self.process_group, "async_op": True}, self.group.world_size
        limit_s = self._limit_s(request)
        if isinstance(request, Sum | Mean):
            work = dist.all_reduce(request.values.view(-1), **over)
            return _Finish(work, lambda: finished(request, world), limit_s)
        if isinstance(request, Broadcast):
            flat = as_bytes(request.values)
            work = dist.broadcast(flat, self.group.ranks[request.root], **over)
            return _Finish(work, lambda: restored(request.values, flat), limit_s)
        if isinstance(request, AllGather):
            values = as_bytes(request.values)
            rows = values.new_empty(world * len(values))
            work = _all_gather(rows, values, **over)
            shape = (world, *request.values.shape)
            return _Finish(work, lambda: rows.view(request.values.dtype).view(shape), limit_s)
        if isinstance(request, ReduceScatter):
            share = request.values.new_empty(request.values.numel() // world)
            work = _reduce_scatter(share, request.values.view(-1), **over)
            return _Finish(work, lambda: share, limit_s)
        if isinstance(request, AllToAll):
            return self._all_to_all(request, over, limit_s)
        if isinstance(request, Vote):
            value = vote_tensor(request)
            rows = value.new_empty(world)
            work = _all_gather(rows, value, **over)
            return _Finish(work, lambda: tuple(rows.tolist()), limit_s)
        assert isinstance(request, Swap), "all kinds of requests"
        other = torch.empty_like(request.values)
        if request.peer == self.group.rank:
            return _Finish(None, lambda: other.copy_(request.values), limit_s)
        peer = self.group.ranks[request.peer]
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, request.values, peer, self.process_group),
                dist.P2POp(dist.irecv, other, peer, self.process_group),
            ]
        )
        return _Finish(works[-1], lambda: other, limit_s)

    def _limit_s(self, request: Collective | Message) -> float | None:
        """Return the time limit of a wait in seconds; None for NCCL, which has its own limit."""
        is_nccl = self.group.backend == "nccl" and _on_gpu(request)
        return None if is_nccl else self.group.timeout_s

    def _all_to_all(
        self, request: AllToAll, over: dict[str, Any], limit_s: float | None
    ) -> "_Finish":
        parts, size = [as_bytes(part) for part in request.parts], request.parts[0].element_size()
        counts = request.counts
        if counts is None:
            # on the host, and so over gloo, without a device synchronisation
            lengths = torch.tensor([len(part) for part in request.parts])
            told = torch.empty_like(lengths)
            dist.all_to_all_single(told, lengths, group=self.process_group)
            counts = told.tolist()
        leaving = [len(part) for part in parts]
        coming = [count * size for count in counts]
        received = parts[0].new_empty(sum(coming))
        work = dist.all_to_all_single(received, torch.cat(parts), coming, leaving, **over)
        dtype = request.parts[0].dtype
        # the parts have one dtype, so they are aligned for the view
        return _Finish(work, lambda: [part.view(dtype) for part in received.split(coming)], limit_s)

    def close(self) -> None:
        if self.threads is not None:
            self.threads.shutdown(wait=False, cancel_futures=True)


class _Finish:
    """A pending collective, and the function that makes its result."""

    def __init__(self, work: Any, finish: Callable[[], Any], limit_s: float | None) -> None:
        self.work, self.finish, self.limit_s = work, finish, limit_s

    def find_need(self) -> None:
        """Return None: all ranks have agreed on the request, or NCCL executes it."""

    def result(self) -> Any:
        if self.work is not None:
            _wait(self.work, self.limit_s)
        return self.finish()


class _Background:
    """A request or an algorithm that runs on a channel's thread."""

    def __init__(self, future: Future[Any], channel: _Channel) -> None:
        self.future, self.find_need = future, channel.find_need

    def result(self) -> Any:
        return self.future.result()


class _Conducted:
    """An algorithm that runs on a channel's thread and CUDA stream."""

    def __init__(self, future: Future[Any], channel: _Channel) -> None:
        assert channel.streams is not None, "made before an algorithm goes on there"
        self.future, self.streams, self.find_need = future, channel.streams, channel.find_need

    def result(self) -> Any:
        answer, done = self.future.result()
        self.streams.current().wait(done)
        return answer


class _Staged:
    """A request with its GPU tensors copied to the host."""

    def __init__(self, request: Collective, memory: _Memory) -> None:
        self.given = self.request = request
        if not _on_gpu(request):
            return
        if isinstance(request, AllToAll):
            self.request = replace(request, parts=[_down(part, memory) for part in request.parts])
        else:
            assert not isinstance(request, Vote), "a vote has no tensor"
            self.request = replace(request, values=_down(request.values, memory))

    def back(self, answer: Any) -> Any:
        """Return the result on the device of the request's tensors."""
        if self.request is self.given:
            return answer
        if isinstance(self.given, AllToAll):
            device = self.given.parts[0].device
            return [part.to(device) for part in answer]
        assert not isinstance(self.given, Vote), "a vote has no tensor"
        values = self.given.values
        if isinstance(self.given, Sum | Mean | Broadcast):
            return values.copy_(answer)
        return answer.to(values.device)


def _on_gpu(request: Any) -> bool:
    values = request.parts[0] if isinstance(request, AllToAll) else getattr(request, "values", None)
    return values is not None and values.is_cuda


def _down(values: Tensor, memory: _Memory) -> Tensor:
    """Copy `values` to page-locked memory; waits until they are computed and copied."""
    return memory.lend(values, pinned=True).view(values.shape).copy_(values)


def is_worker() -> bool:
    """Whether a launcher such as torchrun has started this process as a worker."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def present() -> Group:
    """Return the group of torch.distributed's default process group; a single worker without one.

    For scripts that call `torch.distributed.init_process_group` themselves. With several ranks, all
    calls return the same object until it is closed, as by
    `torch.distributed.destroy_process_group`. Heartbeats are written to the process group's store.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Group()
    return _present.find()


class _Present:
    """Makes and caches the group of torch.distributed's default process group."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.group: Group | None = None
        self.process_group: weakref.ref[Any] | None = None
        self.count = 0  # of the groups that this process made

    def find(self) -> Group:
        process_group = dist.group.WORLD
        with self.lock:
            before = self.process_group() if self.process_group is not None else None
            if self.group is None or self.group.is_closed or before is not process_group:
                if self.group is not None:
                    self.group.close()
                self.group, self.process_group = self._make(), weakref.ref(process_group)
                # otherwise its threads would still write to a store that may be gone
                weakref.finalize(process_group, self.group.close).atexit = False
            return self.group

    def _make(self) -> Group:
        self.count += 1
        store = dist.distributed_c10d._get_default_store()
        # a prefix separates the keys from those of an earlier group in the same store
        store = PrefixStore(f"gcnzc {self.count}", store)
        backend = "nccl" if "nccl" in dist.get_backend() else "gloo"
        return Group(dist.get_rank(), dist.get_world_size(), backend, store)


_present = _Present()


@contextmanager
def joined(
    backend: str = "gloo", choices: Choices | None = None, timeout_s: float = TIMEOUT_S
) -> Iterator[Group]:
    """Initialise torch.distributed, and yield the group of the workers that a launcher started.

    Without a launcher such as torchrun, it yields a group of one worker.

    Args:
        backend: "gloo"; "nccl" if each worker has a GPU of its own; "auto" selects "nccl" in that
            case, else "gloo".
        choices: the collective algorithm for each kind of request.
        timeout_s: time limit of each request, in seconds.

    Yields:
        The group, which is closed at the end of the `with`.

    Raises:
        WorkerLost: not all workers connected within `JOIN_S` seconds, or one is stopped.
    """
    if not is_worker() or int(os.environ["WORLD_SIZE"]) == 1:
        group = Group(choices=choices, timeout_s=timeout_s)
        try:
            yield group
        finally:
            group.close()
        return
    if backend == "auto":
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        backend = "nccl" if torch.cuda.device_count() >= local else "gloo"
    whole, watch = _initialize(backend, timeout_s)
    whole.set_timeout(timedelta(seconds=min(STORE_S, timeout_s)))
    if backend == "nccl":
        # the limit of its collectives, whose waits have none of their own
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))
    rank, world_size = watch.rank, watch.world_size
    try:
        group = Group(rank, world_size, backend, watch.store, choices, timeout_s, watch=watch)
        try:
            yield group
        finally:
            group.close()
    finally:
        watch.leave()
        dist.destroy_process_group()


def _initialize(backend: str, timeout_s: float) -> tuple[TCPStore, Watch]:
    """Initialize torch.distributed together with the other workers.

    Returns:
        The process group's store and the heartbeats, each on its own connection.

    Raises:
        WorkerLost: workers are missing or stopped; the message names them.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    keeper, siblings = _keeper(), Siblings()
    began, watch = time.monotonic(), None
    try:
        whole, signs = _connect(rank, keeper, timeout_s, siblings)
        name = met(signs, rank, world_size, JOIN_S, timeout_s, siblings.demand_running)
        host = socket.gethostname()
        watch = Watch(PrefixStore(name, signs), rank, world_size, host, keeper)
        dist.init_process_group(
            # gloo exchanges tensors on the host with either backend
            "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
            store=PrefixStore(name, whole),
            rank=rank,
            world_size=world_size,
            # all workers have registered, so connecting takes no longer than a request
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, TimeoutError) as error:
        waited = time.monotonic() - began
        why = str(error)
        if watch is not None:
            why = _explain(watch, error)
            watch.leave(why)
        raise WorkerLost(
            f"worker {rank} of {world_size} waited {waited:.0f} s for the others at "
            f"{keeper.address[0]}:{keeper.address[1]}: {why}\n\nhint: do all machines reach that "
            "address? GLOO_SOCKET_IFNAME names the network to use"
        ) from error
    except BaseException as error:
        # such as Ctrl-C, or options that torch rejects
        if watch is not None:
            watch.leave(f"{type(error).__name__}: {error}")
        raise
    return whole, watch


def _keeper() -> Keeper:
    """Return the process that hosts the store of this attempt."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return Keeper("the first machine's launcher" if _is_of_launcher() else "worker 0", address)


def _is_of_launcher() -> bool:
    """Whether a launcher hosts the store; otherwise worker 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _connect(
    rank: int, keeper: Keeper, timeout_s: float, siblings: Siblings
) -> tuple[TCPStore, TCPStore]:
    """Open two connections to the store; worker 0 creates it unless the launcher did."""
    end = time.monotonic() + JOIN_S
    limit = timedelta(seconds=JOIN_S)
    host, port = keeper.address
    makes_it = rank == 0 and not _is_of_launcher()
    if not makes_it:
        while not _listens(keeper.address):
            siblings.demand_running(timeout_s)
            if time.monotonic() > end:
                raise TimeoutError(f"{keeper.name}, which keeps the store, is not there")
            time.sleep(CONNECT_POLL_S)
    whole = TCPStore(host, port, is_master=makes_it, timeout=limit, wait_for_workers=False)
    signs = TCPStore(host, port, timeout=limit, wait_for_workers=False)
    signs.set_timeout(timedelta(seconds=STORE_S))
    return whole, signs


def _listens(address: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(address, STORE_S):
            return True
    except OSError:
        return False
