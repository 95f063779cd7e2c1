import threading

import numpy as np
import pytest

from gcnzc.datasets.generated import map_in_order, random_split


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
