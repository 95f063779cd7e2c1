"""Memory for minibatches, reused once its last reader is gone.

A fresh allocation of many megabytes is made of pages that do not exist yet: the first write to
each of them enters the kernel, and that costs more than the gather that fills it. So a pool hands
out memory it has handed out before. Nobody gives anything back by hand: a tensor's memory returns
when the last tensor, view, numpy array or autograd graph that refers to it dies, so a batch may be
kept for as long as anyone likes.
"""

import math
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gcnzc.kernels.threads import ForkSafeLock

# on the host: below this malloc keeps memory by itself, and is quicker than we are
SMALL_BYTES = 1 << 16
# an idle block serves a request of at least half its size; below SMALL_BYTES, of any
WASTE = 2
# idle memory is at most this many times the largest request, whatever was lent before
IDLE = 4
HUGE_PAGE_BYTES = 1 << 21


@dataclass(frozen=True)
class _Block:
    """Memory of a pool, and what its last borrower left: events that the next one must wait for."""

    memory: Tensor  # (bytes,) uint8
    events: Sequence[Any] = ()


class Pool:
    """Hands out tensors whose memory comes back when nothing refers to it.

    Any thread may ask, and any thread may drop the last reference. What is lent and what is idle
    never exceed together what was lent at one time, so a loop that drops as much as it asks for
    makes nothing anew; what was idle longest goes first.

    Args:
        new_memory: makes at least so many bytes, as one row of uint8 on any device; ordinary memory
            of the host if None.
        small_bytes: smaller requests are ordinary allocations on the host, not the pool's.
        before_end: called with the events of memory that the pool lets go of for good.
    """

    def __init__(
        self,
        new_memory: Callable[[int], Tensor] | None = None,
        small_bytes: int = SMALL_BYTES,
        before_end: Callable[[Sequence[Any]], object] | None = None,
    ) -> None:
        self._new_memory = new_memory or _new_memory
        self._small_bytes, self._before_end = small_bytes, before_end
        self._lock = ForkSafeLock()
        # oldest first
        self._idle: list[_Block] = []
        self._largest_bytes = self._lent_bytes = self._most_lent_bytes = 0
        # A finalizer can run inside any statement, also one that holds the lock, so it only
        # appends here, which needs no lock.
        self._returned: deque[_Block] = deque()

    def empty(self, shape: Sequence[int] | int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised, contiguous tensor, on a 64 B boundary if it is the pool's.

        Its storage cannot be resized. On the host, memory for asynchronous copies to a GPU must be
        kept until they are done: the pool does not know of streams. On a GPU, use `lend`.

        Args:
            shape: as for `torch.empty`.
            dtype: of the elements.
        """
        return self.lend(shape, dtype)[0]

    def lend(
        self,
        shape: Sequence[int] | int,
        dtype: torch.dtype = torch.float32,
        at_end: Callable[[], Sequence[Any]] | None = None,
    ) -> tuple[Tensor, Sequence[Any]]:
        """What `empty` gives, and the events that must be over before anybody writes into it.

        Args:
            shape: as for `torch.empty`.
            dtype: of the elements.
            at_end: called when nothing refers to the memory any more, by whoever dropped it, in any
                thread; gives the events after which the memory is really unused.
        """
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < self._small_bytes:
            return torch.empty(shape, dtype=dtype), ()
        # no bytes have no address that could come back
        num_bytes = max(num_bytes, 1)
        block = self._take(num_bytes)
        lease = _lease_of(block.memory, num_bytes)
        back = (weakref.ref(self), block.memory, at_end, self._before_end)
        end = weakref.finalize(lease, _give_back, *back)
        end.atexit = False
        # no view of another tensor: a view that comes out of an autograd function takes no writes
        storage = torch.as_tensor(lease, device=block.memory.device).untyped_storage()
        tensor = torch.empty(0, dtype=dtype, device=block.memory.device)
        return tensor.set_(storage, 0, shape), block.events  # type: ignore[call-overload]

    def __del__(self) -> None:
        before_end = getattr(self, "_before_end", None)
        if before_end is not None:
            for block in (*self._idle, *self._returned):
                before_end(block.events)

    @property
    def idle_bytes(self) -> int:
        """Memory that waits for the next request."""
        self._tidy()
        with self._lock:
            return sum(block.memory.nbytes for block in self._idle)

    def _take(self, num_bytes: int) -> _Block:
        self._tidy()
        with self._lock:
            self._largest_bytes = max(self._largest_bytes, num_bytes)
            fitting = [
                (block.memory.nbytes, place)
                for place, block in enumerate(self._idle)
                if num_bytes <= block.memory.nbytes <= max(WASTE * num_bytes, SMALL_BYTES)
            ]
            if fitting:
                block = self._idle.pop(min(fitting)[1])
            else:
                # an eighth more, since the next batch may be a little larger
                block = _Block(self._new_memory(num_bytes + num_bytes // 8))
            self._lent_bytes += block.memory.nbytes
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
                    self._lent_bytes -= self._idle[-1].memory.nbytes
                self._let_go()
            finally:
                self._lock.release()

    def _let_go(self) -> None:
        idle_bytes = sum(block.memory.nbytes for block in self._idle)
        most_bytes = min(
            self._most_lent_bytes - self._lent_bytes, max(IDLE * self._largest_bytes, SMALL_BYTES)
        )
        while idle_bytes > most_bytes:
            block = self._idle.pop(0)
            idle_bytes -= block.memory.nbytes
            if self._before_end is not None:
                self._before_end(block.events)


class _DeviceLease:
    """Bytes on a GPU, in the form in which torch takes up memory and keeps its owner alive."""

    def __init__(self, memory: Tensor, num_bytes: int) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


def _lease_of(memory: Tensor, num_bytes: int) -> Any:
    # torch keeps this alive as long as the storage, and nobody else ever sees it
    if memory.is_cuda:
        return _DeviceLease(memory, num_bytes)
    return memory.numpy()[:num_bytes]


def _give_back(
    pool: "weakref.ref[Pool]",
    memory: Tensor,
    at_end: Callable[[], Sequence[Any]] | None,
    before_end: Callable[[Sequence[Any]], object] | None,
) -> None:
    owner = pool()
    events = () if at_end is None else at_end()
    if owner is not None:
        owner._returned.append(_Block(memory, events))
        owner._tidy()
    elif before_end is not None:
        before_end(events)


def _new_memory(num_bytes: int) -> Tensor:
    # Pages that are never written take no memory. Straight from the system, so that a block that is
    # let go is really gone.
    num_bytes += -num_bytes % mmap.PAGESIZE
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= HUGE_PAGE_BYTES:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
