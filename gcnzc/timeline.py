"""When each stage of each step ran, and how much of one lay under another.

Times are of `time.perf_counter`, in seconds. A lane is what does one thing at a time: a worker
thread, a stream of a GPU, or the model. A stage ends whenever its moments are past, which on a GPU
is later than the call that queued it; then it is a span.
"""

import json
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from gcnzc.exchange import Algorithm, Vote
from gcnzc.replicas import everybodys
from gcnzc.streams import Moment


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
    begin: Moment
    end: Moment

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


def share_under(spans: Sequence[Span], name: str, other: str) -> float:
    """The share of the seconds of `name` during which some `other` ran too; 0 of no seconds."""
    whole = [span for span in spans if span.name == name]
    seconds = sum(span.end_s - span.begin_s for span in whole)
    covers = [span for span in spans if span.name == other]
    return 1 - seconds_outside(whole, covers) / seconds if seconds else 0.0


def seconds_outside(spans: Iterable[Span], covers: Iterable[Span]) -> float:
    """The seconds of `spans` during which none of `covers` ran."""
    joined = _joined((span.begin_s, span.end_s) for span in covers)
    return sum(
        (span.end_s - span.begin_s)
        - sum(max(0.0, min(span.end_s, last) - max(span.begin_s, first)) for first, last in joined)
        for span in spans
    )


def write_trace(spans: Sequence[Span], path: Path) -> None:
    """Write spans as Chrome's trace events, for `chrome://tracing` or ui.perfetto.dev."""
    origin_s = min((span.begin_s for span in spans), default=0.0)
    lanes = {lane: number for number, lane in enumerate(sorted({span.lane for span in spans}))}
    process = os.getpid()
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": lane}}
        for lane, number in lanes.items()
    ]
    events += [
        {
            "ph": "X",
            "name": span.name,
            "pid": process,
            "tid": lanes[span.lane],
            "ts": (span.begin_s - origin_s) * 1e6,
            "dur": (span.end_s - span.begin_s) * 1e6,
        }
        for span in spans
    ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def everybodys_spans(own: Sequence[Span], rank: int) -> Algorithm[list[Span]]:
    """The spans of all workers by the clock of worker 0, in lanes that are named after them.

    Args:
        own: of this worker.
        rank: of this worker.
    """
    workers = len((yield Vote(rank)))
    if workers == 1:
        return list(own)
    # all pass here at about the same time, whatever their clocks say
    clocks = yield Vote(time.perf_counter())
    texts = yield from everybodys(json.dumps([astuple(span) for span in own]))
    return [
        Span(
            name,
            f"worker {worker}, {lane}",
            begin_s - clocks[worker] + clocks[0],
            end_s - clocks[worker] + clocks[0],
        )
        for worker, text in enumerate(texts)
        for name, lane, begin_s, end_s in json.loads(text)
    ]


def _joined(parts: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, as intervals that do not touch."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(parts):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined
