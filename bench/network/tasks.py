"""Run tasks on all workers of a benchmark, each with the same program.

A benchmark passes its tasks as JSON to the workers, on emulated machines or as processes of this
machine. In a worker, `serve` runs them over torch.distributed, and rank 0 prints their results.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from bench.network.cluster import Cluster
from gcnzc.exchange import AllGatherScalar, Group, init_group
from gcnzc.exchange.requests import yield_request

FLAG = "--tasks"
Line = dict[str, Any]
# of processes whose cores are shared with other programs, which would delay their messages
PRIORITY = -10


def command(module: str, tasks: Iterable[Line]) -> list[str]:
    """Return the command of a worker."""
    return [sys.executable, "-m", module, FLAG, *map(json.dumps, tasks)]


def run_on(
    cluster: Cluster, module: str, tasks: Iterable[Line], limit_s: float = 600.0
) -> Iterator[Line]:
    """Run tasks on a cluster, and yield the lines of rank 0."""
    words = command(module, tasks)
    ran = cluster.run(lambda _: words, limit_s=limit_s)
    yield from map(json.loads, ran.output[0].splitlines())
    if any(ran.codes):
        raise SystemExit(f"error: the workers exited with {ran.codes}")


def run_here(workers: int, command: Sequence[str]) -> Iterator[Line]:
    """Run the ranks as processes on this machine, and yield the lines of rank 0.

    Args:
        workers: the number of ranks.
        command: the command of each rank; rank 0 prints JSON lines.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
    processes = []
    for rank in range(workers):
        own = {name: str(each) for name, each in common.items()}
        own |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        environment = {**os.environ, **own}
        started = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        processes.append(started)
    outputs = [process.communicate()[0] for process in processes]
    codes = [process.returncode for process in processes]
    if any(codes):
        raise SystemExit(f"error: the workers exited with {codes}")
    yield from map(json.loads, outputs[0].splitlines())


def is_worker() -> bool:
    """Return whether this process is a worker."""
    return sys.argv[1:2] == [FLAG]


def serve(
    measure: Callable[[Group, Line], Iterable[Line]],
    *,
    timeout_s: float = 120.0,
    warm_up: int = 0,
    heartbeats: bool = True,
) -> None:
    """Run the tasks of the command line as a worker, with a high priority if that is allowed.

    Args:
        measure: runs a task, and returns its results, which are the same on all ranks.
        timeout_s: of messages.
        warm_up: number of scalar all-gathers before the tasks, until the scheduler has distributed
            the processes over cores.
        heartbeats: send heartbeats, which count as bytes too.
    """
    with suppress(PermissionError):
        os.nice(PRIORITY)
    torch.set_num_threads(1)
    tasks = [json.loads(text) for text in sys.argv[2:]]
    with init_group(timeout_s=timeout_s) as group:
        if group.monitor is not None and not heartbeats:
            group.monitor.stop()
        for _ in range(warm_up):
            group.run(yield_request(AllGatherScalar(0)))
        for task in tasks:
            for line in measure(group, task):
                if group.rank == 0:
                    print(json.dumps(line), flush=True)


def interface_counts() -> tuple[int, int]:
    """Return the bytes and packets that this worker's network interface has sent."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == os.environ["GLOO_SOCKET_IFNAME"]:
            fields = [int(number) for number in numbers.split()]
            return fields[8], fields[9]
    return 0, 0
