"""The schedule of 0/1 Adam: when ranks exchange, and when the variance is updated."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gcnzc.optim.defaults import WARMUP, ZERO_ONE

Exchange: TypeAlias = Literal["gradient", "update", "nothing"]


@dataclass(frozen=True)
class ZeroOneSchedule:
    """What is exchanged at which step. Steps count from 1; nothing depends on what was before."""

    warmup: int | None = WARMUP.steps
    """steps in which workers agree every time, as long as the step size grows; None for all"""
    variance_doubling: int = ZERO_ONE.variance_doubling
    """refreshes of the variance after which the steps between them double"""
    local_doubling: int = ZERO_ONE.local_doubling
    """steps after the warm-up after which the steps between agreements double"""
    longest: int = ZERO_ONE.longest
    """most steps between agreements: a power of two"""
    step_size: Callable[[int], float] | None = None
    """of a step: the steps between agreements then double as it halves, whatever `local_doubling`;
    the same on all workers"""
    goes_on: bool = False
    """whether the variance is refreshed after the warm-up too"""

    def __post_init__(self) -> None:
        if self.warmup is not None and self.warmup < 1:
            raise ValueError(
                f"a warm-up of {self.warmup} steps\n\nhint: the first step gives the variance; 1 or"
                " more, or None for no steps alone"
            )
        if min(self.variance_doubling, self.local_doubling) < 1:
            raise ValueError(
                f"intervals that double after {self.variance_doubling} refreshes and "
                f"{self.local_doubling} steps\n\nhint: 1 or more"
            )
        if self.longest < 1 or self.longest & (self.longest - 1):
            raise ValueError(f"at most {self.longest} steps alone\n\nhint: a power of two")

    @classmethod
    def for_run(
        cls, total_steps: int | None = None, warmup: int | str | None = "default"
    ) -> "ZeroOneSchedule":
        """The default schedule.

        Args:
            total_steps: of the run: of it the warm-up takes 0.15, and after each quarter the steps
                between agreements double. None if that is not known.
            warmup: steps, if not "default"; None for no local steps.
        """
        if isinstance(warmup, str):
            warmup = WARMUP.warmup_steps(total_steps)
        return cls(warmup, local_doubling=ZERO_ONE.local_doubling_steps(total_steps))

    def exchange(self, step: int) -> Exchange:
        """What workers tell one another at a step."""
        if self.refreshes(step):
            return "gradient"
        # before a refresh too: it takes the mean of gradients that were seen at the same place
        is_due = step % self.local_interval(step) == 0 or self.refreshes(step + 1)
        return "update" if is_due else "nothing"

    def refreshes(self, step: int) -> bool:
        """Whether the variance is refreshed at a step."""
        if self.warmup is not None and step > self.warmup and not self.goes_on:
            return False
        interval = self.variance_interval(step)
        return (step - 1 - self.variance_doubling * (interval - 1)) % interval == 0

    def variance_interval(self, step: int) -> int:
        """Steps between refreshes: 2^floor(j / variance_doubling) after refresh j, from 0."""
        # 2^i of them begin when variance_doubling (1 + 2 + ... + 2^(i - 1)) steps are over
        doublings = ((step - 1) // self.variance_doubling + 1).bit_length() - 1
        return 1 << doublings

    def local_interval(self, step: int) -> int:
        """Steps between agreements: those whose numbers it divides."""
        if self.warmup is None or step <= self.warmup:
            return 1
        if self.step_size is None:
            doublings = (step - self.warmup - 1) // self.local_doubling
        else:
            size, largest = self.step_size(step), self.step_size(self.warmup)
            halvings = math.log2(largest / size) if size > 0 and largest > 0 else math.inf
            # a half that was rounded is a half
            doublings = math.floor(max(0.0, min(halvings + 1e-9, 62.0)))
        return min(1 << min(doublings, 62), self.longest)

    def layout(self) -> str:
        """What tells a schedule from another, also where its function has no name."""
        seen = [(self.variance_interval(1 << i), self.local_interval(1 << i)) for i in range(24)]
        return f"warm-up {self.warmup}, goes on {self.goes_on}, intervals {seen}"
