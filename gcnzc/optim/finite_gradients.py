"""Check whether the gradients and the optimizer state of a rank are finite; report overflows."""

import inspect
from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from gcnzc.kernels.finite import are_finite, can_be_squared, square_limit
from gcnzc.optim.flat import to_device
from gcnzc.optim.fully_shard import local
from gcnzc.system.scalars import read_scalars

_SCALER_STEP = inspect.unwrap(GradScaler.step).__code__


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


def report_overflow(optimizer: Optimizer) -> None:
    """Record an overflow in the GradScaler that is taking this optimizer's step, if there is one.

    A GradScaler lowers its scale only after an overflow on its own rank. All ranks have skipped the
    step, so all must lower their scales, or the scales diverge. GradScaler gives the optimizer only
    copies of its flags, and a reference to itself only with a deprecation warning. This function
    therefore looks it up in the call stack. With a version of torch where it is not found there,
    the scales may differ; gradients remain correct, because each rank divides by its own scale.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _SCALER_STEP and frame.f_locals.get("optimizer") is optimizer:
            scaler: GradScaler = frame.f_locals["self"]
            for found_inf in scaler._found_inf_per_device(optimizer).values():
                found_inf.fill_(1.0)
            return
        frame = frame.f_back
