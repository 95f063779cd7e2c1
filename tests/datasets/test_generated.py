import threading
import time

import numpy as np
import pytest

from gcnzc.datasets.generated import Chunks, map_in_order, random_split, random_stream


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


def test_chunks_cover_the_range():
    chunks = Chunks(lambda chunk, begin, end: (chunk, begin, end), 10, 4, 2)
    assert list(chunks()) == [(0, 0, 4), (1, 4, 8), (2, 8, 10)]
    assert list(chunks.then(lambda made: made[2])()) == [4, 8, 10]


def test_random_streams_differ():
    drawn = {
        random_stream(*key).integers(2**62).item()
        for key in [(0, 0), (0, 1), (1, 0), (0, 0, 1), (0, 1, 1)]
    }
    assert len(drawn) == 5


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


def test_splits_need_not_cover_all_nodes():
    parts = random_split(0, 10_000, {"train": 0.01, "valid": 0.0, "test": 0.002})
    assert [len(parts[part]) for part in ("train", "valid", "test")] == [100, 1, 20]


@pytest.mark.parametrize(
    ("num_nodes", "shares"),
    [(2, {"train": 0.5, "valid": 0.2, "test": 0.3}), (100, {"train": 1, "valid": 1, "test": 0.3})],
)
def test_impossible_splits_are_rejected(num_nodes, shares):
    with pytest.raises(ValueError, match=f"{num_nodes} nodes cannot be split by"):
        random_split(0, num_nodes, shares)
