"""The layout of loads: which bytes of a row each lane of a GPU's gather loads.

A kernel of `gcnzc.kernels.gather.gpu` gives every row some lanes, and every lane one vector in each
pass. Lanes that follow each other make warps of 32, each of which issues one load a pass; the GPU
turns such a load into one request for each line of 128 B that it touches. So where the first lane
begins, and how wide a vector is, decides how many requests a row costs on the bus. All this is
arithmetic on addresses, so that the kernels and a model of the bus cannot differ.
"""

from dataclasses import dataclass
from math import gcd
from typing import Literal, TypeAlias, get_args

LINE_BYTES = 128  # the most that one request asks for


VECTOR_BYTES = 16  # the most that a lane loads at once


WARP_LANES = 32


Layout: TypeAlias = Literal["scalar", "vector", "wrapped", "shifted", "pitched"]


LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@dataclass(frozen=True)
class Lanes:
    """How the rows of one table are loaded.

    `scalar` and `vector` begin where the row begins, with one element a lane or as many as the
    alignment of every row allows. `wrapped` begins on the line at or below the row, and the lanes
    in front of it load the row's end (Min et al., VLDB 2021, Fig. 5). `shifted` also begins on that
    line, with whole vectors of 16 B whatever the row's alignment, and the lanes in front load
    nothing; rows that one load of a warp covers begin on their first vector instead. `pitched` is
    `shifted` of rows that all begin on a line.
    """

    layout: Layout
    row_bytes: int
    unit_bytes: int  # row starts, strides and ends are multiples of this power of two
    vector_bytes: int  # that a lane loads in one pass
    lanes: int  # of a row in one pass, a power of two
    passes: int
    from_line: bool  # the first lane is on the line at or below the row

    def lead(self, address: int) -> int:
        """How many lanes lie in front of a row's first vector."""
        if not self.from_line:
            return 0
        return address % LINE_BYTES // self.vector_bytes

    def vectors(self, address: int) -> int:
        """How many vectors hold bytes of a row."""
        begin = address - address % self.vector_bytes
        return -(-(address + self.row_bytes - begin) // self.vector_bytes)

    def load(self, address: int, part: int, lane: int) -> int | None:
        """The address of the vector that a lane loads in a pass of a row, if it loads one."""
        number, count = part * self.lanes + lane, self.vectors(address)
        vector = number - self.lead(address)
        if self.layout == "wrapped" and number < count:
            vector %= count
        elif self.layout == "wrapped" or not 0 <= vector < count:
            return None
        return address - address % self.vector_bytes + vector * self.vector_bytes


def lanes_of(
    layout: Layout, row_bytes: int, stride_bytes: int, base: int, item_bytes: int
) -> Lanes:
    """The lanes for a table.

    Args:
        layout: how lanes are laid over rows.
        row_bytes: of one row, at least 1.
        stride_bytes: from one row to the next.
        base: the address of the first row.
        item_bytes: of one element, of which all the others are multiples.

    Raises:
        ValueError: `pitched`, and rows do not begin on lines.
    """
    together = gcd(row_bytes, stride_bytes, base)
    unit_bytes = min(VECTOR_BYTES, together & -together)
    if layout == "pitched" and (stride_bytes % LINE_BYTES or base % LINE_BYTES):
        raise ValueError(
            f"rows {stride_bytes} bytes apart from address {base:#x} do not begin on lines of "
            f"{LINE_BYTES} bytes\n\nhint: layout='shifted' reads rows wherever they begin"
        )
    if layout == "scalar":
        vector_bytes = item_bytes
    elif layout in ("vector", "wrapped"):
        vector_bytes = unit_bytes
    else:
        vector_bytes = VECTOR_BYTES
    most = -(-(_latest(stride_bytes, base, vector_bytes) + row_bytes) // vector_bytes)
    from_line = layout == "wrapped" or (layout == "shifted" and most > WARP_LANES)
    if from_line and layout == "shifted":
        most = -(-(_latest(stride_bytes, base, LINE_BYTES) + row_bytes) // vector_bytes)
    lanes = min(WARP_LANES, 1 << (most - 1).bit_length())
    return Lanes(layout, row_bytes, unit_bytes, vector_bytes, lanes, -(-most // lanes), from_line)


def _latest(stride_bytes: int, base: int, size: int) -> int:
    """The most bytes that lie between a multiple of `size` and a row that begins after it."""
    step = gcd(stride_bytes, size)
    return size - step + base % step
