"""Threads of which one runs at a time, in an order that a seed chooses.

`Schedule` replaces locks, queues, executors and the functions of `threading` in the modules under
test. Each of these calls, and each call of a `checked_device.Device`, is a point at which another
thread may go on. A run is therefore the same each time for the same seed. As they hand over work,
they also hand over the clocks of `happens_before`:

    these                                         precede
    what a thread did before it released a lock   what the next one does that acquires it
    ... before it appended to a deque             what the one does that reads or removes the item
    ... before it submitted a task                the task
    a task                                        what a thread does that takes its result
    a thread                                      what a thread does that has joined it
    all that threads did with memory they refer   what the thread does that drops the last reference
    to, or until they removed it from a deque

Two threads that only happened to run one after the other are not ordered. Work that two threads
queue on one stream is: in the order of this run, as CUDA executes it.
"""

import collections
import random
import threading
from concurrent.futures import CancelledError
from contextlib import contextmanager

import torch

SWITCH_SHARES = (0.05, 0.15, 0.5)  # of the points, at which another thread goes on
MAX_POINTS = 100_000  # of a run


class Deadlock(RuntimeError):
    """No thread can go on, or a run does not end."""


class Stopped(BaseException):
    """A thread of a run that has failed."""


class Thread:
    """A thread of a schedule; has the attributes of `threading.Thread` that are used."""

    def __init__(self, schedule, name, work=None):
        self.schedule, self.name = schedule, name
        self.actor = schedule.checker.actor(f"thread {name}")
        self.is_ready = None  # what it waits for
        self.is_ended = work is None
        # held until the other thread releases them
        self.may_run, self.has_stopped = threading.Lock(), threading.Lock()
        self.may_run.acquire()
        self.has_stopped.acquire()
        if work is not None:
            self.actor.acquire(schedule.current.actor.release())
            # only the thread's own frame refers to the work, and so to what the work refers to
            threading.Thread(target=self._run, args=([work],), daemon=True).start()

    def join(self, _timeout=None):
        self.schedule.wait_until(lambda: self.is_ended)
        self.schedule.current.actor.acquire(self.actor.release())

    def _run(self, works):
        self.may_run.acquire()
        work = works.pop()
        try:
            if not self.schedule.is_stopped:
                work()
        except Stopped:
            pass
        except BaseException as error:
            self.schedule.errors.append(error)
        del work
        self.is_ended = True
        if self.schedule.is_stopped:
            self.has_stopped.release()
        else:
            self.schedule.end(self)


class Schedule:
    """The threads of one run, of which the first is the one that creates it.

    Args:
        seed: of the order.
        checker: of `happens_before`.
        is_left_out: whether to leave out an operation, of which it is given the kind and a name.
    """

    active = None  # that the replacements use

    def __init__(self, seed, checker, is_left_out=lambda *_: False):
        self.random, self.checker, self.is_left_out = random.Random(seed), checker, is_left_out
        self.switch_share = self.random.choice(SWITCH_SHARES)
        self.errors, self.num_points = [], 0
        self.is_switching = self.is_stopped = False
        self.current = Thread(self, "main")
        self.threads = [self.current]

    def start(self, name, work):
        """Start a thread."""
        thread = Thread(self, name, work)
        self.threads.append(thread)
        return thread

    def switch(self):
        """Let another thread go on, at random."""
        self.num_points += 1
        if self.num_points > MAX_POINTS:
            raise Deadlock("a run does not end")
        may_switch = len(self.threads) > 1 and self.random.random() < self.switch_share
        if may_switch and not self.is_stopped:
            self._go_on()

    def yield_now(self):
        """Let any thread go on."""
        if len(self.threads) > 1 and not self.is_stopped:
            self._go_on()

    def wait_until(self, is_ready):
        """Let other threads go on until `is_ready()`."""
        me = self.current
        if not is_ready():
            if self.is_stopped:
                raise Stopped
            me.is_ready = is_ready
            try:
                self._go_on()
            finally:
                me.is_ready = None

    def _go_on(self):
        # a finalizer may come here from within
        if self.is_switching:
            return
        me, chosen = self.current, self._choose()
        if chosen is not me:
            self.current = chosen
            chosen.may_run.release()
            me.may_run.acquire()
            if self.is_stopped and me is not self.threads[0]:
                raise Stopped
            if self.errors and isinstance(self.errors[-1], Deadlock):
                raise self.errors[-1]

    def _choose(self):
        self.is_switching = True
        able = [each for each in self.threads if each.is_ready is None or each.is_ready()]
        self.is_switching = False
        if not able:
            self.errors.append(Deadlock("no thread can go on"))
            raise self.errors[-1]
        return able[0] if len(able) == 1 else self.random.choice(able)

    def stop(self):
        """End all other threads of a run, wherever they are."""
        self.is_stopped = True
        for thread in self.threads[1:]:
            self.current = thread
            thread.may_run.release()
            thread.has_stopped.acquire()
        self.current = self.threads[0]
        del self.threads[1:]

    def end(self, thread):
        """End a thread, which is the current one."""
        self.threads.remove(thread)
        try:
            chosen = self._choose()
        except Deadlock:
            chosen = self.threads[0]
        self.current = chosen
        chosen.may_run.release()

    def join_all(self):
        """Run all other threads to their end, and raise their first error."""
        for thread in list(self.threads):
            if thread is not self.current:
                thread.join()
        if self.errors:
            raise self.errors[0]


def current():
    """Return the schedule that runs."""
    return Schedule.active


