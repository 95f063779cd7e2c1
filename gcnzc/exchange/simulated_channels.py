"""The channels that the ranks of a simulation have opened."""

from collections import defaultdict
from typing import TYPE_CHECKING

from gcnzc.exchange.agreement import MAX_OTHERS, describe_other_channel

if TYPE_CHECKING:
    from gcnzc.exchange.simulated_tasks import Task
    from gcnzc.exchange.simulation import Simulation


class SimulatedChannels:
    """Checks that all ranks open the same channels in the same order.

    A rank opens a channel by its first request on it. Processes wait until all of them have opened
    it; the simulation takes no time for it.

    Args:
        simulation: has the requests of the ranks.
    """

    def __init__(self, simulation: "Simulation") -> None:
        self.simulation = simulation
        self.opened: list[list[str]] = [[] for _ in range(simulation.world_size)]
        """by rank, the channels in the order in which the rank has opened them"""

    def open(self, task: "Task", channel: str) -> None:
        """Open a channel, unless the rank has opened it before.

        Raises:
            RequestMismatch: another rank has opened another channel, or made another request.
        """
        simulation, opened = self.simulation, self.opened[task.rank]
        if simulation.world_size == 1 or channel in opened:
            return
        opened.append(channel)
        simulation.logs.check_channel(task.rank, task.caller, channel)

    def describe_missing(self) -> list[str]:
        """Describe which ranks have not opened a channel at the end; empty if a rank has failed."""
        if any(self.simulation.errors):
            return []
        longest = max(self.opened, key=len, default=[])
        return [
            f"rank {self.opened.index(longest)} opens channel {longest[len(opened)]}, and rank "
            f"{rank} does not"
            for rank, opened in enumerate(self.opened)
            if len(opened) < len(longest)
        ]

    def describe_other(self) -> list[str]:
        """Describe messages that were sent on one channel while their receiver waits on another."""
        mailboxes, expected = self.simulation.mailboxes, defaultdict(list)
        for (sender, receiver, _, sequence), mailbox in mailboxes.items():
            if mailbox.receives:
                expected[sender, receiver].append(sequence)
        found = (
            describe_other_channel(sequence, other, (sender, receiver))
            for (sender, receiver, _, sequence), mailbox in mailboxes.items()
            if mailbox.messages
            for other in expected[sender, receiver]
        )
        return [each for each in found if each][:MAX_OTHERS]
