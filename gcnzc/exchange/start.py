"""Joining a launcher's workers: the store, the process group and the watch."""

import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from gcnzc.exchange.errors import WorkerLost, explain
from gcnzc.exchange.heartbeat import STORE_S, HeartbeatMonitor, StoreHost
from gcnzc.exchange.local_processes import LocalProcesses
from gcnzc.exchange.rendezvous import join_workers

# time limit of the rendezvous at the start: importing torch takes half a minute on busy cores
JOIN_S = 180.0


# interval of attempts to connect to a store that is not running yet
CONNECT_POLL_S = 0.3


def is_worker() -> bool:
    """Whether a launcher such as torchrun has started this process as a worker."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def initialize(backend: str, timeout_s: float) -> tuple[TCPStore, HeartbeatMonitor]:
    """Initialize torch.distributed together with the other workers.

    Returns:
        The process group's store and the heartbeats, each on its own connection.

    Raises:
        WorkerLost: workers are missing or stopped; the message names them.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    keeper, siblings = _keeper(), LocalProcesses()
    began, watch = time.monotonic(), None
    try:
        whole, signs = _connect(rank, keeper, timeout_s, siblings)
        name = join_workers(signs, rank, world_size, JOIN_S, timeout_s, siblings.check_running)
        host = socket.gethostname()
        watch = HeartbeatMonitor(PrefixStore(name, signs), rank, world_size, host, keeper)
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
            why = explain(watch, error)
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


def _keeper() -> StoreHost:
    """Return the process that hosts the store of this attempt."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return StoreHost("the first machine's launcher" if _is_of_launcher() else "worker 0", address)


def _is_of_launcher() -> bool:
    """Whether a launcher hosts the store; otherwise worker 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _connect(
    rank: int, keeper: StoreHost, timeout_s: float, siblings: LocalProcesses
) -> tuple[TCPStore, TCPStore]:
    """Open two connections to the store; worker 0 creates it unless the launcher did."""
    end = time.monotonic() + JOIN_S
    limit = timedelta(seconds=JOIN_S)
    host, port = keeper.address
    makes_it = rank == 0 and not _is_of_launcher()
    if not makes_it:
        while not _listens(keeper.address):
            siblings.check_running(timeout_s)
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
