"""Simulate W ranks in one process, in lockstep, with a virtual clock.

The algorithms are the same as over processes, without a network and without threads. A test has
access to all ranks, every byte is counted, and the clock predicts the time on given network links.
Tasks take turns by their virtual time: the rank with the earliest time runs next, so the times do
not depend on the order of the ranks.

The memory of a simulation is proportional to the requests that have started and not ended.
"""

import gc
import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from gcnzc.exchange.agreement import (
    MAX_OTHERS,
    Header,
    RequestLog,
    channel_sequence,
    describe_other_channel,
    find_difference,
    mismatch,
)
from gcnzc.exchange.collectives import Collective, as_bytes
from gcnzc.exchange.errors import WorkerLost
from gcnzc.exchange.ledger import Ledger
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
    check_on_channels,
    require,
    yield_request,
)
from gcnzc.exchange.simulated_network import (
    NEVER,
    Fault,
    FirstWait,
    KeyWait,
    Link,
    Machine,
    Mailbox,
    Outcome,
    SentMessage,
    SimulatedNetwork,
    SizeOnly,
    StartedReceive,
    Task,
    invalid_like,
)
from gcnzc.exchange.store import MemoryStore, check_and_count, execute

# new objects after which Python searches for cyclic garbage; the default is at most 2000
_GC_THRESHOLD = 200_000
RECEIVES = (Receive, ReceiveAny)
# what a `Start` starts
STARTED = Collective | Message | Generator


