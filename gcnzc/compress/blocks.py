"""Codes of 8 or 4 bits per element with one scale per block."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gcnzc.compress.rounded import Rounded
from gcnzc.compress.two_stage import Codec
from gcnzc.kernels.codec import blocks, number_formats
from gcnzc.kernels.codec.block_layout import BlockLayout

NUMBER_FORMATS = tuple(number_formats.BITS)
# what the mean may be sent in, besides the forms
SECOND = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# of a seed, which has the low half of a key; who rounds has the high half
SEED_BITS = 32


@dataclass(frozen=True)
class Blocks(Codec):
    """Rounded numbers in two stages; see `two_stage`, and `gcnzc.kernels.codec.blocks` for forms.

    Raises:
        ValueError: an option is not one of those below.
    """

    form: str
    """one of `NUMBER_FORMATS`: float8_e4m3fn, float8_e5m2, int8, int4 or float4_e3m0"""
    block: int | None = 256
    """elements that share a scale, a multiple of 32; all of a worker's part if None"""
    stochastic: bool = False
    """round up or down at random, so that the mean over many draws is the number itself; else to
    the nearest"""
    seed: int = 0
    """of what is drawn, in [0, 2**32)"""
    has_feedback: bool = False
    second: str = "same"
    """what the mean is sent in: "bfloat16", "float32" or a form; "same" as the elements"""

    def __post_init__(self) -> None:
        if self.form not in NUMBER_FORMATS:
            raise ValueError(f"no form {self.form!r}\n\nhint: one of {', '.join(NUMBER_FORMATS)}")
        if self.second not in ("same", *SECOND, *NUMBER_FORMATS):
            known = ", ".join(("same", *SECOND, *NUMBER_FORMATS))
            raise ValueError(f"no second form {self.second!r}\n\nhint: one of {known}")
        if not 0 <= self.seed < 1 << SEED_BITS:
            raise ValueError(f"no seed {self.seed}\n\nhint: from 0 to 2**{SEED_BITS} - 1")
        self.cut(0, 1)

    @property
    def of_means(self) -> Codec:
        """See `Codec`."""
        if self.second in SECOND:
            return Rounded(SECOND[self.second], self.has_feedback)
        return self if self.second == "same" else replace(self, form=self.second, second="same")

    def cut(self, num_elements: int, parts: int) -> BlockLayout:
        """See `Codec`."""
        return BlockLayout(num_elements, parts, number_formats.BITS[self.form], self.block)

    def encode(
        self,
        values: Tensor,
        error: Tensor | None,
        active: Tensor | None,
        cut: BlockLayout,
        rows: Tensor,
        draw: tuple[int, int],
    ) -> None:
        """See `Codec`."""
        draws = None
        if self.stochastic:
            step, who = draw
            draws = (who << SEED_BITS | self.seed, step)
        blocks.encode_blocks(values, error, active, cut, rows, self.form, draws)

    def update_error(
        self, values: Tensor, error: Tensor, active: Tensor | None, cut: BlockLayout, rows: Tensor
    ) -> None:
        """See `Codec`."""
        blocks.update_error_blocks(values, error, active, cut, rows, self.form)

    def mean_of(self, rows: Tensor, cut: BlockLayout, out: Tensor) -> None:
        """See `Codec`."""
        blocks.mean_of_blocks(rows, cut, out, self.form)

    def decode(self, rows: Tensor, cut: BlockLayout, active: Tensor | None, out: Tensor) -> None:
        """See `Codec`."""
        blocks.decode_blocks(rows, cut, active, out, self.form)
