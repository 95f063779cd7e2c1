"""Traces of a run: the spans of all workers, written for a trace viewer."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from gcnzc._files import write_text
from gcnzc.exchange import Algorithm, AllGatherScalar
from gcnzc.exchange import run as run_algorithm
from gcnzc.exchange.sync import all_gather_text
from gcnzc.system.spans import Span, Stage, seconds_outside
from gcnzc.train.callbacks import Callback
from gcnzc.train.errors import Interrupted
from gcnzc.train.plots import timeline
from gcnzc.train.run_folder import TIMELINE, TRACE
from gcnzc.train.state import Run


def overlap_share(spans: Sequence[Span], name: str, other: str) -> float:
    """Return the fraction of the time of spans `name` that overlaps `other`; 0 without any."""
    whole = [span for span in spans if span.name == name]
    seconds = sum(span.end_s - span.begin_s for span in whole)
    covers = [span for span in spans if span.name == other]
    return 1 - seconds_outside(whole, covers) / seconds if seconds else 0.0


def write_trace(spans: Sequence[Span], path: Path) -> None:
    """Write spans in Chrome's trace format, for ui.perfetto.dev or `chrome://tracing`."""
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
    write_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def gather_spans(own: Sequence[Span], rank: int) -> Algorithm[list[Span]]:
    """Gather the spans of all workers, on the clock of worker 0, in one set of lanes per worker.

    Args:
        own: spans of this worker.
        rank: rank of this worker.
    """
    workers = len((yield AllGatherScalar(rank)))
    if workers == 1:
        return list(own)
    # all workers are here at about the same time, so this measures the offsets of their clocks
    clocks = yield AllGatherScalar(time.perf_counter())
    texts = yield from all_gather_text(json.dumps([astuple(span) for span in own]))
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


# steps before the traced ones, which compile kernels and fill the loader's buffers
WARM_UP = 10


class Trace(Callback):
    """Records the spans of some steps, and draws their timeline."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.stages: list[Stage] = []

    def on_step(self, run: Run) -> None:
        """See `Callback`."""
        last = WARM_UP + run.config.run.trace
        if not WARM_UP < run.steps <= last:
            return
        self.spans += [span for each in run.outputs for span in each.spans] + run.spans
        self.stages += [stage for each in run.outputs for stage in each.stages] + run.stages
        if run.steps == last:
            self._draw(run)

    def on_end(self, run: Run) -> None:
        """See `Callback`: the run may have ended before all steps were recorded."""
        if not isinstance(run.stopped, Interrupted):
            self._draw(run)

    def _draw(self, run: Run) -> None:
        """Write the timeline of the recorded steps, if there are any."""
        if not self.stages:
            return
        own = self.spans + [stage.span() for stage in self.stages]
        spans = run_algorithm(gather_spans(own, run.group.rank), run.group)
        self.spans, self.stages = [], []
        if not run.is_first:
            return
        run.files.attempt(TRACE, lambda: write_trace(spans, run.folder / TRACE))
        run.files.attempt(TIMELINE, lambda: timeline(spans, run.folder / TIMELINE))
        shown = f"wrote {run.folder / TIMELINE}"
        # a full-batch run gathers its rows once, before its steps
        if any(span.name == "gather" for span in own):
            share = overlap_share(own, "gather", "compute")
            shown = f"{share:.0%} of the gather time overlapped with compute; {shown}"
        run.reporter.say(shown)
