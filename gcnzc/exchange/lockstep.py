"""Simulate W workers in one process, in lockstep, with a virtual clock.

The algorithms are the same as over processes, without a network and without threads. A test has
access to all workers, every byte is counted, and the clock predicts the time on given network
links. The worker with the earliest time runs next, so the clock does not depend on their order.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange.agreement import (
    Header,
    RequestLog,
    channel_sequence,
    find_difference,
    message_sequence,
    mismatch,
)
from gcnzc.exchange.choices import Choices, as_bytes, expand
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
    """The network link of a worker's outgoing messages, or from one worker to another."""

    bytes_per_s: float = float("inf")
    delay_s: float = 0.0
    """latency, from the departure of the last byte to its arrival"""
    message_s: float = 0.0
    """overhead of the sender for each message"""


@dataclass
class Outcome:
    """The result of `lockstep`; lists are in the order of ranks."""

    results: list[Any]
    """return values of the algorithms"""
    seconds: list[float]
    """end of each algorithm, by the virtual clock"""
    exchange_s: list[float]
    """seconds that each worker waited for others: all its time except `Compute`"""
    ledgers: list[Ledger]


def lockstep(
    algorithms: Sequence[Algorithm[Any]],
    link: Link | None = None,
    links: Mapping[tuple[int, int], Link] | None = None,
    choices: Choices | None = None,
) -> Outcome:
    """Run the algorithms of W workers in one process.

    Args:
        algorithms: one for each worker, in the order of ranks.
        link: the outgoing link of every worker; None has no limits.
        links: by sender and receiver, links that limit their messages in addition to `link`.
        choices: the collective algorithm for each kind of request; None uses the defaults.

    Returns:
        Results, times and ledgers of all workers.

    Raises:
        RequestMismatch: ranks make different requests, or wait for one another in a cycle, as over
            processes.
        RuntimeError: a tensor was changed while it was being sent.
    """
    return _World(algorithms, link or Link(), links or {}, choices or Choices()).run()


@dataclass
class _Task:
    """A worker's algorithm, or a request that it began."""

    rank: int
    channel: tuple[Any, ...]  # empty for a worker's own algorithm
    stack: list[Algorithm[Any]]  # the last one is running, for the one before it
    now: float
    kind: str = ""  # of the request that it is in
    caller: str = ""
    computed_s: float = 0.0
    answer: Any = None
    waits_for: Any = None
    is_done: bool = False
    waiting: list["_Task"] = field(default_factory=list)  # for its end


@dataclass
class _Mailbox:
    """Messages from one worker to another, in order."""

    messages: deque[tuple[Tensor, float]] = field(default_factory=deque)  # and when each arrives
    waiting: list[_Task] = field(default_factory=list)  # for a message, or to be received
    promised: list[float] = field(default_factory=list)  # when receptions were begun
    sent: int = 0
    taken: int = 0


@dataclass
class _Sent:
    request: Send
    copy: Tensor
    left_at: float
    mailbox: _Mailbox
    number: int


@dataclass
class _Receipt:
    request: Receive
    mailbox: _Mailbox
    number: int


