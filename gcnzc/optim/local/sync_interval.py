"""The synchronization interval H of optimizers with local steps: fixed, or chosen by measurement.

A measured interval is the shortest one whose exchange takes at most a given fraction of the wall
time of the steps, and a given fraction of their CPU time. Both are limited because an exchange that
overlaps with the steps hides its latency, but still uses the CPU to compress and send.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gcnzc.exchange import Algorithm, AllGatherScalar

# H during the measurement
INITIAL_STEPS = 10
# steps that are not measured, and measured steps after them
WARM_UP, NUM_MEASURED = 5, 20
# largest fraction of the wall time of H steps that an exchange may take: if the ranks wait for it,
# and if it overlaps with the steps
MAX_SHARE, MAX_OVERLAP_SHARE = 0.05, 0.5
# largest fraction of the CPU time of H steps that an exchange may add; its effect on the steps is
# larger, because it also competes for caches and for the interpreter lock
MAX_CPU_SHARE = 0.025


@dataclass(frozen=True)
class Elapsed:
    """Wall time and CPU time of an interval, in seconds."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    @classmethod
    def median(cls, measured: Sequence["Elapsed"]) -> "Elapsed":
        """Return the medians; for an even number of values, the lower middle ones.

        The lower value is chosen because a first measurement may include compilation of kernels.
        """
        return cls(
            statistics.median_low(each.wall_s for each in measured),
            statistics.median_low(each.cpu_s for each in measured),
        )


@dataclass(frozen=True)
class Clocks:
    """Clocks that measure the steps and exchanges for `local_steps="auto"`, in seconds."""

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.process_time
    """CPU time of this process, over all threads"""

    def now(self) -> Elapsed:
        """Return the current values of both clocks."""
        return Elapsed(self.wall(), self.cpu())

    def since(self, then: Elapsed) -> Elapsed:
        """Return the time since an earlier result of `now`."""
        now = self.now()
        return Elapsed(now.wall_s - then.wall_s, now.cpu_s - then.cpu_s)


@dataclass
class SyncInterval:
    """The number H of local steps from one synchronization to the next.

    Args:
        requested: H, or "auto". "auto" measures `NUM_MEASURED` steps, and then sets the smallest H
            for which the exchange takes at most `share` of the wall time of H steps and adds at
            most `MAX_CPU_SHARE` to their CPU time.
        share: largest fraction of the wall time of H steps that their exchange may take;
            `MAX_OVERLAP_SHARE` if it overlaps with the steps.
        clocks: the clocks that measure steps and exchanges.

    Raises:
        ValueError: `requested` is neither a number of at least 1 nor "auto".
    """

    requested: int | str
    share: float = MAX_SHARE
    clocks: Clocks = Clocks()
    least: int = 1
    """lower limit of H if it is measured"""
    exchanges: int = 1
    """the number of exchanges in H steps"""
    steps: int = 0
    """the current H"""
    is_measuring: bool = False
    """whether H is not known yet"""
    counts_cpu_time: bool = True
    """whether CPU time limits H; False if the steps run on a GPU"""
    num_steps: int = 0
    """number of local steps since the start, including the `WARM_UP` that are not measured"""
    step_began: Elapsed | None = None
    """when the current step began; None without a measurement"""
    step_times: list[Elapsed] = field(default_factory=list)
    """the times of the measured steps"""
    exchange_times: list[Elapsed] = field(default_factory=list)
    """the times of the measured exchanges"""
    steps_per_exchange: int = 1
    """number of steps whose time, multiplied by `share`, covers one exchange, as measured"""

    def __post_init__(self) -> None:
        if self.requested != "auto" and not (
            isinstance(self.requested, int)
            and not isinstance(self.requested, bool)
            and self.requested >= 1
        ):
            raise ValueError(
                f"local_steps is {self.requested!r}\n\nhint: a number of steps from 1 on, or 'auto'"
            )
        self.is_measuring = self.requested == "auto"
        self.steps = INITIAL_STEPS if isinstance(self.requested, str) else self.requested

    def record_step(self) -> None:
        """Record that a local step has finished."""
        if self.is_measuring:
            self.num_steps += 1
            if self.step_began is not None and self.num_steps > WARM_UP:
                self.step_times.append(self.clocks.since(self.step_began))

    def time_exchange(self, exchange: Algorithm[Any]) -> Algorithm[Any]:
        """Run one exchange and return its result; record its time during the measurement."""
        began = self.clocks.now() if self.is_measuring else Elapsed()
        answer = yield from exchange
        if self.is_measuring and self.num_steps > WARM_UP:
            self.exchange_times.append(self.clocks.since(began))
        return answer

    def choose(self) -> Algorithm[None]:
        """Set H, equal on all ranks, once enough steps have been measured."""
        if self.is_measuring and self.num_steps >= WARM_UP + NUM_MEASURED:
            step, exchange = Elapsed.median(self.step_times), Elapsed.median(self.exchange_times)
            # the exchange time of the slowest rank, because the other ranks' include waiting for it
            step_s = max((yield AllGatherScalar(step.wall_s)))
            exchange_s = min((yield AllGatherScalar(exchange.wall_s)))
            work = statistics.median(
                (yield AllGatherScalar(exchange.cpu_s / max(step.cpu_s, 1e-9)))
            )
            hiding = exchange_s / max(step_s, 1e-9) / self.share
            needed = max(hiding, work / MAX_CPU_SHARE if self.counts_cpu_time else 0.0)
            # the tolerance keeps rounding errors of the clocks from adding a step
            self.steps = max(self.least, math.ceil(self.exchanges * needed - 1e-6))
            self.steps_per_exchange = max(1, math.ceil(hiding - 1e-6))
            self.is_measuring = False
        self.step_began = self.clocks.now() if self.is_measuring else None
