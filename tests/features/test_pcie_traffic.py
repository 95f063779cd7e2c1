"""The model of PCIe traffic equals a simulation of every lane, and examples by hand."""

import random
from collections import Counter
from fractions import Fraction
from math import gcd

import pytest
import torch

from gcnzc.features.pcie_traffic import Traffic, choose_pitch, table_traffic, traffic
from gcnzc.features.table import FeatureTable
from gcnzc.kernels.gather.lanes import LAYOUTS, assign_lanes, default_layout

REAL = [(512, 4), (256, 2), (400, 4), (200, 2), (2408, 4), (1204, 2), (5732, 4), (14812, 4)]
REAL += [(2000, 4), (3068, 4), (2980, 4), (27220, 4), (132, 1), (1536, 2), (4096, 4), (40, 4)]


def simulated(lanes, addresses, split_bytes=None):
    """The traffic of rows at these addresses, from nothing but which lane loads what."""
    requests, wire_bytes = Counter(), 0
    for address in addresses:
        for part in range(lanes.passes):
            touched = set()
            for lane in range(lanes.lanes):
                at = lanes.load_address(address, part, lane)
                if at is not None:
                    touched |= {byte // 32 for byte in range(at, at + lanes.vector_bytes)}
            asked = []
            for sector in sorted(touched):
                if asked and asked[-1][-1] == sector - 1 and sector % 4 != 0:
                    asked[-1].append(sector)
                else:
                    asked.append([sector])
            for sectors in asked:
                requests[32 * len(sectors)] += 1
                packets = {32 * s // (split_bytes or 128) for s in sectors}
                wire_bytes += 32 * len(sectors) + 20 * len(packets)
    each = {size: Fraction(requests[size], len(addresses)) for size in (32, 64, 96, 128)}
    return Traffic(lanes.row_bytes, each, Fraction(wire_bytes, len(addresses)))


def check(layout, row_bytes, item_bytes, stride_bytes, base, split_bytes=None):
    rows = {"item_bytes": item_bytes, "stride_bytes": stride_bytes, "base": base}
    found = traffic(row_bytes, layout=layout, split_bytes=split_bytes, **rows)
    lanes = assign_lanes(layout, row_bytes, stride_bytes, base, item_bytes)
    period = 128 // gcd(stride_bytes, 128)
    addresses = [base + row * stride_bytes for row in range(period)]
    assert found == simulated(lanes, addresses, split_bytes), (row_bytes, stride_bytes, base)


def strides_and_bases(layout, row_bytes, item_bytes):
    """Rows side by side, a little apart, and on lines; from some addresses."""
    padded_bytes = row_bytes + -row_bytes % 128
    if layout == "pitched":
        return [padded_bytes], [0]
    strides = [row_bytes, row_bytes + 3 * item_bytes, padded_bytes]
    return strides, [0, item_bytes, 9 * item_bytes, 64, 128 - item_bytes]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_a_simulation(layout):
    for item_bytes in (1, 2, 4, 8):
        chooser = random.Random(f"{layout} {item_bytes}")
        widths = range(item_bytes, 301, item_bytes)
        # every width up to a line, where the most is going on, and some of the others
        for row_bytes in [*widths[: 128 // item_bytes : 3], *chooser.sample(widths, 12)]:
            chosen = map(chooser.choice, strides_and_bases(layout, row_bytes, item_bytes))
            check(layout, row_bytes, item_bytes, *chosen, chooser.choice([None, 64]))
    # rows on lines but for the base begin all at one place
    for row_bytes in (1, 7, 31, 33, 100, 127, 129, 290):
        for base in range(128) if layout != "pitched" else [0, 128]:
            check(layout, row_bytes, 1, row_bytes + -row_bytes % 128, base)
    for row_bytes, item_bytes in REAL:
        strides, bases = strides_and_bases(layout, row_bytes, item_bytes)
        # long periods of long rows are many loads
        base = 0 if row_bytes > 3000 else bases[-1]
        for split_bytes in (None, 64):
            check(layout, row_bytes, item_bytes, strides[0], base, split_bytes)


@pytest.mark.parametrize(
    ("layout", "row_bytes", "item_bytes", "base", "requests", "wire_bytes"),
    [
        ("scalar", 4, 4, 0, {32: 1}, 52),
        ("vector", 128, 4, 0, {128: 1}, 148),
        # a row of a line that begins 4 B after one
        ("vector", 128, 4, 4, {32: 1, 128: 1}, 200),
        ("vector", 128, 4, 32, {32: 1, 96: 1}, 168),
        ("vector", 128, 4, 64, {64: 2}, 168),
        # two loads of 128 B from there: the sector and the line between them are asked for twice
        ("vector", 256, 4, 4, {32: 2, 128: 2}, 400),
        ("shifted", 256, 4, 4, {32: 1, 128: 2}, 348),
        # float16, one a lane, makes loads of 64 B
        ("scalar", 256, 2, 0, {64: 4}, 336),
        # 10 lanes in front load 110 to 130, the others 20 to 64: the sector from 64 on is left out
        ("wrapped", 110, 2, 20, {32: 2, 64: 2}, 272),
    ],
)
def test_examples_by_hand(layout, row_bytes, item_bytes, base, requests, wire_bytes):
    stride_bytes = row_bytes + -row_bytes % 128
    rows = {"item_bytes": item_bytes, "stride_bytes": stride_bytes, "base": base}
    told = traffic(row_bytes, layout=layout, **rows)
    assert {size: count for size, count in told.requests.items() if count} == requests
    assert told.wire_bytes == wire_bytes
    assert told.requests_per_row == sum(requests.values())
    assert told.read_bytes == sum(size * count for size, count in requests.items())
    assert told.efficiency == Fraction(row_bytes, wire_bytes)


def test_the_traffic_of_a_table_is_the_mean_of_its_rows():
    memory = torch.zeros(4000, dtype=torch.float16)
    rows = memory.as_strided((11, 50), (52, 1), 3)
    base = rows.data_ptr()
    lanes = assign_lanes("vector", 100, 104, base, 2)
    addresses = [base + row * 104 for row in range(11)]
    # the rows that begin at one place in a line are not as many as those that begin at another
    assert table_traffic(rows, layout="vector") == simulated(lanes, addresses)
    assert table_traffic(FeatureTable(rows), layout="vector") == simulated(lanes, addresses)
    ids = torch.tensor([10, 3, 3, 0], dtype=torch.int32)
    wanted = simulated(lanes, [addresses[i] for i in ids], 64)
    assert table_traffic(rows, ids, layout="vector", split_bytes=64) == wanted
    assert wanted != simulated(lanes, addresses, 64)


def test_tables_without_bytes_to_read_and_ids_out_of_range_are_rejected():
    for rows, ids in (
        (torch.zeros(0, 4), None),
        (torch.zeros(4, 0), None),
        (torch.zeros(4, 4), torch.zeros(0, dtype=torch.int64)),
    ):
        with pytest.raises(ValueError, match="no bytes to read"):
            table_traffic(rows, ids, layout="shifted")
    for ids in ([0, 4], [-1]):
        with pytest.raises(IndexError, match="not in a table of 4 rows"):
            table_traffic(torch.zeros(4, 4), torch.tensor(ids), layout="shifted")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"row_bytes": 0}, "not whole elements"),
        ({"row_bytes": 402}, "not whole elements of 4 bytes"),
        ({"row_bytes": 400, "stride_bytes": 402}, "402 bytes apart"),
        ({"row_bytes": 400, "base": 2}, "address 0x2"),
        ({"row_bytes": 6, "item_bytes": 3}, "elements of 3 bytes"),
        ({"row_bytes": 400, "split_bytes": 16}, "split at multiples of 16"),
        ({"row_bytes": 400, "split_bytes": 96}, "split at multiples of 96"),
        ({"row_bytes": 400, "layout": "pitched", "stride_bytes": 400}, "do not begin on lines"),
    ],
)
def test_invalid_sizes_are_rejected(options, words):
    with pytest.raises(ValueError, match=words):
        traffic(**({"layout": "shifted"} | options))


