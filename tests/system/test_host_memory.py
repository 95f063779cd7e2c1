"""Memory of the machine and of this process, as Linux reports it and from made-up files."""

import mmap
import resource

import numpy as np
import pytest

from gcnzc.system import host_memory as module
from gcnzc.system.host_memory import (
    PAGE_BYTES,
    Mapping,
    available_bytes,
    lock_limit_bytes,
    mappings,
    needed_bytes,
    total_bytes,
)

MAPS = """\
00010000-00020000 r--s 00000000 fe:00 17      /data/a table/features.npy
00020000-00030000 rw-p 00000000 00:00 0
7ffc0000-7ffd0000 rw-p 00000000 00:00 0       [stack]
"""


def anonymous(num_bytes):
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


@pytest.fixture
def file_on_disk(tmp_path):
    path = tmp_path / "features.npy"
    np.save(path, np.arange(1 << 15, dtype=np.int64))
    return path


def test_lines_of_proc_maps_are_parsed(tmp_path):
    (tmp_path / "maps").write_text(MAPS)
    first = Mapping(0x10000, 0x20000, False, "fe:00", "/data/a table/features.npy")
    second = Mapping(0x20000, 0x30000, True, "00:00", "")
    assert mappings(0x1FFFF, 1, tmp_path / "maps") == [first]
    assert mappings(0x20000, 1, tmp_path / "maps") == [second]
    assert mappings(0x1FFFF, 2, tmp_path / "maps") == [first, second]
    assert mappings(0x30000, 99, tmp_path / "maps") == []
    assert mappings(0x7FFC0000, 1, tmp_path / "maps")[0].path == "[stack]"


def test_a_file_on_a_disk_is_recognized(monkeypatch):
    monkeypatch.setattr(module, "_memory_devices", lambda: frozenset({"00:1b"}))
    assert Mapping(0, 1, True, "fe:00", "/data/features.npy").is_file
    assert not Mapping(0, 1, True, "00:1b", "/tmp/features.npy").is_file
    assert not Mapping(0, 1, True, "00:01", "/dev/zero (deleted)").is_file
    assert not Mapping(0, 1, True, "00:01", "/memfd:rows (deleted)").is_file
    assert not Mapping(0, 1, True, "00:00", "[heap]").is_file


@pytest.mark.parametrize(
    ("path", "is_device"),
    [
        ("/dev/nvidiactl", True),
        ("/dev/nvidia-uvm", True),
        ("/dev/shm/rows", False),
        ("/dev/zero (deleted)", False),
        ("/dev/hugepages/rows", False),
        ("/data/features.npy", False),
        ("", False),
    ],
)
def test_pages_of_a_device_need_no_memory(monkeypatch, path, is_device):
    memory = anonymous(4 * PAGE_BYTES)
    address = memory.ctypes.data
    mapping = Mapping(address, address + 4 * PAGE_BYTES, True, "00:06", path)
    assert mapping.is_device == is_device
    assert not (mapping.is_device and mapping.is_file)
    monkeypatch.setattr(module, "mappings", lambda address, num_bytes: [mapping])
    assert (needed_bytes(address, 4 * PAGE_BYTES) == 0) == is_device


def test_memory_counts_as_needed_until_it_is_written(monkeypatch):
    # looked at in more than one part
    monkeypatch.setattr(module, "_PAGES_PER_CALL", 64)
    memory = anonymous(1000 * PAGE_BYTES)
    address = memory.ctypes.data
    assert needed_bytes(address, 1000 * PAGE_BYTES) == 1000 * PAGE_BYTES
    memory[100 * PAGE_BYTES : 300 * PAGE_BYTES] = 1
    assert needed_bytes(address, 1000 * PAGE_BYTES) == 800 * PAGE_BYTES
    assert needed_bytes(address + 100 * PAGE_BYTES, 201 * PAGE_BYTES) == PAGE_BYTES


def test_a_cached_file_counts_as_needed_as_a_whole(file_on_disk, monkeypatch):
    # the test's folder may lie in memory
    monkeypatch.setattr(module, "_memory_devices", frozenset)
    array = np.load(file_on_disk, mmap_mode="r")
    assert int(array.sum()) > 0
    begin = array.ctypes.data // PAGE_BYTES * PAGE_BYTES
    assert needed_bytes(begin, 5 * PAGE_BYTES) == 5 * PAGE_BYTES


