"""Cached rows are read from their copies, bit for bit, and hits are counted."""

import pytest
import torch
from bits import same_bits

from gcnzc.kernels.gather import cached_rows, gather_reference
from gcnzc.kernels.gather.cached import (
    count_in_bitmap,
    gather_cached,
    gather_cached_reference,
    make_bitmap,
    padded_row_bytes,
)

DTYPES = "bool uint8 int8 int16 float16 bfloat16 int32 float32 int64 float64 complex64"
COLUMNS = [1, 3, 10, 100, 128, 301]
ROWS = 40


def table_of(dtype, columns, pad=0):
    """(ROWS, columns) of any bits; rows lie `pad` elements apart."""
    width = columns + pad
    if dtype == torch.bool:
        return torch.randint(2, (ROWS, width), dtype=torch.uint8).view(dtype)[:, :columns]
    memory = torch.randint(256, (ROWS, width * dtype.itemsize), dtype=torch.uint8)
    return memory.view(dtype)[:, :columns]


def readable(table, device):
    """The table where the device reads it: itself under the interpreter."""
    return table if device.type == "cpu" else table.pin_memory()


def split_rows(table, parts, device, own=0):
    """Copies in as many memories as there are parts, all on one device."""
    room, memories = padded_row_bytes(table), []
    for ids in parts:
        whole = torch.full((len(ids) * room + 128,), 85, dtype=torch.int8, device=device)
        memories.append(cached_rows.aligned_view(whole, len(ids), room))
        cached_rows.copy_rows(table, ids, memories[-1])
    places = [memory.data_ptr() for memory in memories]
    peers = cached_rows.Peers(torch.tensor(places, device=device), own, tuple(memories))
    return cached_rows.CachedRows(
        cached_rows.assign_slots(parts, len(table)).to(device), memories[own], peers
    )


@pytest.mark.triton(slow=True)
@pytest.mark.parametrize("dtype", DTYPES.split())
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_equals_the_plain_gather(share, dtype, device):
    for columns in COLUMNS:
        for pad in (0, 3):
            table = readable(table_of(getattr(torch, dtype), columns, pad), device)
            cached = torch.randperm(ROWS)[: round(share * ROWS)]
            copies = cached_rows.make_cached_rows(table, cached, device)
            for count in (0, 1, 57):
                ids = torch.randint(ROWS, (count,))
                found = gather_cached(table, ids.to(device), copies)
                assert same_bits(found, gather_reference(table, ids)), (columns, pad, count)


@pytest.mark.triton
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_hits_are_read_from_the_copies_and_misses_from_the_table(share, device):
    table = table_of(torch.float32, 25)
    cached = torch.randperm(ROWS)[: round(share * ROWS)]
    copies, kept = cached_rows.make_cached_rows(table, cached, device), table[cached].clone()
    table[cached] = 0
    table = readable(table, device)
    ids = torch.randint(ROWS, (80,))
    found = gather_cached(table, ids.int().to(device), copies)
    assert same_bits(found, gather_cached_reference(table, ids, cached, kept))
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"shares memory with the table(?s:.*)hint: "):
            gather_cached(table, ids[:5], copies, table[:5])


@pytest.mark.triton(slow=True)
@pytest.mark.parametrize("dtype", DTYPES.split())
@pytest.mark.parametrize("gpus", [2, 3])
def test_split_rows_equal_the_plain_gather(gpus, dtype, device):
    for columns, pad in ((1, 0), (25, 3), (100, 0), (301, 1)):
        table = readable(table_of(getattr(torch, dtype), columns, pad), device)
        # of very different sizes
        parts = torch.randperm(ROWS)[:20].split([17, *[1] * (gpus - 2), 5 - gpus])
        copies, ids = split_rows(table, parts, device), torch.randint(ROWS, (57,))
        kept = table[torch.cat(parts)].clone()
        table.view(torch.uint8)[torch.cat(parts)] = 0
        expected = gather_cached_reference(table, ids, torch.cat(parts), kept)
        for asked in (ids, ids.int(), ids[:0]):
            found = gather_cached(table, asked.to(device), copies)
            assert same_bits(found, expected[: len(asked)]), (columns, pad)


@pytest.mark.triton
@pytest.mark.parametrize("own", [0, 2])
@pytest.mark.parametrize("gpus", [4, 8])
def test_memories_may_be_empty(own, gpus, device):
    table = readable(table_of(torch.float32, 25), device)
    parts = [torch.tensor([7]), torch.tensor([39]), *[torch.arange(0)] * (gpus - 2)]
    copies = split_rows(table, parts, device, own)
    assert copies.num_rows == len(parts[own])
    assert copies.nbytes == 4 * ROWS + copies.memory.nbytes
    ids = torch.arange(ROWS)
    assert same_bits(gather_cached(table, ids.to(device), copies), gather_reference(table, ids))
    with pytest.raises(IndexError, match=f"id {ROWS} at 0"):
        gather_cached(table, torch.tensor([ROWS, 7], device=device), copies)


def test_slots_are_assigned_round_robin():
    parts = [torch.tensor([5, 3, 0]), torch.tensor([1]), torch.tensor([4, 6])]
    slots = cached_rows.assign_slots(parts, 8)
    assert slots.tolist() == [6, 1, -1, 3, 2, 0, 5, -1]
    for number, ids in enumerate(parts):
        assert (slots[ids] % 3 == number).all()
        assert (slots[ids] // 3).tolist() == list(range(len(ids)))
    assert cached_rows.assign_slots([], 3).tolist() == [-1, -1, -1]


@pytest.mark.triton
def test_writes_to_strided_rows(device):
    table = readable(table_of(torch.float16, 50), device)
    copies = cached_rows.make_cached_rows(table, torch.arange(0, ROWS, 2), device)
    ids = torch.randperm(ROWS)
    wide = torch.zeros(ROWS, 64, dtype=torch.float16, device=device)
    assert gather_cached(table, ids.to(device), copies, wide[:, :50]) is not None
    assert same_bits(wide[:, :50], gather_reference(table, ids))
    assert not wide[:, 50:].any()


@pytest.mark.triton
def test_an_id_out_of_range_is_rejected(device):
    table = readable(table_of(torch.float32, 5), device)
    copies = cached_rows.make_cached_rows(table, torch.arange(3), device)
    with pytest.raises(IndexError, match=f"id {ROWS} at 1"):
        gather_cached(table, torch.tensor([2, ROWS], device=device), copies)


@pytest.mark.parametrize("num_rows", [1, 7, 63, 64, 65, 1000])
def test_cached_rows_are_counted(num_rows):
    cached = torch.randperm(num_rows)[: num_rows // 2 + 1]
    bits = make_bitmap(cached, num_rows)
    assert bits.numel() == num_rows // 64 + 1
    for dtype in (torch.int32, torch.int64):
        assert count_in_bitmap(bits, num_rows, torch.arange(num_rows, dtype=dtype)) == len(cached)
        ids = torch.randint(num_rows, (333,), dtype=dtype)
        assert count_in_bitmap(bits, num_rows, ids) == torch.isin(ids, cached).sum()
        assert count_in_bitmap(bits, num_rows, ids[::2]) == torch.isin(ids[::2], cached).sum()
        assert count_in_bitmap(bits, num_rows, ids[:0]) == 0
        for outside in (-1, num_rows, 2**31 - 1, -(2**31)):
            ids[17] = outside
            assert count_in_bitmap(bits, num_rows, ids) == -1
