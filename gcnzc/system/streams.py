"""Streams, events and clocks of a device; the only module that creates CUDA streams.

Work on one stream runs in order; different streams are synchronized only by events.
`gcnzc.loader.transfer` uses these interfaces, so that tests can run it on a simulated device that
delays the work of each stream as long as possible.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream, like `torch.cuda.Event`."""

    def is_done(self) -> bool:
        """Whether all work before the event has finished."""

    def synchronize(self) -> None:
        """Block the calling thread until all work before the event has finished."""


class TimedEvent(Event, Protocol):
    """An event with a timestamp."""

    def time_s(self) -> float:
        """Return the time of the event on the clock of `time.perf_counter`; synchronizes."""

    def seconds_to(self, later: Any) -> float:
        """Return the seconds to a later event of the same device; synchronizes with it."""


class Stream(Protocol):
    """A queue of work that a device runs in order."""

    def do(self, work: Callable[..., object], *args: Any) -> None:
        """Call `work(*args)`, whose device work is queued on this stream.

        The queued work keeps no tensor alive: the caller must keep the memory that it uses until
        the work has finished.
        """

    def record(self) -> Event:
        """Record an event after all work that is queued so far."""

    def timed_event(self) -> TimedEvent:
        """Record an event with a timestamp after all work that is queued so far."""

    def wait(self, event: Event) -> None:
        """Let work that is queued later wait for `event`; does not block the host."""


class Streams(Protocol):
    """The streams and memory of a device."""

    device: torch.device

    def new(self, priority: int = 0) -> Stream:
        """Create a stream; see `torch.cuda.Stream` for the priority, which affects kernels only."""

    def current(self) -> Stream:
        """Return the current stream of the calling thread."""

    def device_memory(self, num_bytes: int, stream: Stream) -> Tensor:
        """Allocate device memory, (num_bytes,) uint8, that belongs to `stream`.

        When nothing refers to it, it can be reused for work that is queued on `stream` later.
        """

    def host_memory(self, num_bytes: int) -> Tensor:
        """Allocate host memory for asynchronous copies, (num_bytes,) uint8."""


class HostTimedEvent:
    """An event of the host, which is done when it is created."""

    def __init__(self) -> None:
        self._time_s = time.perf_counter()

    def is_done(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def time_s(self) -> float:
        """Return the time at which the event was created."""
        return self._time_s

    def seconds_to(self, later: "HostTimedEvent") -> float:
        """Return the seconds between the events."""
        return later._time_s - self._time_s


def clock_of(device: torch.device) -> Callable[[], TimedEvent]:
    """Return a function that records a timed event on the current stream of a device.

    For the CPU, the event has the time at which it is recorded.
    """
    if device.type != "cuda":
        return HostTimedEvent
    streams = CudaStreams(device)
    return lambda: streams.current().timed_event()


class CudaStreams:
    """The streams and memory of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._clock = _Clock(device)

    def new(self, priority: int = 0) -> "CudaStream":
        """Create a CUDA stream; see `Streams`."""
        return CudaStream(torch.cuda.Stream(self.device, priority), self._clock)

    def current(self) -> "CudaStream":
        """Return PyTorch's current stream of the calling thread."""
        return CudaStream(torch.cuda.current_stream(self.device), self._clock)

    def device_memory(self, num_bytes: int, stream: Stream) -> Tensor:
        """Allocate from PyTorch's caching allocator; see `Streams`."""
        assert isinstance(stream, CudaStream), "a stream of this device"
        with torch.cuda.stream(stream.stream):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def host_memory(self, num_bytes: int) -> Tensor:
        """Allocate page-locked memory, or pageable memory (synchronous copies) if that fails."""
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            return torch.empty(num_bytes, dtype=torch.uint8)


class CudaStream:
    """A CUDA stream."""

    def __init__(self, stream: "torch.cuda.Stream", clock: "_Clock") -> None:
        self.stream, self._clock = stream, clock

    def do(self, work: Callable[..., object], *args: Any) -> None:
        """Call `work(*args)` with this stream as the current one; see `Stream`."""
        with torch.cuda.stream(self.stream):
            work(*args)

    def record(self) -> "CudaEvent":
        """Record an event after all work that is queued so far."""
        return CudaEvent(self.stream.record_event(torch.cuda.Event(blocking=True)))

    def timed_event(self) -> "CudaTimedEvent":
        """Record an event with a timestamp after all work that is queued so far."""
        # the clock's reference event must precede this one
        self._clock.begin()
        return CudaTimedEvent(self.stream.record_event(_timed()), self._clock)

    def wait(self, event: Event) -> None:
        """Let work that is queued later wait for `event`; does not block the host."""
        assert isinstance(event, CudaEvent), "an event of this device"
        self.stream.wait_event(event.event)


class CudaEvent:
    """A CUDA event.

    It must be created with `blocking=True`. By default, a thread that waits for an event polls, and
    so occupies a core that the loader's threads need.
    """

    def __init__(self, event: "torch.cuda.Event") -> None:
        self.event = event

    def is_done(self) -> bool:
        """Whether the GPU has finished all work before the event."""
        return bool(self.event.query())

    def synchronize(self) -> None:
        """Block the calling thread until the GPU has finished all work before the event."""
        self.event.synchronize()


class CudaTimedEvent(CudaEvent):
    """A CUDA event with a timestamp."""

    def __init__(self, event: "torch.cuda.Event", clock: "_Clock") -> None:
        super().__init__(event)
        self._clock = clock

    def time_s(self) -> float:
        """Return the time on the clock of `time.perf_counter`, up to the drift of the clocks."""
        self.synchronize()
        return self._clock.time_s(self.event)

    def seconds_to(self, later: "CudaTimedEvent") -> float:
        """Return the seconds between the events, more precisely than the difference of `time_s`."""
        later.synchronize()
        return self.event.elapsed_time(later.event) / 1000


class _Clock:
    """Convert times of CUDA events to the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._first: torch.cuda.Event | None = None
        self._first_s = 0.0

    def begin(self) -> None:
        """Record the reference event, once."""
        with self._lock:
            if self._first is None:
                # on an empty stream, the event is done as soon as the GPU processes it
                self._first = torch.cuda.Stream(self._device).record_event(_timed())
                self._first.synchronize()
                self._first_s = time.perf_counter()

    def time_s(self, event: "torch.cuda.Event") -> float:
        assert self._first is not None, "timed events are recorded after `begin`"
        return self._first_s + self._first.elapsed_time(event) / 1000


def _timed() -> "torch.cuda.Event":
    return torch.cuda.Event(enable_timing=True, blocking=True)
