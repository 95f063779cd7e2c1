"""A simulated device whose streams execute work as late or as early as events allow.

Its memory is the host's. Work that is queued is kept with the addresses of its tensors and not with
the tensors, as on a GPU; whatever is still queued when memory is used again then reads or writes
what is now another's. A schedule says which stream goes on, where several may.
"""

import ctypes
import itertools
import mmap
import random
import threading
import weakref

import torch

POISON = 0xFF  # of floating point NaN, of integers -1


class Device:
    """See the module. Implements `gcnzc.system.streams.Streams`.

    Args:
        schedule: "eager" does work when it is queued, "lazy" when somebody waits for it;
            "not NAME" is eager but for the stream NAME; a number is the seed of a random choice.
    """

    # not where the host's tensors are, by name
    device = torch.device("cpu", 0)

    def __init__(self, schedule="eager"):
        self.schedule = schedule
        self.random = random.Random(schedule)
        self.lock = threading.RLock()
        self.streams = []
        self.regions = []  # all memory, which is never given back
        self.faults = []  # what work ran into that found other memory than it was given
        self.own = self.new(name="model")

    def new(self, priority=0, name=None):
        with self.lock:
            stream = Stream(self, name or f"side {len(self.streams)}")
            self.streams.append(stream)
            return stream

    def current(self):
        return self.own

    def device_memory(self, num_bytes, stream):
        memory = self.memory(num_bytes)
        address = memory.data_ptr()
        # another borrower of the device's allocator, in the order of the stream it belongs to
        end = weakref.finalize(memory, stream.queue, lambda: poison(address, num_bytes))
        end.atexit = False
        return memory

    def host_memory(self, num_bytes):
        memory = self.memory(num_bytes)
        address = memory.data_ptr()
        # another borrower of the host's memory, at once
        end = weakref.finalize(memory, poison, address, num_bytes)
        end.atexit = False
        return memory

    def memory(self, num_bytes):
        region = mmap.mmap(-1, num_bytes + -num_bytes % mmap.PAGESIZE)
        self.regions.append(region)
        memory = torch.frombuffer(region, dtype=torch.uint8)[:num_bytes].fill_(POISON)
        return at(memory.data_ptr(), memory)

    def go_on(self):
        """Do what the schedule lets be done now."""
        with self.lock:
            if self.schedule == "lazy":
                return
            while True:
                able = [stream for stream in self.streams if stream.is_able()]
                if isinstance(self.schedule, int):
                    able = able and self.random.choice([[], able])
                else:
                    able = [stream for stream in able if f"not {stream.name}" != self.schedule]
                if not able:
                    return
                self.random.choice(able).step()

    def finish(self):
        """Do all that is left."""
        with self.lock:
            while able := [stream for stream in self.streams if stream.is_able()]:
                self.random.choice(able).step()
            assert not any(stream.items for stream in self.streams), "streams wait for each other"


class Stream:
    def __init__(self, device, name):
        self.device, self.name = device, name
        self.items = []

    def do(self, work, *args):
        # as on a GPU, what is queued knows addresses, and keeps no memory of the device
        raw = [at(w.data_ptr(), w) if isinstance(w, torch.Tensor) else w for w in args]
        self.queue(lambda: work(*raw))

    def queue(self, item):
        with self.device.lock:
            self.items.append(item)
            self.device.go_on()

    def record(self):
        event = Event(self)
        self.queue(event)
        return event

    timed_event = record

    def wait(self, event):
        self.queue(Wait(event))

    def is_able(self):
        return bool(self.items) and not (
            isinstance(self.items[0], Wait) and not self.items[0].event.past
        )

    def step(self):
        item = self.items.pop(0)
        if isinstance(item, Event):
            item.past = True
        elif not isinstance(item, Wait):
            try:
                item()
            except Exception as error:  # of any kind, as a device's faults are
                self.device.faults.append(error)


class Wait:
    def __init__(self, event):
        self.event = event


class Event:
    ticks = itertools.count()

    def __init__(self, stream):
        self.stream, self.past, self.tick = stream, False, next(Event.ticks)

    def is_done(self):
        self.stream.device.go_on()
        return self.past

    def synchronize(self):
        with self.stream.device.lock:
            while not self.past:
                self.force()

    def force(self):
        """One step towards this event, of those that are needed for it."""
        stream = self.stream
        if stream.is_able():
            stream.step()
        else:
            stream.items[0].event.force()

    def time_s(self):
        self.synchronize()
        return float(self.tick)

    def seconds_to(self, later):
        return later.time_s() - self.time_s()


def at(address, like):
    """A tensor like another, that refers to memory and does not keep it."""
    num_bytes = like.untyped_storage().nbytes() - (address - like.untyped_storage().data_ptr())
    if num_bytes == 0:
        return torch.empty_like(like)
    bytes_there = (ctypes.c_char * num_bytes).from_address(address)
    whole = torch.frombuffer(bytes_there, dtype=torch.uint8)
    size = like.dtype.itemsize
    words = whole[: num_bytes // size * size].view(like.dtype)
    return words.as_strided(like.shape, like.stride())


def poison(address, num_bytes):
    ctypes.memset(address, POISON, num_bytes)
