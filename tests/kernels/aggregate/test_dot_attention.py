"""Dot-product attention equals the reference, with its gradients."""

import pytest
import torch

from gcnzc.kernels.aggregate.dot_attention import dot_attention, dot_attention_reference


def case(dtype=torch.float64, num_edges=60):
    """Columns in groups of 3, of which some columns and one group have no edges."""
    torch.manual_seed(0)
    counts = torch.bincount(torch.randint(0, 18, (num_edges,)), minlength=24)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    indices = torch.randint(0, 10, (num_edges,), dtype=torch.int32)
    keys, values = torch.randn(10, 2, 9, dtype=dtype).split([4, 5], 2)
    queries = torch.randn(24, 2, 4, dtype=dtype)
    return indptr, indices, indptr[::3].contiguous(), keys, queries, values


@pytest.mark.parametrize("num_edges", [0, 60])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_the_reference(dtype, num_edges):
    *block, keys, queries, values = case(dtype, num_edges)
    rows = [each.detach().requires_grad_() for each in (keys, queries, values)]
    results = []
    for run in (dot_attention, dot_attention_reference):
        out = run(*block, *rows)
        results.append([out, *torch.autograd.grad(out.sin().sum(), rows)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_large_scores_do_not_overflow():
    *block, keys, queries, values = case(torch.float32)
    out = dot_attention(*block, 1e4 * keys, queries, values)
    assert out.isfinite().all()


def test_bfloat16_is_rounded_once():
    *block, keys, queries, values = case(torch.float32)
    rows = [each.bfloat16() for each in (keys, queries, values)]
    out = dot_attention(*block, *rows)
    expected = dot_attention_reference(*block, *(each.float() for each in rows))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_threads_do_not_change_the_result(threads):
    *block, keys, queries, values = case(torch.float32, 20_000)
    expected = dot_attention(*block, keys, queries, values)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(dot_attention(*block, keys, queries, values), expected)
    finally:
        torch.set_num_threads(before)
