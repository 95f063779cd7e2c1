"""Initialize torch.distributed in a launcher's workers: store, heartbeats and process group."""

import os
import socket
import time
import warnings
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from gcnzc.exchange.errors import WorkerLost, describe_end, explain
from gcnzc.exchange.heartbeat import STORE_S, HeartbeatMonitor, StoreHost
from gcnzc.exchange.launch import is_worker, read_address, read_ranks
from gcnzc.exchange.local_processes import LocalProcesses
from gcnzc.exchange.rendezvous import join_workers

# time limit of the rendezvous at the start: importing torch takes half a minute on busy cores
JOIN_S = 180.0


# interval of attempts to connect to a store that is not running yet
CONNECT_POLL_S = 0.3


def initialize(backend: str, timeout_s: float) -> tuple[TCPStore, HeartbeatMonitor]:
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
            monitor.stop(
                failure.reason, is_follow_up=failure.is_follow_up, ranks=failure.cause.ranks
            )
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


def is_initialized() -> bool:
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


def destroy() -> None:
    """Destroy torch.distributed's default process group, unless the user's code did."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _find_store_host() -> StoreHost:
    """Return the process that hosts the store of this attempt."""
    name = "the first machine's launcher" if _is_store_in_launcher() else "rank 0"
    return StoreHost(name, read_address())


def hosts_store(rank: int) -> bool:
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
    is_host = hosts_store(rank)
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
