"""Staging buffers: GPU tensors are sent and received through host memory."""

from typing import Any

import torch
from torch import Tensor


class StagingBuffers:
    """Host buffers of a channel, which later requests of the same size reuse."""

    def __init__(self) -> None:
        self.free: dict[Any, list[Tensor]] = {}
        self.lent: list[tuple[Any, Tensor]] = []
        self.num_allocated = 0

    def lend(self, values: Tensor, *, pinned: bool = False, is_kept: bool = False) -> Tensor:
        """Return a host buffer (n,) with the size and dtype of `values`.

        Args:
            values: of n elements.
            pinned: whether the buffer is page-locked.
            is_kept: whether the caller returns the buffer with `give_back`; otherwise `take_back`
                returns it.
        """
        key = (values.numel(), values.dtype, pinned)
        free = self.free.setdefault(key, [])
        if not free:
            self.num_allocated += 1
            free.append(_allocate(values, pinned=pinned))
        buffer = free.pop()
        if not is_kept:
            self.lent.append((key, buffer))
        return buffer

    def copy_to_host(self, values: Tensor) -> Tensor:
        """Copy `values` to page-locked memory; wait until they are computed and copied."""
        return self.lend(values, pinned=True).view(values.shape).copy_(values)

    def give_back(self, buffer: Tensor, *, pinned: bool) -> None:
        """Return a buffer that was lent with `is_kept`, for reuse."""
        self.free[buffer.numel(), buffer.dtype, pinned].append(buffer)

    def take_back(self) -> None:
        """Take back all lent buffers, except those lent with `is_kept`, for reuse."""
        for key, buffer in self.lent:
            self.free[key].append(buffer)
        self.lent.clear()


def _allocate(values: Tensor, *, pinned: bool) -> Tensor:
    """Allocate (n,) like `values`, page-locked if `pinned` and if possible."""
    try:
        return torch.empty(values.numel(), dtype=values.dtype, pin_memory=pinned)
    except RuntimeError:
        return torch.empty(values.numel(), dtype=values.dtype)
