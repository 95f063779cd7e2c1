"""exp and expm1 for kernels, compared with float64."""

import numpy as np
import pytest
from numba import njit

from gcnzc.kernels.exponential import MIN_ARGUMENT, exp_nonpositive, expm1_nonpositive


def for_all(function):
    """Compile a loop over elements."""

    @njit
    def run(x, out):
        for i in range(len(x)):
            out[i] = function(x[i])

    return run


exp, expm1 = for_all(exp_nonpositive), for_all(expm1_nonpositive)


def negative_floats(first, last):
    """Every 5003rd float32 from `first` to `last`, both negative."""
    bits = np.float32([first, last]).view(np.uint32)
    return np.arange(*bits, 5003, dtype=np.uint32).view(np.float32)


@pytest.mark.parametrize(
    ("function", "reference", "first", "last"),
    [(exp, np.exp, -1e-38, MIN_ARGUMENT), (expm1, np.expm1, -1e-37, -1e30)],
)
def test_results_are_those_of_float64(function, reference, first, last):
    x = negative_floats(first, last)
    assert len(x) > 50_000
    out = np.empty_like(x)
    function(x, out)
    expected = reference(x.astype(np.float64))
    assert (np.abs(out - expected) / np.abs(expected)).max() < 1.2e-7


def test_zeros_limits_and_nan():
    x = np.float32([0.0, -0.0, -88.0, -1e30, -np.inf, np.nan])
    out = np.empty_like(x)
    exp(x, out)
    np.testing.assert_array_equal(out, np.float32([1, 1, 0, 0, 0, np.nan]))
    expm1(x, out)
    np.testing.assert_array_equal(out, np.float32([0, 0, -1, -1, -1, np.nan]))


def test_float64_is_computed_by_the_c_library():
    x = -np.random.default_rng(0).exponential(20.0, 1000)
    out = np.empty_like(x)
    exp(x, out)
    np.testing.assert_allclose(out, np.exp(x), rtol=1e-15)
    # with any number of elements, since a vectorized loop has a remainder
    for count in range(40):
        single, part = np.empty(count, np.float32), x[:count].astype(np.float32)
        exp(part, single)
        np.testing.assert_allclose(single, np.exp(x[:count]), rtol=1e-5, atol=1e-37)