class _World:
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
        # when what leaves a worker, or goes to one other, may follow
        self.free_at: dict[Any, float] = {}
        self.mailboxes: dict[Any, _Mailbox] = {}
        self.last_of_channel: dict[tuple[int, str], _Task] = {}
        self.tasks: list[_Task] = []
        self.ready: list[tuple[float, int, _Task]] = []
        self.order = itertools.count()
        self.mains = [self.start(rank, (), each, 0.0) for rank, each in enumerate(algorithms)]

    def run(self) -> Outcome:
        while self.ready:
            _, _, task = heapq.heappop(self.ready)
            self.advance(task)
        if stuck := [task for task in self.tasks if not task.is_done]:
            waits = "; ".join(_waiting(task) for task in stuck)
            raise mismatch(f"{waits}, and none of them can go on")
        return Outcome(
            [task.answer for task in self.mains],
            [task.now for task in self.mains],
            [task.now - task.computed_s for task in self.mains],
            self.ledgers,
        )

    def start(
        self, rank: int, channel: tuple[Any, ...], algorithm: Algorithm[Any], now: float
    ) -> _Task:
        task = _Task(rank, channel, [algorithm], now)
        self.tasks.append(task)
        self.push(task, now)
        return task

    def push(self, task: _Task, at: float) -> None:
        """Let a task go on at a time, or when it has come there."""
        heapq.heappush(self.ready, (max(task.now, at), next(self.order), task))

    def advance(self, task: _Task) -> None:
        """Go on with a task until its clock moves, or it waits, or it is done."""
        now, pending = task.now, task.waits_for
        if pending is not None:
            task.waits_for = None
            self.end(task, pending)
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
            # whole bytes of ones are NaN in every floating-point dtype
            task.answer = torch.empty_like(request.values)
            as_bytes(task.answer).fill_(0xFF)
        elif isinstance(request, Send | Receive):
            self.end(task, self.begin(task, request))
        elif isinstance(request, Start):
            task.answer = self.begin(task, request.request, request.channel)
        elif isinstance(request, Wait):
            self.end(task, request.pending)
        else:
            channel = task.channel[0] if task.channel else ""
            task.kind = self.counted(task.rank, request)
            task.stack.append(self.expanded(task.rank, task.caller, channel, request))

    def begin(
        self, task: _Task, request: Request | Algorithm[Any], channel: str = ""
    ) -> _Task | _Sent | _Receipt:
        if isinstance(request, Send):
            return self.send(task, request)
        if isinstance(request, Receive):
            if not task.kind:
                self.check_message(task, request)
            mailbox = self.mailbox(request.peer, task.rank, task)
            mailbox.promised.append(task.now)
            self.wake(mailbox, task.now)
            return _Receipt(request, mailbox, len(mailbox.promised))
        assert not isinstance(request, Start | Wait | Compute | Scratch | Caller), (
            "only an exchange can be begun"
        )
        before = self.last_of_channel.get((task.rank, channel))
        kind = ""
        if isinstance(request, Generator):
            algorithm = request
        else:
            algorithm = self.expanded(task.rank, task.caller, channel, request)
            kind = self.counted(task.rank, request)
        begun = self.start(task.rank, (channel,), _after(before, algorithm), task.now)
        begun.kind, begun.caller = kind, task.caller
        self.last_of_channel[task.rank, channel] = begun
        return begun

    def expanded(self, rank: int, caller: str, channel: str, request: Collective) -> Algorithm[Any]:
        """The messages of a request, when its turn comes, once other ranks' requests fit it."""
        header = self.logs[rank].record_collective(channel, request, caller)
        self.check(rank, channel_sequence(channel), header, range(self.world_size))
        return (yield from expand(request, rank, self.world_size, self.choices))

    def check_message(self, task: _Task, message: Send | Receive) -> None:
        header = self.logs[task.rank].record_message(message, task.caller)
        sequence = message_sequence(message, task.rank)
        self.check(task.rank, sequence, header, [message.peer])

    def check(self, rank: int, sequence: str, header: Header, peers: Sequence[int]) -> None:
        """Raise a RequestMismatch if a request differs from that of a peer that made it before."""
        for peer in peers:
            other = self.logs[peer].find(sequence, header.number)
            if other is not None and peer != rank:
                difference = find_difference((peer, rank), sequence, other, header)
                if difference:
                    raise mismatch(difference)

    def wake(self, mailbox: _Mailbox, at: float) -> None:
        for other in mailbox.waiting:
            self.push(other, at)
        mailbox.waiting.clear()

    def counted(self, rank: int, request: Collective) -> str:
        kind = type(request).__name__
        self.ledgers[rank].count(kind)
        return kind

    def send(self, task: _Task, request: Send) -> _Sent:
        if not task.kind:
            self.check_message(task, request)
        copy = as_bytes(request.values).clone()
        num_bytes, pair = len(copy), (task.rank, request.peer)
        narrow = self.links.get(pair, Link())
        begins = max(task.now, self.free_at.get(task.rank, 0.0)) + self.link.message_s
        left_at = begins + num_bytes / self.link.bytes_per_s
        through = max(begins, self.free_at.get(pair, 0.0)) + num_bytes / narrow.bytes_per_s
        self.free_at[task.rank], self.free_at[pair] = left_at, through
        arrives = max(left_at, through) + self.link.delay_s + narrow.delay_s
        mailbox = self.mailbox(*pair, task)
        mailbox.messages.append((copy, arrives))
        mailbox.sent += 1
        self.wake(mailbox, arrives)
        self.ledgers[task.rank].add(task.kind or "Send", num_bytes)
        return _Sent(request, copy, left_at, mailbox, mailbox.sent)

    def mailbox(self, sender: int, receiver: int, task: _Task) -> _Mailbox:
        # a collective's message never meets one that is a request of its own
        key = sender, receiver, task.channel, bool(task.kind)
        return self.mailboxes.setdefault(key, _Mailbox())

    def end(self, task: _Task, pending: Any) -> None:
        """Take the answer of what was begun, or wait for it."""
        if isinstance(pending, _Task):
            if not pending.is_done:
                task.waits_for = pending
                pending.waiting.append(task)
                return
            task.now, task.answer = max(task.now, pending.now), pending.answer
        elif isinstance(pending, _Sent):
            if len(pending.mailbox.promised) < pending.number:
                # as over gloo, a message leaves when its peer has begun to receive it
                task.waits_for = pending
                pending.mailbox.waiting.append(task)
                return
            if not torch.equal(as_bytes(pending.request.values), pending.copy):
                raise RuntimeError(
                    f"worker {task.rank} changed a tensor while it was being sent\n\n"
                    "hint: a tensor that was given to Begin is free again after End"
                )
            begun_at = pending.mailbox.promised[pending.number - 1]
            task.now = max(task.now, pending.left_at, begun_at)
        else:
            self.receive(task, pending)

    def receive(self, task: _Task, receipt: _Receipt) -> None:
        mailbox = receipt.mailbox
        if not mailbox.messages:
            task.waits_for = receipt
            mailbox.waiting.append(task)
            return
        mailbox.taken += 1
        assert receipt.number == mailbox.taken, "receptions end in the order in which they began"
        values, arrives = mailbox.messages.popleft()
        into = as_bytes(receipt.request.values)
        if len(into) != len(values):
            raise mismatch(
                f"rank {task.rank} expects {len(into)} bytes from rank {receipt.request.peer}, "
                f"and {len(values)} came"
            )
        into.copy_(values)
        task.now, task.answer = max(task.now, arrives), receipt.request.values


def _after(before: _Task | None, algorithm: Algorithm[Any]) -> Algorithm[Any]:
    """A channel answers one request after the other."""
    if before is not None:
        yield Wait(before)
    return (yield from algorithm)


def _waiting(task: _Task) -> str:
    within = f" in {task.kind}" if task.kind else ""
    if isinstance(task.waits_for, _Receipt | _Sent):
        return f"rank {task.rank} waits for {describe_request(task.waits_for.request)}{within}"
    return f"rank {task.rank} waits for a request that it began{within}"
