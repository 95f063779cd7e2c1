"""When a rank stops the micro-batches of a step: at a given threshold, or at a measured one.

A rank that stops at a threshold discards samples, but the other ranks wait less for it. "auto"
measures some steps without a threshold. The ranks then gather their times, and choose the threshold
of the largest effective speed: the number of samples that all ranks compute per second, relative to
that without a threshold (arXiv 2306.10598, equation 6, https://arxiv.org/abs/2306.10598). If more
is dropped later than the limit permits, for example because other programs use the machines, the
measurement begins again.

Notation: W ranks, S measured steps, M micro-batches of 2 parts, the forward and the backward pass.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from gcnzc.exchange import Algorithm, AllGather, Compute, Now
from gcnzc.system.streams import clock_of

# first and last step that is measured, counted from 1; earlier ones compile kernels
CALIBRATION = (6, 50)
# largest fraction of the micro-batches that a measured threshold may drop
MAX_DROPPED = 0.1
# a new measurement begins if more than this multiple of `max_dropped` is dropped
TOLERANCE = 1.5
# number of thresholds that are compared
CANDIDATES = 200
# passes whose kernels may be queued on a GPU when the host waits for an earlier one
GPU_DELAY = 1


class Timestamp(Protocol):
    """A point in the time of a device, or in virtual time."""

    def seconds_to(self, later: Any) -> float:
        """Return the seconds to a later point; synchronizes with it."""


class ComputeClock:
    """Records the times of the micro-batches of a step on a device.

    The CPU's clock is `time.perf_counter`. On a GPU, an event is recorded on the current stream.

    Args:
        device: the device that computes the micro-batches.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.delay = GPU_DELAY if device.type == "cuda" else 0
        """the number of timed passes whose end is not known when the next one begins. It is 0 on
        the CPU. With 1 on a GPU, the host waits for an event while the GPU still has the kernels of
        one pass, so that the GPU does not become idle"""
        self._record: Callable[[], Timestamp] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that are copied and pickled: all except the handle of a GPU."""
        return {**vars(self), "_record": None}

    def record(self) -> Timestamp:
        """Return the current time; on a GPU, after the kernels that are queued."""
        if self._record is None:
            self._record = clock_of(self.device)
        return self._record()

    def update(self) -> Algorithm[None]:
        """Read the clock of a simulation; does nothing for a device."""
        return
        yield  # makes this a generator


@dataclass(frozen=True)
class SimulatedTime:
    """A point in virtual time."""

    time_s: float

    def seconds_to(self, later: "SimulatedTime") -> float:
        """Return the virtual seconds to a later point."""
        return later.time_s - self.time_s


class SimulatedClock(ComputeClock):
    """The virtual clock of one rank in `gcnzc.exchange.lockstep`.

    The algorithm of the rank simulates each micro-batch with `compute`:

        for batch in optimizer.micro_batches(batches):
            value = loss(model, batch)
            yield from clock.compute(forward_s)
            if optimizer.backward(value):
                yield from clock.compute(backward_s)
        yield from optimizer.algorithm()
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.time_s = 0.0
        """the virtual time in seconds at the last `compute` or `update`"""

    def record(self) -> Timestamp:
        """Return the virtual time that was read last."""
        return SimulatedTime(self.time_s)

    def update(self) -> Algorithm[None]:
        """Read the virtual time."""
        self.time_s = yield Now()

    def compute(self, seconds: float) -> Algorithm[None]:
        """Simulate a computation that takes some virtual seconds."""
        yield Compute(seconds)
        yield from self.update()


@dataclass(frozen=True)
class ComputeThreshold:
    """A compute threshold, and its predicted effect."""

    seconds: float = math.inf
    """the threshold in seconds from the beginning of a step; infinity for none"""
    speed: float = 1.0
    """the effective speed, 1 without a threshold"""
    dropped: float = 0.0
    """the fraction of the micro-batches that are dropped"""


