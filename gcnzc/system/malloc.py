"""Keep freed memory in the process, or return it to the system, with mallopt of the C library.

A training step on the CPU allocates and frees hundreds of megabytes. By default, the GNU C library
maps each large array anew, so that the system clears its pages when they are first used. If freed
memory stays in the process, the next step uses the same pages.

Source: mallopt(3) and malloc_trim(3) of the GNU C library.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

# constants of malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
# large arrays come from the heap, whose end is never returned
_KEEP = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1}
# the library's own limit of the number of mappings, and the values at which its adjustment of both
# thresholds ends; mallopt stops that adjustment
_RETURN = {_M_MMAP_MAX: 65536, _M_MMAP_THRESHOLD: 32 * 2**20, _M_TRIM_THRESHOLD: 64 * 2**20}
# variables by which users choose this themselves
_CHOICES = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")

_kept = False


@contextmanager
def freed_memory(*, kept: bool) -> Iterator[None]:
    """Within this context, keep freed memory in the process, or return it to the system.

    The setting applies to all threads. Contexts can be nested. Nothing changes if the C library is
    not GNU's, or if MALLOC_MMAP_MAX_, MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ or the
    `glibc.malloc` part of GLIBC_TUNABLES is in the environment. Allocators that replace malloc,
    such as jemalloc, ignore it.

    Args:
        kept: if True, allocations of any size reuse freed memory, and the process keeps its
            largest size until the context ends. If False, free memory returns to the system at the
            beginning, and arrays of 32 MiB and more return when they are freed, unless they were
            allocated between others.
    """
    global _kept
    before = _kept
    _set(kept)
    try:
        yield
    finally:
        _set(before)


def _set(kept: bool) -> None:
    global _kept
    if kept == _kept:
        return
    _kept = kept
    library = _library()
    if library is not None:
        for name, value in (_KEEP if kept else _RETURN).items():
            library.mallopt(name, value)
        if not kept:
            library.malloc_trim(0)


@lru_cache(maxsize=1)
def _library() -> "ctypes.CDLL | None":
    """Return the C library, or None if its settings are the user's or it has no mallopt."""
    chosen = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if chosen or any(name in os.environ for name in _CHOICES):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") else None
