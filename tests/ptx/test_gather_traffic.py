"""Requests that the compiled gather kernel makes equal the model of PCIe traffic, row by row."""

import itertools

import pytest
import torch

from gcnzc.features.pcie_traffic import SECTOR_BYTES, table_traffic
from gcnzc.kernels.gather import cached_rows
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
    num_bytes = num_rows * stride_bytes + 2 * LINE_BYTES + base
    memory = torch.randint(-99, 99, (num_bytes,), dtype=torch.int8)
    words = memory[-memory.data_ptr() % LINE_BYTES + base :]
    words = words[: len(words) // size * size].view(dtype)
    table = words.as_strided((num_rows, row_bytes // size), (stride_bytes // size, 1))
    return table, torch.randperm(COUNT) * step


def check(executor, row_bytes, dtype, base, stride_bytes, layout):
    table, ids = spaced_rows(row_bytes, stride_bytes, base, dtype)
    found, requests = counted(executor, table, ids, layout=layout)
    assert torch.equal(found.view(torch.int8), table[ids].view(torch.int8))
    case = layout, row_bytes, stride_bytes, base, dtype
    assert requests == modelled(table, ids, layout), case


def cases(row_bytes):
    """The dtype, base, stride and layout of every table with such rows."""
    padded = (row_bytes // LINE_BYTES + 1) * LINE_BYTES
    kinds = itertools.product(DTYPES, BASES, (row_bytes, padded), LAYOUTS)
    for dtype, base, stride, layout in kinds:
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


def modelled(table, ids, layout="shifted"):
    """Requests for these rows, by bytes."""
    requests = table_traffic(table, ids, layout=layout).requests
    return {size: int(count * len(ids)) for size, count in requests.items() if count}


def counted(executor, table, ids, **options):
    """The gathered rows, and the requests that compiled code makes for them."""
    executor.counters.clear()
    found = gather_rows(table, ids, **options)
    return found, dict(executor.counters["load", "table"].requests)


@pytest.mark.triton
@pytest.mark.parametrize("row_bytes", [400, 1204])
def test_cached_rows_are_requested_like_the_table(row_bytes, ptx):
    table, ids = spaced_rows(row_bytes, row_bytes, 4, torch.float32)
    half = ids[: COUNT // 2]
    cached = cached_rows.make_cached_rows(table, half, torch.device("cpu"))
    found, requests = counted(ptx, table, ids, cached=cached)
    assert torch.equal(found.view(torch.int32), table[ids].view(torch.int32))
    assert requests == modelled(table, ids[COUNT // 2 :])
    # a copy has the offset of its row
    assert dict(ptx.counters["load", "cached"].requests) == modelled(table, half)


@pytest.mark.triton
@pytest.mark.parametrize("gpus", [2, 3])
def test_cached_rows_of_several_gpus_are_requested_like_the_table(gpus, ptx):
    table, ids = spaced_rows(404, 404, 4, torch.float32)
    owned = [ids[gpu : COUNT // 2 : gpus] for gpu in range(gpus)]
    # 404 B wherever they begin in a line
    buffers = [torch.zeros((len(part) * 5 + 1) * LINE_BYTES, dtype=torch.int8) for part in owned]
    parts = []
    for part, buffer in zip(owned, buffers, strict=True):
        parts.append(cached_rows.aligned_view(buffer, len(part), 5 * LINE_BYTES))
        cached_rows.copy_rows(table, part, parts[-1])
    addresses = torch.tensor([part.data_ptr() for part in parts])
    peers = cached_rows.Peers(addresses, 0, owners=tuple(buffers))
    cached = cached_rows.CachedRows(cached_rows.assign_slots(owned, len(table)), parts[0], peers)
    found, requests = counted(ptx, table, ids, cached=cached)
    assert torch.equal(found.view(torch.int32), table[ids].view(torch.int32))
    assert requests == modelled(table, ids[COUNT // 2 :])
    assert dict(ptx.counters["load", "reachable"].requests) == modelled(table, ids[: COUNT // 2])


@pytest.mark.triton
@pytest.mark.parametrize(
    ("dtype", "target"),
    [
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.int8, torch.float16),
        (torch.float8_e5m2, torch.float16),
    ],
    ids=str,
)
def test_converted_rows_are_requested_like_others(dtype, target, ptx):
    table, ids = spaced_rows(1204, 1204, 4, dtype)
    assert counted(ptx, table, ids, dtype=target)[1] == modelled(table, ids)


@pytest.mark.triton
@pytest.mark.parametrize("scale_columns", [None, 16])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_codes_are_requested_like_other_rows(dtype, scale_columns, ptx):
    table, ids = spaced_rows(100, 100, 4, torch.int8)
    scales = torch.ones(7 if scale_columns else len(table))
    scaled = {"scales": scales, "scale_columns": scale_columns}
    assert counted(ptx, table.view(dtype), ids, **scaled)[1] == modelled(table, ids)


@pytest.mark.triton
@pytest.mark.parametrize(
    ("row_bytes", "base", "lane_bytes"), [(400, 0, 16), (2408, 0, 8), (2408, 4, 4), (5732, 0, 4)]
)
def test_a_warp_stores_adjacent_words(row_bytes, base, lane_bytes, ptx):
    table, ids = spaced_rows(row_bytes, row_bytes, base, torch.float32)
    ptx.counters.clear()
    gather_rows(table, ids)
    stored = ptx.counters["store", "out"]
    assert stored.lanes == COUNT * row_bytes // lane_bytes
    # what a warp stores may begin and end within a sector
    warps = stored.lanes // 32 + 2 * COUNT
    assert stored.sectors <= COUNT * row_bytes // SECTOR_BYTES + warps
