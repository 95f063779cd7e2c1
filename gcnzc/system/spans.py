"""Spans of time: what took how long, and how much of it was waited for."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gcnzc.system.streams import TimedEvent


@dataclass(frozen=True)
class Span:
    """A stage of one step."""

    name: str  # sample, gather, compute, wait, exchange, beside
    lane: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Stage:
    """A stage of one step that may not have ended yet."""

    name: str
    lane: str
    begin: TimedEvent
    end: TimedEvent

    def is_past(self) -> bool:
        """Whether it has ended."""
        return self.end.is_past()

    def seconds(self) -> float:
        """How long it took; waits for its end."""
        return self.begin.seconds_to(self.end)

    def span(self) -> Span:
        """When it was; waits for its end."""
        return Span(self.name, self.lane, self.begin.time_s(), self.end.time_s())


class Seconds:
    """Sums of how long stages took, by name, of which the last may not have ended yet."""

    def __init__(self, sums: Mapping[str, float]) -> None:
        self._sums = dict(sums)
        self._to_come: deque[Stage] = deque()

    def add(self, stages: Iterable[Stage]) -> None:
        """Add stages, of which each ends after those before it, or on another stream."""
        self._to_come += stages
        while self._to_come and self._to_come[0].is_past():
            self._count(self._to_come.popleft())

    def add_seconds(self, name: str, seconds: float) -> None:
        """Add what was measured otherwise."""
        self._sums[name] = self._sums.get(name, 0.0) + seconds

    def all(self) -> dict[str, float]:
        """The sums by names such as "gather_s"; waits for the ends of all that was added."""
        while self._to_come:
            self._count(self._to_come.popleft())
        return dict(self._sums)

    def _count(self, stage: Stage) -> None:
        self.add_seconds(f"{stage.name}_s", stage.seconds())


def seconds_outside(spans: Iterable[Span], covers: Iterable[Span]) -> float:
    """The seconds of `spans` during which none of `covers` ran."""
    joined = _joined((span.begin_s, span.end_s) for span in covers)
    return sum(
        (span.end_s - span.begin_s)
        - sum(max(0.0, min(span.end_s, last) - max(span.begin_s, first)) for first, last in joined)
        for span in spans
    )


def _joined(parts: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, as intervals that do not touch."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(parts):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined
