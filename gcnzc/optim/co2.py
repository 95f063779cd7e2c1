"""CO2: rounds of local steps; the exchange of a round overlaps with the next round.

    x_i <- s_r - e d_i                               start of round r on rank i; d_i of round r - 1
    x_i <- x_i - InnerOpt(gradient of rank i)        H local steps
    d_i <- the decrease of x_i in these steps        exchanged during round r + 1
    d   <- mean_i d_i / g                            of round r - 1, whose exchange finishes now
    b   <- clip(m b + d)                             every element to [-c, c]
    s   <- s_r - lr b                                start of round r + 1

after Sun et al., "CO2: efficient distributed training with full communication-computation overlap"
(2024, https://arxiv.org/abs/2401.16265), which has e = 0. The mean of a round is applied
one round late, so training may diverge with a large momentum or in long rounds. A small momentum
and the gap g make this less likely, and `CO2` warns of it; the clip c bounds each step. The last
two lines depend only on earlier rounds, so they overlap with the local steps too.

The text of the paper was not available when this was written. Two details are therefore not
verified against it: its staleness gap, equation (3), for which the gap of Barkai et al., "Gap-aware
mitigation of gradient staleness" (2020, https://arxiv.org/abs/1909.10802), is used; and that the
first two rounds have the same start s, because no mean is available after the first. The divisor in
the authors' code (https://github.com/weigao266/fairscale-CO2, commit 55aaca5) is a constant.

With e > 0, a rank applies this fraction of its own last outer gradient d_i at once, until the mean
replaces it. A gap is then not needed. Kale et al. (2025, https://arxiv.org/abs/2502.12996) apply
such eager updates to DiLoCo; the text was not available, so details may differ.

Notation: W ranks, n elements, p those of this rank: all, or its shard; H steps of a round.
"""

import math
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm, AllGather, AllGatherScalar
from gcnzc.optim.defaults import CO2 as DEFAULTS
from gcnzc.optim.defaults import EAGER
from gcnzc.optim.local_method import (
    AT_NEXT_START,
    Fragment,
    LocalMethod,
    has_exchanges,
    outer_vector,
)
from gcnzc.optim.options import option
from gcnzc.optim.sharded import padded_size
from gcnzc.optim.state import OWN, scalar, vector
from gcnzc.optim.validation import (
    check_above_zero,
    check_at_least_zero,
    check_count,
    check_fraction,
)

# weight of the last average distance in the next one. On a least-squares problem with rounds of 48
# steps, the final loss was 1.2 times that of synchronous means with this weight, and 6.6 times with
# an average over all rounds, which decreases more slowly than the distances and damps too little
AVERAGE_DECAY = 0.5
# number of steps above which a large momentum was harmful on a least-squares problem
LONG_ROUND = 20


