"""Simulated TCP connections, which share the links of their ranks.

A message starts when both its send and its receive have started, as over gloo. The messages of a
connection follow each other. The rates of all active messages are max-min fair: the rate of none
can increase without a decrease of one that is not faster. They change when a message starts or
ends. A send ends before its bytes have left, as with the send buffers of TCP, so the next send of
the rank may share its link with the rest of this one. Crashes of ranks are not simulated.

Notation: W ranks.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gcnzc.exchange import Link
from gcnzc.exchange.simulated_network import NEVER, SentMessage, SimulatedNetwork

# bytes of payload in a frame with an MTU of 1500 B, of the frame with its headers, and of an
# acknowledgement, which is sent for two frames
_PAYLOAD_BYTES, _FRAME_BYTES, _ACKNOWLEDGEMENT_BYTES = 1448, 1514, 66

TCP_SHARE = _PAYLOAD_BYTES / (_FRAME_BYTES + _ACKNOWLEDGEMENT_BYTES / 2)
"""the part of a link's rate that is payload, if both directions are busy"""

SEND_BUFFER_BYTES = 2e6
"""payload in the send buffer of a connection that has been used: Linux increases it to 4 MiB
(`tcp_wmem`), of which about half is overhead"""

MESSAGE_S = 100e-6
"""seconds of a processor core to start a message; a round value, which was not measured"""

Resource: TypeAlias = tuple[str, int] | tuple[int, int]
"""the outgoing or incoming link of a rank, or the link of a pair of ranks"""

Connection: TypeAlias = tuple[int, int, str | None]
"""sender, receiver and channel"""

# relative difference of rates that are equal except for rounding
_ROUNDING = 1e-9


@dataclass(frozen=True)
class TcpLink(Link):
    """The link of a rank whose peers and channels have a TCP connection each, which share it."""

    buffer_bytes: float = 0.0
    """size of the send buffer of each connection; a send ends when the rest of the message fits in
    it. 0: none"""

    def __post_init__(self) -> None:
        """Check the link; raises ValueError."""
        Link.__post_init__(self)
        if not self.buffer_bytes >= 0:
            raise ValueError(f"a link with buffer_bytes={self.buffer_bytes!r}")


def tcp_link(mbit_per_s: float, delay_s: float = 0.0) -> TcpLink:
    """Return a link that behaves as TCP over Ethernet, in both directions.

    docs/benchmarks/networks.md compares it with emulated networks.

    Args:
        mbit_per_s: rate of the Ethernet frames.
        delay_s: latency from one rank to another.
    """
    rate = mbit_per_s * 1e6 / 8 * TCP_SHARE
    return TcpLink(rate, delay_s, MESSAGE_S, rate, SEND_BUFFER_BYTES)


class Transfer:
    """A message that is being sent.

    Args:
        message: the message.
        resources: the links that limit its rate.
    """

    __slots__ = ("connection", "is_sent", "left", "message", "rate", "resources")

    def __init__(self, message: SentMessage, resources: list[Resource]) -> None:
        self.message, self.resources = message, resources
        self.connection: Connection = message.sender, message.peer, message.channel
        self.left = float(message.num_bytes)
        """bytes that have not left the sender"""
        self.rate = 0.0
        self.is_sent = False
        """whether its bytes are in the send buffer or have left"""


