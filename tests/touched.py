"""The bytes that a piece of work reads, which do not depend on the load of the machine."""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def touched_bytes(work: Callable[[], T]) -> tuple[T, int]:
    """Return the result of some work, and how many bytes it read or touched.

    Memory-mapped files count by page faults, each of which is one page, though it may map several.
    """
    before = _bytes()
    result = work()
    return result, _bytes() - before


def _bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    (read,) = (int(line.split()[1]) for line in lines if line.startswith("rchar:"))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return read + (usage.ru_minflt + usage.ru_majflt) * resource.getpagesize()
