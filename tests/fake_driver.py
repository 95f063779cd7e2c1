"""Fake CUDA drivers for tests of page-locking and of peer memory."""

import contextlib
import threading
import time
import weakref

import torch
from torch.overrides import TorchFunctionMode

from gcnzc.system import cuda_driver as cuda
from gcnzc.system.host_memory import PAGE_BYTES

LOST = 719
INVALID_CONTEXT = 201


class FakeDriver:
    """Keeps the registered ranges of host memory as CUDA does: no two overlap, to the byte.

    Driver 590.48.01 was probed so (https://github.com/lupinemachines/lupine/pull/878).

    Args:
        whole_pages: it registers every page that a range touches, and no page twice.
        largest: bytes of a range that it takes at most.
        codes: what the n-th call to `lock` answers, counted from 0; others are answered honestly.
        read_only_code: what it answers for memory that is mapped read-only.
        maps: whether its GPU says that it reads host memory.
        offset: how far from the host's addresses its GPU sees them.
        tells: whether it says which range an address lies in.
        pause_s: how long a call takes, in which other threads come in.
    """

    def __init__(
        self,
        largest=None,
        codes=None,
        read_only_code=0,
        maps=True,
        offset=0,
        tells=True,
        pause_s=None,
        whole_pages=False,
    ):
        self.whole_pages = whole_pages
        self.largest, self.codes, self.read_only_code = largest, codes or {}, read_only_code
        self.maps, self.offset, self.tells = maps, offset, tells
        self.ranges = {}
        # ranges of others
        self.foreign = {}
        self.calls = []
        # how often it was asked what is locked
        self.asked = 0
        # what unlocking answers, by address; and what waiting raises
        self.unlock_codes = {}
        self.lost = None
        self.pause_s = pause_s
        self._busy = threading.Lock()

    @contextlib.contextmanager
    def _alone(self):
        # a ledger lets one thread at a time in
        assert self._busy.acquire(blocking=False), "two threads at once"
        try:
            if self.pause_s is not None:
                time.sleep(self.pause_s)
            yield
        finally:
            self._busy.release()

    def lock(self, address, num_bytes, read_only=False):
        with self._alone():
            return self._lock(address, num_bytes, read_only)

    def _lock(self, address, num_bytes, read_only):
        count = len(self.named("lock"))
        self.calls.append(("lock", address, num_bytes, read_only))
        assert num_bytes > 0
        if count in self.codes:
            return self.codes[count]
        if read_only and self.read_only_code:
            return self.read_only_code
        first, last = self._counted(address, address + num_bytes)
        if any(begin < last and first < end for begin, end in self.registered()):
            return cuda.ALREADY_LOCKED
        if self.largest is not None and num_bytes > self.largest:
            return cuda.OUT_OF_MEMORY
        self.ranges[address] = address + num_bytes
        return 0

    def unlock(self, address):
        with self._alone():
            self.calls.append(("unlock", address))
            if address in self.unlock_codes:
                return self.unlock_codes[address]
            if self.ranges.pop(address, None):
                return 0
            # as https://github.com/lupinemachines/lupine/issues/437 found
            inside = any(begin <= address < end for begin, end in self.registered())
            return cuda.INVALID_VALUE if inside else 713

    def _counted(self, begin, end):
        if self.whole_pages:
            return begin - begin % PAGE_BYTES, end + -end % PAGE_BYTES
        return begin, end

    def registered(self):
        """Begin and end of what is registered, as the driver counts it."""
        both = [*self.ranges.items(), *self.foreign.items()]
        return [self._counted(begin, end) for begin, end in both]

    def check_copyable(self, address, num_bytes):
        """Raise what a copy of the range to or from a GPU raises.

        "Memory regions requested must be either entirely registered with CUDA, or in the case of
        host pageable transfers, not registered at all. Memory regions spanning over allocations
        that are both registered and not registered with CUDA are not supported and will return
        CUDA_ERROR_INVALID_VALUE." (CUDA driver API, memory management, notes on cuMemcpy.) Two
        registrations do not do as one: https://github.com/sgl-project/sglang/pull/36798.
        """
        first, last = address, address + num_bytes
        for begin, end in self.registered():
            if begin < last and first < end and not begin <= first < last <= end:
                raise RuntimeError("CUDA error: invalid argument")

    def locked_range(self, address):
        self.asked += 1
        for begin, end in self.registered():
            if begin <= address < end:
                return (begin, end) if self.tells else (address, address + 1)
        return None

    def device_address(self, address):
        locked = self.locked_range(address) is not None
        return address + self.offset if locked and self.offset is not None else None

    def can_map_host_memory(self, device):
        self.calls.append(("can_map_host_memory", device))
        return self.maps

    def error_name(self, code):
        return f"CUDA_ERROR_NUMBER ({code})"

    def synchronize(self):
        self.calls.append(("synchronize",))
        if self.lost is not None:
            raise self.lost

    def named(self, name):
        """The calls of that name."""
        return [call for call in self.calls if call[0] == name]

    def is_covered(self, address, num_bytes):
        """Whether every byte is page-locked."""
        at = address
        for begin, end in sorted(self.registered()):
            if begin <= at < end:
                at = end
        return at >= address + num_bytes


