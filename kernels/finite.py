"""Test whether all elements of a tensor are finite, and small enough to be squared and summed."""

import math

import torch
from torch import Tensor


def are_finite(*tensors: Tensor) -> Tensor:
    """Return whether all elements of the tensors are finite, without synchronizing with a GPU.

    Reads each tensor once and allocates no temporary of its size, unlike `Tensor.isfinite`, since
    optimizers check every gradient in every step.

    Args:
        tensors: at least one, all on one device, of any shapes, with a floating-point dtype of at
            least 16 bits.

    Returns:
        () bool on the device of the tensors; True if they have no elements.
    """
    # one NaN makes both the minimum and the maximum NaN
    bounds = [bound for each in tensors if each.numel() for bound in torch.aminmax(each)]
    if not bounds:
        return torch.ones((), dtype=torch.bool, device=tensors[0].device)
    return torch.stack(bounds).isfinite().all()


def square_limit(dtype: torch.dtype) -> float:
    """Return the limit below which the squares of 2^32 numbers can be summed without overflow.

    It is 2^48, about 2.8e14, for float32 and bfloat16, and 2^496 for float64. For float16, whose
    squares overflow from 256 on, it is infinity.
    """
    return math.inf if dtype == torch.float16 else 2.0 ** (_max_exponent(dtype) // 2 - 16)


def can_be_squared(*tensors: Tensor, factor: float | Tensor = 1.0) -> Tensor:
    """Return whether all elements, times `factor`, are finite and below `square_limit`.

    It costs as much as `are_finite`, and does not synchronize with a GPU either.

    Args:
        tensors: see `are_finite`; all of one dtype.
        factor: a number, or a tensor () on the device of the tensors. If it is NaN, the result is
            False, unless the tensors have no elements.

    Returns:
        () bool on the device of the tensors; True if they have no elements.
    """
    bounds = [bound for each in tensors if each.numel() for bound in torch.aminmax(each)]
    if not bounds:
        return torch.ones((), dtype=torch.bool, device=tensors[0].device)
    return ((torch.stack(bounds) * factor).abs() < square_limit(tensors[0].dtype)).all()


def mark_large(values: Tensor) -> None:
    """Replace elements whose absolute value is not below `square_limit` by infinity, in place.

    Does not synchronize with a GPU, and allocates no temporary memory.

    Args:
        values: float32 or float64, of any shape.
    """
    limit = square_limit(values.dtype)
    if values.device.type == "cpu" and float(torch.linalg.vector_norm(values)) < limit:
        # no element is larger than the norm, which is faster to compute than the largest element
        return
    # products with a power of two are exact, unless they overflow, which those of large elements do
    scale = math.ldexp(1 / limit, _max_exponent(values.dtype))
    values.mul_(scale).div_(scale)


def _max_exponent(dtype: torch.dtype) -> int:
    """Return the least e such that all numbers of a dtype are below 2^e."""
    return math.frexp(torch.finfo(dtype).max)[1]
