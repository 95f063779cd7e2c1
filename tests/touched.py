"""The bytes that a piece of work reads, which do not depend on the load of the machine."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def touched_bytes(work: Callable[[], T]) -> tuple[T, int]:
    """Return the result of some work, and how many bytes of files it read.

    Of memory-mapped files, the pages count that are resident because of the work and its result,
    with pages around them that the kernel maps at the same time.
    """
    before = _bytes()
    result = work()
    return result, _bytes() - before


def _bytes() -> int:
    read, resident = (
        int(line.split()[1])
        for file, name in (("io", "rchar:"), ("status", "RssFile:"))
        for line in Path(f"/proc/self/{file}").read_text().splitlines()
        if line.startswith(name)
    )
    return read + (resident << 10)
