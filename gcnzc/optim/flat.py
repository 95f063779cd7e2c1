"""Copy parameters and gradients to and from one flat vector.

The vector has one dtype, whatever the dtypes of the parameters, which keep their own memory, so
other references to them remain valid. The number of messages of an exchange does not depend on the
number of parameters. The parameters of groups with `compress=False`, whose gradients are exchanged
uncompressed, are at its beginning.

Notation: n elements of the flat vector, m of a slice of it, P parameters, k extras.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gcnzc.compress import WorkerInfo
from gcnzc.optim.fully_shard import local, shard_name

# several float32 vectors of this length fit into the cache of a CPU core together
TILE_ELEMENTS = 1 << 16


@dataclass(frozen=True, eq=False)
class Segment:
    """One parameter, its elements of the flat vector, and the current options of its group."""

    name: str
    parameter: Tensor
    here: slice
    options: dict[str, Any]


class FlatParameters:
    """The layout of trained parameters, or of this rank's shards of them, in one flat vector.

    Args:
        groups: the `param_groups` of an optimizer. Parameters without `requires_grad` are excluded.
        parameters: the trained parameters in the order of the vector; that of the groups if None.
        dtype: dtype of the vectors; float64 if any parameter has it, else float32, if None.

    Raises:
        ValueError: no parameter has `requires_grad`, or the parameters are on several devices.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        parameters: Sequence[Tensor] | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        # groups with `compress=False` first
        order = sorted(enumerate(groups), key=lambda pair: bool(pair[1].get("compress", True)))
        found = [
            (f"group {number}, parameter {index}", parameter, group)
            for number, group in order
            for index, parameter in enumerate(group["params"])
            if parameter.requires_grad
        ]
        if not found:
            raise ValueError(
                "no parameter of the optimizer has requires_grad\n\nhint: give the parameters that "
                "are to be trained"
            )
        if parameters is not None:
            positions = {parameter: position for position, parameter in enumerate(parameters)}
            found.sort(key=lambda each: positions[each[1]])
        self.segments: list[Segment] = []
        self.num_uncompressed = begin = 0
        for name, parameter, group in found:
            here = slice(begin, begin := begin + local(parameter).numel())
            self.segments.append(Segment(name, parameter, here, group))
            if not group.get("compress", True):
                self.num_uncompressed = begin
        self.num_elements = begin
        self.parameters = [segment.parameter for segment in self.segments]
        """the P trained parameters, in the order of the vector"""
        devices = sorted({str(parameter.device) for parameter in self.parameters})
        if len(devices) > 1:
            raise ValueError(
                f"parameters on several devices: {', '.join(devices)}\n\nhint: one worker uses one "
                "device; start a worker for each device"
            )
        self.device = self.parameters[0].device
        has_double = any(each.dtype == torch.float64 for each in self.parameters)
        self.dtype = dtype or (torch.float64 if has_double else torch.float32)
        """dtype of the flat vectors"""
        is_on_cpu = self.device.type == "cpu"
        self.tile_elements = min(begin, TILE_ELEMENTS) if is_on_cpu else begin
        """elements of the longest slice of `tiles`"""
        self._scratch: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that are copied and pickled: all except the scratch memory."""
        return {**vars(self), "_scratch": None}

    def layout(self) -> list[str]:
        """Return a line for each parameter, which must be equal on all ranks and in states."""
        return [
            f"{each.name} {tuple(each.parameter.shape)} {each.parameter.dtype} at {each.here.start}"
            f"{shard_name([each.parameter])}"
            for each in self.segments
        ]

    def worker_info(self, rank: int, world_size: int) -> WorkerInfo:
        """Return what a reducer of the whole vector is created for."""
        return WorkerInfo(rank, world_size, self.device, self.dtype, self.layers())

    def layers(self, begin: int = 0) -> tuple[int, ...]:
        """Return the numbers of elements of the parameters from an element on; see `WorkerInfo`."""
        return tuple(s.here.stop - s.here.start for s in self.segments if s.here.start >= begin)

    def slices(self, begin: int = 0) -> Iterator[tuple[slice, dict[str, Any]]]:
        """Iterate over the slices of parameter groups from an element on, with their options."""
        start = begin
        segments = [segment for segment in self.segments if segment.here.start >= begin]
        for segment, after in zip(segments, [*segments[1:], None], strict=True):
            if after is None or after.options is not segment.options:
                yield slice(start, segment.here.stop), segment.options
                start = segment.here.stop

    def tiles(self, begin: int = 0) -> Iterator[tuple[slice, dict[str, Any]]]:
        """Iterate over slices of the vector, each of one parameter group, with its options.

        On a CPU a slice fits into the cache, so that several operations on it read memory once. On
        a GPU it is the whole slice of a group.
        """
        for whole, options in self.slices(begin):
            for here in self.tiles_of(whole):
                yield here, options

    def tiles_of(self, whole: slice) -> Iterator[slice]:
        """Iterate over the tiles of a slice; see `tiles`."""
        for at in range(whole.start, whole.stop, max(1, self.tile_elements)):
            yield slice(at, min(at + self.tile_elements, whole.stop))

    def zeros(self, extra: int = 0) -> Tensor:
        """Return zeros (n + extra,) on the device of the parameters."""
        return self.empty(extra).zero_()

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
        """Return a view of a vector (n,) or longer for each parameter, in the parameter's shape."""
        return [values[s.here].view(local(s.parameter).shape) for s in self.segments]

    def _pieces(self, values: Tensor, here: slice) -> Iterator[tuple[Tensor, Tensor, slice]]:
        """Iterate over the parameters in a slice: elements of `values`, parameter and its slice."""
        for segment in self.segments:
            begin, end = max(here.start, segment.here.start), min(here.stop, segment.here.stop)
            if begin < end:
                first = segment.here.start
                own = values[begin - here.start : end - here.start]
                yield own, local(segment.parameter), slice(begin - first, end - first)

    @torch.no_grad()
    def read_parameters(self, out: Tensor, here: slice | None = None) -> Tensor:
        """Copy the parameters of a slice, by default all, into the first m elements of `out`."""
        if here in (None, slice(0, self.num_elements)):
            torch._foreach_copy_(self.views(out), list(map(local, self.parameters)))
            return out
        for own, parameter, part in self._pieces(out, here):
            own.copy_(parameter.reshape(-1)[part])
        return out

    @torch.no_grad()
    def write_parameters(self, values: Tensor, here: slice | None = None) -> None:
        """Copy the first m elements of a vector into the parameters of a slice, by default all."""
        if here in (None, slice(0, self.num_elements)):
            torch._foreach_copy_(list(map(local, self.parameters)), self.views(values))
            return
        for own, parameter, part in self._pieces(values, here):
            flat = parameter.reshape(-1)
            flat[part] = own.to(parameter.dtype)
            if not parameter.is_contiguous():
                # `flat` is a copy
                parameter.copy_(flat.view(parameter.shape))

    @property
    def values(self) -> Tensor:
        """The parameters (n,), copied; assign a vector to change them."""
        return self.read_parameters(self.empty())

    @values.setter
    def values(self, values: Tensor) -> None:
        self.write_parameters(values)

    @torch.no_grad()
    def read_gradients(self, out: Tensor, factor: float | Tensor = 1.0) -> Tensor:
        """Copy the gradients, times `factor`, into the first n elements of `out`, and return it.

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
        if isinstance(factor, Tensor) or factor != 1.0:
            out[: self.num_elements] *= to_device(factor, out.device)
        return out

    @torch.no_grad()
    def write_gradients(self, values: Tensor, wanted: Sequence[bool]) -> None:
        """Copy a vector (n,) into the gradients of the `wanted` parameters; set others to None."""
        for parameter, view, is_wanted in zip(
            self.parameters, self.views(values), wanted, strict=True
        ):
            if not is_wanted:
                parameter.grad = None
            elif parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = view.clone()
            else:
                parameter.grad.copy_(view)

    def have_gradients(self) -> list[bool]:
        """Return for each of the P parameters whether it has a gradient now."""
        return [parameter.grad is not None for parameter in self.parameters]


def to_device(number: float | Tensor, device: torch.device) -> float | Tensor:
    """Return a number unchanged, or a tensor () on `device`."""
    return number.to(device) if isinstance(number, Tensor) else number
