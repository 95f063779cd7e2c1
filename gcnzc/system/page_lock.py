"""Page-lock ranges of host memory in place, with reference counts.

The driver records each registration as the requested range of bytes. It refuses another one that
overlaps it, but accepts an adjacent one on the same page: driver 590.48.01, probed in
https://github.com/lupinemachines/lupine/pull/878; NVIDIA's cuDSS relies on it. CUDA copies between
host and device only ranges that are entirely inside one registration or outside of all: "Memory
regions spanning over allocations that are both registered and not registered with CUDA are not
supported and will return CUDA_ERROR_INVALID_VALUE" (memory management, CUDA driver API); copies
across two registrations fail as well (https://github.com/sgl-project/sglang/pull/36798). Therefore:

- The registration of a table has exactly the table's bytes, rounded to the 16 B of a GPU thread's
  load and not to whole pages, so that another tensor on the same page is copied like any other
  tensor. The driver locks the pages that contain the bytes.
- Bytes that this process or a library has registered before are not registered again. The same
  holds for bytes on a page of another table, if the driver registers whole pages.
- A registration has at most 16 GiB, and less if the driver refuses it: 512 GiB and more fail on
  current drivers (https://github.com/vllm-project/vllm/issues/51080), and some of 32 GiB on busy
  machines (https://github.com/sgl-project/sglang/pull/39744).
- `PageLocks.copy_ranges` returns the ranges into which a copy across registrations must be split.

Every registration must have the same address on the GPU as on the host, which is checked. A row
that spans two registrations is therefore contiguous for the GPU, too.

`ulimit -l` is not checked in advance: it limits mlock(2), but NVIDIA's kernel module pins pages
without checking it (kernel-open/nvidia/os-mlock.c in
https://github.com/NVIDIA/open-gpu-kernel-modules), so that most machines can lock far more. Error
messages mention the limit when the driver refuses.
"""

import logging
import mmap
import os
import sys
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from gcnzc.system import cuda_driver as cuda
from gcnzc.system.host_memory import PAGE_BYTES, available_bytes, lock_limit_bytes, needed_bytes

# half of the smallest size that was seen to fail, so that most machines accept it at once
SEGMENT_BYTES = 16 << 30


# the size of a GPU's large pages
SMALLEST_BYTES = 2 << 20


# The size of a GPU thread's load. The first and last load of a row may extend beyond the row up to
# a multiple of it, and the pointer that a gather kernel gets is such a multiple, so that the
# registration must include it. Two malloc(3) allocations never share a granule.
GRANULE_BYTES = 16


# errors after which a smaller segment may succeed
_TOO_LARGE = {cuda.INVALID_VALUE, cuda.OUT_OF_MEMORY, cuda.OPERATING_SYSTEM}


# errors after which another kind of memory may succeed
_UNSUITABLE = {
    cuda.INVALID_VALUE,
    cuda.OPERATING_SYSTEM,
    cuda.NOT_PERMITTED,
    cuda.NOT_SUPPORTED,
}


_log = logging.getLogger("gcnzc")


class LockDriver(Protocol):
    """The CUDA driver calls for page-locking, see `gcnzc.system.cuda_driver.Driver`."""

    def lock(self, address: int, num_bytes: int, read_only: bool = False) -> int:
        """Page-lock a range of bytes; return 0 or an error code."""

    def unlock(self, address: int) -> int:
        """Unlock the range that starts at an address; return 0 or an error code."""

    def locked_range(self, address: int) -> tuple[int, int] | None:
        """Return start and end of the locked range that contains an address; None if unlocked."""

    def device_address(self, address: int) -> int | None:
        """Return the address on GPUs of locked host memory."""

    def can_map_host_memory(self, device: int) -> bool:
        """Whether the driver reports that a GPU can read locked host memory."""

    def error_name(self, code: int) -> str:
        """Return the name of an error code."""

    def synchronize(self) -> None:
        """Wait until all work on all GPUs has finished."""


