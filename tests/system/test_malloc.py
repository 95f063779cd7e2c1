"""Keeping freed memory in the process."""

import platform

import pytest
from programs import output_of

# allocates and frees arrays again and again, as training steps do, and counts the page faults
PROGRAM = """
import resource, sys
import torch
from gcnzc.system.malloc import freed_memory

def faults(sizes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in sizes:
        torch.empty(size << 20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident_mib():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize() >> 20

torch.set_num_threads(1)
first, sizes = resident_mib(), [40, 50, 90]
with freed_memory(kept=True):
    # small objects may lie between the arrays of the first rounds
    kept, held = min(faults(sizes) for _ in range(10)), resident_mib() - first
    with freed_memory(kept=False):
        inner = resident_mib() - first
        returned = faults(sizes)
    again = min(faults(sizes) for _ in range(10))
print(kept, held, inner, returned, again, resident_mib() - first)
"""

glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="mallopt is a function of the GNU C library"
)


def measured(**environment):
    """Return the figures that PROGRAM prints."""
    printed = output_of("-c", PROGRAM, **{"THP_MEM_ALLOC_ENABLE": "0"} | environment)
    return [int(word) for word in printed.split()]


@glibc
@pytest.mark.processes
def test_freed_memory_is_reused_within_the_context_and_returned_after_it():
    kept, held, inner, returned, again, after = measured()
    # 180 MiB are in 90 pages or more, since the largest have 2 MiB
    assert max(kept, again) < 20 < 90 <= returned
    assert max(inner, after) < 50 < 90 < held


@pytest.mark.processes
@glibc
@pytest.mark.parametrize(
    "given",
    [
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576"},
        {"MALLOC_MMAP_THRESHOLD_": "1048576"},
    ],
    ids=str,
)
def test_settings_of_the_user_are_kept(given):
    kept, _, _, returned, again, _ = measured(**given)
    assert min(kept, returned, again) >= 90
