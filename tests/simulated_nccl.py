"""torch.distributed with NCCL on a simulated device whose accesses are checked.

A collective runs on a stream of its process group, after the work that was queued on the current
stream. `Work.wait` orders the current stream after it and does not block the host. As in torch
2.13, the process group refers to the tensors of a collective until `Work.wait`, or else until the
collective has finished. So once any stream has waited and nothing else refers to a tensor, later
work of the stream that allocated it may use its memory.

Results are those of ranks that all send the same. Exceptions: all-to-all returns what was sent, and
a receive on the device returns zeros. Tensors of the host are exchanged at once, as over gloo.

Operations with tensors of the device (`simulated_device.OnDevice`) run on the current stream. Where
the host reads values, it waits for that stream.

Source: torch.distributed's notes on asynchronous operations, and ProcessGroupNCCL.hpp
(`stashed_for_allocator_safety_`).
"""

import gc
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from checked_device import HELPERS, Device, Watch, WatchedExecutor, spans
from cooperative_threads import Schedule, Threading, replaced
from happens_before import join
from simulated_device import Factories, OnDevice, Reads

from gcnzc.exchange import Group, pending, process_group, processes
from gcnzc.exchange import group as group_module

WORLD_SIZE = 2


class NcclDevice(Device):
    """A device whose memory is that of torch's tensors there, and of the collectives on them."""

    def __init__(self, seed, without=None):
        self.streams = []
        super().__init__(seed, without)
        self.nccl_streams = {}  # by process group
        self.references = {}  # by memory, those of the process group, see `Reference`

    def track(self, inner):
        """Track the memory of a new tensor, which the current stream has allocated and writes."""
        storage = inner.untyped_storage()
        begin, num_bytes = storage.data_ptr(), storage.nbytes()
        if num_bytes and self.checker.find(begin) is None:
            stream = self.current()
            memory = self.checker.add_memory(f"memory of {stream.name}", begin, num_bytes)
            weakref.finalize(storage, self._free_on, memory, stream).atexit = False
            self.access(inner, True, "its first operation")

    def access(self, tensor, is_write, operation):
        tensor = _inner(tensor)
        if not any(self.checker.find(begin) for begin, _ in spans(tensor)):
            return
        stream = self.current()
        # order the access after what this thread has done until now, not only until `Stream.do`
        stream.queue()
        for begin, end in spans(tensor):
            self.checker.access(stream.actor, begin, end, is_write, operation)

    def new(self, priority=0, name=None):
        self.streams.append(super().new(priority, name))
        return self.streams[-1]

    def synchronize(self, _device=None):
        """The host waits for all streams."""
        self.schedule.switch()
        if not self.is_left_out("synchronize", "device"):
            for stream in self.streams:
                self.schedule.current.actor.acquire(stream.queue().release())

    def read_by_host(self, inner):
        """The host reads values of the device, and waits for them."""
        self.read(inner)
        self.synchronize_current()

    def synchronize_current(self):
        """The host waits for the current stream, as where it reads values of the device."""
        self.schedule.current.actor.acquire(self.current().queue().release())

    def _free_on(self, memory, stream):
        before = stream.actor.clock.copy()
        join(before, self.schedule.current.actor.clock)
        for reference in self.references.pop(memory, []):
            if not reference.is_dropped:
                # the process group drops it when the collective has finished
                join(before, reference.clock)
        self.checker.free(memory, stream.actor, before)

    def collective(self, group, reads, writes, compute):
        """Queue a collective on the stream of a process group; return its work."""
        if not any(isinstance(tensor, OnDevice) for tensor in (*reads, *writes)):
            compute()
            return Work(None, None, [])
        current = self.current()
        if group not in self.nccl_streams:
            self.nccl_streams[group] = self.new(name=f"NCCL {len(self.nccl_streams)}")
        stream = self.nccl_streams[group]
        stream.queue().acquire(current.queue().release())
        reference = Reference()
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                for begin, end in spans(tensor.inner):
                    memory = self.checker.access(stream.actor, begin, end, is_write, "a collective")
                    self.references.setdefault(memory, []).append(reference)
        thread = self.schedule.current
        before = self.executing.get(thread)
        self.executing[thread] = stream
        compute()
        self.executing[thread] = before
        reference.clock = stream.actor.release()
        return Work(self, reference, [_inner(tensor) for tensor in (*reads, *writes)])


class Reference:
    """A process group's reference to the tensors of a collective."""

    def __init__(self):
        self.clock, self.is_dropped = {}, False  # of the collective; whether a stream has waited


class Work:
    """What a collective returns; without a device, of a collective that has finished."""

    def __init__(self, device, reference, tensors):
        self.device, self.reference, self.tensors = device, reference, tensors

    def wait(self, *_limit):
        device = self.device
        if device is None:
            return
        device.schedule.switch()
        if not device.is_left_out("wait", "work"):
            device.current().queue().acquire(self.reference.clock)
            self.reference.is_dropped = True
            self.tensors = []


