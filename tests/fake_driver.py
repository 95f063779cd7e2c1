"""A CUDA driver of which only the page-locking is there: what is locked, and what it refuses."""

import contextlib
import threading
import time

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
