"""`aggregate` on the CPU, and its Triton kernel on a GPU or under the interpreter."""

import numpy as np
import pytest
import torch
from blocks import both, random_block, swap_index_dtypes
from torch import Tensor

from gcnzc.kernels.aggregate import (
    aggregate,
    aggregate_reference,
    aggregate_with_targets,
    sum_triton,
)

HALF = [torch.float16, torch.bfloat16]


def scales(num_sources: int, num_targets: int) -> list[tuple[Tensor | None, Tensor | None]]:
    a, b = torch.rand(num_sources) + 0.5, torch.rand(num_targets) + 0.5
    return [(None, None), (a, None), (None, b), (a, b)]


def summed(fn, indptr, indices, x, *scale):
    """The sum and its gradient."""
    leaf = x.detach().requires_grad_()
    return both(lambda *block: fn(*block, *scale), indptr, indices, [leaf])


@pytest.mark.parametrize("num_sources", [50, 70])
@pytest.mark.parametrize("used", ["both", "sums", "rows"])
def test_with_rows_of_targets_equals_the_sum_and_a_slice(num_sources, used):
    indptr, indices = random_block(num_sources, 50, 9)
    x = torch.randn(num_sources, 17, requires_grad=True)
    a, b = torch.rand(num_sources), torch.rand(50)
    weights = torch.randn(2, 50, 17)

    def gradient(sums, rows):
        is_used = {"both": (1, 1), "sums": (1, 0), "rows": (0, 1)}[used]
        outputs = [out for out, each in zip((sums, rows), is_used, strict=True) if each]
        chosen = [weight for weight, each in zip(weights, is_used, strict=True) if each]
        return torch.autograd.grad(outputs, x, chosen)[0]

    sums, rows = aggregate_with_targets(indptr, indices, x, a, b)
    assert rows.data_ptr() == x.data_ptr()
    expected = aggregate(indptr, indices, x, a, b)
    assert torch.equal(sums, expected)
    assert torch.equal(rows, x[:50])
    assert torch.equal(gradient(sums, rows), gradient(expected, x[:50]))
    with torch.no_grad():
        found = aggregate_with_targets(indptr, indices, x, a, b)
    assert torch.equal(found[0], expected)
    with pytest.raises(ValueError, match="50 targets, but x has 40 sources"):
        aggregate_with_targets(indptr, indices, x[:40], a[:40], b)


def test_one_target_may_have_nearly_all_edges():
    degrees = torch.tensor([0, 1, 20000, 0, 2])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    indices = torch.randint(30, (20003,))
    x = torch.randn(30, 5, dtype=torch.float64)
    expected = aggregate_reference(indptr, indices, x)
    torch.testing.assert_close(aggregate(indptr, indices, x), expected)


@pytest.mark.parametrize("layout", ["columns apart", "rows apart", "one row", "one column"])
def test_reads_strided_rows(layout):
    indptr, indices = random_block(70, 50, 9)
    x = {
        "columns apart": torch.randn(8, 70).t(),
        "rows apart": torch.randn(70, 30)[:, 5:13],
        "one row": torch.randn(1, 8).expand(70, 8),
        "one column": torch.randn(70, 30)[:, 5:6],
    }[layout]
    assert torch.equal(aggregate(indptr, indices, x), aggregate(indptr, indices, x.contiguous()))


def test_reads_a_strided_gradient():
    indptr, indices = random_block(70, 50, 9)
    x = torch.randn(70, 8, requires_grad=True)
    aggregate(indptr, indices, x).sum().backward()
    times = torch.bincount(indices, minlength=70).float()
    assert torch.equal(x.grad, times[:, None].expand(70, 8))


def test_transposes_the_block_only_for_a_gradient(monkeypatch):
    indptr, indices = random_block(70, 50, 9)

    def refuse(*_):
        raise AssertionError

    monkeypatch.setattr("gcnzc.kernels.aggregate.transpose", refuse)
    weight = torch.randn(3, 2, requires_grad=True)
    (aggregate(indptr, indices, torch.randn(70, 3)) @ weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.triton
@pytest.mark.parametrize("width", [1, 127, 128, 129])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
def test_triton_equals_numba(width, dtype, device):
    indptr, indices = random_block(30, 20, 20, pointers=torch.int64)
    x = torch.randn(30, width + 2).to(dtype)[:, 1:-1]
    for scale in scales(30, 20)[::3]:
        expected = aggregate(indptr, indices, x, *scale)
        given = (*swap_index_dtypes(indptr, indices), x, *scale)
        moved = [s if s is None else s.to(device) for s in given]
        # the interpreter cuts where a GPU rounds
        step = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype)
        torch.testing.assert_close(sum_triton(*moved).cpu(), expected, rtol=step, atol=step)


@pytest.mark.triton
def test_triton_reaches_past_2_to_31_elements(device):
    rows = 1 << 22
    x = torch.from_numpy(np.zeros((rows, 520), dtype=np.float32)).to(device)
    x[-1] = 1
    indptr = torch.tensor([0, 2], device=device)
    indices = torch.tensor([rows - 1, rows - 2], device=device)
    assert sum_triton(indptr, indices, x, None, None).sum() == 520
    assert aggregate(indptr, indices, x).sum() == 520
