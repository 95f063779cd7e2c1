"""What a simulation consists of: links, faults, machines, tasks, messages and sizes of values."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from gcnzc.exchange.agreement import mismatch
from gcnzc.exchange.collectives import as_bytes
from gcnzc.exchange.engine import Task
from gcnzc.exchange.errors import WorkerLost
from gcnzc.exchange.request_log import Ledger
from gcnzc.exchange.requests import Algorithm, Receive, ReceiveAny, Send, require

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

_NO_LIMITS = Link()


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
        one = _NO_LIMITS if link is None else link
        self.of_rank = [one] * world_size if isinstance(one, Link) else list(one)
        require(
            len(self.of_rank) == world_size,
            f"{len(self.of_rank)} links for {world_size} ranks",
            "give one link for all ranks, or one for each",
        )
        self.of_pair = dict(links or {})
        for pair in self.of_pair:
            require(
                all(rank in range(world_size) for rank in pair),
                f"links has the pair {pair!r}, but there are {world_size} ranks",
                f"give pairs (sender, receiver) of ranks from 0 to {world_size - 1}",
            )
        self.has_receiver_limit = any(each.in_bytes_per_s != float("inf") for each in self.of_rank)
        # when the outgoing link of a rank, of a pair, and the incoming one of a rank, are free
        self.sent_at = [0.0] * world_size
        self.pair_sent_at = dict.fromkeys(self.of_pair, 0.0)
        self.received_at = [0.0] * world_size

    def connect(
        self,
        schedule: Callable[[float, Callable[[float], None]], None],
        end_send: Callable[["SentMessage"], None],
        set_arrival: Callable[["SentMessage", float], None],
    ) -> None:
        """Prepare for a simulation: with functions that call one at a time, and end a message."""

    def open(self, message: "SentMessage", now: float) -> None:
        """Start a message, whose receive may have started before."""

    def match(self, message: "SentMessage", now: float) -> None:
        """Note that the receive of a message has started, after the message."""

    def crash(self, rank: int) -> None:
        """End the messages of a rank that have not left it."""

    def send(
        self, sender: int, receiver: int, num_bytes: int, now: float
    ) -> tuple[float, float, float]:
        """Occupy the outgoing links for a message.

        Returns:
            Three times in seconds: when the last byte has left the sender, when the first byte
            arrives, and when the last one arrives if the receiver has no limit. They are infinite
            if a subclass does not know them yet, which then calls `end_send` and `set_arrival`.
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
        self.crashes_at = min(
            (each.at_s for each in faults if isinstance(each, Crash)), default=float("inf")
        )
        slow = sorted(
            (each for each in faults if isinstance(each, SlowDown)), key=lambda each: each.at_s
        )
        self.slow_downs = [(each.at_s, each.at_s + each.seconds, each.factor) for each in slow]
        for (_, end, _), (begin, _, _) in zip(self.slow_downs, self.slow_downs[1:], strict=False):
            what = f"a slow-down begins at {begin:g} s, before the previous one ends at {end:g} s"
            require(begin >= end, what, "slow-downs of a rank must not overlap")

    def resume_at(self, now: float) -> float:
        """Return when the rank runs if it could continue at `now`: after a pause."""
        for begin, end, factor in self.slow_downs:
            if factor == float("inf") and begin <= now < end:
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


