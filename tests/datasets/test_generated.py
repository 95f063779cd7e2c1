import threading
import time

import numpy as np
import pytest

from gcnzc.datasets.generated import map_in_order, random_split


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_results_are_in_order(threads, count):
    def slow_at_first(index):
        time.sleep(0.001 * (count - index) / 10)
        return index

    assert list(map_in_order(slow_at_first, count, threads)) == list(range(count))


def test_at_most_one_result_per_thread_is_computed_in_advance():
    made = []
    chunks = map_in_order(lambda index: made.append(index), 1000, 2)
    next(chunks)
    time.sleep(0.05)
    assert len(made) <= 4
    chunks.close()
    time.sleep(0.05)
    assert len(made) <= 6


def test_errors_of_threads_are_raised_and_the_threads_end():
    def fail_at_five(index):
        if index == 5:
            raise ValueError("five")
        return index

    with pytest.raises(ValueError, match="five"):
        list(map_in_order(fail_at_five, 100, 2))
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("gcnzc-generate") for name in names)


@pytest.mark.parametrize("num_nodes", [3, 4, 7, 1000])
def test_random_splits_have_the_requested_shares(num_nodes):
    shares = {"train": 0.54, "valid": 0.18, "test": 0.28}
    parts = random_split(0, num_nodes, shares)
    ids = np.concatenate(list(parts.values()))
    assert len(np.unique(ids)) == len(ids)
    assert abs(len(ids) - num_nodes) <= 1
    for part, share in shares.items():
        assert abs(len(parts[part]) - share * num_nodes) <= 1
        assert (np.diff(parts[part]) > 0).all()
    again = random_split(1, num_nodes, shares)
    assert num_nodes < 1000 or (again["train"] != parts["train"]).any()
