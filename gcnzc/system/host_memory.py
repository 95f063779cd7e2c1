"""Memory mappings of this process and available memory, from /proc.

Sources: proc(5), mincore(2) and the kernel's guides to control groups (Documentation/admin-guide/
cgroup-v2.rst and cgroup-v1/memory.rst).
"""

import ctypes
import os
import resource
from collections.abc import Iterator, Sequence
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
    leave (versions 1 and 2; containers and batch systems set limits there).
    """
    lines = (proc / "meminfo").read_text().splitlines()
    left = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    for folder, names in _groups(proc, control_groups):
        limit = _number(folder / names.limit)
        used = _number(folder / names.used)
        if limit is not None and used is not None:
            left = min(left, max(0, limit - used + _cached_bytes(folder, names.cached)))
    return left


def total_bytes(proc: Path = Path("/proc"), control_groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory and swap that this process could use on an otherwise idle machine.

    The limits of cgroup v1 and v2 apply.
    """
    lines = (proc / "meminfo").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if ":" in line}
    swap_bytes = sizes.get("SwapTotal", 0)
    total = sizes["MemTotal"] + swap_bytes
    for folder, names in _groups(proc, control_groups):
        # "max" means no limit
        memory, swap = (_number(folder / name) for name in (names.limit, names.swap_limit))
        if memory is not None:
            total = min(total, memory + (swap_bytes if swap is None or names.is_old else swap))
        if swap is not None and names.is_old:
            # version 1 limits the sum of memory and swap
            total = min(total, swap)
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


@dataclass(frozen=True)
class _Names:
    """The names of the files of a control group."""

    limit: str
    used: str
    swap_limit: str
    # keys of memory.stat whose sum is the memory that the page cache uses
    cached: tuple[str, ...]
    is_old: bool  # version 1


_NAMES = _Names(
    "memory.max", "memory.current", "memory.swap.max", ("active_file", "inactive_file"), False
)
_OLD_NAMES = _Names(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.memsw.limit_in_bytes",
    ("total_active_file", "total_inactive_file"),
    True,
)


def _groups(proc: Path, control_groups: Path) -> Iterator[tuple[Path, _Names]]:
    """Yield the folders of this process's control groups for memory and of their ancestors."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        # the number of the hierarchy, its controllers and the path; version 2 names no controllers
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = control_groups, _NAMES
        elif "memory" in controllers.split(","):
            root, names = control_groups / "memory", _OLD_NAMES
        else:
            continue
        folder = root / path.lstrip("/")
        yield folder, names
        # in a container, the path may be that outside of it, and the root is its own group
        while folder != root:
            folder = folder.parent
            yield folder, names


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cached_bytes(folder: Path, keys: Sequence[str]) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    numbers = dict(line.split() for line in lines)
    return sum(int(numbers.get(key, 0)) for key in keys)
