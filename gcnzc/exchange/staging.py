"""Staging buffers: GPU tensors are sent and received through host memory."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange.requests import AllGatherScalar, AllToAll, Broadcast, Collective, Mean, Sum


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


class StagedRequest:
    """A request whose GPU tensors are copied to the host.

    Args:
        request: the request.
        buffers: for the host tensors.
    """

    def __init__(self, request: Collective, buffers: StagingBuffers) -> None:
        self.original = self.request = request
        if not is_on_gpu(request):
            return
        if isinstance(request, AllToAll):
            self.request = replace(
                request, parts=[_copy_to_host(part, buffers) for part in request.parts]
            )
        else:
            assert not isinstance(request, AllGatherScalar), "scalars have no tensor"
            self.request = replace(request, values=_copy_to_host(request.values, buffers))

    def copy_answer(self, answer: Any) -> Any:
        """Copy the answer to the device of the original request's tensors, and return it."""
        if self.request is self.original:
            return answer
        if isinstance(self.original, AllToAll):
            device = self.original.parts[0].device
            return [part.to(device) for part in answer]
        assert not isinstance(self.original, AllGatherScalar), "scalars have no tensor"
        values = self.original.values
        if isinstance(self.original, Sum | Mean | Broadcast):
            return values.copy_(answer)
        return answer.to(values.device)


def is_on_gpu(request: Any) -> bool:
    """Whether a request's values are on a GPU."""
    values = request.parts[0] if isinstance(request, AllToAll) else getattr(request, "values", None)
    return values is not None and values.is_cuda


def _copy_to_host(values: Tensor, buffers: StagingBuffers) -> Tensor:
    """Copy `values` to page-locked memory; wait until they are computed and copied."""
    return buffers.lend(values, pinned=True).view(values.shape).copy_(values)
