"""Groups of ranks: their creation, subgroups, channels and end.

Over gloo, small collectives are gcnzc's and large ones gloo's own, and tensors on a GPU are copied
through reused page-locked buffers. With the backend "nccl", which needs one GPU per rank, NCCL
executes the requests with tensors on GPUs, and gloo those with tensors on the host.
"""

import itertools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from gcnzc.exchange.agreement import StallMonitor
from gcnzc.exchange.collectives import AllGatherScalar
from gcnzc.exchange.engine import Task
from gcnzc.exchange.errors import REMEDY, Cause, ConnectionBroken, WorkerLost, network
from gcnzc.exchange.heartbeat import HeartbeatMonitor, StoreHost
from gcnzc.exchange.launch import is_worker, read_local_rank, read_local_world_size, read_ranks
from gcnzc.exchange.processes import Channel, ProcessEngine
from gcnzc.exchange.requests import Message, Start, require, yield_request
from gcnzc.system.arguments import check_integer, check_number

# default time limit of a wait for a message
TIMEOUT_S = 60.0
# gloo counts milliseconds; limits of more than 30 years overflow the clocks of torch and Python
MIN_LIMIT_S, MAX_LIMIT_S = 1e-3, 1e9


def check_time_limit(seconds: float) -> float:
    """Return the `timeout_s` of a group as a float.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not from `MIN_LIMIT_S` to `MAX_LIMIT_S`.
    """
    hint = f"seconds from {MIN_LIMIT_S:g} to {MAX_LIMIT_S:g}, such as 60"
    return check_number("timeout_s", seconds, lambda s: MIN_LIMIT_S <= s <= MAX_LIMIT_S, hint)


