"""Run kernels on several threads; and a lock that survives forks.

Kernels release the GIL and process a half-open range of items, so plain Python threads run them in
parallel. Numba's threading layers are not used. The only one that is always installed, `workqueue`,
aborts the process when two Python threads enter it at the same time, as the loader's threads and
the training thread do.
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
    """A lock that is unlocked in a forked child and in a copy, even if the original is locked.

    A thread of the parent may hold a lock while another thread forks. The child does not have that
    thread, so a plain lock would never be released there.
    """

    def __init__(self) -> None:
        self._reset()
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

    def _reset(self) -> None:
        self._lock = threading.Lock()


_locks: "weakref.WeakSet[ForkSafeLock]" = weakref.WeakSet()


def _reset_locks() -> None:
    for lock in list(_locks):
        lock._reset()


os.register_at_fork(after_in_child=_reset_locks)


@lru_cache(maxsize=1)
def _pool(pid: int) -> ThreadPoolExecutor:
    # keyed by process: threads do not survive a fork
    return ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="gcnzc-kernel")


def parallel_for(
    kernel: Callable[..., Any],
    num_items: int,
    *args: Any,
    threads: int | None = None,
    grain_size: int = 1024,
) -> None:
    """Call `kernel(*args, begin, end)` on several threads, with ranges that cover all items once.

    The kernel must write only the results of its range, so that they do not depend on the number of
    threads.

    Args:
        kernel: compiled with `nogil=True`; its last two arguments are the range.
        num_items: the ranges cover `range(num_items)`; with 0 items there is no call.
        args: passed to the kernel before the range.
        threads: number of threads; `torch.get_num_threads()` if None.
        grain_size: the fewest items for a thread, as in `at::parallel_for`.
    """
    if threads is None:
        threads = torch.get_num_threads()
    parts = max(1, min(threads, num_items // grain_size))
    if num_items == 0:
        return
    if parts == 1:
        kernel(*args, 0, num_items)
        return
    bounds = [num_items * i // parts for i in range(parts + 1)]
    pool = _pool(os.getpid())
    rest = [pool.submit(kernel, *args, bounds[i], bounds[i + 1]) for i in range(1, parts)]
    kernel(*args, bounds[0], bounds[1])
    for part in rest:
        part.result()
