"""Simulate W ranks in one process, in lockstep, with a virtual clock.

The algorithms are the same as over processes, without a network and without threads. A test has
access to all ranks, every byte is counted, and the clock predicts the time on given network links.
The rank with the earliest time runs next, so the times do not depend on the order of the ranks.
"""

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange.agreement import (
    Header,
    RequestLog,
    channel_sequence,
    describe_collective,
    find_difference,
    message_sequence,
    mismatch,
)
from gcnzc.exchange.choices import Choices, as_bytes, check_request, expand
from gcnzc.exchange.ledger import Ledger
from gcnzc.exchange.requests import (
    Algorithm,
    Caller,
    Collective,
    Compute,
    Receive,
    Request,
    Scratch,
    Send,
    Start,
    Wait,
    describe_request,
)


@dataclass(frozen=True)
class Link:
    """The network link of a rank's outgoing messages, or from one rank to another."""

    bytes_per_s: float = float("inf")
    """bandwidth"""
    delay_s: float = 0.0
    """latency, from the departure of the last byte to its arrival"""
    message_s: float = 0.0
    """overhead of the sender per message; only of the outgoing link of a rank"""


_NO_LIMITS = Link()
_DEFAULT_CHOICES = Choices()


@dataclass
class Outcome:
    """The result of `lockstep`; lists are in the order of ranks."""

    results: list[Any]
    """return values of the algorithms"""
    seconds: list[float]
    """the end of each algorithm, by the virtual clock"""
    exchange_s: list[float]
    """the time of each algorithm without `Compute`, in seconds"""
    ledgers: list[Ledger]
    """counters of the messages that each rank sent"""


def lockstep(
    algorithms: Sequence[Algorithm[Any]],
    link: Link | None = None,
    links: Mapping[tuple[int, int], Link] | None = None,
    choices: Choices | None = None,
) -> Outcome:
    """Run the algorithms of W ranks in one process, and simulate the time that they take.

    Args:
        algorithms: one for each rank, in the order of ranks.
        link: the outgoing link of each rank; None has no limits.
        links: by (sender, receiver), links whose bandwidth and latency limit their messages in
            addition to `link`; their `message_s` is not used.
        choices: the collective algorithm for each kind of request; None uses the defaults.

    Returns:
        The results, times and ledgers of all ranks.

    Raises:
        RequestMismatch: ranks make different requests, or wait for one another in a cycle, as over
            processes.
        RuntimeError: a tensor was changed while it was being sent.
    """
    simulation = _Simulation(
        algorithms, link or _NO_LIMITS, links or {}, choices or _DEFAULT_CHOICES
    )
    return simulation.run()


@dataclass
class _Task:
    """The algorithm of a rank, or a request that it has started."""

    rank: int
    channel: tuple[Any, ...]  # empty for the algorithm of a rank
    stack: list[Algorithm[Any]]  # the last one runs; its return value is sent to the one before
    now: float
    kind: str = ""  # of the collective that it executes
    caller: str = ""
    computed_s: float = 0.0
    answer: Any = None
    waits_for: Any = None
    is_done: bool = False
    waiting: list["_Task"] = field(default_factory=list)  # tasks that wait for this one


@dataclass
class _Mailbox:
    """The messages from one rank to another, in order."""

    messages: deque[tuple[Tensor, float]] = field(default_factory=deque)  # with times of arrival
    waiting: list[_Task] = field(default_factory=list)  # tasks that wait for a message or a receive
    receives_started_at: list[float] = field(default_factory=list)
    num_sent: int = 0
    num_received: int = 0


@dataclass
class _PendingSend:
    request: Send
    copy: Tensor
    """of the values, to detect that they changed"""
    sent_at: float
    mailbox: _Mailbox
    number: int
    """of the message in its mailbox, from 1"""


@dataclass
class _PendingReceive:
    request: Receive
    mailbox: _Mailbox
    number: int
    """of the message in its mailbox, from 1"""


