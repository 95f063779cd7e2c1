"""0/1 Adam as DeepSpeed 0.19.6 has it, to the bit: what its trajectories are compared with.

It differs from the paper, and from `ZeroOneAdam`, so much that it shares no lines with them. Until
the variance freezes, signs of gradients are exchanged between refreshes, and momenta are always the
same on all workers. After that the sum u of the steps themselves is exchanged, weight decay and
all, times the root of the variance; parameters get back to where all were by subtracting u, which
leaves them as different as rounding does.

    refresh   v <- b2 v + (1 - b2) g^2       g: the mean gradient
    before    m <- b1 m + (1 - b1) g         g: the mean gradient, or what its signs make of it
              x <- x - lr (m / (sqrt(v) + eps) + weight_decay x)
    alone     the same with this worker's g, and u <- u - lr (m / (sqrt(v) + eps) + weight_decay x)
    agreed    x <- x - u       u <- compressed mean of u (sqrt(v) + eps)
              m <- -u / sum of lr            x <- x + u / (sqrt(v) + eps)

Its first call counts as a step and changes nothing: set `steps` to 1, and pass over a minibatch.

Letters: n elements.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from gcnzc.compress.padded_sign import PaddedSign
from gcnzc.exchange import Algorithm, Group
from gcnzc.optim.replicated import Replicated


@dataclass(frozen=True)
class DeepSpeedSchedule:
    """What DeepSpeed exchanges at which step; steps count from 1, of which the first is idle."""

    freeze: int = 100_000
    """`var_freeze_step`: the variance freezes after the step after this one"""
    variance_doubling: int = 16
    """`var_update_scaler`: refreshes after which the steps between them double"""
    local_doubling: int = 32_678
    """`local_step_scaler`: steps after which the steps between agreements double"""
    longest: int = 16
    """`local_step_clipper`: most steps between agreements"""

    def is_frozen(self, step: int) -> bool:
        """Whether workers take this step alone, before they may agree."""
        return step > self.freeze + 1

    def refreshes(self, step: int) -> bool:
        """Whether the variance is refreshed, if it is not frozen."""
        interval, last = 1, self.variance_doubling + 1
        while step > last:
            interval *= 2
            # the first multiple after the last refresh, and as many as before
            last = (last // interval + self.variance_doubling) * interval
        return step % interval == 0

    def agrees(self, step: int) -> bool:
        """Whether workers agree after a step that they took alone."""
        doublings = (step - self.freeze - 2) // self.local_doubling
        return step % min(1 << min(doublings, 62), self.longest) == 0


class ZeroOneAdamDeepSpeed(Replicated):
    """For comparisons with DeepSpeed alone: it has none of the guards, and is not resumed.

    Args:
        params: as torch's optimizers take them, of one dtype, in one group.
        lr: step size.
        betas: of the averages of gradients and of their squares.
        eps: added to the root of the variance.
        weight_decay: share of a parameter that is taken off it for each unit of `lr`.
        schedule: what is exchanged when.
        group: of all workers; None for those of torch.distributed as it was initialised.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        schedule: DeepSpeedSchedule | None = None,
        group: Group | None = None,
    ) -> None:
        self.schedule = schedule or DeepSpeedSchedule()
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, group)
        names = ("momentum", "variance", "update")
        self.vectors = {name: self.space.zeros() for name in names}
        lengths = tuple(each.end - each.begin for each in self.space.segments)
        self.signs = PaddedSign(lengths)
        self.reducers = {"signs": self.reducer(self.signs, self.space.num_elements)}
        self.length = 0.0
        """sum of step sizes since all agreed"""

    @torch.no_grad()
    def advance(self, values: Tensor) -> Algorithm[str]:
        """See `Replicated`."""
        schedule, step = self.schedule, self.steps + 1
        is_alone, signs = schedule.is_frozen(step), self.reducers["signs"]
        refreshes = not is_alone and schedule.refreshes(step)
        if is_alone and not schedule.is_frozen(step - 1):
            # what is left out of updates is no continuation of what was left out of gradients
            signs = self.reducers["signs"] = self.reducer(self.signs, self.space.num_elements)
        if refreshes:
            blame = yield from self.dense_mean(values)
        elif not is_alone:
            blame = yield from signs.mean(values)
        else:
            blame = ""
        if blame:
            return blame
        agrees = is_alone and schedule.agrees(step)
        self.length += float(self.param_groups[0]["lr"])
        # each tensor by itself: where a vector ends, some processors round otherwise
        vectors = map(self.space.views, self._with(values))
        tensors = list(zip(self.space.parameters, *vectors, strict=True))
        for parameter, gradient, momentum, variance, update in tensors:
            if refreshes:
                beta2 = self.param_groups[0]["betas"][1]
                variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            change = self._change(parameter, gradient, momentum, variance)
            parameter += change
            if is_alone:
                update += change
            if agrees:
                parameter -= update
                update *= self._root(variance)
        if agrees:
            if blame := (yield from signs.mean(self.vectors["update"])):
                return blame
            for parameter, _, momentum, variance, update in tensors:
                torch.div(update, -self.length, out=momentum)
                parameter += update / self._root(variance)
                update.zero_()
        if agrees or not is_alone:
            self.length = 0.0
        return ""

    def _with(self, values: Tensor) -> tuple[Tensor, ...]:
        return (values, *(self.vectors[name] for name in ("momentum", "variance", "update")))

    def _change(
        self, parameter: Tensor, gradient: Tensor, momentum: Tensor, variance: Tensor
    ) -> Tensor:
        """What a step adds to a parameter; the momentum moves on."""
        group = self.param_groups[0]
        beta1 = group["betas"][0]
        momentum.mul_(beta1).add_(gradient, alpha=1 - beta1)
        step = momentum / self._root(variance) + group["weight_decay"] * parameter
        return -group["lr"] * step

    def _root(self, variance: Tensor) -> Tensor:
        return variance.sqrt() + self.param_groups[0]["eps"]

    def state_dict(self) -> NoReturn:
        """Refuse: a comparison is not resumed."""
        raise RuntimeError("it has no state to keep\n\nhint: train with ZeroOneAdam")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> NoReturn:
        """Refuse: a comparison is not resumed."""
        self.state_dict()
