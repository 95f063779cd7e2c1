"""Report to `torch.amp.GradScaler` that all ranks skipped a step."""

import inspect

from torch.amp import GradScaler
from torch.optim import Optimizer

_STEP = inspect.unwrap(GradScaler.step).__code__


def report_overflow(optimizer: Optimizer) -> None:
    """Record an overflow in the GradScaler that is taking this optimizer's step, if there is one.

    A GradScaler lowers its scale only after an overflow on its own rank. All ranks have skipped the
    step, so all must lower their scales, or the scales diverge. GradScaler gives the optimizer only
    copies of its flags, and a reference to itself only with a deprecation warning. This function
    therefore looks it up in the call stack. With a version of torch where it is not found there,
    the scales may differ; gradients remain correct, because each rank divides by its own scale.

    Args:
        optimizer: whose `step` is being called.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _STEP and frame.f_locals.get("optimizer") is optimizer:
            scaler: GradScaler = frame.f_locals["self"]
            for found_inf in scaler._found_inf_per_device(optimizer).values():
                found_inf.fill_(1.0)
            return
        frame = frame.f_back