def lockstep(
    algorithms: Sequence[Algorithm[Any]],
    link: Link | Sequence[Link] | SimulatedNetwork | None = None,
    links: Mapping[tuple[int, int], Link] | None = None,
    faults: Mapping[int, Sequence[Fault]] | None = None,
    store_s: float = 0.0,
) -> Outcome:
    """Run the algorithms of W ranks in one process, and simulate the time that they take.

    Args:
        algorithms: one for each rank, in the order of ranks. Their requests may have `SizeOnly`
            values, if only the time is needed.
        link: the link of each rank, or a sequence of W links; None has no limits. Or a network of
            its own, for one simulation.
        links: by (sender, receiver), links whose bandwidth and latency limit their messages in
            addition to `link`; their `message_s` and `in_bytes_per_s` are not used.
        faults: by rank, its crash and slow-downs. A rank that waits for one that has crashed raises
            `WorkerLost`, as over processes; if the algorithm does not handle it, this rank ends
            too, and the error is in `Outcome.errors`.
        store_s: the time of a request to the store, such as `CompareAndSet`, in seconds. The store
            is empty at the start.

    Returns:
        The results, times and ledgers of all ranks.

    Raises:
        RequestMismatch: ranks make different requests, or wait for one another in a cycle, as over
            processes.
        RuntimeError: a tensor was changed while it was being sent.
        ValueError: a request, the links or the faults are invalid.
    """
    network = link
    if not isinstance(network, SimulatedNetwork):
        network = SimulatedNetwork(len(algorithms), network, links)
    simulation = Simulation(algorithms, network, faults or {}, store_s)
    with _rare_garbage_collection():
        return simulation.run()


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Let Python search for garbage more rarely: it would visit all pending requests each time."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], _GC_THRESHOLD) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class SimulatedStore:
    """Answers the requests to the store.

    A request arrives at the store after half of the time of a request, and is executed at once;
    its answer takes the other half. Requests that arrive at the same time are executed in the order
    in which they were made, so ranks that run at the same time take turns.

    Args:
        simulation: runs the tasks.
        request_s: the time of a request in seconds.

    Raises:
        ValueError: the time is negative or infinite.
    """

    def __init__(self, simulation: "Simulation", request_s: float) -> None:
        what = f"requests to the store that take {request_s} s"
        require(0 <= request_s < NEVER, what, "give a time of at least 0")
        self.simulation, self.half_s = simulation, request_s / 2
        self.memory = MemoryStore()
        self.waits: dict[str, list[KeyWait]] = {}
        """by key, the waits for it"""
        self.handlers: dict[type, Callable[[Task, Any], bool]] = {
            CompareAndSet: self.request,
            ReadKeys: self.request,
            DeleteKeys: self.request,
            WaitForKey: self.wait_for_key,
        }

    def request(self, task: Task, request: StoreRequest) -> bool:
        """Handle a request that is executed when it arrives."""
        self.check_and_count(task, request)

        def arrive(at: float) -> None:
            is_change = isinstance(request, CompareAndSet)
            if is_change and task.is_done:
                return  # the rank has crashed, so its request does not reach the store
            answer = execute(request, self.memory)
            if isinstance(request, CompareAndSet) and answer == request.value:
                for wait in self.waits.pop(request.key, ()):
                    self.end_wait(wait, request.value, at)
            self.answer(task, answer, at)

        self.simulation.schedule(task.now + self.half_s, arrive)
        return False

    def check_and_count(self, task: Task, request: StoreRequest) -> None:
        """Check a request, and count it in the ledger of its rank."""
        check_and_count(request, self.simulation.ledgers[task.rank], self.simulation.world_size)

    def answer(self, task: Task, answer: Any, at: float) -> None:
        """Send an answer to a task, unless its rank has ended."""
        if not task.is_done:
            task.answer = answer
            self.simulation.resume(task, at + self.half_s)

    def wait_for_key(self, task: Task, request: WaitForKey) -> bool:
        """Handle a `WaitForKey`."""
        self.check_and_count(task, request)
        task.waits_for = wait = KeyWait(task, request)
        self.simulation.schedule(task.now + self.half_s, lambda at: self.begin_wait(wait, at))
        return False

    def begin_wait(self, wait: KeyWait, at: float) -> None:
        """Answer a wait if its key exists; otherwise store the wait until the key is set."""
        request = wait.request
        (value,) = self.memory.read([request.key])
        if value:
            self.end_wait(wait, value, at)
            return
        self.waits.setdefault(request.key, []).append(wait)
        if request.seconds is not None and request.seconds < NEVER:
            self.simulation.schedule(
                at + request.seconds, lambda end: self.end_wait(wait, None, end)
            )

    def end_wait(self, wait: KeyWait, answer: bytes | None, at: float) -> None:
        """Answer a wait, unless that was done before."""
        if not wait.is_over:
            wait.is_over = True
            if answer is None:
                self.waits[wait.request.key].remove(wait)
            self.answer(wait.task, answer, at)

    def fail_waits(self, at: float) -> bool:
        """Raise an error in the tasks that wait for keys, when no task can continue.

        Returns:
            Whether there was such a task. There is none if no rank has ended with an error.
        """
        errors = [each for each in self.simulation.errors if each is not None]
        waits = [
            each
            for waits in self.waits.values()
            for each in waits
            if errors and each.request.seconds is None and not each.task.is_done
        ]
        self.waits = {} if waits else self.waits
        for wait in waits:
            wait.task.error = WorkerLost(
                f"rank {wait.task.rank} waited for {wait.request.describe()}, which no rank has "
                f"set: {errors[0]}"
            )
            self.end_wait(wait, b"", at)
        return bool(waits)


