"""When a rank stops the micro-batches of a step: at a given threshold, or at a measured one.

A measured threshold is chosen after the times of some steps have been measured. The ranks gather
the times of all ranks, and choose the same threshold. If more is dropped later than the limit
permits, for example because other programs use the machines, the measurement begins again.

Notation: W ranks, S measured steps, M micro-batches of P parts: P is 2 if the forward and backward
passes are timed separately, or else 1.
"""

import math
from typing import Any

import torch

from gcnzc.exchange import Algorithm, AllGather
from gcnzc.optim.state import Field, Number, Values, Vector
from gcnzc.optim.synchronous.compute_clock import ComputeClock
from gcnzc.optim.synchronous.effective_speed import (
    NO_THRESHOLD,
    ComputeThreshold,
    choose_threshold,
    measured_overhead,
)
from gcnzc.optim.validation import check_count, check_pair, check_range
from gcnzc.system.streams import TimedEvent

# first and last step that is measured, counted from 1; earlier ones compile kernels
CALIBRATION = (6, 50)
# largest fraction of the micro-batches that a measured threshold may drop
MAX_DROPPED = 0.1
# a new measurement begins if more than this multiple of `max_dropped` is dropped
TOLERANCE = 1.5
# in place of a time that was not measured; not NaN, with which a state would differ from its copy
NOT_MEASURED = -1.0


