"""`are_finite` agrees with torch."""

import pytest
import torch

from gcnzc.kernels.finite import are_finite

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


def test_strided_and_empty_tensors_are_supported():
    values = torch.randn(8, 8)
    values[3, 3] = float("nan")
    assert bool(are_finite(values[:, 4:]))
    assert not bool(are_finite(values[:, 3]))
    assert bool(are_finite(values[:0]))


def test_several_tensors_are_checked_at_once():
    values = [torch.randn(5).half(), torch.randn(0), torch.randn(3, 2).double(), torch.randn(())]
    assert bool(are_finite(*values))
    values[2][1, 1] = float("nan")
    assert not bool(are_finite(*values))
