"""Means in a short dtype, in two stages with sums in float32.

`Dense` with the same dtype rounds the sum after every addition, and the sum may overflow. `Rounded`
rounds the elements of each rank once and their mean once, and may have error feedback.

Notation: n elements, W ranks.
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
    """A codec that rounds elements to a dtype, without scales.

    `gcnzc.compress.two_stage` describes the exchange.

    Raises:
        ValueError: the dtype is not one of those below.
    """

    dtype: torch.dtype = torch.bfloat16
    """float32, bfloat16 or float16"""
    has_feedback: bool = False
    """whether to use error feedback: the rounding error of each vector, and of each mean, is added
    to the next one"""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(
                f"cannot send {self.dtype}\n\nhint: use one of {', '.join(map(str, DTYPES))}"
            )

    def block_layout(self, num_elements: int, parts: int) -> BlockLayout:
        """See `Codec`; only the parts of the layout are used."""
        return BlockLayout(num_elements, parts, 8, None)

    def row_bytes(self, layout: BlockLayout) -> int:
        """See `Codec`."""
        return layout.part_elements * self.dtype.itemsize

    def are_finite(self, rows: Tensor, layout: BlockLayout) -> Tensor:
        """See `Codec`."""
        return are_finite(self._view_parts(rows, layout))

    def encode(
        self,
        values: Tensor,
        error: Tensor | None,
        active: Tensor | None,
        layout: BlockLayout,
        rows: Tensor,
        random_counter: tuple[int, int],
    ) -> None:
        """See `Codec`; rounding is to the nearest, so `random_counter` is not used."""
        y = values.new_zeros(layout.num_parts * layout.part_elements)
        y[: len(values)] = values if error is None else values + error
        if active is not None:
            y[: len(values)].masked_fill_(~active, 0)
        self._view_parts(rows, layout).copy_(y.view(layout.num_parts, layout.part_elements))

    def update_error(
        self,
        values: Tensor,
        error: Tensor,
        active: Tensor | None,
        layout: BlockLayout,
        rows: Tensor,
    ) -> None:
        """See `Codec`."""
        error += values
        error -= self._join_parts(rows, layout)
        if active is not None:
            error.masked_fill_(~active, 0)

    def decode_mean(self, rows: Tensor, layout: BlockLayout, out: Tensor) -> None:
        """See `Codec`."""
        total = torch.zeros(len(out), device=out.device)
        for row in self._view_parts(rows, layout):
            total += row[: len(out)]
        out.copy_(total / len(rows))

    def decode(self, rows: Tensor, layout: BlockLayout, active: Tensor | None, out: Tensor) -> None:
        """See `Codec`."""
        out.copy_(self._join_parts(rows, layout))
        if active is not None:
            out.masked_fill_(~active, 0)

    def _view_parts(self, rows: Tensor, layout: BlockLayout) -> Tensor:
        """Return (rows, part) in this dtype: a view of the elements in the rows."""
        if not layout.part_elements:
            # an empty tensor of bytes has no view of another element size
            return rows.new_empty(len(rows), 0, dtype=self.dtype)
        return rows[:, : self.row_bytes(layout)].view(self.dtype)

    def _join_parts(self, rows: Tensor, layout: BlockLayout) -> Tensor:
        """Return (n,) in this dtype: the elements of all parts."""
        return self._view_parts(rows, layout).reshape(-1)[: layout.num_elements]
