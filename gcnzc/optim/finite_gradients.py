"""Check whether the gradients and the optimizer state of a rank are finite."""

from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor

from gcnzc.kernels.finite import are_finite, can_be_squared, square_limit
from gcnzc.optim.flat import to_device
from gcnzc.optim.fully_shard import local
from gcnzc.system.scalars import read_scalars


def have_finite_gradients(parameters: Iterable[Tensor], factor: float | Tensor = 1.0) -> bool:
    """Return whether all gradients, times `factor`, are finite and below `square_limit`.

    Larger ones would overflow the second moments of most optimizers, or a norm. A parameter without
    a gradient is ignored. The host reads one value from each device, and so waits for the backward
    pass on a GPU.

    Args:
        parameters: on any devices; their gradients may be sparse.
        factor: see `DistributedOptimizer.gradient_factor`.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            values = _values(gradient)
            by_kind.setdefault((values.device, values.dtype), []).append(values)
    flags = [
        can_be_squared(*values, factor=to_device(factor, device))
        for (device, _), values in by_kind.items()
    ]
    return not flags or all(flag > 0 for (flag,) in read_scalars(*flags))


def count_bad_elements(parameter: Tensor, factor: float | Tensor) -> Tensor:
    """Return () int64: the number of gradient elements that are not finite or too large.

    Args:
        parameter: whose gradient may be missing or sparse.
        factor: see `DistributedOptimizer.gradient_factor`. If it is NaN, only elements that are not
            finite count.
    """
    values = parameter.detach()[:0] if parameter.grad is None else _values(parameter.grad)
    if isinstance(factor, Tensor):
        # products of other elements with 0 are finite
        factor = factor.to(parameter.device).nan_to_num(0.0)
    return (~((values * factor).abs() < square_limit(values.dtype))).sum()


def delete_nonfinite_state(
    state: MutableMapping[Tensor, Any], parameters: Iterable[Tensor]
) -> None:
    """Delete an optimizer's state of the parameters for which it is not finite.

    Args:
        state: the attribute `state` of an optimizer of torch.
        parameters: the parameters to check.
    """
    for parameter in parameters:
        tensors = [each for each in state.get(parameter, {}).values() if isinstance(each, Tensor)]
        if not all(bool(are_finite(local(each))) for each in tensors):
            del state[parameter]


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else local(gradient)
