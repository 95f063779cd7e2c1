"""Aggregation, attention and dropout in bfloat16 and float16 against float64.

Sums are float32 and rounded once, so that each element of an output or a gradient differs from the
exact value of the same rounded inputs by at most its unit roundoff, and float32's error of a sum.
"""

import pytest
import torch
from blocks import random_block, swap_index_dtypes
from torch.nn import functional

from gcnzc.kernels.aggregate import aggregate, aggregate_reference
from gcnzc.kernels.aggregate.dropout import (
    dropout,
    dropout_numba,
    dropout_reference,
    dropout_triton,
    relu_dropout_,
)
from gcnzc.kernels.aggregate.gat import gat_aggregate, gat_aggregate_reference
from gcnzc.kernels.aggregate.gatv2 import (
    gatv2_aggregate,
    gatv2_aggregate_reference,
    leaky_scores_numba,
    leaky_scores_triton,
    sum_leaky_slopes_numba,
    sum_leaky_slopes_triton,
)
from gcnzc.kernels.aggregate.weighted import (
    sddmm_numba,
    sddmm_triton,
    weighted_spmm_numba,
    weighted_spmm_triton,
)

HALF = [torch.bfloat16, torch.float16]
# the largest relative error of rounding to nearest
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# error of float32 sums relative to the largest element, and half the step of float16's subnormals
SUM_ERROR, SUBNORMAL = 2e-6, 2.0**-25
SOURCES, TARGETS = 300, 80


def check(found, exact, dtype):
    """Each element is within the stated bound of float64."""
    for one, other in zip(found, exact, strict=True):
        assert other.dtype == torch.float64
        largest = other.abs().max()
        # gradients of float32 arguments are not rounded to half precision
        roundoff = ROUNDOFF[dtype] if one.dtype == dtype else 0.0
        bound = (1 + 1e-3) * roundoff * other.abs() + SUM_ERROR * largest + SUBNORMAL
        assert ((one.double() - other).abs() <= bound).all()


def with_gradients(function, leaves, out_gradient):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, out_gradient.to(out.dtype))]


def compare(function, reference, leaves, dtype, columns):
    """Compare with a reference in float64 of the same rounded inputs, for an uneven loss."""
    rounded = [leaf.to(dtype) for leaf in leaves]
    out_gradient = torch.linspace(-1, 2, TARGETS * columns).to(dtype)
    shape = function(*rounded).shape
    out_gradient = out_gradient.view(shape)
    found = with_gradients(function, rounded, out_gradient)
    assert all(each.dtype == dtype for each in found)
    exact = with_gradients(reference, [leaf.double() for leaf in rounded], out_gradient.double())
    check(found, exact, dtype)
    return found


@pytest.mark.parametrize("dtype", HALF)
def test_sums_and_means(dtype):
    torch.manual_seed(0)
    indptr, indices = random_block(SOURCES, TARGETS, 100)
    a, b = torch.rand(SOURCES), 1 / indptr.diff().clamp(min=1)
    for columns in (1, 3, 33, 128):
        compare(
            lambda x: aggregate(indptr, indices, x, a, b),
            lambda x: aggregate_reference(indptr, indices, x, a.double(), b.double()),
            [torch.randn(SOURCES, columns)],
            dtype,
            columns,
        )


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("row_heads", [1, 4])
def test_attention_of_gat(dtype, row_heads):
    torch.manual_seed(0)
    indptr, indices = random_block(SOURCES, TARGETS, 60)
    leaves = [torch.randn(SOURCES, row_heads, 24), torch.randn(SOURCES, 4), torch.randn(TARGETS, 4)]

    def ours(x, source, target):
        return gat_aggregate(indptr, indices, x, source, target)

    def reference(x, source, target):
        return gat_aggregate_reference(indptr, indices, x, source, target, 0.2)

    compare(ours, reference, leaves, dtype, 4 * 24)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("wide", [False, True])
