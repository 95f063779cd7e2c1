"""When a rank stops the micro-batches of a step: at a given threshold, or at a measured one.

A measured threshold is chosen after the times of some steps have been measured. The ranks gather
the times of all ranks, and choose the same threshold. If more is dropped later than the limit
permits, for example because other programs use the machines, the measurement begins again.

Notation: W ranks, S measured steps, M micro-batches of P parts: P is 2 if the forward and backward
passes are timed separately, or else 1.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from gcnzc.exchange import Algorithm, AllGather
from gcnzc.optim.resize import check_mapping
from gcnzc.optim.state_layout import SavedTensor, check_numbers, check_tensor, check_value
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
        self.threshold_s = math.inf
        """the current threshold in seconds; infinite for none"""
        self.prediction: ComputeThreshold | None = None
        """the predicted effect of a measured threshold; None if none was measured"""
        self.is_calibrating = False
        """whether the steps are measured, or will be, and nothing is dropped"""
        self._restart()
        self.calibrations = 0
        """number of measurements that have ended"""
        self._events: list[TimedEvent] = []
        # the events of the last measured step
        self._pending: list[TimedEvent] = []

    def _restart(self) -> None:
        """Begin a measurement, unless a threshold was given."""
        self.is_calibrating = self.requested_s is None
        self.threshold_s = math.inf if self.requested_s is None else self.requested_s
        self.prediction = None
        self._steps = 0
        """number of steps since the measurement began or ended"""
        self._dropped = 0.0
        """sum of the fractions that were dropped in these steps"""
        # for each measured step, the ends of M * P parts, and the seconds after the last one
        self._rows: list[list[float]] = []

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
        self._steps += 1
        first, last = self.calibration
        if not self.is_calibrating:
            self._dropped += dropped
            if self.requested_s is None and self._steps == last:
                if self._dropped / self._steps > TOLERANCE * self.max_dropped:
                    self._restart()
                self._steps, self._dropped = 0, 0.0
        elif self._steps >= first:
            if self._events:
                self._pending = [*self._events, self.clock.record()]
            else:
                self._rows.append(self._empty_row())
            if self._steps == last:
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
        self._rows.append(row)

    def _empty_row(self) -> list[float]:
        """Return the row of a step with fewer than M micro-batches on this rank."""
        return [NOT_MEASURED] * (2 * self.micro_batches + 1)

    def _choose(self) -> Algorithm[None]:
        """Select the threshold of the largest effective speed; a single rank has none."""
        gathered = yield AllGather(self.measured_times().view(-1))
        rows = gathered.view(len(gathered), -1, 2 * self.micro_batches + 1).numpy()
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
        found = ComputeThreshold(*(yield AllGather(values))[0].tolist())
        self._restart()
        # measure again if no step can be used
        if used.size:
            self.threshold_s, self.prediction = found.seconds, found
            self.is_calibrating = False
            self.calibrations += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is the same on all ranks."""
        prediction = self.prediction
        return {
            "options": self.describe(),
            # all numbers of a state are finite
            "threshold_s": None if self.threshold_s == math.inf else self.threshold_s,
            "prediction": prediction and [prediction.speed, prediction.dropped],
            "is_calibrating": self.is_calibrating,
            "calibrations": self.calibrations,
            "steps": self._steps,
            "dropped": self._dropped,
        }

    def measured_times(self) -> torch.Tensor:
        """Return (S, 2M + 1) float64: the times that this rank has measured and not used yet."""
        self._read_pending()
        columns = 2 * self.micro_batches + 1
        return torch.tensor(self._rows, dtype=torch.float64).view(-1, columns)

    def check_state(self, state: Mapping[str, Any], local: Mapping[str, Any]) -> None:
        """Check the arguments of `load_state_dict`, before anything is loaded.

        Args:
            state: see there.
            local: has `times`.

        Raises:
            ValueError: a value is missing or damaged.
        """
        check_mapping(state, "threshold_s", "prediction")
        check_value(state, "options", kind=str)
        check_value(state, "is_calibrating", kind=bool)
        for name in ("calibrations", "steps"):
            check_value(state, name)
        check_value(state, "dropped", kind=float)
        if state["threshold_s"] is not None:
            check_value(state, "threshold_s", kind=float)
        if state["prediction"] is not None:
            check_numbers(state, "prediction", 2)
        times = local.get("times")
        rows = len(times) if isinstance(times, torch.Tensor) and times.ndim else 0
        columns = 2 * self.micro_batches + 1
        if isinstance(times, torch.Tensor) and state["options"] != self.describe():
            # these times are not loaded
            columns = times.shape[-1] if times.ndim else columns
        check_tensor(local, "times", SavedTensor((rows, columns), dtype=torch.float64))

    def load_state_dict(
        self, state: Mapping[str, Any], times: torch.Tensor, *, is_resized: bool
    ) -> None:
        """Restore `state_dict` and `measured_times`.

        If the number of ranks or an option has changed, a measurement begins again, unless the
        constructor was given a threshold.

        Args:
            state: a result of `state_dict`.
            times: a result of `measured_times` of this rank.
            is_resized: whether the state is of another number of ranks.
        """
        self._restart()
        # times of the earlier run
        self._events, self._pending = [], []
        self.calibrations = state["calibrations"]
        if is_resized or state["options"] != self.describe():
            return
        threshold_s, prediction = state["threshold_s"], state["prediction"]
        self.threshold_s = math.inf if threshold_s is None else threshold_s
        self.prediction = prediction and ComputeThreshold(self.threshold_s, *prediction)
        self.is_calibrating = state["is_calibrating"]
        self._steps, self._dropped = state["steps"], state["dropped"]
        self._rows = times.tolist()


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
