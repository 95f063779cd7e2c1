"""Run a kernel on several threads, each with a part of the items; and a lock that survives forks.

Kernels are compiled without the GIL and take a half-open range of items, so plain Python threads
run them side by side. Numba's own thread layers are not used: the default one aborts the process
when two Python threads enter it at once, and the loader's threads and the model's do.
"""

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch


class ForkSafeLock:
    """A lock that is free in a forked child, and in a copy, whoever holds the original.

    A thread of the parent may hold a lock while another one forks. The child has no such thread, so
    nobody would ever release the lock there.
    """

    def __init__(self) -> None:
        self._renew()
        _locks.add(self)

    def acquire(self, blocking: bool = True) -> bool:
        """Acquire the lock, and return whether that succeeded; see `threading.Lock.acquire`."""
        return self._lock.acquire(blocking)

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type["ForkSafeLock"], tuple[()]]:
        return ForkSafeLock, ()

    def _renew(self) -> None:
        self._lock = threading.Lock()


_locks: "weakref.WeakSet[ForkSafeLock]" = weakref.WeakSet()


def _renew_locks() -> None:
    for lock in list(_locks):
        lock._renew()


os.register_at_fork(after_in_child=_renew_locks)


@lru_cache(maxsize=1)
def _pool(pid: int) -> ThreadPoolExecutor:
    # keyed by process: threads do not survive a fork
    return ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="gcnzc-kernel")


def in_parts(
    kernel: Callable[..., Any],
    num_items: int,
    *args: Any,
    threads: int | None = None,
    least: int = 1024,
) -> None:
    """Call `kernel(*args, begin, end)` so that the ranges cover `range(num_items)` once.

    The kernel must write only what belongs to its range, so that the result does not depend on
    the number of threads.

    Args:
        kernel: compiled with `nogil=True`; its last two arguments are the range.
        num_items: items in all; 0 calls nothing.
        args: passed on before the range.
        threads: how many at once; `torch.get_num_threads()` if None.
        least: fewest items worth a thread.
    """
    if threads is None:
        threads = torch.get_num_threads()
    parts = max(1, min(threads, num_items // least))
    if num_items == 0:
        return
    bounds = [num_items * i // parts for i in range(parts + 1)]
    if parts == 1:
        kernel(*args, 0, num_items)
        return
    pool = _pool(os.getpid())
    rest = [pool.submit(kernel, *args, bounds[i], bounds[i + 1]) for i in range(1, parts)]
    kernel(*args, bounds[0], bounds[1])
    for part in rest:
        part.result()
