"""A pool's memory is reused exactly when its last reader is gone."""

import copy
import mmap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gcnzc.kernels.buffers import SMALL_BYTES, Pool

BIG = (1000, 100)  # 400 kB of float32


def test_allocates_the_requested_shape_and_dtype():
    pool = Pool()
    for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.float8_e4m3fn):
        for shape in (BIG, (3, 5), (0, 7), (123_457,), 200_001):
            tensor = pool.empty(shape, dtype)
            assert tensor.shape == torch.empty(shape).shape
            assert tensor.dtype == dtype
            assert tensor.is_contiguous()
            assert not tensor._is_view()
            if tensor.nbytes >= SMALL_BYTES:
                assert tensor.data_ptr() % 64 == 0


def test_a_kernel_without_huge_pages_has_memory(monkeypatch):
    # madvise(2) fails, as MADV_HUGEPAGE does in a kernel that is built without it
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 999)
    assert Pool().empty(1 << 20).fill_(1).sum() == 1 << 20


def test_freed_memory_is_reused():
    pool = Pool()
    first = pool.empty(BIG)
    address = first.data_ptr()
    other = pool.empty(BIG)
    assert other.data_ptr() != address
    assert pool.idle_bytes == 0
    del first
    assert pool.idle_bytes > 0
    # a little smaller or larger is served by the same block
    assert pool.empty((990, 100)).data_ptr() == address
    assert pool.empty((1005, 100)).data_ptr() == address


@pytest.mark.parametrize(
    "derive",
    [
        lambda t: t[3:5],
        lambda t: t.view(torch.int32),
        lambda t: t.detach(),
        lambda t: t.numpy(),
        lambda t: t.t()[1].numpy()[2:],
        lambda t: t.untyped_storage(),
        lambda t: torch.utils.dlpack.from_dlpack(t),
        lambda t: memoryview(t.numpy()),
        lambda t: iter(t.unbind()),
        lambda t: [copy.copy(t)],
    ],
)
def test_any_reference_keeps_the_memory(derive):
    pool = Pool()
    tensor = pool.empty(BIG)
    reader = derive(tensor)
    del tensor
    assert pool.idle_bytes == 0
    del reader
    assert pool.idle_bytes > 0


def test_autograd_keeps_the_memory():
    pool = Pool()
    weight = torch.ones(100, 1, requires_grad=True)
    x = pool.empty(BIG).fill_(2)
    loss = (x @ weight).sum()
    del x
    assert pool.idle_bytes == 0  # the product's backward needs x
    torch.full(BIG, 7.0)
    loss.backward()
    assert (weight.grad == 2000).all()
    del loss
    assert pool.idle_bytes > 0


def test_idle_memory_is_bounded():
    pool = Pool()
    kept = [pool.empty(BIG) for _ in range(50)]
    small = [pool.empty((200, 100)) for _ in range(50)]
    del kept, small
    assert 0 < pool.idle_bytes <= 4 * 400_000
    assert Pool().idle_bytes == 0


def test_a_block_that_is_too_large_is_not_reused():
    pool = Pool()
    large = pool.empty((10_000, 100))
    address = large.data_ptr()
    del large
    assert pool.empty(BIG).data_ptr() != address


def test_threads_share_a_pool():
    pool = Pool()

    def work(me):
        held = []
        for turn in range(300):
            held.append(pool.empty((100 + turn % 7, 300)).fill_(me))
            if len(held) > 3:
                gone = held.pop(0)
                assert (gone == me).all()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert 0 < pool.idle_bytes <= 4 * 106 * 300 * 4


def test_memory_can_be_freed_while_the_pool_is_locked():
    # what a garbage collection inside the pool does: the last reader dies under the lock
    pool = Pool()
    tensor = pool.empty(BIG)
    with pool._lock:
        del tensor
        assert not pool._idle
    assert pool.idle_bytes > 0


def test_reused_memory_has_the_events_of_its_last_use():
    pool = Pool(small_bytes=0)
    events = iter([["first"], ["second"], []])

    def allocate():
        return pool.allocate(10, torch.uint8, lambda: next(events))

    tensor, before = allocate()
    address = tensor.data_ptr()
    assert list(before) == []
    kept = tensor[3:4]
    del tensor
    assert pool.idle_bytes == 0  # it is still read
    del kept
    for expected in (["first"], ["second"], []):
        tensor, before = allocate() if expected != [] else pool.allocate(10, torch.uint8)
        assert tensor.data_ptr() == address
        assert list(before) == expected
        del tensor
