"""Clocks that time the micro-batches of a step: of a device, or of a simulation."""

from collections.abc import Callable
from typing import Any

import torch

from gcnzc.exchange import Algorithm, Compute, Now
from gcnzc.system.streams import TimedEvent, clock_of

# passes whose kernels may be queued on a GPU when the host waits for an earlier one
GPU_DELAY = 1


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
        self._record: Callable[[], TimedEvent] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that are copied and pickled: all except the handle of a GPU."""
        return {**vars(self), "_record": None}

    def record(self) -> TimedEvent:
        """Return an event at the current time; on a GPU, after the kernels that are queued."""
        if self._record is None:
            self._record = clock_of(self.device)
        return self._record()

    def update(self) -> Algorithm[None]:
        """Read the clock of a simulation; does nothing for a device."""
        return
        yield  # makes this a generator


class SimulatedEvent:
    """A point in virtual time.

    Args:
        time_s: the virtual time in seconds.
    """

    def __init__(self, time_s: float) -> None:
        self._time_s = time_s

    def is_done(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def time_s(self) -> float:
        """Return the virtual time in seconds."""
        return self._time_s

    def seconds_to(self, later: Any) -> float:
        """Return the virtual seconds to a later event."""
        seconds: float = later.time_s() - self._time_s
        return seconds


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

    def record(self) -> TimedEvent:
        """Return an event at the virtual time that was read last."""
        return SimulatedEvent(self.time_s)

    def update(self) -> Algorithm[None]:
        """Read the virtual time."""
        self.time_s = yield Now()

    def compute(self, seconds: float) -> Algorithm[None]:
        """Simulate a computation that takes some virtual seconds."""
        yield Compute(seconds)
        yield from self.update()