class FakeGpu(TorchFunctionMode):
    """A GPU for as much of it as copies need: "cuda" is host memory, reached by the driver's rule.

    It is `with` this mode that `Tensor.to`, `Tensor.cuda`, `Tensor.copy_` and torch's functions
    that make tensors know such a device; what they copy to or from it is checked first.
    """

    def __init__(self, driver):
        super().__init__()
        self.driver = driver
        # storages that lie on the GPU, so that their addresses are not used again
        self.memory = {}
        # of each copy, what the driver was given
        self.copied = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "cuda":
            return self._put(args[0])
        if name == "to" and any(map(is_cuda, (*args[1:], *kwargs.values()))):
            return self._put(args[0])
        if name == "copy_":
            self._check(args[0], args[1])
        there = is_cuda(kwargs.get("device"))
        if there:
            kwargs["device"] = "cpu"
        made = func(*args, **kwargs)
        return self._own(made) if there else made

    def _put(self, source):
        self._check(None, source)
        return self._own(source.clone())

    def _own(self, tensor):
        storage = tensor.untyped_storage()
        self.memory[storage.data_ptr()] = storage
        return tensor

    def is_there(self, tensor):
        """Whether the tensor lies on the GPU."""
        return tensor is None or tensor.untyped_storage().data_ptr() in self.memory

    def _check(self, out, source):
        if self.is_there(out) == self.is_there(source) and out is not None:
            return
        here = source if self.is_there(out) else out
        span = sum((n - 1) * step for n, step in zip(here.shape, here.stride(), strict=True)) + 1
        # torch brings together what lies apart, in memory of its own, before it copies
        if 0 < here.numel() == span:
            self.copied.append((here.data_ptr(), here.nbytes))
            self.driver.check_copyable(*self.copied[-1])


def is_cuda(device):
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


class FakePeers:
    """A CUDA driver of which only the memory is there that GPUs open to others.

    It lies on the GPU if there is one, and else on the host, where Triton's interpreter reads it.
    The processes are one: tests set `process` to the one that calls. A process that opens a handle
    again is given the same address, and closes it as often. Memory must not be freed while another
    process has it open. (cuda.h, cuIpcOpenMemHandle and cuIpcCloseMemHandle.) The process that
    exported a handle cannot open it (https://github.com/openucx/ucx/pull/11603).

    Args:
        codes: what calls answer, by their names; others do what they are asked for.
        lies: what is opened has other bytes.
    """

    def __init__(self, codes=None, lies=False):
        self.codes, self.lies = codes or {}, lies
        self.calls = []
        self.process = 0
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # what is allocated, as bytes and storage, and the processes that exported it, by address
        self.given, self.exporters = {}, {}
        # by address: what is opened, the process, the address of its owner, and how often
        self.opened = {}
        # what a real driver leaves undefined
        self.misuses = []

    def _answer(self, *call):
        self.calls.append(call)
        return self.codes.get(call[0], 0)

    def allocate(self, device, num_bytes):
        code = self._answer("allocate", device)
        if code != 0:
            return code, None
        # of any values, and on no line
        memory = torch.empty(num_bytes + 7, dtype=torch.int8, device=self.device)[7:]
        memory.random_(-128, 127)
        address, storage = memory.data_ptr(), memory.untyped_storage()
        self.given[address] = num_bytes, weakref.ref(storage)
        weakref.finalize(storage, self._free, address).atexit = False
        return 0, memory

    def _free(self, address):
        del self.given[address]
        self.exporters.pop(address, None)
        if any(begin == address for _, _, begin, _ in self.opened.values()):
            self.misuses.append("memory is freed that another process has open")

    def enable_peer(self, device, peer):
        return self._answer("enable_peer", device, peer)

    def export(self, device, address):
        assert address in self.given, "handles are of whole allocations"
        self.exporters[address] = self.process
        return self._answer("export", device), address.to_bytes(64, "little")

    def open(self, device, handle):
        code = self._answer("open", device)
        if code != 0:
            return code, 0
        begin = int.from_bytes(handle, "little")
        if begin not in self.given:
            self.misuses.append("a handle is opened of memory that is freed")
            return cuda.INVALID_VALUE, 0
        if self.exporters[begin] == self.process:
            return INVALID_CONTEXT, 0
        for address, (seen, process, its_begin, count) in self.opened.items():
            if (process, its_begin) == (self.process, begin):
                self.opened[address] = seen, process, begin, count + 1
                return 0, address
        num_bytes, storage = self.given[begin]
        memory = torch.empty(0, dtype=torch.int8, device=self.device)
        memory.set_(storage(), 7, (num_bytes,))
        # where the reader sees it is not where its owner does; it lies as far behind a line
        room = torch.empty(num_bytes + 128, dtype=torch.int8, device=self.device)
        first = (begin - room.data_ptr()) % 128
        seen = room[first : first + num_bytes].copy_(memory)
        if self.lies:
            seen += 1
        self.opened[seen.data_ptr()] = seen, self.process, begin, 1
        return 0, seen.data_ptr()

    def close(self, device, address):
        if address not in self.opened:
            self.misuses.append("memory is closed that is not open")
            return cuda.INVALID_VALUE
        *opened, count = self.opened.pop(address)
        if count > 1:
            self.opened[address] = (*opened, count - 1)
        return self._answer("close", device)

    def error_name(self, code):
        return f"CUDA_ERROR_NUMBER ({code})"

    def synchronize(self):
        self.calls.append(("synchronize",))
