"""Simulated TCP connections, which share the links of their ranks.

A message starts when both its send and its receive have started, as over gloo. The messages of a
connection follow each other. The rates of all active messages are max-min fair: the rate of none
can increase without a decrease of one that is not faster. They change when a message starts or
ends. A send ends before its bytes have left, as with the send buffers of TCP, so the next send of
the rank may share its link with the rest of this one.

Notation: W ranks.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
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

Resource: TypeAlias = tuple[str, int, int]
"""an outgoing link, an incoming link or the link of a pair, and its ranks"""

Connection: TypeAlias = tuple[int, int, str | None]
"""sender, receiver and channel"""

# bytes that are left of a message, at most, because of rounding
_TINY = 1e-6
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

    __slots__ = ("at", "connection", "is_sent", "left", "message", "rate", "resources", "version")

    def __init__(self, message: SentMessage, resources: list[Resource]) -> None:
        self.message, self.resources = message, resources
        self.connection: Connection = message.sender, message.peer, message.channel
        self.left = float(message.num_bytes)
        """bytes that have not left the sender at time `at`"""
        self.rate = self.at = 0.0
        self.is_sent = False
        """whether its bytes are in the send buffer or have left"""
        self.version = 0
        """number of changes of the rate; events of earlier versions are obsolete"""

    def update(self, now: float) -> None:
        """Account for the bytes that have left until `now`."""
        if now > self.at and self.rate:
            self.left = max(0.0, self.left - self.rate * (now - self.at))
        self.at = now


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
        # when a sender has started its last message
        self.started_at = [0.0] * world_size
        self.connections: defaultdict[Connection, deque[Transfer]] = defaultdict(deque)
        # active messages, in the order of their starts
        self.active: defaultdict[Resource, dict[Transfer, None]] = defaultdict(dict)
        # active messages whose rates are not known yet, and links whose share has changed
        self.changed: dict[Transfer, None] = {}
        self.freed: dict[Resource, None] = {}
        self.shares_at = -1.0

    def connect(
        self,
        schedule: Callable[[float, Callable[[float], None]], None],
        end_send: Callable[[SentMessage], None],
        set_arrival: Callable[[SentMessage, float], None],
    ) -> None:
        """Prepare for a simulation; see `SimulatedNetwork`."""
        self.schedule, self.end_send, self.set_arrival = schedule, end_send, set_arrival

    def send(
        self, sender: int, receiver: int, num_bytes: int, now: float
    ) -> tuple[float, float, float]:
        """Return infinite times: they are not known yet."""
        return NEVER, NEVER, NEVER

    def open(self, message: SentMessage, now: float) -> None:
        """Start a message if its receive has started."""
        if message.matched_at < NEVER:
            self.start(message, now, is_late=False)

    def match(self, message: SentMessage, now: float) -> None:
        """Start a message whose receive has started after it."""
        self.start(message, now, is_late=True)

    def start(self, message: SentMessage, now: float, *, is_late: bool) -> None:
        """Start a message whose send and receive have started.

        Args:
            message: the message.
            now: when the later of the two started.
            is_late: whether this is the receive, so that the sender has to be notified first.
        """
        sender, receiver = message.sender, message.peer
        link = self.of_rank[sender]
        if is_late:
            now += self._delay_s(receiver, sender)
        begin = max(now, self.started_at[sender]) + link.message_s
        self.started_at[sender] = begin
        transfer = Transfer(message, self._resources(sender, receiver))
        self.schedule(begin, lambda at: self._enqueue(transfer, at))

    def crash(self, rank: int) -> None:
        """End the messages of a rank that are not in its send buffers."""
        for connection, queue in self.connections.items():
            if connection[0] == rank:
                for transfer in [each for each in queue if not each.is_sent]:
                    self._remove(transfer, transfer.at)

    def _resources(self, sender: int, receiver: int) -> list[Resource]:
        """Return the links with a limit from one rank to another."""
        found: list[Resource] = []
        if self.of_rank[sender].bytes_per_s < NEVER:
            found.append(("out", sender, sender))
        if self.of_rank[receiver].in_bytes_per_s < NEVER:
            found.append(("in", receiver, receiver))
        if (sender, receiver) in self.of_pair:
            found.append(("pair", sender, receiver))
        return found

    def _bytes_per_s(self, resource: Resource) -> float:
        kind, first, second = resource
        if kind == "pair":
            return self.of_pair[first, second].bytes_per_s
        link = self.of_rank[first]
        return link.bytes_per_s if kind == "out" else link.in_bytes_per_s

    def _delay_s(self, sender: int, receiver: int) -> float:
        pair = self.of_pair.get((sender, receiver))
        return self.of_rank[sender].delay_s + (pair.delay_s if pair else 0.0)

    def _enqueue(self, transfer: Transfer, now: float) -> None:
        """Add a message to its connection, and send it if no other precedes it."""
        queue = self.connections[transfer.connection]
        queue.append(transfer)
        for each in queue:
            each.update(now)
        if sum(each.left for each in queue) <= self._buffer_bytes(transfer):
            self._end_send(transfer, now)
        if len(queue) == 1:
            self._activate(transfer, now)

    def _buffer_bytes(self, transfer: Transfer) -> float:
        return self.buffers[transfer.connection[0]]

    def _activate(self, transfer: Transfer, now: float) -> None:
        transfer.at = now
        for resource in transfer.resources:
            self.active[resource][transfer] = None
        self.changed[transfer] = None
        self._share_later(now)

    def _remove(self, transfer: Transfer, now: float) -> None:
        """Remove a message, and send the next one of its connection."""
        transfer.version += 1
        queue = self.connections[transfer.connection]
        is_active = queue[0] is transfer
        queue.remove(transfer)
        if not is_active:
            return
        for resource in transfer.resources:
            del self.active[resource][transfer]
            self.freed[resource] = None
        self.changed.pop(transfer, None)
        if queue:
            self._activate(queue[0], now)
        self._share_later(now)

    def _share_later(self, now: float) -> None:
        """Compute rates after all changes at this time."""
        if self.shares_at != now:
            self.shares_at = now
            self.schedule(now, self._share)

    def _share(self, now: float) -> None:
        """Compute the rates of all messages that a change affects."""
        self.shares_at = -1.0
        changed = list(self.changed)
        for resource in self.freed:
            changed += self.active[resource]
        self.changed.clear()
        self.freed.clear()
        affected = self._affected(changed)
        rates = self._fair_rates(affected)
        for transfer in affected:
            rate = rates[transfer]
            if abs(rate - transfer.rate) > _ROUNDING * rate or not transfer.version:
                transfer.update(now)
                transfer.rate = rate
                self._schedule_next(transfer)

    def _affected(self, changed: Iterable[Transfer]) -> dict[Transfer, None]:
        """Return the messages that are connected with these ones by common links."""
        found = dict.fromkeys(changed)
        pending, visited = list(found), set()
        while pending:
            for resource in pending.pop().resources:
                if resource in visited:
                    continue
                visited.add(resource)
                for other in self.active[resource]:
                    if other not in found:
                        found[other] = None
                        pending.append(other)
        return found

    def _fair_rates(self, transfers: Iterable[Transfer]) -> dict[Transfer, float]:
        """Return the max-min fair rates: fill all links evenly, and fix the rates of full ones."""
        rates: dict[Transfer, float] = {}
        free: dict[Resource, float] = {}
        for transfer in transfers:
            rates[transfer] = NEVER
            for resource in transfer.resources:
                free[resource] = self._bytes_per_s(resource)
        waiting = {resource: dict(self.active[resource]) for resource in free}
        while waiting:
            shares = {each: free[each] / len(waiting[each]) for each in waiting}
            share = min(shares.values())
            for resource, own in shares.items():
                if own > share * (1 + _ROUNDING):
                    continue
                for transfer in list(waiting[resource]):
                    rates[transfer] = share
                    for other in transfer.resources:
                        del waiting[other][transfer]
                        free[other] -= share
            waiting = {resource: left for resource, left in waiting.items() if left}
        return rates

    def _schedule_next(self, transfer: Transfer) -> None:
        """Schedule when a message is in the send buffer, or has left."""
        transfer.version += 1
        version = transfer.version
        left = transfer.left
        if not transfer.is_sent:
            left -= min(self._buffer_bytes(transfer), left)
        end = transfer.at + left / transfer.rate
        self.schedule(end, lambda at: self._advance(transfer, version, at, left))

    def _advance(self, transfer: Transfer, version: int, now: float, sent: float) -> None:
        """Continue with a message after `sent` more bytes have left."""
        if version != transfer.version:
            return
        transfer.left, transfer.at = transfer.left - sent, now
        if not transfer.is_sent:
            self._end_send(transfer, now)
        if transfer.left > _TINY:
            self._schedule_next(transfer)
            return
        sender, receiver, _ = transfer.connection
        self._remove(transfer, now)
        self.set_arrival(transfer.message, now + self._delay_s(sender, receiver))

    def _end_send(self, transfer: Transfer, now: float) -> None:
        transfer.is_sent = True
        transfer.message.sent_at = now
        self.end_send(transfer.message)
