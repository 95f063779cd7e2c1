"""GAT aggregation, its two parts, and its Triton kernels on a GPU or under the interpreter."""

import pytest
import torch
from blocks import both, random_block, swap_index_dtypes
from simulated_device import Reads

from gcnzc.kernels.aggregate import aggregate
from gcnzc.kernels.aggregate.edge_softmax import (
    edge_softmax,
    edge_softmax_backward,
    edge_softmax_backward_triton,
    edge_softmax_forward,
    edge_softmax_reference,
    edge_softmax_triton,
)
from gcnzc.kernels.aggregate.gat import (
    add_self_loops,
    add_self_loops_reference,
    add_self_loops_torch,
    gat_aggregate,
    gat_aggregate_reference,
)
from gcnzc.kernels.aggregate.weighted import (
    sddmm_numba,
    sddmm_triton,
    weighted_spmm,
    weighted_spmm_numba,
    weighted_spmm_reference,
    weighted_spmm_triton,
)
from gcnzc.kernels.structure.transpose import transpose, transpose_reference

# heads, parts of a row, columns a part
SHAPES = [(1, 1, 1), (4, 4, 32), (3, 3, 129), (4, 1, 100), (8, 8, 8)]


def inputs(shape, num_sources=70, num_targets=50, dtype=torch.float64):
    heads, parts, columns = shape
    sizes = [(num_sources, parts, columns), (num_sources, heads), (num_targets, heads)]
    return [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pointers", [torch.int32, torch.int64])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_equals_reference(shape, pointers, ids):
    indptr, indices = random_block(70, 50, 9, pointers=pointers, ids=ids)
    leaves = inputs(shape)
    for self_loops in (True, False):
        found = both(gat_aggregate, indptr, indices, leaves, 0.2, self_loops)
        expected = both(gat_aggregate_reference, indptr, indices, leaves, 0.2, self_loops)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 2, 3), (2, 1, 3)])
def test_gradients_are_those_of_finite_differences(shape):
    indptr, indices = random_block(7, 5, 4)
    leaves = inputs(shape, 7, 5)
    assert torch.autograd.gradcheck(lambda *x: gat_aggregate(indptr, indices, *x), leaves)


def test_second_derivatives_raise():
    indptr, indices = random_block(7, 5, 4)
    x, source, target = inputs((2, 2, 3), 7, 5)
    weight = torch.ones(len(indices), 2, dtype=torch.float64)
    for out, leaf in [
        (weighted_spmm(indptr, indices, weight, x), x),
        (edge_softmax(indptr, indices, source, target), source),
        (aggregate(indptr, indices, x.flatten(1)), x),
    ]:
        (grad,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


@pytest.mark.parametrize("shape", [(4, 4, 40), (4, 1, 100)])
def test_is_as_exact_as_torch(shape):
    indptr, indices = random_block(2000, 200, 400)
    single = inputs(shape, 2000, 200, torch.float32)
    exact = [leaf.detach().double().requires_grad_() for leaf in single]
    expected = both(gat_aggregate_reference, indptr, indices, exact)
    ours = both(gat_aggregate, indptr, indices, single)
    by_index = both(gat_aggregate_reference, indptr, indices, single)
    for one, other, right in zip(ours, by_index, expected, strict=True):
        assert (one - right).pow(2).mean() <= (other - right).pow(2).mean()


def test_is_the_same_for_any_number_of_threads():
    indptr, indices = random_block(4000, 4000, 20)
    leaves = inputs((4, 4, 16), 4000, 4000, torch.float32)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 8):
            torch.set_num_threads(count)
            results.append(both(gat_aggregate, indptr.clone(), indices.clone(), leaves))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            assert torch.equal(one, other)


def test_targets_that_are_not_the_first_sources():
    indptr, indices = random_block(70, 50, 9)
    x, source, _ = inputs((3, 3, 5))
    own = torch.randperm(70)[:50]
    target = torch.randn(50, 3, dtype=torch.float64)
    # the same block with its sources in another order
    order = torch.cat([own, torch.tensor(sorted(set(range(70)) - set(own.tolist())))])
    place = torch.empty_like(order).scatter(0, order, torch.arange(70))
    expected = gat_aggregate(indptr, place[indices].int(), x[order], source[order], target)
    found = gat_aggregate(indptr, indices, x, source, target, self_index=own)
    torch.testing.assert_close(found, expected)


def test_dropout_keeps_the_mean_and_follows_the_seed():
    indptr, indices = torch.tensor([0, 20000]), torch.randint(30, (20000,))
    x, score = torch.ones(30, 1, 1), torch.zeros(30, 2)

    def dropped(seed):
        return gat_aggregate(indptr, indices, x, score, score[:1], dropout=0.25, seed=seed)

    assert torch.equal(dropped(3), dropped(3))
    assert not torch.equal(dropped(3), dropped(4))
    # 20000 draws of variance 1/3, a mean of ones: five standard errors
    assert (dropped(3) - 1).abs().max() < 5 * (1 / 3 / 20000) ** 0.5


