"""Check whether the gradients of a rank are finite."""

from collections.abc import Iterable

import torch
from torch import Tensor

from gcnzc.kernels.finite import are_finite
from gcnzc.system.scalars import read_scalars


def have_finite_gradients(parameters: Iterable[Tensor], found_inf: object = None) -> bool:
    """Return whether all gradients are finite; missing ones are.

    The host reads one value from each device, and so waits for the backward pass on a GPU.

    Args:
        parameters: on any devices; their gradients may be sparse.
        found_inf: the optimizer's attribute of this name, which GradScaler sets during `step`:
            above 0 if it found a gradient that is not finite.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            by_device.setdefault(values.device, []).append(values)
    flags = [are_finite(*values) for values in by_device.values()]
    flags += [found_inf == 0] if isinstance(found_inf, Tensor) else []
    return not flags or all(flag > 0 for (flag,) in read_scalars(*flags))
