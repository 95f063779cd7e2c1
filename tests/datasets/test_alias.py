import numpy as np
import pytest

from gcnzc.datasets.alias import AliasTable


def probabilities(alias):
    """What the slots of each row add up to."""
    found = []
    for start, length in zip(alias.start, alias.length.astype(int), strict=True):
        keep, other = (part[start : start + length] for part in (alias.keep, alias.other))
        total = keep / length
        np.add.at(total, other, (1 - keep) / length)
        found.append(total)
    return found


@pytest.mark.parametrize("num_values", [1, 2, 3, 100, 4096])
def test_slots_add_up_to_the_weights(num_values):
    some_zero = np.random.default_rng(1).random(num_values)
    some_zero[: num_values // 2] = 0
    rows = [np.random.default_rng(0).pareto(1, 5), np.ones(num_values), some_zero]
    found = probabilities(AliasTable.from_weights(rows))
    for total, weights in zip(found, rows, strict=True):
        np.testing.assert_allclose(total, weights / weights.sum(), atol=1e-12)
    # what has no weight is never drawn, not even by rounding
    assert (found[2][: num_values // 2] == 0).all()


def test_a_row_of_zeros_is_uniform():
    np.testing.assert_allclose(probabilities(AliasTable.from_weights([np.zeros(4)]))[0], 0.25)


def test_draws_follow_the_weights_of_their_rows():
    weights = [np.array([1, 2, 5]), np.array([5, 0, 2, 1]), np.array([3, 5])]
    rows = np.tile([0, 1, 2], 100_000)
    drawn = AliasTable.from_weights(weights).draw(np.random.default_rng(0), len(rows), rows)
    for row in range(3):
        counts = np.bincount(drawn[row::3], minlength=len(weights[row]))
        share = weights[row] / 8
        deviation = np.sqrt(100_000 * share * (1 - share))
        assert (abs(counts - 100_000 * share) <= 4 * deviation).all()


def test_without_rows_all_draws_are_from_the_first_distribution():
    alias = AliasTable.from_weights([np.array([0, 0, 1]), np.array([1, 0])])
    assert set(alias.draw(np.random.default_rng(0), 100)) == {2}
