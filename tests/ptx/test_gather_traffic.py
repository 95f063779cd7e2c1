"""Requests that the compiled gather kernel makes equal the model of PCIe traffic, row by row."""

import itertools

import pytest
import torch

from gcnzc.features.pcie_traffic import table_traffic
from gcnzc.kernels.gather.gpu import gather_rows
from gcnzc.kernels.gather.lanes import LAYOUTS, LINE_BYTES

ROWS = [4, 36, 100, 128, 132, 256, 400, 516, 1000, 1024, 1204, 4096, 5732, 8192]
PRIMES = [3, 7, 13, 31, 61, 127, 251, 509, 1021, 2039]
BASES = [0, 4, 16, 64, 100]
DTYPES = [torch.int8, torch.float16, torch.float32]
COUNT = 40  # gathered rows


def spaced_rows(row_bytes, stride_bytes, base, dtype):
    """A table that begins `base` bytes after a line, and ids of rows that share no line."""
    # at least a line between rows; odd, so that they begin everywhere within a line that they can
    step = -(-(row_bytes + 2 * LINE_BYTES) // stride_bytes) | 1
    num_rows, size = COUNT * step, dtype.itemsize
    memory = torch.randint(
        -99, 99, (num_rows * stride_bytes + 2 * LINE_BYTES + base,), dtype=torch.int8
    )
    words = memory[-memory.data_ptr() % LINE_BYTES + base :]
    words = words[: len(words) // size * size].view(dtype)
    table = words.as_strided((num_rows, row_bytes // size), (stride_bytes // size, 1))
    return table, torch.randperm(COUNT) * step


def check(executor, row_bytes, dtype, base, stride_bytes, layout):
    table, ids = spaced_rows(row_bytes, stride_bytes, base, dtype)
    model = table_traffic(table, ids, layout=layout).requests
    executor.counters.clear()
    found = gather_rows(table, ids, layout=layout)
    assert torch.equal(found.view(torch.int8), table[ids].view(torch.int8))
    expected = {size: int(count * COUNT) for size, count in model.items() if count}
    counted = dict(executor.counters["load", "table"].requests)
    assert counted == expected, (layout, row_bytes, stride_bytes, base, dtype)


def cases(row_bytes):
    """The dtype, base, stride and layout of every table with such rows."""
    padded = (row_bytes // LINE_BYTES + 1) * LINE_BYTES
    for dtype, base, stride, layout in itertools.product(
        DTYPES, BASES, (row_bytes, padded), LAYOUTS
    ):
        is_on_lines = stride % LINE_BYTES == 0 and base % LINE_BYTES == 0
        if row_bytes % dtype.itemsize == 0 and (layout != "pitched" or is_on_lines):
            yield dtype, base, stride, layout


def some(row_bytes):
    """Cases of every layout, in which dtypes, bases and strides take turns."""
    for layout in LAYOUTS:
        mine = [case for case in cases(row_bytes) if case[-1] == layout]
        # these numbers have no factor in common with those of dtypes, bases and strides
        yield from itertools.islice(mine, row_bytes % 7, None, 13)


@pytest.mark.triton
@pytest.mark.parametrize("row_bytes", ROWS + PRIMES)
def test_requests_equal_the_model(row_bytes, ptx):
    for case in some(row_bytes):
        check(ptx, row_bytes, *case)


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.parametrize("row_bytes", ROWS + PRIMES)
def test_requests_equal_the_model_for_all_tables(row_bytes, ptx):
    for case in cases(row_bytes):
        check(ptx, row_bytes, *case)


@pytest.mark.triton
@pytest.mark.parametrize("layout", ["scalar", "vector", "wrapped"])
def test_a_lane_loads_one_vector_where_rows_are_padded(layout, ptx):
    """Where strides are aligned and rows are not, Triton must not give a lane several vectors."""
    check(ptx, 132, torch.float32, 0, 512, layout)
    # the rows of the result are aligned, those of the table are not
    check(ptx, 400, torch.int8, 1, 400, layout)


@pytest.mark.triton
@pytest.mark.parametrize("row_bytes", [400, 1204])
def test_cached_rows_are_requested_like_the_table(row_bytes, ptx):
    from gcnzc.kernels.gather.cached_rows import make_cached_rows

    table, ids = spaced_rows(row_bytes, row_bytes, 4, torch.float32)
    half = ids[: COUNT // 2]
    cached = make_cached_rows(table, half, torch.device("cpu"))
    ptx.counters.clear()
    assert torch.equal(gather_rows(table, ids, cached=cached).view(torch.int32),
                       table[ids].view(torch.int32))  # fmt: skip
    rest = table_traffic(table, ids[COUNT // 2 :], layout="shifted").requests
    expected = {size: int(count * (COUNT - len(half))) for size, count in rest.items() if count}
    assert dict(ptx.counters["load", "table"].requests) == expected
    assert ptx.counters["load", "cached"].requests.total() > 0
