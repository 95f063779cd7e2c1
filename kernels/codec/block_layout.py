"""The layout of a vector that is reduced as low-precision codes: one part per rank, and blocks.

Rank j reduces part j. The payload of a part is a row of bytes: the codes of its elements, followed
by one float32 scale per block. All parts have the same length, so the last ones may extend past the
end of the vector; the padding has no value, no error and no weight in a scale.

Notation: n elements of the vector, W parts.
"""

from dataclasses import dataclass
from functools import cached_property

# the codes of 32 one-bit elements fill a word of 4 bytes, so the scales are aligned
PART_MULTIPLE = 32


@dataclass(frozen=True)
class BlockLayout:
    """The parts and blocks of one vector, and the bytes of its rows.

    Raises:
        ValueError: a field is out of range.
    """

    num_elements: int
    num_parts: int
    bits: int
    """bits of a code: 1, 2, 4 or 8"""
    block: int | None
    """elements of a part that share a scale, a multiple of 32; the whole part if None"""

    def __post_init__(self) -> None:
        if self.num_elements < 0 or self.num_parts < 1 or self.bits not in (1, 2, 4, 8):
            raise ValueError(
                f"{self.num_elements} elements in {self.num_parts} parts with codes of "
                f"{self.bits} bits"
            )
        if self.block is not None and (
            not isinstance(self.block, int) or self.block < 1 or self.block % PART_MULTIPLE
        ):
            raise ValueError(
                f"blocks of {self.block!r} elements, not a multiple of {PART_MULTIPLE}"
            )

    @cached_property
    def part_elements(self) -> int:
        """Elements of a part, a multiple of 32, including the padding past the vector's end."""
        elements = -(-self.num_elements // self.num_parts)
        return -(-elements // PART_MULTIPLE) * PART_MULTIPLE

    @cached_property
    def block_elements(self) -> int:
        """Elements of a block; the last block of a part may have fewer."""
        return max(1, min(self.block or self.part_elements, self.part_elements))

    @cached_property
    def blocks_per_part(self) -> int:
        """Blocks of a part."""
        return -(-self.part_elements // self.block_elements)

    @cached_property
    def code_bytes(self) -> int:
        """Bytes of the codes, which come first in a row."""
        return self.part_elements * self.bits // 8

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row, codes and scales; a multiple of 4."""
        return self.code_bytes + 4 * self.blocks_per_part

    def bounds(self, part: int) -> tuple[int, int]:
        """Return the range of a part's elements in the vector, without padding."""
        begin = min(part * self.part_elements, self.num_elements)
        return begin, min(begin + self.part_elements, self.num_elements)

    def part_layout(self, part: int) -> "BlockLayout":
        """Return the layout of one part as a vector of its own, with the same row."""
        begin, end = self.bounds(part)
        return _PartLayout(end - begin, 1, self.bits, self.block, self.part_elements)


@dataclass(frozen=True)
class _PartLayout(BlockLayout):
    # the last part has as long a row as the others, though it may have fewer elements
    length: int

    @cached_property
    def part_elements(self) -> int:
        return self.length