@pytest.mark.parametrize("pointers", [torch.int32, torch.int64])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_self_loops_are_added_once(pointers, ids):
    indptr, indices = random_block(12, 10, 9, pointers=pointers, ids=ids)
    own = torch.randperm(12)[:10].to(ids)
    found = add_self_loops(indptr, indices, own, 12)
    expected = add_self_loops_reference(indptr, indices, own)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    padded_indptr, padded = add_self_loops_torch(indptr, indices, own, 12)
    assert torch.equal(padded_indptr, expected[0])
    assert padded.dtype == ids
    assert torch.equal(padded[: len(expected[1])], expected[1])
    # no source, so that no sum over sources has them
    assert (padded[len(expected[1]) :] == 12).all()
    assert len(padded) == len(indices) + len(own)
    for t in range(10):
        column = indices[indptr[t] : indptr[t + 1]].tolist()
        looped = found[1][found[0][t] : found[0][t + 1]].tolist()
        assert looped == [s for s in column if s != own[t]] + [own[t]]


def test_adding_self_loops_does_not_synchronize_with_the_device(monkeypatch):
    indptr, indices = random_block(70, 50, 9)
    leaves = inputs((4, 4, 3))
    expected = both(gat_aggregate_reference, indptr, indices, leaves)
    # as on a device: the loops by operations of torch, and edges by sources too
    monkeypatch.setattr("gcnzc.kernels.aggregate.gat.add_self_loops", add_self_loops_torch)
    monkeypatch.setattr("gcnzc.kernels.aggregate.weighted.transpose", transpose_reference)
    monkeypatch.setattr("gcnzc.kernels.aggregate.edge_softmax.transpose", transpose_reference)
    with Reads(everywhere=True):
        found = both(gat_aggregate, indptr, indices, leaves)
        assert not Reads.seen
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("num_sources", "num_targets"), [(0, 0), (5, 0), (5, 3)])
@pytest.mark.parametrize("self_loops", [True, False])
def test_blocks_without_edges(num_sources, num_targets, self_loops):
    indptr = torch.zeros(num_targets + 1, dtype=torch.int64)
    indices = torch.zeros(0, dtype=torch.int32)
    leaves = inputs((2, 2, 3), num_sources, num_targets)
    out, *grads = both(gat_aggregate, indptr, indices, leaves, 0.2, self_loops)
    own = leaves[0][:num_targets]
    torch.testing.assert_close(out, own if self_loops else torch.zeros_like(own))
    assert all(grad.isfinite().all() for grad in grads)


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
            gat_aggregate(indptr, indices, x, source, target, self_index=wrong)
    few = torch.zeros_like(indices)
    with pytest.raises(ValueError, match="50 targets, but x has 40 sources"):
        gat_aggregate(indptr, few, x[:40], source[:40], target)
    found = gat_aggregate(indptr, few, x[:40], source[:40], target, self_loops=False)
    assert found.shape == (50, 2, 3)


@pytest.mark.triton
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_triton_equals_numba(shape, dtype, error, device):
    heads, parts, columns = shape
    indptr, indices = random_block(20, 9, 40, pointers=torch.int64)
    x, source, target = (leaf.detach().to(dtype) for leaf in inputs(shape, 20, 9))
    y = torch.randn(9, heads, columns, dtype=dtype)

    def same(found, expected):
        torch.testing.assert_close(found.cpu(), expected, rtol=error, atol=error)

    block = [part.to(device) for part in swap_index_dtypes(indptr, indices)]
    moved = [*block, source.to(device), target.to(device)]
    weight = edge_softmax_forward(indptr, indices, source, target, 0.3)
    same(edge_softmax_triton(*moved, 0.3, torch.empty_like(weight).to(device)), weight)

    grad = torch.randn_like(weight)
    expected = edge_softmax_backward(indptr, indices, source, target, 0.3, weight, grad)
    made = [part.to(device) for part in (weight, grad)]
    made += [torch.empty_like(made[0]), torch.empty_like(moved[3])]
    for one, other in zip(edge_softmax_backward_triton(*moved, 0.3, *made), expected, strict=True):
        same(one, other)

    x_moved, y_moved = x.to(device), y.to(device)
    same(
        weighted_spmm_triton(*block, None, made[0], x_moved, heads),
        weighted_spmm_numba(indptr, indices, None, weight, x, heads),
    )
    turned = transpose(indptr, indices, 20)
    order = turned.indptr, turned.targets, turned.edges
    order_moved = [part.to(device) for part in swap_index_dtypes(*order)]
    same(
        weighted_spmm_triton(*order_moved, made[0], y_moved, parts),
        weighted_spmm_numba(*order, weight, y, parts),
    )
    same(sddmm_triton(*block, x_moved, y_moved), sddmm_numba(indptr, indices, x, y))


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
    assert torch.equal(
        weighted_spmm(indptr, indices, weight, x), weighted_spmm(indptr, indices, weight, whole)
    )
    products = sddmm_numba(indptr, indices, whole, y)
    assert torch.equal(sddmm_numba(indptr, indices, x, y), products)
    block = indptr.to(device), indices.to(device), None, weight.to(device)
    assert torch.equal(
        weighted_spmm_triton(*block, view(rows.to(device)), 2),
        weighted_spmm_triton(*block, whole.to(device), 2),
    )


def test_edge_softmax_and_weighted_sum_equal_their_references():
    indptr, indices = random_block(70, 50, 9)
    _, source, target = inputs((3, 3, 4))
    found = both(edge_softmax, indptr, indices, [source, target], 0.1)
    expected = both(edge_softmax_reference, indptr, indices, [source, target], 0.1)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    weight = torch.randn(len(indices), 3, dtype=torch.float64, requires_grad=True)
    for parts in (3, 1):
        x = torch.randn(70, parts, 4, dtype=torch.float64, requires_grad=True)
        found = both(weighted_spmm, indptr, indices, [weight, x])
        expected = both(weighted_spmm_reference, indptr, indices, [weight, x])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
