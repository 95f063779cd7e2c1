"""Payloads without elements, for simulations of which only times and bytes are needed."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch


class SizeOnly:
    """The shape and dtype of a contiguous tensor, without its elements.

    Pass it as the values of requests to `lockstep`: messages have the size of the tensor, and
    nothing is copied or added. It has the methods of a tensor that collectives use; results have
    the shapes that a tensor would have. Do not use it over processes.

    Args:
        shape: the shape; a number for a vector.
        dtype: the dtype.
    """

    __slots__ = ("_item_bytes", "_numel", "dtype", "nbytes", "shape")

    def __init__(self, shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        self.shape: tuple[int, ...] = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype, self._item_bytes = dtype, dtype.itemsize
        self._numel = math.prod(self.shape)
        self.nbytes = self._numel * self._item_bytes

    def __repr__(self) -> str:
        return f"SizeOnly({self.shape}, {self.dtype})"

    def _like(self, *shape: int) -> "SizeOnly":
        return SizeOnly(shape, self.dtype)

    def numel(self) -> int:
        """Return the number of elements."""
        return self._numel

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return self._item_bytes

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator["SizeOnly"]:
        return (self[row] for row in range(len(self)))

    def __getitem__(self, key: Any) -> "SizeOnly":
        if isinstance(key, slice):
            count = len(range(*key.indices(self.shape[0])))
            return self if count == self.shape[0] else self._like(count, *self.shape[1:])
        return self._like(*self.shape[1:])

    def __setitem__(self, key: Any, values: Any) -> None:
        pass

    def __iadd__(self, other: Any) -> "SizeOnly":
        return self

    def view(self, *shape: Any) -> "SizeOnly":
        """Return a view of another shape, in which one size may be -1, or of another dtype."""
        if len(shape) == 1 and isinstance(shape[0], torch.dtype):
            last = self.shape[-1] * self._item_bytes // shape[0].itemsize
            return SizeOnly((*self.shape[:-1], last), shape[0])
        if len(shape) == 1 and isinstance(shape[0], Sequence):
            shape = tuple(shape[0])
        if -1 in shape:
            known = -math.prod(shape)
            shape = tuple(self._numel // max(known, 1) if size == -1 else size for size in shape)
        return self._like(*shape)

    def split(self, size: int) -> list["SizeOnly"]:
        """Return parts of `size` rows, of which the last one may be smaller."""
        return [self[begin : begin + size] for begin in range(0, max(len(self), 1), size)]

    def tensor_split(self, parts: int) -> list["SizeOnly"]:
        """Return parts whose numbers of rows differ by at most 1."""
        rows, larger = divmod(len(self), parts)
        both = self._like(rows + 1, *self.shape[1:]), self._like(rows, *self.shape[1:])
        return [both[part >= larger] for part in range(parts)]

    def is_contiguous(self) -> bool:
        """Return True."""
        return True

    def _itself(self, *_: Any) -> "SizeOnly":
        return self

    # these change elements, or where they are
    contiguous = clone = copy_ = div_ = roll = _itself

    def new_empty(self, *shape: int) -> "SizeOnly":
        """Return a payload of another shape and the same dtype."""
        return self._like(*shape)
