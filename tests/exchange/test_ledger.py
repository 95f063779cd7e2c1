"""The ledger counts the requests of all threads."""

import threading
from contextlib import suppress

import pytest

from gcnzc.exchange import Ledger, engine


@pytest.mark.parametrize(
    "begin", [lambda each: each.add("Sum", requests=1), lambda each: each.add("Sum", 8, 1)]
)
def test_a_kind_that_two_threads_count_first_has_one_entry(begin, monkeypatch):
    both = threading.Barrier(2)

    class SlowEntry(engine.Entry):
        """An entry that takes long to create."""

        def __init__(self):
            # broken if the other thread waits for this one
            with suppress(threading.BrokenBarrierError):
                both.wait(0.2)
            super().__init__()

    monkeypatch.setattr(engine, "Entry", SlowEntry)
    counted = Ledger()
    threads = [threading.Thread(target=begin, args=[counted]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entry = counted.entries["Sum"]
    assert (entry.requests + entry.messages, entry.bytes_sent in (0, 16)) == (2, True)
