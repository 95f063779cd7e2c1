"""The kernel's loads, recorded lane by lane, are those that the model of PCIe traffic counts."""

import os
from collections import Counter

import numpy as np
import pytest
import torch
from slow_cases import mark_slow

from gcnzc.features.pcie_traffic import table_traffic
from gcnzc.kernels.gather.gpu import gather_rows
from gcnzc.kernels.gather.lanes import LAYOUTS, LINE_BYTES, WARP_LANES, assign_lanes

SECTOR_BYTES = 32


@pytest.fixture
def loads(monkeypatch, device):
    """The addresses and masks of every load of whole vectors, as the interpreter meets them."""
    if device.type != "cpu":
        pytest.skip("a GPU does not tell its addresses")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled; tests/ptx counts the requests of compiled code")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    seen = []
    plain = interpreter.InterpreterBuilder.create_masked_load

    def recorded(self, ptrs, mask, *rest):
        if ptrs.data.ndim == 2:
            seen.append((ptrs.data.astype(np.int64), mask.data.copy(), ptrs.get_element_ty()))
        return plain(self, ptrs, mask, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", recorded)
    return seen


def requests_of(seen, lanes):
    """How many requests of each size: the sectors of one line that one warp's load touches."""
    sizes = Counter()
    for pointers, masks, word in seen:
        num_bytes = pointers.shape[1] * word.primitive_bitwidth // 8
        assert num_bytes == lanes.vector_bytes
        touched = {}
        for lane in np.flatnonzero(masks.any(1)):
            assert masks[lane].all()
            first = int(pointers[lane, 0])
            assert first % num_bytes == 0
            key = lane // WARP_LANES, lane // lanes.lanes, first // LINE_BYTES
            span = touched.setdefault(key, set())
            span.update(
                byte // SECTOR_BYTES for byte in range(first, first + num_bytes, min(num_bytes, 16))
            )
        for sectors in touched.values():
            # a gap is a request of its own
            begins = [sector for sector in sectors if sector - 1 not in sectors]
            for begin in begins:
                end = begin
                while end in sectors:
                    end += 1
                sizes[(end - begin) * SECTOR_BYTES] += 1
    return sizes


PLACES = [
    *((400, 400, 0), (200, 200, 0), (132, 132, 0), (1204, 1204, 0), (2408, 2408, 0)),
    *((5732, 5732, 0), (1204, 1280, 0), (132, 256, 0), (100, 104, 24), (516, 640, 64)),
    *((4, 4, 0), (512, 512, 0), (512, 512, 32), (27220, 27220, 0)),
]


# rows of any stride begin at each place within a line that they can: multiples of 4 B
NUM_ROWS = LINE_BYTES // 4 + 1


def on_lines(row_bytes, stride_bytes, base):
    return stride_bytes % LINE_BYTES == 0 and base % LINE_BYTES == 0


@pytest.mark.parametrize(
    ("layout", "row_bytes", "stride_bytes", "base"),
    # the layouts that tables have; of the baselines, a few rows
    mark_slow(
        (
            (layout, *place)
            for layout in LAYOUTS
            for place in PLACES
            if layout != "pitched" or on_lines(*place)
        ),
        lambda layout, *place: layout in ("scalar", "vector", "wrapped") and place[0] > 200,
    ),
)
def test_requests_the_lines_that_the_model_predicts(layout, row_bytes, stride_bytes, base, loads):
    memory = torch.randint(
        -128, 127, ((NUM_ROWS + 10) * stride_bytes + 4 * LINE_BYTES,), dtype=torch.int8
    )
    begin = -memory.data_ptr() % LINE_BYTES + base
    words = memory[begin : begin + (len(memory) - begin) // 4 * 4].view(torch.int32)
    table = words.as_strided((NUM_ROWS, row_bytes // 4), (stride_bytes // 4, 1))
    ids = torch.randperm(NUM_ROWS)
    found = gather_rows(table, ids, layout=layout)
    assert torch.equal(found, table[ids])
    lanes = assign_lanes(layout, row_bytes, stride_bytes, table.data_ptr(), 4)
    expected = table_traffic(table, ids, layout=layout).requests
    assert requests_of(loads, lanes) == Counter(
        {size: count * len(ids) for size, count in expected.items() if count}
    )


def test_reads_rows_in_the_requested_order(loads):
    table = torch.randn(500, 128)
    ids = torch.randperm(500)[:300]
    found = gather_rows(table, ids, order=ids.argsort(), programs=1)
    assert torch.equal(found, table[ids])
    addresses = np.concatenate([pointers[masks.any(1), 0] for pointers, masks, _ in loads])
    assert (np.diff(addresses) > 0).all()
