"""Adam's step with momenta that are in sync, for optimizers that exchange momenta or updates.

    m <- b1 m + (1 - b1) g     v <- b2 v + (1 - b2) g^2
    x <- x - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^u)) + eps) + weight_decay x)

Here t is the number of the step, and u the number of updates of the variance v.

Notation: n elements, P parameters, k extras.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gcnzc.optim.flat_parameters import GroupSlice
from gcnzc.optim.synchronous.base import Replicated


class AdamStep(Replicated):
    """The base class of optimizers with Adam's momentum and variance.

    `vectors` has `momentum` and `variance` (n,), and `had_gradient` (P,) bool on the host: the
    parameters that have had a gradient. The others do not change.

    Args:
        params: see `Replicated`.
        defaults: see `Replicated`; they include `lr`, `betas`, `eps` and `weight_decay`.
        options: other options of `Replicated`.
    """

    bias_correction: bool
    """whether momentum and variance are corrected for their bias"""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], **options: Any) -> None:
        super().__init__(params, defaults, **options)
        flat_params = self.flat_params
        self.vectors = {"momentum": flat_params.zeros(), "variance": flat_params.zeros()}
        self.vectors["had_gradient"] = torch.zeros(len(flat_params.segments), dtype=torch.bool)

    def _update_moments(self, part: GroupSlice, values: Tensor, *, with_variance: bool) -> None:
        """Update the momenta, and the variance if `with_variance`, with the mean gradients."""
        here, (beta1, beta2) = slice(part.begin, part.end), part.group["betas"]
        gradient = values[here]
        self.vectors["momentum"][here].lerp_(gradient, 1 - beta1)
        if with_variance:
            variance = self.vectors["variance"][here]
            variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    def _step_size(self, part: GroupSlice) -> float:
        """Return the learning rate of the next step, with the bias correction of the momentum."""
        size = float(part.group["lr"])
        if self.bias_correction:
            size /= 1 - part.group["betas"][0] ** (self.steps + 1)
        return size

    def _compute_denominator(self, part: GroupSlice, num_updates: int | None, out: Tensor) -> None:
        """Write the denominator of Adam's update, sqrt(V) + eps, of a group slice into `out`.

        Args:
            part: the group slice.
            num_updates: the number of updates of its variance; None if `variance` is corrected for
                its bias already.
            out: (elements of the slice,), overwritten.
        """
        torch.sqrt(self.vectors["variance"][part.begin : part.end], out=out)
        if self.bias_correction and num_updates is not None:
            out /= (1 - part.group["betas"][1] ** num_updates) ** 0.5
        out += part.group["eps"]

    def _take_adam_step(self, part: GroupSlice, num_updates: int | None, values: Tensor) -> None:
        """Update the parameters of a group slice.

        Args:
            part: the group slice.
            num_updates: see `_compute_denominator`.
            values: (n + k,), overwritten.
        """
        options, momentum = part.group, self.vectors["momentum"]
        step_size, lr, decay = self._step_size(part), float(options["lr"]), options["weight_decay"]
        self._compute_denominator(part, num_updates, values[part.begin : part.end])
        had_gradient = self.vectors["had_gradient"].tolist()
        for index in range(part.first, part.last):
            if had_gradient[index]:
                segment = self.flat_params.segments[index]
                here, shape = slice(segment.begin, segment.end), segment.parameter.shape
                pair = momentum[here].view(shape), values[here].view(shape)
                self._move(segment.parameter, *pair, step_size, lr, decay)

    def _move(
        self,
        parameter: Tensor,
        momentum: Tensor,
        root: Tensor,
        step_size: float,
        lr: float,
        decay: float,
    ) -> None:
        parameter.mul_(1 - lr * decay)
        if parameter.dtype == momentum.dtype:
            parameter.addcdiv_(momentum, root, value=-step_size)
        else:
            parameter -= (momentum / root * step_size).to(parameter.dtype)
