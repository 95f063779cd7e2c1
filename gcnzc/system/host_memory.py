"""Memory mappings of this process and available memory, from /proc.

Sources: proc(5), mincore(2) and the kernel's guide to control groups (Documentation/admin-guide/
cgroup-v2.rst).
"""

import ctypes
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

PAGE_BYTES = resource.getpagesize()


# pages per call of mincore, which needs a buffer of one byte per page
_PAGES_PER_CALL = 1 << 18


# file systems whose files are in memory
_IN_MEMORY = {"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"}


# path prefixes of shared memory, with or without a file
_SHARED = ("/dev/zero", "/dev/shm/", "/dev/hugepages/", "/memfd:", "/SYSV", "/anon_hugepage")


@dataclass(frozen=True)
class Mapping:
    """A mapped address range of this process, a line of /proc/self/maps."""

    begin: int
    end: int
    writable: bool
    # major:minor, as in /proc/self/mountinfo
    device: str
    # empty without a file
    path: str

    @property
    def is_file(self) -> bool:
        """Whether the pages are backed by a file on a disk or a network file system."""
        named = self.path.startswith("/") and not self.path.startswith(("/dev/", *_SHARED))
        return named and self.device not in _memory_devices()

    @property
    def is_device(self) -> bool:
        """Whether a driver allocated the pages, as CUDA's driver does for `Tensor.pin_memory`."""
        return self.path.startswith("/dev/") and not self.path.startswith(_SHARED)


def mappings(address: int, num_bytes: int, maps: Path = Path("/proc/self/maps")) -> list[Mapping]:
    """Return the mappings that overlap an address range, by ascending address.

    Args:
        address: of the first byte, in this process.
        num_bytes: size of the range, at least 1.
        maps: in the format of /proc/PID/maps.
    """
    return [
        mapping
        for mapping in _parse_maps(maps.read_text())
        if mapping.begin < address + num_bytes and mapping.end > address
    ]


def needed_bytes(address: int, num_bytes: int) -> int:
    """Return how many bytes of available memory are needed to make a whole range resident.

    For files these are all bytes, including cached ones, because Linux counts its page cache as
    available. For anonymous memory these are pages that were never written or are swapped out; for
    device memory none.

    Args:
        address: in this process, at a page boundary.
        num_bytes: a multiple of the page size; the range must be mapped.
    """
    needed = 0
    for mapping in mappings(address, num_bytes):
        begin, end = max(mapping.begin, address), min(mapping.end, address + num_bytes)
        if mapping.is_file:
            needed += end - begin
        elif not mapping.is_device:
            needed += _non_resident_bytes(begin, end)
    return needed


def available_bytes(
    proc: Path = Path("/proc"), control_groups: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the bytes of memory that are available to this process.

    This is the minimum of MemAvailable and of what the limits of this process's control groups
    leave (version 2; containers and batch systems set limits there).
    """
    lines = (proc / "meminfo").read_text().splitlines()
    left = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    for folder in _groups(proc, control_groups):
        limit = _number(folder / "memory.max")
        used = _number(folder / "memory.current")
        if limit is not None and used is not None:
            left = min(left, max(0, limit - used + _cached_bytes(folder)))
    return left


def total_bytes(proc: Path = Path("/proc"), control_groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory and swap that this process could use on an otherwise idle machine.

    The limits of control groups apply: version 2 and, if mounted, version 1.
    """
    lines = (proc / "meminfo").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if ":" in line}
    total = sizes["MemTotal"] + sizes.get("SwapTotal", 0)
    for folder in _groups(proc, control_groups):
        memory = _number(folder / "memory.max")
        # "max" means no limit
        swap = _number(folder / "memory.swap.max")
        if memory is not None:
            total = min(total, memory + (sizes.get("SwapTotal", 0) if swap is None else swap))
    # the root of version 1, which in a container is the container's own group
    for name in ("memory.memsw.limit_in_bytes", "memory.limit_in_bytes"):
        limit = _number(control_groups / "memory" / name)
        if limit is not None:
            swap_bytes = 0 if "memsw" in name else sizes.get("SwapTotal", 0)
            total = min(total, limit + swap_bytes)
    return total


def lock_limit_bytes() -> int | None:
    """Return the limit for mlock(2) in bytes, `ulimit -l`; None if it is unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _parse_maps(text: str) -> Iterator[Mapping]:
    for line in text.splitlines():
        # begin-end permissions offset device inode path; the path may contain spaces
        addresses, permissions, _, device, _, *rest = line.split(maxsplit=5)
        begin, end = (int(address, 16) for address in addresses.split("-"))
        yield Mapping(begin, end, permissions[1] == "w", device, rest[0] if rest else "")


@cache
def _memory_devices(mountinfo: Path = Path("/proc/self/mountinfo")) -> frozenset[str]:
    # major:minor is hexadecimal in maps, and decimal in mountinfo
    devices = set()
    for line in mountinfo.read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if rest.split()[0] in _IN_MEMORY:
            major, minor = (int(part) for part in fields.split()[2].split(":"))
            devices.add(f"{major:02x}:{minor:02x}")
    return frozenset(devices)


def _non_resident_bytes(begin: int, end: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    here = np.empty(_PAGES_PER_CALL, np.uint8)
    absent = 0
    for at in range(begin, end, _PAGES_PER_CALL * PAGE_BYTES):
        num_bytes = min(end - at, _PAGES_PER_CALL * PAGE_BYTES)
        if libc.mincore(at, num_bytes, here.ctypes.data) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"mincore at {at:#x}: {os.strerror(error)}")
        # only the lowest bit is defined
        pages = here[: num_bytes // PAGE_BYTES]
        absent += PAGE_BYTES * (len(pages) - int(np.count_nonzero(pages & 1)))
    return absent


def _groups(proc: Path, control_groups: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group and of its ancestors."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("0::/"):
            folder = control_groups / line.removeprefix("0::/")
            yield folder
            while folder != control_groups:
                folder = folder.parent
                yield folder


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cached_bytes(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    numbers = dict(line.split() for line in lines)
    return sum(int(numbers.get(key, 0)) for key in ("active_file", "inactive_file"))
