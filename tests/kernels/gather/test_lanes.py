"""Lanes load every byte of a row once; the shifted layout reads no line twice."""

from math import gcd

import pytest

from gcnzc.kernels.gather.lanes import LINE_BYTES, VECTOR_BYTES, assign_lanes

WIDTHS = range(1, 301)
# whole vectors of 16 bytes, and a little more or less
NEAR_VECTORS = [width for width in WIDTHS if width % VECTOR_BYTES in (0, 1, 4, 8, 15)]
EACH_WIDTHS = pytest.mark.parametrize(
    "widths",
    [
        pytest.param(NEAR_VECTORS, id="near vectors"),
        pytest.param(WIDTHS, id="all widths", marks=pytest.mark.slow),
    ],
)
# rows of public sets as float32 and float16, and one of int8 with a scale beside it
REAL = [(20, 2), (40, 4), (132, 1), (200, 2), (256, 2), (400, 4), (512, 4), (1000, 2), (1204, 2)]
REAL += [(1536, 2), (2000, 4), (2048, 2), (2408, 4), (2866, 2), (2980, 4), (3068, 4), (4096, 4)]
REAL += [(5732, 4), (13610, 2), (14812, 4), (16020, 4), (27220, 4), (33660, 4)]


def loads(lanes, address):
    """The pass and the address of everything that is loaded for one row."""
    found = []
    for part in range(lanes.passes):
        for lane in range(lanes.lanes):
            at = lanes.load_address(address, part, lane)
            if at is not None:
                found.append((part, at))
    return found


def starts(stride_bytes, base):
    """Addresses of as many rows as there are places in a line for them to begin at."""
    return [base + row * stride_bytes for row in range(LINE_BYTES // gcd(stride_bytes, LINE_BYTES))]


def tables(row_bytes, item_bytes):
    """Strides and bases: side by side, and apart with the first at every offset in a line."""
    yield row_bytes, 0
    yield row_bytes, 5 * item_bytes
    yield row_bytes + item_bytes, 48 * item_bytes
    apart = row_bytes + -row_bytes % LINE_BYTES
    for base in range(0, LINE_BYTES, item_bytes):
        yield apart, LINE_BYTES + base


def down(address, size):
    return address - address % size


def up(address, size):
    return address + -address % size


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([(width, 1) for width in NEAR_VECTORS], id="near vectors"),
        pytest.param([(width, 1) for width in WIDTHS], id="all widths", marks=pytest.mark.slow),
        pytest.param(REAL, id="real sets"),
    ],
)
@pytest.mark.parametrize("layout", ["shifted", "pitched"])
def test_lanes_load_whole_vectors_and_no_line_twice(layout, rows):
    for row_bytes, item_bytes in rows:
        for stride_bytes, base in tables(row_bytes, item_bytes):
            on_lines = stride_bytes % LINE_BYTES == base % LINE_BYTES == 0
            if layout == "pitched" and not on_lines:
                continue
            lanes = assign_lanes(layout, row_bytes, stride_bytes, base, item_bytes)
            addresses = starts(stride_bytes, base)
            for address in addresses if row_bytes < 1000 else addresses[::7]:
                check_whole_vectors(lanes, address)


def check_whole_vectors(lanes, address):
    found, end = loads(lanes, address), address + lanes.row_bytes
    # all that hold a byte of the row, each once, and no others
    wanted = range(down(address, VECTOR_BYTES), up(end, VECTOR_BYTES), VECTOR_BYTES)
    assert sorted(at for _, at in found) == list(wanted)
    # no load of a warp asks for a line that another one asks for
    asked = {(part, at // LINE_BYTES) for part, at in found}
    assert len(asked) == up(end, LINE_BYTES) // LINE_BYTES - address // LINE_BYTES


@pytest.mark.parametrize(
    ("row_bytes", "stride_bytes", "base", "alignment_bytes"),
    [(400, 400, 0, 16), (400, 400, 8, 8), (200, 256, 0, 8), (602, 602, 0, 2), (3, 3, 0, 1)],
)
def test_vectors_are_as_wide_as_every_row_allows(row_bytes, stride_bytes, base, alignment_bytes):
    for layout in ("vector", "wrapped"):
        lanes = assign_lanes(layout, row_bytes, stride_bytes, base, 1)
        assert lanes.vector_bytes == lanes.alignment_bytes == alignment_bytes
    assert assign_lanes("scalar", row_bytes, stride_bytes, base, 1).vector_bytes == 1
    assert assign_lanes("shifted", row_bytes, stride_bytes, base, 1).vector_bytes == VECTOR_BYTES


@pytest.mark.parametrize(("stride_bytes", "base"), [(400, 0), (512, 64), (512, 4)])
def test_pitched_rows_begin_on_lines(stride_bytes, base):
    with pytest.raises(ValueError, match=r"(?s)do not begin on lines of 128 bytes.*hint: "):
        assign_lanes("pitched", 400, stride_bytes, base, 4)