class ComputeDeadline:
    """Decides before each micro-batch of a step, or each of its passes, whether this rank stops.

    Args:
        micro_batches: M, the largest number of micro-batches of a step, at least 2.
        threshold: seconds from the beginning of a step, after which no other pass begins; None or
            infinity for no threshold; "auto" measures the steps of `calibration` and then
            selects the threshold of the largest effective speed.
        calibration: the first and the last step that "auto" measures, counted from 1.
        max_dropped: the largest fraction of the micro-batches that "auto" may drop.
        clock: times the micro-batches.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        micro_batches: int,
        threshold: float | str | None,
        calibration: tuple[int, int],
        max_dropped: float,
        clock: ComputeClock,
    ) -> None:
        check_count("micro_batches", micro_batches, 2)
        self.requested_s = _check_threshold(threshold)
        """the threshold that was given, in seconds; None if it is measured"""
        check_pair(
            "calibration", calibration, "the first and the last measured step, such as (6, 50)"
        )
        first, last = calibration
        check_count("calibration[0]", first, 1)
        check_count("calibration[1]", last, first)
        check_range(
            "max_dropped",
            max_dropped,
            lambda share: 0 < share < 1,
            "a number between 0 and 1, such as 0.1",
        )
        self.micro_batches, self.calibration = micro_batches, (first, last)
        self.max_dropped, self.clock = max_dropped, clock
        self.options = self.describe()
        """the options with which a state was saved, until `on_load`"""
        self.calibrations = 0
        """number of measurements that have ended"""
        self._events: list[TimedEvent] = []
        # the events of the last measured step
        self._pending: list[TimedEvent] = []
        self._restart()

    def _restart(self) -> None:
        """Begin a measurement, unless a threshold was given."""
        self.is_calibrating = self.requested_s is None
        """whether the steps are measured, or will be, and nothing is dropped"""
        self.measured: list[float] = []
        """the predicted effect of a measured threshold: effective speed, dropped fraction, and the
        threshold unless it is infinite; empty if none was measured"""
        self.num_steps = 0
        """number of steps since the measurement began or ended"""
        self.dropped = 0.0
        """sum of the fractions that were dropped in these steps"""
        # for each measured step, the ends of M * P parts, and the seconds after the last one
        self._times: list[float] = []

    def declare(self) -> list[Field]:
        """Return the fields of the state; the times are this rank's own."""

        def are_times(times: torch.Tensor, values: Values) -> bool:
            # those of other options are not used
            return values["deadline options"] != self.describe() or not len(times) % self.columns

        def num_times(values: Values) -> int:
            found = values.get("deadline times")
            return found.numel() if isinstance(found, torch.Tensor) else 0

        return [
            Number(self, "options", ""),
            Number(self, "is_calibrating", False),
            Number(self, "calibrations"),
            Number(self, "measured", []),
            Number(self, "num_steps"),
            Number(self, "dropped", 0.0),
            Vector(
                self,
                "times",
                num_times,
                torch.float64,
                "local",
                "drop",
                is_valid=are_times,
                on_host=True,
                is_computed=True,
            ),
        ]

    state_prefix = "deadline"

    @property
    def threshold_s(self) -> float:
        """The current threshold in seconds; infinite for none."""
        if self.requested_s is not None:
            return self.requested_s
        return self.measured[2] if len(self.measured) > 2 else math.inf

    @property
    def prediction(self) -> ComputeThreshold | None:
        """The predicted effect of a measured threshold; None if none was measured."""
        return ComputeThreshold(self.threshold_s, *self.measured[:2]) if self.measured else None

    @property
    def columns(self) -> int:
        """The number of times of a step."""
        return 2 * self.micro_batches + 1

    @property
    def times(self) -> torch.Tensor:
        """(S * (2M + 1),) float64: the times that this rank has measured and not used yet."""
        self._read_pending()
        return torch.tensor(self._times, dtype=torch.float64)

    @times.setter
    def times(self, values: torch.Tensor) -> None:
        self._times = values.tolist()

    def measured_times(self) -> torch.Tensor:
        """Return `times` as (S, 2M + 1)."""
        return self.times.view(-1, self.columns)

    def on_load(self, *, is_resized: bool) -> None:
        """Forget the times of an earlier run, and measure again if its options were others."""
        self._events, self._pending = [], []
        if is_resized or self.options != self.describe():
            self._restart()
        self.options = self.describe()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that are copied and pickled: all except events."""
        self._read_pending()
        return {**vars(self), "_events": [], "_pending": []}

    def describe(self) -> str:
        """Return the options, which must be the same on all ranks, as text."""
        requested = "auto" if self.requested_s is None else f"{self.requested_s:g}"
        return (
            f"micro_batches={self.micro_batches}, threshold={requested}, "
            f"calibration={self.calibration}, max_dropped={self.max_dropped:g}"
        )

    def begin_step(self) -> None:
        """Record the beginning of the first micro-batch."""
        self._events = [self.clock.record()]

    def end_part(self) -> None:
        """Record the end of a micro-batch, or of its forward pass."""
        self._events.append(self.clock.record())

    def is_over(self) -> bool:
        """Whether the threshold has passed, so that no other part begins; False in the first part.

        See `ComputeClock.delay`.
        """
        known = len(self._events) - 1 - self.clock.delay
        if known < 1 or self.threshold_s == math.inf:
            return False
        return self._events[0].seconds_to(self._events[known]) >= self.threshold_s

    def end_step(self, dropped: float) -> Algorithm[None]:
        """Record the end of a step, after its exchange, and select the threshold if that is due.

        Args:
            dropped: the fraction of the micro-batches of all ranks that was dropped in the step,
                the same on all ranks.
        """
        yield from self.clock.update()
        # the GPU has finished the previous step, so this does not wait for it
        self._read_pending()
        self.num_steps += 1
        first, last = self.calibration
        if not self.is_calibrating:
            self.dropped += dropped
            if self.requested_s is None and self.num_steps == last:
                if self.dropped / self.num_steps > TOLERANCE * self.max_dropped:
                    self._restart()
                self.num_steps, self.dropped = 0, 0.0
        elif self.num_steps >= first:
            if self._events:
                self._pending = [*self._events, self.clock.record()]
            else:
                self._times += self._empty_row()
            if self.num_steps == last:
                yield from self._choose()
        self._events = []

    def _read_pending(self) -> None:
        """Read the events of the last measured step; waits for them on a GPU."""
        if not self._pending:
            return
        begin, *ends, end = self._pending
        self._pending = []
        times_s = [begin.seconds_to(each) for each in ends]
        row = self._empty_row()
        # steps of fewer micro-batches, such as the last one of an epoch, are not used
        if len(times_s) in (self.micro_batches, 2 * self.micro_batches):
            row[: len(times_s)] = times_s
            row[-1] = begin.seconds_to(end) - times_s[-1]
        self._times += row

    def _empty_row(self) -> list[float]:
        """Return the row of a step with fewer than M micro-batches on this rank."""
        return [NOT_MEASURED] * self.columns

    def _choose(self) -> Algorithm[None]:
        """Select the threshold of the largest effective speed; a single rank has none."""
        gathered = yield AllGather(self.times)
        rows = gathered.view(len(gathered), -1, self.columns).numpy()
        # only steps in which all ranks have timed the same parts of all micro-batches
        for passes in (2, 1):
            parts = passes * self.micro_batches
            is_measured = (rows != NOT_MEASURED).sum(axis=2) == parts + 1
            used = rows[:, is_measured.all(axis=0)]
            if used.size:
                break
        times_s, rest_s = used[..., :parts], used[..., -1]
        found = NO_THRESHOLD
        if len(rows) > 1:
            overhead_s = measured_overhead(times_s, rest_s)
            delay = self.clock.delay
            found = choose_threshold(times_s, overhead_s, self.max_dropped, passes, delay)
        # all ranks use the threshold of rank 0, because processors may round the sums differently
        values = torch.tensor([found.seconds, found.speed, found.dropped], dtype=torch.float64)
        seconds, *effect = (yield AllGather(values))[0].tolist()
        self._restart()
        # measure again if no step can be used
        if used.size:
            self.measured = effect if seconds == math.inf else [*effect, seconds]
            self.is_calibrating = False
            self.calibrations += 1


def _check_threshold(threshold: float | str | None) -> float | None:
    """Return the seconds of a threshold; infinity for None, and None for "auto"."""
    if threshold == "auto":
        return None
    if threshold is None:
        return math.inf
    is_number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if not is_number or not float(threshold) > 0:
        raise ValueError(
            f"threshold is {threshold!r}\n\nhint: give seconds above 0, 'auto' to measure it, or "
            "None to drop nothing"
        )
    return float(threshold)