class SizeOnly:
    """The shape and dtype of a contiguous tensor, without its elements.

    Pass it as the values of requests to `lockstep`: messages have the size of the tensor, and
    nothing is copied or added. It has the methods of a tensor that collectives use; results have
    the shapes that a tensor would have. Do not use it over processes.

    Args:
        shape: the shape; a number for a vector.
        dtype: the dtype.
    """

    __slots__ = ("_numel", "dtype", "nbytes", "shape")

    def __init__(self, shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        self.shape: tuple[int, ...] = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype, self._numel = dtype, math.prod(self.shape)
        self.nbytes = self._numel * dtype.itemsize

    def __repr__(self) -> str:
        return f"SizeOnly({self.shape}, {self.dtype})"

    def numel(self) -> int:
        """Return the number of elements."""
        return self._numel

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator["SizeOnly"]:
        return (self[row] for row in range(len(self)))

    def __getitem__(self, key: Any) -> "SizeOnly":
        if isinstance(key, slice):
            count = len(range(*key.indices(self.shape[0])))
            return self if count == self.shape[0] else self.new_empty(count, *self.shape[1:])
        return self.new_empty(*self.shape[1:])

    def __setitem__(self, key: Any, values: Any) -> None:
        pass

    def view(self, *shape: Any) -> "SizeOnly":
        """Return a view of another shape, in which one size may be -1, or of another dtype."""
        if len(shape) == 1 and isinstance(shape[0], torch.dtype):
            last = self.shape[-1] * self.dtype.itemsize // shape[0].itemsize
            return SizeOnly((*self.shape[:-1], last), shape[0])
        if len(shape) == 1 and isinstance(shape[0], Sequence):
            shape = tuple(shape[0])
        if -1 in shape:
            known = -math.prod(shape)
            shape = tuple(self._numel // max(known, 1) if size == -1 else size for size in shape)
        return self.new_empty(*shape)

    def tensor_split(self, parts: int) -> list["SizeOnly"]:
        """Return parts whose numbers of rows differ by at most 1."""
        rows, larger = divmod(len(self), parts)
        both = self.new_empty(rows + 1, *self.shape[1:]), self.new_empty(rows, *self.shape[1:])
        return [both[part >= larger] for part in range(parts)]

    def is_contiguous(self) -> bool:
        """Return True."""
        return True

    def _itself(self, *_: Any) -> "SizeOnly":
        return self

    # these change elements, or where they are
    __iadd__ = contiguous = clone = copy_ = div_ = roll = _itself

    def new_empty(self, *shape: int) -> "SizeOnly":
        """Return a payload of another shape and the same dtype."""
        return SizeOnly(shape, self.dtype)


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
        "computed_s", "is_abandoned", "is_done", "now", "rank", "waiting", "waits_for",
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
        self.computed_s = 0.0
        """the virtual time of its `Compute` requests so far"""
        self.waits_for: Any = None
        """the message, receive, task or `TimedWait` that the task waits for, if any"""
        self.is_done = self.is_abandoned = False
        self.waiting: list[Any] = []
        """the tasks and `TimedWait`s that wait for this one"""

    def describe_wait(self) -> str:
        """Describe what the task waits for, for error messages."""
        pending, within = self.waits_for, ""
        what = "a request that it started"
        if pending is not None and pending.request is not None:
            what = pending.request.describe()
        if not isinstance(pending, TimedWait):
            within = f" in {self.kind}" if self.kind else ""
            # a receive has the channel of its task
            channel = getattr(pending, "channel", self.channel)
            within += f" on channel {channel}" if channel and pending is not None else ""
        return f"rank {self.rank} waits for {what}{within}"


class TimedWait:
    """A wait of a task for one of several events, such as a message or the end of a limit."""

    __slots__ = ("is_over", "queues", "request", "task")

    def __init__(self, task: SimulatedTask, request: Any) -> None:
        self.task, self.request, self.is_over = task, request, False
        self.queues: list[list[Any]] = []
        """the lists of waits for the events"""

    def enter(self, queues: list[list[Any]]) -> None:
        """Add the wait to lists."""
        self.queues = queues
        for queue in queues:
            queue.append(self)

    def end(self) -> bool:
        """End the wait; return whether it was pending, and its rank has not crashed."""
        if self.is_over or self.task.is_done:
            return False
        self.is_over = True
        for queue in self.queues:
            if self in queue:
                queue.remove(self)
        return True


class SentMessage:
    """A message that has been sent, and the answer of its `Start`."""

    __slots__ = (
        "arrives_at", "channel", "copy", "matched_at", "num_bytes", "number", "peer",
        "receive", "request", "sender", "sent_at", "task",
    )  # fmt: skip

    def __init__(
        self, request: Send, sender: int, number: int, copy: Any, num_bytes: int, sent_at: float,
        channel: str | None,
    ) -> None:  # fmt: skip
        self.request, self.num_bytes, self.sent_at = request, num_bytes, sent_at
        self.channel = channel
        self.sender, self.peer = sender, request.peer
        self.number = number
        """the number of the message among all messages of the simulation, by their starts"""
        self.copy = copy
        """the bytes of the values at the start, which also show changes; None for `SizeOnly`"""
        self.arrives_at = NEVER
        self.matched_at = NEVER
        """when both the message and its receive had started"""
        self.receive: StartedReceive | None = None
        """the matching receive until the message arrives, then None: a cycle of references would
        delay the release of their memory"""
        self.task: SimulatedTask | None = None
        """the task that waits until it is sent"""

    @property
    def ends_at(self) -> float:
        """When its `Wait` ends, as over gloo: it is sent, and its peer has started to receive."""
        return max(self.sent_at, self.matched_at)

    def is_waiting(self, peer: int, at: float) -> bool:
        """Whether it has not ended, and waits for a rank."""
        return self.peer == peer

    def check_unchanged(self) -> None:
        """Check that the values have not changed while they were sent."""
        if self.copy is not None and not torch.equal(as_bytes(self.request.values), self.copy):
            raise RuntimeError(
                f"rank {self.sender} changed a tensor while it was being sent\n\n"
                "hint: do not write to a tensor between Start and Wait"
            )


class StartedReceive:
    """A receive that has started, and the answer of its `Start`."""

    __slots__ = ("message", "peer", "request", "task")

    def __init__(self, request: Receive | ReceiveAny, peer: int | None) -> None:
        self.request = request
        self.peer = peer
        """the rank that sends the message; None until it is known"""
        self.message: SentMessage | None = None
        self.task: SimulatedTask | None = None
        """the task that waits for the message"""

    def is_waiting(self, peer: int, at: float) -> bool:
        """Whether it waits for a rank, and its message has not left that rank at a time."""
        message = self.message
        return self.peer == peer and (message is None or message.sent_at > at)

    def take(self, rank: int) -> Any:
        """Write the values of the message, which has arrived, and return the answer."""
        message = self.message
        assert message is not None, "it has arrived"
        values = self.request.values
        if values.nbytes != message.num_bytes:
            raise mismatch(
                f"rank {rank} expects {values.nbytes} bytes from rank {message.sender}, which "
                f"sends {message.num_bytes}"
            )
        if message.copy is not None:
            as_bytes(values).copy_(message.copy)
        return (values, message.sender) if type(self.request) is ReceiveAny else values


def invalid_like(values: Any) -> Any:
    """Return scratch memory for values like these, which shows if it is read before it is written.

    All its bits are set, which are NaN in float16, bfloat16, float32 and float64.
    """
    if isinstance(values, SizeOnly):
        return values
    scratch = torch.empty_like(values)
    as_bytes(scratch).fill_(0xFF)
    return scratch


class Mailbox:
    """The messages from one rank to another that have no receive, or receives without a message."""

    __slots__ = ("messages", "receives")

    def __init__(self) -> None:
        self.messages: deque[SentMessage] = deque()
        self.receives: deque[StartedReceive] = deque()
