"""Feature tables: their sizes, their gathers, and page-locking of their memory."""

import contextlib
import os
import platform
import warnings

import numpy as np
import pytest
import torch
from fake_driver import FakeDriver, FakeGpu

from gcnzc.features import pinning as module
from gcnzc.features import registrations
from gcnzc.features.pinning import can_read_host, pinned
from gcnzc.features.table import FeatureTable
from gcnzc.kernels.gather import gather_reference
from gcnzc.system import page_lock
from gcnzc.system.cuda_driver import Driver
from gcnzc.system.host_memory import PAGE_BYTES as PAGE
from gcnzc.system.page_lock import PageLocks


@pytest.fixture
def cuda(monkeypatch):
    """A machine that has CUDA, for as much of it as `pinned` and copies ask about."""

    def has(driver, segment_pages=16):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        ledger = None if driver is None else PageLocks(driver, segment_pages * PAGE, PAGE)
        monkeypatch.setattr(registrations, "process_page_locks", lambda: ledger)
        if driver is not None:
            copies.enter_context(FakeGpu(driver))
        return driver

    with contextlib.ExitStack() as copies:
        yield has


@pytest.fixture
def stored(tmp_path):
    """Rows of a file that is mapped read-only, as those of a prepared folder are."""
    path = tmp_path / "features.npy"
    np.save(path, np.random.default_rng(0).standard_normal((5000, 33), np.float32))
    return path


def mapped(path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.load(path, mmap_mode="r"))


def span_of(rows):
    """First byte and number of bytes, gaps between rows counted."""
    last = rows[-1:, -1:]
    return rows.data_ptr(), last.data_ptr() + rows.element_size() - rows.data_ptr()


def sparse(rows):
    return rows.to_sparse_csr()


pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]


def test_sizes_of_a_dense_table():
    table = FeatureTable(torch.zeros(7, 5, dtype=torch.float16)[:, :3])
    assert len(table) == table.num_rows == 7
    assert table.num_columns == 3
    assert table.row_bytes == 6
    assert table.nbytes == 42
    assert table.dtype == torch.float16
    assert table.device == torch.device("cpu")
    assert not table.is_sparse
    assert "7 x 3 torch.float16 on cpu" in repr(table)


@pytest.mark.parametrize("per", [None, 16])
def test_sizes_of_codes(per):
    table = FeatureTable.quantized(torch.randn(7, 33), scale_columns=per)
    assert (table.dtype, table.stored_dtype) == (torch.float32, torch.int8)
    assert (table.row_bytes, table.nbytes, len(table)) == (33, 231, 7)
    told = "row" if per is None else "16 columns"
    assert f"7 x 33 torch.int8, a scale for each {told}, on cpu, 231 bytes" in repr(table)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("per", [None, 5])
def test_quantized_rows_are_dequantized_by_gathers(dtype, per, device):
    rows = torch.randn(20, 12).double()
    table = FeatureTable.quantized(rows, dtype, scale_columns=per)
    ids = torch.tensor([3, 19, 3])
    expected = gather_reference(table.rows, ids, table.scales, per)
    assert torch.equal(table.gather(ids), expected)
    torch.testing.assert_close(expected, rows[ids].float(), rtol=0.13, atol=0.03)
    with pinned(table) as locked, pinned(table) as again:
        for one in (locked, again, table.to(device)):
            assert torch.equal(one.gather(ids.to(device)).cpu(), expected)
    half = torch.empty(3, 12, dtype=torch.float16)
    assert table.gather(ids, half) is half
    assert torch.equal(half, expected.half())


def test_scales_are_copied_to_a_device_once():
    table = FeatureTable.quantized(torch.randn(20, 12))
    meta = torch.device("meta")
    assert table.scales_on(torch.device("cpu")) is table.scales
    assert table.scales_on(meta).device == meta
    assert table.scales_on(meta) is table.scales_on(meta)
    assert FeatureTable(torch.ones(2, 2)).scales_on(meta) is None
    moved = table.to("meta")
    assert (moved.rows.device, moved.scales.device) == (meta, meta)
    assert table.to("cpu") is table


