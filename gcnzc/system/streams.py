"""Streams, events and clocks of a device; the only module that creates streams.

A stream does what is queued on it in turn; streams do not wait for each other, unless one is told
to wait for an event that another records. `transfer` is written on these few words, so that tests
can run it on a machine of their own, which does the work of each stream as late as it may.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A place in a stream."""

    def is_past(self) -> bool:
        """Whether the stream has got there."""

    def synchronize(self) -> None:
        """Wait, on the host, until it has."""


class TimedEvent(Event, Protocol):
    """An event whose time is known once it is past."""

    def time_s(self) -> float:
        """When that was, by `time.perf_counter`; waits until it has been."""

    def seconds_to(self, later: Any) -> float:
        """Seconds from here to a later moment of the same device; waits until that has been."""


class Stream(Protocol):
    """Work that a device does in turn."""

    def do(self, work: Callable[..., object], *what: Any) -> None:
        """Queue `work(*what)`; the tensors among `what` need not be referred to afterwards."""

    def record(self) -> Event:
        """The place after all that is queued so far."""

    def moment(self) -> TimedEvent:
        """As `record`, with its time."""

    def wait(self, event: Event) -> None:
        """Do nothing that is queued later before `event` is past."""


class Streams(Protocol):
    """A device that has streams."""

    device: torch.device

    def new(self, priority: int = 0) -> Stream:
        """Another stream; of lower priority numbers more is done first."""

    def current(self) -> Stream:
        """The one on which the caller's work is queued."""

    def device_memory(self, num_bytes: int, stream: Stream) -> Tensor:
        """Fresh memory of the device, (bytes,) uint8, that belongs to `stream`.

        When nothing refers to it, it may be used again for what is queued on `stream` later.
        """

    def host_memory(self, num_bytes: int) -> Tensor:
        """Fresh memory of the host, (bytes,) uint8, that copies to and from the device fast."""


class HostTimedEvent:
    """A moment of the host, which is past when it is made."""

    def __init__(self) -> None:
        self._time_s = time.perf_counter()

    def is_past(self) -> bool:
        """It is."""
        return True

    def synchronize(self) -> None:
        """Nothing is left to wait for."""

    def time_s(self) -> float:
        """When it was made."""
        return self._time_s

    def seconds_to(self, later: "HostTimedEvent") -> float:
        """Seconds between them."""
        return later._time_s - self._time_s


def clock_of(device: torch.device) -> Callable[[], TimedEvent]:
    """What gives the moment after all that the caller has queued on a device; on the CPU, now."""
    if device.type != "cuda":
        return HostTimedEvent
    streams = CudaStreams(device)
    return lambda: streams.current().moment()


class CudaStreams:
    """The streams of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._clock = _Clock(device)

    def new(self, priority: int = 0) -> "CudaStream":
        """Another stream; see `Streams`."""
        return CudaStream(torch.cuda.Stream(self.device, priority), self._clock)

    def current(self) -> "CudaStream":
        """PyTorch's current stream of the calling thread."""
        return CudaStream(torch.cuda.current_stream(self.device), self._clock)

    def device_memory(self, num_bytes: int, stream: Stream) -> Tensor:
        """Memory of PyTorch's allocator, which goes back to it; see `Streams`."""
        assert isinstance(stream, CudaStream), "a stream of this device"
        with torch.cuda.stream(stream.stream):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def host_memory(self, num_bytes: int) -> Tensor:
        """Page-locked memory; ordinary memory, from which copies wait, where none can be had."""
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            return torch.empty(num_bytes, dtype=torch.uint8)


class CudaStream:
    """A stream of a GPU."""

    def __init__(self, stream: "torch.cuda.Stream", clock: "_Clock") -> None:
        self.stream, self._clock = stream, clock

    def do(self, work: Callable[..., object], *what: Any) -> None:
        """Queue `work(*what)` here."""
        with torch.cuda.stream(self.stream):
            work(*what)

    def record(self) -> "CudaEvent":
        """The place after all that is queued so far."""
        return CudaEvent(self.stream.record_event(torch.cuda.Event(blocking=True)))

    def moment(self) -> "CudaTimedEvent":
        """As `record`, with its time."""
        # the clock's first event must come before this one
        self._clock.begin()
        return CudaTimedEvent(self.stream.record_event(_timed()), self._clock)

    def wait(self, event: Event) -> None:
        """Queue nothing before `event` is past."""
        assert isinstance(event, CudaEvent), "an event of this device"
        self.stream.wait_event(event.event)


class CudaEvent:
    """A place in a stream of a GPU.

    The event must be a blocking one: a thread that waits for it sleeps, whereas by default it would
    keep a core of the loader or of the sampler busy.
    """

    def __init__(self, event: "torch.cuda.Event") -> None:
        self.event = event

    def is_past(self) -> bool:
        """Whether the GPU has got there."""
        return bool(self.event.query())

    def synchronize(self) -> None:
        """Wait until it has."""
        self.event.synchronize()


class CudaTimedEvent(CudaEvent):
    """A place in a stream of a GPU, and when it was passed."""

    def __init__(self, event: "torch.cuda.Event", clock: "_Clock") -> None:
        super().__init__(event)
        self._clock = clock

    def time_s(self) -> float:
        """By `time.perf_counter`, as well as a GPU's clock can be compared with it."""
        self.synchronize()
        return self._clock.time_s(self.event)

    def seconds_to(self, later: "CudaTimedEvent") -> float:
        """Seconds between them, more precise than the difference of their times."""
        later.synchronize()
        return self.event.elapsed_time(later.event) / 1000


class _Clock:
    """When events of a GPU were, by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._first: torch.cuda.Event | None = None
        self._first_s = 0.0

    def begin(self) -> None:
        """Make the event that others are compared with, once."""
        with self._lock:
            if self._first is None:
                # an event of an empty stream is past as soon as the GPU sees it
                self._first = torch.cuda.Stream(self._device).record_event(_timed())
                self._first.synchronize()
                self._first_s = time.perf_counter()

    def time_s(self, event: "torch.cuda.Event") -> float:
        assert self._first is not None, "moments are made after `begin`"
        return self._first_s + self._first.elapsed_time(event) / 1000


def _timed() -> "torch.cuda.Event":
    return torch.cuda.Event(enable_timing=True, blocking=True)
