"""What a simulation consists of: links, faults, machines, tasks and messages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch

from gcnzc.exchange.agreement import mismatch
from gcnzc.exchange.collectives import as_bytes
from gcnzc.exchange.engine import Ledger, Task
from gcnzc.exchange.errors import WorkerLost
from gcnzc.exchange.requests import Algorithm, Receive, Request, Send, require

NEVER = float("inf")


@dataclass(frozen=True)
class Link:
    """The network link of a rank, or from one rank to another.

    Raises:
        ValueError: a bandwidth is not above 0, or another number is negative or not finite.
    """

    bytes_per_s: float = float("inf")
    """bandwidth of outgoing messages, in bytes per second"""
    delay_s: float = 0.0
    """latency in seconds, from the departure of the last byte to its arrival"""
    message_s: float = 0.0
    """overhead of the sender per message in seconds; only of the link of a rank"""
    in_bytes_per_s: float = float("inf")
    """bandwidth of incoming messages, in bytes per second. They are received one after the other in
    the order in which their first bytes arrive; only of the link of a rank"""

    def __post_init__(self) -> None:
        """Check the bandwidths and times; raises ValueError."""
        has_rates = self.bytes_per_s > 0 and self.in_bytes_per_s > 0
        if not has_rates or not all(0 <= each < NEVER for each in (self.delay_s, self.message_s)):
            raise ValueError(f"{self}: bandwidths must be above 0, and times finite and at least 0")


@dataclass(frozen=True)
class Crash:
    """A rank ends without a message; its connections break, so that its peers raise `WorkerLost`.

    Messages that have not left it are lost.

    Raises:
        ValueError: the time is negative or NaN.
    """

    at_s: float
    """virtual time in seconds"""

    def __post_init__(self) -> None:
        if not self.at_s >= 0:
            raise ValueError(f"{self}: the time must be at least 0")


@dataclass(frozen=True)
class SlowDown:
    """A rank computes more slowly for some time.

    Raises:
        ValueError: the factor is below 1 or NaN; a time is negative or NaN; or a pause has no end.
    """

    at_s: float
    """virtual time of the beginning, in seconds"""
    factor: float
    """by which a `Compute` takes longer, at least 1; infinite to pause the rank, which then neither
    computes nor starts requests. Messages that it has sent continue"""
    seconds: float = float("inf")
    """duration in seconds; finite for an infinite factor"""

    def __post_init__(self) -> None:
        if not (self.at_s >= 0 and self.seconds >= 0 and self.factor >= 1):
            raise ValueError(f"{self}: times must be at least 0, and the factor at least 1")
        if self.factor == self.seconds == NEVER:
            raise ValueError(f"{self}: a pause needs an end; a Crash has none")


Fault: TypeAlias = Crash | SlowDown


class SimulatedNetwork:
    """The links of all ranks, and until when they are occupied.

    Args:
        world_size: W, the number of ranks.
        link: the link of each rank, or a sequence of W links; None has no limits.
        links: by (sender, receiver), links that limit their messages in addition.

    Raises:
        ValueError: the number of links is not W, or a pair has a rank that does not exist.
    """

    def __init__(
        self,
        world_size: int,
        link: Link | Sequence[Link] | None = None,
        links: Mapping[tuple[int, int], Link] | None = None,
    ) -> None:
        one = Link() if link is None else link
        self.of_rank = [one] * world_size if isinstance(one, Link) else list(one)
        what = f"{len(self.of_rank)} links for {world_size} ranks"
        require(len(self.of_rank) == world_size, what)
        self.of_pair = dict(links or {})
        for pair in self.of_pair:
            what = f"links has the pair {pair!r}, but there are {world_size} ranks"
            require(all(rank in range(world_size) for rank in pair), what)
        self.has_receiver_limit = any(each.in_bytes_per_s < NEVER for each in self.of_rank)
        self.simulation: Any = None  # that uses this network
        # when the outgoing link of a rank, of a pair, and the incoming one of a rank, are free
        self.sent_at = [0.0] * world_size
        self.pair_sent_at = dict.fromkeys(self.of_pair, 0.0)
        self.received_at = [0.0] * world_size

    def open(self, message: "SentMessage", now: float) -> None:
        """Start a message, whose receive may have started before."""

    def match(self, message: "SentMessage", now: float) -> None:
        """Note that the receive of a message has started, after the message."""

    def send(
        self, sender: int, receiver: int, num_bytes: int, now: float
    ) -> tuple[float, float, float]:
        """Occupy the outgoing links for a message.

        Returns:
            Three times in seconds: when the last byte has left the sender, when the first byte
            arrives, and when the last one arrives if the receiver has no limit. They are infinite
            if a subclass does not know them yet, which then calls `end_send` and
            `set_arrival` of the simulation.
        """
        link = self.of_rank[sender]
        free = self.sent_at[sender]
        begin = (now if now > free else free) + link.message_s
        sent = self.sent_at[sender] = begin + num_bytes / link.bytes_per_s
        pair_link = self.of_pair.get((sender, receiver)) if self.of_pair else None
        if pair_link is None:
            return sent, begin + link.delay_s, sent + link.delay_s
        pair = sender, receiver
        pair_sent = max(begin, self.pair_sent_at[pair]) + num_bytes / pair_link.bytes_per_s
        self.pair_sent_at[pair] = pair_sent
        delay_s = link.delay_s + pair_link.delay_s
        return sent, begin + delay_s, max(sent, pair_sent) + delay_s

    def receive(self, receiver: int, num_bytes: int, first: float, last: float) -> float:
        """Occupy the incoming link for a message, and return when its last byte has arrived.

        Call it in the order of `first`, the arrival of the first byte.

        Args:
            receiver: the rank.
            num_bytes: of the message.
            first, last: when its first and last byte arrive at the link.
        """
        begin = max(first, self.received_at[receiver])
        end = max(last, begin + num_bytes / self.of_rank[receiver].in_bytes_per_s)
        self.received_at[receiver] = end
        return end


class Machine:
    """The speed of one rank over time.

    Args:
        faults: its crash, if any, and its slow-downs, which do not overlap.

    Raises:
        ValueError: slow-downs overlap.
    """

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        crashes = [each.at_s for each in faults if isinstance(each, Crash)]
        self.crashes_at = min(crashes, default=NEVER)
        slow = sorted(
            (each.at_s, each.at_s + each.seconds, each.factor)
            for each in faults
            if isinstance(each, SlowDown)
        )
        self.slow_downs = slow
        for (_, end, _), (begin, _, _) in pairwise(slow):
            what = f"a slow-down begins at {begin:g} s, before the previous one ends at {end:g} s"
            require(begin >= end, what)

    def resume_at(self, now: float) -> float:
        """Return when the rank runs if it could continue at `now`: after a pause."""
        for begin, end, factor in self.slow_downs:
            if factor == NEVER and begin <= now < end:
                return end
        return now

    def end_of(self, now: float, seconds: float) -> float:
        """Return when a computation that takes `seconds` at full speed ends."""
        for begin, end, factor in self.slow_downs:
            if now >= end:
                continue
            if now + seconds <= begin:
                break
            if now < begin:
                seconds -= begin - now
                now = begin
            if seconds * factor <= end - now:
                return now + seconds * factor
            seconds -= (end - now) / factor
            now = end
        return now + seconds


@dataclass
class Outcome:
    """The result of `lockstep`; lists are in the order of ranks."""

    results: list[Any]
    """return values of the algorithms; None for a rank that failed"""
    seconds: list[float]
    """the end of each algorithm, by the virtual clock"""
    exchange_s: list[float]
    """the time of each algorithm without `Compute`, in seconds"""
    ledgers: list[Ledger]
    """counters of the messages that each rank sent"""
    errors: list[WorkerLost | None]
    """the error with which each rank ended, or None; of a rank that crashed, that it crashed"""


class SimulatedTask(Task):
    """A task of one rank in a simulation, and the handle of a started one."""

    __slots__ = (
        "computed_s", "is_abandoned", "is_done", "now", "num_waits", "rank", "waiting", "waits_for",
    )  # fmt: skip

    request, is_on_channel = None, True

    def __init__(
        self,
        rank: int,
        now: float,
        algorithm: Algorithm[Any],
        channel: str | None = None,
        caller: str = "",
    ) -> None:
        super().__init__(algorithm, channel, caller)
        self.rank, self.now = rank, now
        self.computed_s = 0.0  # virtual time of its `Compute` requests so far
        self.waits_for: Any = None  # a message, receive, task or request, if any
        self.num_waits = 0  # waits that have ended
        self.is_done = self.is_abandoned = False
        # called with the time when this task has ended
        self.waiting: list[Callable[[float], None]] = []

    @property
    def ends_at(self) -> float:
        """When its `Wait` ends."""
        return self.now if self.is_done else NEVER

    def describe_wait(self) -> str:
        """Describe what the task waits for, for error messages."""
        pending = self.waits_for
        if isinstance(pending, Request):
            return f"rank {self.rank} waits for {pending.describe()}"
        what, channel = "a request that it started", None
        if pending is not None:
            # a receive has the channel of its task
            channel = getattr(pending, "channel", self.channel)
            what = what if pending.request is None else pending.request.describe()
        within = f" in {self.kind}" if self.kind else ""
        within += f" on channel {channel}" if channel else ""
        return f"rank {self.rank} waits for {what}{within}"


@dataclass(eq=False, slots=True)
class SentMessage:
    """A message that has been sent, and the answer of its `Start`."""

    request: Send
    sender: int
    channel: str | None
    copy: Any  # the bytes of the values at the start; None without elements
    sent_at: float
    arrives_at: float = NEVER
    matched_at: float = NEVER  # when both the message and its receive had started
    # the matching receive until the message arrives, then None: a cycle of references would delay
    # the release of their memory
    receive: "StartedReceive | None" = None
    task: SimulatedTask | None = None  # that waits until it is sent

    @property
    def peer(self) -> int:
        """The rank that receives it."""
        return self.request.peer

    @property
    def num_bytes(self) -> int:
        """The bytes of the values."""
        return self.request.values.nbytes

    @property
    def ends_at(self) -> float:
        """When its `Wait` ends, as over gloo: it is sent, and its peer has started to receive."""
        return max(self.sent_at, self.matched_at)

    def is_waiting(self, peer: int, at: float) -> bool:
        """Whether it has not ended, and waits for a rank."""
        return self.peer == peer

    def take(self) -> None:
        """Check that the values have not changed while they were sent; the answer of `Wait`."""
        if self.copy is not None and not torch.equal(as_bytes(self.request.values), self.copy):
            raise RuntimeError(
                f"rank {self.sender} changed a tensor while it was being sent\n\n"
                "hint: do not write to a tensor between Start and Wait"
            )


@dataclass(eq=False, slots=True)
class StartedReceive:
    """A receive that has started, and the answer of its `Start`."""

    request: Receive
    rank: int
    message: SentMessage | None = None
    task: SimulatedTask | None = None  # that waits for the message

    @property
    def peer(self) -> int:
        """The rank that sends the message."""
        return self.request.peer

    @property
    def ends_at(self) -> float:
        """When its `Wait` ends: the message arrives."""
        return NEVER if self.message is None else self.message.arrives_at

    def is_waiting(self, peer: int, at: float) -> bool:
        """Whether it waits for a rank, and its message has not left that rank at a time."""
        message = self.message
        return self.peer == peer and (message is None or message.sent_at > at)

    def take(self) -> Any:
        """Write the values of the message, which has arrived, and return them."""
        message, values = self.message, self.request.values
        assert message is not None, "it has arrived"
        if values.nbytes != message.num_bytes:
            raise mismatch(
                f"rank {self.rank} expects {values.nbytes} bytes from rank {message.sender}, which "
                f"sends {message.num_bytes}"
            )
        if message.copy is not None:
            as_bytes(values).copy_(message.copy)
        return values
