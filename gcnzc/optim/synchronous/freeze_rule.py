"""Detect when Adam's variance has settled and may be frozen.

Tang et al. (2021) freeze when the variance's L1 norm is at least 0.96 times what it was 1 / (1 -
beta2) steps before. That also holds while the norm still grows, so here the ratio must be near 1
from both sides, and stay there: a run whose variance is frozen too early does not recover.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass
class FreezeRule:
    """Says at each step whether to freeze; the same on all workers, whose variances are."""

    beta2: float
    least: int = 0
    """steps before the first look: those in which the step size grows"""
    most: int | None = None
    """steps after which to freeze in any case; None for no limit"""
    tolerance: float = 0.04
    """how far the ratio may be from 1"""
    patience: int = 2
    """looks in a row that must find it so near"""
    norms: list[float] = field(default_factory=list)
    """of the variance, at each look"""

    @property
    def interval(self) -> int:
        """Steps between looks: what the variance is an average over."""
        return max(1, round(1 / (1 - self.beta2)))

    def is_due(self, step: int) -> bool:
        """Whether the norm is asked for after a step, counted from 1."""
        return step % self.interval == 0 and step >= self.least

    def wants(self, step: int, norm: float | None) -> bool:
        """Whether to freeze after a step.

        Args:
            step: counted from 1.
            norm: L1 norm of the variance without bias, where `is_due`.
        """
        if norm is not None:
            self.norms.append(norm)
        if self.most is not None and step >= self.most:
            return True
        if norm is None or len(self.norms) <= self.patience:
            return False
        last = self.norms[-self.patience - 1 :]
        return all(old > 0 and abs(new / old - 1) <= self.tolerance for old, new in pairwise(last))

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"norms": list(self.norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self.norms = list(state["norms"])
