"""Detect when Adam's variance is stable, so that 1-bit Adam may freeze it.

Tang et al. (2021) freeze when the variance's L1 norm is at least 0.96 times its value 1 / (1 -
beta2) steps earlier. This also holds while the norm still grows. Here the ratio must therefore be
near 1 from both sides for several checks, because a run whose variance is frozen too early does not
recover.
"""

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class FreezeRule:
    """Decides when to freeze the variance.

    The variance is equal on all ranks, so all ranks make the same decision.
    """

    beta2: float
    least: int = 0
    """number of steps before the first check, such as those of a learning rate warm-up"""
    most: int | None = None
    """largest number of steps before the freeze; None for no limit"""
    tolerance: float = 0.04
    """largest difference of the ratio from 1"""
    patience: int = 2
    """number of consecutive checks with a ratio within the tolerance"""
    norms: list[float] = field(default_factory=list)
    """L1 norm of the variance at each check"""

    @property
    def interval(self) -> int:
        """Steps between checks: 1 / (1 - beta2), the averaging period of the variance."""
        return max(1, round(1 / (1 - self.beta2)))

    def is_due(self, step: int) -> bool:
        """Return whether to check the norm after a step, counted from 1."""
        return step % self.interval == 0 and step >= self.least

    def should_freeze(self, step: int, norm: float | None) -> bool:
        """Return whether to freeze the variance after a step.

        Args:
            step: the number of the step, counted from 1.
            norm: L1 norm of the bias-corrected variance if `is_due(step)`, else None.
        """
        if norm is not None:
            self.norms.append(norm)
        if self.most is not None and step >= self.most:
            return True
        if norm is None or len(self.norms) <= self.patience:
            return False
        last = self.norms[-self.patience - 1 :]
        return all(old > 0 and abs(new / old - 1) <= self.tolerance for old, new in pairwise(last))
