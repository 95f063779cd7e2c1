"""Initial rows depend on the seed, the row and the column only, and have the right distribution."""

import pytest
import torch

from gcnzc.kernels.embedding import initialize as module

KINDS = ["normal", "uniform"]


def filled(name, shape, seed, threads=1, dtype=torch.float64, scale=1.0):
    rows = torch.full(shape, torch.nan, dtype=dtype)
    getattr(module, f"fill_{name}")(rows, scale, seed, threads=threads)
    return rows


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("num_columns", [1, 4, 7])
@pytest.mark.parametrize("seed", [0, 2**63 + 5, -1])
def test_equals_the_reference(name, num_columns, seed):
    rows = filled(name, (500, num_columns), seed, scale=3.0)
    expected = getattr(module, f"fill_{name}_reference")(500, num_columns, 3.0, seed)
    torch.testing.assert_close(rows, expected, rtol=0, atol=3e-6 if name == "normal" else 1e-15)
    single = filled(name, (500, num_columns), seed, dtype=torch.float32, scale=3.0)
    assert torch.equal(single, rows.float())


@pytest.mark.parametrize("name", KINDS)
def test_rows_do_not_depend_on_threads_or_on_the_number_of_rows(name, monkeypatch):
    monkeypatch.setattr(module, "GRAIN_ELEMENTS", 1)
    rows = filled(name, (101, 6), 5)
    for threads in (2, 8):
        assert torch.equal(filled(name, (101, 6), 5, threads), rows)
    assert torch.equal(filled(name, (40, 6), 5), rows[:40])
    assert not torch.equal(filled(name, (101, 6), 6), rows)
    assert len(rows.unique()) == rows.numel()


def test_normal_rows_have_the_quantiles_of_the_normal_distribution():
    values = filled("normal", (50_000, 8), 1, dtype=torch.float32).double()
    # of 400,000 values, the largest distance has a probability of 1e-6 above this
    order = values.view(-1).sort().values
    expected = torch.special.ndtr(order)
    steps = torch.arange(1, len(order) + 1, dtype=torch.float64) / len(order)
    assert (expected - steps).abs().max() < (14.5 / (2 * len(order))) ** 0.5
    assert torch.corrcoef(values.T).sub(torch.eye(8)).abs().max() < 0.03
    assert 4.2 < values.abs().max() < 6.5


def test_uniform_rows_are_within_the_bound():
    values = filled("uniform", (50_000, 8), 1, scale=0.25)
    assert values.abs().max() <= 0.25
    assert values.min() < -0.2499
    assert values.max() > 0.2499
    assert abs(values.mean()) < 0.001
