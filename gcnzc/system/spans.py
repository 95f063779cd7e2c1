"""Time spans of the stages of training steps, and the time that they overlap."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gcnzc.system.streams import TimedEvent


@dataclass(frozen=True)
class Span:
    """Start and end of a stage of one step, in seconds on the clock of `time.perf_counter`."""

    name: str  # sample, copy, gather, wait, compute, exchange, overlapped or step
    lane: str  # the thread or stream that runs the stage; a row of the trace
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Stage:
    """A stage of one step between two timed events, which may still be running."""

    name: str
    lane: str
    begin: TimedEvent
    end: TimedEvent

    def is_done(self) -> bool:
        """Whether the stage has ended."""
        return self.end.is_done()

    def seconds(self) -> float:
        """Return the duration of the stage; waits for its end."""
        return self.begin.seconds_to(self.end)

    def span(self) -> Span:
        """Return start and end of the stage; waits for its end."""
        return Span(self.name, self.lane, self.begin.time_s(), self.end.time_s())


class Seconds:
    """Total durations of stages by name; stages that still run are added when they end."""

    def __init__(self, sums: Mapping[str, float]) -> None:
        self._sums = dict(sums)
        self._pending: deque[Stage] = deque()

    def add(self, stages: Iterable[Stage]) -> None:
        """Add stages in the order in which they end; different streams may be interleaved."""
        self._pending += stages
        while self._pending and self._pending[0].is_done():
            self._count(self._pending.popleft())

    def add_seconds(self, name: str, seconds: float) -> None:
        """Add seconds to the total `name`."""
        self._sums[name] = self._sums.get(name, 0.0) + seconds

    def all(self) -> dict[str, float]:
        """Return the totals by names such as "gather_s"; waits for stages that still run."""
        while self._pending:
            self._count(self._pending.popleft())
        return dict(self._sums)

    def _count(self, stage: Stage) -> None:
        self.add_seconds(f"{stage.name}_s", stage.seconds())


def seconds_outside(spans: Iterable[Span], covers: Iterable[Span]) -> float:
    """Return the total time of `spans` that does not overlap any of `covers`, in seconds."""
    joined = _merge_intervals((span.begin_s, span.end_s) for span in covers)
    return sum(
        (span.end_s - span.begin_s)
        - sum(max(0.0, min(span.end_s, last) - max(span.begin_s, first)) for first, last in joined)
        for span in spans
    )


def _merge_intervals(parts: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals as disjoint intervals."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(parts):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined
