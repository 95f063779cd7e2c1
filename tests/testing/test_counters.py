"""Requests, sectors and lines of global accesses, against cases that are counted by hand."""

import numpy as np
import pytest
from ptx_kernels import run

from gcnzc.testing.counters import AccessCounters
from gcnzc.testing.executor import Executor


def aligned(num_bytes, offset=0):
    """Bytes that begin `offset` after a line of 128 B."""
    memory = np.zeros(num_bytes + 256, np.uint8)
    begin = -memory.ctypes.data % 128 + offset
    return memory[begin : begin + num_bytes]


def count(body, source, threads=32, **options):
    executor = run(body, {"source": source}, threads=threads, **options)
    found = executor.counters["load", "source"]
    return found.warp_instructions, found.lanes, found.sectors, found.lines, dict(found.requests)


LOAD = "add.s64 %d1, %source, %d1; ld.global.b32 %r1, [%d1];"
COALESCED = "mul.wide.u32 %d1, %tid, 4;" + LOAD


@pytest.mark.parametrize(
    ("stride", "offset", "sectors", "lines", "requests"),
    [
        (4, 0, 4, 1, {128: 1}),
        # 32 lanes of 4 B from the middle of a line on: 64 B of one line and 64 B of the next
        (4, 64, 4, 2, {64: 2}),
        (4, 4, 5, 2, {128: 1, 32: 1}),
        (4, 96, 4, 2, {32: 1, 96: 1}),
        # every lane in a sector of its own, four of which are adjacent
        (32, 0, 32, 8, {128: 8}),
        # every other sector
        (64, 0, 32, 16, {32: 32}),
        (0, 0, 1, 1, {32: 1}),
        (8, 0, 8, 2, {128: 2}),
        (128, 96, 32, 32, {32: 32}),
    ],
)
def test_a_warp_that_loads_words(stride, offset, sectors, lines, requests):
    body = f"mul.wide.u32 %d1, %tid, {stride};" + LOAD
    assert count(body, aligned(31 * stride + 4, offset)) == (1, 32, sectors, lines, requests)


def test_warps_and_instructions_are_counted_separately():
    # two warps read the same line, each twice
    body = "and.b32 %r9, %tid, 31; mul.wide.u32 %d1, %r9, 4;" + LOAD + "ld.global.b32 %r2, [%d1];"
    assert count(body, aligned(128), threads=64) == (4, 128, 16, 4, {128: 4})
    assert count(body, aligned(128), grid=(3,)) == (6, 192, 24, 6, {128: 6})


def test_loads_and_stores_of_each_argument_are_counted():
    source, out = aligned(128), aligned(256, 64)
    body = (
        COALESCED + "mul.wide.u32 %d2, %tid, 8; add.s64 %d2, %d2, %out; st.global.b32 [%d2], %r1;"
    )
    executor = run(body, {"source": source, "out": out})
    assert set(executor.counters) == {("load", "source"), ("store", "out")}
    assert executor.counters["store", "out"].requests == {64: 2, 128: 1}
    # a further launch adds to the counters
    run(body, {"source": source, "out": out}, executor=executor)
    assert executor.counters["load", "source"].sectors == 8
    silent = run(body, {"source": source, "out": out}, executor=Executor(count=False))
    assert silent.counters == {}


def test_ordered_loads_and_stores_count_as_loads_and_stores():
    source, out = aligned(128), aligned(128)
    for load, store in (("relaxed.gpu", "release.gpu"), ("volatile", "volatile")):
        body = f"""
            add.s64 %d1, %source, %at4; ld.{load}.global.b32 %r1, [%d1];
            add.s64 %d2, %out, %at4; st.{store}.global.b32 [%d2], %r1;
        """
        executor = run(body, {"source": source, "out": out})
        assert set(executor.counters) == {("load", "source"), ("store", "out")}
        assert executor.counters["load", "source"].requests == {128: 1}


def test_random_accesses_equal_a_count_by_sets():
    random, counters = np.random.default_rng(0), AccessCounters()
    warps = np.repeat(np.arange(8), 32)
    addresses = (random.integers(0, 200, 256) * 16 + (5 << 40)).astype(np.uint64)
    counters.add(warps, addresses)
    expected = {"sectors": 0, "half_lines": 0, "lines": 0}
    requests: dict[int, int] = {}
    for warp in range(8):
        sectors = {int(address) // 32 for address in addresses[warps == warp]}
        expected["sectors"] += len(sectors)
        expected["half_lines"] += len({sector // 2 for sector in sectors})
        expected["lines"] += len({sector // 4 for sector in sectors})
        for line in {sector // 4 for sector in sectors}:
            bits = "".join("1" if 4 * line + n in sectors else " " for n in range(4))
            for piece in bits.split():
                requests[32 * len(piece)] = requests.get(32 * len(piece), 0) + 1
    assert {name: getattr(counters, name) for name in expected} == expected
    assert counters.requests == requests
    assert (counters.warp_instructions, counters.lanes) == (8, 256)
