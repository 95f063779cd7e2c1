"""Every layout of lanes equals the reference bit for bit, for every alignment of rows."""

import itertools
import os

import numpy as np
import pytest
import torch
from bits import same_bits
from slow_cases import mark_slow

from gcnzc.kernels.gather import gather_reference, gather_triton
from gcnzc.kernels.gather.bench_reads import chase_pointers, read_dense
from gcnzc.kernels.gather.cached import gather_cached
from gcnzc.kernels.gather.cached_rows import make_cached_rows
from gcnzc.kernels.gather.gpu import KernelConfig, gather_rows
from gcnzc.kernels.gather.lanes import LAYOUTS, LINE_BYTES

# rows of 16 B and more begin on a multiple of one of these; the last is a line
UNITS = [1, 2, 4, 8, 16, 32, 128]
DTYPES = [torch.int8, torch.float16, torch.float32, torch.float64]
# of a row: around vectors, lines and what one load of a warp covers
WIDTHS_BYTES = [1, 2, 3, 4, 15, 16, 17, 31, 100, 127, 128, 129, 132, 200, 400, 496, 500, 512, 520]
WIDE_BYTES = [1023, 1204, 1536, 2000, 2408, 5732]


def table_of(row_bytes, unit, dtype, device, num_rows=None, inset=0):
    """Rows that begin on every multiple of `unit` within a line, from `inset` bytes after one."""
    stride = -(-row_bytes // LINE_BYTES) * LINE_BYTES + unit % LINE_BYTES
    num_rows = num_rows or max(3, LINE_BYTES // unit)
    memory = torch.randint(256, (num_rows * stride + 2 * LINE_BYTES,), dtype=torch.uint8)
    memory = memory.to(device)
    begin = -memory.data_ptr() % LINE_BYTES + inset
    size = dtype.itemsize
    words = memory[begin:]
    words = words[: len(words) // size * size].view(dtype)
    return words.as_strided((num_rows, row_bytes // size), (stride // size, 1))


def check(row_bytes, unit, dtype, layout, device, inset=0, **options):
    table = table_of(row_bytes, unit, dtype, device, inset=inset)
    ids = torch.randperm(len(table), device=device)
    # around the result nothing may be written, and all of it must be
    wide = torch.full((len(table) + 2, table.shape[1] + 2), 7, dtype=torch.int8, device=device)
    wide = wide.repeat_interleave(dtype.itemsize, 1).view(dtype)
    out = wide[1:-1, 1:-1]
    gather_rows(table, ids, out, layout=layout, **options)
    assert same_bits(out, gather_reference(table, ids)), (row_bytes, unit, dtype, layout, inset)
    edges = wide.clone()
    edges[1:-1, 1:-1] = wide[0, 0]
    assert (edges.view(torch.int8) == 7).all(), (row_bytes, unit, dtype, layout, inset)


def check_layouts(row_bytes, unit, dtype, device, layouts=LAYOUTS):
    """Every layout that has such rows."""
    if row_bytes % dtype.itemsize == 0 and unit % dtype.itemsize == 0:
        for layout in layouts:
            if layout != "pitched" or unit % LINE_BYTES == 0:
                check(row_bytes, unit, dtype, layout, device)


@pytest.mark.triton(slow=True)
@pytest.mark.parametrize("row_bytes", [*WIDTHS_BYTES, *WIDE_BYTES])
def test_every_offset_of_a_row_in_a_line_is_read_correctly(row_bytes, device):
    # of several passes a few rows, which begin at different bytes of a line
    few = (torch.int8, 31), (torch.float16, 28), (torch.float32, 16)
    # the slow test below has all dtypes
    every = itertools.product((torch.int8, torch.float32), UNITS)
    for dtype, unit in few if row_bytes in WIDE_BYTES else every:
        check_layouts(row_bytes, unit, dtype, device)


@pytest.mark.triton
@pytest.mark.parametrize(
    # tables of the library are read with `shifted`; the others are baselines of benchmarks
    "layout",
    mark_slow([("shifted",), ("scalar",), ("vector",), ("wrapped",)], "shifted".__ne__),
)
def test_tables_that_do_not_begin_on_a_line_are_read(layout, device):
    for inset in (1, 3, 8, 16, 24, 48, 127):
        for row_bytes, unit in ((33, 128), (400, 16), (1000, 1)):
            check(row_bytes, unit, torch.int8, layout, device, inset=inset)


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_widths_and_offsets_are_read(dtype, layout, device):
    for columns, unit in itertools.product(range(1, 301), UNITS):
        check_layouts(columns * dtype.itemsize, unit, dtype, device, [layout])


@pytest.mark.triton
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("programs", [1, 3, 64])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_any_number_of_programs_and_ids_is_supported(layout, programs, id_dtype, device):
    table = table_of(132, 128, torch.float32, device, num_rows=50)
    for num_ids in (1, 2, 127, 128, 129, 1000):
        ids = torch.randint(50, (num_ids,), dtype=id_dtype, device=device)
        found = gather_rows(table, ids, layout=layout, programs=programs)
        assert same_bits(found, table[ids])


WAYS = [
    KernelConfig(),
    KernelConfig(programs=1, warps=4, vectors=2),
    KernelConfig(programs=7, warps=2, vectors=1),
    KernelConfig(warps=1, vectors=8),
    KernelConfig(programs=3, warps=16, vectors=4),
]


@pytest.mark.triton
@pytest.mark.parametrize("config", WAYS, ids=str)
@pytest.mark.parametrize(("row_bytes", "unit"), [(100, 4), (128, 128), (1204, 4)])
def test_every_kernel_config_gathers_the_same(config, row_bytes, unit, device):
    table = table_of(row_bytes, unit, torch.float32, device, num_rows=60)
    ids = torch.randint(60, (130,), device=device)
    assert same_bits(gather_triton(table, ids, config=config), table[ids])
    cached = make_cached_rows(table.cpu(), torch.arange(0, 60, 3), device)
    if device.type == "cpu":
        assert same_bits(gather_cached(table, ids, cached, config=config), table[ids])
    codes = torch.randint(-127, 128, (90, 33), dtype=torch.int8, device=device)
    scales = torch.rand(90, device=device)
    ids = torch.randint(90, (130,), device=device)
    expected = gather_reference(codes, ids, scales)
    assert same_bits(gather_triton(codes, ids, scales=scales, config=config), expected)


def test_invalid_kernel_configs_are_rejected():
    for wrong in ({"programs": 0}, {"warps": 3}, {"warps": 64}, {"vectors": 0}):
        with pytest.raises(ValueError, match="is not a valid configuration"):
            KernelConfig(**wrong)


@pytest.mark.triton
@pytest.mark.parametrize("is_ordered", [False, True])
def test_rows_of_a_result_may_be_more_than_31_bits_of_words_apart(is_ordered, device):
    table, ids = table_of(133, 1, torch.int8, device, num_rows=5), torch.tensor([4, 0, 2])
    ids = ids.to(device)
    # the memory between the rows is not touched, so the host does not allocate it
    out = torch.empty(2**31 + 200, dtype=torch.int8, device=device).as_strided((3, 133), (2**30, 1))
    order = torch.tensor([2, 0, 1], device=device) if is_ordered else None
    gather_rows(table, ids, out, order=order)
    assert torch.equal(out, table[ids])


FLOATS = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.triton
@pytest.mark.parametrize("source", [*FLOATS, torch.int8, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("columns", [1, 33, 602])
def test_converts_as_torch_does(source, target, columns, device):
    table = (torch.randn(40, columns) * 50).to(source).to(device)
    ids = torch.randint(40, (60,), device=device)
    found = gather_rows(table, ids, dtype=target)
    assert found.dtype == target
    if target == torch.bfloat16 and device.type == "cpu":
        # the interpreter cuts where processors round
        torch.testing.assert_close(found, table[ids].to(target), rtol=2**-7, atol=0)
    else:
        assert torch.equal(found, table[ids].to(target))
    out = torch.full((60, columns), 7.0, dtype=target, device=device)
    assert torch.equal(gather_rows(table, ids, out), found)


@pytest.mark.triton
@pytest.mark.parametrize("source", [*FLOATS, torch.float8_e5m2, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("beside", [0x7C, 0x7F, 0xFF])
def test_bytes_around_the_table_do_not_change_the_result(source, target, beside, device):
    memory = torch.full((4000,), beside, dtype=torch.uint8, device=device).view(source)
    table = memory[160 : 160 + 40 * 3].view(40, 3)
    table.copy_(torch.randint(-8, 8, (40, 3)))
    ids = torch.arange(40, device=device)
    assert torch.equal(gather_rows(table, ids, dtype=target), table.to(target))


@pytest.mark.parametrize(
    ("shape", "out_dtype", "dtype"),
    [((4, 8), torch.float16, torch.float32), ((4, 8), torch.float32, torch.float16),
     ((3, 8), torch.float32, None), ((4, 9), torch.float32, None)],
)  # fmt: skip
def test_a_result_of_another_shape_or_dtype_is_an_error(shape, out_dtype, dtype, device):
    table, ids = torch.randn(6, 8, device=device), torch.arange(4, device=device)
    out = torch.zeros(shape, dtype=out_dtype, device=device)
    with pytest.raises(ValueError, match=r"out must be \(4, 8\)"):
        gather_rows(table, ids, out, dtype=dtype)
    assert not out.any()


@pytest.mark.triton
@pytest.mark.parametrize("outside", [-1, 40, 2**31 - 1, -(2**31)])
def test_checks_ids_if_the_environment_variable_is_set(outside, device):
    table = torch.randn(40, 50, device=device)
    ids = torch.arange(39, device=device).repeat(5)
    ids[77] = outside
    out = torch.zeros(len(ids), 50, device=device)
    with pytest.raises(IndexError, match=rf"id {outside} at 77 is not in a table of 40 rows"):
        gather_rows(table, ids, out, checked=True)
    good = (ids >= 0) & (ids < 40)
    assert torch.equal(out[good], table[ids[good]])
    assert not out[~good].any()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("row_bytes", [4, 100, 400, 516, 1204, 5732])
def test_reads_the_hosts_memory(layout, row_bytes, device):
    for unit in (4, 128) if layout != "pitched" else (128,):
        plain = table_of(row_bytes, unit, torch.float32, "cpu", num_rows=1000)
        whole = torch.empty(2 * plain.untyped_storage().nbytes() + 1024, dtype=torch.uint8)
        whole = whole.pin_memory()
        begin = -whole.data_ptr() % LINE_BYTES
        span = plain.stride(0) * 4 * 1000
        words = whole[begin : begin + span + 4 * LINE_BYTES].view(torch.float32)
        table = words.as_strided(plain.shape, plain.stride())
        table.view(torch.int32).copy_(plain.view(torch.int32))
        ids = torch.randint(1000, (5000,), device=device)
        found = gather_rows(table, ids, layout=layout)
        assert same_bits(found.cpu(), plain[ids.cpu()])
        assert same_bits(gather_rows(table, ids, layout=layout, order=ids.argsort()), found)


@pytest.mark.triton
@pytest.mark.parametrize("size", [1, 100, 5000, 70_001])
@pytest.mark.parametrize("programs", [1, 5])
def test_reads_a_dense_range(size, programs, device):
    source = torch.randint(-128, 127, (size * 16,), dtype=torch.int8, device=device)
    out = torch.zeros_like(source)
    read_dense(source, out, programs=programs)
    assert torch.equal(out, source)


@pytest.mark.triton
def test_follows_pointers_through_a_whole_table(device):
    steps = 200
    order = torch.randperm(steps)
    places = torch.empty(steps, dtype=torch.int64)
    places[order] = order.roll(-1)
    out = torch.zeros(1, dtype=torch.int64, device=device)
    begin = int(order[0])
    chase_pointers(places.to(device), begin, steps - 1, out)
    assert int(out) == int(order[-1])


def test_rows_are_read_in_the_requested_order(monkeypatch):
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("compiled kernels do not tell their addresses")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    addresses, plain = [], interpreter.InterpreterBuilder.create_masked_load

    def recorded(self, ptrs, mask, *rest):
        if ptrs.data.ndim == 2:
            addresses.append(ptrs.data[mask.data.any(1), 0].astype(np.int64))
        return plain(self, ptrs, mask, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", recorded)
    table, ids = torch.randn(500, 128), torch.randperm(500)[:300]
    found = gather_rows(table, ids, order=ids.argsort(), programs=1)
    assert torch.equal(found, table[ids])
    assert (np.diff(np.concatenate(addresses)) > 0).all()
