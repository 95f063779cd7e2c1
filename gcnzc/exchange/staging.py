"""Staging: messages of GPU tensors, sent and received through host memory."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange.requests import AllGatherScalar, AllToAll, Broadcast, Collective, Mean, Sum


class StagingBuffers:
    """Buffers of a channel, kept for the next request of the same size."""

    def __init__(self) -> None:
        self.free: dict[Any, list[Tensor]] = {}
        self.lent: list[tuple[Any, Tensor]] = []
        self.made = 0

    def lend(self, values: Tensor, *, pinned: bool = False, is_kept: bool = False) -> Tensor:
        """Return a host buffer (n,) with the size and dtype of `values`, lent until `take_back`.

        With `is_kept`, it is lent until `give_back`.
        """
        key = (values.numel(), values.dtype, pinned)
        free = self.free.setdefault(key, [])
        if not free:
            self.made += 1
            free.append(_host_memory(values, pinned=pinned))
        buffer = free.pop()
        if not is_kept:
            self.lent.append((key, buffer))
        return buffer

    def give_back(self, buffer: Tensor, *, pinned: bool) -> None:
        """Return a buffer that was lent with `is_kept`."""
        self.free[buffer.numel(), buffer.dtype, pinned].append(buffer)

    def take_back(self) -> None:
        """Take back all lent buffers, except those with `is_kept`."""
        for key, buffer in self.lent:
            self.free[key].append(buffer)
        self.lent.clear()


def _host_memory(values: Tensor, *, pinned: bool) -> Tensor:
    """Allocate (n,) like `values`, page-locked if possible; copies of pageable memory block."""
    try:
        return torch.empty(values.numel(), dtype=values.dtype, pin_memory=pinned)
    except RuntimeError:
        return torch.empty(values.numel(), dtype=values.dtype)


class StagedRequest:
    """A request with its GPU tensors copied to the host."""

    def __init__(self, request: Collective, memory: StagingBuffers) -> None:
        self.given = self.request = request
        if not is_on_gpu(request):
            return
        if isinstance(request, AllToAll):
            self.request = replace(request, parts=[_down(part, memory) for part in request.parts])
        else:
            assert not isinstance(request, AllGatherScalar), "a vote has no tensor"
            self.request = replace(request, values=_down(request.values, memory))

    def back(self, answer: Any) -> Any:
        """Return the result on the device of the request's tensors."""
        if self.request is self.given:
            return answer
        if isinstance(self.given, AllToAll):
            device = self.given.parts[0].device
            return [part.to(device) for part in answer]
        assert not isinstance(self.given, AllGatherScalar), "a vote has no tensor"
        values = self.given.values
        if isinstance(self.given, Sum | Mean | Broadcast):
            return values.copy_(answer)
        return answer.to(values.device)


def is_on_gpu(request: Any) -> bool:
    """Whether a request's values are on a GPU."""
    values = request.parts[0] if isinstance(request, AllToAll) else getattr(request, "values", None)
    return values is not None and values.is_cuda


def _down(values: Tensor, memory: StagingBuffers) -> Tensor:
    """Copy `values` to page-locked memory; waits until they are computed and copied."""
    return memory.lend(values, pinned=True).view(values.shape).copy_(values)
