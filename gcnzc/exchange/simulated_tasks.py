"""The state of simulated ranks: their tasks, messages and receives, and their results."""

from collections import deque
from dataclasses import dataclass
from typing import Any

from gcnzc.exchange.errors import WorkerLost
from gcnzc.exchange.ledger import Ledger
from gcnzc.exchange.requests import Algorithm, Receive, Send

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
        "algorithm", "answer", "caller", "channel", "computed_s", "error", "is_done", "kind", "now",
        "rank", "stack", "waiting", "waits_for",
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
        """of the collective that it executes"""
        self.caller = ""
        self.computed_s = 0.0
        self.answer: Any = None
        self.error: Exception | None = None
        """raised in the algorithm when the task runs next; of a task that has ended, its error"""
        self.waits_for: Any = None
        self.is_done = False
        self.waiting: list[Task] = []
        """tasks that wait for this one"""


class SentMessage:
    """A message that has been sent, and the answer of its `Start`."""

    __slots__ = (
        "arrives_at", "copy", "matched_at", "num_bytes", "receive", "request", "sent_at", "waiter",
    )  # fmt: skip

    def __init__(self, request: Send, copy: Any, num_bytes: int, sent_at: float) -> None:
        self.request, self.num_bytes, self.sent_at = request, num_bytes, sent_at
        self.copy = copy
        """bytes of the values, also to detect that they changed; None without elements"""
        self.arrives_at = NEVER
        self.matched_at = NEVER
        """when both the message and its receive had started"""
        self.receive: StartedReceive | None = None
        """until the message arrives, so that the two do not refer to each other for longer"""
        self.waiter: Task | None = None
        """the task that waits until it is sent"""


class StartedReceive:
    """A receive that has started, and the answer of its `Start`."""

    __slots__ = ("message", "request", "waiter")

    def __init__(self, request: Receive) -> None:
        self.request = request
        self.message: SentMessage | None = None
        self.waiter: Task | None = None


class Mailbox:
    """The messages from one rank to another that have no receive, or receives without a message."""

    __slots__ = ("messages", "receives")

    def __init__(self) -> None:
        self.messages: deque[SentMessage] = deque()
        self.receives: deque[StartedReceive] = deque()
