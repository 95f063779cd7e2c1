"""Initialize torch.distributed in a launcher's workers, and yield the group of all ranks."""

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from gcnzc.exchange.errors import LEFT, REMEDY, Cause, WorkerLost, describe_end
from gcnzc.exchange.group import TIMEOUT_S, Group, check_time_limit
from gcnzc.exchange.heartbeat import (
    BEAT_S,
    STORE_S,
    HeartbeatMonitor,
    StoreHost,
    can_connect,
    explain,
)
from gcnzc.exchange.launch import is_worker, read_address, read_local_world_size, read_ranks
from gcnzc.exchange.rendezvous import LocalProcesses, join_workers
from gcnzc.system.arguments import check_choice

BACKENDS = ("gloo", "nccl", "auto")
# time limit of the rendezvous at the start: importing torch takes half a minute on busy cores
JOIN_S = 180.0
# interval of attempts to connect to a store that is not running yet
CONNECT_POLL_S = 0.3


@contextmanager
def init_group(
    backend: str = "gloo",
    timeout_s: float = TIMEOUT_S,
    remedy: str = REMEDY,
) -> Iterator[Group]:
    """Initialize torch.distributed in a launcher's workers, and yield the group of all ranks.

    Without a launcher such as torchrun, it yields a group of one rank.

    Args:
        backend: "gloo"; "nccl", which needs one GPU per rank; "auto" selects "nccl" if there is one
            GPU per rank, and "gloo" otherwise.
        timeout_s: time limit of each wait for a message, in seconds, from 0.001 to 1e9; see
            `Group`.
        remedy: see `Group`.

    Yields:
        The group; it is closed at the end of the `with`.

    Raises:
        RuntimeError: with several ranks, torch.distributed is initialized already, for example in a
            nested call.
        ValueError: `backend`, `timeout_s` or the launcher's environment variables are invalid.
        WorkerLost: a rank did not connect within 180 s, or is suspended (SIGSTOP).
    """
    check_choice("backend", backend, BACKENDS)
    timeout_s = check_time_limit(timeout_s)
    if not is_worker() or read_ranks()[1] == 1:
        with closing(Group(timeout_s=timeout_s, remedy=remedy)) as group:
            yield group
        return
    if backend == "auto":
        backend = "nccl" if torch.cuda.device_count() >= read_local_world_size() else "gloo"
    store, monitor = _initialize(backend, timeout_s)
    store.set_timeout(timedelta(seconds=min(STORE_S, timeout_s)))
    rank, process, has_failed = monitor.rank, os.getpid(), True
    try:
        ranks = rank, monitor.world_size
        group = Group(*ranks, backend, monitor.store, timeout_s, monitor=monitor, remedy=remedy)
        try:
            yield group
        except BaseException as error:
            group.close(describe_end(error))
            raise
        group.close(LEFT)
        has_failed = False
    finally:
        # a forked process would end the heartbeats and connections of this one
        if os.getpid() == process:
            monitor.stop()
            if dist.is_initialized():
                # unless the user's code did
                dist.destroy_process_group()
            if has_failed and _hosts_store(rank):
                # the store ends with this rank
                monitor.wait_for_ends()


def _initialize(backend: str, timeout_s: float) -> tuple[TCPStore, HeartbeatMonitor]:
    """Initialize torch.distributed together with the other workers.

    Returns:
        The process group's store and the heartbeat monitor, each with its own connection.

    Raises:
        RuntimeError: torch.distributed is initialized already.
        ValueError: the launcher's environment variables are invalid.
        WorkerLost: ranks did not connect, or are suspended (SIGSTOP); the message names them.
    """
    rank, world_size = read_ranks()
    if dist.is_initialized():
        raise RuntimeError(
            f"init_group() on rank {rank}, where torch.distributed is initialized already\n\n"
            "hint: use the group of the first init_group(), or gcnzc.exchange.current_group()"
        )
    name = "the first machine's launcher" if _is_store_in_launcher() else "rank 0"
    store_host, local_processes = StoreHost(name, read_address()), LocalProcesses()
    began, monitor = time.monotonic(), None
    try:
        store, heartbeat_store = _connect(rank, store_host, timeout_s, local_processes)
        prefix = join_workers(
            heartbeat_store, rank, world_size, JOIN_S, timeout_s, local_processes.check_running
        )
        own_store = PrefixStore(prefix, heartbeat_store)
        monitor = HeartbeatMonitor(own_store, rank, world_size, store_host)
        dist.init_process_group(
            # gloo exchanges host tensors with either backend
            "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
            store=PrefixStore(prefix, store),
            rank=rank,
            world_size=world_size,
            # all ranks have registered, so connecting takes no longer than a request
            timeout=timedelta(seconds=timeout_s),
        )
        if backend == "nccl":
            # the time limit of NCCL's collectives, whose waits have no limit of their own
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))
    except (RuntimeError, TimeoutError) as error:
        waited, text = time.monotonic() - began, str(error)
        if monitor is not None:
            text, cause = explain(monitor, error)
            monitor.stop(cause)
        raise WorkerLost(
            f"rank {rank} of {world_size} waited {waited:.0f} s for the other ranks at "
            f"{store_host.address[0]}:{store_host.address[1]}: {text}\n\nhint: check that all "
            "machines can reach that address; GLOO_SOCKET_IFNAME selects the network interface"
        ) from error
    except BaseException as error:
        # for example Ctrl-C, or options that torch rejects
        if monitor is not None:
            monitor.stop(Cause(describe_end(error)))
        raise
    return store, monitor


def _hosts_store(rank: int) -> bool:
    """Whether this rank hosts the store of this attempt."""
    return rank == 0 and not _is_store_in_launcher()


def _is_store_in_launcher() -> bool:
    """Whether a launcher hosts the store; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _connect(
    rank: int, store_host: StoreHost, timeout_s: float, local_processes: LocalProcesses
) -> tuple[TCPStore, TCPStore]:
    """Open two connections to the store; rank 0 creates it unless the launcher hosts it."""
    end, limit = time.monotonic() + JOIN_S, timedelta(seconds=JOIN_S)
    host, port = store_host.address
    is_host = _hosts_store(rank)
    while not is_host and not can_connect(store_host.address, BEAT_S):
        local_processes.check_running(timeout_s)
        if time.monotonic() > end:
            raise TimeoutError(f"{store_host.name}, which hosts the store, never connected")
        time.sleep(CONNECT_POLL_S)
    store = TCPStore(host, port, is_master=is_host, timeout=limit, wait_for_workers=False)
    heartbeat_store = TCPStore(host, port, timeout=limit, wait_for_workers=False)
    heartbeat_store.set_timeout(timedelta(seconds=STORE_S))
    return store, heartbeat_store