class Group(ProcessEngine):
    """A group of ranks that communicate; this process is one of them.

    One thread at a time runs algorithms on a group: `run` raises an error in a second thread, since
    the requests of two threads have no common order. `Start` overlaps requests instead. A process
    that is forked from this one cannot use the group, whose connections belong to this process.

    Args:
        rank: the rank of this process, in [0, world_size).
        world_size: the number of ranks.
        backend: "gloo" or "nccl"; "" for a single rank, or a rank that `lockstep` simulates.
        store: a store of torch.distributed that all ranks share; None without a backend.
        timeout_s: time limit of each wait for a message over gloo, in seconds; a collective may
            consist of several messages. NCCL's collectives have the time limit of their process
            group, which `init_group` and `subgroup` set to `timeout_s`; `current_group` does not
            change the time limit of the default process group.
        ranks: the members' ranks in torch.distributed's default group, ascending; None if the group
            has all of them. `subgroup` sets them.
        monitor: writes and reads the heartbeats; None creates a monitor that uses `store`.
        store_host: the process that hosts the store, for error messages; None if it is not known.
        remedy: the remedy in the message of `WorkerLost`.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        backend: str = "",
        store: Any = None,
        timeout_s: float = TIMEOUT_S,
        ranks: Sequence[int] | None = None,
        monitor: HeartbeatMonitor | None = None,
        store_host: StoreHost | None = None,
        remedy: str = REMEDY,
    ) -> None:
        world_size = check_integer("world_size", world_size, 1)
        rank = check_integer("rank", rank, 0, world_size - 1)
        timeout_s = check_time_limit(timeout_s)
        super().__init__(rank, world_size, backend, store, timeout_s, ranks, remedy)
        self._subgroups: list[Group] = []
        self._num_callers = 0
        self.local_rank = read_local_rank() if store else 0
        self.local_world_size = read_local_world_size() if store else 1
        self.channel("")
        self.monitor = monitor
        if store is not None:
            if monitor is None:
                self.monitor = HeartbeatMonitor(store, rank, world_size, store_host, self.ranks)
            self.stall_monitor = StallMonitor(
                store, rank, self.log, self.find_busy_sequences, self.abort
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Group":
        """Return the group itself, so that a copied optimizer uses the same connections."""
        return self

    def __reduce__(self) -> tuple[Callable[..., "Group"], tuple[Any, ...]]:
        """Pickle the ranks of the group; see `_unpickle_group`."""
        members = self.ranks if self.is_subgroup else None
        return _unpickle_group, (self.rank, self.world_size, members, bool(self.backend))

    def channel(self, name: str) -> Channel:
        """Return the channel with a name, which executes requests one after the other.

        The first call with a name creates it; all ranks must create channels in the same order.
        """
        return self.channels.get(name) or self._create_channel(name, "")

    def open_channel(self, task: Task, channel: str, request: Start) -> None:
        """See `Engine`."""
        started = request.request
        if isinstance(started, Message):
            on_gpu = f"{started.describe()} on a channel has a tensor on a GPU"
            hint = "copy it to the host, or start the message without a channel"
            require(not started.is_on_gpu, on_gpu, hint)
        if channel not in self.channels:
            create = partial(self._create_channel, channel, task.caller)
            self.execute(task, create, request, self.channels[""].find_need)

    def _create_channel(self, name: str, caller: str) -> Channel:
        self.check_process()
        process_group = None
        if name and self.world_size > 1:
            # otherwise, if a rank does not create the channel, the others would wait forever
            self.channels[""].check_agreement(f"the opening of channel {name}", caller)
        if self.world_size > 1 and self.backend:
            with network():
                process_group = self._new_process_group(name)
        self.channels[name] = Channel(self, name, process_group)
        return self.channels[name]

    def _new_process_group(self, name: str) -> Any:
        """Create the process group of a channel; None to use torch.distributed's default one.

        A default process group without a backend for tensors on the host, as that of
        `init_process_group("nccl")`, is not used. The new ones have its backends, and gloo.

        Args:
            name: the name of the channel; empty for the default channel.
        """
        backends = None
        if dist.is_initialized() and "cpu:" not in (config := dist.get_backend_config()):
            backends = f"cpu:gloo,{config}"
        options: dict[str, Any] = {
            "timeout": timedelta(seconds=self.timeout_s), "backend": backends,
        }  # fmt: skip
        if self.is_subgroup:
            # ranks outside the group do not call this
            return dist.new_group(self.ranks, use_local_synchronization=True, **options)
        return dist.new_group(**options) if name or backends else None

    def new_caller(self, kind: str) -> str:
        """Return a unique name for a `Caller`: its kind and a number.

        The names are the same on all ranks if the ranks create their callers in the same order.
        """
        self._num_callers += 1
        return f"{kind} number {self._num_callers}"

    def subgroup(self, ranks: Iterable[int]) -> "Group":
        """Create a group of some ranks of this group, such as those with replicas of one shard.

        All members must call it, and no other rank may. Members of several subgroups must create
        them in the same order. Before the call, all members must belong to the same number of
        torch.distributed process groups. `close` of this group also closes its subgroups.

        Args:
            ranks: the members' ranks in this group, including this rank. In the subgroup the
                members are numbered in ascending order. `local_rank` is the number of this rank
                among the members on its machine.

        Raises:
            ValueError: this rank is not a member, or a rank is not in this group.
            WorkerLost: not all members created the group within `timeout_s`.
        """
        self.check_process()
        members = sorted(set(ranks))
        require(
            self.rank in members and 0 <= members[0] <= members[-1] < self.world_size,
            f"rank {self.rank} of {self.world_size} cannot be in a subgroup of ranks {members}",
            "call subgroup() only on its members, with the same list; valid ranks are 0 to "
            f"{self.world_size - 1}",
        )
        rank, world_size = members.index(self.rank), len(members)
        if world_size == 1:
            return Group(timeout_s=self.timeout_s, remedy=self.remedy)
        own_ranks = [self.ranks[each] for each in members]
        num_before = sum(group.ranks == own_ranks for group in self._subgroups)
        store = self.store
        if store is not None:
            name = "-".join(map(str, members))
            store = PrefixStore(f"subgroup {name} number {num_before}", store)
        try:
            group = Group(
                *(rank, world_size, self.backend, store, self.timeout_s),
                ranks=own_ranks,
                store_host=self.monitor.store_host if self.monitor is not None else None,
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
            # LOCAL_RANK, set by a launcher, numbers all ranks of the machine, not only members
            group._count_local(first=self.rank - self.local_rank)
        return group

    def _count_local(self, first: int) -> None:
        """Set `local_rank` and `local_world_size`; all members call it.

        Args:
            first: the first rank of this machine in the parent group.
        """
        firsts = self.run(yield_request(AllGatherScalar(first)))
        members = [rank for rank, each in enumerate(firsts) if each == first]
        self.local_rank, self.local_world_size = members.index(self.rank), len(members)

    def set_status(self, step: int, activity: str) -> None:
        """Set this rank's step and activity, which error messages of all ranks show.

        Without a call, the step is the number of optimizer steps; see `count_step`.

        Args:
            step: the number of the training step.
            activity: what this rank does, such as "training" or "evaluation".
        """
        if self.monitor is not None:
            self.monitor.set_status(step, activity)

    def pop_request_intervals(self) -> list[tuple[float, float]]:
        """Return and clear the start and end of this rank's waits for requests.

        At most the last 10,000, by `time.perf_counter()`; none with a single rank. Of a started
        request, its `Wait` counts.
        """
        return [self.waits.popleft() for _ in range(len(self.waits))]

    def pop_overlapped_intervals(self) -> list[tuple[float, float]]:
        """Return and clear the start and end of each request that a channel's thread executed.

        At most the last 10,000, by `time.perf_counter()`; none with a single rank. A single
        collective that is started over NCCL needs no thread, and is not included.
        """
        # the channels' threads may append meanwhile
        return [self.overlapped.popleft() for _ in range(len(self.overlapped))]

    def close(self, reason: str = "") -> None:
        """Stop the threads of the channels and the heartbeats, also of all subgroups.

        Args:
            reason: why this rank leaves the group, for the error messages of the other ranks.
        """
        self.is_closed = True
        if os.getpid() != self._process:
            # its threads do not exist in a forked process, and the store's connection is shared
            return
        for group in self._subgroups:
            group.close(reason)
        for thread in self.threads.values():
            thread.close()
        if self.stall_monitor is not None:
            self.stall_monitor.close()
        if self.monitor is not None:
            self.monitor.stop(Cause(reason))


def _unpickle_group(
    rank: int, world_size: int, members: Sequence[int] | None, was_connected: bool
) -> Group:
    """Return the group of these ranks; unconnected unless torch.distributed has the same ranks.

    `members` are their ranks in the default group, None for all of them.
    """
    if was_connected and dist.is_initialized():
        ranks = list(range(world_size)) if members is None else list(members)
        is_same_size = members is not None or dist.get_world_size() == world_size
        if is_same_size and ranks[rank] == dist.get_rank():
            return current_group() if members is None else current_group().subgroup(members)
    return Group(rank, world_size)


def current_group() -> Group:
    """Return the group of torch.distributed's default process group.

    Use it in scripts that call `torch.distributed.init_process_group` themselves. If
    torch.distributed is not initialized, the group has one rank. With several ranks, all calls
    return the same object until it is closed; `destroy_process_group` also closes it. It is not the
    group that `init_group` yields. Heartbeats are written to the process group's store.

    If the process group has no backend for tensors on the host, as after
    `init_process_group("nccl")`, the first call creates one with gloo, so all ranks must make it.

    Raises:
        WorkerLost: the process group with gloo could not be created, for example because a rank did
            not call this function in time.
    """
    if not _is_initialized() or dist.get_world_size() == 1:
        return Group()
    process_group = dist.group.WORLD
    with _lock:
        group = _default_groups.get(process_group)
        if group is None or group.is_closed:
            for other in _default_groups.values():
                other.close()
            group = _default_groups[process_group] = _create_default_group()
            # otherwise its threads would write to a store that may have been destroyed
            weakref.finalize(process_group, group.close).atexit = False
        return group


# the groups that `current_group` has created, by torch.distributed's default process group
_default_groups: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()
_lock, _numbers = threading.Lock(), itertools.count(1)


def _create_default_group() -> Group:
    # a prefix separates the keys from those of an earlier group in the same store
    prefix, store = f"gcnzc {next(_numbers)}", dist.distributed_c10d._get_default_store()
    backend = "nccl" if "nccl" in dist.get_backend_config() else "gloo"
    try:
        return Group(dist.get_rank(), dist.get_world_size(), backend, PrefixStore(prefix, store))
    except ConnectionBroken as error:
        raise WorkerLost(
            f"rank {dist.get_rank()} could not add gloo, for tensors on the host, to the "
            f"process group of {dist.get_backend_config()}: {error.__cause__}\n\nhint: all "
            "ranks must construct their first optimizer at the same time; "
            'init_process_group("cpu:gloo,cuda:nccl") has gloo from the start'
        ) from error.__cause__


def _is_initialized() -> bool:
    """Whether torch.distributed is initialized; warns if not and a launcher started this worker.

    Raises:
        ValueError: the launcher's environment variables are invalid.
    """
    is_done = dist.is_initialized()
    rank, world_size = read_ranks() if is_worker() and not is_done else (0, 1)
    if world_size > 1:
        warnings.warn(
            f"rank {rank} of {world_size} trains alone, because "
            "torch.distributed is not initialized\n\nhint: with gcnzc.exchange.init_group() as "
            "group, or call torch.distributed.init_process_group() first; group="
            "gcnzc.exchange.Group() trains alone without this warning",
            stacklevel=4,
        )
    return is_done


def count_shared_ranks(group: Group, process_group: Any) -> int:
    """Return the number of ranks of a group that a process group of torch.distributed has too."""
    try:
        ranks = dist.get_process_group_ranks(process_group)
    except (KeyError, ValueError):
        # it is destroyed
        return 0
    return len(set(ranks).intersection(group.ranks))
