"""Find accesses to memory that no event, stream order, lock or queue puts in order.

Each host thread and each stream is an actor with a vector clock: the times of all actors' work that
is known to precede its next operation. An operation at time t of actor A precedes what an actor B
does now if B's clock has at least t for A. Two accesses to a byte, of which one is a write, must be
ordered in this way. Otherwise they are a race, whatever order they were executed in.

Method: Lamport, "Time, clocks, and the ordering of events in a distributed system" (1978). A write
replaces the accesses within its range that precede it, as in FastTrack (Flanagan and Freund, 2009).
"""

import bisect
from dataclasses import dataclass

MAX_RACES = 20  # of a run that are kept


class Actor:
    """A host thread or a stream."""

    def __init__(self, index, name):
        self.index, self.name = index, name
        self.clock = {index: 1}

    def release(self):
        """Return the clock of all work so far, which does not cover later work of this actor."""
        seen = self.clock.copy()
        self.clock[self.index] += 1
        return seen

    def acquire(self, clock):
        """Order later work of this actor after the work that a clock covers."""
        join(self.clock, clock)


def join(clock, other):
    """Let a clock cover what another one covers."""
    for index, time in other.items():
        if clock.get(index, 0) < time:
            clock[index] = time


@dataclass(frozen=True)
class Race:
    """Two accesses that are not ordered."""

    memory: str
    begin: int  # first byte of the memory that both access
    end: int
    first: str  # operation, and the thread or stream that executes it
    second: str

    def __str__(self):
        return (
            f"bytes {self.begin} to {self.end} of {self.memory}: {self.second} is not ordered "
            f"after {self.first}"
        )


class Memory:
    """A range of memory, and the accesses to it that later ones must be ordered with."""

    def __init__(self, name, begin, end):
        self.name, self.begin, self.end = name, begin, end
        # (begin, end, index of the actor, whether it writes) -> (time of the actor, operation)
        self.accesses = {}
        # A clock that covers the accesses of host threads that held a reference to the memory.
        # Reference counts are atomic, so the thread that drops the last reference comes after them.
        self.users = {}


class Checker:
    """The accesses of one run."""

    def __init__(self):
        self.actors, self.races = [], []
        self._begins, self._memories = [], []

    def actor(self, name):
        """Return a new actor."""
        self.actors.append(Actor(len(self.actors), name))
        return self.actors[-1]

    def add_memory(self, name, begin, num_bytes):
        """Track a range, of which nobody knows earlier accesses."""
        memory = Memory(name, begin, begin + num_bytes)
        place = bisect.bisect(self._begins, begin)
        self._begins.insert(place, begin)
        self._memories.insert(place, memory)
        return memory

    def find(self, address):
        """Return the tracked memory at an address, or None."""
        place = bisect.bisect(self._begins, address) - 1
        if place < 0 or address >= self._memories[place].end:
            return None
        return self._memories[place]

    def access(self, actor, begin, end, is_write, operation):
        """An actor reads or writes the bytes from `begin` to `end` of tracked memory."""
        memory = self.find(begin)
        if memory is None:
            return None
        clock, accesses, is_covered = actor.clock, memory.accesses, []
        for key, (time, earlier) in accesses.items():
            its_begin, its_end, index, was_write = key
            if its_begin >= end or begin >= its_end or not (is_write or was_write):
                continue
            if clock.get(index, 0) < time:
                place = max(begin, its_begin), min(end, its_end)
                self._report(memory, *place, was_write, earlier, index, is_write, operation, actor)
            elif is_write and begin <= its_begin and its_end <= end:
                # a later access that races with `earlier` also races with this write
                is_covered.append(key)
        for key in is_covered:
            del accesses[key]
        accesses[begin, end, actor.index, is_write] = (clock[actor.index], operation)
        return memory

    def free(self, memory, actor, clock):
        """Give memory back to its allocator, whose next user comes after `clock` only."""
        for (begin, end, index, was_write), (time, earlier) in memory.accesses.items():
            if clock.get(index, 0) < time:
                what = (was_write, earlier, index, True, "the next user", actor)
                self._report(memory, begin, end, *what)
        place = bisect.bisect(self._begins, memory.begin) - 1
        del self._begins[place], self._memories[place]

    def _report(self, memory, begin, end, was_write, earlier, index, is_write, operation, actor):
        if len(self.races) >= MAX_RACES:
            return
        kinds = ("a read", "a write")
        self.races.append(
            Race(
                memory.name,
                begin - memory.begin,
                end - memory.begin,
                f"{kinds[was_write]} by {earlier} on {self.actors[index].name}",
                f"{kinds[is_write]} by {operation} on {actor.name}",
            )
        )
