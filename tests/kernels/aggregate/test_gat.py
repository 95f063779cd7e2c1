"""GAT aggregation, its two parts, and its Triton kernels on a GPU or under the interpreter."""

import pytest
import torch
from blocks import ERRORS, assert_triton_close, random_block, swap_index_dtypes

from gcnzc.kernels.aggregate import edge_softmax, gat, weighted
from gcnzc.kernels.structure.transpose import transpose

# heads, parts of a row, columns a part
SHAPES = [(1, 1, 1), (4, 4, 32), (3, 3, 129), (4, 1, 100), (8, 8, 8)]


def inputs(shape, num_sources=70, num_targets=50, dtype=torch.float64):
    heads, parts, columns = shape
    sizes = [(num_sources, parts, columns), (num_sources, heads), (num_targets, heads)]
    return [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("pointers", [torch.int32, torch.int64])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_self_loops_are_added_once(pointers, ids):
    indptr, indices = random_block(12, 10, 9, pointers=pointers, ids=ids)
    own = torch.randperm(12)[:10].to(ids)
    found = gat.add_self_loops(indptr, indices, own, 12)
    expected = gat.add_self_loops_reference(indptr, indices, own)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    padded_indptr, padded = gat.add_self_loops_torch(indptr, indices, own, 12)
    assert torch.equal(padded_indptr, expected[0])
    assert padded.dtype == ids
    assert torch.equal(padded[: len(expected[1])], expected[1])
    # no source, so that no sum over sources has them
    assert (padded[len(expected[1]) :] == 12).all()
    assert len(padded) == len(indices) + len(own)


def test_self_loops_of_targets_that_do_not_exist_are_rejected():
    indptr, indices = random_block(70, 50, 9)
    x, source, target = inputs((2, 2, 3))
    own = torch.arange(50)
    for wrong, message in [
        (torch.arange(60), r"shape \(60,\) and dtype torch.int64, not \(50,\)"),
        (own.float(), "dtype torch.float32"),
        (own + 21, "from 21 to 70, but there are 70 sources"),
        (own - 1, "from -1 to 48"),
        (own.to("meta"), "self_index is on meta"),
    ]:
        with pytest.raises(ValueError, match=message):
            gat.gat_aggregate(indptr, indices, x, source, target, self_index=wrong)
    few = torch.zeros_like(indices)
    with pytest.raises(ValueError, match="50 targets, but x has 40 sources"):
        gat.gat_aggregate(indptr, few, x[:40], source[:40], target)
    found = gat.gat_aggregate(indptr, few, x[:40], source[:40], target, self_loops=False)
    assert found.shape == (50, 2, 3)


@pytest.mark.triton
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_triton_equals_numba(shape, dtype, device):
    heads, parts, columns = shape
    wide = dtype if dtype.itemsize > 2 else torch.float32  # of scores and weights
    indptr, indices = random_block(20, 9, 40, pointers=torch.int64)
    x, y = torch.randn(20, parts, columns).to(dtype), torch.randn(9, heads, columns).to(dtype)
    source, target = torch.randn(20, heads, dtype=wide), torch.randn(9, heads, dtype=wide)
    block = [part.to(device) for part in swap_index_dtypes(indptr, indices)]
    moved = [*block, source.to(device), target.to(device)]
    weight = edge_softmax.edge_softmax_forward(indptr, indices, source, target, 0.3)
    out = torch.empty_like(weight).to(device)
    assert_triton_close(edge_softmax.edge_softmax_triton(*moved, 0.3, out), weight)

    grad = torch.randn_like(weight)
    expected = edge_softmax.edge_softmax_backward(
        indptr, indices, source, target, 0.3, weight, grad
    )
    made = [part.to(device) for part in (weight, grad)]
    made += [torch.empty_like(made[0]), torch.empty_like(moved[3])]
    for one, other in zip(
        edge_softmax.edge_softmax_backward_triton(*moved, 0.3, *made), expected, strict=True
    ):
        assert_triton_close(one, other)

    x_moved, y_moved = x.to(device), y.to(device)
    for out_dtype in (None, wide):
        found = weighted.weighted_spmm_triton(*block, None, made[0], x_moved, heads, out_dtype)
        expected = weighted.weighted_spmm_numba(indptr, indices, None, weight, x, heads, out_dtype)
        assert_triton_close(found, expected)
    turned = transpose(indptr, indices, 20)
    order = turned.indptr, turned.targets, turned.edges
    order_moved = [part.to(device) for part in swap_index_dtypes(*order)]
    assert_triton_close(
        weighted.weighted_spmm_triton(*order_moved, made[0], y_moved, parts),
        weighted.weighted_spmm_numba(*order, weight, y, parts),
    )
    assert_triton_close(
        weighted.sddmm_triton(*block, x_moved, y_moved), weighted.sddmm_numba(indptr, indices, x, y)
    )


@pytest.mark.triton
@pytest.mark.parametrize("layout", ["rows apart", "parts apart", "columns apart"])
def test_reads_strided_rows(layout, device):
    indptr, indices = random_block(70, 50, 9)
    # a strided tensor is contiguous after a copy to a GPU, so the view is made there
    rows, view = {
        "rows apart": (torch.randn(140, 2, 5), lambda rows: rows[::2]),
        "parts apart": (torch.randn(70, 4, 9), lambda rows: rows[:, 1:3, 2:7]),
        "columns apart": (torch.randn(70, 5, 2), lambda rows: rows.transpose(1, 2)),
    }[layout]
    x = view(rows)
    weight, y = torch.randn(len(indices), 2), torch.randn(50, 2, 5)
    whole = x.contiguous()
    block = indptr, indices, weight
    assert torch.equal(weighted.weighted_spmm(*block, x), weighted.weighted_spmm(*block, whole))
    products = weighted.sddmm_numba(indptr, indices, whole, y)
    assert torch.equal(weighted.sddmm_numba(indptr, indices, x, y), products)
    block = indptr.to(device), indices.to(device), None, weight.to(device)
    assert torch.equal(
        weighted.weighted_spmm_triton(*block, view(rows.to(device)), 2),
        weighted.weighted_spmm_triton(*block, whole.to(device), 2),
    )
