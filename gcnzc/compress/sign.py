"""Signs of elements, with one magnitude per block."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gcnzc.compress.two_stage import Codec
from gcnzc.kernels.codec import signs
from gcnzc.kernels.codec.block_layout import BlockLayout


@dataclass(frozen=True)
class Sign(Codec):
    """Signs in two stages, with error feedback (Tang et al., 2021; see `two_stage`)."""

    block: int | None = 4096
    """elements that share a magnitude, a multiple of 32; all of a worker's part if None"""
    scale: Literal["rms", "l1"] = "rms"
    """a block's magnitude: "rms", the root of its mean square, or "l1", its mean absolute value"""
    has_feedback: bool = True

    def __post_init__(self) -> None:
        if self.scale not in ("rms", "l1"):
            raise ValueError(f"no scale {self.scale!r}\n\nhint: rms or l1")
        self.cut(0, 1)

    def cut(self, num_elements: int, parts: int) -> BlockLayout:
        """See `Codec`."""
        return BlockLayout(num_elements, parts, 1, self.block)

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
        signs.encode_signs(values, error, active, cut, rows, self.scale)

    def update_error(
        self, values: Tensor, error: Tensor, active: Tensor | None, cut: BlockLayout, rows: Tensor
    ) -> None:
        """See `Codec`."""
        signs.update_error_signs(values, error, active, cut, rows)

    def mean_of(self, rows: Tensor, cut: BlockLayout, out: Tensor) -> None:
        """See `Codec`."""
        signs.mean_of_signs(rows, cut, out)

    def decode(self, rows: Tensor, cut: BlockLayout, active: Tensor | None, out: Tensor) -> None:
        """See `Codec`."""
        signs.decode_signs(rows, cut, active, out)
