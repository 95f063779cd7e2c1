"""Page-lock ranges of host memory in place, with reference counts.

The driver records each registration as the requested range of bytes. It refuses a registration that
overlaps an existing one, but accepts one that is adjacent on the same page. (Driver 590.48.01 was
probed in https://github.com/lupinemachines/lupine/pull/878; NVIDIA's cuDSS relies on it.) A copy
between host and device succeeds only if its range in host memory is entirely inside one
registration or outside of all: "Memory regions spanning over allocations that are both registered
and not registered with CUDA are not supported and will return CUDA_ERROR_INVALID_VALUE" (memory
management, CUDA driver API). Copies across two registrations fail as well
(https://github.com/sgl-project/sglang/pull/36798). Therefore:

- A table's registrations cover its bytes, rounded outwards to multiples of 16 B (a GPU thread's
  load) and not to whole pages, so that another tensor on the same page is copied like any other
  tensor. The driver locks the pages that contain the bytes.
- Bytes that are registered already, here or by another library, are not registered again. Drivers
  that record whole pages instead are supported: on a page that two tables share, the second uses
  the registration of the first.
- A registration has at most 16 GiB, and less if the driver refuses it. Registrations of 512 GiB and
  more fail on current drivers (https://github.com/vllm-project/vllm/issues/51080), and some
  registrations of 32 GiB fail on busy machines (https://github.com/sgl-project/sglang/pull/39744).
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

# largest size of one registration; larger ones fail more often (see above), and a refused one is
# halved
MAX_REGISTRATION_BYTES = 16 << 30


# smallest size to which a refused registration is halved: a large page of a GPU
MIN_REGISTRATION_BYTES = 2 << 20


# The size of a GPU thread's load. Registrations are rounded outwards to multiples of it, because
# the first and the last load of a row may extend beyond the row up to such a multiple, and a gather
# kernel gets the table's address rounded down to one. The rounding adds no byte of another
# malloc(3) allocation, because two allocations never share a granule.
GRANULE_BYTES = 16


# errors after which a smaller registration may succeed
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
        """Return start and end of the locked range that contains an address; None if unlocked.

        If the driver does not report the range, return one byte, (address, address + 1).
        """

    def device_address(self, address: int) -> int | None:
        """Return the address on GPUs of locked host memory; None if it is not mapped."""

    def can_map_host_memory(self, device: int) -> bool:
        """Whether the driver reports that a GPU can read locked host memory."""

    def error_name(self, code: int) -> str:
        """Return the name of an error code."""

    def synchronize(self) -> None:
        """Wait until all work on all GPUs has finished."""


class LockRefused(RuntimeError):
    """Memory could not be page-locked for GPUs.

    Args:
        message: the message.
        is_unsuitable: the driver may lock another kind of memory, such as writable memory instead
            of memory that is mapped read-only.
    """

    def __init__(self, message: str, is_unsuitable: bool) -> None:
        super().__init__(message)
        self.is_unsuitable = is_unsuitable


@dataclass(eq=False)
class _Registration:
    """One registration made by `PageLocks`, and how many `with` blocks use it."""

    begin: int
    end: int
    # `with` blocks that use it; 0 if it is being unlocked, or could not be unlocked
    count: int = 0
    # keeps the memory mapped while it is registered; None if the caller does
    owner: object = None

    @property
    def range(self) -> tuple[int, int]:
        return self.begin, self.end


class PageLocks:
    """Page-locked ranges of this process, with reference counts; thread-safe.

    A forked child process starts without locks, because it does not inherit them.

    Args:
        driver: the driver that locks.
        max_bytes: largest size of a registration, a multiple of the page size.
        min_bytes: a registration that the driver refuses as too large is halved, down to this size.
    """

    def __init__(
        self,
        driver: LockDriver,
        max_bytes: int = MAX_REGISTRATION_BYTES,
        min_bytes: int = MIN_REGISTRATION_BYTES,
    ) -> None:
        self.driver = driver
        self._max_bytes, self._min_bytes = max_bytes, min_bytes
        # by ascending address; no two overlap
        self._registrations: list[_Registration] = []
        self._mutex = threading.Lock()
        self._process = os.getpid()
        self._readers: dict[int, bool] = {}

    def is_readable_by(self, device: int) -> bool:
        """Whether a GPU can read memory that is locked in place; the result is cached.

        It can if its attributes say so, and the driver locks a test page.

        Args:
            device: index of the GPU.

        Raises:
            LockRefused: the driver could not lock the test page for a reason that says nothing
                about support, such as OUT_OF_MEMORY.
        """
        if device not in self._readers:
            self._readers[device] = (
                self.driver.can_map_host_memory(device) and self._can_lock_a_page()
            )
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
            owner: object that owns the memory. A reference is kept during the block, and longer
                while other blocks use a registration that this call made.

        Raises:
            LockRefused: the memory cannot be locked for GPUs. What this call locked is unlocked
                again; if that fails too, the failure is added as a note.
            RuntimeError: there is not enough memory; or, at the end of the block, memory could not
                be unlocked. If the block itself raises, the failure is added as a note instead
                (with Python 3.10, which has no notes, it is logged).
        """
        # a dict as an ordered set, by ascending address
        process, held = os.getpid(), dict[_Registration, None]()
        try:
            with self._mutex_of_this_process():
                check_memory_fits(address, num_bytes)
                self._register(address, num_bytes, read_only, owner, held)
            yield
        except BaseException as error:
            if os.getpid() == process:
                for failure in self._release(held):
                    _note(error, failure)
            raise
        if os.getpid() == process:
            failures = self._release(held)
            if failures:
                raise RuntimeError(
                    f"{'; '.join(failures)}\n\n"
                    "hint: `nvidia-smi` shows whether the GPU is lost; the memory is unlocked when "
                    "the process ends"
                )

    def _can_lock_a_page(self) -> bool:
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
            self._process, self._registrations = os.getpid(), []
            self._mutex = threading.Lock()
        return self._mutex

    def copy_ranges(self, address: int, num_bytes: int) -> list[tuple[int, int]]:
        """Split a range at the ends of registrations, into ranges that CUDA can copy.

        The range is split at registrations of this object, and at those of other libraries that
        adjoin them. Other registrations of other libraries may not be found.

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
                registration
                for registration in self._registrations
                if registration.begin < _up(end) and _down(begin) < registration.end
            ]
            for registration in near:
                cuts |= {*registration.range, *(self._registered(registration.begin) or ())}
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
        held: dict[_Registration, None],
    ) -> None:
        """Register the unregistered parts of a range; add all its registrations to `held`."""
        if num_bytes == 0:
            return
        at, end = _down(address, GRANULE_BYTES), _up(address + num_bytes, GRANULE_BYTES)
        longest = self._max_bytes
        while at < end:
            after = bisect_right(self._registrations, at, key=lambda each: each.begin)
            before = self._registrations[after - 1] if after > 0 else None
            if before is not None and at < before.end:
                if before.count == 0:
                    self._unregister_stale(before)
                    continue
                self._reuse(before, held)
                at = before.end
                continue
            # a registration of another library need not begin at a multiple of the granule: it may
            # contain `address`, but not `at`
            inside = at if self._registered(at) is not None else max(at, address)
            registered = self._registered(inside)
            if registered is not None:
                self._check_same_address(inside)
                # if the driver records whole pages, a registration of another table may contain it
                for registration in self._registrations:
                    shares = registration.begin < registered[1] and registered[0] < registration.end
                    if shares and registration.count:
                        self._reuse(registration, held)
                at = registered[1]
                continue
            stop = self._registrations[after].begin if after < len(self._registrations) else end
            # ends at a page boundary, at the next registration or at the end of the range; `_lock`
            # may shorten it
            registration = _Registration(at, min(_down(at + longest), stop, end), 1, owner)
            # added before it is locked, so that it is unlocked even after a KeyboardInterrupt
            self._registrations.insert(after, registration)
            held[registration] = None
            code, longest = self._lock(registration, read_only, longest)
            if code != 0:
                del held[registration]
                self._registrations.remove(registration)
                message = self._refusal_message(registration, num_bytes, code)
                raise LockRefused(message, code in _UNSUITABLE)
            self._check_same_address(at)
            at = registration.end

    def _registered(self, at: int) -> tuple[int, int] | None:
        """Return the range of the registration, of any library, that contains an address.

        None if there is none. If the driver does not report the range, return the page of the
        address.
        """
        found = self.driver.locked_range(at)
        if found is None or found[1] - found[0] > 1:
            return found
        return _down(at), _up(at + 1)

    def _reuse(self, registration: _Registration, held: dict[_Registration, None]) -> None:
        """Add a reference to an existing registration, unless it is in `held`."""
        if registration not in held:
            registration.count += 1
            held[registration] = None

    def _lock(self, registration: _Registration, read_only: bool, longest: int) -> tuple[int, int]:
        """Lock a registration, and shorten it until the driver accepts it.

        Returns:
            The error code of the last attempt, and the largest size for the next registration.
        """
        while True:
            size = registration.end - registration.begin
            code = self.driver.lock(registration.begin, size, read_only)
            if code == cuda.ALREADY_LOCKED and size > 1:
                # another library locked memory in this range: halve the registration until it ends
                # before that memory
                registration.end = registration.begin + size // 2
            elif code in _TOO_LARGE and size > self._min_bytes:
                longest = max(self._min_bytes, _down(size // 2))
                registration.end = _down(registration.begin + longest)
            else:
                return code, longest

    def _check_same_address(self, at: int) -> None:
        seen = self.driver.device_address(at)
        if seen != at:
            found = "no address" if seen is None else f"the address {seen:#x}"
            raise LockRefused(
                f"the host memory at {at:#x} has {found} on GPUs, so that a table there cannot be "
                "read in place\n\nhint: move the features to the GPU, or gather on the host",
                is_unsuitable=True,
            )

    def _unregister_stale(self, registration: _Registration) -> None:
        # A registration that could not be unlocked is not reused. If it has no owner, its addresses
        # may be those of other memory by now, while GPUs would still read the old pages.
        failure = self._unlock(registration)
        if failure is not None:
            raise LockRefused(
                f"{failure}; these bytes were locked for an earlier use\n\n"
                "hint: restart the process",
                is_unsuitable=False,
            )

    def _release(self, registrations: Iterable[_Registration]) -> list[str]:
        """Release registrations, and unlock those without other references; return the failures."""
        failures: list[str] = []
        with self._mutex:
            for registration in registrations:
                registration.count -= 1
            last = [each for each in registrations if each.count == 0]
            if last:
                try:
                    # no GPU may still be reading the memory
                    self.driver.synchronize()
                except Exception as error:
                    failures.append(f"CUDA failed to synchronize: {error}")
            tried = [self._unlock(each) for each in reversed(last)]
            failures += [failure for failure in tried if failure is not None]
        return failures

    def _unlock(self, registration: _Registration) -> str | None:
        """Unlock and remove a registration; after a failure keep it and return the reason."""
        try:
            code = self.driver.unlock(registration.begin)
            failure = None if code == 0 else self.driver.error_name(code)
        except Exception as error:
            # torch raises if the GPU is lost and this thread has not used it before
            failure = str(error)
        if failure is None:
            self._registrations.remove(registration)
            return None
        size = registration.end - registration.begin
        where = f"{size:,} bytes of host memory at {registration.begin:#x}"
        return f"CUDA failed to unlock {where}: {failure}"

    def _refusal_message(self, registration: _Registration, num_bytes: int, code: int) -> str:
        size, limit = registration.end - registration.begin, lock_limit_bytes()
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
            f"{registration.begin:#x}: {self.driver.error_name(code)}\n\nhint: {hint}"
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