def known_times(times_s: NDArray[np.float64], delay: int = 0) -> NDArray[np.float64]:
    """Return the times that a rank compares with the threshold before it begins each part.

    A part begins unless the last part whose end is known has ended after the threshold. A part that
    has begun is always finished, and so is the first micro-batch. A micro-batch is kept if its
    backward pass is executed.

    Args:
        times_s: (..., 2M) seconds from the beginning of a step to the end of each of its parts.
        delay: see `ComputeClock.delay`; with 1, the last but one part must have ended.

    Returns:
        (..., 2M): the end of the last known part, or 0 where a part is always executed.
    """
    known = np.zeros_like(times_s)
    known[..., 1 + delay :] = times_s[..., : -1 - delay]
    known[..., :2] = 0.0
    return known


def effective_speed(
    times_s: NDArray[np.float64], overhead_s: float, threshold_s: float, delay: int = 0
) -> ComputeThreshold:
    """Return a threshold with the effect that it would have had in measured steps.

    Args:
        times_s: (W, S, 2M), see `known_times`, measured without a threshold.
        overhead_s: seconds of a step after the slowest rank's last micro-batch, such as those of
            the exchange.
        threshold_s: the threshold in seconds.
        delay: see `known_times`.
    """
    is_executed = known_times(times_s, delay) < threshold_s
    is_kept = is_executed[..., 1::2]
    full_s = times_s[..., -1].max(axis=0) + overhead_s
    short_s = np.where(is_executed, times_s, 0.0).max(axis=(0, 2)) + overhead_s
    # a step may take no time in a simulation
    ratios = np.divide(full_s, short_s, out=np.ones_like(full_s), where=short_s > 0)
    speed = (is_kept.mean(axis=(0, 2)) * ratios).mean()
    return ComputeThreshold(threshold_s, float(speed), float(1 - is_kept.mean()))


def choose_threshold(
    times_s: NDArray[np.float64], overhead_s: float, max_dropped: float, delay: int = 0
) -> ComputeThreshold:
    """Return the threshold of the largest effective speed; an infinite one if none is above 1.

    Args:
        times_s: (W, S, 2M), see `effective_speed`.
        overhead_s: see `effective_speed`.
        max_dropped: the largest fraction of the micro-batches that may be dropped.
        delay: see `known_times`.
    """
    best = ComputeThreshold()
    # a threshold drops the micro-batches whose backward pass would begin later
    begins_s = known_times(times_s, delay)[..., 1::2]
    for seconds in np.unique(np.quantile(begins_s, np.linspace(1 - max_dropped, 1, CANDIDATES))):
        found = effective_speed(times_s, overhead_s, float(seconds), delay)
        if found.dropped <= max_dropped and found.speed > best.speed:
            best = found
    return best


