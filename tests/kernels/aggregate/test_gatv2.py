"""GATv2 aggregation, and its Triton kernels on a GPU or under the interpreter."""

import itertools

import pytest
import torch
from blocks import both, random_block, swap_index_dtypes

from gcnzc.kernels.aggregate.gat import add_self_loops_torch
from gcnzc.kernels.aggregate.gatv2 import (
    gatv2_aggregate,
    gatv2_aggregate_reference,
    leaky_scores_numba,
    leaky_scores_triton,
    sum_leaky_slopes_numba,
    sum_leaky_slopes_triton,
    sum_products,
)
from gcnzc.kernels.structure.transpose import transpose, transpose_reference

# heads, columns a head
SHAPES = [(1, 1), (4, 32), (3, 129), (8, 7)]


def inputs(shape, num_sources=70, num_targets=50, dtype=torch.float64):
    sizes = [(num_sources, *shape), (num_targets, *shape), shape]
    return [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_equals_reference(shape, ids):
    indptr, indices = random_block(70, 50, 9, pointers=ids, ids=ids)
    leaves = inputs(shape)
    for slope, self_loops in itertools.product((0.2, 1.5), (True, False)):
        found = both(gatv2_aggregate, indptr, indices, leaves, slope, self_loops)
        expected = both(gatv2_aggregate_reference, indptr, indices, leaves, slope, self_loops)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_gradients_are_those_of_finite_differences():
    indptr, indices = random_block(7, 5, 4)
    leaves = inputs((2, 3), 7, 5)
    assert torch.autograd.gradcheck(lambda *x: gatv2_aggregate(indptr, indices, *x), leaves)


def test_second_derivatives_raise():
    indptr, indices = random_block(7, 5, 4)
    x, y, a = inputs((2, 3), 7, 5)
    out = gatv2_aggregate(indptr, indices, x, y, a)
    (grad,) = torch.autograd.grad(out.square().sum(), y, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_is_about_as_exact_as_torch():
    indptr, indices = random_block(2000, 200, 400)
    single = inputs((4, 40), 2000, 200, torch.float32)
    exact = [leaf.detach().double().requires_grad_() for leaf in single]
    expected = both(gatv2_aggregate_reference, indptr, indices, exact)
    ours = both(gatv2_aggregate, indptr, indices, single)
    by_index = both(gatv2_aggregate_reference, indptr, indices, single)
    for one, other, right in zip(ours, by_index, expected, strict=True):
        assert (one - right).pow(2).mean() <= 1.1 * (other - right).pow(2).mean()


def test_is_the_same_for_any_number_of_threads():
    indptr, indices = random_block(4000, 4000, 20)
    leaves = inputs((4, 16), 4000, 4000, torch.float32)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 8):
            torch.set_num_threads(count)
            results.append(both(gatv2_aggregate, indptr.clone(), indices.clone(), leaves))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            assert torch.equal(one, other)


def test_no_tensor_has_a_row_for_each_edge(monkeypatch):
    indptr, indices = torch.tensor([0, 9000, 20_000]), torch.randint(30, (20_000,))
    x, y, a = inputs((2, 64), 30, 2, torch.float32)
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.nbytes)
            return out

    with Largest():
        both(gatv2_aggregate, indptr, indices, (x, y, a))
    rows_bytes = len(indices) * 2 * 64 * 4
    # weights of 2 heads, and 8 B numbers of edges, of which the pool's memory is a little more
    assert 0 < largest < rows_bytes / 16


def test_targets_that_are_not_the_first_sources():
    indptr, indices = random_block(70, 50, 9)
    x, y, a = inputs((3, 5))
    own = torch.randperm(70)[:50]
    # the same block with its sources in another order
    order = torch.cat([own, torch.tensor(sorted(set(range(70)) - set(own.tolist())))])
    place = torch.empty_like(order).scatter(0, order, torch.arange(70))
    expected = gatv2_aggregate(indptr, place[indices].int(), x[order], y, a)
    torch.testing.assert_close(gatv2_aggregate(indptr, indices, x, y, a, self_index=own), expected)


