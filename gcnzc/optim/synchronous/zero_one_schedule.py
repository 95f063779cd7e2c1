"""The schedule of 0/1 Adam: when ranks exchange, and when the variance is updated."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gcnzc.optim.defaults import WARMUP, ZERO_ONE
from gcnzc.optim.validation import check_count
from gcnzc.system.arguments import check_callable, check_flag

Exchange: TypeAlias = Literal["gradient", "update", "nothing"]


@dataclass(frozen=True)
class ZeroOneSchedule:
    """The schedule of 0/1 Adam: what is exchanged at each step, counted from 1.

    In the warm-up the ranks exchange gradients or updates at every step. After it they synchronize
    their updates every 1, 2, 4, ... steps, up to `max_local_interval`, and take local steps in
    between. The interval doubles after every `local_doubling` steps, so that the first of them have
    no local step. The schedule depends only on the number of the step.

    Raises:
        ValueError: an option is out of range.
        TypeError: `step_size` is not a function, or `updates_variance_after_warmup` is not a flag.
    """

    warmup: int | None = WARMUP.steps
    """number of first steps that all exchange; should cover a learning rate warm-up; None for no
    local steps at all"""
    variance_doubling: int = ZERO_ONE.variance_doubling
    """number of variance updates after which the interval between them doubles"""
    local_doubling: int = ZERO_ONE.local_doubling
    """number of steps after which the synchronization interval doubles, after the warm-up"""
    max_local_interval: int = ZERO_ONE.max_local_interval
    """largest synchronization interval, in steps; a power of two"""
    step_size: Callable[[int], float] | None = None
    """returns the learning rate of a step, equal on all ranks. If given, the synchronization
    interval doubles each time the learning rate halves, and `local_doubling` has no effect."""
    updates_variance_after_warmup: bool = False
    """whether the variance is also updated after the warm-up"""

    def __post_init__(self) -> None:
        if self.warmup is not None:
            # the first step initializes the variance
            check_count("warmup", self.warmup, 1)
        check_count("variance_doubling", self.variance_doubling, 1)
        check_count("local_doubling", self.local_doubling, 1)
        check_count("max_local_interval", self.max_local_interval, 1)
        if self.max_local_interval & (self.max_local_interval - 1):
            raise ValueError(
                f"max_local_interval is {self.max_local_interval}\n\nhint: give a power of two"
            )
        check_callable("step_size", self.step_size)
        check_flag("updates_variance_after_warmup", self.updates_variance_after_warmup)

    @classmethod
    def for_run(
        cls, total_steps: int | None = None, warmup: int | str | None = "default"
    ) -> "ZeroOneSchedule":
        """Return the default schedule.

        Args:
            total_steps: the number of steps of the run. The warm-up is 0.15 of it, and the
                synchronization interval doubles after each quarter of it. If None, the warm-up is
                100 steps, and the interval doubles every 100 steps.
            warmup: the number of warm-up steps if not "default"; None for no local steps.
        """
        if total_steps is not None:
            check_count("total_steps", total_steps, 1)
        if isinstance(warmup, str):
            if warmup != "default":
                raise ValueError(
                    f"warmup is {warmup!r}\n\nhint: give a number of steps, 'default', or None for "
                    "no local steps"
                )
            warmup = WARMUP.warmup_steps(total_steps)
        return cls(warmup, local_doubling=ZERO_ONE.local_doubling_steps(total_steps))

    def exchange(self, step: int) -> Exchange:
        """Return what is exchanged at a step: "gradient", "update" or "nothing"."""
        if self.updates_variance(step):
            return "gradient"
        # also before a variance update, which needs all ranks' gradients at the same parameters
        is_due = step % self.local_interval(step) == 0 or self.updates_variance(step + 1)
        return "update" if is_due else "nothing"

    def updates_variance(self, step: int) -> bool:
        """Return whether the variance is updated at a step."""
        if (
            self.warmup is not None
            and step > self.warmup
            and not self.updates_variance_after_warmup
        ):
            return False
        interval = self.variance_interval(step)
        return (step - 1 - self.variance_doubling * (interval - 1)) % interval == 0

    def variance_interval(self, step: int) -> int:
        """Return the steps to the next variance update.

        After update j, counted from 0, it is 2^floor(j / variance_doubling).
        """
        # the interval 2^i begins after variance_doubling (1 + 2 + ... + 2^(i - 1)) steps
        doublings = ((step - 1) // self.variance_doubling + 1).bit_length() - 1
        return 1 << doublings

    def local_interval(self, step: int) -> int:
        """Return the synchronization interval; steps that are its multiples synchronize."""
        if self.warmup is None or step <= self.warmup:
            return 1
        if self.step_size is None:
            doublings = (step - self.warmup - 1) // self.local_doubling
        else:
            size, largest = self.step_size(step), self.step_size(self.warmup)
            halvings = math.log2(largest / size) if size > 0 and largest > 0 else math.inf
            # the tolerance makes rounded halves count
            doublings = math.floor(max(0.0, min(halvings + 1e-9, 62.0)))
        return min(1 << min(doublings, 62), self.max_local_interval)

    def layout(self) -> str:
        """Return a string that identifies the schedule, including the effect of `step_size`."""
        seen = [(self.variance_interval(1 << i), self.local_interval(1 << i)) for i in range(24)]
        return (
            f"warm-up {self.warmup}, variance updates after it "
            f"{self.updates_variance_after_warmup}, intervals {seen}"
        )
