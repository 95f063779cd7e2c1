"""GradScaler: the factor of gradients, and the report that all ranks skipped a step."""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

_STEP = inspect.unwrap(GradScaler.step).__code__


def gradient_factor(optimizer: Any) -> float | Tensor:
    """Return an optimizer's `weight`, divided by GradScaler's scale if there is one.

    With GradScaler it is a tensor () of float64 on the device of the scale; NaN if GradScaler found
    a gradient that is not finite, even if it was clipped later.
    """
    weight: float = optimizer.weight
    scale, found_inf = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
    if scale is None and found_inf is None:
        return weight
    if not isinstance(found_inf, Tensor):
        # GradScaler sets the number 0 on a rank without gradients
        found_inf = torch.zeros((), device=None if scale is None else scale.device)
    if scale is None:
        scale = torch.ones_like(found_inf)
    factor: Tensor = weight / scale.double()
    return factor.masked_fill(found_inf.to(factor.device) > 0, torch.nan)


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
        if frame.f_code is _STEP and frame.f_locals.get("optimizer") is optimizer:
            scaler: GradScaler = frame.f_locals["self"]
            for found_inf in scaler._found_inf_per_device(optimizer).values():
                found_inf.fill_(1.0)
            return
        frame = frame.f_back
