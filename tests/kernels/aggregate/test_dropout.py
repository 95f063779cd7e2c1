"""`dropout` equals its reference bit for bit, and keeps the mean."""

import pytest
import torch

from gcnzc.kernels.aggregate.dropout import (
    dropout,
    dropout_numba,
    dropout_reference,
    dropout_triton,
    elu_dropout_,
    relu_dropout_,
)

# chunks have 1024, 2048 or 4096 elements
SIZES = [(1,), (127,), (128, 1), (1023,), (1024,), (2, 2053), (40, 257)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3125, 0.34765625, 0.5, 0.9, 2**-16])
@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reference_numba_and_triton_agree(size, share, dtype, device):
    x = torch.randn(size, dtype=dtype)
    expected = dropout_reference(x, share, 2**40 + 17)
    assert torch.equal(dropout_numba(x, share, 2**40 + 17), expected)
    assert torch.equal(dropout_triton(x.to(device), share, 2**40 + 17).cpu(), expected)


@pytest.mark.triton
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_relu_dropout_of_reference_numba_and_triton_agree(size, share, device):
    x = torch.randn(size)
    expected = dropout_reference(x.relu(), share, 77)
    assert torch.equal(dropout_reference(x, share, 77, floor=0.0), expected)
    assert torch.equal(dropout_numba(x, share, 77, floor=0.0), expected)
    on_gpu = dropout_triton(x.to(device), share, 77, relu=True)
    assert torch.equal(on_gpu.cpu(), expected)
    out = x.clone()
    assert relu_dropout_(out, share, 77) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_relu_dropout_gradients_are_correct(dtype, share):
    leaf = torch.randn(50, 60, dtype=dtype, requires_grad=True)
    weight = torch.randn(50, 60, dtype=dtype)
    (dropout(leaf.relu(), share, 9) * weight).sum().backward()
    expected, leaf.grad = leaf.grad, None
    # what is written over is not the leaf
    (relu_dropout_(leaf * 1, share, 9) * weight).sum().backward()
    assert torch.equal(leaf.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_elu_dropout_equals_elu_and_dropout(dtype, share):
    x = torch.randn(50, 60, dtype=dtype)
    # kept zeros have the gradient 1, and are not mistaken for dropped elements
    x[:, :4] = torch.tensor([0.0, -0.0, 6e-8, -6e-8], dtype=dtype)
    leaf, weight = x.requires_grad_(), torch.randn(50, 60, dtype=dtype)
    separate = dropout(torch.nn.functional.elu(leaf), share, 9)
    (separate * weight).sum().backward()
    expected, leaf.grad = leaf.grad, None
    out = leaf * 1
    assert elu_dropout_(out, share, 9) is out
    # the ELU is computed in float32 and not rounded before it is scaled
    bound = {torch.bfloat16: 2**-7, torch.float16: 2**-9, torch.float32: 4e-7}.get(dtype, 0)
    torch.testing.assert_close(out, separate, rtol=bound, atol=0)
    (out * weight).sum().backward()
    bound = {torch.bfloat16: 2**-7, torch.float16: 2**-9}.get(dtype, 1e-6)
    torch.testing.assert_close(leaf.grad, expected, rtol=bound, atol=bound)
    if share:
        dropped = dropout(torch.ones_like(leaf), share, 9) == 0
        assert torch.equal(leaf.grad == 0, dropped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_of_a_saturated_elu_with_dropout_is_not_negative(dtype):
    # the rounded output of a large negative input may be below -scale
    for share in (0.1, 0.3, 0.5, 0.7):
        leaf = torch.full((4096,), -20.0, dtype=dtype, requires_grad=True)
        elu_dropout_(leaf * 1, share, 0).float().sum().backward()
        assert leaf.grad.min() >= 0
        assert leaf.grad.max() <= 2**-7


@pytest.mark.parametrize("function", [relu_dropout_, elu_dropout_])
def test_nan_is_kept_and_leaves_are_rejected(function):
    x = torch.full((1000,), float("nan"), requires_grad=True)
    out = function(x * 1, 0.5, 0)
    assert out.isnan().any()
    if function is elu_dropout_:
        out.sum().backward()
        assert torch.equal(x.grad.isnan(), out.isnan())
    with pytest.raises(RuntimeError, match="leaf"):
        function(torch.ones(3, requires_grad=True), 0.5, 0)
    with pytest.raises(ValueError, match="the dropout probability is 1"):
        function(torch.ones(3), 1.0, 0)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_the_result_does_not_depend_on_the_number_of_threads(threads):
    x = torch.randn(300, 1000)
    assert torch.equal(dropout_numba(x, 0.3, 5, threads), dropout_reference(x, 0.3, 5))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.6875, 0.75, 129 / 256])
def test_the_dropped_share_and_the_mean_are_as_expected(share):
    out = dropout(torch.ones(2000, 1000), share, 1)
    # five standard errors of 2 million draws
    error = 5 * (share * (1 - share) / out.numel()) ** 0.5
    assert (out == 0).double().mean().item() == pytest.approx(share, abs=error + 2**-17)
    assert out.double().mean().item() == pytest.approx(1, abs=error / (1 - share))
    # rows and columns are as random as the whole
    for dim in (0, 1):
        shares = (out == 0).double().mean(dim)
        spread = (share * (1 - share) / out.shape[dim]) ** 0.5
        assert shares.std().item() == pytest.approx(spread, rel=0.1)


def test_seeds_drop_different_elements():
    kept = [dropout(torch.ones(100, 1000), 0.5, seed) != 0 for seed in (0, 1, 2**32)]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (kept[one] == kept[other]).double().mean().item() == pytest.approx(0.5, abs=0.01)


def test_only_kept_elements_have_a_gradient():
    x = torch.randn(9, 60, dtype=torch.float64, requires_grad=True)
    out = dropout(x, 0.4, 9)
    out.sum().backward()
    torch.testing.assert_close(x.grad, torch.where(out == 0, 0.0, out / x).detach())
    assert torch.autograd.gradcheck(lambda v: dropout(v, 0.4, 9), (x,))


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_same_elements_and_rounds_once(dtype, device):
    # views, too
    x = torch.randn(777, 100).to(dtype)[:, 3:16]
    expected = dropout_reference(x.float().contiguous(), 0.3, 5)
    hidden = x.clone().requires_grad_()
    out, rows = dropout(hidden, 0.3, 5), relu_dropout_(hidden * 1, 0.3, 5)
    for found, right in ((out, expected), (rows, expected.relu())):
        assert torch.equal(found, right.to(dtype))
        (grad,) = torch.autograd.grad(found.sum(), hidden)
        assert grad.dtype == dtype
        assert torch.equal(grad != 0, right != 0)
    # the interpreter cuts where a GPU rounds
    error = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    on_gpu = dropout_triton(x.contiguous().to(device), 0.3, 5).cpu()
    torch.testing.assert_close(on_gpu, out, rtol=error, atol=10 * error)


def test_infinite_values_are_dropped_or_kept():
    out = dropout(torch.full((1000,), torch.inf), 0.5, 0)
    assert set(out.tolist()) == {0.0, torch.inf}


@pytest.mark.parametrize("share", [-0.1, 1.0, 0.999999, float("nan")])
def test_invalid_probabilities_are_rejected(share):
    with pytest.raises(ValueError, match="dropout probability"):
        dropout(torch.ones(3), share, 0)