class LockRefused(RuntimeError):
    """The driver refused to lock memory; `is_unsuitable` if other memory may be accepted."""

    def __init__(self, message: str, is_unsuitable: bool) -> None:
        super().__init__(message)
        self.is_unsuitable = is_unsuitable


@dataclass(eq=False)
class _Segment:
    begin: int
    end: int
    # `with` blocks that use it; 0 if it is being unlocked, or could not be unlocked
    count: int = 0
    # object that keeps the memory mapped as long as it is registered
    owner: object = None

    @property
    def range(self) -> tuple[int, int]:
        return self.begin, self.end


class PageLocks:
    """Page-locked ranges of this process, with reference counts; thread-safe.

    A forked child process starts without locks, because it does not inherit them.

    Args:
        driver: the driver that locks.
        segment_bytes: largest size of a registration, a multiple of the page size.
        smallest_bytes: smallest size to which a refused registration is halved.
    """

    def __init__(
        self,
        driver: LockDriver,
        segment_bytes: int = SEGMENT_BYTES,
        smallest_bytes: int = SMALLEST_BYTES,
    ) -> None:
        self.driver = driver
        self._segment_bytes, self._smallest_bytes = segment_bytes, smallest_bytes
        # by ascending address; no two overlap
        self._segments: list[_Segment] = []
        self._mutex = threading.Lock()
        self._process = os.getpid()
        self._readers: dict[int, bool] = {}

    def is_readable_by(self, device: int) -> bool:
        """Whether a GPU can read memory that is locked in place; the result is cached.

        Args:
            device: index of the GPU.

        Raises:
            RuntimeError: the GPU supports it, but the driver fails to lock a single page.
        """
        if device not in self._readers:
            self._readers[device] = self.driver.can_map_host_memory(device) and self._locks_a_page()
        return self._readers[device]

    def disable_reads(self, device: int) -> None:
        """Let `is_readable_by` return False for the GPU with index `device` from now on."""
        self._readers[device] = False

    @contextmanager
    def locked(
        self, address: int, num_bytes: int, read_only: bool = False, owner: object = None
    ) -> Iterator[None]:
        """Page-lock a range of memory for GPUs to read, for the duration of a `with` block.

        Parts that are locked already are not locked again. Parts that others locked, for example by
        `Tensor.pin_memory`, must stay locked.

        Args:
            address: of the first byte; must stay mapped during the block.
            num_bytes: size of the range; 0 does nothing.
            read_only: the range is mapped read-only.
            owner: object that owns the memory. A reference is kept while any part of the range is
                registered, which can be longer than the block if other blocks use that part.

        Raises:
            LockRefused: the driver refused; nothing remains locked.
            RuntimeError: there is not enough memory; or, at the end of the block, memory could not
                be unlocked. If the block itself raises, the failure is added as a note instead.
        """
        # a dict as an ordered set, by ascending address
        process, segments = os.getpid(), dict[_Segment, None]()
        try:
            with self._mutex_of_this_process():
                check_memory_fits(address, num_bytes)
                self._register(address, num_bytes, read_only, owner, segments)
            yield
        except BaseException as error:
            if os.getpid() == process:
                for failure in self._release(segments):
                    _note(error, failure)
            raise
        if os.getpid() == process:
            failures = self._release(segments)
            if failures:
                raise RuntimeError(
                    f"{'; '.join(failures)}\n\n"
                    "hint: `nvidia-smi` shows whether the GPU is lost; the memory is unlocked when "
                    "the process ends"
                )

    def _locks_a_page(self) -> bool:
        page = np.frombuffer(mmap.mmap(-1, PAGE_BYTES), np.uint8)
        try:
            with self.locked(page.ctypes.data, PAGE_BYTES):
                return True
        except LockRefused as refusal:
            if not refusal.is_unsuitable:
                raise
            return False

    def _mutex_of_this_process(self) -> threading.Lock:
        if self._process != os.getpid():
            # after a fork, the locks belong to the parent, and its threads do not exist here
            self._process, self._segments = os.getpid(), []
            self._mutex = threading.Lock()
        return self._mutex

    def copy_ranges(self, address: int, num_bytes: int) -> list[tuple[int, int]]:
        """Split a range at the ends of registrations, into ranges that CUDA can copy.

        Args:
            address: of the first byte.
            num_bytes: size of the range.

        Returns:
            Start and end of each range, in order.
        """
        begin, end = address, address + num_bytes
        cuts = {begin, end}
        with self._mutex_of_this_process():
            near = [
                segment
                for segment in self._segments
                if segment.begin < _up(end) and _down(begin) < segment.end
            ]
            for segment in near:
                cuts |= {*segment.range, *(self._registered(segment.begin) or ())}
            # between these registrations there may be some of other libraries
            for at, stop in pairwise(sorted(cuts)) if near else ():
                while at < stop and (registered := self._registered(at)) is not None:
                    at = registered[1]
                    cuts.add(at)
        return list(pairwise(cut for cut in sorted(cuts) if begin <= cut <= end))

    def _register(
        self,
        address: int,
        num_bytes: int,
        read_only: bool,
        owner: object,
        segments: dict[_Segment, None],
    ) -> None:
        """Register the unregistered parts of a range; add the segments to release to `segments`."""
        if num_bytes == 0:
            return
        at, end = _down(address, GRANULE_BYTES), _up(address + num_bytes, GRANULE_BYTES)
        longest = self._segment_bytes
        while at < end:
            after = bisect_right(self._segments, at, key=lambda segment: segment.begin)
            before = self._segments[after - 1] if after > 0 else None
            if before is not None and at < before.end:
                if before.count == 0:
                    self._unregister_stale(before)
                    continue
                self._reuse(before, segments)
                at = before.end
                continue
            # registrations of others need not start at a multiple of the granule
            inside = at if self._registered(at) is not None else max(at, address)
            registered = self._registered(inside)
            if registered is not None:
                self._check_same_address(inside)
                # the registration may be a page of another table, if the driver locks whole pages
                for segment in self._segments:
                    shares = segment.begin < registered[1] and registered[0] < segment.end
                    if shares and segment.count:
                        self._reuse(segment, segments)
                at = registered[1]
                continue
            stop = self._segments[after].begin if after < len(self._segments) else end
            # end at a page boundary, or at the end of the range
            segment = _Segment(at, min(_down(at + longest), stop, end), 1, owner)
            # added before it is locked, so that it is unlocked even after a KeyboardInterrupt
            self._segments.insert(after, segment)
            segments[segment] = None
            code, longest = self._lock(segment, read_only, longest)
            if code != 0:
                del segments[segment]
                self._segments.remove(segment)
                raise LockRefused(self._refusal(segment, num_bytes, code), code in _UNSUITABLE)
            self._check_same_address(at)
            at = segment.end

    def _registered(self, at: int) -> tuple[int, int] | None:
        """Return the registration that contains an address, by this process or a library.

        If the driver does not report its range, return the page of the address.
        """
        found = self.driver.locked_range(at)
        if found is None or found[1] - found[0] > 1:
            return found
        return _down(at), _up(at + 1)

    def _reuse(self, segment: _Segment, segments: dict[_Segment, None]) -> None:
        """Add a reference to a segment that is registered already."""
        if segment not in segments:
            segment.count += 1
            segments[segment] = None

    def _lock(self, segment: _Segment, read_only: bool, longest: int) -> tuple[int, int]:
        """Lock a segment, and shorten it until the driver accepts it.

        Returns:
            The error code of the last attempt, and the largest size for the next segment.
        """
        while True:
            size = segment.end - segment.begin
            code = self.driver.lock(segment.begin, size, read_only)
            if code == cuda.ALREADY_LOCKED and size > 1:
                # another library locked memory further on; find the part before it
                segment.end = segment.begin + size // 2
            elif code in _TOO_LARGE and size > self._smallest_bytes:
                longest = max(self._smallest_bytes, _down(size // 2))
                segment.end = _down(segment.begin + longest)
            else:
                return code, longest

    def _check_same_address(self, at: int) -> None:
        seen = self.driver.device_address(at)
        if seen != at:
            where = "nowhere" if seen is None else f"at {seen:#x}"
            raise LockRefused(
                f"GPUs see the host memory at {at:#x} {where}, so a table there cannot be read in "
                "place\n\nhint: move the features to the GPU, or gather on the host",
                is_unsuitable=True,
            )

    def _unregister_stale(self, segment: _Segment) -> None:
        # other memory may be mapped there by now, but GPUs would still read the old pages
        failure = self._unlock(segment)
        if failure is not None:
            raise LockRefused(
                f"{failure}, although it is no longer in use\n\nhint: restart the process",
                is_unsuitable=False,
            )

    def _release(self, segments: Iterable[_Segment]) -> list[str]:
        """Release segments, and unlock those without other references; return the failures."""
        failures: list[str] = []
        with self._mutex:
            for segment in segments:
                segment.count -= 1
            last = [segment for segment in segments if segment.count == 0]
            if last:
                try:
                    # no GPU may still be reading the memory
                    self.driver.synchronize()
                except Exception as error:
                    failures.append(f"CUDA failed to synchronize: {error}")
            tried = [self._unlock(segment) for segment in reversed(last)]
            failures += [failure for failure in tried if failure is not None]
        return failures

    def _unlock(self, segment: _Segment) -> str | None:
        """Unlock and remove a segment; after a failure keep the segment and return the reason."""
        try:
            code = self.driver.unlock(segment.begin)
            failure = None if code == 0 else self.driver.error_name(code)
        except Exception as error:
            # torch raises if the GPU is lost and this thread has not used it before
            failure = str(error)
        if failure is None:
            self._segments.remove(segment)
            return None
        size = segment.end - segment.begin
        where = f"{size:,} bytes of host memory at {segment.begin:#x}"
        return f"CUDA failed to unlock {where}: {failure}"

    def _refusal(self, segment: _Segment, num_bytes: int, code: int) -> str:
        size, limit = segment.end - segment.begin, lock_limit_bytes()
        hint = "move the features to the GPU, which needs no locking, or use a smaller dtype"
        if code not in _TOO_LARGE | _UNSUITABLE:
            hint = "check the GPU with `nvidia-smi`, then restart the process"
        elif limit is not None and limit < num_bytes:
            hint = (
                f"`ulimit -l` is {limit:,} bytes for this user: raise memlock in "
                "/etc/security/limits.conf, or start the container with --ulimit memlock=-1; or "
                f"{hint}"
            )
        return (
            f"CUDA failed to lock {size:,} of {num_bytes:,} bytes of host memory at "
            f"{segment.begin:#x}: {self.driver.error_name(code)}\n\nhint: {hint}"
        )


def check_memory_fits(address: int, num_bytes: int) -> None:
    """Check that a whole range of memory fits into the available memory.

    Raises:
        RuntimeError: there is not enough memory.
    """
    if num_bytes == 0:
        return
    begin, end = _down(address), _up(address + num_bytes)
    needed, left = needed_bytes(begin, end - begin), available_bytes()
    if needed > left:
        raise RuntimeError(
            f"locking {num_bytes:,} bytes needs {needed:,} bytes of memory, but {left:,} are "
            "available\n\nhint: stop other programs, raise the memory limit of the container, or "
            "use a smaller dtype; a table that is larger than the memory cannot be locked"
        )


def _down(address: int, unit: int = PAGE_BYTES) -> int:
    return address // unit * unit


def _up(address: int, unit: int = PAGE_BYTES) -> int:
    return -(-address // unit) * unit


def _note(error: BaseException, text: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:
        _log.warning("%s", text)
