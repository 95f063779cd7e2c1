"""What sums, GAT and GATv2 have in common: references, derivatives, precision and threads."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from blocks import both, random_block
from simulated_device import Reads

from gcnzc.kernels.aggregate import aggregate, aggregate_reference, gat
from gcnzc.kernels.aggregate.gatv2 import gatv2_aggregate, gatv2_aggregate_reference
from gcnzc.kernels.structure.transpose import transpose_reference

HALF = [torch.bfloat16, torch.float16]
# the largest relative error of rounding to nearest
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# error of float32 sums relative to the largest element, and half the step of float16's subnormals
SUM_ERROR, SUBNORMAL = 2e-6, 2.0**-25


@dataclass(frozen=True)
class Operation:
    """An aggregation, with its reference."""

    run: Callable[..., Any]
    reference: Callable[..., Any]
    sizes: Callable[..., Any]
    """of its leaves, for numbers of sources and targets and a shape"""
    shapes: list[tuple[int, ...]]
    """of rows; the last one is small"""
    options: list[tuple[Any, ...]]
    """after the leaves; of attention a slope, and whether there are self loops"""
    num_of_sources: int = 1
    """the first leaves have a row for each source"""
    wide: tuple[int, ...] = ()
    """leaves that may be float32 if the others are in half precision"""
    relative_error: float = 1.0
    """at most so much of the mean square error of torch's operations"""


def scaled(function):
    """Sums with factors of the sources and of the targets."""

    def run(indptr, indices, x, has_a=True, has_b=True):
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        a = torch.linspace(0.5, 1.5, len(x)).to(dtype)
        b = (1 / indptr.diff().clamp(min=1).float()).to(dtype)
        return function(indptr, indices, x, a if has_a else None, b if has_b else None)

    return run


# heads, parts of a row, columns a part
GAT_SHAPES = [(1, 1, 1), (4, 4, 32), (3, 3, 129), (4, 1, 100), (8, 8, 8), (2, 1, 3), (2, 2, 3)]
OPERATIONS = {
    "sum": Operation(
        scaled(aggregate),
        scaled(aggregate_reference),
        lambda sources, targets, columns: [(sources, columns)],
        [(columns,) for columns in (1, 3, 33, 100, 127, 128, 129, 700, 4)],
        [*product((True, False), (True, False))],
    ),
    "GAT": Operation(
        gat.gat_aggregate,
        gat.gat_aggregate_reference,
        lambda sources, targets, heads, parts, columns: [
            (sources, parts, columns),
            (sources, heads),
            (targets, heads),
        ],
        GAT_SHAPES,
        [(0.2, True), (0.2, False)],
        num_of_sources=2,
    ),
    "GATv2": Operation(
        gatv2_aggregate,
        gatv2_aggregate_reference,
        lambda sources, targets, *shape: [(sources, *shape), (targets, *shape), shape],
        [(1, 1), (4, 32), (3, 129), (8, 7), (2, 3)],
        [*product((0.2, 1.5), (True, False))],
        wide=(2,),
        relative_error=1.1,
    ),
}
each_operation = pytest.mark.parametrize("name", OPERATIONS)
each_shape = pytest.mark.parametrize(
    ("name", "shape"), [(name, shape) for name, own in OPERATIONS.items() for shape in own.shapes]
)
each_attention = pytest.mark.parametrize("name", ["GAT", "GATv2"])


def leaves_of(operation, sources, targets, shape=None, dtype=torch.float64):
    sizes = operation.sizes(sources, targets, *(shape or operation.shapes[-1]))
    return [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@each_shape
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_equals_reference(name, shape, ids):
    operation = OPERATIONS[name]
    leaves = leaves_of(operation, 70, 50, shape)
    for pointers, options in zip((torch.int32, torch.int64) * 2, operation.options, strict=False):
        block = random_block(70, 50, 9, pointers=pointers, ids=ids)
        found = both(operation.run, *block, leaves, *options)
        assert_close(found, both(operation.reference, *block, leaves, *options))


@each_operation
def test_gradients_are_those_of_finite_differences_and_have_no_derivative(name):
    operation, block = OPERATIONS[name], random_block(7, 5, 4)
    for shape, options in product(operation.shapes[-2:], operation.options):
        if shape[-1] > 4:
            continue
        leaves = leaves_of(operation, 7, 5, shape)

        def run(*leaves, options=options):
            return operation.run(*block, *leaves, *options)

        assert torch.autograd.gradcheck(run, leaves)
        grads = torch.autograd.grad(run(*leaves).square().sum(), leaves, create_graph=True)
        for grad in grads:
            with pytest.raises(RuntimeError, match="once_differentiable"):
                grad.sum().backward(retain_graph=True)


@each_operation
def test_is_as_exact_as_torch(name):
    operation, block = OPERATIONS[name], random_block(2000, 200, 400)
    shapes = [shape for shape in operation.shapes if 30 <= shape[-1] <= 100]
    for shape in shapes:
        single = leaves_of(operation, 2000, 200, shape, torch.float32)
        exact = [leaf.detach().double().requires_grad_() for leaf in single]
        expected = both(operation.reference, *block, exact, *operation.options[0])
        ours = both(operation.run, *block, single, *operation.options[0])
        by_index = both(operation.reference, *block, single, *operation.options[0])
        for one, other, right in zip(ours, by_index, expected, strict=True):
            error = (one - right).pow(2).mean()
            assert error <= operation.relative_error * (other - right).pow(2).mean()


@each_operation
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_is_the_same_for_any_number_of_threads(name, dtype):
    operation = OPERATIONS[name]
    indptr, indices = random_block(4000, 4000, 20)
    shape = {"sum": (33,), "GAT": (4, 4, 32), "GATv2": (4, 32)}[name]
    leaves = leaves_of(operation, 4000, 4000, shape, dtype)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 8):
            torch.set_num_threads(count)
            # a block of its own, so that its transpose is made with these threads too
            results.append(both(operation.run, indptr.clone(), indices.clone(), leaves))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


