"""The layout of a vector for a compressed exchange: one part per rank, and blocks.

Worker j works on part j. A part is sent as a row of bytes: the codes of its elements, then a
float32 scale for each of its blocks. Parts are as long as each other, and the last ones may lie
beyond the vector's end; what lies there has no scale, no error and no value.

Letters: n elements of the vector, W parts.
"""

from dataclasses import dataclass
from functools import cached_property

# of a part, so that its codes of one bit fill words of 4 bytes, and scales begin on one
PART_MULTIPLE = 32


@dataclass(frozen=True)
class BlockLayout:
    """The parts and blocks of one vector.

    Raises:
        ValueError: a number is out of its range.
    """

    num_elements: int
    parts: int
    bits: int
    """of a code: 1, 4 or 8"""
    block: int | None
    """elements of a part that share a scale, a multiple of 32; all of a part if None"""

    def __post_init__(self) -> None:
        if self.num_elements < 0 or self.parts < 1 or self.bits not in (1, 4, 8):
            raise ValueError(
                f"{self.num_elements} elements in {self.parts} parts of codes of {self.bits} bits"
                "\n\nhint: no fewer than 0 elements and 1 part; codes have 1, 4 or 8 bits"
            )
        if self.block is not None and (self.block < 1 or self.block % PART_MULTIPLE):
            raise ValueError(
                f"blocks of {self.block} elements\n\nhint: a multiple of {PART_MULTIPLE}"
            )

    @cached_property
    def part(self) -> int:
        """Elements of a part, a multiple of 32, with those beyond the end."""
        each = -(-self.num_elements // self.parts)
        return -(-each // PART_MULTIPLE) * PART_MULTIPLE

    @cached_property
    def block_elements(self) -> int:
        """Elements of a block; the last one of a part may have fewer."""
        return max(1, min(self.block or self.part, self.part))

    @cached_property
    def blocks(self) -> int:
        """Of a part."""
        return -(-self.part // self.block_elements)

    @cached_property
    def code_bytes(self) -> int:
        """Of a row: those of the codes, which come first."""
        return self.part * self.bits // 8

    @cached_property
    def row_bytes(self) -> int:
        """Of a row, a multiple of 4: codes and scales."""
        return self.code_bytes + 4 * self.blocks

    def bounds(self, part: int) -> tuple[int, int]:
        """Where the elements of a part begin and end, within the vector."""
        begin = min(part * self.part, self.num_elements)
        return begin, min(begin + self.part, self.num_elements)

    def of_part(self, part: int) -> "BlockLayout":
        """How the elements of one part are cut when they are a vector, as its row is."""
        begin, end = self.bounds(part)
        return _Own(end - begin, 1, self.bits, self.block, self.part)


@dataclass(frozen=True)
class _Own(BlockLayout):
    # a part at the end of the vector has the row of all others, though it has fewer elements
    length: int

    @cached_property
    def part(self) -> int:
        return self.length
