"""The headers of the requests of simulated ranks."""

from collections.abc import Sequence

from gcnzc.exchange.agreement import (
    Header,
    RequestLog,
    channel_sequence,
    collective_sequence,
    find_difference,
    mismatch,
)
from gcnzc.exchange.collectives.subgroup import Subgroup
from gcnzc.exchange.message_checks import check_message
from gcnzc.exchange.requests import Collective, Receive, Send
from gcnzc.exchange.simulated_tasks import Task


class SimulatedLogs:
    """The requests that each rank has made, which are compared when a rank makes another one."""

    def __init__(self, world_size: int) -> None:
        self.logs = [RequestLog(rank) for rank in range(world_size)]

    def check_collective(
        self,
        rank: int,
        caller: str,
        channel: str | None,
        request: Collective | Subgroup,
        ranks: Sequence[int],
    ) -> None:
        """Compare a collective with the same request of ranks that have made it already.

        Raises:
            RequestMismatch: they differ.
        """
        header = self.logs[rank].record_collective(channel or "", request, caller)
        self._check(rank, collective_sequence(channel or "", request), header, ranks)

    def check_message(self, task: Task, message: Send | Receive, channel: str | None) -> str:
        """Check a message, and compare it with the request of its peer if there is one.

        Returns:
            The name of its sequence; a message with a tag matches any of its sequence.
        """
        check_message(message, task.rank, len(self.logs))
        sequence = message.sequence(task.rank, channel or "", task.caller)
        if message.tag is None:
            header = self.logs[task.rank].record_message(message, task.caller, channel or "")
            self._check(task.rank, sequence, header, [message.peer])
        return sequence

    def check_channel(self, rank: int, caller: str, channel: str) -> None:
        """Compare the opening of a channel with ranks that have opened as many channels.

        Raises:
            RequestMismatch: such a rank has opened another one.
        """
        sequence = channel_sequence("")
        words = f"the opening of channel {channel}"
        header = self.logs[rank].record(sequence, words, caller=caller)
        self._check(rank, sequence, header, range(len(self.logs)))

    def _check(self, rank: int, sequence: str, header: Header, peers: Sequence[int]) -> None:
        """Raise a RequestMismatch if a request differs from that of a peer that made it before."""
        for peer in peers:
            other = None if peer == rank else self.logs[peer].find(sequence, header.number)
            if other is not None:
                difference = find_difference((peer, rank), sequence, other, header)
                if difference:
                    raise mismatch(difference)
                if not header.sent and not header.expected:
                    # the header equals those of all ranks that have made the request
                    return
