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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from gcnzc.exchange.agreement import CurrentWait, Need, RequestLog, StallMonitor, mismatch
from gcnzc.exchange.choices import Choices
from gcnzc.exchange.errors import ConnectionBroken, WorkerLost, explain
from gcnzc.exchange.heartbeat import STORE_S, HeartbeatMonitor, StoreHost, name_of
from gcnzc.exchange.ledger import Ledger
from gcnzc.exchange.process_group import Channel, T, network
from gcnzc.exchange.requests import (
    Algorithm,
    AllGatherScalar,
    Caller,
    Compute,
    Receive,
    Request,
    Scratch,
    Send,
    Start,
    Wait,
    describe_request,
)
from gcnzc.exchange.start import initialize, is_worker

# default time limit of a request
TIMEOUT_S = 60.0


# what to do when a worker is lost, if the program that trains does not say
REMEDY = "start all workers again, and load the state_dict() and the model that were saved last"


# number of the last waits and overlapped exchanges whose times are kept until they are taken
TIMES_KEPT = 10_000


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
        remedy: what the hint of `WorkerLost` suggests.
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
        watch: HeartbeatMonitor | None = None,
        keeper: StoreHost | None = None,
        remedy: str = REMEDY,
    ) -> None:
        self.rank, self.world_size, self.backend = rank, world_size, backend
        self.store, self.is_part = store, ranks is not None
        self.ranks = list(range(world_size)) if ranks is None else list(ranks)
        self._subgroups: list[Group] = []
        self.is_closed = False
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0)) if store else 0
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if store else 1
        self.choices, self.timeout_s = choices or Choices(), timeout_s
        self.remedy = remedy
        self.ledger = Ledger()
        # begin and end of waits of this worker's algorithms, by time.perf_counter
        self.waits: deque[tuple[float, float]] = deque(maxlen=TIMES_KEPT)
        # begin and end of exchanges that overlapped with them
        self.beside: deque[tuple[float, float]] = deque(maxlen=TIMES_KEPT)
        self.log = RequestLog(rank)
        self._num_callers = 0
        self._channels: dict[str, Channel] = {}
        self._own = self.channel("")
        self.watch, self.stalls = watch, None
        if store is not None:
            if watch is None:
                host = socket.gethostname()
                self.watch = HeartbeatMonitor(store, rank, world_size, host, keeper, self.ranks)
            self.stalls = StallMonitor(store, self.log, self._find_busy, self._abort)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Group":
        """Return the group itself, so that a copied optimizer uses the same connections."""
        return self

    def __reduce__(self) -> tuple[Callable[..., "Group"], tuple[Any, ...]]:
        """Pickle the ranks of the group; see `_unpickle_group`."""
        members = self.ranks if self.is_part else None
        return _unpickle_group, (self.rank, self.world_size, members, bool(self.backend))

    def channel(self, name: str) -> "Channel":
        """Return the channel of a name; all workers must open their channels in the same order."""
        if name not in self._channels:
            process_group = None
            timeout = timedelta(seconds=self.timeout_s)
            if name and self.world_size > 1:
                # otherwise, if a rank does not open the channel, the others would wait forever
                self._own.agree(f"the opening of channel {name}")
            with network():
                if self.is_part and self.backend:
                    # ranks outside the group do not call this
                    process_group = dist.new_group(
                        self.ranks, timeout=timeout, use_local_synchronization=True
                    )
                elif self.world_size > 1 and name:
                    process_group = dist.new_group(timeout=timeout)
            self._channels[name] = Channel(self, name, process_group)
        return self._channels[name]

    def new_caller(self, kind: str) -> str:
        """Return a name for a `Caller`, of its kind and its number in this group.

        Ranks that create their callers in the same order give them the same names.
        """
        self._num_callers += 1
        return f"{kind} number {self._num_callers}"

    @property
    def caller(self) -> str:
        """The current caller of the algorithm that `run` executes; empty if it has none."""
        return self._own.caller

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
            return Group(choices=self.choices, timeout_s=self.timeout_s, remedy=self.remedy)
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
                remedy=self.remedy,
            )
        except (ConnectionBroken, RuntimeError) as error:
            cause = error.__cause__ if isinstance(error, ConnectionBroken) else error
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
        """See `run`; a closed group raises a RuntimeError."""
        answer, self._own.caller = None, ""
        while True:
            try:
                request = algorithm.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = self._answer(request)

    def _answer(self, request: Request) -> Any:
        if isinstance(request, Caller):
            before, self._own.caller = self._own.caller, request.name
            return before
        if self.world_size > 1 and not self.backend:
            raise RuntimeError(
                f"rank {self.rank} of {self.world_size} is not connected, so it cannot answer "
                f"{describe_request(request)}\n\nhint: initialise torch.distributed before "
                "an optimizer is unpickled, or load its state_dict() into a new one"
            )
        if self.is_closed and self.world_size > 1:
            self._refuse(request)
        if isinstance(request, Compute):
            return time.sleep(request.seconds)
        if isinstance(request, Start):
            if isinstance(request.request, Send | Receive):
                return self._own.begin_message(request.request)
            channel = self._channels.get(request.channel) or self._explained(
                lambda: self.channel(request.channel), request, self._own.find_need
            )
            return channel.begin(request.request)
        if isinstance(request, Wait):
            pending = request.pending
            return self._explained(pending.result, request, pending.find_need)
        if isinstance(request, Scratch):
            return torch.empty_like(request.values)
        if isinstance(request, Send | Receive):
            work = self._own.begin_message(request)
            return self._explained(work.result, request, work.find_need)
        return self._explained(lambda: self._own.answer(request), request, self._own.find_need)

    def _refuse(self, request: Request) -> None:
        """Raise the error of a request to a closed group, and tell the other ranks the reason."""
        if self.watch is not None:
            self.watch.leave("its group is closed")
            # else the others would wait for the time limit
            self._abort()
        raise RuntimeError(
            f"rank {self.rank} requests {describe_request(request)} of a group that is closed\n\n"
            "hint: call finalize() and all else that communicates before close(), the end of "
            "`with init_group()`, and destroy_process_group()"
        )

    def _explained(
        self, deed: Callable[[], Any], request: Request, find_need: Callable[[], Need | None]
    ) -> Any:
        """Execute a request; if the network fails, raise an error that names the cause."""
        began = time.perf_counter()
        if self.stalls is not None:
            self.stalls.wait = CurrentWait(began, request, find_need)
        try:
            answer = deed()
            if self.world_size > 1:
                self.waits.append((began, time.perf_counter()))
            return answer
        except ConnectionBroken as error:
            assert self.watch is not None, "only several workers have a network"
            assert self.stalls is not None, "as is what compares requests"
            if reason := self.stalls.find_reason():
                self.watch.leave(f"the ranks' requests do not match: {reason}")
                raise mismatch(reason) from error.__cause__
            waited = time.perf_counter() - began
            why = explain(self.watch, error.__cause__)
            self.watch.leave(why)
            raise WorkerLost(
                f"{name_of(self.rank, self.ranks)} waited {waited:.0f} s in step "
                f"{self.watch.step} for "
                f"{describe_request(request)}: {why}\n\n"
                f"hint: {self.remedy}; the time limit of a request is {self.timeout_s:g} s"
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
            return current_group() if members is None else current_group().subgroup(members)
    return Group(rank, world_size)


def _vote(value: int) -> Algorithm[tuple[int, ...]]:
    answer: tuple[int, ...] = yield AllGatherScalar(value)
    return answer


def _taken(times: deque[tuple[float, float]]) -> list[tuple[float, float]]:
    # another thread may append to the deque meanwhile
    return [times.popleft() for _ in range(len(times))]


def current_group() -> Group:
    """Return the group of torch.distributed's default process group; a single worker without one.

    For scripts that call `torch.distributed.init_process_group` themselves. With several ranks, all
    calls return the same object until it is closed, as by
    `torch.distributed.destroy_process_group`. Heartbeats are written to the process group's store.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Group()
    return _present.find()


class _DefaultGroup:
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


_present = _DefaultGroup()


@contextmanager
def init_group(
    backend: str = "gloo",
    choices: Choices | None = None,
    timeout_s: float = TIMEOUT_S,
    remedy: str = REMEDY,
) -> Iterator[Group]:
    """Initialise torch.distributed, and yield the group of the workers that a launcher started.

    Without a launcher such as torchrun, it yields a group of one worker.

    Args:
        backend: "gloo"; "nccl" if each worker has a GPU of its own; "auto" selects "nccl" in that
            case, else "gloo".
        choices: the collective algorithm for each kind of request.
        timeout_s: time limit of each request, in seconds.
        remedy: see `Group`.

    Yields:
        The group, which is closed at the end of the `with`.

    Raises:
        WorkerLost: not all workers connected within `JOIN_S` seconds, or one is stopped.
    """
    if not is_worker() or int(os.environ["WORLD_SIZE"]) == 1:
        group = Group(choices=choices, timeout_s=timeout_s, remedy=remedy)
        try:
            yield group
        finally:
            group.close()
        return
    if backend == "auto":
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        backend = "nccl" if torch.cuda.device_count() >= local else "gloo"
    whole, watch = initialize(backend, timeout_s)
    whole.set_timeout(timedelta(seconds=min(STORE_S, timeout_s)))
    if backend == "nccl":
        # the limit of its collectives, whose waits have none of their own
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))
    rank, world_size = watch.rank, watch.world_size
    try:
        group = Group(
            *(rank, world_size, backend, watch.store, choices, timeout_s),
            watch=watch,
            remedy=remedy,
        )
        try:
            yield group
        finally:
            group.close()
    finally:
        watch.leave()
        dist.destroy_process_group()
