"""Run functions in real worker processes that communicate over gloo on this machine."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import HANG_S
from quick_runs import made_once
from torch.distributed import TCPStore

from gcnzc.exchange import agreement, heartbeat

# one process imports everything once, and each worker is a fork of it
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "gcnzc.optim",
        "gcnzc.train.run",
        # what the modules of tests import, from which a worker gets its function
        "pytest",
        "gcnzc.cli",
        "gcnzc.datasets.generate",
        "gcnzc.graph.prepare",
        # what a worker would import on first use, which takes 3 s of CPU time: by torch's
        # optimizers, by compiled functions, by plots and by the names of classes
        "torch._dynamo",
        "torch.profiler",
        "numba.core.registry",
        "numba.np.arrayobj",
        "numba.typed",
        "scipy.linalg",
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
        "pandas",
    ]
)


def shorten_waits() -> None:
    """Shorten the intervals of heartbeats and of comparisons of requests, in a worker."""
    heartbeat.BEAT_S = 0.25
    agreement.STALL_S, agreement.COMPARE_S = 0.2, 0.05


def _work(
    deed: Callable[..., Any], environment: dict[str, str], folder: Path, words: Sequence[Any]
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    rank = environment["RANK"]
    talk = folder / f"talk{rank}"
    with talk.open("w") as file:
        os.dup2(file.fileno(), 2)
        try:
            torch.save(deed(*words), folder / f"{rank}.pt")
        except BaseException:
            traceback.print_exc(file=file)
            file.flush()
            # at once: nothing waits for the exit of threads
            os._exit(1)
    os._exit(0)


@contextmanager
def workers(
    world_size: int, folder: Path, deed: Callable[..., Any], *words: Any
) -> Iterator[list[ForkServerProcess]]:
    """Processes that run `deed(*words)`, a function of a module, and none left at the end."""
    # as torchrun does it: the store outlives the workers
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    for rank in range(world_size):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        processes.append(FORKS.Process(target=_work, args=(deed, environment, folder, words)))
        processes[-1].start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()
        del store


def talk(folder: Path, rank: int) -> str:
    """What a worker wrote on stderr."""
    return (folder / f"talk{rank}").read_text()


def results(world_size: int, folder: Path, deed: Callable[..., Any], *words: Any) -> list[Any]:
    """What `deed(*words)` returned on each of so many workers."""
    with workers(world_size, folder, deed, *words) as processes:
        end = time.monotonic() + HANG_S
        for rank, process in enumerate(processes):
            process.join(end - time.monotonic())
            assert process.exitcode == 0, f"worker {rank}: {process.exitcode}\n{talk(folder, rank)}"
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]


def results_once(
    factory: pytest.TempPathFactory, world_size: int, deed: Callable[..., Any], *words: Any
) -> list[Any]:
    """What `results` returns, from workers that run once for all test processes of a session."""
    name = f"{deed.__module__}.{deed.__name__}"
    folder = made_once(factory, name, lambda folder: results(world_size, folder, deed, *words))
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]
