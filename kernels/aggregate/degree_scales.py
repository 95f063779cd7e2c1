"""Scales of rows from degrees, of the GCN layer: Kipf and Welling, 2017.

`norm = 1 / sqrt(degree + 1)`, where the 1 is the self loop. The sum of the `k` sampled
in-neighbours of a target of degree `d` is multiplied by `d / k`.

Notation: S sources, T targets.
"""

import math

import torch
from numba import njit
from torch import Tensor


def inverse_sqrt_degrees(degrees: Tensor, row_dtype: torch.dtype) -> Tensor:
    """Return 1 / sqrt(degree + 1), where the 1 is the self loop.

    Args:
        degrees: (n,) int64 in-degrees.
        row_dtype: dtype of the rows that are scaled.

    Returns:
        (n,) of `scale_dtype(row_dtype)`.
    """
    return (degrees + 1).to(scale_dtype(row_dtype)).rsqrt()


def scale_dtype(row_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scales of rows: that of the sums, float32 for bfloat16 and float16."""
    return torch.promote_types(row_dtype, torch.float32)


def gcn_scales_reference(
    indptr: Tensor, degrees: Tensor, row_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Reference for `gcn_scales`, in operations of torch alone."""
    norms = inverse_sqrt_degrees(degrees, row_dtype)
    num_sampled = indptr.diff().clamp(min=1)
    return norms * degrees / num_sampled, norms.square()


@njit(nogil=True, cache=True, error_model="numpy")
def _gcn_scales(indptr, degrees, sums, targets):
    kind = sums.dtype.type
    for t in range(len(degrees)):
        degree = kind(degrees[t])
        norm = kind(1) / kind(math.sqrt(kind(degrees[t] + 1)))
        sums[t] = norm * degree / kind(max(indptr[t + 1] - indptr[t], 1))
        targets[t] = norm * norm


def gcn_scales(indptr: Tensor, degrees: Tensor, row_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute the scales of the targets' sums and of their own rows.

    Args:
        indptr: (T + 1,) int32 or int64, the CSC pointers of the sampled edges.
        degrees: (T,) int64 in-degrees of the targets in the whole graph.
        row_dtype: dtype of the rows.

    Returns:
        (T,) `norm * d / k` and (T,) `norm**2`, float64 for rows of float64, otherwise float32.

    Raises:
        ValueError: the numbers of targets differ.
    """
    if len(degrees) != len(indptr) - 1:
        raise ValueError(f"{len(degrees)} degrees for {len(indptr) - 1} targets")
    if degrees.device.type != "cpu":
        return gcn_scales_reference(indptr, degrees, row_dtype)
    # one short loop: threads of torch would wait for one another at the end of each operation
    sums, targets = (torch.empty(len(degrees), dtype=scale_dtype(row_dtype)) for _ in range(2))
    _gcn_scales(*(each.numpy() for each in (indptr.long(), degrees.long(), sums, targets)))
    return sums, targets
