"""Exactly the memory in use is locked, also after refusals, interrupts and forks."""

import contextlib
import math
import mmap
import os
import random
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fake_driver import LOST, FakeDriver
from slow_cases import seeds

from gcnzc.system import cuda_driver as cuda
from gcnzc.system import page_lock
from gcnzc.system.host_memory import PAGE_BYTES as PAGE
from gcnzc.system.page_lock import LockRefused, PageLocks

# above all addresses that a process has, so that nothing is mapped there
BASE = 1 << 50


def ledger_of(driver, segment_pages=16, smallest_pages=2):
    return PageLocks(driver, segment_pages * PAGE, smallest_pages * PAGE)


def merged(ranges):
    """The ranges, those that meet as one."""
    found = []
    for begin, end in sorted(ranges.items()):
        if found and found[-1][1] == begin:
            begin, _ = found.pop()
        found.append((begin, end))
    return found


def notes(error):
    return getattr(error, "__notes__", [])


def refusal(ledger, words, num_bytes, address=BASE, error=LockRefused):
    """The error of a range that is not locked."""
    with pytest.raises(error, match=words) as raised, ledger.locked(address, num_bytes):
        pytest.fail("nothing is locked here")
    return raised.value


@pytest.mark.parametrize("offset", [0, 1, 64, PAGE - 1])
@pytest.mark.parametrize("num_bytes", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 100 * PAGE - 3])
def test_a_range_is_one_registration_up_to_the_largest_size(offset, num_bytes):
    driver = FakeDriver()
    begin, end = BASE + offset, BASE + offset + num_bytes
    with ledger_of(driver).locked(begin, num_bytes):
        # whole vectors of 16 B, and none of the rest of its pages
        assert min(driver.ranges) == begin // 16 * 16
        assert max(driver.ranges.values()) == -(-end // 16) * 16
        assert driver.is_covered(begin, num_bytes)
        assert max(b - a for a, b in driver.ranges.items()) <= 16 * PAGE
        assert len(driver.ranges) == -(-(end - BASE) // (16 * PAGE))
        if len(driver.ranges) == 1:
            driver.check_copyable(begin, num_bytes)
    assert driver.ranges == {}


@pytest.mark.parametrize("limit", [None, 9 * PAGE])
def test_registrations_are_not_retried_below_the_smallest_size(monkeypatch, limit):
    # a limit that is large enough is none
    monkeypatch.setattr(page_lock, "lock_limit_bytes", lambda: limit)
    driver = FakeDriver(largest=PAGE)
    words = rf"lock {2 * PAGE:,} of {9 * PAGE:,} bytes .*NUMBER \(2\)\n\nhint: move the features"
    assert not refusal(ledger_of(driver), words, 9 * PAGE).is_unsuitable
    assert [call[2] // PAGE for call in driver.named("lock")] == [9, 4, 2]
    assert driver.ranges == {}


def test_a_refusal_reports_a_limit_that_is_too_low(monkeypatch):
    monkeypatch.setattr(page_lock, "lock_limit_bytes", lambda: 9 * PAGE - 1)
    words = rf"(?s)hint: `ulimit -l` is {9 * PAGE - 1:,} bytes for this user: .*memlock=-1"
    refusal(ledger_of(FakeDriver(largest=PAGE)), words, 9 * PAGE)


@pytest.mark.parametrize("nth", range(3))
def test_ctrl_c_as_the_driver_returns(nth):
    class Interrupted(FakeDriver):
        def lock(self, *args):
            code = super().lock(*args)
            if len(self.named("lock")) == nth + 1:
                raise KeyboardInterrupt
            return code

    driver = Interrupted()
    refusal(ledger_of(driver), "^$", 40 * PAGE, error=KeyboardInterrupt)
    assert driver.ranges == {}


def test_the_gpu_is_synchronized_before_pages_are_unlocked():
    driver = FakeDriver()
    with ledger_of(driver).locked(BASE, 40 * PAGE):
        pass
    kinds = [call[0] for call in driver.calls]
    assert kinds == ["lock"] * 3 + ["synchronize"] + ["unlock"] * 3


# in pages from BASE
@pytest.mark.parametrize(
    ("begin", "end"), [(0, 40), (0, 3), (5, 9), (37, 40), (-3, 2), (39, 45), (5, 9.25), (0.1, 40)]
)
@pytest.mark.parametrize("tells", [True, False])
def test_memory_locked_by_others_is_not_unlocked(begin, end, tells):
    driver = FakeDriver(tells=tells)
    driver.foreign[BASE + int(begin * PAGE)] = BASE + int(end * PAGE)
    # what they locked without regard to pages is the table itself
    address = BASE + int(begin * PAGE) if 0 < begin < 1 else BASE
    with ledger_of(driver).locked(address, BASE + 40 * PAGE - address):
        last = BASE + math.ceil(end * PAGE if tells else math.ceil(end) * PAGE)
        theirs = range(BASE + math.floor(begin * PAGE), last)
        expected = [(address, theirs.start), (theirs.stop, BASE + 40 * PAGE)]
        expected = [(a // 16 * 16, b) for a, b in expected if a < b]
        assert merged(driver.ranges) == expected
    assert driver.ranges == {}
    assert len(driver.foreign) == 1


def test_memory_locked_by_others_is_not_searched_page_by_page():
    driver = FakeDriver()
    driver.foreign[BASE] = BASE + 100_000 * PAGE
    with ledger_of(driver).locked(BASE, 100_000 * PAGE):
        assert driver.asked < 10


@pytest.mark.parametrize(("offset", "where"), [(1 << 40, "the address 0x"), (None, "no address")])
def test_gpus_with_other_addresses_are_rejected(offset, where):
    driver = FakeDriver(offset=offset)
    words = rf"(?s) has {where}.* on GPUs.*hint: "
    assert refusal(ledger_of(driver), words, 5 * PAGE).is_unsuitable
    assert driver.ranges == {}


def test_every_segment_must_have_the_address_of_the_host():
    class Elsewhere(FakeDriver):
        def device_address(self, address):
            return address + (PAGE if address >= BASE + 16 * PAGE else 0)

    driver = Elsewhere()
    refusal(ledger_of(driver), "on GPUs", 20 * PAGE)
    assert driver.ranges == {}


def test_a_refused_unlock_is_reported_after_the_others():
    driver = FakeDriver()
    # in the order of unlocking, the one in the middle
    driver.unlock_codes[BASE + 16 * PAGE] = LOST
    words = rf"(?s)failed to unlock {16 * PAGE:,} bytes .*\(719\)\n\nhint: .*nvidia-smi"
    with pytest.raises(RuntimeError, match=words), ledger_of(driver).locked(BASE, 40 * PAGE):
        pass
    assert list(driver.ranges) == [BASE + 16 * PAGE]


def test_a_lost_gpu_does_not_hide_the_error_of_the_body(caplog):
    driver = FakeDriver()
    driver.lost = RuntimeError("CUDA error: unspecified launch failure")
    driver.unlock_codes = {BASE: LOST, BASE + 16 * PAGE: LOST}
    with (
        pytest.raises(KeyError, match="the row") as raised,
        ledger_of(driver).locked(BASE, 40 * PAGE),
    ):
        raise KeyError("the row")
    said = notes(raised.value) if sys.version_info >= (3, 11) else caplog.messages
    assert len(said) == 3
    assert "unspecified launch failure" in said[0]
    assert all("failed to unlock" in line and "(719)" in line for line in said[1:])
    assert list(driver.ranges) == [BASE, BASE + 16 * PAGE]


def test_waiting_that_fails_is_reported_after_unlocking():
    driver = FakeDriver()
    driver.lost = RuntimeError("gone")
    with (
        pytest.raises(RuntimeError, match=r"(?s)failed to synchronize: gone.*hint: "),
        ledger_of(driver).locked(BASE, 40 * PAGE),
    ):
        pass
    assert driver.ranges == {}


def test_memory_that_could_not_be_unlocked_is_unlocked_before_the_next_lock():
    # other memory may lie there by then, and a GPU would go on to read the old pages
    driver = FakeDriver()
    ledger = ledger_of(driver)
    driver.unlock_codes[BASE] = LOST
    with pytest.raises(RuntimeError, match="failed to unlock"), ledger.locked(BASE, 4 * PAGE):
        pass
    refusal(ledger, r"(?s)for an earlier use\n\nhint: restart", 2 * PAGE, BASE + PAGE)
    driver.unlock_codes.clear()
    driver.calls.clear()
    with ledger.locked(BASE + PAGE, 2 * PAGE):
        assert [call[0] for call in driver.calls] == ["unlock", "lock"]
        assert driver.ranges == {BASE + PAGE: BASE + 3 * PAGE}
    assert driver.ranges == {}


def test_memory_that_does_not_fit_is_not_locked(monkeypatch):
    num_bytes = 64 * PAGE
    memory = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    memory[: 10 * PAGE] = 1
    address = memory.ctypes.data
    driver = FakeDriver()
    # ten pages are there already
    monkeypatch.setattr(page_lock, "available_bytes", lambda: 54 * PAGE)
    with ledger_of(driver).locked(address, num_bytes):
        assert driver.is_covered(address, num_bytes)
    driver.calls.clear()
    monkeypatch.setattr(page_lock, "available_bytes", lambda: 54 * PAGE - 1)
    words = rf"{num_bytes:,} bytes needs {54 * PAGE:,} .* {54 * PAGE - 1:,} are available\n\nhint: "
    refusal(ledger_of(driver), words, num_bytes, address, RuntimeError)
    assert driver.calls == []


@pytest.mark.parametrize("num_threads", [2, 8])
def test_threads_can_lock_and_unlock_at_once(num_threads):
    driver = FakeDriver(largest=6 * PAGE, pause_s=1e-4)
    ledger = ledger_of(driver)

    def work(number):
        generator = random.Random(number)
        for _ in range(20):
            address = BASE + generator.randrange(30 * PAGE)
            num_bytes = generator.randrange(1, 20 * PAGE)
            with ledger.locked(address, num_bytes), ledger._mutex:
                assert driver.is_covered(address, num_bytes)

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(work, range(num_threads)))
    assert driver.ranges == {}


def in_a_child(work):
    """Whether `work` held in a forked child, which ends at once."""
    with warnings.catch_warnings():
        # torch's threads are idle, and the child asks nothing of them
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("error", [None, KeyError])
def test_a_forked_child_unlocks_nothing_of_its_parent(error):
    driver = FakeDriver()
    ledger = ledger_of(driver)
    lock = ledger.locked(BASE, 40 * PAGE)
    lock.__enter__()
    calls = list(driver.calls)

    def leave():
        with contextlib.suppress(KeyError):
            lock.__exit__(error, None if error is None else error(), None)
        return driver.calls == calls

    # as if another thread were locking at the moment of the fork
    with ledger._mutex:
        assert in_a_child(leave)
    lock.__exit__(None, None, None)
    assert driver.ranges == {}


def test_a_forked_child_has_a_ledger_of_its_own():
    driver = FakeDriver()
    ledger = ledger_of(driver)
    with ledger.locked(BASE, 4 * PAGE):

        def lock():
            # locks are not inherited
            driver.ranges.clear()
            driver.calls.clear()
            with ledger.locked(BASE, 4 * PAGE):
                covered = driver.is_covered(BASE, 4 * PAGE)
            return covered and len(driver.named("unlock")) == 1 and not driver.ranges

        with ledger._mutex:
            assert in_a_child(lock)
        assert driver.is_covered(BASE, 4 * PAGE)
    assert driver.ranges == {}


@pytest.mark.parametrize("seed", seeds(60, 10))
def test_any_order_of_any_ranges_with_any_failures(seed):
    generator = random.Random(seed)
    codes = [cuda.INVALID_VALUE, cuda.OUT_OF_MEMORY, cuda.NOT_SUPPORTED, LOST]
    driver = FakeDriver(
        largest=generator.choice([None, 3 * PAGE, 7 * PAGE]),
        codes={generator.randrange(60): generator.choice(codes) for _ in range(4)},
        tells=generator.random() < 0.5,
        whole_pages=generator.random() < 0.3,
    )
    if generator.random() < 0.5:
        begin = BASE + generator.randrange(40) * PAGE
        driver.foreign[begin] = begin + generator.randrange(1, 9) * PAGE
    ledger = ledger_of(driver, segment_pages=generator.choice([4, 16]), smallest_pages=1)
    held = []
    for _ in range(30):
        if held and generator.random() < 0.4:
            lock, *_ = held.pop(generator.randrange(len(held)))
            lock.__exit__(None, None, None)
        else:
            address = BASE + generator.randrange(40 * PAGE)
            num_bytes = generator.randrange(12 * PAGE)
            lock, before = ledger.locked(address, num_bytes), dict(driver.ranges)
            with contextlib.suppress(LockRefused):
                lock.__enter__()
                held.append((lock, address, num_bytes))
            for begin, end in driver.ranges.items() - before.items():
                assert address - 16 < begin < end < address + num_bytes + 16
        # what is held is locked and can be copied, and nothing is locked if nothing is held
        for _, address, num_bytes in held:
            assert driver.is_covered(address, num_bytes)
            if driver.tells and num_bytes:
                for begin, end in ledger.copy_ranges(address, num_bytes):
                    driver.check_copyable(begin, end - begin)
        if not held:
            assert driver.ranges == {}
    for lock, *_ in held:
        lock.__exit__(None, None, None)
    assert driver.ranges == {}


def test_a_gpu_can_read_host_memory_if_its_attribute_and_a_test_page_agree():
    driver = FakeDriver()
    ledger = ledger_of(driver)
    assert ledger.is_readable_by(1)
    assert driver.ranges == {}
    assert len(driver.named("lock")) == 1
    # once for each GPU
    assert ledger.is_readable_by(1)
    assert driver.named("can_map_host_memory") == [("can_map_host_memory", 1)]

    says_no = FakeDriver(maps=False)
    assert not ledger_of(says_no).is_readable_by(0)
    assert says_no.named("lock") == []


@pytest.mark.parametrize(
    "driver",
    [
        FakeDriver(offset=PAGE),
        FakeDriver(offset=None),
        FakeDriver(codes={0: cuda.NOT_SUPPORTED}),
        FakeDriver(codes={0: cuda.NOT_PERMITTED}),
        FakeDriver(codes={0: cuda.INVALID_VALUE}),
    ],
)
def test_a_gpu_that_fails_the_test_page_cannot_read_host_memory(driver):
    assert not ledger_of(driver).is_readable_by(0)
    assert driver.ranges == {}


@pytest.mark.parametrize("code", [cuda.OUT_OF_MEMORY, LOST])
def test_a_failing_gpu_is_an_error_and_not_a_gpu_without_the_attribute(code):
    with pytest.raises(LockRefused, match=str(code)):
        ledger_of(FakeDriver(codes={0: code})).is_readable_by(0)
