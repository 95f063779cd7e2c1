"""Simulate W ranks in one process, in lockstep, with a virtual clock.

The algorithms are the same as over processes, without a network and without threads. A test has
access to all ranks, every byte is counted, and the clock predicts the time on given network links.
The rank with the earliest time runs next, so the times do not depend on the order of the ranks.

The memory of a simulation is proportional to the requests that have started and not ended.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from gcnzc.exchange.choices import Choices
from gcnzc.exchange.requests import Algorithm
from gcnzc.exchange.simulated_network import Fault, Link, SimulatedNetwork
from gcnzc.exchange.simulated_tasks import Outcome
from gcnzc.exchange.simulation import Simulation

# new objects after which Python searches for cyclic garbage; the default is at most 2000
_GC_THRESHOLD = 200_000
_DEFAULT_CHOICES = Choices()

__all__ = ["Outcome", "lockstep"]


def lockstep(
    algorithms: Sequence[Algorithm[Any]],
    link: Link | Sequence[Link] | None = None,
    links: Mapping[tuple[int, int], Link] | None = None,
    choices: Choices | None = None,
    faults: Mapping[int, Sequence[Fault]] | None = None,
    store_s: float = 0.0,
) -> Outcome:
    """Run the algorithms of W ranks in one process, and simulate the time that they take.

    Args:
        algorithms: one for each rank, in the order of ranks. Their requests may have `SizeOnly`
            values, if only the time is needed.
        link: the link of each rank, or a sequence of W links; None has no limits.
        links: by (sender, receiver), links whose bandwidth and latency limit their messages in
            addition to `link`; their `message_s` and `in_bytes_per_s` are not used.
        choices: the collective algorithm for each kind of request; None uses the defaults.
        faults: by rank, its crash and slow-downs. A rank that waits for one that has crashed raises
            `WorkerLost`, as over processes; if the algorithm does not handle it, this rank ends
            too, and the error is in `Outcome.errors`.
        store_s: the time of a request to the store, such as `CompareAndSet`, in seconds. The store
            is empty at the start.

    Returns:
        The results, times and ledgers of all ranks.

    Raises:
        RequestMismatch: ranks make different requests, or wait for one another in a cycle, as over
            processes.
        RuntimeError: a tensor was changed while it was being sent.
        ValueError: a request, the links or the faults are invalid.
    """
    network = SimulatedNetwork(len(algorithms), link, links)
    simulation = Simulation(algorithms, network, choices or _DEFAULT_CHOICES, faults or {}, store_s)
    with _rare_garbage_collection():
        return simulation.run()


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Let Python search for garbage more rarely: it would visit all pending requests each time."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], _GC_THRESHOLD) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
