"""The state of simulated ranks: their tasks, messages and receives, and their results."""

from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from gcnzc.exchange.agreement import mismatch
from gcnzc.exchange.collectives.messages import as_bytes
from gcnzc.exchange.errors import WorkerLost
from gcnzc.exchange.ledger import Ledger
from gcnzc.exchange.requests import Algorithm, First, Receive, ReceiveAny, Send, Wait
from gcnzc.exchange.size_only import SizeOnly
from gcnzc.exchange.store_requests import WaitForKey

NEVER = float("inf")


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


class Task:
    """The algorithm of a rank, or a request that it has started."""

    __slots__ = (
        "algorithm", "answer", "caller", "channel", "computed_s", "error", "is_abandoned",
        "is_done", "kind", "now", "rank", "sequence", "stack", "waiting", "waits_for",
    )  # fmt: skip

    def __init__(
        self, rank: int, channel: str | None, algorithm: Algorithm[Any], now: float
    ) -> None:
        self.rank, self.now = rank, now
        self.channel = channel
        """None for the algorithm of a rank"""
        self.algorithm = algorithm
        self.stack: list[Algorithm[Any]] = []
        """the algorithms that wait for the return value of the one that runs"""
        self.kind = ""
        """the kind of collective that the task executes; empty for none"""
        self.sequence = ""
        """the sequence of the `Subgroup` that the task executes; empty for other collectives"""
        self.caller = ""
        """the name that the algorithm has set by `Caller`"""
        self.computed_s = 0.0
        """the virtual time of its `Compute` requests so far"""
        self.answer: Any = None
        """the answer with which the task continues; of a task that has ended, its result"""
        self.error: Exception | None = None
        """raised in the algorithm when the task runs next; of a task that has ended, its error"""
        self.waits_for: Any = None
        """the message, receive, task, `FirstWait` or `KeyWait` that the task waits for, if any"""
        self.is_done = False
        self.is_abandoned = False
        self.waiting: list[Task | FirstWait] = []
        """tasks that wait for this one"""

    def describe_wait(self) -> str:
        """Describe what the task waits for, for error messages."""
        within = f" in {self.kind}" if self.kind else ""
        if self.kind and self.sequence:
            within += f", one of the {self.sequence}"
        pending = self.waits_for
        channel = pending.channel if isinstance(pending, SentMessage | Task) else self.channel
        if channel and isinstance(pending, StartedReceive | SentMessage | Task):
            within += f" on channel {channel}"
        if isinstance(self.waits_for, StartedReceive | SentMessage):
            return f"rank {self.rank} waits for {self.waits_for.request.describe()}{within}"
        if isinstance(self.waits_for, FirstWait | KeyWait):
            return f"rank {self.rank} waits for {self.waits_for.request.describe()}"
        return f"rank {self.rank} waits for a request that it started{within}"


class FirstWait:
    """A task that waits for the first of several others."""

    __slots__ = ("is_over", "request", "task")

    def __init__(self, task: Task, request: First) -> None:
        self.task, self.request = task, request
        self.is_over = False
        task.waits_for = self
        for each in request.pending:
            each.waiting.append(self)

    def end(self, ended: Task | None) -> bool:
        """Answer with the task that has ended, or None; return whether the wait was pending."""
        if self.is_over or self.task.is_done:
            # the rank has crashed
            return False
        self.is_over = True
        pending = self.request.pending
        self.task.answer = None if ended is None else pending.index(ended)
        for each in pending:
            if each is not ended:
                each.waiting.remove(self)
        return True


class KeyWait:
    """A task that waits for a key of the store."""

    __slots__ = ("is_over", "request", "task")

    def __init__(self, task: Task, request: WaitForKey) -> None:
        self.task, self.request, self.is_over = task, request, False


class SentMessage:
    """A message that has been sent, and the answer of its `Start`."""

    __slots__ = (
        "arrives_at", "channel", "connection", "copy", "matched_at", "num_bytes", "number", "peer",
        "receive", "request", "sender", "sent_at", "waiter",
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
        self.connection: tuple[int, int, str | None] = (0, 0, None)
        """sender, receiver and channel, over shared links"""
        self.arrives_at = NEVER
        self.matched_at = NEVER
        """when both the message and its receive had started"""
        self.receive: StartedReceive | None = None
        """the matching receive until the message arrives, then None: a cycle of references would
        delay the release of their memory"""
        self.waiter: Task | None = None
        """the task that waits until it is sent"""

    @property
    def ends_at(self) -> float:
        """When its `Wait` ends, as over gloo: it is sent, and its peer has started to receive."""
        return max(self.sent_at, self.matched_at)

    def check_unchanged(self, rank: int) -> None:
        """Check that the values have not changed while they were sent."""
        if self.copy is not None and not torch.equal(as_bytes(self.request.values), self.copy):
            raise RuntimeError(
                f"rank {rank} changed a tensor while it was being sent\n\n"
                "hint: do not write to a tensor between Start and Wait"
            )


class StartedReceive:
    """A receive that has started, and the answer of its `Start`."""

    __slots__ = ("message", "peer", "request", "waiter")

    def __init__(self, request: Receive | ReceiveAny) -> None:
        self.request = request
        self.peer = None if type(request) is ReceiveAny else request.peer  # type: ignore[union-attr]
        """the rank that sends the message; None until it is known"""
        self.message: SentMessage | None = None
        self.waiter: Task | None = None

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


def run_after(before: Task, algorithm: Algorithm[Any]) -> Algorithm[Any]:
    """Run an algorithm after the previous request of its channel, even if that failed."""
    with suppress(WorkerLost):
        yield Wait(before)
    return (yield from algorithm)