def test_attention_of_gatv2(dtype, wide):
    """Also with float32 attention vectors, as under autocast."""
    torch.manual_seed(0)
    indptr, indices = random_block(SOURCES, TARGETS, 60)
    rows = [torch.randn(SOURCES, 4, 24).to(dtype), torch.randn(TARGETS, 4, 24).to(dtype)]
    leaves = [*rows, torch.randn(4, 24).to(torch.float32 if wide else dtype)]
    out_gradient = torch.linspace(-1, 2, TARGETS * 96).to(dtype).view(TARGETS, 4, 24)
    found = with_gradients(lambda *x: gatv2_aggregate(indptr, indices, *x), leaves, out_gradient)
    assert [each.dtype for each in found] == [dtype, *(leaf.dtype for leaf in leaves)]
    exact = with_gradients(
        lambda *x: gatv2_aggregate_reference(indptr, indices, *x, 0.2, True),
        [leaf.double() for leaf in leaves],
        out_gradient.double(),
    )
    check(found, exact, dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_dropout_keeps_the_same_elements_and_rounds_once(dtype):
    torch.manual_seed(0)
    x = torch.randn(777, 13).to(dtype)
    out, grad = with_gradients(lambda x: dropout(x, 0.3, 5), [x], torch.ones(777, 13))
    expected = dropout_reference(x.float(), 0.3, 5)
    assert torch.equal(out, expected.to(dtype))
    assert torch.equal(grad != 0, expected != 0)
    hidden = x.clone().requires_grad_()
    rows = relu_dropout_(hidden * 1, 0.3, 5)
    assert torch.equal(rows, functional.relu(expected).to(dtype))
    (grad,) = torch.autograd.grad(rows.sum(), hidden)
    assert grad.dtype == dtype
    assert torch.equal(grad != 0, rows != 0)


@pytest.mark.parametrize("dtype", HALF)
def test_results_do_not_depend_on_the_number_of_threads(dtype):
    torch.manual_seed(0)
    indptr, indices = random_block(3000, 3000, 30)
    x, scores = torch.randn(3000, 2, 20).to(dtype), torch.randn(3000, 2).to(dtype)
    vectors = torch.randn(2, 20)
    out_gradient = torch.linspace(-1, 2, 3000 * 40).view(3000, 2, 20)

    def results():
        # a block of its own, so that its transpose is made with these threads too
        block = indptr.clone(), indices.clone()
        return [
            *with_gradients(lambda x: aggregate(*block, x[:, 0]), [x], out_gradient[:, 0]),
            *with_gradients(lambda x, s: gat_aggregate(*block, x, s, s), [x, scores], out_gradient),
            *with_gradients(
                lambda x, a: gatv2_aggregate(*block, x, x, a), [x, vectors], out_gradient
            ),
        ]

    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 8):
            torch.set_num_threads(count)
            found.append(results())
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.triton
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("shape", [(1, 1), (4, 32), (3, 129)])
def test_triton_equals_numba(shape, dtype, device):
    torch.manual_seed(0)
    indptr, indices = random_block(20, 9, 40, pointers=torch.int64)
    x, y = torch.randn(20, *shape).to(dtype), torch.randn(9, *shape).to(dtype)
    a, weight = torch.randn(shape), torch.rand(len(indices), shape[0])
    # Triton's interpreter cuts where a GPU rounds
    step = 2 * ROUNDOFF[dtype]

    def same(found, expected):
        assert found.dtype == expected.dtype
        error = step if found.dtype == dtype else 1e-5
        torch.testing.assert_close(found.cpu(), expected, rtol=error, atol=10 * error)

    block, rows = (indptr, indices), (x, y)
    swapped = swap_index_dtypes(*block)
    moved_block, moved_rows = ([each.to(device) for each in part] for part in (swapped, rows))
    for out_heads, out_dtype in ((shape[0], None), (shape[0], torch.float32), (1, None)):
        options = out_heads, out_dtype
        found = weighted_spmm_triton(*moved_block, None, weight.to(device), moved_rows[0], *options)
        same(found, weighted_spmm_numba(*block, None, weight, x, *options))
    same(sddmm_triton(*moved_block, *moved_rows), sddmm_numba(*block, x, y))
    scores = leaky_scores_triton(*moved_block, *moved_rows, a.to(device), 0.3)
    same(scores, leaky_scores_numba(*block, x, y, a, 0.3))
    sums = sum_leaky_slopes_triton(*moved_block, None, weight.to(device), *moved_rows, 0.3)
    same(sums, sum_leaky_slopes_numba(*block, None, weight, x, y, 0.3))
    flat = x.view(20, -1).to(device)
    same(dropout_triton(flat, 0.3, 5).cpu(), dropout_numba(x.view(20, -1), 0.3, 5))
