"""The receives from any rank of a simulation."""

from collections import deque
from typing import TYPE_CHECKING, Any

from gcnzc.exchange.errors import WorkerLost
from gcnzc.exchange.requests import ReceiveAny
from gcnzc.exchange.simulated_tasks import SentMessage, StartedReceive, Task

if TYPE_CHECKING:
    from gcnzc.exchange.simulation import Simulation


class SimulatedAnyReceives:
    """Matches receives from any rank with messages.

    Args:
        simulation: has the messages without a receive.
    """

    def __init__(self, simulation: "Simulation") -> None:
        self.simulation = simulation
        self.waiting: dict[Any, deque[StartedReceive]] = {}
        """the receives without a message, by receiver, channel, header and caller"""

    def start(self, task: Task, request: ReceiveAny) -> StartedReceive:
        """Start a receive, and match it with the message that was sent first."""
        request.check()
        receive, channel, mailboxes = StartedReceive(request), task.channel, []
        for sender in range(self.simulation.world_size):
            name = request.name_sequence(sender, task.rank, channel or "", task.caller)
            mailbox = self.simulation.mailboxes.get((sender, task.rank, channel, name))
            if mailbox is not None and mailbox.messages:
                mailboxes.append(mailbox)
        if mailboxes:
            first = min(mailboxes, key=lambda mailbox: mailbox.messages[0].number)
            self.simulation.match_sent(first.messages.popleft(), receive, task.now)
        else:
            key = task.rank, channel, request.describe_header()[0], task.caller
            self.waiting.setdefault(key, deque()).append(receive)
        return receive

    def match(self, task: Task, message: SentMessage, channel: str | None) -> bool:
        """Match a message of a task with a receive; return whether there is one."""
        key = message.peer, channel, message.request.describe_header()[0], task.caller
        receives = self.waiting.get(key)
        if not receives:
            return False
        self.simulation.match(message, receives.popleft(), task.now)
        if not receives:
            del self.waiting[key]
        return True

    def fail_waits(self, at: float) -> bool:
        """Raise an error in the tasks that wait for a message, when no task can continue.

        Returns:
            Whether there was such a task. There is none if no rank has ended with an error.
        """
        error = next((each for each in self.simulation.errors if each is not None), None)
        receives = [each for receives in self.waiting.values() for each in receives]
        is_lost = False
        for receive in receives if error is not None else ():
            task, receive.waiter = receive.waiter, None
            if task is not None and not task.is_done:
                task.error = WorkerLost(
                    f"rank {task.rank} waited for {receive.request.describe()}, which no rank has "
                    f"sent: {error}"
                )
                self.simulation.resume(task, at)
                is_lost = True
        return is_lost
