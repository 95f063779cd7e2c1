"""Copy all trained parameters of an optimizer to and from one flat vector.

The vector has one dtype, whatever the dtypes of the parameters, which keep their own memory. The
parameters of groups with `compress=False`, which are exchanged densely, are at its beginning. The
notes of an exchange (numbers such as flags) can therefore be appended to the compressed elements.

Letters: P parameters, n elements, d of them dense.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gcnzc.optim.flat import Segment, copy_gradients, to_device

# tiles of several vectors fit into the cache of a CPU core together
TILE_ELEMENTS = 1 << 16


def tiles(begin: int, end: int, device: torch.device) -> Iterator[slice]:
    """Iterate over slices that cover `begin` to `end` of a vector.

    On a CPU a slice fits into the cache, so that several operations on it read memory once. On a
    GPU there is one slice.
    """
    step = TILE_ELEMENTS if device.type == "cpu" else max(1, end - begin)
    for at in range(begin, end, step):
        yield slice(at, min(at + step, end))


@dataclass(frozen=True, eq=False)
class GroupSlice:
    """The elements `begin` to `end` of the flat vector, which belong to one parameter group."""

    group: dict[str, Any]
    """the optimizer's parameter group, with its current options"""
    begin: int
    end: int
    first: int
    """index of the first segment"""
    last: int
    """index after the last segment"""


class FlatParameters:
    """The layout of an optimizer's trained parameters in one flat vector.

    Args:
        groups: the `param_groups` of an optimizer. Parameters without `requires_grad` are excluded.
            Groups with `compress=False`, which are exchanged densely, come first.

    Raises:
        ValueError: no parameter has `requires_grad`, or the parameters are on several devices.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self.segments: list[Segment] = []
        self.parts: list[GroupSlice] = []
        begin = dense = 0
        seen: set[int] = set()
        order = sorted(enumerate(groups), key=lambda pair: bool(pair[1].get("compress", True)))
        for number, group in order:
            first, part_begin = len(self.segments), begin
            for index, parameter in enumerate(group["params"]):
                if not parameter.requires_grad or id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                end = begin + parameter.numel()
                name = f"group {number}, parameter {index}"
                self.segments.append(Segment(name, parameter, begin, end))
                begin = end
            part = GroupSlice(group, part_begin, begin, first, len(self.segments))  # type: ignore[arg-type]
            self.parts.append(part)
            if not group.get("compress", True):
                dense = begin
        self.num_elements, self.num_dense = begin, dense
        tensors = [segment.parameter for segment in self.segments]
        if not tensors:
            raise ValueError(
                "no parameter of the optimizer has requires_grad\n\nhint: give the parameters that "
                "are to be trained"
            )
        if len({parameter.device for parameter in tensors}) > 1:
            devices = ", ".join(sorted({str(parameter.device) for parameter in tensors}))
            raise ValueError(
                f"parameters on several devices: {devices}\n\nhint: one worker uses one device; "
                "start a worker for each device"
            )
        self.device = tensors[0].device
        doubles = any(parameter.dtype == torch.float64 for parameter in tensors)
        self.dtype = torch.float64 if doubles else torch.float32
        """dtype of the flat vectors: float64 if any parameter has it, else float32"""

    @property
    def parameters(self) -> list[Tensor]:
        """The P trained parameters, in the order of the vector."""
        return [segment.parameter for segment in self.segments]

    def layout(self) -> list[str]:
        """Return a line for each parameter, with its shape, dtype and position.

        The lines must be equal on all ranks.
        """
        return [
            f"{each.name} {tuple(each.parameter.shape)} {each.parameter.dtype} at {each.begin}"
            for each in self.segments
        ]

    def zeros(self, extra: int = 0) -> Tensor:
        """Return zeros (n + extra,) on the device of the parameters."""
        return torch.zeros(self.num_elements + extra, dtype=self.dtype, device=self.device)

    def empty(self, extra: int = 0) -> Tensor:
        """Return an uninitialised vector (n + extra,) on the device of the parameters."""
        return torch.empty(self.num_elements + extra, dtype=self.dtype, device=self.device)

    def views(self, values: Tensor) -> list[Tensor]:
        """Return a view of `values` for each parameter, in the parameter's shape."""
        return [values[each.begin : each.end].view(each.parameter.shape) for each in self.segments]

    def tiles(self, begin: int, end: int) -> Iterator[slice]:
        """See `tiles`."""
        return tiles(begin, end, self.device)

    @torch.no_grad()
    def read_parameters(self, out: Tensor) -> Tensor:
        """Copy the parameters into the first n elements of `out`, and return it."""
        torch._foreach_copy_(self.views(out), self.parameters)
        return out

    @torch.no_grad()
    def write_parameters(self, values: Tensor) -> None:
        """Copy the first n elements of a vector into the parameters."""
        torch._foreach_copy_(self.parameters, self.views(values))

    @torch.no_grad()
    def add_to_parameters(self, values: Tensor) -> None:
        """Add the first n elements of a vector to the parameters."""
        views = self.views(values)
        for parameter, view in zip(self.parameters, views, strict=True):
            # like torch's optimizers, add in the parameter's dtype
            parameter.add_(view.to(parameter.dtype))

    @torch.no_grad()
    def read_gradients(self, out: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        """Copy the gradients, times `scale`, into the first n elements of `out`, and return it.

        A missing gradient becomes zeros, and a sparse gradient becomes dense.
        """
        copy_gradients(self.segments, self.views(out))
        if isinstance(scale, Tensor) or scale != 1.0:
            out[: self.num_elements] *= to_device(scale, out.device)
        return out

    def have_gradients(self) -> list[bool]:
        """Return for each of the P parameters whether it has a gradient now."""
        return [segment.parameter.grad is not None for segment in self.segments]
