"""The store of a simulation, whose requests take time."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gcnzc.exchange.errors import WorkerLost
from gcnzc.exchange.simulated_tasks import NEVER, KeyWait, Task
from gcnzc.exchange.store_requests import (
    CompareAndSet,
    DeleteKeys,
    MemoryStore,
    ReadKeys,
    StoreRequest,
    WaitForKey,
)

if TYPE_CHECKING:
    from gcnzc.exchange.simulation import Simulation


class SimulatedStore:
    """Answers the requests to the store.

    A request arrives at the store after half of the time of a request, and is executed at once;
    its answer takes the other half. Requests that arrive at the same time are executed in the order
    in which they were made, so ranks that run at the same time take turns.

    Args:
        simulation: runs the tasks.
        request_s: the time of a request in seconds.

    Raises:
        ValueError: the time is negative or infinite.
    """

    def __init__(self, simulation: "Simulation", request_s: float) -> None:
        if not 0 <= request_s < NEVER:
            raise ValueError(
                f"requests to the store that take {request_s} s\n\nhint: give a time of at least 0"
            )
        self.simulation, self.half_s = simulation, request_s / 2
        self.memory = MemoryStore()
        self.waits: dict[str, list[KeyWait]] = {}
        """by key, the waits for it"""
        self.handlers: dict[type, Callable[[Task, Any], bool]] = {
            CompareAndSet: self.request(self._compare_and_set),
            ReadKeys: self.request(lambda task, request, at: self.memory.read(request)),
            DeleteKeys: self.request(lambda task, request, at: self.memory.delete(request)),
            WaitForKey: self.wait_for_key,
        }

    def request(
        self, execute: Callable[[Task, Any, float], Any]
    ) -> Callable[[Task, StoreRequest], bool]:
        """Return a handler of `Simulation` for requests that are executed when they arrive."""

        def handle(task: Task, request: StoreRequest) -> bool:
            self.check_and_count(task, request)
            arrival = task.now + self.half_s
            self.simulation.schedule(
                arrival, lambda at: self.answer(task, execute(task, request, at), at)
            )
            return False

        return handle

    def check_and_count(self, task: Task, request: StoreRequest) -> None:
        """Check a request, and count it in the ledger of its rank."""
        request.check()
        request.count(self.simulation.ledgers[task.rank], self.simulation.world_size)

    def answer(self, task: Task, answer: Any, at: float) -> None:
        """Send an answer to a task, unless its rank has ended."""
        if not task.is_done:
            task.answer = answer
            self.simulation.resume(task, at + self.half_s)

    def _compare_and_set(self, task: Task, request: CompareAndSet, at: float) -> bytes:
        if task.is_done:
            # the rank has crashed: its request does not reach the store
            return b""
        answer = self.memory.compare_and_set(request)
        if answer == request.value:
            for wait in self.waits.pop(request.key, ()):
                self.end_wait(wait, answer, at)
        return answer

    def wait_for_key(self, task: Task, request: WaitForKey) -> bool:
        """Handle a `WaitForKey`."""
        self.check_and_count(task, request)
        task.waits_for = wait = KeyWait(task, request)
        self.simulation.schedule(task.now + self.half_s, lambda at: self.begin_wait(wait, at))
        return False

    def begin_wait(self, wait: KeyWait, at: float) -> None:
        """Answer a wait if its key exists; otherwise store the wait until the key is set."""
        request = wait.request
        (value,) = self.memory.read(ReadKeys([request.key]))
        if value:
            self.end_wait(wait, value, at)
            return
        self.waits.setdefault(request.key, []).append(wait)
        if request.seconds is not None and request.seconds < NEVER:
            self.simulation.schedule(
                at + request.seconds, lambda end: self.end_wait(wait, None, end)
            )

    def end_wait(self, wait: KeyWait, answer: bytes | None, at: float) -> None:
        """Answer a wait, unless that was done before."""
        if not wait.is_over:
            wait.is_over = True
            if answer is None:
                self.waits[wait.request.key].remove(wait)
            self.answer(wait.task, answer, at)

    def fail_waits(self, at: float) -> bool:
        """Raise an error in the tasks that wait for keys, when no task can continue.

        Returns:
            Whether there was such a task. There is none if no rank has ended with an error.
        """
        errors = [each for each in self.simulation.errors if each is not None]
        waits = [
            each
            for waits in self.waits.values()
            for each in waits
            if errors and each.request.seconds is None and not each.task.is_done
        ]
        self.waits = {} if waits else self.waits
        for wait in waits:
            wait.task.error = WorkerLost(
                f"rank {wait.task.rank} waited for {wait.request.describe()}, which no rank has "
                f"set: {errors[0]}"
            )
            self.end_wait(wait, b"", at)
        return bool(waits)
