"""What a rank adds to exchanges besides its gradients or parameters: its weight and its signals."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gcnzc.optim.validation import check_at_least_zero
from gcnzc.system.arguments import check_flag, check_kind, describe

MAX_SIGNALS = 1000
"""the largest number of signals, since every exchange has a number for each"""


class Contribution:
    """The attributes `weight` and `signals` of an optimizer; setting invalid values is an error."""

    _weight: float
    _signals: list[bool]
    received_signals: list[bool]

    @property
    def weight(self) -> float:
        """The factor of this rank's gradients in means and in local steps.

        `step` does not reset it. If batch sizes differ between ranks, set it before each `step` to
        this rank's number of samples divided by the mean number over the ranks. The mean of the
        weights should be 1, because means divide by the number of ranks. Means of parameters are
        not weighted.

        Raises:
            ValueError: it is set to anything but a finite number of at least 0.
        """
        return self._weight

    @weight.setter
    def weight(self, value: float) -> None:
        check_at_least_zero("weight", value)
        self._weight = float(value)

    @property
    def signals(self) -> list[bool]:
        """This rank's flags for the next exchange, such as a request to stop.

        Raises:
            TypeError: they are set to anything but a list of flags.
            ValueError: they are set to another number of flags than the constructor got.
        """
        return self._signals

    @signals.setter
    def signals(self, values: Sequence[bool]) -> None:
        count = len(self.received_signals)
        check_kind("signals", values, (list, tuple), f"a list of {count} flags")
        if len(values) != count:
            raise ValueError(
                f"signals is {describe(values)}, but the optimizer was constructed with "
                f"signals={count}\n\nhint: give the constructor signals={len(values)} on all ranks"
            )
        self._signals = [check_flag(f"signals[{index}]", each) for index, each in enumerate(values)]

    def gradient_factor(self) -> float | Tensor:
        """Return the factor of this rank's gradients in the mean over the ranks.

        This is the rank's weight. With GradScaler it is a tensor () of float64 on the device of the
        scale: the weight divided by the scale, or NaN if GradScaler found a gradient that is not
        finite. NaN marks the gradient as not finite, even if it was clipped later.
        """
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is None and found_inf is None:
            return self._weight
        if not isinstance(found_inf, Tensor):
            # GradScaler sets the number 0 on a rank without gradients
            found_inf = torch.zeros((), device=None if scale is None else scale.device)
        if scale is None:
            scale = torch.ones_like(found_inf)
        factor = self._weight / scale.double()
        return factor.masked_fill(found_inf.to(factor.device) > 0, torch.nan)

    def scale_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Multiply gradients in place by this rank's weight divided by GradScaler's scale."""
        scale = getattr(self, "grad_scale", None)
        factor: float | Tensor = self._weight
        if scale is not None:
            # a scale on a GPU is not read, because reading it synchronizes with the GPU
            factor = self._weight / (float(scale) if scale.device.type == "cpu" else scale.double())
        is_needed = isinstance(factor, Tensor) or factor != 1.0
        for parameter in parameters if is_needed else ():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
