"""The engine: executes the requests of a rank's algorithms, over processes or in a simulation.

An engine runs tasks: the algorithm of its rank, and what that has started on channels. It knows
the requests, counts and logs them; a subclass is the backend that executes them. Over processes
(`gcnzc.exchange.processes`) a handler returns when its request has ended, and tasks on channels run
in threads. In a simulation (`gcnzc.exchange.simulation`) a task that has to wait returns to the
scheduler, and continues at a later virtual time.
"""

import hashlib
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from gcnzc.exchange.collectives import Collective
from gcnzc.exchange.errors import WorkerLost
from gcnzc.exchange.requests import (
    DEFAULT_CHANNEL,
    Abandon,
    Algorithm,
    Caller,
    CompareAndSet,
    Compute,
    DeleteKeys,
    Exchange,
    First,
    Message,
    Now,
    ReadKeys,
    Receive,
    Request,
    Send,
    Start,
    StoreRequest,
    Wait,
    WaitForKey,
    yield_request,
)

# requests of each sequence whose headers are kept for comparison; those between two checks of
# torch's collectives are fewer
HEADERS_KEPT = 160
# tag of the message that ends a rank's waits; no header has this tag
ABORT_TAG = 2**31 - 1

T = TypeVar("T")
P = ParamSpec("P")
Algorithms = Callable[Concatenate[Any, P], Algorithm[T]]


@dataclass
class Entry:
    """The counters of one kind of request."""

    requests: int = 0
    messages: int = 0
    bytes_sent: int = 0


