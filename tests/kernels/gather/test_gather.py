"""`gather` equals its reference bit for bit in all implementations, and writes nothing else."""

import mmap
import warnings

import numpy as np
import pytest
import torch
from bits import same_bits

from gcnzc.kernels.gather import cpu as module
from gcnzc.kernels.gather import gather, gather_numba, gather_reference, gather_triton

DTYPES = "float32 float16 bfloat16 float64 int8 uint8 bool int64 complex64 complex128 "
DTYPES += "float8_e4m3fn float8_e5m2"
# of tests that launch no kernel
without_launch = pytest.mark.parametrize("implementation", [gather_numba, gather_triton])


def random_bits(num_rows, num_cols, dtype, device):
    """Every bit pattern: NaNs with payloads, infinities, negative zeros."""
    bits = torch.randint(256, (num_rows, num_cols * dtype.itemsize), device=device)
    if dtype == torch.bool:
        bits %= 2
    return bits.to(torch.uint8).view(dtype)


@pytest.fixture
def streamed(monkeypatch):
    """Even tiny results are written by streaming stores, and shared by threads."""
    monkeypatch.setattr(module, "STREAM_BYTES", 0)
    monkeypatch.setattr(module, "GRAIN_BYTES", 1)


# N, D, B: one row, a width under, at and over a block, an odd everything
@pytest.mark.parametrize(
    ("num_rows", "num_cols", "num_ids"),
    [(1, 1, 1), (10, 127, 4), (10, 128, 4), (10, 129, 4), (300, 100, 77)],
)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_equals_reference(num_rows, num_cols, num_ids, implementation, id_dtype, place):
    table = torch.randn(num_rows, num_cols, device=place)
    ids = torch.randint(num_rows, (num_ids,), device=place, dtype=id_dtype)
    assert same_bits(implementation(table, ids), gather_reference(table, ids))


@without_launch
def test_an_out_that_overlaps_the_input_is_rejected(implementation, place):
    wide = torch.randn(30, 8, device=place)
    table, ids = wide[:, :4], torch.arange(1, 10, device=place)
    for out in (table[:9], table[20:29], wide[20:29, 1:5], wide.view(-1, 4)[:9]):
        with pytest.raises(ValueError, match=r"shares memory with the table(?s:.*)hint: "):
            implementation(table, ids, out)
    numbers = torch.arange(18, device=place)
    whole = torch.arange(40, device=place).view(20, 2)
    with pytest.raises(ValueError, match="shares memory with the ids"):
        implementation(whole, numbers[4:13], numbers.view(9, 2))
    if implementation is gather_triton:
        # the interpreter copies a tensor's whole memory, so that views of one do not work
        return
    # other columns of the same rows are other memory
    expected = gather_reference(table, ids)
    assert same_bits(implementation(table, ids, wide[20:29, 4:]), expected)
    # and so is what follows
    assert same_bits(implementation(wide[:20], ids, wide[20:29]), gather_reference(wide[:20], ids))


@pytest.mark.parametrize("dtype", DTYPES.split())
def test_every_dtype_is_copied_bit_for_bit(dtype, implementation, place):
    for num_cols in (1, 3, 20, 33):
        table = random_bits(30, num_cols, getattr(torch, dtype), place)
        ids = torch.randint(30, (9,), device=place)
        assert same_bits(implementation(table, ids), gather_reference(table, ids))


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_streams_rows_of_any_width(threads):
    # around one, two and many lines of 64 B, and around pieces of a line
    sizes = [*range(1, 70), 96, 100, 127, 128, 129, 191, 192, 200, 255, 400, 1000, 1024, 2048, 4097]
    for row_bytes in sizes:
        table = torch.randint(256, (50, row_bytes), dtype=torch.uint8)
        ids = torch.randint(50, (71,))
        assert torch.equal(gather(table, ids, threads=threads), table[ids]), row_bytes


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("threads", [1, 3])
def test_writes_only_its_rows_from_any_start(threads):
    table = torch.randint(1, 256, (50, 4999), dtype=torch.uint8)
    for row_bytes, offset in [(64, 1), (65, 63), (400, 16), (400, 7), (64, 0), (4999, 33), (50, 9)]:
        narrow = table[:, 4999 - row_bytes :]
        ids = torch.randint(50, (11,))
        memory = torch.zeros(offset + 11 * row_bytes + 64, dtype=torch.uint8)
        out = memory[offset : offset + 11 * row_bytes].view(11, row_bytes)
        assert gather(narrow, ids, out, threads=threads) is out
        assert torch.equal(out, narrow[ids])
        assert not memory[:offset].any()
        assert not memory[offset + out.numel() :].any()


@pytest.mark.usefixtures("streamed")
def test_writes_only_its_columns_of_a_wider_out(implementation, place):
    table = torch.randint(1, 9, (20, 70), device=place)
    ids = torch.tensor([3, 3, 19, 0], device=table.device)
    wide = torch.zeros(6, 90, dtype=table.dtype, device=table.device)
    implementation(table, ids, wide[1:5, 10:80])
    assert torch.equal(wide[1:5, 10:80], table[ids])
    wide[1:5, 10:80] = 0
    assert not wide.any()


