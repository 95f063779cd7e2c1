"""CUDA drivers of which only parts are there: page-locking, or memory that GPUs open to others."""

import contextlib
import threading
import time

import torch

from gcnzc import driver as cuda
from gcnzc.mappings import PAGE_BYTES

LOST = 719


class FakeDriver:
    """Keeps the locked ranges as CUDA does: whole pages, no two of which overlap.

    Args:
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
    ):
        self.largest, self.codes, self.read_only_code = largest, codes or {}, read_only_code
        self.maps, self.offset, self.tells = maps, offset, tells
        self.ranges = {}
        # ranges of others: exact bytes, and page-locked whole
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
        assert address % PAGE_BYTES == 0
        assert num_bytes % PAGE_BYTES == 0
        assert num_bytes > 0
        if count in self.codes:
            return self.codes[count]
        if read_only and self.read_only_code:
            return self.read_only_code
        whole = [(a - a % PAGE_BYTES, b + -b % PAGE_BYTES) for a, b in self.foreign.items()]
        for begin, end in [*self.ranges.items(), *whole]:
            if begin < address + num_bytes and address < end:
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
            return 0 if self.ranges.pop(address, None) else 713

    def locked_range(self, address):
        self.asked += 1
        for begin, end in [*self.ranges.items(), *self.foreign.items()]:
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
        while at < address + num_bytes:
            found = self.locked_range(at)
            if found is None:
                return False
            at = found[1] if self.tells else at + 1
        return True


class FakePeers:
    """A CUDA driver of which only the memory is there that GPUs open to others.

    It lies on the host, so that Triton's interpreter reads it, for processes that are one.

    Args:
        codes: what calls answer, by their names; others do what they are asked for.
        lies: what is opened has other bytes.
    """

    def __init__(self, codes=None, lies=False):
        self.codes, self.lies = codes or {}, lies
        self.calls = []
        # what was given and opened, by address
        self.given, self.opened = {}, {}

    def _answer(self, *call):
        self.calls.append(call)
        return self.codes.get(call[0], 0)

    def allocate(self, device, num_bytes):
        code = self._answer("allocate", device)
        if code != 0:
            return code, None
        # of any values, and on no line
        memory = torch.randint(-128, 128, (num_bytes + 7,), dtype=torch.int8)[7:]
        self.given[memory.data_ptr()] = memory
        return 0, memory

    def enable_peer(self, device, peer):
        return self._answer("enable_peer", device, peer)

    def export(self, device, address):
        assert address in self.given, "handles are of whole allocations"
        return self._answer("export", device), address.to_bytes(64, "little")

    def open(self, device, handle):
        code = self._answer("open", device)
        if code != 0:
            return code, 0
        memory = self.given[int.from_bytes(handle, "little")]
        # where the reader sees it is not where its owner does; it lies as far behind a line
        room = torch.empty(len(memory) + 128, dtype=torch.int8)
        begin = (memory.data_ptr() - room.data_ptr()) % 128
        seen = room[begin : begin + len(memory)].copy_(memory)
        if self.lies:
            seen += 1
        self.opened[seen.data_ptr()] = seen
        return 0, seen.data_ptr()

    def close(self, device, address):
        del self.opened[address]
        return self._answer("close", device)

    def error_name(self, code):
        return f"CUDA_ERROR_NUMBER ({code})"

    def synchronize(self):
        self.calls.append(("synchronize",))
