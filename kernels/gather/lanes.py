"""The layout of loads: which bytes of a row each lane of the gather kernel loads.

A lane is a thread of a warp. The kernel in `gcnzc.kernels.gather.gpu` assigns 1 to 32 lanes to a
row; in each pass, a lane loads one vector of 1 to 16 B. A load of a warp becomes one bus request
for each 128 B line that it touches, so the address of the first lane's load and the size of a
vector determine the number of requests per row. The kernel and the model of bus traffic both use
the arithmetic in this module.
"""

from dataclasses import dataclass
from math import gcd
from typing import Literal, TypeAlias, get_args

LINE_BYTES = 128  # a line of the GPU's caches, the largest bus request


VECTOR_BYTES = 16  # the largest load of a lane


WARP_LANES = 32


Layout: TypeAlias = Literal["scalar", "vector", "wrapped", "shifted", "pitched"]


LAYOUTS: tuple[Layout, ...] = get_args(Layout)


def default_layout(stride_bytes: int, base: int = 0) -> Layout:
    """Return the layout with which rows are read, which requests no line of a row twice.

    Args:
        stride_bytes: from the start of a row to the next.
        base: address of the first row.
    """
    is_aligned = stride_bytes % LINE_BYTES == 0 and base % LINE_BYTES == 0
    return "pitched" if is_aligned else "shifted"


@dataclass(frozen=True)
class Lanes:
    """The assignment of a table's rows to lanes.

    Gathers use `pitched` if rows begin on lines, and otherwise `shifted`. The others are baselines
    of benchmarks.

    - `scalar`: the first lane loads the row's first element, the next lane the next element.
    - `vector`: the same with as many elements per lane as the alignment of all rows allows.
    - `wrapped`: vectors as of `vector`. The first lane is assigned to the start of the 128 B line
      that contains the row's start. Lanes before the row load the row's end: the circular shift of
      Min et al. (VLDB 2021, Fig. 5).
    - `shifted`: vectors of 16 B, whatever the alignment of rows. The first lane is assigned to the
      start of the line, as with `wrapped`, and lanes before the row are masked. If one load of a
      warp covers a row, the first lane is assigned to the row's first vector instead.
    - `pitched`: vectors of 16 B, for rows that all begin on a line.

    A row's first vector is the one that contains the row's first byte.
    """

    layout: Layout
    row_bytes: int
    alignment_bytes: int  # largest power of two, up to 16, that divides all rows' starts and sizes
    vector_bytes: int  # bytes that a lane loads in a pass
    lanes: int  # lanes of a row, a power of two
    passes: int
    from_line: bool  # the first lane is assigned to the start of the line of the row's start

    def leading_lanes(self, address: int) -> int:
        """Return the number of lanes before a row's first vector."""
        if not self.from_line:
            return 0
        return address % LINE_BYTES // self.vector_bytes

    def num_vectors(self, address: int) -> int:
        """Return the number of vectors that a row spans."""
        begin = address - address % self.vector_bytes
        return -(-(address + self.row_bytes - begin) // self.vector_bytes)

    def load_address(self, address: int, pass_index: int, lane: int) -> int | None:
        """Return the address that a lane loads in a pass over a row; None if it is masked.

        Args:
            address: of the row.
            pass_index: from 0 to `passes` - 1.
            lane: from 0 to `lanes` - 1.
        """
        load, num_vectors = pass_index * self.lanes + lane, self.num_vectors(address)
        vector = load - self.leading_lanes(address)
        if self.layout == "wrapped" and load < num_vectors:
            vector %= num_vectors
        elif self.layout == "wrapped" or not 0 <= vector < num_vectors:
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
    divisor = gcd(row_bytes, stride_bytes, base)
    # the largest power of two that divides it
    alignment_bytes = min(VECTOR_BYTES, divisor & -divisor)
    if layout == "pitched" and (stride_bytes % LINE_BYTES or base % LINE_BYTES):
        raise ValueError(
            f"rows {stride_bytes} bytes apart from address {base:#x} do not begin on lines of "
            f"{LINE_BYTES} bytes\n\nhint: layout='shifted' reads rows wherever they begin"
        )
    if layout == "scalar":
        vector_bytes = item_bytes
    elif layout in ("vector", "wrapped"):
        vector_bytes = alignment_bytes
    else:
        vector_bytes = VECTOR_BYTES
    # of any row
    max_vectors = -(-(_max_offset(stride_bytes, base, vector_bytes) + row_bytes) // vector_bytes)
    from_line = layout == "wrapped" or (layout == "shifted" and max_vectors > WARP_LANES)
    if from_line and layout == "shifted":
        # with the lanes before the row
        max_offset = _max_offset(stride_bytes, base, LINE_BYTES)
        max_vectors = -(-(max_offset + row_bytes) // vector_bytes)
    lanes = min(WARP_LANES, 1 << (max_vectors - 1).bit_length())
    passes = -(-max_vectors // lanes)
    return Lanes(layout, row_bytes, alignment_bytes, vector_bytes, lanes, passes, from_line)


def _max_offset(stride_bytes: int, base: int, size: int) -> int:
    """Return the largest offset of a row from a multiple of `size`, in bytes."""
    step = gcd(stride_bytes, size)
    return size - step + base % step
