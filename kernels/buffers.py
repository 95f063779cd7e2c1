"""Memory for minibatches that is used again once its last reader is gone.

A fresh allocation of many megabytes is made of pages that do not exist yet: the first write to
each of them enters the kernel, and that costs more than the gather that fills it. So a pool hands
out memory it has handed out before. Nobody gives anything back by hand: a tensor's memory returns
when the last tensor, view, numpy array or autograd graph that refers to it dies, so a batch may be
kept for as long as anyone likes.
"""

import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# below this malloc keeps memory by itself, and is quicker than we are
SMALL_BYTES = 1 << 16
# an idle block serves a request of at least half its size
WASTE = 2
# idle memory is at most this many times the largest request, whatever was lent before
IDLE = 4
HUGE_PAGE_BYTES = 1 << 21


class Pool:
    """Hands out tensors on the host, whose memory comes back when nothing refers to it.

    Any thread may ask, and any thread may drop the last reference. What is lent and what is idle
    never exceed together what was lent at one time, so a loop that drops as much as it asks for
    makes nothing anew; what was idle longest goes first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # oldest first
        self._idle: list[NDArray[np.uint8]] = []
        self._largest_bytes = self._lent_bytes = self._most_lent_bytes = 0
        # A finalizer can run inside any statement, also one that holds the lock, so it only
        # appends here, which needs no lock.
        self._returned: deque[NDArray[np.uint8]] = deque()

    def empty(self, shape: Sequence[int] | int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised, contiguous tensor on the host, on a 64 B boundary from 64 KiB on.

        Its storage cannot be resized. Memory for asynchronous copies to a GPU must not come from
        here unless the copy is waited for: the pool does not know of streams.

        Args:
            shape: as for `torch.empty`.
            dtype: of the elements.
        """
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < SMALL_BYTES:
            return torch.empty(shape, dtype=dtype)
        block = self._take(num_bytes)
        # torch keeps this view alive as long as the storage, and nobody else ever sees it
        lease = block[:num_bytes]
        end = weakref.finalize(lease, _give_back, weakref.ref(self), block)
        end.atexit = False
        # no view of another tensor: a view that comes out of an autograd function takes no writes
        storage = torch.from_numpy(lease).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape)  # type: ignore[call-overload]

    @property
    def idle_bytes(self) -> int:
        """Memory that waits for the next request."""
        self._tidy()
        with self._lock:
            return sum(block.nbytes for block in self._idle)

    def _take(self, num_bytes: int) -> NDArray[np.uint8]:
        self._tidy()
        with self._lock:
            self._largest_bytes = max(self._largest_bytes, num_bytes)
            fitting = [
                (block.nbytes, place)
                for place, block in enumerate(self._idle)
                if num_bytes <= block.nbytes <= WASTE * num_bytes
            ]
            block = self._idle.pop(min(fitting)[1]) if fitting else _new_block(num_bytes)
            self._lent_bytes += block.nbytes
            self._most_lent_bytes = max(self._most_lent_bytes, self._lent_bytes)
            self._let_go()
            return block

    def _tidy(self) -> None:
        # Whoever holds the lock looks again after letting go, so that nothing is left behind by
        # one who found it taken.
        while self._returned and self._lock.acquire(blocking=False):
            try:
                while self._returned:
                    self._idle.append(self._returned.popleft())
                    self._lent_bytes -= self._idle[-1].nbytes
                self._let_go()
            finally:
                self._lock.release()

    def _let_go(self) -> None:
        idle_bytes = sum(block.nbytes for block in self._idle)
        most_bytes = self._most_lent_bytes - self._lent_bytes
        while idle_bytes > min(most_bytes, IDLE * self._largest_bytes):
            idle_bytes -= self._idle.pop(0).nbytes


def _give_back(pool: "weakref.ref[Pool]", block: NDArray[np.uint8]) -> None:
    owner = pool()
    if owner is not None:
        owner._returned.append(block)
        owner._tidy()


def _new_block(num_bytes: int) -> NDArray[np.uint8]:
    # An eighth more, since the next batch may be a little larger; pages that are never written
    # take no memory. Straight from the system, so that a block that is let go is really gone.
    num_bytes += num_bytes // 8
    num_bytes += -num_bytes % mmap.PAGESIZE
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= HUGE_PAGE_BYTES:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
