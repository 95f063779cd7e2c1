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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any

from gcnzc.exchange.agreement import describe_other_channels, find_difference, mismatch
from gcnzc.exchange.collectives import Collective, as_bytes
from gcnzc.exchange.engine import Engine, channel_sequence
from gcnzc.exchange.errors import WorkerLost
from gcnzc.exchange.requests import (
    Algorithm,
    CompareAndSet,
    Compute,
    First,
    Message,
    Now,
    Receive,
    Request,
    Send,
    Start,
    StoreRequest,
    Wait,
    WaitForKey,
    message_sequence,
    require,
)
from gcnzc.exchange.simulated_network import (
    NEVER,
    Fault,
    Link,
    Machine,
    Outcome,
    SentMessage,
    SimulatedNetwork,
    SimulatedTask,
    StartedReceive,
)
from gcnzc.exchange.store import StoredKeys

# new objects after which Python searches for cyclic garbage; the default is at most 2000
_GC_THRESHOLD = 200_000


def lockstep(
    algorithms: Sequence[Algorithm[Any]],
    link: Link | Sequence[Link] | SimulatedNetwork | None = None,
    links: Mapping[tuple[int, int], Link] | None = None,
    faults: Mapping[int, Sequence[Fault]] | None = None,
    store_s: float = 0.0,
) -> Outcome:
    """Run the algorithms of W ranks in one process, and simulate the time that they take.

    Args:
        algorithms: one for each rank, in the order of ranks. If only the time is needed, their
            requests may have tensors on the device "meta", which have a shape and a dtype, and no
            elements.
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
    with _rare_garbage_collection():
        return Simulation(algorithms, network, faults or {}, store_s).run()


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Let Python search for garbage more rarely: it would visit all pending requests each time."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], _GC_THRESHOLD) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Simulation:
    """The state of one run of `lockstep`: what happens when, and between ranks.

    A request to the store arrives there after half of the time of a request, and is executed at
    once; its answer takes the other half. Requests that arrive at the same time are executed in the
    order in which they were made, so ranks that run at the same time take turns.

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
        store_s: float,
    ) -> None:
        world_size = len(algorithms)
        for rank in faults:
            what = f"faults has rank {rank!r}, but there are {world_size} ranks"
            require(rank in range(world_size), what)
        require(0 <= store_s < NEVER, f"requests to the store that take {store_s} s")
        self.network, self.has_faults = network, bool(faults)
        # (time, number, task, or a function that is called with the time)
        self.events: list[tuple[float, int, SimulatedTask | Callable[[float], None]]] = []
        self.num_events = 0
        # tasks that have not ended
        self.tasks: dict[SimulatedTask, None] = {}
        # by sender, receiver, channel, and whether they are of collectives: the messages without a
        # receive, or the receives without a message
        self.queues: defaultdict[Any, deque[Any]] = defaultdict(deque)
        # by rank, or rank and channel of collectives, when its connections broke, and why
        self.broken: dict[int | tuple[int, str | None], tuple[float, WorkerLost]] = {}
        self.keys, self.half_s = StoredKeys(), store_s / 2
        # by key, the tasks that wait for it, and the numbers of their waits
        self.key_waits: defaultdict[str, list[tuple[SimulatedTask, int]]] = defaultdict(list)
        network.simulation = self
        self.ranks = [
            SimulatedRank(self, rank, world_size, Machine(faults.get(rank, ())))
            for rank in range(world_size)
        ]
        self.main_tasks = [
            self.add_task(SimulatedTask(rank, 0.0, algorithm))
            for rank, algorithm in enumerate(algorithms)
        ]
        for rank, each in enumerate(self.ranks):
            if each.machine.crashes_at < NEVER:
                self.schedule(each.machine.crashes_at, partial(self.crash, rank))

    def run(self) -> Outcome:
        """Run all tasks to their ends; see `lockstep`."""
        events, ranks, at = self.events, self.ranks, 0.0
        while events or self.fail_waits(at):
            at, _, event = heapq.heappop(events)
            if type(event) is SimulatedTask:
                ranks[event.rank].resume(event, at)
            else:
                event(at)  # type: ignore[operator]
        waiting = [each.describe_wait() for each in self.tasks if not each.is_abandoned]
        if waits := "; ".join([*waiting, *self.describe_missing_channels()]):
            others = self.describe_other_channels() if waiting else []
            raise mismatch("; ".join([f"{waits}, and none of them can continue", *others]))
        errors = [each.error for each in ranks]
        outcome = Outcome([], [], [], [each.ledger for each in ranks], errors)
        for task, error in zip(self.main_tasks, errors, strict=True):
            # the answer of a rank that crashed may be that of its last request
            outcome.results.append(task.answer if error is None else None)
            outcome.seconds.append(task.now)
            outcome.exchange_s.append(task.now - task.computed_s)
        return outcome

    # events, and tasks that wait for them

    def schedule(self, at: float, event: SimulatedTask | Callable[[float], None]) -> None:
        """Run a task, or call a function, at a time."""
        self.num_events += 1
        heapq.heappush(self.events, (at, self.num_events, event))

    def add_task(self, task: SimulatedTask) -> SimulatedTask:
        """Add a task, which runs from its time on."""
        self.tasks[task] = None
        self.schedule(task.now, task)
        return task

    def wake(self, task: SimulatedTask, at: float) -> None:
        """Schedule a task that waits, for a time or for its own if that is later."""
        task.waits_for = None
        task.num_waits += 1
        self.schedule(at if at > task.now else task.now, task)

    def answer(self, task: SimulatedTask, wait: int, answer: Any, at: float) -> None:
        """Answer a numbered wait of a task, unless that has ended, or its rank has crashed."""
        if task.num_waits == wait and not task.is_done:
            task.answer = answer
            self.wake(task, at)

    def fail_waits(self, at: float) -> bool:
        """Raise an error in tasks that wait for a key, when none can continue.

        Returns:
            Whether there was such a task. There is none if no rank has ended with an error.
        """
        lost = next((each.error for each in self.ranks if each.error is not None), None)
        if lost is None:
            return False
        waits = chain.from_iterable(self.key_waits.values())
        tasks = [task for task, wait in waits if task.num_waits == wait and not task.is_done]
        found = [task for task in tasks if task.waits_for.seconds is None]
        for task in found:
            key = task.waits_for.describe()
            task.error = WorkerLost(
                f"rank {task.rank} waited for {key}, which no rank has set: {lost}"
            )
            self.wake(task, at + self.half_s)
        return bool(found)

    # messages

    def find_queue(self, task: SimulatedTask, message: Message, channel: str | None) -> deque[Any]:
        """Return the queue of a message; one of an algorithm is compared with that of its peer.

        Messages of collectives are not received by `Receive` requests of algorithms.
        """
        rank, peer, kind = task.rank, message.peer, task.kind
        if not kind:
            self.record(rank, message.sequence(rank, channel), message, task.caller, [peer])
        sender, receiver = (rank, peer) if type(message) is Send else (peer, rank)
        return self.queues[sender, receiver, channel, bool(kind)]

    def send(self, task: SimulatedTask, request: Send, channel: str | None) -> SentMessage:
        """Send a message: occupy the links, and match it with a receive."""
        queue, values = self.find_queue(task, request, channel), request.values
        sender, receiver, num_bytes = task.rank, request.peer, values.nbytes
        copy = None if values.is_meta else as_bytes(values).clone()
        sent_at, first, last = self.network.send(sender, receiver, num_bytes, task.now)
        self.ranks[sender].ledger.add(task.kind or "Send", num_bytes, 1)
        message = SentMessage(request, sender, channel, copy, sent_at)
        if queue and type(queue[0]) is StartedReceive:
            self.match(message, queue.popleft(), task.now)
        else:
            queue.append(message)
        self.network.open(message, task.now)
        if sent_at == NEVER or sent_at > self.ranks[sender].machine.crashes_at:
            pass  # it has not left the rank yet, or when it crashes
        elif self.network.has_receiver_limit:
            self.schedule(first, lambda at: self.arrive(message, receiver, at, last))
        else:
            self.set_arrival(message, last)
        return message

    def receive(self, task: SimulatedTask, request: Receive, channel: str | None) -> StartedReceive:
        """Start a receive, and match it with a message."""
        queue, receive = self.find_queue(task, request, channel), StartedReceive(request, task.rank)
        if queue and type(queue[0]) is SentMessage:
            message = queue.popleft()
            self.match(message, receive, task.now)
            self.network.match(message, task.now)
        else:
            queue.append(receive)
        return receive

    def arrive(self, message: SentMessage, receiver: int, first: float, last: float) -> None:
        """Receive the first byte of a message over a link with a limit."""
        self.set_arrival(message, self.network.receive(receiver, message.num_bytes, first, last))

    def set_arrival(self, message: SentMessage, at: float) -> None:
        """Set when a message arrives, and resume the task that waits for it."""
        message.arrives_at = at
        receive, message.receive = message.receive, None
        if receive is not None and receive.task is not None:
            receive.task.answer = receive.take()
            self.wake(receive.task, at)
            receive.task = None

    def match(self, message: SentMessage, receive: StartedReceive, now: float) -> None:
        """Connect a message with its receive, when the later one of the two starts."""
        message.matched_at, receive.message = now, message
        if message.arrives_at == NEVER:
            message.receive = receive
        self.end_send(message)

    def end_send(self, message: SentMessage) -> None:
        """Resume the task that waits for a message if it is sent and its receive has started."""
        if message.task is not None and message.ends_at < NEVER:
            message.take()
            self.wake(message.task, message.ends_at)
            message.task = None

    # ranks that crash or fail, and connections that break

    def crash(self, rank: int, at: float) -> None:
        """End a rank that has not ended before."""
        task = self.main_tasks[rank]
        if not task.is_done:
            task.now, task.answer = at, None
            self.lose(rank, at, WorkerLost(f"rank {rank} crashed at {at:g} s of the simulation"))

    def lose(self, rank: int, at: float, error: WorkerLost) -> None:
        """End all tasks of a rank, and break its connections."""
        self.ranks[rank].error = error
        for task in [each for each in self.tasks if each.rank == rank]:
            task.is_done = True
            del self.tasks[task]
        self.disconnect(rank, rank, at, error)

    def disconnect(
        self, rank: int, what: int | tuple[int, str | None], at: float, error: WorkerLost
    ) -> None:
        """Break connections of a rank.

        Tasks of other ranks that wait for them raise an error after the latency.

        Args:
            rank: the rank.
            what: the rank, or the rank and the channel whose collectives have no connection.
            at: when.
            error: why.
        """
        if what in self.broken:
            return
        self.broken[what] = at, error
        delay_s = self.network.of_rank[rank].delay_s
        for task in list(self.tasks):
            pending = task.waits_for
            # a message that is on its way arrives
            if isinstance(pending, SentMessage | StartedReceive) and pending.is_waiting(rank, at):
                task.error = self.find_loss(task, pending)
                if task.error is not None:
                    pending.task = None
                    self.wake(task, at + delay_s)

    def find_loss(
        self, task: SimulatedTask, pending: SentMessage | StartedReceive
    ) -> WorkerLost | None:
        """Return the error of a task that waits for its peer, if that is not connected."""
        peer: Any = pending.peer
        broken = self.broken.get(peer)
        if broken is None and task.kind:
            broken = self.broken.get((peer, task.channel))
        if broken is None:
            return None
        return WorkerLost(
            f"rank {task.rank} waited for {pending.request.describe()}, whose connections broke at "
            f"{broken[0]:g} s: {broken[1]}"
        )

    # comparison of the requests of ranks; processes wait until all ranks have opened a channel,
    # for which the simulation takes no time

    def record(
        self, rank: int, sequence: str, request: Any, caller: str, peers: Sequence[int]
    ) -> None:
        """Add a request to a sequence, and compare it with those of peers that made it before.

        Raises:
            RequestMismatch: they differ.
        """
        header = self.ranks[rank].log.record(sequence, request, caller)
        for peer in peers:
            other = None if peer == rank else self.ranks[peer].log.find(sequence, header.number)
            if other is not None:
                difference = find_difference((peer, rank), sequence, other, header)
                if difference:
                    raise mismatch(difference)
                if not header.sent and not header.expected:
                    # the header equals those of all ranks that have made the request
                    return

    def describe_missing_channels(self) -> list[str]:
        """Describe which ranks have not opened a channel at the end; empty if a rank has failed."""
        opened = [each.opened for each in self.ranks]
        if any(each.error for each in self.ranks):
            return []
        longest = max(opened, key=len, default=[])
        return [
            f"rank {opened.index(longest)} opens channel {longest[len(own)]}, and rank {rank} does "
            "not"
            for rank, own in enumerate(opened)
            if len(own) < len(longest)
        ]

    def describe_other_channels(self) -> list[str]:
        """Describe messages that were sent on one channel while their receiver waits on another."""
        sent, received = (
            [
                (sender, receiver, channel)
                for (sender, receiver, channel, is_collective), queue in self.queues.items()
                if queue and type(queue[0]) is kind and not is_collective
            ]
            for kind in (SentMessage, StartedReceive)
        )
        return describe_other_channels(
            (message_sequence(*started), message_sequence(*expected), started[:2])
            for started in sent
            for expected in received
            if started[:2] == expected[:2]
        )


