"""Whether numbers are finite."""

import torch
from torch import Tensor


def are_finite(values: Tensor) -> Tensor:
    """() bool on the device of `values`: whether all elements are, True of none.

    Reads them once, while `values.isfinite()` makes other vectors, and a norm without end is a loop
    of its own on a CPU: every step asks this of every gradient.

    Args:
        values: any shape, of floats of at least 16 bits.
    """
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    # one element that is no number makes both so
    least, most = torch.aminmax(values)
    return least.isfinite() & most.isfinite()
