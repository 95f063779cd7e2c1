"""The engine: executes the requests of a rank's algorithms, over processes or in a simulation.

An engine runs tasks: the algorithm of its rank, and what that has started on channels. It knows
the requests; a subclass is the backend that executes them. Over processes
(`gcnzc.exchange.process_group`) a handler returns when its request has ended, and tasks on channels
run in threads. In a simulation (`gcnzc.exchange.simulation`) a task that has to wait returns to the
scheduler, and continues at a later virtual time.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Any

import torch

from gcnzc.exchange.collectives import Collective
from gcnzc.exchange.errors import WorkerLost
from gcnzc.exchange.request_log import Ledger, RequestLog
from gcnzc.exchange.requests import (
    DEFAULT_CHANNEL,
    Abandon,
    Algorithm,
    Caller,
    CompareAndSet,
    Compute,
    DeleteKeys,
    First,
    Message,
    Now,
    ReadKeys,
    Receive,
    ReceiveAny,
    Request,
    Scratch,
    Send,
    Start,
    StoreRequest,
    Wait,
    WaitForKey,
    check_kind,
    require,
)

# what a `Start` starts
STARTED = Collective | Message | Generator


class Task:
    """An algorithm that an engine runs: that of its rank, or one on a channel."""

    __slots__ = ("algorithm", "answer", "caller", "channel", "error", "kind", "outer")

    def __init__(
        self, algorithm: Algorithm[Any], channel: str | None = None, caller: str = ""
    ) -> None:
        self.algorithm = algorithm
        self.channel = channel
        """None for the algorithm of a rank"""
        self.caller = caller
        """the name that the algorithm has set by `Caller`"""
        self.kind = ""
        """the kind of collective whose messages the algorithm sends; empty for none"""
        self.outer: list[tuple[Algorithm[Any], str]] = []
        """the algorithms that wait for the return value of the one that runs, and their kinds"""
        self.answer: Any = None
        """the answer with which the task continues; of a task that has ended, its result"""
        self.error: WorkerLost | None = None
        """raised in the algorithm when the task continues; of one that has ended, its error"""


class Engine(ABC):
    """Executes the requests of one rank.

    A handler executes a request. It returns whether the task has its answer and continues at once.

    Args:
        rank: this rank.
        world_size: the number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.ledger, self.log = Ledger(), RequestLog()
        # other requests are collectives
        self.handlers: dict[type, Callable[[Any, Any], bool]] = {
            Caller: self.set_caller,
            Compute: self.compute,
            Now: self.read_clock,
            Scratch: self.allocate,
            Start: self.start,
            Wait: self.wait,
            First: self.wait_for_first,
            Abandon: self.abandon,
            **dict.fromkeys((Send, Receive, ReceiveAny), self.run_message),
            **dict.fromkeys((CompareAndSet, ReadKeys, DeleteKeys, WaitForKey), self.ask_store),
        }

    def advance(self, task: Any) -> None:
        """Run a task until it has to wait, or has ended.

        `WorkerLost` is raised in the algorithm. If that does not handle it, the task ends with it.
        """
        handlers = self.handlers
        while True:
            try:
                if task.error is None:
                    request = task.algorithm.send(task.answer)
                else:
                    lost, task.error = task.error, None
                    request = task.algorithm.throw(lost)
            except StopIteration as stop:
                task.answer = stop.value
            except WorkerLost as error:
                task.answer, task.error = None, error
                self.end_collective(task, error)
            else:
                task.answer = lost = None
                try:
                    if handlers.get(type(request), self.run_collective)(task, request):
                        continue
                except WorkerLost as error:
                    task.error = error
                    continue
                return
            if not task.outer:
                self.end(task)
                return
            task.algorithm, task.kind = task.outer.pop()

    def end_collective(self, task: Any, error: WorkerLost) -> None:
        """React to the end of the algorithm that runs with an error."""
        return

    def end(self, task: Any) -> None:
        """React to the end of a task."""
        return

    # requests; a simulation has its own time and memory

    def set_caller(self, task: Task, request: Caller) -> bool:
        """Execute a `Caller`."""
        task.answer, task.caller = task.caller, request.name
        return True

    def compute(self, task: Any, request: Compute) -> bool:
        """Execute a `Compute`."""
        request.sleep()
        return True

    def read_clock(self, task: Any, request: Now) -> bool:
        """Execute a `Now`."""
        task.answer = time.monotonic()
        return True

    def allocate(self, task: Any, request: Scratch) -> bool:
        """Execute a `Scratch`."""
        task.answer = torch.empty_like(request.values)
        return True

    def run_message(self, task: Task, message: Message) -> bool:
        """Execute a message."""
        pending = self.start_message(task, message, task.channel, message)
        return self.wait_for(task, pending, message)

    def wait(self, task: Task, request: Wait) -> bool:
        """Execute a `Wait`."""
        return self.wait_for(task, request.pending, request)

    def start(self, task: Task, request: Start) -> bool:
        """Execute a `Start`."""
        started, channel = request.request, request.channel
        check_kind(started, STARTED, "the start of")
        if isinstance(started, Message) and not channel:
            task.answer = self.start_message(task, started, task.channel, request)
            return True
        channel = channel or DEFAULT_CHANNEL
        self.open_channel(task, channel, request)
        if isinstance(started, Generator):
            started = only_in_background(started)
        if type(started) is Send:
            task.answer = self.start_message(task, started, channel, request)
        else:
            task.answer = self.start_task(task, started, channel, request)
        return True

    def wait_for_first(self, task: Task, request: First) -> bool:
        """Execute a `First`."""
        seconds = request.seconds
        is_limit = seconds is None or seconds >= 0
        require(is_limit, f"{request.describe()} for {seconds} s", "give at least 0 s, or None")
        self.check_channels(request, request.pending)
        return self.wait_for_any(task, request)

    def abandon(self, task: Task, request: Abandon) -> bool:
        """Execute an `Abandon`."""
        self.check_channels(request, [request.pending])
        request.pending.is_abandoned = True
        return True

    def check_channels(self, request: First | Abandon, pending: Any) -> None:
        """Check that there are started requests, and that all are on channels.

        Raises:
            ValueError: there are none, or one has no channel.
        """
        require(
            pending and all(getattr(each, "is_on_channel", False) for each in pending),
            f"{request.describe()}: {'a request has no channel' if pending else 'none is given'}",
            'start receives with the name of a channel, as Start(Receive(...), "mail")',
        )

    def ask_store(self, task: Task, request: StoreRequest) -> bool:
        """Execute a request to the store, and count it and the values that it sends."""
        request.check()
        name, values = type(request).__name__, request.sent_values()
        self.ledger.count(name)
        if self.world_size > 1 and values:
            self.ledger.add(name, sum(map(len, values)))
        return self.use_store(task, request)

    # what a backend implements

    @abstractmethod
    def run_collective(self, task: Any, request: Any) -> bool:
        """Execute a collective."""

    @abstractmethod
    def start_message(self, task: Any, message: Any, channel: str | None, request: Request) -> Any:
        """Start a message, and return its handle.

        Args:
            task: the task.
            message: the message.
            channel: its channel; None for none.
            request: the message or its `Start`, for error messages.
        """

    @abstractmethod
    def open_channel(self, task: Any, channel: str, request: Start) -> None:
        """Open a channel together with the other ranks, unless it is open."""

    @abstractmethod
    def start_task(self, task: Any, started: Any, channel: str, request: Start) -> Any:
        """Start a collective, a receive or an algorithm on a channel, and return its handle."""

    @abstractmethod
    def wait_for(self, task: Any, pending: Any, request: Request) -> bool:
        """Wait for the end of a started request, for `request`."""

    @abstractmethod
    def wait_for_any(self, task: Any, request: First) -> bool:
        """Wait for one of several tasks on channels."""

    @abstractmethod
    def use_store(self, task: Any, request: Any) -> bool:
        """Execute a request to the store."""


def only_in_background(algorithm: Algorithm[Any]) -> Algorithm[Any]:
    """Check each request of a started algorithm, and return its result."""
    answer: Any = None
    lost: WorkerLost | None = None
    while True:
        try:
            request = algorithm.send(answer) if lost is None else algorithm.throw(lost)
        except StopIteration as stop:
            return stop.value
        check_kind(request, Collective | Scratch | Compute, "a started algorithm yields")
        try:
            answer, lost = (yield request), None
        except WorkerLost as error:
            lost = error
