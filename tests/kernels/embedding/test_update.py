"""Sums of duplicates and updates of rows equal their references, for any number of threads."""

import pytest
import torch

from gcnzc.kernels.embedding import duplicates, update
from gcnzc.kernels.embedding.duplicates import sum_duplicates, sum_duplicates_reference

NUM_ROWS, NUM_COLUMNS = 60, 7
# the number of states, and options
RULES = {
    "sgd": (0, {}),
    "adagrad": (1, {"eps": 1e-10}),
    "adam": (2, {"betas": (0.9, 0.99), "eps": 1e-8, "step": 3}),
}


@pytest.fixture(autouse=True)
def many_parts(monkeypatch):
    monkeypatch.setattr(duplicates, "GRAIN_ELEMENTS", 1)
    monkeypatch.setattr(update, "GRAIN_ELEMENTS", 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [0, 1, 300])
@pytest.mark.parametrize("num_rows", [1, 50])
def test_sums_of_duplicates_equal_the_reference_bit_for_bit(dtype, count, num_rows):
    torch.manual_seed(count)
    ids, gradients = torch.randint(num_rows, (count,)), torch.randn(count, 5, dtype=dtype)
    expected = sum_duplicates_reference(ids, gradients)
    for threads in (1, 2, 8):
        found = sum_duplicates(ids, gradients, threads=threads)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_ids_without_duplicates_are_sorted_and_ascending_ones_returned():
    gradients = torch.randn(4, 2)
    ids, sums = sum_duplicates(torch.tensor([9, 2, 7, 3]), gradients)
    assert ids.tolist() == [2, 3, 7, 9]
    assert torch.equal(sums, gradients[[1, 3, 2, 0]])
    again = sum_duplicates(ids, sums)
    assert again[0] is ids
    assert again[1] is sums
    # the last two are equal
    assert sum_duplicates(torch.tensor([1, 2, 2]), gradients[:3])[0].tolist() == [1, 2]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_updates_equal_the_reference_and_do_not_depend_on_threads(name, dtype):
    run, reference = getattr(update, f"update_{name}"), getattr(update, f"{name}_reference")
    num_states, options = RULES[name][0], RULES[name][1] | {"lr": 0.1}
    torch.manual_seed(1)
    before = [torch.rand(NUM_ROWS, NUM_COLUMNS, dtype=dtype) for _ in range(1 + num_states)]
    ids = torch.randperm(NUM_ROWS)[:33].sort().values
    gradients = torch.randn(33, NUM_COLUMNS, dtype=dtype)
    expected = [each.clone() for each in before]
    reference(*expected, ids, gradients, **options)
    found = []
    for threads in (1, 2, 8):
        found.append([each.clone() for each in before])
        run(*found[-1], ids, gradients, **options, threads=threads)
        for own, first, same in zip(found[-1], found[0], expected, strict=True):
            assert torch.equal(own, first)
            # rows of less than 1 lose digits where an update cancels them
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(own, same, rtol=4 * eps, atol=eps)
    others = torch.ones(NUM_ROWS, dtype=torch.bool)
    others[ids] = False
    for own, same in zip(found[0], before, strict=True):
        assert torch.equal(own[others], same[others])
        assert not torch.isclose(own[ids], same[ids], rtol=1e-7, atol=0).all(1).any()


@pytest.mark.parametrize("ids", [[-1, 4], [4, NUM_ROWS]])
def test_ids_outside_the_table_change_nothing(ids):
    rows = torch.rand(NUM_ROWS, NUM_COLUMNS)
    before = rows.clone()
    with pytest.raises(IndexError, match=f"id (-1|{NUM_ROWS}) is not in a table of {NUM_ROWS}"):
        update.update_sgd(rows, torch.tensor(ids), torch.ones(2, NUM_COLUMNS), lr=1.0)
    assert torch.equal(rows, before)