class ComputeDeadline:
    """Decides before each micro-batch of a step, or each of its passes, whether this rank stops.

    Args:
        micro_batches: M, the largest number of micro-batches of a step.
        requested_s: seconds from the beginning of a step, after which no other pass begins; None to
            measure the steps of `calibration`, and then select the threshold of the largest
            effective speed.
        calibration: the first and the last step that are measured, counted from 1.
        max_dropped: the largest fraction of the micro-batches that a measured threshold may drop.
        clock: times the micro-batches.
    """

    def __init__(
        self,
        micro_batches: int,
        requested_s: float | None,
        calibration: tuple[int, int],
        max_dropped: float,
        clock: ComputeClock,
    ) -> None:
        self.requested_s, self.calibration = requested_s, calibration
        self.micro_batches, self.max_dropped, self.clock = micro_batches, max_dropped, clock
        self.calibrations = 0
        """number of measurements that have ended"""
        self._step: list[Timestamp] = []
        self.restart()

    def restart(self) -> None:
        """Begin a measurement, unless a threshold was given."""
        self.prediction: ComputeThreshold | None = None
        """the measured threshold, with its predicted effect; None if none was measured"""
        self.num_steps = 0
        """number of steps since the measurement began or ended"""
        self.dropped = 0.0
        """sum of the fractions that were dropped in these steps"""
        # of each measured step: its beginning, the ends of its parts, and its end
        self._steps: list[list[Timestamp]] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that are copied and pickled; a copy begins its measurement."""
        own = {**vars(self), "_step": [], "_steps": []}
        return {**own, "num_steps": 0} if self.is_calibrating else own

    @property
    def is_calibrating(self) -> bool:
        """Whether the steps are measured, or will be, and nothing is dropped."""
        return self.requested_s is None and self.prediction is None

    @property
    def threshold_s(self) -> float:
        """The current threshold in seconds; infinite for none."""
        if self.requested_s is not None:
            return self.requested_s
        return math.inf if self.prediction is None else self.prediction.seconds

    def begin_step(self) -> None:
        """Record the beginning of the first micro-batch."""
        self._step = [self.clock.record()]

    def end_part(self) -> None:
        """Record the end of a forward pass, or the end of a step."""
        self._step.append(self.clock.record())

    def end_micro_batch(self) -> None:
        """Record the end of a micro-batch."""
        if len(self._step) % 2:
            # its forward pass was not timed, and the rank does not stop between the passes
            self._step.append(self._step[-1])
        self.end_part()

    def is_over(self) -> bool:
        """Whether the threshold has passed, so that no other part begins; False in the first part.

        See `ComputeClock.delay`.
        """
        known = len(self._step) - 1 - self.clock.delay
        if known < 1 or self.threshold_s == math.inf:
            return False
        return self._step[0].seconds_to(self._step[known]) >= self.threshold_s

    def end_step(self, dropped: float) -> Algorithm[None]:
        """Record the end of a step, after its exchange, and select the threshold if that is due.

        Args:
            dropped: the fraction of the micro-batches of all ranks that was dropped in the step,
                the same on all ranks.
        """
        yield from self.clock.update()
        self.num_steps += 1
        first, last = self.calibration
        if not self.is_calibrating:
            self.dropped += dropped
            if self.requested_s is None and self.num_steps == last:
                if self.dropped / last > TOLERANCE * self.max_dropped:
                    self.restart()
                self.num_steps, self.dropped = 0, 0.0
        elif self.num_steps >= first:
            self.end_part()
            self._steps.append(self._step)
            if self.num_steps == last:
                yield from self._choose()

    def _choose(self) -> Algorithm[None]:
        """Select the threshold of the largest effective speed; a single rank has none."""
        times = self.times()
        rows = (yield AllGather(times.flatten())).view(-1, *times.shape).numpy()
        # only steps in which all ranks have timed all micro-batches
        used = rows[:, ~np.isnan(rows).any(axis=(0, 2))]
        found, (times_s, ends_s) = ComputeThreshold(), (used[..., :-1], used[..., -1])
        if used.size and len(rows) > 1:
            # the median time of a step after the slowest rank's last micro-batch
            overheads_s = ends_s.mean(axis=0) - times_s[..., -1].max(axis=0)
            overhead_s = max(0.0, float(np.median(overheads_s)))
            found = choose_threshold(times_s, overhead_s, self.max_dropped, self.clock.delay)
        # all ranks use the threshold of rank 0, because processors may round the sums differently
        own = torch.tensor([found.seconds, found.speed, found.dropped], dtype=torch.float64)
        chosen = (yield AllGather(own))[0].tolist()
        self.restart()
        # measure again if no step can be used
        if used.size:
            self.prediction = ComputeThreshold(*chosen)
            self.calibrations += 1

    def times(self) -> torch.Tensor:
        """Return the times of the measured steps, which synchronizes with a GPU.

        Returns:
            (S, 2M + 1) float64: the seconds from the beginning of a step to the end of each part,
            and to the end of the step; NaN for a step of fewer micro-batches, such as the last one
            of an epoch.
        """
        count = 2 * self.micro_batches + 1
        rows = [
            [begin.seconds_to(each) for each in ends] if len(ends) == count else [math.nan] * count
            for begin, *ends in self._steps
        ]
        return torch.tensor(rows, dtype=torch.float64).view(-1, count)