class SimulatedRank(Engine):
    """Executes the requests of one rank in a simulation; see `Engine`.

    Args:
        simulation: the time, and the other ranks.
        rank: this rank.
        world_size: the number of ranks.
        machine: its speed.
    """

    def __init__(
        self, simulation: Simulation, rank: int, world_size: int, machine: Machine
    ) -> None:
        super().__init__(rank, world_size)
        self.simulation, self.machine = simulation, machine
        self.error: WorkerLost | None = None  # with which the rank has ended
        self.opened: list[str] = []  # channels, in the order in which the rank has opened them
        self.last_in_channel: dict[str, SimulatedTask] = {}

    def resume(self, task: SimulatedTask, at: float) -> None:
        """Run a task at a time until it waits, others have to run first, or it has ended."""
        if task.is_done:
            # its rank has crashed
            return
        simulation = self.simulation
        if simulation.has_faults:
            resume_at = self.machine.resume_at(at)
            if resume_at > at:
                simulation.schedule(resume_at, task)
                return
        task.now = at
        self.advance(task)

    def continue_at(self, task: SimulatedTask, at: float) -> bool:
        """Set the time of a task that runs; return whether it may continue before all others."""
        if at <= task.now:
            return True
        simulation = self.simulation
        events = simulation.events
        if simulation.has_faults or (events and events[0][0] <= at):
            simulation.schedule(at, task)
            return False
        task.now = at
        return True

    def end(self, task: SimulatedTask) -> None:
        """See `Engine`; a rank whose algorithm failed is lost."""
        simulation = self.simulation
        task.is_done = True
        simulation.tasks.pop(task, None)
        waiting, task.waiting = task.waiting, []
        for resume in waiting:
            resume(task.now)
        if task.channel is None and task.error is not None:
            simulation.lose(self.rank, task.now, task.error)

    def end_collective(self, task: SimulatedTask, error: WorkerLost) -> None:
        """See `Engine`; the other ranks of a collective would wait for this one."""
        if task.kind and task.kind != "SendReceive":
            self.simulation.disconnect(self.rank, (self.rank, task.channel), task.now, error)

    def compute(self, task: SimulatedTask, request: Compute) -> bool:
        """See `Engine`."""
        end = self.machine.end_of(task.now, request.seconds)
        task.computed_s += end - task.now
        return self.continue_at(task, end)

    def read_clock(self, task: SimulatedTask, request: Now) -> bool:
        """See `Engine`."""
        task.answer = task.now
        return True

    def exchange(self, task: SimulatedTask, request: Collective) -> bool:
        """See `Engine`: continue with the messages of a collective."""
        kind = type(request).__name__
        if not task.kind:
            # otherwise `start_task` has counted it
            self.ledger.add(kind, requests=1)
        task.outer.append((task.algorithm, task.kind))
        task.kind = kind
        sequence, peers = channel_sequence(task.channel), range(self.world_size)
        self.simulation.record(self.rank, sequence, request, task.caller, peers)
        is_builtin = request.is_builtin(is_started=task.channel is not None)
        task.algorithm = request.messages(self.rank, self.world_size, is_builtin=is_builtin)
        return True

    def start_message(
        self, task: SimulatedTask, message: Any, channel: str | None, request: Request
    ) -> SentMessage | StartedReceive:
        """See `Engine`."""
        start = self.simulation.send if type(message) is Send else self.simulation.receive
        return start(task, message, channel)

    def open_channel(self, task: SimulatedTask, channel: str, request: Start) -> None:
        """See `Engine`."""
        if self.world_size > 1 and channel not in self.opened:
            self.opened.append(channel)
            words, peers = f"the opening of channel {channel}", range(self.world_size)
            self.simulation.record(self.rank, channel_sequence(""), words, task.caller, peers)

    def start_task(
        self,
        task: SimulatedTask,
        algorithm: Algorithm[Any],
        started: Any,
        channel: str,
        request: Start,
    ) -> SimulatedTask:
        """See `Engine`: a task that runs after the last one of its channel."""
        before = self.last_in_channel.get(channel)
        if before is not None and not before.is_done:
            algorithm = run_after(before, algorithm)
        new = SimulatedTask(self.rank, task.now, algorithm, channel, task.caller)
        if isinstance(started, Collective):
            new.kind = type(started).__name__
            self.ledger.add(new.kind, requests=1)
        self.last_in_channel[channel] = new
        return self.simulation.add_task(new)

    def wait_for(self, task: SimulatedTask, pending: Any, request: Request) -> bool:
        """See `Engine`: continue now, at a later time, or when the pending request ends."""
        simulation = self.simulation
        if pending.ends_at < NEVER:
            # as over gloo, a send finishes only after its peer has started to receive; the
            # simulated transfer does not wait for that
            if type(pending) is SimulatedTask:
                task.answer, task.error = pending.answer, pending.error
            else:
                task.answer = pending.take()
            return self.continue_at(task, pending.ends_at)
        if type(pending) is SimulatedTask:
            task.waits_for = pending
            pending.waiting.append(partial(self.hand_over, pending, task))
            return False
        loss = simulation.find_loss(task, pending) if simulation.broken else None
        if loss is not None:
            raise loss
        task.waits_for, pending.task = pending, task
        return False

    def hand_over(self, ended: SimulatedTask, task: SimulatedTask, at: float) -> None:
        """Resume a task that waits for one that has ended."""
        task.answer, task.error = ended.answer, ended.error
        self.simulation.wake(task, at)

    def wait_for_any(self, task: SimulatedTask, request: First) -> bool:
        """See `Engine`."""
        for index, pending in enumerate(request.pending):
            if pending.is_done:
                task.answer = index
                return self.continue_at(task, pending.now)
        task.waits_for = request
        for index, pending in enumerate(request.pending):
            pending.waiting.append(partial(self.simulation.answer, task, task.num_waits, index))
        self.limit(task, request, task.now)
        return False

    def limit(
        self, task: SimulatedTask, request: First | WaitForKey, now: float, delay_s: float = 0.0
    ) -> None:
        """Answer the wait of a task with None after its limit, and a delay."""
        simulation, wait, seconds = self.simulation, task.num_waits, request.seconds
        if seconds is not None and seconds < NEVER:
            simulation.schedule(
                now + seconds, lambda at: simulation.answer(task, wait, None, at + delay_s)
            )

    # requests to the store

    def use_store(self, task: SimulatedTask, request: StoreRequest) -> bool:
        """See `Engine`: the request arrives after half of its time."""
        task.waits_for = request
        execute: Any = self.begin_wait if isinstance(request, WaitForKey) else self.execute
        self.simulation.schedule(task.now + self.simulation.half_s, partial(execute, task, request))
        return False

    def execute(self, task: SimulatedTask, request: StoreRequest, at: float) -> None:
        """Execute a request that has arrived at the store."""
        simulation, end = self.simulation, at + self.simulation.half_s
        if isinstance(request, CompareAndSet) and task.is_done:
            return  # the rank has crashed, so its request does not reach the store
        answer = simulation.keys.execute(request)
        if isinstance(request, CompareAndSet) and answer == request.value:
            for waiting, wait in simulation.key_waits.pop(request.key, ()):
                simulation.answer(waiting, wait, answer, end)
        if not task.is_done:
            task.answer = answer
            simulation.wake(task, end)

    def begin_wait(self, task: SimulatedTask, request: WaitForKey, at: float) -> None:
        """Answer a wait if its key exists; otherwise store the wait until the key is set."""
        simulation = self.simulation
        (value,) = simulation.keys.read([request.key])
        if value:
            simulation.answer(task, task.num_waits, value, at + simulation.half_s)
        else:
            simulation.key_waits[request.key].append((task, task.num_waits))
            self.limit(task, request, at, simulation.half_s)


def run_after(before: SimulatedTask, algorithm: Algorithm[Any]) -> Algorithm[Any]:
    """Run an algorithm after the previous request of its channel, even if that failed."""
    with suppress(WorkerLost):
        yield Wait(before)
    return (yield from algorithm)