@pytest.mark.usefixtures("streamed")
def test_reads_rows_of_a_wider_table(implementation, place):
    wide = torch.randn(20, 128, device=place)
    ids = torch.tensor([3, 3, 19, 0], device=wide.device)
    for table in (wide[:, :50], wide[:, 77:], wide[::2][:10, 1:128], wide[:1].expand(20, 128)):
        some = ids % table.shape[0]
        assert same_bits(implementation(table, some), table[some])


def test_a_single_column_and_ids_may_have_any_stride(implementation, place):
    ids = torch.randint(20, (7, 3), device=place)[:, 1]
    for table in (torch.randn(1, 20, device=place).t(), torch.randn(20, 5, device=place)):
        for some in (ids, ids.contiguous()):
            assert same_bits(implementation(table, some), table[some])


@without_launch
def test_no_ids_give_an_empty_result(implementation, place):
    ids = torch.empty(0, dtype=torch.int64, device=place)
    assert implementation(torch.ones(3, 5, device=ids.device), ids).shape == (0, 5)
    assert implementation(torch.ones(0, 5, device=ids.device), ids).shape == (0, 5)
    some = torch.zeros(4, dtype=torch.int64, device=ids.device)
    assert implementation(torch.ones(3, 0, device=ids.device), some).shape == (4, 0)


def test_reads_a_read_only_file(tmp_path):
    rows = np.random.default_rng(0).random((128, 33), np.float32)
    rows.tofile(tmp_path / "rows")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        table = torch.from_numpy(np.memmap(tmp_path / "rows", np.float32, "r", shape=rows.shape))
    ids = torch.arange(127, -1, -1)
    assert torch.equal(gather(table, ids), torch.from_numpy(rows)[ids])


@pytest.mark.parametrize("outside", [-1, 30, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("threads", [1, 2])
def test_an_id_out_of_range_is_rejected(outside, id_dtype, threads, monkeypatch):
    for stream_bytes in (0, 1 << 30):
        monkeypatch.setattr(module, "STREAM_BYTES", stream_bytes)
        monkeypatch.setattr(module, "GRAIN_BYTES", 1)
        ids = torch.zeros(100, dtype=id_dtype)
        ids[77] = outside
        with pytest.raises(IndexError, match=rf"id {outside} is not in a table of 30 rows"):
            gather(torch.zeros(30, 40), ids, threads=threads)


def test_any_id_is_out_of_range_in_an_empty_table():
    with pytest.raises(IndexError, match="table of 0 rows"):
        gather(torch.zeros(0, 4), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(IndexError, match="id 3 is not"):
        gather(torch.zeros(3, 0), torch.tensor([0, 3]))


@without_launch
def test_arguments_that_do_not_match_are_rejected(implementation, place):
    table = torch.zeros(5, 6, device=place)
    ids = torch.zeros(3, dtype=torch.int64, device=table.device)
    for wrong in (table.t(), table[0], table[:, ::2]):
        with pytest.raises(ValueError, match="rows must be contiguous"):
            implementation(wrong, ids)
    for wrong in (ids.to(torch.int16), ids.bool(), ids[None], ids.float()):
        with pytest.raises(ValueError, match="ids must be"):
            implementation(table, wrong)
    like = {"device": table.device}
    for wrong in (
        torch.zeros(4, 6, **like),
        torch.zeros(3, 6, **like).double(),
        torch.zeros(6, 3, **like).t(),
        torch.zeros(1, 6, **like).expand(3, 6),
    ):
        with pytest.raises(ValueError, match="out must be"):
            implementation(table, ids, wrong)


def test_rows_beyond_two_gigabytes_are_read(implementation, place):
    # three rows a gigabyte apart in memory that is reserved, not used: row 2 starts at 2**31
    memory = torch.frombuffer(mmap.mmap(-1, 2**31 + 128), dtype=torch.int8).to(place)
    table = memory.as_strided((3, 100), (2**30, 1))
    table[2] = torch.arange(100, dtype=torch.int8)
    ids = torch.tensor([2], dtype=torch.int32, device=table.device)
    assert implementation(table, ids).tolist() == [list(range(100))]


@pytest.mark.gpu
def test_reads_a_page_locked_table(device):
    table = torch.from_numpy(np.random.default_rng(0).random((1000, 101), np.float32)).pin_memory()
    ids = torch.randint(1000, (333,), device=device)
    assert same_bits(gather(table, ids).cpu(), table[ids.cpu()])


@pytest.mark.gpu
def test_a_table_that_is_not_page_locked_is_rejected(device):
    with pytest.raises(ValueError, match=r"gcnzc\.pinned"):
        gather(torch.ones(3, 5), torch.tensor([0], device=device))


@pytest.mark.gpu
def test_a_table_on_another_device_is_rejected(device):
    with pytest.raises(ValueError, match="cannot choose rows"):
        gather(torch.ones(3, 5, device=device), torch.tensor([0]))
