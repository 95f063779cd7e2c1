"""Simulated TCP connections, which share the links of their ranks.

A message starts when both its send and its receive have started, as over gloo. The messages of a
connection follow each other. The rates of all active messages are max-min fair: the rate of none
can increase without a decrease of one that is not faster. They change when a message starts or
ends. A send ends before its bytes have left, as with the send buffers of TCP, so the next send of
the rank may share its link with the rest of this one.

Notation: W ranks.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import TypeAlias

from gcnzc.exchange.simulated_network import SimulatedNetwork
from gcnzc.exchange.simulated_tasks import NEVER, SentMessage

Resource: TypeAlias = tuple[str, int, int]
"""an outgoing link, an incoming link or the link of a pair, and its ranks"""

Connection: TypeAlias = tuple[int, int, str | None]
"""sender, receiver and channel"""

# bytes that are left of a message, at most, because of rounding
_TINY = 1e-6
# relative difference of rates that are equal except for rounding
_ROUNDING = 1e-9


class Transfer:
    """A message that is being sent.

    Args:
        message: the message.
        resources: the links that limit its rate.
    """

    __slots__ = ("at", "connection", "is_sent", "left", "message", "rate", "resources", "version")

    def __init__(self, message: SentMessage, resources: list[Resource]) -> None:
        self.message, self.resources = message, resources
        self.connection: Connection = message.connection
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


class SharedNetwork:
    """The messages that are being sent over links with `Link.is_shared`.

    Args:
        network: the links.
        schedule: calls a function at a time.
        send: called with a message when it is in the send buffer or has left.
        arrive: called with a message and the time of its arrival.
    """

    def __init__(
        self,
        network: SimulatedNetwork,
        schedule: Callable[[float, Callable[[float], None]], None],
        send: Callable[[SentMessage], None],
        arrive: Callable[[SentMessage, float], None],
    ) -> None:
        self.network, self.schedule = network, schedule
        self.send, self.arrive = send, arrive
        # when a sender has started its last message
        self.started_at = [0.0] * len(network.of_rank)
        self.connections: defaultdict[Connection, deque[Transfer]] = defaultdict(deque)
        # active messages, in the order of their starts
        self.active: defaultdict[Resource, dict[Transfer, None]] = defaultdict(dict)
        # active messages whose rates are not known yet, and links whose share has changed
        self.changed: dict[Transfer, None] = {}
        self.freed: dict[Resource, None] = {}
        self.shares_at = -1.0

    def open(self, message: SentMessage, connection: Connection, now: float) -> None:
        """Set the connection of a message, and start it if its receive has started."""
        message.connection = connection
        if message.matched_at < NEVER:
            self.start(message, now, is_late=False)

    def start(self, message: SentMessage, now: float, *, is_late: bool) -> None:
        """Start a message whose send and receive have started.

        Args:
            message: the message.
            now: when the later of the two started.
            is_late: whether this is the receive, so that the sender has to be notified first.
        """
        sender, receiver, _ = message.connection
        link = self.network.of_rank[sender]
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
        if self.network.of_rank[sender].bytes_per_s < NEVER:
            found.append(("out", sender, sender))
        if self.network.of_rank[receiver].in_bytes_per_s < NEVER:
            found.append(("in", receiver, receiver))
        if (sender, receiver) in self.network.of_pair:
            found.append(("pair", sender, receiver))
        return found

    def _bytes_per_s(self, resource: Resource) -> float:
        kind, first, second = resource
        if kind == "pair":
            return self.network.of_pair[first, second].bytes_per_s
        link = self.network.of_rank[first]
        return link.bytes_per_s if kind == "out" else link.in_bytes_per_s

    def _delay_s(self, sender: int, receiver: int) -> float:
        pair = self.network.of_pair.get((sender, receiver))
        return self.network.of_rank[sender].delay_s + (pair.delay_s if pair else 0.0)

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
        return self.network.of_rank[transfer.connection[0]].buffer_bytes

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
        self.arrive(transfer.message, now + self._delay_s(sender, receiver))

    def _end_send(self, transfer: Transfer, now: float) -> None:
        transfer.is_sent = True
        transfer.message.sent_at = now
        self.send(transfer.message)
