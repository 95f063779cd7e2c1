"""The parameters of an optimizer as one vector, whatever their dtypes and groups.

Parameters stay ordinary tensors: vectors are made for a step, and copied out of and into them.
Those that are exchanged densely come first in a vector, then those that are exchanged in codes, so
that notes may follow these.

Letters: P parameters, n elements, d of them dense.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gcnzc.optim.flat import Segment, on

TILE_ELEMENTS = 1 << 16  # some of which, of several vectors, fit into a core's cache together


def tiles(begin: int, end: int, device: torch.device) -> Iterator[slice]:
    """Places from `begin` to `end` of a vector, so few at a time that a cache holds them.

    For several operations in a row, which then read memory once. A GPU takes all at once.
    """
    step = TILE_ELEMENTS if device.type == "cpu" else max(1, end - begin)
    for at in range(begin, end, step):
        yield slice(at, min(at + step, end))


@dataclass(frozen=True, eq=False)
class GroupSlice:
    """What lies together in the vector: parameters of one group."""

    group: dict[str, Any]
    """of the optimizer, with its options as they are now"""
    begin: int
    end: int
    first: int
    """of the segments"""
    last: int
    """of the segments, plus 1"""


class FlatParameters:
    """Where the parameters of an optimizer lie in a vector.

    Args:
        groups: `param_groups` of an optimizer. Frozen parameters are left out; a group whose
            `compress` is False is exchanged densely.

    Raises:
        ValueError: there are no parameters, or they lie on several devices.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self.segments: list[Segment] = []
        self.parts: list[GroupSlice] = []
        begin = dense = 0
        seen: set[int] = set()
        order = sorted(enumerate(groups), key=lambda pair: bool(pair[1].get("compress", True)))
        for number, group in order:
            first, part_begin = len(self.segments), begin
            for place, parameter in enumerate(group["params"]):
                if not parameter.requires_grad or id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                end = begin + parameter.numel()
                name = f"group {number}, parameter {place}"
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
                "no parameter of the optimizer has requires_grad\n\nhint: give those to be trained"
            )
        if len({parameter.device for parameter in tensors}) > 1:
            devices = ", ".join(sorted({str(parameter.device) for parameter in tensors}))
            raise ValueError(
                f"parameters on several devices: {devices}\n\nhint: one worker has one device; "
                "start a worker for each"
            )
        self.device = tensors[0].device
        doubles = any(parameter.dtype == torch.float64 for parameter in tensors)
        self.dtype = torch.float64 if doubles else torch.float32
        """of vectors: float32, or float64 if a parameter has it"""

    @property
    def parameters(self) -> list[Tensor]:
        """(P,), in the order in which they lie in a vector."""
        return [segment.parameter for segment in self.segments]

    def layout(self) -> list[str]:
        """What must be the same on all workers, a line for each parameter."""
        return [
            f"{each.name} {tuple(each.parameter.shape)} {each.parameter.dtype} at {each.begin}"
            for each in self.segments
        ]

    def zeros(self, extra: int = 0) -> Tensor:
        """(n + extra,) on the device of the parameters."""
        return torch.zeros(self.num_elements + extra, dtype=self.dtype, device=self.device)

    def empty(self, extra: int = 0) -> Tensor:
        """(n + extra,) on the device of the parameters, of any content."""
        return torch.empty(self.num_elements + extra, dtype=self.dtype, device=self.device)

    def views(self, values: Tensor) -> list[Tensor]:
        """The part of each parameter in a vector, in its shape."""
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
            # as torch's optimizers do, in the parameter's dtype
            parameter.add_(view.to(parameter.dtype))

    @torch.no_grad()
    def read_gradients(self, out: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        """Copy the gradients, times `scale`, into the first n elements of `out`, and return it.

        One that is missing is zeros; a sparse one is made dense.
        """
        present, into = [], []
        for segment, view in zip(self.segments, self.views(out), strict=True):
            gradient = segment.parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient.is_sparse:
                view.copy_(gradient.to_dense())
            else:
                present.append(gradient)
                into.append(view)
        if present:
            torch._foreach_copy_(into, present)
        if isinstance(scale, Tensor) or scale != 1.0:
            out[: self.num_elements] *= on(scale, out.device)
        return out

    def have_gradients(self) -> list[bool]:
        """(P,): which parameters have one now."""
        return [segment.parameter.grad is not None for segment in self.segments]