@each_shape
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_rounded_once(name, shape, dtype):
    """Sums are float32: each element is within one rounding and the error of a sum of float64."""
    operation, block = OPERATIONS[name], random_block(300, 80, 100)
    leaves = [leaf.detach().to(dtype) for leaf in leaves_of(operation, 300, 80, shape)]
    for wide in {(), operation.wide}:
        given = [leaf.float() if at in wide else leaf for at, leaf in enumerate(leaves)]
        given = [leaf.requires_grad_() for leaf in given]
        found = both(operation.run, *block, given)
        assert [each.dtype for each in found] == [dtype, *(leaf.dtype for leaf in given)]
        exact = [leaf.detach().double().requires_grad_() for leaf in given]
        # the gradient of the output is rounded, too
        weights = torch.linspace(-1, 2, found[0].numel(), dtype=torch.float64).to(dtype).double()
        out = operation.reference(*block, *exact, *operation.options[0])
        expected = torch.autograd.grad(out, exact, weights.view_as(out))
        for one, other in zip(found, [out.detach(), *expected], strict=True):
            # gradients of float32 arguments are not rounded to half precision
            roundoff = ROUNDOFF[dtype] if one.dtype == dtype else 0.0
            bound = (1 + 1e-3) * roundoff * other.abs() + SUM_ERROR * other.abs().max() + SUBNORMAL
            assert ((one.double() - other).abs() <= bound).all()


@each_operation
@pytest.mark.parametrize(("num_sources", "num_targets"), [(0, 0), (5, 0), (5, 3)])
def test_blocks_without_edges(name, num_sources, num_targets):
    operation = OPERATIONS[name]
    indptr = torch.zeros(num_targets + 1, dtype=torch.int64)
    indices = torch.zeros(0, dtype=torch.int32)
    leaves = leaves_of(operation, num_sources, num_targets)
    for options in operation.options:
        out, *grads = both(operation.run, indptr, indices, leaves, *options)
        has_loops = name != "sum" and options[-1]
        expected = leaves[0][:num_targets] if has_loops else torch.zeros_like(out)
        torch.testing.assert_close(out, expected)
        assert all(grad.isfinite().all() for grad in grads)


# attention, to which each target's own row is an edge


@each_attention
def test_targets_that_are_not_the_first_sources(name):
    operation = OPERATIONS[name]
    indptr, indices = random_block(70, 50, 9)
    leaves, own = leaves_of(operation, 70, 50), torch.randperm(70)[:50]
    # the same block with its sources in another order
    order = torch.cat([own, torch.tensor(sorted(set(range(70)) - set(own.tolist())))])
    place = torch.empty_like(order).scatter(0, order, torch.arange(70))
    number = operation.num_of_sources
    ordered = [*(leaf[order] for leaf in leaves[:number]), *leaves[number:]]
    expected = operation.run(indptr, place[indices].int(), *ordered)
    found = operation.run(indptr, indices, *leaves, self_index=own)
    torch.testing.assert_close(found, expected)


@each_attention
def test_dropout_keeps_the_mean_and_follows_the_seed(name):
    operation = OPERATIONS[name]
    indptr, indices = torch.tensor([0, 20000]), torch.randint(30, (20000,))
    # of equal scores
    x, *others = (torch.zeros_like(leaf) for leaf in leaves_of(operation, 30, 1))

    def dropped(seed):
        return operation.run(indptr, indices, x + 1, *others, dropout=0.25, seed=seed)

    assert torch.equal(dropped(3), dropped(3))
    assert not torch.equal(dropped(3), dropped(4))
    # 20000 draws of variance 1/3, a mean of ones: five standard errors
    assert (dropped(3) - 1).abs().max() < 5 * (1 / 3 / 20000) ** 0.5


@each_attention
def test_adding_self_loops_does_not_synchronize_with_the_device(name, monkeypatch):
    operation, block = OPERATIONS[name], random_block(70, 50, 9)
    leaves = leaves_of(operation, 70, 50)
    expected = both(operation.reference, *block, leaves, *operation.options[0])
    # as on a device: the loops by operations of torch, and edges by sources too
    monkeypatch.setattr(gat, "add_self_loops", gat.add_self_loops_torch)
    for module in ("weighted", "edge_softmax", "gatv2"):
        monkeypatch.setattr(f"gcnzc.kernels.aggregate.{module}.transpose", transpose_reference)
    with Reads(everywhere=True):
        found = both(operation.run, *block, leaves)
        assert not Reads.seen
    assert_close(found, expected)
