"""When each stage of each step ran, and how much of one lay under another.

Times are of `time.perf_counter`, in seconds. A lane is what does one thing at a time: a worker
thread, or the model.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Span:
    """A stage of one step."""

    name: str  # sample, gather, compute, wait
    lane: str
    begin_s: float
    end_s: float


def share_under(spans: Sequence[Span], name: str, other: str) -> float:
    """The share of the seconds of `name` during which some `other` ran too; 0 of no seconds."""
    whole = [(span.begin_s, span.end_s) for span in spans if span.name == name]
    covers = _joined((span.begin_s, span.end_s) for span in spans if span.name == other)
    seconds = sum(end - begin for begin, end in whole)
    covered = sum(
        max(0.0, min(end, last) - max(begin, first))
        for begin, end in whole
        for first, last in covers
    )
    return covered / seconds if seconds else 0.0


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


def _joined(parts: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, as intervals that do not touch."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(parts):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined
