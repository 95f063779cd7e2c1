"""Means in a short dtype, in two stages with sums in float32.

`Dense` of the same dtype rounds sums to it after every addition, and they may overflow it. This
rounds each worker's elements once and their mean once more, and can keep what that leaves out.

Letters: n elements, W workers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gcnzc.compress.two_stage import Codec
from gcnzc.kernels.codec.block_layout import BlockLayout
from gcnzc.kernels.finite import are_finite

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Rounded(Codec):
    """The elements themselves as codes, without scales; see `two_stage`."""

    dtype: torch.dtype = torch.bfloat16
    """float32, bfloat16 or float16"""
    has_feedback: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(
                f"{self.dtype} is not sent\n\nhint: one of {', '.join(map(str, DTYPES))}"
            )

    def cut(self, num_elements: int, parts: int) -> BlockLayout:
        """See `Codec`; of it only the parts are used."""
        return BlockLayout(num_elements, parts, 8, None)

    def row_bytes(self, cut: BlockLayout) -> int:
        """See `Codec`."""
        return cut.part_elements * self.dtype.itemsize

    def are_finite(self, rows: Tensor, cut: BlockLayout) -> Tensor:
        """See `Codec`."""
        return are_finite(self._numbers(rows, cut))

    def encode(
        self,
        values: Tensor,
        error: Tensor | None,
        active: Tensor | None,
        cut: BlockLayout,
        rows: Tensor,
        draw: tuple[int, int],
    ) -> None:
        """See `Codec`; nothing is drawn."""
        y = values.new_zeros(cut.num_parts * cut.part_elements)
        y[: len(values)] = values if error is None else values + error
        if active is not None:
            y[: len(values)].masked_fill_(~active, 0)
        self._numbers(rows, cut).copy_(y.view(cut.num_parts, cut.part_elements))

    def update_error(
        self, values: Tensor, error: Tensor, active: Tensor | None, cut: BlockLayout, rows: Tensor
    ) -> None:
        """See `Codec`."""
        error += values
        error -= self._vector(rows, cut)
        if active is not None:
            error.masked_fill_(~active, 0)

    def mean_of(self, rows: Tensor, cut: BlockLayout, out: Tensor) -> None:
        """See `Codec`."""
        total = torch.zeros(len(out), device=out.device)
        for row in self._numbers(rows, cut):
            total += row[: len(out)]
        out.copy_(total / len(rows))

    def decode(self, rows: Tensor, cut: BlockLayout, active: Tensor | None, out: Tensor) -> None:
        """See `Codec`."""
        out.copy_(self._vector(rows, cut))
        if active is not None:
            out.masked_fill_(~active, 0)

    def _numbers(self, rows: Tensor, cut: BlockLayout) -> Tensor:
        """(rows, part): what lies in them."""
        if not cut.part_elements:
            # no bytes have no view of another size
            return rows.new_empty(len(rows), 0, dtype=self.dtype)
        return rows[:, : self.row_bytes(cut)].view(self.dtype)

    def _vector(self, rows: Tensor, cut: BlockLayout) -> Tensor:
        """(n,): what all parts stand for."""
        return self._numbers(rows, cut).reshape(-1)[: cut.num_elements]