@dataclass
class Ledger:
    """Counters of one rank, by kind of request; bytes are those of payloads, without headers.

    The threads of channels count too. A request to the store counts the values that the rank sends;
    the answers are sent by the process that hosts the store.
    """

    entries: dict[str, Entry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def add(self, kind: str, num_bytes: int = 0, messages: int = 0, requests: int = 0) -> None:
        """Count requests of a kind, and the messages and bytes that were sent for them."""
        with self._lock:
            entry = self.entries.setdefault(kind, Entry())
            entry.requests += requests
            entry.messages += messages
            entry.bytes_sent += num_bytes

    @property
    def bytes_sent(self) -> int:
        """The bytes sent for all kinds of requests."""
        with self._lock:
            return sum(entry.bytes_sent for entry in self.entries.values())

    @property
    def requests(self) -> int:
        """The number of requests of all kinds."""
        with self._lock:
            return sum(entry.requests for entry in self.entries.values())


# what ranks compare; see `gcnzc.exchange.agreement`


class Header(NamedTuple):
    """The description of a request, which ranks compare."""

    number: int  # of the request in its sequence, from 1
    digest: int  # 32-bit checksum of this header and of all before it in the sequence
    words: str  # kind, dtype, size and caller, which must be the same on all ranks
    sent: dict[str, str]  # by peer, size and dtype sent to it, if they differ between peers
    expected: dict[str, str]  # by peer, size and dtype expected from it


# the predecessor of the first header of a sequence
NO_HEADER = Header(0, 0, "", {}, {})


class Need(NamedTuple):
    """The request of a peer that a rank waits for."""

    peer: int
    sequence: str
    number: int
    is_for_all: bool = False  # the rank waits for this request of all ranks; `peer` is one of them
    # peer, sequence and number of several requests, if one of them is enough
    alternatives: Sequence[tuple[int, str, int]] = ()


class RequestLog:
    """The requests that one rank has made, as sequences that must be the same on all ranks.

    The collectives of a channel are one sequence. The messages from one rank to another are one
    sequence.
    """

    def __init__(self) -> None:
        self.sequences: dict[str, deque[Header]] = {}

    def find(self, sequence: str, number: int) -> Header | None:
        """Return the header of a request; None if it is not made yet or no longer kept."""
        headers = self.sequences.get(sequence)
        if not headers or not headers[0].number <= number <= headers[-1].number:
            return None
        return headers[number - headers[0].number]

    def record(self, sequence: str, request: Exchange | str, caller: str) -> Header:
        """Add a request to a sequence, and return its header.

        Args:
            sequence: the name of the sequence.
            request: the request, or a description of a call that is none.
            caller: the caller; empty for none.
        """
        words, sent, expected = (
            (request, {}, {}) if isinstance(request, str) else request.describe_header()
        )
        if caller:
            words = f"{words} for {caller}"
        headers = self.sequences.get(sequence)
        if headers is None:
            headers = self.sequences[sequence] = deque(maxlen=HEADERS_KEPT)
        before = headers[-1] if headers else NO_HEADER
        digest = zlib.crc32(words.encode(), before.digest)
        header = Header(before.number + 1, digest, words, sent, expected)
        headers.append(header)
        return header


def channel_sequence(channel: str | None) -> str:
    """Return the name of the sequence of a channel's collectives."""
    return f"channel {channel or 'default'}"


def message_tag(header: Header, num_bytes: int) -> int:
    """Return the tag, below `ABORT_TAG`, of a message of a request."""
    return zlib.crc32(num_bytes.to_bytes(8, "little"), header.digest) % ABORT_TAG


def hash_lines(lines: Sequence[str]) -> int:
    """Return a 63-bit hash of lines of text, which ranks compare."""
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# tasks, and the engine that runs them


class Task:
    """An algorithm that an engine runs: that of its rank, or one on a channel."""

    __slots__ = ("algorithm", "answer", "caller", "channel", "error", "kind", "outer")

    def __init__(
        self, algorithm: Algorithm[Any], channel: str | None = None, caller: str = ""
    ) -> None:
        self.algorithm = algorithm
        self.channel = channel  # None for the algorithm of a rank
        self.caller = caller  # the name that the algorithm has set by `Caller`
        self.kind = ""  # of the collective whose messages the algorithm sends; empty for none
        # the algorithms that wait for the return value of the one that runs, and their kinds
        self.outer: list[tuple[Algorithm[Any], str]] = []
        # with which the task continues; of a task that has ended, its result and error
        self.answer: Any = None
        self.error: WorkerLost | None = None


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
            Start: self.start,
            Wait: self.wait,
            First: self.wait_for_any,
            Abandon: self.abandon,
            **dict.fromkeys((Send, Receive), self.run_message),
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

    # requests; a simulation has its own time

    def set_caller(self, task: Task, request: Caller) -> bool:
        """Execute a `Caller`."""
        task.answer, task.caller = task.caller, request.name
        return True

    def compute(self, task: Any, request: Compute) -> bool:
        """Execute a `Compute`."""
        time.sleep(request.seconds)
        return True

    def read_clock(self, task: Any, request: Now) -> bool:
        """Execute a `Now`."""
        task.answer = time.monotonic()
        return True

    def run_message(self, task: Task, message: Message) -> bool:
        """Execute a message."""
        if not task.kind:
            message.check(self.rank, self.world_size)
        pending = self.start_message(task, message, task.channel, message)
        return self.wait_for(task, pending, message)

    def wait(self, task: Task, request: Wait) -> bool:
        """Execute a `Wait`."""
        return self.wait_for(task, request.pending, request)

    def start(self, task: Task, request: Start) -> bool:
        """Execute a `Start`."""
        started, channel = request.request, request.channel
        if isinstance(started, Message):
            if not task.kind:
                started.check(self.rank, self.world_size)
            if not channel:
                task.answer = self.start_message(task, started, task.channel, request)
                return True
        elif isinstance(started, Collective):
            started.check(self.world_size)
        else:
            check_kind(started, Generator, "the start of")
        channel = channel or DEFAULT_CHANNEL
        self.open_channel(task, channel, request)
        if isinstance(started, Send):
            task.answer = self.start_message(task, started, channel, request)
            return True
        if isinstance(started, Request):
            algorithm = yield_request(started)
        else:
            algorithm = only_in_background(started)
        task.answer = self.start_task(task, algorithm, started, channel, request)
        return True

    def abandon(self, task: Task, request: Abandon) -> bool:
        """Execute an `Abandon`."""
        request.pending.is_abandoned = True
        return True

    def ask_store(self, task: Task, request: StoreRequest) -> bool:
        """Execute a request to the store, and count it and the values that it sends."""
        values = request.sent_values() if self.world_size > 1 else ()
        name = type(request).__name__
        self.ledger.add(name, sum(map(len, values)), messages=bool(values), requests=1)
        return self.use_store(task, request)

    def run_collective(self, task: Task, request: Any) -> bool:
        """Execute a collective."""
        check_kind(request, Collective, "an algorithm yields")
        request.check(self.world_size)
        return self.exchange(task, request)

    # what a backend implements

    @abstractmethod
    def exchange(self, task: Any, request: Collective) -> bool:
        """Execute a collective, which is valid."""

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
    def start_task(
        self, task: Any, algorithm: Algorithm[Any], started: Any, channel: str, request: Start
    ) -> Any:
        """Start the algorithm of `started`, what `request` starts, and return its handle."""

    @abstractmethod
    def wait_for(self, task: Any, pending: Any, request: Request) -> bool:
        """Wait for the end of a started request, for `request`."""

    @abstractmethod
    def wait_for_any(self, task: Any, request: First) -> bool:
        """Wait for one of several tasks on channels."""

    @abstractmethod
    def use_store(self, task: Any, request: Any) -> bool:
        """Execute a request to the store."""


def check_kind(value: object, kinds: Any, where: str) -> None:
    """Check the type of a request, or of what a `Start` starts; raises TypeError."""
    if not isinstance(value, kinds):
        raise TypeError(f"{where} {value!r:.100}")


def only_in_background(algorithm: Algorithm[Any]) -> Algorithm[Any]:
    """Check each request of a started algorithm, and return its result."""
    answer: Any = None
    lost: WorkerLost | None = None
    while True:
        try:
            request = algorithm.send(answer) if lost is None else algorithm.throw(lost)
        except StopIteration as stop:
            return stop.value
        check_kind(request, Collective | Compute, "a started algorithm yields")
        try:
            answer, lost = (yield request), None
        except WorkerLost as error:
            lost = error


def identify_caller(method: Algorithms[P, T]) -> Algorithms[P, T]:
    """Decorate an algorithm of an optimizer so that the headers of its requests name the optimizer.

    Otherwise ranks that step several optimizers in different orders would exchange the gradients of
    different models.
    """

    @wraps(method)
    def algorithm(self: Any, /, *args: P.args, **options: P.kwargs) -> Algorithm[T]:
        before = yield Caller(self.identity)
        result = yield from method(self, *args, **options)
        yield Caller(before)
        return result

    return algorithm
