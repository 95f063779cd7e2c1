"""What `torch.amp.GradScaler` must know of a step that all ranks have skipped."""

import inspect

from torch.amp import GradScaler
from torch.optim import Optimizer

_STEP = inspect.unwrap(GradScaler.step).__code__


def report_overflow(optimizer: Optimizer) -> None:
    """Record an overflow in the GradScaler that is taking this optimizer's step, if there is one.

    A GradScaler lowers its scale where it has found an overflow itself, on its own rank. All ranks
    have skipped the step, so all must lower it, or their scales go apart. GradScaler gives the
    optimizer only copies of what it has found, and itself only with a warning that this will end;
    so it is looked up among the callers. Where torch is changed so that it is not found there, the
    scales may differ; the gradients are right even so, as each rank divides them by its own scale.

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
