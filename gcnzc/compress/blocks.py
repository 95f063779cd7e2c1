"""Block-wise quantization: codes of 8 or 4 bits per element, with one scale per block."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gcnzc.compress.rounded import Rounded
from gcnzc.compress.two_stage import Codec
from gcnzc.kernels.codec import blocks, number_formats
from gcnzc.kernels.codec.block_layout import BlockLayout

NUMBER_FORMATS = tuple(number_formats.BITS)
# dtypes in which the second stage can send the mean, in addition to the number formats
SECOND = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# the seed is the low half of a random generator's key, the number of the encoder the high half
SEED_BITS = 32


@dataclass(frozen=True)
class Blocks(Codec):
    """Codes of 8 or 4 bits in two stages, see `Codec`; `gcnzc.kernels.codec.blocks` encodes them.

    Raises:
        ValueError: an option is not one of those below.
    """

    form: str
    """number format, one of `NUMBER_FORMATS`: float8_e4m3fn, float8_e5m2, int8, int4 or
    float4_e3m0"""
    block: int | None = 256
    """elements that share a scale, a multiple of 32; None for a rank's whole part"""
    stochastic: bool = False
    """whether to round up or down at random, so that the expected value of a code is the element;
    otherwise round to the nearest"""
    seed: int = 0
    """of random rounding, in [0, 2**32)"""
    has_feedback: bool = False
    """whether the compression error of a mean is added to the next vector"""
    second: str = "same"
    """number format of the mean in the second stage: "same" as `form`, "bfloat16", "float32" or one
    of `NUMBER_FORMATS`"""

    def __post_init__(self) -> None:
        if self.form not in NUMBER_FORMATS:
            raise ValueError(
                f"no number format {self.form!r}\n\nhint: use one of {', '.join(NUMBER_FORMATS)}"
            )
        if self.second not in ("same", *SECOND, *NUMBER_FORMATS):
            known = ", ".join(("same", *SECOND, *NUMBER_FORMATS))
            raise ValueError(
                f"no number format {self.second!r} for the mean\n\nhint: use one of {known}"
            )
        if not 0 <= self.seed < 1 << SEED_BITS:
            raise ValueError(f"no seed {self.seed}\n\nhint: use 0 to 2**{SEED_BITS} - 1")
        # the layout checks the block size
        self.block_layout(0, 1)

    @property
    def mean_codec(self) -> Codec:
        """See `Codec`."""
        if self.second in SECOND:
            return Rounded(SECOND[self.second], self.has_feedback)
        return self if self.second == "same" else replace(self, form=self.second, second="same")

    def block_layout(self, num_elements: int, parts: int) -> BlockLayout:
        """See `Codec`."""
        return BlockLayout(num_elements, parts, number_formats.BITS[self.form], self.block)

    def encode(
        self,
        values: Tensor,
        error: Tensor | None,
        active: Tensor | None,
        layout: BlockLayout,
        rows: Tensor,
        draw: tuple[int, int],
    ) -> None:
        """See `Codec`."""
        key_and_step = None
        if self.stochastic:
            step, encoder = draw
            key_and_step = (encoder << SEED_BITS | self.seed, step)
        blocks.encode_blocks(values, error, active, layout, rows, self.form, key_and_step)

    def update_error(
        self,
        values: Tensor,
        error: Tensor,
        active: Tensor | None,
        layout: BlockLayout,
        rows: Tensor,
    ) -> None:
        """See `Codec`."""
        blocks.update_error_blocks(values, error, active, layout, rows, self.form)

    def decode_mean(self, rows: Tensor, layout: BlockLayout, out: Tensor) -> None:
        """See `Codec`."""
        blocks.mean_of_blocks(rows, layout, out, self.form)

    def decode(self, rows: Tensor, layout: BlockLayout, active: Tensor | None, out: Tensor) -> None:
        """See `Codec`."""
        blocks.decode_blocks(rows, layout, active, out, self.form)
