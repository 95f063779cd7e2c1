"""The number H of local steps from one exchange to the next: fixed, or chosen by measurement.

A measured H is the smallest one whose exchange takes at most a given fraction of the wall time of
the steps, and a given fraction of their CPU time. Both are limited because an exchange that
overlaps with the steps hides its latency, but still uses the CPU to compress and send.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gcnzc.exchange import Algorithm, AllGatherScalar
from gcnzc.optim.state import scalar
from gcnzc.optim.validation import check_count

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


class Elapsed(NamedTuple):
    """Wall time and CPU time, in seconds."""

    wall_s: float = 0.0
    cpu_s: float = 0.0


def median(measured: Sequence[Elapsed]) -> Elapsed:
    """Return the medians, the lower ones because a first measurement may include compilation."""
    return Elapsed(*map(statistics.median_low, zip(*measured, strict=True)))


@dataclass(frozen=True)
class Clocks:
    """Clocks that measure the steps and exchanges for `local_steps="auto"`, in seconds."""

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.process_time
    """CPU time of this process, over all threads"""

    def since(self, then: Elapsed = Elapsed()) -> Elapsed:  # noqa: B008 - it cannot change
        """Return the time since an earlier result of `since()`."""
        return Elapsed(self.wall() - then.wall_s, self.cpu() - then.cpu_s)


class SyncInterval:
    """The number H of local steps from one exchange to the next.

    Args:
        requested: H, or "auto". "auto" measures `NUM_MEASURED` steps, and then sets the smallest H
            for which the exchanges take at most `share` of the wall time of H steps and add at most
            `MAX_CPU_SHARE` to their CPU time.
        share: the largest fraction of the wall time of H steps that their exchanges may take.
        clocks: the clocks that measure steps and exchanges.
    """

    state_prefix = "interval"
    measured: int = scalar()
    """H as measured, equal on all ranks; 0 if it is not measured yet"""
    steps_per_exchange: int = scalar(1)
    """the number of steps whose time, multiplied by `share`, covers one exchange, as measured"""
    num_exchanges = 1
    """the number of exchanges in H steps"""
    least = 1
    """the lower limit of a measured H"""
    counts_cpu_time = True
    """whether CPU time limits H; False if the steps run on a GPU"""

    def __init__(self, requested: int | str, share: float, clocks: Clocks) -> None:
        if requested != "auto":
            check_count("local_steps", requested, 1)
        self.requested, self.share, self.clocks = requested, share, clocks
        self.measured = 0
        self._num_steps, self._step_began = 0, Elapsed()
        self._step_times: list[Elapsed] = []
        self._exchange_times: list[Elapsed] = []

    @property
    def is_measuring(self) -> bool:
        """Whether H is not known yet."""
        return isinstance(self.requested, str) and not self.measured

    @property
    def steps(self) -> int:
        """The current H."""
        if isinstance(self.requested, str):
            return self.measured or INITIAL_STEPS
        return self.requested

    def record_step(self) -> None:
        """Record that a local step has finished."""
        if self.is_measuring:
            self._num_steps += 1
            if self._num_steps > WARM_UP:
                self._step_times.append(self.clocks.since(self._step_began))

    def time_exchange(self, exchange: Algorithm[Any]) -> Algorithm[None]:
        """Run an exchange; record its time during the measurement."""
        began = self.clocks.since() if self.is_measuring else Elapsed()
        yield from exchange
        if self.is_measuring and self._num_steps > WARM_UP:
            self._exchange_times.append(self.clocks.since(began))

    def choose(self) -> Algorithm[None]:
        """Set H, equal on all ranks, once enough steps have been measured."""
        if not self.is_measuring:
            return
        if self._num_steps >= WARM_UP + NUM_MEASURED:
            step, exchange = median(self._step_times), median(self._exchange_times)
            # the exchange time of the slowest rank, because the other ranks' include waiting for it
            step_s = max((yield AllGatherScalar(step.wall_s)))
            exchange_s = min((yield AllGatherScalar(exchange.wall_s)))
            works = yield AllGatherScalar(exchange.cpu_s / max(step.cpu_s, 1e-9))
            hiding = exchange_s / max(step_s, 1e-9) / self.share
            work = statistics.median(works) / MAX_CPU_SHARE if self.counts_cpu_time else 0.0
            # the tolerance keeps rounding errors of the clocks from adding a step
            needed = math.ceil(self.num_exchanges * max(hiding, work) - 1e-6)
            self.measured = max(self.least, needed)
            self.steps_per_exchange = max(1, math.ceil(hiding - 1e-6))
        self._step_began = self.clocks.since()
