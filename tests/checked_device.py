"""A simulated device whose accesses to memory a happens-before checker watches.

Implements `gcnzc.system.streams.Streams`. Its memory is the host's, and work is executed when it is
queued: what matters is which work is ordered after which, not when it runs. Whether a query finds
an event done is random, unless the thread knows that it is done.

Accesses are recorded in three ways: those of torch's operations by their schemas, in a dispatch
mode (`Watch`); those of gcnzc's kernels, which torch does not see, by the functions that
`replacements` lists; and those that a test states (`Device.read`, `Device.write`). Only memory that
the device allocates counts: its own, and the host's for asynchronous copies. An access is that of
all bytes from a tensor's first to its last, so that interleaved columns overlap. Accesses through
`Tensor.numpy()` and `Tensor.tolist()`, which torch does not dispatch, are not seen. When the last
reference to memory is dropped, it belongs to its allocator. Work that is queued on its stream later
may then use memory of the device. The thread that dropped it, and what comes after, may use memory
of the host.

Any call that waits for, records or queries an event, that acquires a lock or appends to a deque can
be left out: `without` is its key, and `calls` has the keys of those that were made.
"""

import ctypes
import sys
import weakref
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import torch
from bits import tensors_of
from cooperative_threads import Deque, Executor, Lock, Schedule, Threading
from happens_before import Checker, join
from torch.utils._python_dispatch import TorchDispatchMode

from gcnzc.features import cache as features_cache
from gcnzc.features import table
from gcnzc.kernels import buffers
from gcnzc.kernels.sample import HopSampler
from gcnzc.loader import loader, transfer
from gcnzc.sampling import hetero

ROOT = Path(__file__).parents[1]
# calls of this code are left out: all that shares memory with streams
CODE = tuple(
    f"{ROOT}/gcnzc/{name}"
    for name in ("loader/transfer.py", "kernels/buffers.py", "features/", "exchange/")
)
# of these, the line that called them is a part of the key
LOOPS = ("_wait", "<lambda>", "<listcomp>", "<genexpr>")
ARENA_BYTES = 1 << 23
LINE_BYTES = 64


class Failed(RuntimeError):
    """What the device raises where a program lets it fail."""


