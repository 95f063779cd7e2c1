"""The staleness gap: the divisor of CO2's delayed outer gradients.

CO2 (Sun et al., 2024, https://arxiv.org/abs/2401.16265) divides delayed outer gradients by a gap.
The text of the paper was not available; the formula here is that of Barkai et al., "Gap-aware
mitigation of gradient staleness" (2020, https://arxiv.org/abs/1909.10802).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from gcnzc.optim.validation import check_range

# weight of the last average in the next one. On a least-squares problem with rounds of 48 steps,
# the final loss was 1.2 times that of synchronous means with this weight, and 6.6 times with an
# average over all rounds, which decreases more slowly than the distances and then damps too little
AVERAGE_DECAY = 0.5


@dataclass
class StalenessGap:
    """The divisor of a delayed mean difference; it grows with the distance moved in the meantime.

    Args:
        rule: "none" for 1; a number; "gap_aware" for 1 + distance / average distance; or a function
            of these two, which returns the divisor. Both are 0 until the parameters have moved.
            The average is exponential: half the last average and half the new distance, from
            the first distance that is not 0.
    """

    rule: str | float | Callable[[float, float], float]
    distance: float = 0.0
    """Euclidean distance from the start of the round whose mean is pending to the next start"""
    average: float = 0.0
    """exponential moving average of the distances that are not 0"""

    def __post_init__(self) -> None:
        is_known = self.rule in ("none", "gap_aware") or callable(self.rule)
        if not is_known:
            check_range(
                "gap",
                self.rule,
                lambda divisor: 0 < divisor < math.inf,
                "'gap_aware', 'none', a finite divisor above 0, or a function of a distance and "
                "the average distance",
            )

    @property
    def is_measured(self) -> bool:
        """Whether the divisor depends on distances."""
        return self.rule == "gap_aware" or callable(self.rule)

    def divisor(self) -> float:
        """Return the divisor of the current difference."""
        if callable(self.rule):
            return self.rule(self.distance, self.average)
        if self.rule == "gap_aware":
            return 1 + self.distance / self.average if self.average else 1.0
        return 1.0 if isinstance(self.rule, str) else self.rule

    def steady_divisor(self) -> float:
        """Return the divisor when all distances are equal; infinity if it is not known."""
        if callable(self.rule):
            return math.inf
        return 2.0 if self.rule == "gap_aware" else self.divisor()

    def may_diverge(self, outer_lr: float, momentum: float, eager: float) -> bool:
        """Return whether CO2 diverges in the limit of long rounds, at constant distances.

        In this limit the end of a round does not depend on its start. Let k be outer_lr / divisor,
        m the momentum and e `eager`. The error x of the ranks' mean at the start of round r is then

            x[r + 3] = (1 + m - e) x[r + 2] - (k + m - e (1 + m)) x[r + 1] - e m x[r]

        By Jury's criterion it decreases if |k + m - e (1 - m^2) - e^2 m| < 1 - e^2 m^2. For e = 0
        this is k + m < 1.
        """
        pull = outer_lr / self.steady_divisor()
        change = abs(pull + momentum - eager * (1 - momentum**2) - eager**2 * momentum)
        return change >= 1 - (eager * momentum) ** 2

    def update(self, distance: float) -> None:
        """Record the Euclidean distance between the starts of this round and of the next one."""
        self.distance = distance
        if distance:
            kept = AVERAGE_DECAY if self.average else 0.0
            self.average = kept * self.average + (1 - kept) * distance

    def __str__(self) -> str:
        return getattr(self.rule, "__qualname__", None) or str(self.rule)
