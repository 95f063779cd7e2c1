"""Test whether all elements of a tensor are finite."""

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