class Device:
    """See the module.

    Args:
        seed: of the order of threads, and of what queries answer.
        without: the key of the call to leave out.
    """

    # not where the host's tensors are, by name
    device = torch.device("cpu", 0)
    arena = bytearray(ARENA_BYTES)  # of all runs, since each has its own checker

    def __init__(self, seed, without=None):
        self.checker = Checker()
        self.schedule = Schedule(seed, self.checker, self.is_left_out)
        self.random = self.schedule.random
        self.without, self.calls = without, set()
        self.fails_in = -1  # the number of calls that allocate or launch before one that fails
        self.num_bytes, self.num_streams = 0, 0
        self.watched = set()  # threads whose operations of torch are watched, not only queued work
        self.executing = {}  # of each thread, the stream on which it executes work
        self.own = self.new(name="model")
        self.current_streams = {}  # of each thread

    @property
    def races(self):
        return self.checker.races

    def new(self, priority=0, name=None):
        if name is None:
            self.num_streams += 1
            name = f"side {self.num_streams}"
        return Stream(self, name)

    def current(self):
        thread = self.schedule.current
        return self.executing.get(thread) or self.current_streams.get(thread, self.own)

    def set_current(self, stream):
        """Set the current stream of this thread."""
        self.current_streams[self.schedule.current] = stream

    def device_memory(self, num_bytes, stream):
        self.may_fail()
        memory, owner = self._allocate(num_bytes)
        range_ = self._track(memory, f"memory of {stream.name}")
        weakref.finalize(owner, self._free_on, range_, stream).atexit = False
        return memory

    def host_memory(self, num_bytes):
        self.may_fail()
        memory, owner = self._allocate(num_bytes)
        range_ = self._track(memory, "host memory")
        weakref.finalize(owner, self._free_on_host, range_).atexit = False
        return memory

    def memory(self, like):
        """Return a copy of a tensor on the device, whose memory is not freed during the run."""
        memory = self._allocate(like.nbytes)[0].view(like.dtype).view(like.shape).copy_(like)
        self._track(memory, "memory")
        return memory

    def _allocate(self, num_bytes):
        begin = self.num_bytes
        # never the same memory twice in a run, so that a range is one memory
        self.num_bytes += num_bytes + -num_bytes % LINE_BYTES + LINE_BYTES
        # Only the tensor's storage refers to the owner. A finalizer of the tensor itself would run
        # before those of a cycle of garbage that refers to it; its memory is freed after them.
        owner = (ctypes.c_char * num_bytes).from_buffer(self.arena, begin)
        return torch.frombuffer(owner, dtype=torch.uint8), owner

    def _track(self, tensor, name):
        begin = tensor.data_ptr()
        return self.checker.add_memory(f"{name} {begin}", begin, tensor.nbytes)

    def _free_on(self, memory, stream):
        actor = self.schedule.current.actor
        clock = stream.actor.clock.copy()
        join(clock, actor.clock)
        self.checker.free(memory, stream.actor, clock)

    def _free_on_host(self, memory):
        actor = self.schedule.current.actor
        actor.acquire(memory.users)
        self.checker.free(memory, actor, actor.clock)

    def may_fail(self):
        """Raise `Failed` if it is the turn of this call."""
        self.schedule.switch()
        self.fails_in -= 1
        if self.fails_in == -1:
            raise Failed("CUDA error: out of memory")

    def read(self, *tensors):
        """The current thread, or the stream whose work it executes, reads tensors."""
        for tensor in tensors:
            self.access(tensor, False, "a reader")

    def write(self, *tensors):
        """The current thread, or the stream whose work it executes, writes tensors."""
        for tensor in tensors:
            self.access(tensor, True, "a writer")

    def access(self, tensor, is_write, operation):
        thread = self.schedule.current
        stream = self.executing.get(thread)
        actor = thread.actor if stream is None else stream.actor
        for begin, end in spans(tensor):
            memory = self.checker.access(actor, begin, end, is_write, operation)
            if memory is not None and actor is thread.actor:
                join(memory.users, actor.clock)

    def is_left_out(self, kind, name):
        """Whether the call of the code under test is left out."""
        frame, lines = sys._getframe(1), []
        while frame is not None and frame.f_code.co_filename in HELPERS:
            frame = frame.f_back
        while frame is not None and (name_of_file := checked_file(frame.f_code)):
            lines.append(f"{name_of_file}:{frame.f_lineno}")
            if frame.f_code.co_name not in LOOPS:
                break
            frame = frame.f_back
        if not lines:
            return False
        key = (kind, name, *lines)
        self.calls.add(key)
        return key == self.without


class Stream:
    def __init__(self, device, name):
        self.device, self.name = device, name
        self.kind = name.split(" of ")[0]
        self.actor = device.checker.actor(f"stream {name}")

    def do(self, work, *args):
        device = self.device
        device.may_fail()
        self.queue()
        thread = device.schedule.current
        before = device.executing.get(thread)
        device.executing[thread] = self
        try:
            with nullcontext() if thread in device.watched else Watch(device):
                work(*args)
        finally:
            device.executing[thread] = before

    def record(self):
        self.device.schedule.switch()
        is_left_out = self.device.is_left_out("record", self.kind)
        return Event(self, {} if is_left_out else self.queue().release())

    def timed_event(self):
        return Event(self, self.queue().release())

    def wait(self, event):
        self.device.schedule.switch()
        # work of one stream is in order without events
        name = f"{self.kind} for {event.stream.kind}"
        if event.stream is self or not self.device.is_left_out("wait", name):
            self.queue().acquire(event.clock)

    def queue(self):
        """Order this stream's later work after what this thread did; return its actor."""
        self.actor.acquire(self.device.schedule.current.actor.release())
        return self.actor