class CO2(LocalMethod):
    """CO2: rounds of local steps whose exchange overlaps with the next round.

    After the last step of a round the parameters are bitwise equal on all ranks, unless `eager` is
    above 0. Signals are sent at the end of a round, and received when its mean is applied. A rank
    whose parameters or difference are not finite or too large at the end of a round is excluded
    from its mean. If there is no mean, the start s does not change. A single rank only takes the
    inner optimizer's steps.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        local_steps: H, or "auto"; see `LocalMethod`.
        outer_lr: the learning rate of the outer optimizer.
        outer_momentum: m, the momentum of the outer optimizer. With a delay, use values above the
            default only with short rounds.
        gap: g, the divisor of delayed differences: "none" for 1; a number; "gap_aware" for 1 +
            distance / average distance, where the distance is Euclidean, from the start of the
            round whose mean is pending to the next start, and the average is exponential; or a
            function of these two numbers. Both are 0 until the parameters have moved. If None, it
            is "none" if `eager` is above 0, else "gap_aware".
        clip: c, the largest absolute value of an element of the momentum, in units of the
            parameters; None for no limit.
        delay: the number of rounds that overlap with an exchange: 1; or 0 to wait for it at once,
            which is SlowMo if gap="none" and clip=None. All distances then count as 0.
        eager: e, in [0, 1). A value above 0 requires a delay and memory for one more
            vector, and works best with gap="none". If None, it is 0.5 with a delay and 0 without.
            The published method has no eager updates: eager=0.
        options: the other options of `LocalMethod`: `compress` of the exchanged differences,
            `sharded` for the vectors of the outer optimizer, and so on.

    Raises:
        ValueError: an option is out of range, options contradict each other, or options, or shapes
            or dtypes of parameters, differ between ranks.
    """

    local_steps: Any = option(DEFAULTS.local_steps)
    outer_lr: float = option(DEFAULTS.outer_lr, check_at_least_zero)
    outer_momentum: float = option(DEFAULTS.outer_momentum, check_fraction)
    gap: Any = option(None)
    clip: float | None = option(1.0, check_above_zero, is_optional=True)
    delay: int = option(1, partial(check_count, most=1), is_saved=True)
    eager: Any = option(None, check_fraction, is_saved=True)

    common_start: Tensor = outer_vector()
    """(p,): s, the common start of the current round"""
    momentum: Tensor = outer_vector()
    """(p,): b, the outer momentum"""
    own: Tensor = vector(exists=has_exchanges, when=lambda own: own.eager > 0, **OWN)
    """(n,): with eager updates, this rank's parameters at the start of the current round"""
    distance: float = scalar(0.0)
    """from the start of the round whose mean is pending to the next start"""
    average: float = scalar(0.0)
    """exponential moving average of the distances that are not 0"""
    _before: Tensor | None = None
    """(p,): the start of the round that is being exchanged, if whole parameters are sent because
    this rank has only a shard of it"""

    def configure(self) -> None:
        """See `DistributedOptimizer`."""
        if self.eager is None:
            self.eager = EAGER if self.delay else 0.0
        if self.eager and not self.delay:
            raise ValueError(f"eager is {self.eager}, with a delay of 0\n\nhint: omit one of them")
        if self.gap is None:
            # delayed means are divided by a gap so that training does not diverge; eager updates
            # make it unnecessary
            self.gap = "none" if self.eager else "gap_aware"
        if not (self.gap in ("none", "gap_aware") or callable(self.gap)):
            check_above_zero("gap", self.gap)
        self.delay_steps = AT_NEXT_START if self.delay else 0
        super().configure()
        self._warn_of_momentum()

    # --- the algorithm

    def restart(self) -> None:
        """See `LocalMethod`: at the end of the next round, its start is that of the round after."""
        (fragment,) = self.fragments
        self.common_start, self.distance = self.own_part(self.parameters), 0.0
        if self.eager:
            self.own = self.parameters
        if self.delay:
            fragment.mean, fragment.due = self.parameters, AT_NEXT_START

    def read(self, fragment: Fragment, out: Tensor) -> None:
        """See `LocalMethod`: the start minus the parameters, or the parameters if it is sharded."""
        super().read(fragment, out)
        if self.eager:
            torch.sub(self.own, out, out=out)
        elif not self.sharded:
            torch.sub(self.common_start, out, out=out)
        else:
            self._before = self.common_start

    def compute(
        self, fragment: Fragment, mean: Tensor | None, out: Tensor
    ) -> Algorithm[Tensor | None]:
        """See `LocalMethod`: the start of the next round; without a mean, it does not change."""
        before, self._before = self._before, None
        if mean is not None:
            difference = mean if before is None else before - mean
            momentum = difference.div(self.divisor()).add_(self.momentum, alpha=self.outer_momentum)
            # before clipping, which makes infinite elements finite; a shard may be empty
            largest = float(momentum.abs().amax()) if len(momentum) else 0.0
            if self.clip is not None:
                momentum.clamp_(-self.clip, self.clip)
            moved = self.outer_lr * float(torch.linalg.vector_norm(momentum))
            start = torch.sub(self.common_start, momentum, alpha=self.outer_lr)
            distance = moved if math.isfinite(largest) else largest
            moved = yield from self._gather_start(start, distance, out)
            if math.isfinite(moved):
                self.momentum.copy_(momentum)
                self._record_distance(moved)
                return out
            fragment.note = "synchronization skipped: the mean overflows"
        yield from self._gather_start(self.common_start, 0.0, out)
        self._record_distance(0.0)
        return out

    def _gather_start(self, part: Tensor, moved: float, out: Tensor) -> Algorithm[float]:
        """Write the start of the next round, gathered from all ranks if sharded, into `out`.

        Args:
            part: (p,), the elements of this rank.
            moved: the Euclidean distance of these elements from the last start, or not finite.
            out: (n,).

        Returns:
            `moved` of all elements; equal on all ranks if the state is sharded or the gap needs it.
        """
        if not self.sharded:
            out.copy_(part)
            # ranks may round the norm differently, but must use the same gap
            has_distances = self.gap == "gap_aware" or callable(self.gap)
            return max((yield AllGatherScalar(moved))) if has_distances else moved
        size = padded_size(len(out), self.group.world_size) // self.group.world_size
        sent = part.new_zeros(size + 1)
        sent[: len(part)] = part
        sent[size] = moved
        rows = yield AllGather(sent)
        out.copy_(rows[:, :size].reshape(-1)[: len(out)])
        return math.hypot(*rows[:, size].tolist())

    def apply(self, fragment: Fragment, mean: Tensor) -> None:
        """See `LocalMethod`: begin the next round at the result of `compute`."""
        self.common_start = self.own_part(mean)
        self.set_parameters(fragment, mean)

    def on_start(self, fragment: Fragment, sent: Tensor) -> None:
        """See `LocalMethod`: apply a fraction of the difference to the common start."""
        if self.eager:
            self.flat.read_parameters(self.own).sub_(sent, alpha=self.eager)
            self.flat.write_parameters(self.own)
            self.is_in_sync = False

    def load_alone(self) -> None:
        """See `LocalMethod`: move from the start of this round to that of the next one."""
        (fragment,) = self.fragments
        if fragment.mean is not None:
            # an eager rank has a start of its own
            moved = fragment.mean - (self.own if self.eager else self.common_start)
            self.parameters = self.parameters.add_(moved)

    # --- the staleness gap

    def divisor(self) -> float:
        """Return g, the divisor of the current difference."""
        if callable(self.gap):
            return self.gap(self.distance, self.average)
        if self.gap == "gap_aware":
            return 1 + self.distance / self.average if self.average else 1.0
        return 1.0 if self.gap == "none" else float(self.gap)

    def _record_distance(self, moved: float) -> None:
        """Record the Euclidean distance between the starts of this round and of the next one."""
        self.distance = moved if self.delay else 0.0
        if self.distance:
            kept = AVERAGE_DECAY if self.average else 0.0
            self.average = kept * self.average + (1 - kept) * self.distance

    def _warn_of_momentum(self) -> None:
        """Warn if the momentum may make training diverge; a measured H is not known yet."""
        steps, momentum = self.local_steps, self.outer_momentum
        is_large = momentum > 0.5 or steps > LONG_ROUND
        if self.delay and not self.is_inner_only and is_large and self.may_diverge():
            warnings.warn(
                f"CO2: with outer_momentum={momentum} and gap={self.gap}, means delayed by "
                f"one round of {steps} steps may make training diverge; outer_momentum=0.2 with "
                "gap='gap_aware' or eager=0.5 is safer, or shorter rounds",
                stacklevel=5,
            )

    def may_diverge(self) -> bool:
        """Return whether CO2 diverges in the limit of long rounds, at constant distances.

        In this limit the end of a round does not depend on its start. Let k be outer_lr / g, m the
        momentum and e `eager`. The error x of the ranks' mean at the start of round r is then

            x[r + 3] = (1 + m - e) x[r + 2] - (k + m - e (1 + m)) x[r + 1] - e m x[r]

        By Jury's criterion it decreases if |k + m - e (1 - m^2) - e^2 m| < 1 - e^2 m^2. For e = 0
        this is k + m < 1. The divisor of a function is taken to be infinite.
        """
        if callable(self.gap):
            k = 0.0
        else:
            k = self.outer_lr / (2.0 if self.gap == "gap_aware" else self.divisor())
        m, e = self.outer_momentum, self.eager
        return abs(k + m - e * (1 - m**2) - e**2 * m) >= 1 - (e * m) ** 2
