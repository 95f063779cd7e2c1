"""Page-lock ranges of host memory in place, with reference counts.

The driver keeps each registration as the range of bytes that was asked for, and refuses another one
that overlaps it, but not one beside it on the same page: driver 590.48.01, probed in
https://github.com/lupinemachines/lupine/pull/878; NVIDIA's cuDSS relies on it. CUDA copies between
host and device only what lies wholly inside one registration or outside of all: "Memory regions
spanning over allocations that are both registered and not registered with CUDA are not supported
and will return CUDA_ERROR_INVALID_VALUE" (memory management, CUDA driver API); across two
registrations it fails as well (https://github.com/sgl-project/sglang/pull/36798). Therefore:

- A table is one registration of its own bytes, rounded to the 16 B that a GPU's thread loads at
  once, and not of whole pages: a tensor that shares a page with it is copied as any other.
- Bytes that are registered already, here or by others, are left out, and so is what lies on a page
  of another table if the driver counts whole pages.
- A registration is as long as the driver takes: 512 GiB and more fail on present drivers
  (https://github.com/vllm-project/vllm/issues/51080), and some of 32 GiB on busy machines
  (https://github.com/sgl-project/sglang/pull/39744).
- `PageLocks.stretches` says where a copy of what spans several registrations must be split.

A GPU sees locked memory where the host does, which is demanded of every registration. A row that
crosses from one into the next therefore lies in one piece for the GPU too.

The limit of `ulimit -l` is not held against a table beforehand: Linux counts towards it what
mlock(2) locks, but NVIDIA's kernel module takes pages without asking for it
(kernel-open/nvidia/os-mlock.c in https://github.com/NVIDIA/open-gpu-kernel-modules), so that most
machines lock far more than their limit. It is named where the driver refuses.
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

# half of the least that was seen to fail, so that a usual machine takes it at once
SEGMENT_BYTES = 16 << 30


# as small as the pages that a GPU likes best
SMALLEST_BYTES = 2 << 20


# What a thread of a GPU loads at once: a row's first and last load may reach beyond the row, up to
# such a border, and the pointer of a gather lies on one, which the driver must know. No two
# allocations of malloc(3) have such a piece in common.
GRANULE_BYTES = 16


# what a smaller segment may mend
_TOO_LARGE = {cuda.INVALID_VALUE, cuda.OUT_OF_MEMORY, cuda.OPERATING_SYSTEM}


# what another kind of memory may mend
_UNSUITABLE = {
    cuda.INVALID_VALUE,
    cuda.OPERATING_SYSTEM,
    cuda.NOT_PERMITTED,
    cuda.NOT_SUPPORTED,
}


_log = logging.getLogger("gcnzc")


class LockDriver(Protocol):
    """The calls that page-locking makes, documented in `gcnzc.system.cuda_driver.Driver`."""

    def lock(self, address: int, num_bytes: int, read_only: bool = False) -> int:
        """Lock a range of bytes; 0 or an error code."""

    def unlock(self, address: int) -> int:
        """Let go of what was locked from there on; 0 or an error code."""

    def locked_range(self, address: int) -> tuple[int, int] | None:
        """Begin and end of the locked range around an address, whoever locked it."""

    def device_address(self, address: int) -> int | None:
        """Where GPUs see it."""

    def can_map_host_memory(self, device: int) -> bool:
        """Whether that GPU says that it reads what is locked."""

    def error_name(self, code: int) -> str:
        """For people."""

    def synchronize(self) -> None:
        """Wait until no GPU reads any more."""


class LockRefused(RuntimeError):
    """The driver would not lock the memory; `is_unsuitable` if other memory may do."""

    def __init__(self, message: str, is_unsuitable: bool) -> None:
        super().__init__(message)
        self.is_unsuitable = is_unsuitable


@dataclass(eq=False)
class _Segment:
    begin: int
    end: int
    # `with`s that need it; none if it is about to be let go of, or could not be
    count: int = 0
    # what keeps the memory mapped for as long as it is registered
    owner: object = None

    @property
    def range(self) -> tuple[int, int]:
        return self.begin, self.end


class PageLocks:
    """What this process has locked through one driver, and for how many `with`s.

    Threads may share it. In a process that was forked it begins anew: locks are not inherited.

    Args:
        driver: that locks.
        segment_bytes: of one registration at most, a multiple of the page size.
        smallest_bytes: down to which a refused registration is halved.
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

    def is_read_by(self, device: int) -> bool:
        """Whether GPU number `device` reads memory that is locked in place, which is tried once.

        Raises:
            RuntimeError: it should, but the driver will not lock a single page.
        """
        if device not in self._readers:
            self._readers[device] = self.driver.can_map_host_memory(device) and self._locks_a_page()
        return self._readers[device]

    def give_up(self, device: int) -> None:
        """Say from now on that GPU number `device` does not read what is locked in place."""
        self._readers[device] = False

    @contextmanager
    def locked(
        self, address: int, num_bytes: int, read_only: bool = False, owner: object = None
    ) -> Iterator[None]:
        """Keep a range of memory page-locked, for GPUs to read, for the length of a `with`.

        What is locked already, here or by others, is not locked again. What others locked, such as
        `Tensor.pin_memory`, must stay so.

        Args:
            address: of the first byte; mapped for as long as the `with` lasts.
            num_bytes: from there on; with 0 nothing is done.
            read_only: the range is mapped read-only.
            owner: of the memory. It is referred to while any of the range is registered, which may
                be longer than the `with`: others may need a part of it.

        Raises:
            Refused: the driver would not; nothing is left locked.
            RuntimeError: the memory is not enough; or at the end, pages could not be let go of,
                after it was tried for all of them. If an exception ends the `with`, it is the one
                that is raised, and this is a note on it.
        """
        # each once, in the order of addresses
        process, held = os.getpid(), dict[_Segment, None]()
        try:
            with self._mutex_of_this_process():
                check_memory_fits(address, num_bytes)
                self._take(address, num_bytes, read_only, owner, held)
            yield
        except BaseException as error:
            if os.getpid() == process:
                for trouble in self._leave(held):
                    _note(error, trouble)
            raise
        if os.getpid() == process:
            troubles = self._leave(held)
            if troubles:
                raise RuntimeError(
                    f"{'; '.join(troubles)}\n\n"
                    "hint: `nvidia-smi` shows whether the GPU is lost; what is still locked is let "
                    "go of when the process ends"
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
            # forked: the parent's locks are the parent's, and its threads are not here
            self._process, self._segments = os.getpid(), []
            self._mutex = threading.Lock()
        return self._mutex

    def stretches(self, address: int, num_bytes: int) -> list[tuple[int, int]]:
        """Begin and end of the parts of a range that CUDA copies at a time, in order.

        Args:
            address: of the first byte.
            num_bytes: from there on.
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
            # between the registrations of this ledger there may be some of others
            for at, stop in pairwise(sorted(cuts)) if near else ():
                while at < stop and (registered := self._registered(at)) is not None:
                    at = registered[1]
                    cuts.add(at)
        return list(pairwise(cut for cut in sorted(cuts) if begin <= cut <= end))

    def _take(
        self,
        address: int,
        num_bytes: int,
        read_only: bool,
        owner: object,
        held: dict[_Segment, None],
    ) -> None:
        """Register what is not registered yet, and add to `held` what to let go of."""
        if num_bytes == 0:
            return
        at, end = _down(address, GRANULE_BYTES), _up(address + num_bytes, GRANULE_BYTES)
        longest = self._segment_bytes
        while at < end:
            after = bisect_right(self._segments, at, key=lambda segment: segment.begin)
            before = self._segments[after - 1] if after > 0 else None
            if before is not None and at < before.end:
                if before.count == 0:
                    self._let_go_at_last(before)
                    continue
                self._hold(before, held)
                at = before.end
                continue
            # what others registered need not begin on such a border
            inside = at if self._registered(at) is not None else max(at, address)
            registered = self._registered(inside)
            if registered is not None:
                self._check_same_address(inside)
                # with pages of another table, if the driver counts whole ones
                for segment in self._segments:
                    shares = segment.begin < registered[1] and registered[0] < segment.end
                    if shares and segment.count:
                        self._hold(segment, held)
                at = registered[1]
                continue
            stop = self._segments[after].begin if after < len(self._segments) else end
            # between pages, if not where the range ends
            segment = _Segment(at, min(_down(at + longest), stop, end), 1, owner)
            # before it is locked, so that it is let go of even if Ctrl-C comes in between
            self._segments.insert(after, segment)
            held[segment] = None
            code, longest = self._lock(segment, read_only, longest)
            if code != 0:
                del held[segment]
                self._segments.remove(segment)
                raise LockRefused(self._refusal(segment, num_bytes, code), code in _UNSUITABLE)
            self._check_same_address(at)
            at = segment.end

    def _registered(self, at: int) -> tuple[int, int] | None:
        """The registration around an address, by whomever; its page if the driver does not tell."""
        found = self.driver.locked_range(at)
        if found is None or found[1] - found[0] > 1:
            return found
        return _down(at), _up(at + 1)

    def _hold(self, segment: _Segment, held: dict[_Segment, None]) -> None:
        """Keep what is registered already."""
        if segment not in held:
            segment.count += 1
            held[segment] = None

    def _lock(self, segment: _Segment, read_only: bool, longest: int) -> tuple[int, int]:
        """Lock a segment, made shorter until the driver takes it.

        Returns:
            The error code of the last try, and how long the next segment may be.
        """
        while True:
            size = segment.end - segment.begin
            code = self.driver.lock(segment.begin, size, read_only)
            if code == cuda.ALREADY_LOCKED and size > 1:
                # others locked something further on, up to which this is to reach
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
                "place\n\nhint: keep the features on the GPU, or gather on the host",
                is_unsuitable=True,
            )

    def _let_go_at_last(self, segment: _Segment) -> None:
        # Other memory may lie there by now, while GPUs would go on to read the old pages.
        trouble = self._unlock(segment)
        if trouble is not None:
            raise LockRefused(
                f"{trouble}, although it is no longer in use\n\nhint: start the process again",
                is_unsuitable=False,
            )

    def _leave(self, held: Iterable[_Segment]) -> list[str]:
        """Let go of what nobody else holds; what went wrong."""
        troubles: list[str] = []
        with self._mutex:
            for segment in held:
                segment.count -= 1
            last = [segment for segment in held if segment.count == 0]
            if last:
                try:
                    # no GPU may still be reading
                    self.driver.synchronize()
                except Exception as error:
                    troubles.append(f"CUDA would not wait for its work: {error}")
            tried = [self._unlock(segment) for segment in reversed(last)]
            troubles += [trouble for trouble in tried if trouble is not None]
        return troubles

    def _unlock(self, segment: _Segment) -> str | None:
        """Let go of a segment; what went wrong, and then it stays in the ledger."""
        try:
            code = self.driver.unlock(segment.begin)
            trouble = None if code == 0 else self.driver.error_name(code)
        except Exception as error:
            # torch's, where the GPU is lost and this thread had not used it
            trouble = str(error)
        if trouble is None:
            self._segments.remove(segment)
            return None
        size = segment.end - segment.begin
        where = f"{size:,} bytes of host memory at {segment.begin:#x}"
        return f"CUDA would not unlock {where}: {trouble}"

    def _refusal(self, segment: _Segment, num_bytes: int, code: int) -> str:
        size, limit = segment.end - segment.begin, lock_limit_bytes()
        hint = "features that are kept on the GPU, or smaller ones, need no locking"
        if code not in _TOO_LARGE | _UNSUITABLE:
            hint = "`nvidia-smi` shows whether the GPU is well; then start the process again"
        elif limit is not None and limit < num_bytes:
            hint = (
                f"`ulimit -l` allows this user {limit:,} bytes: raise memlock in "
                "/etc/security/limits.conf, or start the container with --ulimit memlock=-1; or "
                f"{hint}"
            )
        return (
            f"CUDA would not lock {size:,} of {num_bytes:,} bytes of host memory at "
            f"{segment.begin:#x}: {self.driver.error_name(code)}\n\nhint: {hint}"
        )


def check_memory_fits(address: int, num_bytes: int) -> None:
    """Demand that a range of memory fits, whole, into what is left.

    Raises:
        RuntimeError: it does not.
    """
    if num_bytes == 0:
        return
    begin, end = _down(address), _up(address + num_bytes)
    needed, left = needed_bytes(begin, end - begin), available_bytes()
    if needed > left:
        raise RuntimeError(
            f"locking {num_bytes:,} bytes takes {needed:,} bytes of memory, and {left:,} are left"
            "\n\nhint: end other programs, allow the container more, or use features of a smaller "
            "type; a table that is larger than the memory cannot be locked"
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
