"""The projection of each head equals the sum that defines it, and so do its gradients."""

import pytest
import torch

from gcnzc.models.layers import project_heads


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("targets", [0, 1, 37])
def test_equals_its_definition(targets, heads, dtype):
    torch.manual_seed(0)
    rows, weight = torch.randn(targets, heads, 24), torch.randn(heads, 16, 24)
    arguments = [rows, weight, torch.randn(heads * 16)]
    # a transposed gradient, as of an output that is used transposed
    grad = torch.randn(heads * 16, targets).t()
    exact = [tensor.to(dtype).double().requires_grad_() for tensor in arguments]
    expected = (torch.einsum("thk,hfk->thf", *exact[:2])).flatten(1) + exact[2]
    expected.backward(grad.to(dtype).double())
    given = [tensor.to(dtype).requires_grad_() for tensor in arguments]
    out = project_heads(*given)
    out.backward(grad.to(dtype))
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2**-7, torch.bfloat16: 2**-4}
    pairs = [(a.grad, b.grad) for a, b in zip(given, exact, strict=True)]
    for found, wanted in [(out, expected), *pairs]:
        assert found.dtype == dtype
        scale = wanted.abs().max().item() if wanted.numel() else 1.0
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=bound[dtype] * scale)


def test_frozen_rows_and_no_bias():
    rows, weight = torch.randn(5, 2, 3), torch.randn(2, 4, 3, requires_grad=True)
    out = project_heads(rows, weight)
    torch.testing.assert_close(out, torch.einsum("thk,hfk->thf", rows, weight).flatten(1))
    out.sum().backward()
    expected = rows.sum(0)[:, None].expand(2, 4, 3)
    torch.testing.assert_close(weight.grad, expected)