def test_dropout_follows_the_seed():
    indptr, indices = torch.tensor([0, 20000]), torch.randint(30, (20000,))
    x, y, a = torch.ones(30, 2, 1), torch.zeros(1, 2, 1), torch.ones(2, 1)

    def dropped(seed):
        return gatv2_aggregate(indptr, indices, x, y, a, dropout=0.25, seed=seed)

    assert torch.equal(dropped(3), dropped(3))
    assert not torch.equal(dropped(3), dropped(4))
    # 20000 draws of variance 1/3, a mean of ones: five standard errors
    assert (dropped(3) - 1).abs().max() < 5 * (1 / 3 / 20000) ** 0.5


@pytest.mark.parametrize(("num_sources", "num_targets"), [(0, 0), (5, 0), (5, 3)])
@pytest.mark.parametrize("self_loops", [True, False])
def test_blocks_without_edges(num_sources, num_targets, self_loops):
    indptr = torch.zeros(num_targets + 1, dtype=torch.int64)
    indices = torch.zeros(0, dtype=torch.int32)
    leaves = inputs((2, 3), num_sources, num_targets)
    out, *grads = both(gatv2_aggregate, indptr, indices, leaves, 0.2, self_loops)
    own = leaves[0][:num_targets]
    torch.testing.assert_close(out, own if self_loops else torch.zeros_like(own))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.triton
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_triton_equals_numba(shape, dtype, error, device):
    indptr, indices = random_block(20, 9, 40, pointers=torch.int64)
    x, y, a = (leaf.detach().to(dtype) for leaf in inputs(shape, 20, 9))
    # the last elements are padding, as `add_self_loops` leaves it on a GPU
    padded = torch.cat([indices, indices.new_full((3,), 20)])

    def same(found, expected):
        found = found.cpu()[: len(expected)]
        torch.testing.assert_close(found, expected, rtol=error, atol=10 * error)

    block = [part.to(device) for part in swap_index_dtypes(indptr, padded)]
    xd, yd, ad = (rows.to(device) for rows in (x, y, a))
    same(
        leaky_scores_triton(*block, xd, yd, ad, 0.3),
        leaky_scores_numba(indptr, indices, x, y, a, 0.3),
    )
    grad = torch.randn(len(indices), shape[0], dtype=dtype)
    same(
        sum_leaky_slopes_triton(*block, None, grad.to(device), xd, yd, 0.3),
        sum_leaky_slopes_numba(indptr, indices, None, grad, x, y, 0.3),
    )
    turned = transpose(indptr, indices, 20)
    order = turned.indptr, turned.targets, turned.edges
    order_moved = [part.to(device) for part in swap_index_dtypes(*order)]
    same(
        sum_leaky_slopes_triton(*order_moved, grad.to(device), yd, xd, 0.3),
        sum_leaky_slopes_numba(*order, grad, y, x, 0.3),
    )


def test_padding_of_self_loops_is_ignored(monkeypatch):
    indptr, indices = random_block(70, 50, 9)
    leaves = inputs((4, 3))
    expected = both(gatv2_aggregate_reference, indptr, indices, leaves)
    # as on a device: the loops by operations of torch, and edges by sources too
    monkeypatch.setattr("gcnzc.kernels.aggregate.gat.add_self_loops", add_self_loops_torch)
    monkeypatch.setattr("gcnzc.kernels.aggregate.weighted.transpose", transpose_reference)
    monkeypatch.setattr("gcnzc.kernels.aggregate.gatv2.transpose", transpose_reference)
    found = both(gatv2_aggregate, indptr, indices, leaves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_sum_products_is_summed_in_float64():
    one, other = torch.randn(2, 3000, 2, 5)
    expected = (one.double() * other).sum(0).float()
    torch.testing.assert_close(sum_products(one, other), expected, rtol=2e-7, atol=1e-7)
