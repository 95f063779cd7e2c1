"""Elements that are not finite, or too large, are found at any position."""

import pytest
import torch

from gcnzc.kernels.finite import are_finite, can_be_squared, mark_large, square_limit

WRONG = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (7,), (1000,), (70_001,), (33, 57)])
def test_one_non_finite_element_is_found_at_any_position(dtype, shape):
    values = torch.randn(shape).to(dtype)
    assert bool(are_finite(values))
    assert bool(are_finite(torch.full_like(values, torch.finfo(dtype).max)))
    for wrong in WRONG:
        for at in torch.randint(values.numel(), (5,)).tolist():
            marred = values.clone()
            marred.view(-1)[at] = wrong
            assert not bool(are_finite(marred)), (wrong, at)
            # whatever else there is
            marred.view(-1)[torch.randint(values.numel(), (1,))] = WRONG[at % 3]
            assert not bool(are_finite(marred))


def test_several_strided_and_empty_tensors_are_supported():
    values = torch.randn(8, 8)
    values[3, 3] = torch.nan
    assert bool(are_finite(values[:, 4:]))
    assert not bool(are_finite(values[:, 3]))
    assert bool(are_finite(values[:0]))
    values = [torch.randn(5).half(), torch.randn(0), torch.randn(3, 2).double(), torch.randn(())]
    assert bool(are_finite(*values))
    values[2][1, 1] = float("nan")
    assert not bool(are_finite(*values))


LIMITS = {torch.float64: 2.0**496, torch.float32: 2.0**48, torch.bfloat16: 2.0**48}


@pytest.mark.parametrize("dtype", [*LIMITS, torch.float16])
def test_the_squares_of_elements_below_the_limit_can_be_summed(dtype):
    limit = LIMITS.get(dtype, torch.inf)
    assert square_limit(dtype) == limit
    values = torch.tensor([-1.0, 2.0], dtype=dtype)
    assert bool(can_be_squared(values))
    # of numbers below 1, the largest one
    below = 1 - torch.finfo(dtype).eps / 2
    largest = torch.finfo(dtype).max if dtype == torch.float16 else limit * below
    for sign in (1, -1):
        values[0] = sign * largest
        assert bool(can_be_squared(values))
        assert not bool(can_be_squared(values, factor=2.0))
        values[0] = sign * limit
        assert not bool(can_be_squared(values))
        assert bool(can_be_squared(values, factor=0.5)) == (dtype != torch.float16)
    if dtype != torch.float16:
        total = torch.tensor(largest, dtype=torch.float64).square() * 2.0**32
        assert total <= torch.finfo(dtype).max or dtype == torch.bfloat16
    for wrong in WRONG:
        values[0] = wrong
        assert not bool(can_be_squared(values))
    assert not bool(can_be_squared(torch.ones(2, dtype=dtype), factor=torch.tensor(torch.nan)))
    assert bool(can_be_squared(values[:0], factor=torch.tensor(torch.nan)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_only_elements_that_are_too_large_are_marked(dtype):
    info, limit = torch.finfo(dtype), square_limit(dtype)
    kept = [0.0, -1.5, 0.1, info.tiny, info.smallest_normal / 2, limit * (1 - info.eps / 2)]
    values = torch.tensor([*kept, limit, -info.max, torch.nan, -torch.inf], dtype=dtype)
    expected = torch.tensor([*kept, torch.inf, -torch.inf, torch.nan, -torch.inf], dtype=dtype)
    mark_large(values)
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    # many large elements whose norm is above the limit
    values = torch.full((1000,), limit / 4, dtype=dtype)
    mark_large(values)
    assert torch.equal(values, torch.full_like(values, limit / 4))