class Lock:
    """Replaces `threading.Lock` and `ForkSafeLock`."""

    def __init__(self):
        self.schedule = current()
        self.clock, self.is_held, self.left_out_by = {}, False, []

    def acquire(self, blocking=True):
        schedule = self.schedule
        schedule.switch()
        if schedule.is_left_out("lock", ""):
            self.left_out_by.append(schedule.current)
            return True
        if self.is_held:
            if not blocking:
                return False
            schedule.wait_until(lambda: not self.is_held)
        self.is_held = True
        schedule.current.actor.acquire(self.clock)
        return True

    def release(self):
        if self.schedule.current in self.left_out_by:
            self.left_out_by.remove(self.schedule.current)
            return
        self.clock = self.schedule.current.actor.release()
        self.is_held = False
        self.schedule.switch()

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *_):
        self.release()


class Deque(collections.deque):
    """Replaces `collections.deque`, whose methods are atomic."""

    def __init__(self, items=()):
        super().__init__()
        self.schedule, self.clocks = current(), collections.deque()
        for item in items:
            self.append(item)

    def append(self, item):
        schedule = self.schedule
        schedule.switch()
        if schedule.is_left_out("append", ""):
            return
        actor = schedule.current.actor
        memory = getattr(item, "memory", None)
        if isinstance(memory, torch.Tensor):
            # a pool gets memory back, whose last reference this thread has dropped
            for each in tracked(schedule.checker, memory):
                actor.acquire(each.users)
        self.clocks.append(actor.release())
        super().append(item)

    def popleft(self):
        self.schedule.switch()
        actor = self.schedule.current.actor
        actor.acquire(self.clocks.popleft())
        item = super().popleft()
        for memory in tracked(self.schedule.checker, item):
            # this thread drops the reference that the deque had
            memory.users.update(merged(memory.users, actor.clock))
        actor.release()
        return item

    def __getitem__(self, place):
        self.schedule.current.actor.acquire(self.clocks[place])
        return super().__getitem__(place)

    def __iter__(self):
        for clock in self.clocks:
            self.schedule.current.actor.acquire(clock)
        return super().__iter__()

    def clear(self):
        self.clocks.clear()
        super().clear()


def merged(clock, other):
    """Return the clock that covers what both cover."""
    return {index: max(clock.get(index, 0), other.get(index, 0)) for index in clock | other}


def tracked(checker, item):
    """Yield the tracked memories of the tensors in an item of lists and tuples."""
    if isinstance(item, torch.Tensor):
        memory = checker.find(item.data_ptr()) if item.numel() else None
        if memory is not None:
            yield memory
    elif isinstance(item, (list, tuple)):
        for each in item:
            yield from tracked(checker, each)


class Future:
    """The result of a task of `Executor`."""

    def __init__(self, schedule):
        self.schedule, self.state = schedule, "pending"
        self.value = self.error = None
        self.clock = {}

    def run(self, function, args):
        try:
            self.value = function(*args)
        except BaseException as error:
            self.error = error
        self.state = "done"
        self.clock = self.schedule.current.actor.release()

    def cancel(self):
        self.state, self.error = "cancelled", CancelledError()

    def cancelled(self):
        return self.state == "cancelled"

    def done(self):
        return self.state != "pending"

    def result(self, timeout=None):
        self.schedule.switch()
        self.schedule.wait_until(self.done)
        self.schedule.current.actor.acquire(self.clock)
        if self.error is not None:
            raise self.error
        return self.value


class Executor:
    """Replaces `ThreadPoolExecutor`."""

    def __init__(self, max_workers, thread_name_prefix="", initializer=None):
        self.schedule, self.max_workers = current(), max_workers
        self.name, self.queue = thread_name_prefix, collections.deque()
        self.num_threads, self.is_shut = 0, False

    def submit(self, function, *args):
        schedule = self.schedule
        future = Future(schedule)
        self.queue.append((future, function, args, schedule.current.actor.release()))
        if self.num_threads < self.max_workers:
            schedule.start(f"{self.name}_{self.num_threads}", self._work)
            self.num_threads += 1
        schedule.switch()
        return future

    def shutdown(self, wait=True, cancel_futures=False):
        self.is_shut = True
        while cancel_futures and self.queue:
            self.queue.popleft()[0].cancel()
        if wait:
            for thread in list(self.schedule.threads):
                if thread.name.startswith(f"{self.name}_"):
                    thread.join()

    def _work(self):
        schedule = self.schedule
        while True:
            schedule.wait_until(lambda: self.queue or self.is_shut)
            if not self.queue:
                return
            future, function, args, clock = self.queue.popleft()
            schedule.current.actor.acquire(clock)
            future.run(function, args)
            # as an executor does, so that the result is the only reference to what it refers to
            del future, function, args


class Channel:
    """A queue of a program, by which threads pass batches."""

    def __init__(self):
        self.schedule, self.items, self.is_closed = current(), collections.deque(), False

    def put(self, item):
        self.items.append((item, self.schedule.current.actor.release()))
        del item
        self.schedule.switch()

    def close(self):
        self.is_closed = True

    def get(self):
        """Return the next item; None if there are no more."""
        self.schedule.wait_until(lambda: self.items or self.is_closed)
        if not self.items:
            return None
        item, clock = self.items.popleft()
        self.schedule.current.actor.acquire(clock)
        return item


class Threading:
    """Replaces the module `threading`."""

    Lock = Lock

    @staticmethod
    def current_thread():
        return current().current

    @staticmethod
    def enumerate():
        return list(current().threads)


@contextmanager
def replaced(*replacements):
    """Replace attributes of modules: tuples of the module, the name and the new value."""
    before = [(module, name, getattr(module, name)) for module, name, _ in replacements]
    for module, name, value in replacements:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
