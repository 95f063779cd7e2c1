import numpy as np
import pytest

from gcnzc.datasets.alias import Alias


def probabilities(alias):
    """What the slots add up to: (R, V)."""
    num_rows, num_values = alias.keep.shape
    total = alias.keep / num_values
    for row in range(num_rows):
        np.add.at(total[row], alias.other[row], (1 - alias.keep[row]) / num_values)
    return total


@pytest.mark.parametrize("num_values", [1, 2, 3, 100, 4096])
def test_slots_add_up_to_the_weights(num_values):
    weights = np.random.default_rng(0).pareto(1, (3, num_values))
    weights[1] = 1
    weights[2, : num_values // 2] = 0
    alias = Alias.of(weights)
    expected = weights / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(probabilities(alias), expected, atol=1e-12)
    # what has no weight is never drawn, not even by rounding
    assert (probabilities(alias)[2, : num_values // 2] == 0).all()


def test_a_row_of_zeros_is_uniform():
    np.testing.assert_allclose(probabilities(Alias.of(np.zeros((1, 4)))), 0.25)


def test_draws_follow_their_rows():
    weights = np.array([[1.0, 2.0, 5.0], [5.0, 0.0, 3.0]])
    rows = np.tile([0, 1], 100_000)
    drawn = Alias.of(weights).draw(np.random.default_rng(0), len(rows), rows)
    for row in (0, 1):
        counts = np.bincount(drawn[row::2], minlength=3)
        deviation = np.sqrt(100_000 * weights[row] / 8 * (1 - weights[row] / 8))
        assert (abs(counts - 100_000 * weights[row] / 8) <= 4 * deviation).all()
