"""Initialize torch.distributed in a launcher's workers, and yield the group of all ranks."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from gcnzc.exchange.errors import LEFT, REMEDY, WorkerLost, check_time_limit, describe_end
from gcnzc.exchange.group import TIMEOUT_S, Group
from gcnzc.exchange.heartbeat import STORE_S, HeartbeatMonitor, StoreHost, explain
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
        group = Group(timeout_s=timeout_s, remedy=remedy)
        try:
            yield group
        finally:
            group.close()
        return
    if backend == "auto":
        backend = "nccl" if torch.cuda.device_count() >= read_local_world_size() else "gloo"
    store, monitor = _initialize(backend, timeout_s)
    store.set_timeout(timedelta(seconds=min(STORE_S, timeout_s)))
    rank, world_size, process = monitor.rank, monitor.world_size, os.getpid()
    has_failed = True
    try:
        group = Group(
            *(rank, world_size, backend, monitor.store, timeout_s),
            monitor=monitor,
            remedy=remedy,
        )
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
    store_host, local_processes = _find_store_host(), LocalProcesses()
    began, monitor = time.monotonic(), None
    try:
        store, heartbeat_store = _connect(rank, store_host, timeout_s, local_processes)
        name = join_workers(
            heartbeat_store, rank, world_size, JOIN_S, timeout_s, local_processes.check_running
        )
        monitor = HeartbeatMonitor(
            PrefixStore(name, heartbeat_store), rank, world_size, socket.gethostname(), store_host
        )
        dist.init_process_group(
            # gloo exchanges host tensors with either backend
            "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
            store=PrefixStore(name, store),
            rank=rank,
            world_size=world_size,
            # all ranks have registered, so connecting takes no longer than a request
            timeout=timedelta(seconds=timeout_s),
        )
        if backend == "nccl":
            # the time limit of NCCL's collectives, whose waits have no limit of their own
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))
    except (RuntimeError, TimeoutError) as error:
        waited = time.monotonic() - began
        reason = str(error)
        if monitor is not None:
            failure = explain(monitor, error)
            reason = failure.text
            monitor.stop(failure.reason, is_follow_up=failure.is_follow_up, ranks=failure.ranks)
        raise WorkerLost(
            f"rank {rank} of {world_size} waited {waited:.0f} s for the other ranks at "
            f"{store_host.address[0]}:{store_host.address[1]}: {reason}\n\nhint: check that all "
            "machines can reach that address; GLOO_SOCKET_IFNAME selects the network interface"
        ) from error
    except BaseException as error:
        # for example Ctrl-C, or options that torch rejects
        if monitor is not None:
            monitor.stop(describe_end(error))
        raise
    return store, monitor


def _find_store_host() -> StoreHost:
    """Return the process that hosts the store of this attempt."""
    name = "the first machine's launcher" if _is_store_in_launcher() else "rank 0"
    return StoreHost(name, read_address())


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
    end = time.monotonic() + JOIN_S
    limit = timedelta(seconds=JOIN_S)
    host, port = store_host.address
    is_host = _hosts_store(rank)
    if not is_host:
        while not _is_listening(store_host.address):
            local_processes.check_running(timeout_s)
            if time.monotonic() > end:
                raise TimeoutError(f"{store_host.name}, which hosts the store, never connected")
            time.sleep(CONNECT_POLL_S)
    store = TCPStore(host, port, is_master=is_host, timeout=limit, wait_for_workers=False)
    heartbeat_store = TCPStore(host, port, timeout=limit, wait_for_workers=False)
    heartbeat_store.set_timeout(timedelta(seconds=STORE_S))
    return store, heartbeat_store


def _is_listening(address: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(address, STORE_S):
            return True
    except OSError:
        return False
