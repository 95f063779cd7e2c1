"""Test whether all elements of a tensor are finite."""

import torch
from torch import Tensor


def are_finite(*tensors: Tensor) -> Tensor:
    """() bool on the device of the tensors: whether all their elements are, True of none.

    Reads them once, while `Tensor.isfinite` makes other vectors, and a norm without end is a loop
    of its own on a CPU: every step asks this of every gradient.

    Args:
        tensors: at least one, all on one device, of any shapes, and of floats of at least 16 bits.
    """
    # one element that is no number makes both so
    bounds = [bound for each in tensors if each.numel() for bound in torch.aminmax(each)]
    if not bounds:
        return torch.ones((), dtype=torch.bool, device=tensors[0].device)
    return torch.stack(bounds).isfinite().all()