class Simulation:
    """The state of one run of `lockstep`.

    Args:
        algorithms: the algorithm of each rank.
        network: the links.
        faults, store_s: see `lockstep`.
    """

    def __init__(
        self,
        algorithms: Sequence[Algorithm[Any]],
        network: SimulatedNetwork,
        faults: Mapping[int, Sequence[Fault]],
        store_s: float = 0.0,
    ) -> None:
        self.world_size = len(algorithms)
        self.network = network
        for rank in faults:
            require(
                rank in range(self.world_size),
                f"faults has rank {rank!r}, but there are {self.world_size} ranks",
                f"give ranks from 0 to {self.world_size - 1}",
            )
        self.machines = [Machine(faults.get(rank, ())) for rank in range(self.world_size)]
        self.has_faults = bool(faults)
        self.errors: list[WorkerLost | None] = [None] * self.world_size
        self.broken: dict[int | tuple[int, str | None], tuple[float, WorkerLost]] = {}
        """by rank, or rank and channel of collectives, when its connections broke, and why"""
        self.ledgers = [Ledger() for _ in algorithms]
        # the requests that each rank has made, compared when a rank makes another one
        self.logs = [RequestLog(rank) for rank in range(self.world_size)]
        self.mailboxes: defaultdict[Any, Mailbox] = defaultdict(Mailbox)
        self.any_receives: dict[Any, deque[StartedReceive]] = {}
        """the receives without a message, by receiver, channel, header and caller"""
        self.num_messages = 0
        self.last_in_channel: dict[tuple[int, str], Task] = {}
        self.opened: list[list[str]] = [[] for _ in algorithms]
        """by rank, the channels in the order in which the rank has opened them"""
        # tasks that have not ended
        self.tasks: dict[Task, None] = {}
        # (time, number, task, or a function that is called with the time)
        self.events: list[tuple[float, int, Task | Callable[[float], None]]] = []
        self.num_events = 0
        self.handlers: dict[type, Callable[[Task, Any], bool]] = {
            Compute: self.compute,
            Now: self.read_clock,
            Caller: self.set_caller,
            Scratch: self.allocate,
            Start: self.start,
            Wait: self.wait,
            Send: self.send_and_wait,
            Receive: self.receive_and_wait,
            ReceiveAny: self.receive_and_wait,
            First: self.wait_for_first,
            Abandon: self.abandon,
        }
        network.connect(self.schedule, self.end_send, self.set_arrival)
        self.store = SimulatedStore(self, store_s)
        self.handlers |= self.store.handlers
        self.main_tasks = [
            self.add_task(rank, None, each, 0.0) for rank, each in enumerate(algorithms)
        ]
        for rank, machine in enumerate(self.machines):
            if machine.crashes_at < NEVER:
                self.schedule(machine.crashes_at, partial(self.crash, rank))

    def run(self) -> Outcome:
        """Run all tasks to their ends; see `lockstep`."""
        events, at = self.events, 0.0
        while events or self.store.fail_waits(at) or self.fail_any_receives(at):
            at, _, event = heapq.heappop(events)
            if type(event) is Task:
                self.advance(event, at)
            else:
                event(at)  # type: ignore[operator]
        waiting = [each.describe_wait() for each in self.tasks if not each.is_abandoned]
        if waits := "; ".join([*waiting, *self.describe_missing_channels()]):
            others = self.describe_other_channels() if waiting else []
            raise mismatch("; ".join([f"{waits}, and none of them can continue", *others]))
        outcome = Outcome([], [], [], self.ledgers, self.errors)
        for task, error in zip(self.main_tasks, self.errors, strict=True):
            # the answer of a rank that crashed may be that of its last request
            outcome.results.append(task.answer if error is None else None)
            outcome.seconds.append(task.now)
            outcome.exchange_s.append(task.now - task.computed_s)
        return outcome

    def schedule(self, at: float, event: Task | Callable[[float], None]) -> None:
        """Run a task, or call a function, at a time."""
        self.num_events += 1
        heapq.heappush(self.events, (at, self.num_events, event))

    def add_task(
        self, rank: int, channel: str | None, algorithm: Algorithm[Any], now: float
    ) -> Task:
        """Add a task, which runs from `now` on."""
        task = Task(rank, channel, algorithm, now)
        self.tasks[task] = None
        self.schedule(now, task)
        return task

    def continue_at(self, task: Task, at: float) -> bool:
        """Set the time of a task that runs; return whether it may continue before all others."""
        if at <= task.now:
            return True
        if self.has_faults or (self.events and self.events[0][0] <= at):
            self.schedule(at, task)
            return False
        task.now = at
        return True

    def resume(self, task: Task, at: float) -> None:
        """Schedule a task that waits, for a time or for its own if that is later."""
        task.waits_for = None
        self.schedule(at if at > task.now else task.now, task)

    def advance(self, task: Task, at: float) -> None:
        """Run a task until it waits, others have to run first, or it has ended."""
        if task.is_done:
            # its rank has crashed
            return
        if self.has_faults:
            resume_at = self.machines[task.rank].resume_at(at)
            if resume_at > at:
                self.schedule(resume_at, task)
                return
        task.now, handlers = at, self.handlers
        while True:
            try:
                if task.error is None:
                    request = task.algorithm.send(task.answer)
                else:
                    error, task.error = task.error, None
                    request = task.algorithm.throw(error)
            except StopIteration as stop:
                task.answer = stop.value
            except WorkerLost as error:
                task.answer, task.error = None, error
                if task.kind and task.kind != "SendReceive":
                    # the other ranks of a collective would wait for this one
                    self.disconnect(task.rank, task.channel, task.now, error)
            else:
                task.answer = None
                handler = handlers.get(type(request), self.begin_collective)
                if handler(task, request):
                    continue
                return
            if not task.stack:
                self.end(task)
                return
            task.algorithm = task.stack.pop()
            if not task.stack and task.channel is None:
                task.kind = ""

    def end(self, task: Task) -> None:
        """End a task that has returned or failed; a rank whose algorithm failed is lost."""
        task.is_done = True
        self.tasks.pop(task, None)
        for other in task.waiting:
            if type(other) is FirstWait:
                self.end_first(other, task, task.now)
                continue
            other.answer, other.error = task.answer, task.error  # type: ignore[union-attr]
            self.resume(other, task.now)  # type: ignore[arg-type]
        task.waiting.clear()
        if task.channel is None and isinstance(task.error, WorkerLost):
            self.lose(task.rank, task.now, task.error)

    # requests: each handler returns whether the task continues at once

    def compute(self, task: Task, request: Compute) -> bool:
        """Answer a `Compute`."""
        request.check()
        end = self.machines[task.rank].end_of(task.now, request.seconds)
        task.computed_s += end - task.now
        return self.continue_at(task, end)

    def read_clock(self, task: Task, request: Now) -> bool:
        """Answer a `Now`."""
        task.answer = task.now
        return True

    def set_caller(self, task: Task, request: Caller) -> bool:
        """Answer a `Caller`."""
        task.answer, task.caller = task.caller, request.name
        return True

    def allocate(self, task: Task, request: Scratch) -> bool:
        """Answer a `Scratch`."""
        task.answer = invalid_like(request.values)
        return True

    def start(self, task: Task, request: Start) -> bool:
        """Answer a `Start`."""
        started = request.request
        check_kind(started, STARTED, "the start of")
        kind = type(started)
        if request.channel or not issubclass(kind, Message):
            self.open_channel(task, request.channel or DEFAULT_CHANNEL)
        if kind is Send:
            channel = request.channel or task.channel
            task.answer = self.start_send(task, started, channel)  # type: ignore[arg-type]
        elif kind in RECEIVES and not request.channel:
            task.answer = self.start_receive(task, started)  # type: ignore[arg-type]
        elif kind is ReceiveAny:
            # unlike other requests, it does not wait for those before it on the channel
            algorithm = yield_request(started)  # type: ignore[arg-type]
            receive = self.add_task(task.rank, request.channel, algorithm, task.now)
            task.answer, receive.caller = receive, task.caller
        else:
            if kind is Receive:
                started = yield_request(started)  # type: ignore[arg-type]
            elif isinstance(started, Generator):
                started = only_in_background(started)
            task.answer = self.start_task(task, started, request.channel or DEFAULT_CHANNEL)
        return True

    def wait(self, task: Task, request: Wait) -> bool:
        """Answer a `Wait`, now or later."""
        pending = request.pending
        kind = type(pending)
        if kind is StartedReceive:
            return self.wait_for_receive(task, pending)
        if kind is SentMessage:
            return self.wait_for_send(task, pending)
        if pending.is_done:
            task.answer, task.error = pending.answer, pending.error
            return self.continue_at(task, pending.now)
        task.waits_for = pending
        pending.waiting.append(task)
        return False

    def wait_for_first(self, task: Task, request: First) -> bool:
        """Answer a `First`, now or later."""
        check_on_channels(request, Task)
        for index, pending in enumerate(request.pending):
            if pending.is_done:
                task.answer = index
                return self.continue_at(task, pending.now)
        wait = FirstWait(task, request)
        if request.seconds is not None and request.seconds < NEVER:
            self.schedule(task.now + request.seconds, lambda at: self.end_first(wait, None, at))
        return False

    def end_first(self, wait: FirstWait, ended: Task | None, at: float) -> None:
        """Resume a task that waits for the first of several others, unless that was done before."""
        if wait.end(ended):
            self.resume(wait.task, at)

    def abandon(self, task: Task, request: Abandon) -> bool:
        """Answer an `Abandon`."""
        check_on_channels(request, Task)
        request.pending.is_abandoned = True
        return True

    def send_and_wait(self, task: Task, request: Send) -> bool:
        """Answer a `Send`, now or later."""
        return self.wait_for_send(task, self.start_send(task, request, task.channel))

    def receive_and_wait(self, task: Task, request: Receive | ReceiveAny) -> bool:
        """Answer a `Receive` or `ReceiveAny`, now or later."""
        return self.wait_for_receive(task, self.start_receive(task, request))

    def begin_collective(self, task: Task, request: Any) -> bool:
        """Continue with the messages of a collective."""
        check_kind(request, Collective, "an algorithm yields")
        task.kind = request.name
        self.ledgers[task.rank].count(task.kind)
        algorithm = self.execute(task.rank, task.caller, task.channel, request)
        task.stack.append(task.algorithm)
        task.algorithm = algorithm
        return True

    # collectives

    def execute(self, rank: int, caller: str, channel: str | None, request: Any) -> Algorithm[Any]:
        """Check a collective, which has a channel if it is started; return its algorithm."""
        request.check(self.world_size)
        self.check_collective(rank, caller, channel, request)
        is_builtin = request.is_builtin(is_started=channel is not None)
        return request.messages(rank, self.world_size, is_builtin=is_builtin)

    def execute_later(self, rank: int, caller: str, channel: str, request: Any) -> Algorithm[Any]:
        """See `execute`; checks the collective when the algorithm runs."""
        return (yield from self.execute(rank, caller, channel, request))

    def start_task(self, task: Task, request: Request | Algorithm[Any], channel: str) -> Task:
        """Start a collective or an algorithm on a channel, after the last one of this channel."""
        before = self.last_in_channel.get((task.rank, channel))
        if isinstance(request, Generator):
            kind, algorithm = "", request
        else:
            assert isinstance(request, Collective), "only exchanges can be started"
            kind = request.name
            algorithm = self.execute_later(task.rank, task.caller, channel, request)
            self.ledgers[task.rank].count(kind)
        if before is not None and not before.is_done:
            algorithm = run_after(before, algorithm)
        started = self.add_task(task.rank, channel, algorithm, task.now)
        started.kind, started.caller = kind, task.caller
        self.last_in_channel[task.rank, channel] = started
        return started

    # messages

    def start_send(self, task: Task, request: Send, channel: str | None) -> SentMessage:
        """Send a message: occupy the links, and match it with a receive."""
        sender, receiver = task.rank, request.peer
        sequence = "" if task.kind else self.check_message(task, request, channel)
        values = request.values
        num_bytes = values.nbytes
        copy = None if isinstance(values, SizeOnly) else as_bytes(values).clone()
        sent_at, first, last = self.network.send(sender, receiver, num_bytes, task.now)
        self.ledgers[sender].add(task.kind or "Send", num_bytes)
        self.num_messages += 1
        message = SentMessage(request, sender, self.num_messages, copy, num_bytes, sent_at, channel)
        # messages of collectives are not received by `Receive` requests of algorithms
        mailbox = self.mailboxes[sender, receiver, channel, sequence]
        if mailbox.receives:
            self.match(message, mailbox.receives.popleft(), task.now)
        elif request.tag is None or not self.match_any(task, message, channel):
            mailbox.messages.append(message)
        self.network.open(message, task.now)
        if sent_at == NEVER or sent_at > self.machines[sender].crashes_at:
            pass  # it has not left the rank yet, or when it crashes
        elif self.network.has_receiver_limit:
            self.schedule(first, lambda at: self.arrive(message, receiver, at, last))
        else:
            self.set_arrival(message, last)
        return message

    def arrive(self, message: SentMessage, receiver: int, first: float, last: float) -> None:
        """Receive the first byte of a message over a link with a limit."""
        self.set_arrival(message, self.network.receive(receiver, message.num_bytes, first, last))

    def set_arrival(self, message: SentMessage, at: float) -> None:
        """Set when a message arrives, and resume the task that waits for it."""
        message.arrives_at = at
        receive, message.receive = message.receive, None
        if receive is not None and receive.waiter is not None:
            receive.waiter.answer = receive.take(receive.waiter.rank)
            self.resume(receive.waiter, at)
            receive.waiter = None

    def start_receive(self, task: Task, request: Receive | ReceiveAny) -> StartedReceive:
        """Start a receive, and match it with a message."""
        if isinstance(request, ReceiveAny):
            return self.start_any(task, request)
        sequence = "" if task.kind else self.check_message(task, request, task.channel)
        receive = StartedReceive(request)
        mailbox = self.mailboxes[request.peer, task.rank, task.channel, sequence]
        if mailbox.messages:
            self.match_sent(mailbox.messages.popleft(), receive, task.now)
        else:
            mailbox.receives.append(receive)
        return receive

    def match_sent(self, message: SentMessage, receive: StartedReceive, now: float) -> None:
        """Connect a message that was sent before with its receive, which has just started."""
        self.match(message, receive, now)
        self.network.match(message, now)

    def match(self, message: SentMessage, receive: StartedReceive, now: float) -> None:
        """Connect a message with its receive, when the later one of the two starts."""
        message.matched_at, receive.message, receive.peer = now, message, message.sender
        if message.arrives_at == NEVER:
            message.receive = receive
        self.end_send(message)

    def end_send(self, message: SentMessage) -> None:
        """Resume the task that waits for a message if it is sent and its receive has started."""
        if message.waiter is not None and message.ends_at < NEVER:
            message.check_unchanged(message.waiter.rank)
            self.resume(message.waiter, message.ends_at)
            message.waiter = None

    def wait_for_receive(self, task: Task, receive: StartedReceive) -> bool:
        """Answer with the values of a message, now or when it arrives."""
        message = receive.message
        if message is not None and message.arrives_at < NEVER:
            task.answer = receive.take(task.rank)
            return self.continue_at(task, message.arrives_at)
        return self.suspend(task, receive)

    def wait_for_send(self, task: Task, message: SentMessage) -> bool:
        """Wait until a message has left this rank and its peer has started to receive."""
        if message.ends_at < NEVER:
            message.check_unchanged(task.rank)
            return self.continue_at(task, message.ends_at)
        # as over gloo, a send finishes only after its peer has started to receive; the simulated
        # transfer does not wait for that
        return self.suspend(task, message)

    def suspend(self, task: Task, pending: SentMessage | StartedReceive) -> bool:
        """Let a task wait for its peer, or continue with an error if it is not connected."""
        peer = pending.peer
        if peer is not None and self.is_lost(task, peer):
            task.error = self.lost_error(task, pending.request, peer)
            return True
        task.waits_for, pending.waiter = pending, task
        return False

    # receives from any rank

    def start_any(self, task: Task, request: ReceiveAny) -> StartedReceive:
        """Start a receive, and match it with the message that was sent first."""
        request.check(task.rank, self.world_size)
        receive, channel, mailboxes = StartedReceive(request), task.channel, []
        for sender in range(self.world_size):
            name = request.name_sequence(sender, task.rank, channel or "", task.caller)
            mailbox = self.mailboxes.get((sender, task.rank, channel, name))
            if mailbox is not None and mailbox.messages:
                mailboxes.append(mailbox)
        if mailboxes:
            first = min(mailboxes, key=lambda mailbox: mailbox.messages[0].number)
            self.match_sent(first.messages.popleft(), receive, task.now)
        else:
            key = task.rank, channel, request.describe_header()[0], task.caller
            self.any_receives.setdefault(key, deque()).append(receive)
        return receive

    def match_any(self, task: Task, message: SentMessage, channel: str | None) -> bool:
        """Match a message of a task with a receive; return whether there is one."""
        key = message.peer, channel, message.request.describe_header()[0], task.caller
        receives = self.any_receives.get(key)
        if not receives:
            return False
        self.match(message, receives.popleft(), task.now)
        if not receives:
            del self.any_receives[key]
        return True

    def fail_any_receives(self, at: float) -> bool:
        """Raise an error in the tasks that wait for a message, when no task can continue.

        Returns:
            Whether there was such a task. There is none if no rank has ended with an error.
        """
        error = next((each for each in self.errors if each is not None), None)
        receives = [each for receives in self.any_receives.values() for each in receives]
        is_lost = False
        for receive in receives if error is not None else ():
            task, receive.waiter = receive.waiter, None
            if task is not None and not task.is_done:
                task.error = WorkerLost(
                    f"rank {task.rank} waited for {receive.request.describe()}, which no rank has "
                    f"sent: {error}"
                )
                self.resume(task, at)
                is_lost = True
        return is_lost

    # ranks that crash or fail, and connections that break

    def crash(self, rank: int, at: float) -> None:
        """End a rank that has not ended before."""
        if self.main_tasks[rank].is_done:
            return
        error = WorkerLost(f"rank {rank} crashed at {at:g} s of the simulation")
        self.main_tasks[rank].now, self.main_tasks[rank].answer = at, None
        self.lose(rank, at, error)

    def lose(self, rank: int, at: float, error: WorkerLost) -> None:
        """End all tasks of a rank, and break its connections."""
        self.errors[rank] = error
        self.network.crash(rank)
        for task in [each for each in self.tasks if each.rank == rank]:
            task.is_done = True
            del self.tasks[task]
        self.disconnect(rank, None, at, error, is_whole_rank=True)

    def disconnect(
        self, rank: int, channel: str | None, at: float, error: WorkerLost, *,
        is_whole_rank: bool = False,
    ) -> None:  # fmt: skip
        """Break the connections of a rank, or those of the collectives of one of its channels.

        Tasks of other ranks that wait for them raise an error after the latency.
        """
        key = rank if is_whole_rank else (rank, channel)
        if key in self.broken:
            return
        self.broken[key] = at, error
        delay_s = self.network.of_rank[rank].delay_s
        for task in list(self.tasks):
            pending = task.waits_for
            if isinstance(pending, StartedReceive):
                message = pending.message
                # a message that is on its way arrives
                is_waiting = message is None or message.sent_at > at
            else:
                is_waiting = isinstance(pending, SentMessage)
            if is_waiting and pending.peer == rank and self.is_lost(task, rank):
                task.error = self.lost_error(task, pending.request, rank)
                pending.waiter = None
                self.resume(task, at + delay_s)

    def is_lost(self, task: Task, peer: int) -> bool:
        """Return whether a task has no connection to a rank any more."""
        return peer in self.broken or bool(task.kind and (peer, task.channel) in self.broken)

    def lost_error(self, task: Task, request: Message, peer: int) -> WorkerLost:
        """Return the error of a request whose peer is not connected."""
        at, error = self.broken.get(peer) or self.broken[peer, task.channel]
        return WorkerLost(
            f"rank {task.rank} waited for {request.describe()}, whose connections broke at "
            f"{at:g} s: {error}"
        )

    # comparison of the requests of ranks; processes wait until all ranks have opened a channel,
    # for which the simulation takes no time

    def check_collective(
        self, rank: int, caller: str, channel: str | None, request: Collective
    ) -> None:
        """Compare a collective with the same request of ranks that have made it already.

        Raises:
            RequestMismatch: they differ.
        """
        header = self.logs[rank].record_collective(channel or "", request, caller)
        self.compare(rank, channel_sequence(channel or ""), header, range(self.world_size))

    def check_message(self, task: Task, message: Send | Receive, channel: str | None) -> str:
        """Check a message, and compare it with the request of its peer if there is one.

        Returns:
            The name of its sequence; a message with a tag matches any of its sequence.
        """
        message.check(task.rank, self.world_size)
        sequence = message.sequence(task.rank, channel or "", task.caller)
        if message.tag is None:
            header = self.logs[task.rank].record_message(message, task.caller, channel or "")
            self.compare(task.rank, sequence, header, [message.peer])
        return sequence

    def check_channel(self, rank: int, caller: str, channel: str) -> None:
        """Compare the opening of a channel with ranks that have opened as many channels.

        Raises:
            RequestMismatch: such a rank has opened another one.
        """
        sequence = channel_sequence("")
        words = f"the opening of channel {channel}"
        header = self.logs[rank].record(sequence, words, caller=caller)
        self.compare(rank, sequence, header, range(self.world_size))

    def compare(self, rank: int, sequence: str, header: Header, peers: Sequence[int]) -> None:
        """Raise a RequestMismatch if a request differs from that of a peer that made it before."""
        for peer in peers:
            other = None if peer == rank else self.logs[peer].find(sequence, header.number)
            if other is not None:
                difference = find_difference((peer, rank), sequence, other, header)
                if difference:
                    raise mismatch(difference)
                if not header.sent and not header.expected:
                    # the header equals those of all ranks that have made the request
                    return

    def open_channel(self, task: Task, channel: str) -> None:
        """Open a channel, unless the rank has opened it before.

        Raises:
            RequestMismatch: another rank has opened another channel, or made another request.
        """
        opened = self.opened[task.rank]
        if self.world_size == 1 or channel in opened:
            return
        opened.append(channel)
        self.check_channel(task.rank, task.caller, channel)

    def describe_missing_channels(self) -> list[str]:
        """Describe which ranks have not opened a channel at the end; empty if a rank has failed."""
        if any(self.errors):
            return []
        longest = max(self.opened, key=len, default=[])
        return [
            f"rank {self.opened.index(longest)} opens channel {longest[len(opened)]}, and rank "
            f"{rank} does not"
            for rank, opened in enumerate(self.opened)
            if len(opened) < len(longest)
        ]

    def describe_other_channels(self) -> list[str]:
        """Describe messages that were sent on one channel while their receiver waits on another."""
        mailboxes, expected = self.mailboxes, defaultdict(list)
        for (sender, receiver, _, sequence), mailbox in mailboxes.items():
            if mailbox.receives:
                expected[sender, receiver].append(sequence)
        found = (
            describe_other_channel(sequence, other, (sender, receiver))
            for (sender, receiver, _, sequence), mailbox in mailboxes.items()
            if mailbox.messages
            for other in expected[sender, receiver]
        )
        return [each for each in found if each][:MAX_OTHERS]


def only_in_background(algorithm: Algorithm[Any]) -> Algorithm[Any]:
    """Check each request of a started algorithm, and return its result."""
    answer, lost = None, None
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


def run_after(before: Task, algorithm: Algorithm[Any]) -> Algorithm[Any]:
    """Run an algorithm after the previous request of its channel, even if that failed."""
    with suppress(WorkerLost):
        yield Wait(before)
    return (yield from algorithm)
