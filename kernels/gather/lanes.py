"""The layout of loads: which bytes of a row each lane of the gather kernel loads.

The kernel in `gcnzc.kernels.gather.gpu` assigns some lanes to every row; each lane loads one vector
per pass. A load of a warp of 32 lanes becomes one bus request for each 128 B line that it touches,
so the address of the first lane and the width of a vector determine the number of requests per row.
The kernel and the model of bus traffic both use the arithmetic in this module.
"""

from dataclasses import dataclass
from math import gcd
from typing import Literal, TypeAlias, get_args

LINE_BYTES = 128  # largest bus request


VECTOR_BYTES = 16  # largest load of a lane


WARP_LANES = 32


Layout: TypeAlias = Literal["scalar", "vector", "wrapped", "shifted", "pitched"]


LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@dataclass(frozen=True)
class Lanes:
    """How the rows of a table are assigned to lanes.

    `scalar` and `vector`: the first lane is at the begin of the row; a lane loads one element, or
    as many as the alignment of all rows allows. `wrapped`: the first lane is on the 128 B line at
    or below the row's begin, and the lanes before the row load its end (Min et al., VLDB 2021, Fig.
    5). `shifted`: the same line, with vectors of 16 B whatever the row's alignment, and the lanes
    before the row are masked; if one load of a warp covers a row, its first lane is on the row's
    first vector instead. `pitched`: `shifted` for rows that all begin on a line.
    """

    layout: Layout
    row_bytes: int
    unit_bytes: int  # power of two that divides the addresses, strides and lengths of rows
    vector_bytes: int  # bytes that a lane loads in a pass
    lanes: int  # lanes of a row, a power of two
    passes: int
    from_line: bool  # the first lane is on the line at or below the row's begin

    def lead(self, address: int) -> int:
        """Return the number of lanes before a row's first vector."""
        if not self.from_line:
            return 0
        return address % LINE_BYTES // self.vector_bytes

    def num_vectors(self, address: int) -> int:
        """Return the number of vectors that a row spans."""
        begin = address - address % self.vector_bytes
        return -(-(address + self.row_bytes - begin) // self.vector_bytes)

    def load_address(self, address: int, part: int, lane: int) -> int | None:
        """Return the address that a lane loads in pass `part` of a row; None if it is masked."""
        number, count = part * self.lanes + lane, self.num_vectors(address)
        vector = number - self.lead(address)
        if self.layout == "wrapped" and number < count:
            vector %= count
        elif self.layout == "wrapped" or not 0 <= vector < count:
            return None
        return address - address % self.vector_bytes + vector * self.vector_bytes


def assign_lanes(
    layout: Layout, row_bytes: int, stride_bytes: int, base: int, item_bytes: int
) -> Lanes:
    """Return the assignment of lanes for a table.

    Args:
        layout: see `Lanes`.
        row_bytes: bytes of a row, at least 1.
        stride_bytes: bytes from one row to the next.
        base: address of the first row.
        item_bytes: bytes of an element, which divide all other arguments.

    Raises:
        ValueError: the layout is `pitched`, and rows do not begin on 128 B lines.
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
    most = -(-(_max_offset(stride_bytes, base, vector_bytes) + row_bytes) // vector_bytes)
    from_line = layout == "wrapped" or (layout == "shifted" and most > WARP_LANES)
    if from_line and layout == "shifted":
        most = -(-(_max_offset(stride_bytes, base, LINE_BYTES) + row_bytes) // vector_bytes)
    lanes = min(WARP_LANES, 1 << (most - 1).bit_length())
    return Lanes(layout, row_bytes, unit_bytes, vector_bytes, lanes, -(-most // lanes), from_line)


def _max_offset(stride_bytes: int, base: int, size: int) -> int:
    """Return the largest offset of a row from a multiple of `size`, in bytes."""
    step = gcd(stride_bytes, size)
    return size - step + base % step
