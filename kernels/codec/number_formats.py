"""Number formats of low-precision codes: signed integers and small floats."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gcnzc.kernels.codec.block_layout import BlockLayout

PIECE = 512  # elements that numba takes at a time, a multiple of 32


@dataclass(frozen=True)
class NumberFormat:
    """What codes stand for. All are floats without infinity; integers have no bits of exponent."""

    bits: int
    mantissa_bits: int
    least_exponent: int  # of the normal numbers; below them, codes count steps
    most: int  # the largest code without its sign
    ties_up: bool = False

    @property
    def integer(self) -> bool:
        """Whether negative numbers are complements of two, instead of having a bit for the sign."""
        return self.mantissa_bits == self.bits - 1

    @property
    def per_step(self) -> float:
        """One over the smallest number."""
        return 2.0 ** (self.mantissa_bits - self.least_exponent)

    @property
    def normal(self) -> float:
        """The smallest normal number; larger than all if there is none."""
        return 2.0**self.least_exponent

    @property
    def shift(self) -> int:
        """Between exponents counted from float32's bias and from the code's."""
        return (127 + self.least_exponent - 1) << self.mantissa_bits

    @cached_property
    def sizes(self) -> Tensor:
        """(most + 1,) float32: the numbers from 0 on, which rise with their codes."""
        code = torch.arange(self.most + 1)
        exponent = ((code >> self.mantissa_bits) - 1).clamp(min=0)
        hidden = torch.where(code >> self.mantissa_bits > 0, 1 << self.mantissa_bits, 0)
        steps = hidden + code % (1 << self.mantissa_bits)
        return (steps * 2.0**exponent / self.per_step).float()

    @cached_property
    def values(self) -> Tensor:
        """(2**bits,) float32: what each code stands for."""
        values = torch.full((1 << self.bits,), torch.nan)
        values[: self.most + 1] = self.sizes
        code = torch.arange(1, self.most + 1)
        values[self.negative(code)] = -self.sizes[1:]
        return values

    def negative(self, code: Tensor) -> Tensor:
        """The codes of the numbers below zero, from those above."""
        return (1 << self.bits) - code if self.integer else (1 << (self.bits - 1)) + code


NUMBER_FORMATS = {
    "float8_e4m3fn": NumberFormat(8, mantissa_bits=3, least_exponent=-6, most=0x7E),
    "float8_e5m2": NumberFormat(8, mantissa_bits=2, least_exponent=-14, most=0x7B),
    "int8": NumberFormat(8, mantissa_bits=7, least_exponent=7, most=127),
    "int4": NumberFormat(4, mantissa_bits=3, least_exponent=3, most=7),
    "float4_e3m0": NumberFormat(4, mantissa_bits=0, least_exponent=-6, most=7, ties_up=True),
}


BITS = {name: form.bits for name, form in NUMBER_FORMATS.items()}


# what is random: a seed and a step
Draws = tuple[int, int]


def memory(rows: Tensor, cut: BlockLayout) -> tuple[Tensor, Tensor]:
    """All bytes from the first row's to the last one's, and the same as float32."""
    flat = rows.as_strided(((len(rows) - 1) * rows.stride(0) + cut.row_bytes,), (1,))
    return flat, flat.view(torch.float32)


def sizes_of(cut: BlockLayout) -> tuple[int, ...]:
    """How pieces are numbered, see `_piece`."""
    pieces = -(-cut.block_elements // PIECE)
    return cut.part, cut.blocks, cut.block_elements, pieces, PIECE
