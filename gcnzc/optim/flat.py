"""Parameters and gradients as one vector for each dtype and device.

Parameters stay ordinary tensors: their values are copied into the vector and out of it, so that
nothing else that holds them notices. Exchanging a vector takes as many messages whatever the number
of parameters.

Letters: P parameters, n elements of a vector.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Segment:
    """Where one parameter lies in its vector."""

    name: str
    parameter: nn.Parameter
    begin: int
    end: int


class FlatVector:
    """The parameters of one dtype on one device, as a vector.

    Args:
        named: names and parameters, in the order in which they lie in the vector.
        extra: elements after those of the parameters, for what else is to be exchanged.
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
        """(n + extra,), on the device of the parameters; what was read last"""

    @property
    def extra(self) -> Tensor:
        """(extra,): the elements after those of the parameters."""
        return self.values[self.num_elements :]

    def views(self) -> list[Tensor]:
        """The part of each parameter in the vector, in its shape."""
        return [
            self.values[each.begin : each.end].view(each.parameter.shape) for each in self.segments
        ]

    @torch.no_grad()
    def read_parameters(self) -> Tensor:
        """Copy the parameters into the vector, and return it, (n + extra,)."""
        torch._foreach_copy_(self.views(), [each.parameter for each in self.segments])
        return self.values

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Copy the vector into the parameters."""
        torch._foreach_copy_([each.parameter for each in self.segments], self.views())

    @torch.no_grad()
    def read_gradients(self, scale: float | Tensor = 1.0) -> Tensor:
        """Copy the gradients, times `scale`, into the vector; one that is missing is zeros.

        A sparse gradient is made dense.
        """
        present, into = [], []
        for segment, view in zip(self.segments, self.views(), strict=True):
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
            self.values[: self.num_elements] *= on(scale, self.values.device)
        return self.values

    @torch.no_grad()
    def write_gradients(self, wanted: Sequence[bool]) -> None:
        """Copy the vector into the gradients of the parameters that are `wanted`; others have none.

        Args:
            wanted: one for each parameter.
        """
        for segment, view, is_wanted in zip(self.segments, self.views(), wanted, strict=True):
            parameter = segment.parameter
            if not is_wanted:
                parameter.grad = None
            elif parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = view.clone()
            else:
                parameter.grad.copy_(view)


def on(number: float | Tensor, device: torch.device) -> float | Tensor:
    """A number, or a tensor () moved to a device."""
    return number.to(device) if isinstance(number, Tensor) else number