def files(folder, meminfo, cgroup, groups):
    """A made-up /proc and /sys/fs/cgroup; a group is (path, limit, used, cached).

    Groups below `memory` are those of version 1.
    """
    proc, control_groups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(meminfo)
    if cgroup is not None:
        (proc / "self" / "cgroup").write_text(cgroup)
    for path, limit, used, cached in groups:
        group = control_groups / path
        group.mkdir(parents=True, exist_ok=True)
        old = path.split("/")[0] == "memory"
        (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(f"{limit}\n")
        (group / ("memory.usage_in_bytes" if old else "memory.current")).write_text(f"{used}\n")
        if cached is not None:
            # in version 1, the counts of the group alone exclude those of groups in it
            total = "inactive_file 0\nactive_file 0\ntotal_" if old else ""
            stat = f"anon 5\n{total}inactive_file {cached - 1}\n{'total_' * old}active_file 1\n"
            (group / "memory.stat").write_text(stat)
    return proc, control_groups


MEMINFO = "MemTotal:       2000 kB\nMemFree:         100 kB\nMemAvailable:    1000 kB\n"


@pytest.mark.parametrize(
    ("cgroup", "groups", "expected"),
    [
        # no control groups, or no limit for memory
        (None, [], 1000 * 1024),
        ("4:cpu:/job\n", [("job", 5, 4, 0), ("memory/job", 5, 4, 0)], 1000 * 1024),
        ("4:memory:/job\n", [("job", 5, 4, 0), ("memory/job", 2**63 - 4096, 4, 0)], 1000 * 1024),
        # version 1: its own group, one around it, and that of a container
        ("4:memory:/job\n0::/\n", [("memory/job", 9000, 8000, 500)], 1500),
        ("4:hugetlb,memory:/a/b\n", [("memory/a", 9000, 8000, 9), ("memory/a/b", 99, 0, 9)], 108),
        ("4:memory:/docker/1f\n", [("memory", 9000, 8000, 500)], 1500),
        ("0::/job\n", [("job", "max", 4, 0)], 1000 * 1024),
        ("0::/job\n", [], 1000 * 1024),
        # a limit beyond what there is
        ("0::/job\n", [("job", 1 << 30, 4, 0)], 1000 * 1024),
        # what is cached can be had
        ("0::/job\n", [("job", 9000, 8000, 500)], 1500),
        ("0::/job\n", [("job", 9000, 8000, None)], 1000),
        ("0::/job\n", [("job", 9000, 9500, 100)], 0),
        # the nearest, in a container, and one around it
        ("1:name=systemd:/\n0::/\n", [("", 9000, 8000, 500)], 1500),
        ("0::/job/step\n", [("job", 9000, 8000, 500), ("job/step", 9000, 1000, 1)], 1500),
        ("0::/job/step\n", [("job", 9000, 1000, 500), ("job/step", 9000, 8000, 1)], 1001),
    ],
)
def test_available_memory_is_computed_from_meminfo_and_limits(tmp_path, cgroup, groups, expected):
    assert available_bytes(*files(tmp_path, MEMINFO, cgroup, groups)) == expected


SWAP = "MemTotal:       2000 kB\nSwapTotal:       500 kB\nMemAvailable:    1000 kB\n"


@pytest.mark.parametrize(
    ("cgroup", "path", "limits", "expected"),
    [
        (None, "", {}, 2500 * 1024),
        ("0::/a/b\n", "a", {"memory.max": 9000, "memory.swap.max": "max"}, 9000 + 500 * 1024),
        ("0::/a/b\n", "a", {"memory.max": 9000, "memory.swap.max": 10}, 9010),
        ("3:memory:/a/b\n", "memory/a", {"memory.limit_in_bytes": 9000}, 9000 + 500 * 1024),
        (
            "3:memory:/a/b\n",
            "memory",
            {"memory.limit_in_bytes": 9000, "memory.memsw.limit_in_bytes": 9500},
            9500,
        ),
    ],
)
def test_total_memory_is_computed_from_meminfo_and_limits(tmp_path, cgroup, path, limits, expected):
    proc, control_groups = files(tmp_path, SWAP, cgroup, [])
    folder = control_groups / path
    folder.mkdir(parents=True)
    for name, limit in limits.items():
        (folder / name).write_text(f"{limit}\n")
    assert total_bytes(proc, control_groups) == expected


def test_the_limit_of_locked_memory_is_read(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (4096, 8192))
    assert lock_limit_bytes() == 4096
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, -1))
    assert lock_limit_bytes() is None
