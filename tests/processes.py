"""Run functions in real worker processes that communicate over gloo on this machine."""

import importlib
import multiprocessing.util
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import HANG_S
from quick_runs import made_once
from torch.distributed import TCPStore

from gcnzc.exchange import agreement, heartbeat

# workers are forks of one process, see `start_fork_server`
FORKS = multiprocessing.get_context("forkserver")
# what workers would import on first use: torch's optimizers, compiled functions, plots, files for
# TensorBoard, and the names of classes
LAZY = ("torch._dynamo", "torch.profiler", "numba.core.registry", "numba.np.arrayobj")
LAZY += ("numba.typed", "scipy.linalg", "matplotlib.figure", "matplotlib.backends.backend_agg")
LAZY += ("pandas", "tensorboard.compat.proto.summary_pb2")
LAZY += ("tensorboard.summary.writer.record_writer",)
for name in LAZY:
    with suppress(ImportError):
        importlib.import_module(name)


def start_fork_server() -> None:
    """Fork the process from which workers are forked, before the first test runs.

    It has the imports of all modules of tests, and no threads. Otherwise multiprocessing starts an
    interpreter that imports everything again, and each worker imports the module of its test.
    """
    # which is started in the same way
    resource_tracker.ensure_running()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # of Python 3.12 and newer: pytest-xdist has a thread, which holds no lock here
        warnings.simplefilter("ignore", DeprecationWarning)
        patch.setattr(multiprocessing.util, "spawnv_passfds", _fork)
        forkserver.ensure_running()


def _fork(_path: bytes, arguments: Sequence[str], files: Sequence[int]) -> int:
    """Execute the program of an interpreter in a fork of this process; return its id."""
    process = os.fork()
    if process == 0:
        try:
            # the other end of the pipe by which the server knows that this process lives
            pipe = os.readlink(f"/proc/self/fd/{files[1]}")
            for file in map(int, os.listdir("/proc/self/fd")):
                if file != files[1] and os.path.realpath(f"/proc/self/fd/{file}").endswith(pipe):
                    os.close(file)
            # what workers print is not pytest's, and their warnings are no errors
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            warnings.resetwarnings()
            warnings.simplefilter("ignore")
            # OpenMP's threads of this process are not in its forks, which would wait for them
            torch.set_num_threads(1)
            exec(arguments[-1])
        finally:
            os._exit(0)
    return process


def shorten_waits() -> None:
    """Shorten the intervals of heartbeats and of comparisons of requests, in a worker."""
    heartbeat.BEAT_S = 0.25
    agreement.STALL_S, agreement.COMPARE_S = 0.2, 0.05


def _work(
    deed: Callable[..., Any], environment: dict[str, str], folder: Path, words: Sequence[Any]
) -> None:
    os.environ.update(environment)
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
