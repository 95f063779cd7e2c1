"""Copy parameters and gradients to and from one flat vector for each dtype and device.

The parameters keep their own memory, so other references to them remain valid. The number of
messages of an exchange does not depend on the number of parameters.

Letters: P parameters, n elements of a vector.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Segment:
    """The position of one parameter in its flat vector: elements `begin` to `end`."""

    name: str
    parameter: nn.Parameter
    begin: int
    end: int


class FlatVector:
    """A flat vector for the parameters of one dtype on one device.

    Args:
        named: names and parameters, in the order of the vector.
        extra: the number of elements after those of the parameters, for other exchanged values.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], extra: int = 0) -> None:
        self.segments = []
        begin = 0
        for name, parameter in named:
            end = begin + parameter.numel()
            self.segments.append(Segment(name, parameter, begin, end))
            begin = end
        self.num_elements = begin
        first = named[0][1]
        self.values = torch.zeros(begin + extra, dtype=first.dtype, device=first.device)
        """(n + extra,), on the device of the parameters: the values that were read last"""

    @property
    def extra(self) -> Tensor:
        """A view (extra,) of the elements after those of the parameters."""
        return self.values[self.num_elements :]

    def views(self) -> list[Tensor]:
        """Return a view of the vector for each parameter, in the parameter's shape."""
        return [
            self.values[each.begin : each.end].view(each.parameter.shape) for each in self.segments
        ]

    @torch.no_grad()
    def read_parameters(self) -> Tensor:
        """Copy the parameters into the vector, and return it: (n + extra,)."""
        torch._foreach_copy_(self.views(), [each.parameter for each in self.segments])
        return self.values

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Copy the vector into the parameters."""
        torch._foreach_copy_([each.parameter for each in self.segments], self.views())

    @torch.no_grad()
    def read_gradients(self, scale: float | Tensor = 1.0) -> Tensor:
        """Copy the gradients, times `scale`, into the vector, and return it: (n + extra,).

        A missing gradient becomes zeros, and a sparse gradient becomes dense.
        """
        copy_gradients(self.segments, self.views())
        if isinstance(scale, Tensor) or scale != 1.0:
            self.values[: self.num_elements] *= to_device(scale, self.values.device)
        return self.values

    @torch.no_grad()
    def write_gradients(self, wanted: Sequence[bool]) -> None:
        """Copy the vector into the gradients of the `wanted` parameters; set others to None.

        Args:
            wanted: a flag for each parameter.
        """
        for segment, view, is_wanted in zip(self.segments, self.views(), wanted, strict=True):
            parameter = segment.parameter
            if not is_wanted:
                parameter.grad = None
            elif parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = view.clone()
            else:
                parameter.grad.copy_(view)


def to_device(number: float | Tensor, device: torch.device) -> float | Tensor:
    """Return a number unchanged, or a tensor () on `device`."""
    return number.to(device) if isinstance(number, Tensor) else number


@torch.no_grad()
def copy_gradients(segments: Iterable[Segment], views: Iterable[Tensor]) -> None:
    """Copy each gradient into its view; a missing one becomes zeros, a sparse one dense."""
    present, into = [], []
    for segment, view in zip(segments, views, strict=True):
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
