"""Copy parameters and gradients to and from one flat vector.

The vector has one dtype, whatever the dtypes of the parameters, which keep their own memory, so
other references to them remain valid. The number of messages of an exchange does not depend on the
number of parameters. The parameters of groups with `compress=False`, whose gradients are exchanged,
are at its beginning. The extras of an exchange (numbers such as flags) can therefore be appended to
the compressed elements.

Notation: P parameters, n elements, the first d of them in groups with `compress=False`, k extras.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gcnzc.compress import WorkerInfo

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


def to_device(number: float | Tensor, device: torch.device) -> float | Tensor:
    """Return a number unchanged, or a tensor () on `device`."""
    return number.to(device) if isinstance(number, Tensor) else number


@dataclass(frozen=True, eq=False)
class Segment:
    """The position of one parameter in its flat vector: elements `begin` to `end`."""

    name: str
    parameter: nn.Parameter
    begin: int
    end: int

    @cached_property
    def tiles(self) -> tuple[slice, ...]:
        """The slices of `tiles` that cover it."""
        return tuple(tiles(self.begin, self.end, self.parameter.device))


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

    @cached_property
    def tiles(self) -> tuple[slice, ...]:
        """The slices of `tiles` that cover it."""
        parameters = self.group["params"]
        return tuple(tiles(self.begin, self.end, parameters[0].device)) if parameters else ()


class FlatParameters:
    """The layout of trained parameters in one flat vector.

    Args:
        groups: the `param_groups` of an optimizer. Parameters without `requires_grad` are excluded.
            Groups with `compress=False`, whose gradients are exchanged, come first.
        dtype: dtype of the vectors; float64 if any parameter has it, else float32, if None.

    Raises:
        ValueError: no parameter has `requires_grad`, or the parameters are on several devices.
    """

    def __init__(
        self, groups: Sequence[Mapping[str, Any]], dtype: torch.dtype | None = None
    ) -> None:
        self.segments: list[Segment] = []
        self.parts: list[GroupSlice] = []
        begin = offset = 0
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
                offset = begin
        self.num_elements, self.num_uncompressed = begin, offset
        self.uncompressed_parts = [part for part in self.parts if part.begin < offset]
        self.compressed_parts = [part for part in self.parts if part.begin >= offset]
        """the group slices that are compressed"""
        self.parameters: list[Tensor] = [segment.parameter for segment in self.segments]
        """the P trained parameters, in the order of the vector"""
        if not self.parameters:
            raise ValueError(
                "no parameter of the optimizer has requires_grad\n\nhint: give the parameters that "
                "are to be trained"
            )
        if len({parameter.device for parameter in self.parameters}) > 1:
            devices = ", ".join(sorted({str(parameter.device) for parameter in self.parameters}))
            raise ValueError(
                f"parameters on several devices: {devices}\n\nhint: one worker uses one device; "
                "start a worker for each device"
            )
        self.device = self.parameters[0].device
        doubles = any(parameter.dtype == torch.float64 for parameter in self.parameters)
        self.dtype = dtype or (torch.float64 if doubles else torch.float32)
        """dtype of the flat vectors"""
        self._sizes = [segment.end - segment.begin for segment in self.segments]
        self._shapes = [parameter.shape for parameter in self.parameters]
        self.tile_elements = (
            min(begin, TILE_ELEMENTS) if self.device.type == "cpu" else self.num_elements
        )
        """elements of the longest slice of `tiles`"""
        self._scratch: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that are copied and pickled: all except the scratch memory."""
        return {**vars(self), "_scratch": None}

    def layout(self) -> list[str]:
        """Return a line for each parameter, with its shape, dtype and position.

        The lines must be equal on all ranks.
        """
        return [
            f"{each.name} {tuple(each.parameter.shape)} {each.parameter.dtype} at {each.begin}"
            for each in self.segments
        ]

    def worker_info(
        self, rank: int, world_size: int, num_elements: int | None = None
    ) -> WorkerInfo:
        """Return what a reducer of this vector is created for.

        Args:
            rank: this rank.
            world_size: the number of ranks.
            num_elements: the reducer's vector has only the last elements; None for all n.
        """
        begin = 0 if num_elements is None else self.num_elements - num_elements
        layers = tuple(each.end - each.begin for each in self.segments if each.begin >= begin)
        return WorkerInfo(rank, world_size, self.device, self.dtype, layers)

    def zeros(self, extra: int = 0) -> Tensor:
        """Return zeros (n + extra,) on the device of the parameters."""
        return torch.zeros(self.num_elements + extra, dtype=self.dtype, device=self.device)

    def empty(self, extra: int = 0) -> Tensor:
        """Return an uninitialized vector (n + extra,) on the device of the parameters."""
        return torch.empty(self.num_elements + extra, dtype=self.dtype, device=self.device)

    def scratch(self, extra: int = 0) -> Tensor:
        """Return an uninitialized vector (n + extra,), valid until the next call.

        On a CPU its memory is kept: after a new allocation of this size, the first write to each
        page is a page fault. On a GPU torch reuses memory itself, also for other tensors.
        """
        if self.device.type != "cpu":
            return self.empty(extra)
        if self._scratch is None or len(self._scratch) < self.num_elements + extra:
            self._scratch = self.empty(extra)
        return self._scratch[: self.num_elements + extra]

    def views(self, values: Tensor) -> list[Tensor]:
        """Return a view of `values` for each parameter, in the parameter's shape."""
        parts = values[: self.num_elements].split_with_sizes(self._sizes)
        return list(map(Tensor.view, parts, self._shapes))

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
        for parameter, view in zip(self.parameters, self.views(values), strict=True):
            # like torch's optimizers, add in the parameter's dtype
            parameter.add_(view.to(parameter.dtype))

    @torch.no_grad()
    def read_gradients(self, out: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        """Copy the gradients, times `scale`, into the first n elements of `out`, and return it.

        A missing gradient becomes zeros, and a sparse gradient becomes dense.
        """
        present, into = [], []
        for parameter, view in zip(self.parameters, self.views(out), strict=True):
            gradient = parameter.grad
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
            out[: self.num_elements] *= to_device(scale, out.device)
        return out

    def gradients_and_extras(
        self, scale: float | Tensor, extras: Sequence[float], num_extras: int
    ) -> Tensor:
        """Return the gradients, times `scale`, followed by extras, in `scratch` memory.

        Args:
            scale: see `read_gradients`.
            extras: the first extras.
            num_extras: the number of extras; those that are not given are uninitialized.

        Returns:
            (n + num_extras,), valid until the next call of this method or of `scratch`.
        """
        values = self.read_gradients(self.scratch(num_extras), scale)
        given = values[self.num_elements : self.num_elements + len(extras)]
        given.copy_(torch.tensor(extras, dtype=self.dtype), non_blocking=True)
        return values

    @torch.no_grad()
    def write_gradients(self, values: Tensor, wanted: Sequence[bool]) -> None:
        """Copy a vector into the gradients of the `wanted` parameters; set others to None.

        Args:
            values: at least (n,).
            wanted: a flag for each parameter.
        """
        views = self.views(values)
        for parameter, view, is_wanted in zip(self.parameters, views, wanted, strict=True):
            if not is_wanted:
                parameter.grad = None
            elif parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = view.clone()
            else:
                parameter.grad.copy_(view)

    def have_gradients(self) -> list[bool]:
        """Return for each of the P parameters whether it has a gradient now."""
        return [parameter.grad is not None for parameter in self.parameters]