class _Simulation:
    """The state of one run of `lockstep`."""

    def __init__(
        self,
        algorithms: Sequence[Algorithm[Any]],
        link: Link,
        links: Mapping[tuple[int, int], Link],
        choices: Choices,
    ) -> None:
        self.world_size = len(algorithms)
        self.link, self.links, self.choices = link, links, choices
        self.ledgers = [Ledger() for _ in algorithms]
        self.logs = [RequestLog(rank) for rank in range(self.world_size)]
        # when the link of a rank, or of a pair of ranks, has sent its last message
        self.free_at: dict[Any, float] = {}
        self.mailboxes: defaultdict[Any, _Mailbox] = defaultdict(_Mailbox)
        self.last_in_channel: dict[tuple[int, str], _Task] = {}
        self.tasks: list[_Task] = []
        self.ready: list[tuple[float, int, _Task]] = []
        self.order = itertools.count()
        self.mains = [self.add_task(rank, (), each, 0.0) for rank, each in enumerate(algorithms)]

    def run(self) -> Outcome:
        while self.ready:
            _, _, task = heapq.heappop(self.ready)
            self.advance(task)
        if stuck := [task for task in self.tasks if not task.is_done]:
            waits = "; ".join(_describe_wait(task) for task in stuck)
            raise mismatch(f"{waits}, and none of them can continue")
        outcome = Outcome([], [], [], self.ledgers)
        for task in self.mains:
            outcome.results.append(task.answer)
            outcome.seconds.append(task.now)
            outcome.exchange_s.append(task.now - task.computed_s)
        return outcome

    def add_task(
        self, rank: int, channel: tuple[Any, ...], algorithm: Algorithm[Any], now: float
    ) -> _Task:
        task = _Task(rank, channel, [algorithm], now)
        self.tasks.append(task)
        self.push(task, now)
        return task

    def push(self, task: _Task, at: float) -> None:
        """Schedule a task for a time, or for its own time if that is later."""
        heapq.heappush(self.ready, (max(task.now, at), next(self.order), task))

    def advance(self, task: _Task) -> None:
        """Run a task until its clock advances, it waits, or it is done."""
        now, pending = task.now, task.waits_for
        if pending is not None:
            task.waits_for = None
            self.wait(task, pending)
        while task.now == now and task.waits_for is None:
            try:
                request = task.stack[-1].send(task.answer)
            except StopIteration as stop:
                task.stack.pop()
                task.answer = stop.value
                if not task.stack:
                    task.is_done = True
                    for other in task.waiting:
                        self.push(other, task.now)
                    return
                if len(task.stack) == 1 and not task.channel:
                    task.kind = ""
                continue
            task.answer = None
            self.answer(task, request)
        if task.waits_for is None:
            self.push(task, task.now)

    def answer(self, task: _Task, request: Request) -> None:
        if isinstance(request, Compute):
            task.now += request.seconds
            task.computed_s += request.seconds
        elif isinstance(request, Caller):
            task.answer, task.caller = task.caller, request.name
        elif isinstance(request, Scratch):
            # all bits set are NaN in float16, bfloat16, float32 and float64, so that results show
            # whether scratch memory was read before it was written
            task.answer = torch.empty_like(request.values)
            as_bytes(task.answer).fill_(0xFF)
        elif isinstance(request, Send | Receive):
            self.wait(task, self.start_request(task, request))
        elif isinstance(request, Start):
            task.answer = self.start_request(task, request.request, request.channel)
        elif isinstance(request, Wait):
            self.wait(task, request.pending)
        else:
            channel, task.kind = task.channel[0] if task.channel else "", type(request).__name__
            self.ledgers[task.rank].count(task.kind)
            task.stack.append(self.execute(task.rank, task.caller, channel, request))

    def start_request(
        self, task: _Task, request: Request | Algorithm[Any], channel: str = ""
    ) -> _Task | _PendingSend | _PendingReceive:
        if isinstance(request, Send):
            return self.send(task, request)
        if isinstance(request, Receive):
            if not task.kind:
                self.check_message(task, request)
            mailbox = self.mailbox(request.peer, task.rank, task)
            mailbox.receives_started_at.append(task.now)
            if mailbox.waiting:
                self.resume_waiting(mailbox, task.now)
            return _PendingReceive(request, mailbox, len(mailbox.receives_started_at))
        assert not isinstance(request, Start | Wait | Compute | Scratch | Caller), (
            "only exchanges can be started"
        )
        before = self.last_in_channel.get((task.rank, channel))
        kind = ""
        if isinstance(request, Generator):
            algorithm = request
        else:
            algorithm = self.execute_later(task.rank, task.caller, channel, request)
            kind = type(request).__name__
            self.ledgers[task.rank].count(kind)
        started = self.add_task(task.rank, (channel,), _run_after(before, algorithm), task.now)
        started.kind, started.caller = kind, task.caller
        self.last_in_channel[task.rank, channel] = started
        return started

    def execute(self, rank: int, caller: str, channel: str, request: Collective) -> Algorithm[Any]:
        """Check a collective against those of other ranks; return the algorithm of its messages."""
        sequence = channel_sequence(channel)
        header = self.logs[rank].record(sequence, *describe_collective(request), caller)
        self.check(rank, sequence, header, range(self.world_size))
        check_request(request, self.world_size)
        return expand(request, rank, self.world_size, self.choices)

    def execute_later(
        self, rank: int, caller: str, channel: str, request: Collective
    ) -> Algorithm[Any]:
        """See `execute`; checks the collective when the algorithm runs."""
        return (yield from self.execute(rank, caller, channel, request))

    def check_message(self, task: _Task, message: Send | Receive) -> None:
        header = self.logs[task.rank].record_message(message, task.caller)
        sequence = message_sequence(message, task.rank)
        self.check(task.rank, sequence, header, [message.peer])

    def check(self, rank: int, sequence: str, header: Header, peers: Sequence[int]) -> None:
        """Raise a RequestMismatch if a request differs from that of a peer that made it before."""
        for peer in peers:
            other = None if peer == rank else self.logs[peer].find(sequence, header.number)
            if other is not None:
                difference = find_difference((peer, rank), sequence, other, header)
                if difference:
                    raise mismatch(difference)

    def resume_waiting(self, mailbox: _Mailbox, at: float) -> None:
        for other in mailbox.waiting:
            self.push(other, at)
        mailbox.waiting.clear()

    def send(self, task: _Task, request: Send) -> _PendingSend:
        if not task.kind:
            self.check_message(task, request)
        copy = as_bytes(request.values).clone()
        num_bytes, pair = len(copy), (task.rank, request.peer)
        pair_link = self.links.get(pair, _NO_LIMITS)
        begin = max(task.now, self.free_at.get(task.rank, 0.0)) + self.link.message_s
        sent_at = begin + num_bytes / self.link.bytes_per_s
        pair_sent_at = max(begin, self.free_at.get(pair, 0.0)) + num_bytes / pair_link.bytes_per_s
        self.free_at[task.rank], self.free_at[pair] = sent_at, pair_sent_at
        arrival = max(sent_at, pair_sent_at) + self.link.delay_s + pair_link.delay_s
        mailbox = self.mailbox(*pair, task)
        mailbox.messages.append((copy, arrival))
        mailbox.num_sent += 1
        if mailbox.waiting:
            self.resume_waiting(mailbox, arrival)
        self.ledgers[task.rank].add(task.kind or "Send", num_bytes)
        return _PendingSend(request, copy, sent_at, mailbox, mailbox.num_sent)

    def mailbox(self, sender: int, receiver: int, task: _Task) -> _Mailbox:
        # messages of collectives are not received by `Receive` requests of algorithms
        key = sender, receiver, task.channel, bool(task.kind)
        return self.mailboxes[key]

    def wait(self, task: _Task, pending: Any) -> None:
        """Set the task's answer to that of a started request, or suspend the task."""
        if isinstance(pending, _Task):
            if not pending.is_done:
                task.waits_for = pending
                pending.waiting.append(task)
                return
            task.now, task.answer = max(task.now, pending.now), pending.answer
        elif isinstance(pending, _PendingSend):
            if len(pending.mailbox.receives_started_at) < pending.number:
                # as over gloo, a send finishes only after its peer has started to receive; the
                # simulated transfer does not wait for that
                task.waits_for = pending
                pending.mailbox.waiting.append(task)
                return
            if not torch.equal(as_bytes(pending.request.values), pending.copy):
                raise RuntimeError(
                    f"rank {task.rank} changed a tensor while it was being sent\n\n"
                    "hint: do not write to a tensor between Start and Wait"
                )
            started_at = pending.mailbox.receives_started_at[pending.number - 1]
            task.now = max(task.now, pending.sent_at, started_at)
        else:
            self.receive(task, pending)

    def receive(self, task: _Task, pending: _PendingReceive) -> None:
        mailbox = pending.mailbox
        if not mailbox.messages:
            task.waits_for = pending
            mailbox.waiting.append(task)
            return
        mailbox.num_received += 1
        assert pending.number == mailbox.num_received, "receives finish in the order of their start"
        values, arrival = mailbox.messages.popleft()
        into = as_bytes(pending.request.values)
        if len(into) != len(values):
            raise mismatch(
                f"rank {task.rank} expects {len(into)} bytes from rank {pending.request.peer}, "
                f"which sends {len(values)}"
            )
        into.copy_(values)
        task.now, task.answer = max(task.now, arrival), pending.request.values


def _run_after(before: _Task | None, algorithm: Algorithm[Any]) -> Algorithm[Any]:
    """Run an algorithm after the previous request of its channel."""
    if before is not None:
        yield Wait(before)
    return (yield from algorithm)


def _describe_wait(task: _Task) -> str:
    within = f" in {task.kind}" if task.kind else ""
    if isinstance(task.waits_for, _PendingReceive | _PendingSend):
        return f"rank {task.rank} waits for {describe_request(task.waits_for.request)}{within}"
    return f"rank {task.rank} waits for a request that it started{within}"