class SharedLinks(SimulatedNetwork):
    """TCP connections that share the links of their ranks, for one simulation.

    Args:
        world_size: W, the number of ranks.
        link: the link of each rank, or a sequence of W links.
        links: by (sender, receiver), links that limit their messages in addition.
    """

    def __init__(
        self,
        world_size: int,
        link: TcpLink | Sequence[TcpLink],
        links: Mapping[tuple[int, int], Link] | None = None,
    ) -> None:
        super().__init__(world_size, link, links)
        self.buffers = [getattr(each, "buffer_bytes", 0.0) for each in self.of_rank]
        limits: dict[Resource, float] = {}
        for rank, own in enumerate(self.of_rank):
            limits |= {("out", rank): own.bytes_per_s, ("in", rank): own.in_bytes_per_s}
        limits |= {pair: own.bytes_per_s for pair, own in self.of_pair.items()}
        self.limits = {resource: rate for resource, rate in limits.items() if rate < NEVER}
        # when a sender has started its last message
        self.started_at = [0.0] * world_size
        # the messages of a connection, the first of which is active
        self.queues: defaultdict[Connection, deque[Transfer]] = defaultdict(deque)
        self.now = 0.0
        # when rates are computed next, and how often they were
        self.shares_at, self.version = -1.0, 0

    def send(
        self, sender: int, receiver: int, num_bytes: int, now: float
    ) -> tuple[float, float, float]:
        """Return infinite times: they are not known yet."""
        return NEVER, NEVER, NEVER

    def open(self, message: SentMessage, now: float) -> None:
        """Start a message if its receive has started."""
        if message.matched_at < NEVER:
            self.start(message, now)

    def match(self, message: SentMessage, now: float) -> None:
        """Start a message whose receive has started after it, when its sender knows that."""
        self.start(message, now + self._delay_s(message.peer, message.sender))

    def start(self, message: SentMessage, now: float) -> None:
        """Start a message, after the previous message of its rank."""
        sender, receiver = message.sender, message.peer
        begin = max(now, self.started_at[sender]) + self.of_rank[sender].message_s
        self.started_at[sender] = begin
        names: list[Resource] = [("out", sender), ("in", receiver), (sender, receiver)]
        transfer = Transfer(message, [name for name in names if name in self.limits])
        self.simulation.schedule(begin, lambda at: self._enqueue(transfer, at))

    def _delay_s(self, sender: int, receiver: int) -> float:
        pair = self.of_pair.get((sender, receiver))
        return self.of_rank[sender].delay_s + (pair.delay_s if pair else 0.0)

    def _enqueue(self, transfer: Transfer, now: float) -> None:
        """Add a message to its connection."""
        self._update(now)
        queue = self.queues[transfer.connection]
        queue.append(transfer)
        if sum(each.left for each in queue) <= self.buffers[transfer.connection[0]]:
            self._end_send(transfer)
        # after all changes at this time
        if len(queue) == 1 and self.shares_at != now:
            self.shares_at = now
            self.simulation.schedule(now, self._share)

    def _update(self, now: float) -> None:
        """Account for the bytes of active messages that have left until `now`."""
        if now > self.now:
            for transfer in self._active():
                transfer.left = max(0.0, transfer.left - transfer.rate * (now - self.now))
        self.now = now

    def _active(self) -> list[Transfer]:
        return [queue[0] for queue in self.queues.values() if queue]

    def _share(self, now: float) -> None:
        """Compute the rates of all active messages, and schedule the next change of one."""
        self.shares_at = -1.0
        self._update(now)
        active = self._active()
        self._set_fair_rates(active)
        self.version += 1
        if active:
            ends = [now + (each.left - self._left_later(each)) / each.rate for each in active]
            first, version = min(ends), self.version
            due = [each for each, end in zip(active, ends, strict=True) if end == first]
            self.simulation.schedule(first, lambda at: self._advance(due, version, at))

    def _left_later(self, transfer: Transfer) -> float:
        """Return how many bytes are left at its next change: in the send buffer, or none."""
        return 0.0 if transfer.is_sent else min(self.buffers[transfer.connection[0]], transfer.left)

    def _set_fair_rates(self, transfers: Sequence[Transfer]) -> None:
        """Set max-min fair rates: fill all links evenly, and fix the rates of full ones."""
        waiting: dict[Resource, dict[Transfer, None]] = {}
        for transfer in transfers:
            transfer.rate = NEVER
            for resource in transfer.resources:
                waiting.setdefault(resource, {})[transfer] = None
        free = {resource: self.limits[resource] for resource in waiting}
        while waiting:
            shares = {each: free[each] / len(waiting[each]) for each in waiting}
            share = min(shares.values())
            for resource, own in shares.items():
                if own > share * (1 + _ROUNDING):
                    continue
                for transfer in list(waiting[resource]):
                    transfer.rate = share
                    for other in transfer.resources:
                        del waiting[other][transfer]
                        free[other] -= share
            waiting = {resource: left for resource, left in waiting.items() if left}

    def _advance(self, due: Sequence[Transfer], version: int, now: float) -> None:
        """Continue with messages that are in the send buffer, or have left."""
        if version != self.version:
            return
        self._update(now)
        for transfer in due:
            transfer.left = self._left_later(transfer)
            if not transfer.is_sent:
                self._end_send(transfer)
            if not transfer.left:
                self.queues[transfer.connection].popleft()
                sender, receiver, _ = transfer.connection
                self.simulation.set_arrival(transfer.message, now + self._delay_s(sender, receiver))
        self._share(now)

    def _end_send(self, transfer: Transfer) -> None:
        transfer.is_sent = True
        transfer.message.sent_at = self.now
        self.simulation.end_send(transfer.message)
