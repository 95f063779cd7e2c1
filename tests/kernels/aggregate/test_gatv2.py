"""GATv2 aggregation, and its Triton kernels on a GPU or under the interpreter."""

import pytest
import torch
from blocks import ERRORS, assert_triton_close, both, random_block, swap_index_dtypes

from gcnzc.kernels.aggregate import gatv2
from gcnzc.kernels.structure.transpose import transpose

# heads, columns a head
SHAPES = [(1, 1), (4, 32), (3, 129), (8, 7)]


def inputs(shape, num_sources=70, num_targets=50, dtype=torch.float64):
    sizes = [(num_sources, *shape), (num_targets, *shape), shape]
    return [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]


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
        both(gatv2.gatv2_aggregate, indptr, indices, (x, y, a))
    rows_bytes = len(indices) * 2 * 64 * 4
    # weights of 2 heads, and 8 B numbers of edges, of which the pool's memory is a little more
    assert 0 < largest < rows_bytes / 16


@pytest.mark.triton
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_triton_equals_numba(shape, dtype, device):
    indptr, indices = random_block(20, 9, 40, pointers=torch.int64)
    x, y, a = (leaf.detach().to(dtype) for leaf in inputs(shape, 20, 9))
    # of attention
    wide = dtype if dtype.itemsize > 2 else torch.float32
    a, grad = a.to(wide), torch.randn(len(indices), shape[0], dtype=wide)
    # the last elements are padding, as `add_self_loops` leaves it on a GPU
    padded = torch.cat([indices, indices.new_full((3,), 20)])
    block = [part.to(device) for part in swap_index_dtypes(indptr, padded)]
    xd, yd, ad, grad_moved = (rows.to(device) for rows in (x, y, a, grad))
    scores = gatv2.leaky_scores_numba(indptr, indices, x, y, a, 0.3)
    assert_triton_close(gatv2.leaky_scores_triton(*block, xd, yd, ad, 0.3)[: len(indices)], scores)
    found = gatv2.sum_leaky_slopes_triton(*block, None, grad_moved, xd, yd, 0.3)
    assert_triton_close(found, gatv2.sum_leaky_slopes_numba(indptr, indices, None, grad, x, y, 0.3))
    turned = transpose(indptr, indices, 20)
    order = turned.indptr, turned.targets, turned.edges
    order_moved = [part.to(device) for part in swap_index_dtypes(*order)]
    found = gatv2.sum_leaky_slopes_triton(*order_moved, grad_moved, yd, xd, 0.3)
    assert_triton_close(found, gatv2.sum_leaky_slopes_numba(*order, grad, y, x, 0.3))


def test_sum_products_is_summed_in_float64():
    one, other = torch.randn(2, 3000, 2, 5)
    expected = (one.double() * other).sum(0).float()
    torch.testing.assert_close(gatv2.sum_products(one, other), expected, rtol=2e-7, atol=1e-7)
