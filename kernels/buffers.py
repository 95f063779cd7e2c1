"""A memory pool for minibatches, which reuses memory when the last reference to it is dropped.

The first write to each page of newly allocated memory is a page fault, and for tensors of many
megabytes the faults take longer than the gather that fills them. The pool therefore reuses memory.
Memory is returned to the pool automatically, when the last tensor, view, numpy array or autograd
graph that refers to it is deleted, so a batch may be kept for any length of time.
"""

import math
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gcnzc.kernels.threads import ForkSafeLock

# allocates a tensor of a length and a dtype, like `Pool.empty`
Allocate: TypeAlias = Callable[[int, torch.dtype], Tensor]

# smaller host allocations use malloc, which reuses memory itself and is faster
SMALL_BYTES = 1 << 16
# a block is at most this many times the size of the request; below SMALL_BYTES there is no limit
MAX_WASTE_FACTOR = 2
# idle memory is at most this many times the largest request
MAX_IDLE_FACTOR = 4
HUGE_PAGE_BYTES = 1 << 21


@dataclass(frozen=True)
class _Block:
    """Memory of a pool, and the events to wait for before it may be written again."""

    memory: Tensor  # (bytes,) uint8
    events: Sequence[Any] = ()


class Pool:
    """Allocates tensors whose memory is reused when nothing refers to it any more.

    All methods are thread-safe, and any thread may drop the last reference to a tensor. Memory in
    use and idle memory together never exceed the peak of memory in use, so a loop that frees as
    much as it allocates allocates no new memory. The memory that was idle longest is released
    first.

    Args:
        new_memory: allocates at least the given number of bytes, as (bytes,) uint8 on any device;
            pageable host memory if None.
        small_bytes: smaller requests are ordinary host allocations outside the pool.
        on_release: called with the events of a block when the pool releases its memory.
    """

    def __init__(
        self,
        new_memory: Callable[[int], Tensor] | None = None,
        small_bytes: int = SMALL_BYTES,
        on_release: Callable[[Sequence[Any]], object] | None = None,
    ) -> None:
        self._new_memory = new_memory or _new_memory
        self._small_bytes, self._on_release = small_bytes, on_release
        self._lock = ForkSafeLock()
        # oldest first
        self._idle: list[_Block] = []
        self._largest_bytes = self._leased_bytes = self._max_leased_bytes = 0
        # a finalizer can run within any statement, even one that holds the lock, so it only
        # appends to this deque, which needs no lock
        self._returned: deque[_Block] = deque()

    def empty(self, shape: Sequence[int] | int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialized, contiguous tensor, aligned to 64 B if it is from the pool.

        Its storage cannot be resized. The pool does not track streams: keep a host tensor until
        asynchronous copies from it have completed, and use `allocate` on a GPU.

        Args:
            shape: as for `torch.empty`.
            dtype: of the elements.
        """
        return self.allocate(shape, dtype)[0]

    def allocate(
        self,
        shape: Sequence[int] | int,
        dtype: torch.dtype = torch.float32,
        on_free: Callable[[], Sequence[Any]] | None = None,
    ) -> tuple[Tensor, Sequence[Any]]:
        """Return a tensor as `empty` does, and the events to wait for before writing to it.

        Args:
            shape: as for `torch.empty`.
            dtype: of the elements.
            on_free: called when the last reference to the memory is dropped, in the thread that
                drops it; returns the events after which the memory is unused on its device.
        """
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < self._small_bytes:
            return torch.empty(shape, dtype=dtype), ()
        # an empty tensor has no memory whose lifetime could be tracked
        num_bytes = max(num_bytes, 1)
        block = self._take(num_bytes)
        lease = _make_lease(block.memory, num_bytes)
        back = (weakref.ref(self), block.memory, on_free, self._on_release)
        end = weakref.finalize(lease, _return_memory, *back)
        end.atexit = False
        # not a view of another tensor: autograd forbids in-place writes to views that a custom
        # function returns
        storage = torch.as_tensor(lease, device=block.memory.device).untyped_storage()
        tensor = torch.empty(0, dtype=dtype, device=block.memory.device)
        return tensor.set_(storage, 0, shape), block.events  # type: ignore[call-overload]

    def __del__(self) -> None:
        on_release = getattr(self, "_on_release", None)
        if on_release is not None:
            for block in (*self._idle, *self._returned):
                on_release(block.events)

    @property
    def idle_bytes(self) -> int:
        """Bytes of memory that is not in use."""
        self._collect_returned()
        with self._lock:
            return sum(block.memory.nbytes for block in self._idle)

    def _take(self, num_bytes: int) -> _Block:
        self._collect_returned()
        with self._lock:
            self._largest_bytes = max(self._largest_bytes, num_bytes)
            candidates = [
                (block.memory.nbytes, place)
                for place, block in enumerate(self._idle)
                if num_bytes
                <= block.memory.nbytes
                <= max(MAX_WASTE_FACTOR * num_bytes, SMALL_BYTES)
            ]
            if candidates:
                block = self._idle.pop(min(candidates)[1])
            else:
                # an eighth more than requested, since the next batch may be slightly larger
                block = _Block(self._new_memory(num_bytes + num_bytes // 8))
            self._leased_bytes += block.memory.nbytes
            self._max_leased_bytes = max(self._max_leased_bytes, self._leased_bytes)
            self._release_idle()
            return block

    def _collect_returned(self) -> None:
        # the loop checks again after releasing the lock: a thread that failed to acquire it may
        # have appended a block in the meantime
        while self._returned and self._lock.acquire(blocking=False):
            try:
                while self._returned:
                    self._idle.append(self._returned.popleft())
                    self._leased_bytes -= self._idle[-1].memory.nbytes
                self._release_idle()
            finally:
                self._lock.release()

    def _release_idle(self) -> None:
        idle_bytes = sum(block.memory.nbytes for block in self._idle)
        max_idle_bytes = min(
            self._max_leased_bytes - self._leased_bytes,
            max(MAX_IDLE_FACTOR * self._largest_bytes, SMALL_BYTES),
        )
        while idle_bytes > max_idle_bytes:
            block = self._idle.pop(0)
            idle_bytes -= block.memory.nbytes
            if self._on_release is not None:
                self._on_release(block.events)


class _DeviceLease:
    """Memory on a GPU with the CUDA array interface, which torch keeps alive with its tensors."""

    def __init__(self, memory: Tensor, num_bytes: int) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


def _make_lease(memory: Tensor, num_bytes: int) -> Any:
    # torch keeps the lease alive as long as the storage, and it has no other references
    if memory.is_cuda:
        return _DeviceLease(memory, num_bytes)
    return memory.numpy()[:num_bytes]


def _return_memory(
    pool: "weakref.ref[Pool]",
    memory: Tensor,
    on_free: Callable[[], Sequence[Any]] | None,
    on_release: Callable[[Sequence[Any]], object] | None,
) -> None:
    owner = pool()
    events = () if on_free is None else on_free()
    if owner is not None:
        owner._returned.append(_Block(memory, events))
        owner._collect_returned()
    elif on_release is not None:
        on_release(events)


def _new_memory(num_bytes: int) -> Tensor:
    # mmap instead of malloc, so that releasing a block returns its memory to the system; pages that
    # are never written take no memory
    num_bytes += -num_bytes % mmap.PAGESIZE
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= HUGE_PAGE_BYTES:
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
