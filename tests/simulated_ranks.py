"""Run functions of ranks that call `step` themselves, with a simulation in place of processes.

Each rank is a thread, of which one runs at a time. The algorithms that it runs on its group are
those of `lockstep`, so that nothing waits for a network or a time limit.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

from torch.distributed import HashStore

from gcnzc.exchange import Group, RequestMismatch, lockstep


class SimulatedGroup(Group):
    """The group of a simulated rank."""

    def __init__(self, rank: int, world_size: int, store: HashStore) -> None:
        super().__init__(rank, world_size)
        # connected, as far as optimizers see
        self.backend, self.store = "simulation", store
        self.algorithms: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.broken: Exception | None = None

    def run(self, algorithm: Any) -> Any:
        """Run an algorithm in the simulation of all ranks."""
        if self.broken is None:
            self.algorithms.put(algorithm)
            answer, self.broken = self.answers.get()
            if self.broken is None:
                return answer
        error = self.broken
        if not isinstance(error, RequestMismatch):
            # the connections remain
            self.broken = None
        raise error

    def serve(self, thread: threading.Thread) -> Any:
        """The algorithms of this rank, one after the other, as an algorithm."""
        thread.start()
        while (algorithm := self.algorithms.get()) is not None:
            try:
                answer = (yield from algorithm), None
            except Exception as error:
                answer = None, error
            self.answers.put(answer)


def simulate(world_size: int, function: Callable[..., Any], *words: Any) -> list[Any]:
    """What `function(group, *words)` returns on each rank of a simulation."""
    store, found, errors = HashStore(), [None] * world_size, []
    groups = [SimulatedGroup(rank, world_size, store) for rank in range(world_size)]

    def work(group: SimulatedGroup) -> None:
        try:
            found[group.rank] = function(group, *words)
        except BaseException as error:
            errors.append(error)
        group.algorithms.put(None)

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    try:
        lockstep([group.serve(thread) for group, thread in zip(groups, threads, strict=True)])
    except RequestMismatch as error:
        # all ranks get it, as over processes
        for group in groups:
            group.answers.put((None, error))
    for thread in threads:
        if thread.ident is not None:
            thread.join()
    if errors:
        raise errors[0]
    return found
