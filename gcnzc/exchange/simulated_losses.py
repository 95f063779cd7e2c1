"""The ranks and connections that a simulation has lost."""

from typing import TYPE_CHECKING

from gcnzc.exchange.errors import WorkerLost
from gcnzc.exchange.requests import Message
from gcnzc.exchange.simulated_tasks import SentMessage, StartedReceive, Task

if TYPE_CHECKING:
    from gcnzc.exchange.simulation import Simulation


class SimulatedLosses:
    """Ends ranks that crash or fail, and breaks connections.

    Args:
        simulation: has the tasks of the ranks.
    """

    def __init__(self, simulation: "Simulation") -> None:
        self.simulation = simulation
        self.broken: dict[int | tuple[int, str | None], tuple[float, WorkerLost]] = {}
        """by rank, or rank and channel of collectives, when its connections broke, and why"""

    def crash(self, rank: int, at: float) -> None:
        """End a rank that has not ended before."""
        if self.simulation.main_tasks[rank].is_done:
            return
        error = WorkerLost(f"rank {rank} crashed at {at:g} s of the simulation")
        self.simulation.main_tasks[rank].now, self.simulation.main_tasks[rank].answer = at, None
        self.lose(rank, at, error)

    def lose(self, rank: int, at: float, error: WorkerLost) -> None:
        """End all tasks of a rank, and break its connections."""
        self.simulation.errors[rank] = error
        if self.simulation.shared:
            self.simulation.shared.crash(rank)
        for task in [each for each in self.simulation.tasks if each.rank == rank]:
            task.is_done = True
            del self.simulation.tasks[task]
        self.disconnect(rank, None, at, error, is_whole_rank=True)

    def disconnect(
        self, rank: int, channel: str | None, at: float, error: WorkerLost, *,
        is_whole_rank: bool = False,
    ) -> None:  # fmt: skip
        """Break the connections of a rank, or those of the collectives of one of its channels.

        Tasks of other ranks that wait for them raise an error after the latency.
        """
        key = rank if is_whole_rank else (rank, channel)
        if key in self.broken:
            return
        self.broken[key] = at, error
        delay_s = self.simulation.network.of_rank[rank].delay_s
        for task in list(self.simulation.tasks):
            pending = task.waits_for
            if isinstance(pending, StartedReceive):
                message = pending.message
                # a message that is on its way arrives
                is_waiting = message is None or message.sent_at > at
            else:
                is_waiting = isinstance(pending, SentMessage)
            if is_waiting and pending.peer == rank and self.is_lost(task, rank):
                task.error = self.lost_error(task, pending.request, rank)
                pending.waiter = None
                self.simulation.resume(task, at + delay_s)

    def is_lost(self, task: Task, peer: int) -> bool:
        """Return whether a task has no connection to a rank any more."""
        return peer in self.broken or bool(task.kind and (peer, task.channel) in self.broken)

    def lost_error(self, task: Task, request: Message, peer: int) -> WorkerLost:
        """Return the error of a request whose peer is not connected."""
        at, error = self.broken.get(peer) or self.broken[peer, task.channel]
        return WorkerLost(
            f"rank {task.rank} waited for {request.describe()}, whose connections broke at "
            f"{at:g} s: {error}"
        )
