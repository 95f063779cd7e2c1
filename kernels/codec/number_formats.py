"""Number formats of low-precision codes: signed integers and small floats."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gcnzc.kernels.codec.block_layout import BlockLayout

PIECE = 512  # elements that a numba kernel processes at once, a multiple of 32


@dataclass(frozen=True)
class NumberFormat:
    """A format of low-precision codes.

    Every format is a float without infinity; integers are floats without exponent bits.
    """

    bits: int
    mantissa_bits: int
    min_exponent: int  # of the normal numbers; smaller codes count equal steps from zero
    max_code: int  # the largest code, without its sign
    ties_up: bool = False
    # the largest element of a block in units of the largest number; stochastic rounding uses 1,
    # because it would not be unbiased with clipping
    clip: float = 1.0

    @property
    def is_integer(self) -> bool:
        """Whether negative numbers are two's complements instead of having a sign bit."""
        return self.mantissa_bits == self.bits - 1

    @property
    def steps_per_unit(self) -> float:
        """The reciprocal of the smallest positive number."""
        return 2.0 ** (self.mantissa_bits - self.min_exponent)

    @property
    def min_normal(self) -> float:
        """The smallest normal number; larger than every number if the format has no exponent."""
        return 2.0**self.min_exponent

    @property
    def exponent_shift(self) -> int:
        """The difference between float32's exponent bias and the code's, in the code's bits."""
        return (127 + self.min_exponent - 1) << self.mantissa_bits

    def scaled_largest(self, *, stochastic: bool) -> float:
        """Return the quotient of the largest |y| of a block and the block's scale."""
        return float(self.magnitudes[-1]) * (1.0 if stochastic else self.clip)

    @cached_property
    def magnitudes(self) -> Tensor:
        """(max_code + 1,) float32: the non-negative numbers, ascending with their codes."""
        code = torch.arange(self.max_code + 1)
        exponent = ((code >> self.mantissa_bits) - 1).clamp(min=0)
        hidden = torch.where(code >> self.mantissa_bits > 0, 1 << self.mantissa_bits, 0)
        steps = hidden + code % (1 << self.mantissa_bits)
        return (steps * 2.0**exponent / self.steps_per_unit).float()

    @cached_property
    def values(self) -> Tensor:
        """(2**bits,) float32: the number of each code, NaN for codes that are never written."""
        values = torch.full((1 << self.bits,), torch.nan)
        values[: self.max_code + 1] = self.magnitudes
        code = torch.arange(1, self.max_code + 1)
        values[self.negative(code)] = -self.magnitudes[1:]
        return values

    def negative(self, code: Tensor) -> Tensor:
        """Return the codes of the negated numbers, for codes of positive numbers."""
        return (1 << self.bits) - code if self.is_integer else (1 << (self.bits - 1)) + code


NUMBER_FORMATS = {
    "float8_e4m3fn": NumberFormat(8, mantissa_bits=3, min_exponent=-6, max_code=0x7E),
    "float8_e5m2": NumberFormat(8, mantissa_bits=2, min_exponent=-14, max_code=0x7B),
    "int8": NumberFormat(8, mantissa_bits=7, min_exponent=7, max_code=127),
    "int4": NumberFormat(4, mantissa_bits=3, min_exponent=3, max_code=7),
    "int2": NumberFormat(2, mantissa_bits=1, min_exponent=1, max_code=1, clip=2.0),
    "float4_e3m0": NumberFormat(4, mantissa_bits=0, min_exponent=-6, max_code=7, ties_up=True),
}


BITS = {name: number_format.bits for name, number_format in NUMBER_FORMATS.items()}


# what stochastic rounding depends on: a 64-bit seed and a step
SeedAndStep = tuple[int, int]


def flat_views(rows: Tensor, layout: BlockLayout) -> tuple[Tensor, Tensor]:
    """Return the bytes from the first row to the end of the last one, as uint8 and as float32."""
    flat = rows.as_strided(((len(rows) - 1) * rows.stride(0) + layout.row_bytes,), (1,))
    return flat, flat.view(torch.float32)


def piece_geometry(layout: BlockLayout) -> tuple[int, ...]:
    """Return the lengths that `_piece` of the numba kernels needs to locate a piece.

    They are the elements of a part, its blocks, the elements of a block, its pieces, and the
    elements of a piece.
    """
    pieces = -(-layout.block_elements // PIECE)
    return layout.part_elements, layout.blocks_per_part, layout.block_elements, pieces, PIECE