def test_invalid_codes_and_scales_are_rejected():
    codes = torch.ones(4, 6, dtype=torch.int8)
    for rows, scales, per in (
        (codes, None, 2),
        (codes, torch.ones(6), None),
        (codes, torch.ones(4).double(), None),
        (codes, torch.ones(8)[::2], None),
        (codes.float(), torch.ones(4), None),
    ):
        with pytest.raises(ValueError, match="cannot be scaled by"):
            FeatureTable(rows, scales, per)
    for rows, dtype in (
        (codes, torch.int8),
        (codes.float(), torch.float16),
        (torch.ones(3, 0), torch.int8),
        (torch.ones(3, 4, device="meta"), torch.int8),
    ):
        with pytest.raises(ValueError, match=r"cannot be quantized to (.|\n)*\n\nhint: "):
            FeatureTable.quantized(rows, dtype)
    for per in (0, 1.5):
        with pytest.raises((TypeError, ValueError), match=rf"scale_columns is {per}\b"):
            FeatureTable.quantized(codes.float(), scale_columns=per)
    with pytest.raises(ValueError, match=r"scales .* NaN or infinite"):
        FeatureTable(codes, torch.full((4,), torch.nan))
    with pytest.raises(ValueError, match=r"not finite as float32 (.|\n)*\n\nhint: "):
        FeatureTable.quantized(torch.full((3, 4), 1e39, dtype=torch.float64))


@pytest.mark.parametrize(("make", "num_bytes"), [(lambda rows: rows, 1800), (sparse, 5808)])
def test_gathers_return_the_rows(make, num_bytes):
    rows = torch.randn(50, 9)
    table = FeatureTable(make(rows))
    assert f"{num_bytes} bytes" in repr(table)
    ids = torch.tensor([3, 3, 49, 0])
    out = torch.empty(4, 9)
    assert torch.equal(table.gather(ids), rows[ids])
    assert table.gather(ids, out, threads=1) is out
    assert torch.equal(out, rows[ids])
    with pytest.raises(IndexError, match="id 50 is not in a table of 50 rows"):
        table.gather(torch.tensor([50]))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (None, r"rows is None(?=.*hint: use data\.table)"),
        (torch.zeros(5, 2, requires_grad=True), "requires a gradient"),
        # the bytes in memory are those of other values
        (torch._neg_view(torch.ones(5, 2)), "negated or conjugated"),
        (torch.ones(5, 2, dtype=torch.complex64).conj(), "negated or conjugated"),
        (torch.zeros(5, 4).t(), "contiguous rows"),
        (torch.zeros(5, 4).to_sparse(), "dense with contiguous rows, or CSR"),
    ],
)
def test_tensors_that_are_no_table_are_rejected(rows, words):
    with pytest.raises(ValueError, match=rf"(?s){words}.*\n\nhint: "):
        FeatureTable(rows)


