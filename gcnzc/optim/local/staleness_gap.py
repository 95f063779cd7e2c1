"""The staleness gap, by which CO2 damps late outer steps (Sun et al. 2024, section 3.3)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

# of the usual distance, in the next one. On least squares in rounds of 48 steps the loss ended at
# 1.2 times that of means that are not late, but at 6.6 times with a mean over all rounds: this
# falls more slowly than the distances, and then holds nothing back
KEPT = 0.5


@dataclass
class Gap:
    """What a late difference is divided by: more, the further all have moved on since.

    Args:
        rule: "none" for 1; a number; "gap_aware" for 1 + distance / average distance; or a function
            of these two, which returns the divisor. Both are 0 until the parameters have moved.
            The average is exponential: half the last average and half the new distance, from
            the first distance that is not 0.
    """

    rule: str | float | Callable[[float, float], float]
    distance: float = 0.0
    """from where the round began whose mean is to come, to where the next one did; Euclidean"""
    usual: float = 0.0
    """a running mean of the distances that are not 0"""

    def __post_init__(self) -> None:
        is_known = self.rule in ("none", "gap_aware") or callable(self.rule)
        if not is_known and not (isinstance(self.rule, int | float) and self.rule > 0):
            raise ValueError(
                f"gap is {self.rule!r}\n\nhint: 'gap_aware', 'none', a divisor above 0, or a "
                "function of a distance and the usual distance"
            )

    @property
    def is_measured(self) -> bool:
        """Whether the divisor depends on distances."""
        return self.rule == "gap_aware" or callable(self.rule)

    def divisor(self) -> float:
        """Of the difference that has come now."""
        if callable(self.rule):
            return self.rule(self.distance, self.usual)
        if self.rule == "gap_aware":
            return 1 + self.distance / self.usual if self.usual else 1.0
        return 1.0 if isinstance(self.rule, str) else self.rule

    def steady(self) -> float:
        """The divisor while all distances are the same; infinite if that is not known."""
        if callable(self.rule):
            return math.inf
        return 2.0 if self.rule == "gap_aware" else self.divisor()

    def moved(self, distance: float) -> None:
        """Say how far the next round begins from where this one did."""
        self.distance = distance
        if distance:
            kept = KEPT if self.usual else 0.0
            self.usual = kept * self.usual + (1 - kept) * distance

    def __str__(self) -> str:
        return getattr(self.rule, "__qualname__", None) or str(self.rule)
