"""Lanes load vectors as wide as every row allows; `features/test_pcie_traffic.py` counts lines."""

import pytest

from gcnzc.kernels.gather.lanes import VECTOR_BYTES, assign_lanes


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