@pytest.mark.parametrize(
    "view",
    [
        lambda rows: rows,
        lambda rows: rows[20:60, 100:300],
        lambda rows: rows[:, 3:4],
        lambda rows: rows[7:8],
        lambda rows: rows[5:6].expand(30, 1000),
        lambda rows: rows[::3],
        lambda rows: rows.t()[:, :1],
    ],
)
def test_pinned_locks_a_view_from_its_first_to_its_last_byte(cuda, view):
    driver = cuda(FakeDriver())
    rows = view(torch.zeros(100, 1000))
    with pinned(rows) as table:
        assert table.rows is rows
        address, num_bytes = span_of(rows)
        assert driver.is_covered(address, num_bytes)
        assert min(driver.ranges) == address // 16 * 16
        assert max(driver.ranges.values()) == -(-(address + num_bytes) // 16) * 16
    assert driver.ranges == {}


@pytest.mark.parametrize("whole_pages", [False, True])
@pytest.mark.parametrize("segment_pages", [1, 16, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_locked_table_is_copied_to_a_gpu(cuda, whole_pages, segment_pages, dtype):
    cuda(FakeDriver(whole_pages=whole_pages), segment_pages)
    rows = torch.randint(-99, 99, (3000, 33)).to(dtype)
    halves = FeatureTable(rows[:1501]), FeatureTable(rows[1501:])
    with pinned(halves[1]) as second, pinned(halves[0]) as first:
        # each table, a part of one, and what holds both
        for table in (first, second, FeatureTable(first.rows[700:900]), FeatureTable(rows)):
            there = table.to("cuda")
            assert torch.equal(there.rows, table.rows)
            assert there.rows.data_ptr() != table.rows.data_ptr()
        with pinned(rows) as both:
            assert torch.equal(both.to("cuda").rows, rows)
    assert torch.equal(FeatureTable(rows).to("cuda").rows, rows)


class Staged(torch.overrides.TorchFunctionMode):
    """Records how many bytes of rows that lie apart torch copies at a time."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        source = {torch.Tensor.to: args[:1], torch.Tensor.copy_: args[1:2]}.get(function, ())
        self.sizes += [each.nbytes for each in source if not each.is_contiguous()]
        return function(*args, **(kwargs or {}))


def test_padded_rows_are_not_copied_whole_on_the_host(cuda, monkeypatch):
    cuda(FakeDriver())
    monkeypatch.setattr(registrations, "COPY_BYTES", 4096)
    rows = torch.arange(40_000.0).view(400, 100)[:, :60]
    with Staged() as staged:
        there = FeatureTable(rows).to("cuda").rows
    assert torch.equal(there, rows)
    assert sum(staged.sizes) == rows.nbytes
    assert max(staged.sizes) <= 4096


def test_pinned_unlocks_after_an_error(cuda):
    driver = cuda(FakeDriver())
    with pytest.raises(KeyError), pinned(torch.zeros(3, 2)):
        raise KeyError
    assert driver.named("lock") != []
    assert driver.ranges == {}


@pytest.mark.parametrize(
    "refused", [(719, False), (800, False), (801, False), (2, True), (719, True)]
)
def test_a_refused_page_lock_is_reported_and_nothing_copied(cuda, stored, refused, caplog):
    # a copy of writable memory would not see what is written to the rows; the first call is the
    # page that shows whether the GPU reads host memory
    code, is_mapped = refused
    answers = {"read_only_code": code} if is_mapped else {"codes": {1: code}}
    driver = cuda(FakeDriver(**answers))
    rows = mapped(stored) if is_mapped else torch.zeros(3, 2)
    message = rf"(?s)failed to lock .*\({code}\).*hint: "
    with pytest.raises(RuntimeError, match=message), pinned(rows):
        pytest.fail("nothing is locked here")
    assert caplog.messages == []
    assert driver.ranges == {}


def test_pinned_does_not_lock_empty_tables_or_tables_on_a_gpu(cuda):
    driver = cuda(FakeDriver())
    for rows in (torch.zeros(0, 4), torch.zeros(4, 0), torch.zeros(4, 4, device="meta")):
        with pinned(rows) as table:
            assert table.rows is rows
    assert driver.calls == []


def test_pinned_rejects_a_sparse_table_for_a_gpu(cuda):
    cuda(FakeDriver())
    with pytest.raises(ValueError, match=r"(?s)sparse table of 3 rows.*hint: "):
        pinned(sparse(torch.eye(3))).__enter__()


def test_a_read_only_map_is_locked_in_place_where_the_driver_can(cuda, stored, caplog):
    driver = cuda(FakeDriver())
    rows = mapped(stored)
    with pinned(rows) as table:
        assert table.rows is rows
        assert driver.is_covered(*span_of(rows))
        # but for the page that was tried
        assert {call[3] for call in driver.named("lock")[1:]} == {True}
    assert driver.ranges == {}
    assert caplog.messages == []


def shared_memory():
    """The named shared memory of this machine, except the semaphores of other tests' processes."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


@pytest.mark.parametrize("code", [1, 304, 800, 801])
@pytest.mark.parametrize(
    "view", [lambda rows: rows, lambda rows: rows[3:4000, 5:21], lambda rows: rows[::2, :1]]
)
def test_a_read_only_map_is_copied_where_the_driver_cannot(
    cuda, stored, caplog, monkeypatch, code, view
):
    driver = cuda(FakeDriver(read_only_code=code))
    monkeypatch.setattr(module, "COPY_BYTES", 4096)
    rows, named = view(mapped(stored)), shared_memory()
    with pinned(rows) as table:
        assert table.rows.data_ptr() != rows.data_ptr()
        assert torch.equal(table.rows, rows)
        assert table.rows.stride() == rows.stride()
        assert driver.is_covered(*span_of(table.rows))
        assert driver.locked_range(rows.data_ptr()) is None
        # nothing that a crash could leave behind
        assert shared_memory() <= named
        ids = torch.tensor([0, len(rows) - 1])
        assert torch.equal(table.gather(ids), rows[ids])
    assert driver.ranges == {}
    size = span_of(rows)[1]
    assert caplog.messages == [
        f"{stored} is mapped read-only, which the driver cannot lock: copying {size:,} bytes "
        "into shared memory"
    ]
    # the caller still has a table
    assert torch.equal(table.rows, rows)


def test_too_little_memory_for_a_copy_is_reported(cuda, stored, monkeypatch, caplog):
    driver = cuda(FakeDriver(read_only_code=801))
    rows = mapped(stored)
    left = [1 << 40, 1 << 40, 1000]
    monkeypatch.setattr(page_lock, "available_bytes", lambda: left.pop(0))
    with pytest.raises(RuntimeError, match=r"1,000 are available\n\nhint: "), pinned(rows):
        pytest.fail("nothing is locked here")
    # the page that was tried, the map, and the copy before it was made
    assert left == []
    assert driver.ranges == {}
    assert len(module._copies) == 0
    assert caplog.messages == []


@pytest.mark.parametrize(
    "driver",
    [
        None,
        FakeDriver(maps=False),
        FakeDriver(offset=1 << 40),
        FakeDriver(codes={0: 801}),
        FakeDriver(codes={0: 304}),
    ],
)
def test_without_gpus_that_read_host_memory_nothing_is_locked(cuda, driver, caplog):
    cuda(driver)
    rows = torch.randn(30, 8)
    assert not can_read_host("cuda")
    with pinned(rows) as table:
        assert table.rows is rows
        assert driver is None or driver.ranges == {}
        ids = torch.tensor([4, 29])
        assert torch.equal(table.gather(ids), rows[ids])
    assert caplog.messages == [
        "this driver does not let the GPU read 960 bytes of host memory: the CPU gathers the rows, "
        "and they are copied"
    ]


def test_a_driver_that_locks_a_page_but_not_the_table_is_reported(cuda, caplog, monkeypatch):
    driver = cuda(FakeDriver(largest=PAGE))
    small, large = torch.randn(3, 8), torch.randn(3000, 8)
    # the ledger of `cuda` would go on down to single pages
    monkeypatch.setattr(registrations.process_page_locks(), "_min_bytes", 4 * PAGE)
    with pytest.raises(RuntimeError, match="failed to lock"), pinned(large):
        pytest.fail("nothing is locked here")
    monkeypatch.setattr(platform, "release", lambda: "5.15.90.1-microsoft-standard-WSL2")
    with pinned(small) as kept, pinned(large) as table:
        assert table.rows is large
        assert not can_read_host("cuda")
        # what was locked stays so
        assert driver.is_covered(*span_of(kept.rows))
        assert driver.locked_range(large[1000:].data_ptr()) is None
    assert driver.ranges == {}
    assert [message.split(":")[0] for message in caplog.messages] == [
        "this driver does not let the GPU read 96,000 bytes of host memory"
    ]


def test_can_read_host_checks_the_gpu(cuda):
    if not torch.cuda.is_available():
        assert not can_read_host("cuda")
    driver = cuda(FakeDriver())
    assert not can_read_host("cpu")
    assert driver.calls == []
    assert can_read_host("cuda")
    assert can_read_host(torch.device("cuda", 3))
    asked = [call[1] for call in driver.named("can_map_host_memory")]
    assert asked == [0, 3]


def test_without_a_driver_there_is_no_ledger(monkeypatch):
    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(registrations, "Driver", missing)
    registrations._open_page_locks.cache_clear()
    try:
        assert registrations.process_page_locks() is None
    finally:
        registrations._open_page_locks.cache_clear()


@pytest.mark.gpu
def test_pinned_can_be_repeated_many_times(device):
    rows = torch.randn(100_000, 101)
    ids = torch.randint(100_000, (5000,), device=device)
    for _ in range(3):
        with pinned(rows) as table, pinned(rows):
            assert rows.is_pinned()
            assert torch.equal(table.gather(ids).cpu(), rows[ids.cpu()])
        assert not rows.is_pinned()
        with contextlib.suppress(KeyError), pinned(rows):
            raise KeyError
        assert not rows.is_pinned()


@pytest.mark.gpu
def test_rows_across_registration_boundaries_are_gathered(device, monkeypatch):
    # rows of 404 bytes, segments of 64 KiB: every 162nd row crosses a border
    rows = torch.randn(100_000, 101)
    ledger = PageLocks(Driver(), max_bytes=1 << 16)
    monkeypatch.setattr(registrations, "process_page_locks", lambda: ledger)
    with pinned(rows) as table:
        assert len(ledger._registrations) > 600
        ids = torch.arange(100_000, device=device)
        assert torch.equal(table.gather(ids).cpu(), rows)
    assert not rows.is_pinned()
    assert ledger._registrations == []


@pytest.mark.gpu
def test_a_gpu_gathers_from_a_prepared_table(device, stored, caplog):
    rows = mapped(stored)
    ids = torch.randint(len(rows), (3000,), device=device)
    for _ in range(2):
        with pinned(rows) as table:
            assert table.rows.is_pinned()
            assert torch.equal(table.gather(ids).cpu(), rows[ids.cpu()])
        assert not rows.is_pinned()
        # locked in place without a word, or copied with one
        assert (table.rows is rows) == (caplog.messages == [])


@pytest.mark.gpu
def test_a_gpu_gathers_from_shared_memory(device):
    rows = torch.randn(3000, 101).share_memory_()
    with pinned(rows) as table:
        assert table.rows is rows
        ids = torch.tensor([2999, 0], device=device)
        assert torch.equal(table.gather(ids).cpu(), rows[[2999, 0]])
    assert not rows.is_pinned()


def test_arrays_without_rows_are_tables():
    # NumPy's strides of an empty array are 0
    rows = torch.from_numpy(np.zeros((0, 2), np.float32))
    assert rows.stride() == (0, 0)
    found = FeatureTable(rows).gather(torch.empty(0, dtype=torch.int64))
    assert found.shape == (0, 2)