class Event:
    def __init__(self, stream, clock):
        self.stream, self.clock = stream, clock

    def is_done(self):
        device = self.stream.device
        device.schedule.switch()
        if device.is_left_out("query", self.stream.kind):
            return True
        actor = device.schedule.current.actor
        is_known = all(actor.clock.get(index, 0) >= time for index, time in self.clock.items())
        if is_known or device.random.random() < 0.5:
            actor.acquire(self.clock)
            return True
        return False

    def synchronize(self):
        device = self.stream.device
        device.schedule.switch()
        if not device.is_left_out("synchronize", self.stream.kind):
            device.schedule.current.actor.acquire(self.clock)

    def time_s(self):
        self.synchronize()
        return 0.0

    def seconds_to(self, later):
        later.synchronize()
        return 0.0


@cache
def checked_file(code):
    """Return the name of the file of a function if its calls can be left out."""
    return Path(code.co_filename).name if code.co_filename.startswith(CODE) else ""


def spans(tensor):
    """Yield begin and end of the bytes of a tensor."""
    if tensor.layout == torch.sparse_csr:
        for part in (tensor.crow_indices(), tensor.col_indices(), tensor.values()):
            yield from spans(part)
    elif tensor.numel():
        begin = tensor.data_ptr()
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        yield begin, begin + (last + 1) * tensor.element_size()


class Watch(TorchDispatchMode):
    """Records the accesses of torch's operations in this thread."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __enter__(self):
        self.thread = self.device.schedule.current
        self.device.watched.add(self.thread)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.device.watched.discard(self.thread)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for place, name, is_write in arguments(func):
            value = args[place] if place < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor):
                    self.device.access(tensor, is_write, func.name())
        return result


_arguments = {}


def arguments(func):
    """Return place, name and whether it is written of each tensor that an operation accesses."""
    found = _arguments.get(func)
    if found is None:
        found = _arguments[func] = []
        name = func.name().partition(".")[0]
        # these change what a tensor refers to, or take only its shape
        has_no_access = name in ("aten::set_", "aten::resize_") or name.endswith("_like")
        has_no_access |= name.startswith("aten::new_")
        for place, argument in enumerate(() if has_no_access else func._schema.arguments):
            alias = argument.alias_info
            if "Tensor" in str(argument.type) and (alias is None or alias.is_write):
                found.append((place, argument.name, alias is not None))
    return found


def watching(function, written):
    """Return a function that does what `function` does, and records accesses to its arguments.

    Args:
        function: a kernel that is called with tensors.
        written: returns the tensors that it has written, of its result.
    """

    def watched(*args, **kwargs):
        device = Schedule.active.device
        result = function(*args, **kwargs)
        outputs = written(result)
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and not any(value is each for each in outputs):
                device.access(value, False, function.__name__)
        for tensor in outputs:
            device.access(tensor, True, function.__name__)
        return result

    return watched


def gather_cached(rows, ids, cached, out=None, *, scales=None, scale_columns=None, config=None):
    """What the kernel of the cache reads and computes."""
    device = Schedule.active.device
    device.read(cached.slots, cached.memory)
    return table.gather(rows, ids, out, scales=scales, scale_columns=scale_columns, threads=1)


def replacements():
    """Return the modules, names and values to replace while programs run."""
    return [
        *((transfer, "threading", Threading), (transfer, "deque", Deque)),
        (loader, "threading", Threading),
        (loader, "ThreadPoolExecutor", WatchedExecutor),
        *((loader, "ForkSafeLock", Lock), (buffers, "ForkSafeLock", Lock)),
        *((buffers, "deque", Deque), (features_cache, "ForkSafeLock", Lock)),
        (table, "gather", watching(table.gather, tensors_of)),
        (transfer, "gather", watching(transfer.gather, tensors_of)),
        (table, "gather_sparse", watching(table.gather_sparse, tensors_of)),
        (features_cache, "gather_cached", gather_cached),
        (HopSampler, "sample", watching(HopSampler.sample, tensors_of)),
        (hetero, "merge_relations", watching(hetero.merge_relations, tensors_of)),
    ]


class WatchedExecutor(Executor):
    """An executor whose threads are watched."""

    def _work(self):
        with Watch(self.schedule.device):
            super()._work()


HELPERS = {__file__, sys.modules["cooperative_threads"].__file__}