class ProcessGroup:
    """A process group of torch.distributed."""

    def __init__(self, nccl):
        self.nccl = nccl

    def send(self, tensors, peer, tag):
        return self.nccl.isend(tensors[0], peer, self, tag)

    def recv(self, tensors, peer, tag):
        return self.nccl.irecv(tensors[0], peer, self, tag)


class Nccl:
    """The functions of torch.distributed that channels call."""

    def __init__(self, device):
        self.device, self.group = device, SimpleNamespace(WORLD=ProcessGroup(self))
        self.sent = {}  # number of values -> the last message of the host that has so many

    def is_initialized(self):
        return True

    def get_backend_config(self):
        return "cpu:gloo,cuda:nccl"

    def new_group(self, *_args, **_options):
        return ProcessGroup(self)

    def all_reduce(self, values, group, async_op):
        return self.device.collective(group, [values], [values], lambda: _scale(values))

    def broadcast(self, values, _root, group, async_op):
        return self.device.collective(group, [values], [values], lambda: None)

    def all_gather(self, rows, values, group, async_op):
        def compute():
            _inner(rows).view(WORLD_SIZE, -1).copy_(_inner(values).view(1, -1))

        return self.device.collective(group, [values], [rows], compute)

    def reduce_scatter(self, share, values, group, async_op):
        def compute():
            _inner(share).copy_(_inner(values)[: share.numel()] * WORLD_SIZE)

        return self.device.collective(group, [values], [share], compute)

    def all_to_all_single(self, received, sent, sizes=None, sent_sizes=None, **options):
        def compute():
            _inner(received).copy_(_inner(sent)[: received.numel()])

        return self.device.collective(options["group"], [sent], [received], compute)

    def batch_isend_irecv(self, operations):
        (_, sent, _, group), (_, received, _, _) = operations

        def compute():
            _inner(received).copy_(_inner(sent))

        return [self.device.collective(group, [sent], [received], compute)]

    def P2POp(self, *operation):
        return operation

    def isend(self, values, _peer, group, _tag):
        if not isinstance(values, OnDevice):
            self.sent[values.numel()] = values.clone()
        return self.device.collective(group, [values], [], lambda: None)

    def irecv(self, values, _peer, group, _tag):
        if not isinstance(values, OnDevice):
            return Message(lambda: values.copy_(self.sent[values.numel()]))
        return self.device.collective(group, [], [values], lambda: _inner(values).zero_())


class Message:
    """A message of the host, which arrives when it is waited for."""

    def __init__(self, arrive):
        self.arrive = arrive

    def wait(self, *_limit):
        self.arrive()


class Syncs(list):
    """Replaces `Reads.seen`: what would be appended synchronizes the host with the stream."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def append(self, _name):
        self.device.synchronize_current()


class DeviceExecutor(WatchedExecutor):
    """An executor whose threads create tensors on the simulated device."""

    def _work(self):
        with Factories(), torch.no_grad():
            super()._work()


@contextmanager
def nccl_group(seed, without=None):
    """Yield a simulated device, and a group of two ranks that uses NCCL.

    The second rank exists only in the results of collectives.
    """
    # garbage is not collected at a point that depends on other tests
    was_enabled = gc.isenabled()
    gc.disable()
    device = NcclDevice(seed, without)
    Schedule.active, device.schedule.device = device.schedule, device
    nccl = Nccl(device)
    with (
        replaced(
            *((module, "dist", nccl) for module in (process_group, processes, group_module)),
            *((process_group, "_all_gather", nccl.all_gather),),
            *((process_group, "_reduce_scatter", nccl.reduce_scatter),),
            *((pending, "ThreadPoolExecutor", DeviceExecutor),),
            *((pending, "threading", Threading),),
            *((pending, "CudaStreams", lambda _: device),),
            *((torch.cuda, "is_initialized", lambda: True),),
            *((torch.cuda, "current_device", lambda: 0), (Reads, "seen", Syncs(device))),
            *((OnDevice, "on_new", device.track), (OnDevice, "on_read", device.read_by_host)),
        ),
        Reads(),
        Watch(device),
        torch.no_grad(),
    ):
        group = Group()
        group.backend, group.world_size, group.ranks = "nccl", WORLD_SIZE, [0, 1]
        try:
            yield device, group
            for thread in group.threads.values():
                thread.close()
            device.schedule.join_all()
        except BaseException:
            device.schedule.stop()
            raise
        finally:
            if was_enabled:
                gc.enable()


def _inner(tensor):
    return tensor.inner if isinstance(tensor, OnDevice) else tensor


def _scale(values):
    _inner(values).mul_(WORLD_SIZE)


HELPERS.add(__file__)