def test_shifted_has_the_fewest_requests():
    for row_bytes in range(4, 2052, 4):
        told = {layout: traffic(row_bytes, layout=layout) for layout in LAYOUTS}
        least = told["shifted"].requests_per_row
        # each line that has a byte of a row is requested once
        begins = range(0, row_bytes * 128 // gcd(row_bytes, 128), row_bytes)
        lines = sum((begin + row_bytes - 1) // 128 - begin // 128 + 1 for begin in begins)
        assert least == Fraction(lines, len(begins))
        for layout in ("scalar", "vector", "wrapped"):
            assert least <= told[layout].requests_per_row
            assert told["shifted"].wire_bytes <= told[layout].wire_bytes
        assert told["pitched"].requests_per_row <= least
        assert told["pitched"].requests_per_row == -(-row_bytes // 128)


def test_the_documented_efficiencies_are_correct():
    for row_bytes in range(128, 8193, 4):
        vector = traffic(row_bytes, layout="vector").efficiency
        shifted = traffic(row_bytes, layout="shifted").efficiency
        if row_bytes % 16 == 0 and row_bytes <= 512:
            assert vector == shifted
        if row_bytes % 8 == 4:
            assert vector < 0.66
        if row_bytes >= 1024:
            assert shifted > 0.83


@pytest.mark.parametrize(
    ("row_bytes", "item_bytes", "pitch_bytes", "why"),
    [
        (512, 4, 512, "begin on lines"),
        (400, 4, 400, "save 0 % of the requests and cost 28 % of memory: too few"),
        (200, 2, 200, "save 20 % of the requests and cost 28 % of memory: too much"),
        (2408, 4, 2408, "save 3.8 % of the requests and cost 0.997 % of memory: too few"),
        (120, 4, 128, "save 46.7 % of the requests and cost 6.67 % of memory"),
        (1534, 2, 1536, "save 7.47 % of the requests and cost 0.13 % of memory"),
    ],
)
def test_choose_pitch(row_bytes, item_bytes, pitch_bytes, why):
    found, reason = choose_pitch(row_bytes, item_bytes)
    assert found == pitch_bytes
    assert reason.endswith(why)


def test_a_chosen_pitch_has_the_documented_properties():
    pitched = 0
    for row_bytes in range(2, 4096, 2):
        pitch_bytes, _ = choose_pitch(row_bytes, 2)
        packed = traffic(row_bytes, layout="shifted", item_bytes=2).requests_per_row
        saved = 1 - -(-row_bytes // 128) / packed
        worth = saved >= Fraction(1, 20) and -row_bytes % 128 <= row_bytes / 10
        assert pitch_bytes == (row_bytes + -row_bytes % 128 if worth else row_bytes)
        pitched += pitch_bytes != row_bytes
    assert pitched > 100


def test_the_layout_of_gathers_is_the_default():
    assert default_layout(512) == default_layout(512, 256) == "pitched"
    assert default_layout(400) == default_layout(512, 64) == "shifted"
    assert traffic(512) == traffic(512, layout="pitched")
    assert traffic(512, base=64) == traffic(512, base=64, layout="shifted")
