"""Blocks to test aggregation on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def random_block(
    num_sources: int,
    num_targets: int,
    most: int,
    *,
    pointers: torch.dtype = torch.int32,
    ids: torch.dtype = torch.int32,
) -> tuple[Tensor, Tensor]:
    """Return (indptr, indices) with 0 to `most` edges a target; the last target has none."""
    degrees = torch.randint(most + 1, (num_targets,))
    degrees[-1:] = 0
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    indices = torch.randint(num_sources, (int(indptr[-1]),))
    return indptr.to(pointers), indices.to(ids)


def swap_index_dtypes(*arrays: Tensor) -> list[Tensor]:
    """Return int32 arrays as int64, and int64 arrays as int32.

    Triton's kernels take any of them. For numba's, which are compiled for each combination, tests
    use few.
    """
    other = {torch.int32: torch.int64, torch.int64: torch.int32}
    return [each.to(other[each.dtype]) for each in arrays]


def both(
    fn: Callable[..., Tensor], indptr: Tensor, indices: Tensor, leaves: list[Tensor], *options: Any
) -> list[Tensor]:
    """Return the output and the gradients of all leaves for an uneven loss."""
    out = fn(indptr, indices, *leaves, *options)
    # in half precision, torch counts no further than 65504
    weights = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).to(out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


# the interpreter cuts half precision where a GPU rounds
ERRORS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2.0**-10}
ERRORS |= {torch.bfloat16: 2.0**-7}


def assert_triton_close(found: Tensor, expected: Tensor) -> None:
    """Check that a Triton kernel computes what another one does."""
    assert found.dtype == expected.dtype
    error = ERRORS[found.dtype]
    torch.testing.assert_close(found.cpu(), expected, rtol=error, atol=10 * error)
