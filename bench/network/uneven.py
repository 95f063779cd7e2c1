"""Options for uneven machines: slow workers, slow links, and workers that leave and join.

bench/network/cluster.py applies them to any command.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

# a slowed machine is paused for a part of each period
PERIOD_S = 0.06

Factors = Mapping[int, float]
"""by worker, how many times as slowly it computes"""


def slow_worker(text: str) -> tuple[int, float]:
    """Parse an option: a worker and a factor, such as 3:2.5."""
    worker, factor = text.split(":")
    return int(worker), _factor(factor)


def slow_link(text: str) -> tuple[tuple[int, int], float]:
    """Parse an option: two workers and a factor, such as 0-1:10."""
    pair, factor = text.split(":")
    first, second = pair.split("-")
    return (int(first), int(second)), _factor(factor)


def moment(text: str) -> tuple[int, float]:
    """Parse an option: a worker and the seconds after the start, such as 3:20."""
    worker, seconds = text.split(":")
    if float(seconds) < 0:
        raise ValueError(f"a time of {seconds} s\n\nhint: give seconds after the start")
    return int(worker), float(seconds)


def _factor(text: str) -> float:
    factor = float(text)
    if not 1 <= factor < float("inf"):
        raise ValueError(f"slower by {text}\n\nhint: a factor of 2 takes twice the time")
    return factor


def check_workers(workers: int, named: Sequence[int]) -> None:
    """Check that options name workers of the cluster.

    Raises:
        ValueError: one of them is not in [0, workers).
    """
    for worker in named:
        if not 0 <= worker < workers:
            raise ValueError(f"worker {worker} of {workers}\n\nhint: workers are counted from 0")


def pair_rates(
    rates: Sequence[float | None], slow: Mapping[tuple[int, int], float]
) -> dict[tuple[int, int], float]:
    """Return the rates of slow links, in both directions.

    Args:
        rates: Mbit/s of each worker's link.
        slow: by pair of workers, the factor by which the link between them is slower.

    Raises:
        ValueError: neither of the two workers has a rate.
    """
    found = {}
    for (first, second), factor in slow.items():
        check_workers(len(rates), (first, second))
        limits = [rate for rate in (rates[first], rates[second]) if rate is not None]
        if not limits:
            raise ValueError(
                f"a slower link between workers {first} and {second} without a rate\n\n"
                "hint: give --mbit-per-s"
            )
        found[first, second] = found[second, first] = min(limits) / factor
    return found


@contextmanager
def slowed(processes_of: Callable[[int], Sequence[int]], factors: Factors) -> Iterator[None]:
    """Slow the machines of a cluster: pause all their processes for a part of each period.

    Args:
        processes_of: returns the ids of the processes of a worker's machine.
        factors: by worker, how many times as slowly it runs; its messages are paused too.
    """
    stopped = threading.Event()
    threads = [
        threading.Thread(target=_pause_often, args=(processes_of, worker, factor, stopped))
        for worker, factor in factors.items()
        if factor > 1
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


def _pause_often(
    processes_of: Callable[[int], Sequence[int]],
    worker: int,
    factor: float,
    stopped: threading.Event,
) -> None:
    while not stopped.wait(PERIOD_S / factor):
        paused = processes_of(worker)
        _send(paused, signal.SIGSTOP)
        stopped.wait(PERIOD_S * (1 - 1 / factor))
        _send(paused, signal.SIGCONT)


def _send(processes: Sequence[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
