"""Spans are added up correctly, and written as a trace."""

import json

import pytest
import torch

from gcnzc.system.spans import Seconds, Span, Stage, seconds_outside
from gcnzc.system.streams import clock_of
from gcnzc.train.tracing import overlap_share, write_trace


def spans(name, *parts, lane="a"):
    return [Span(name, lane, begin, end) for begin, end in parts]


@pytest.mark.parametrize(
    ("gathers", "computes", "share"),
    [
        ([(0, 2)], [(0, 2)], 1.0),
        ([(0, 2)], [(1, 5)], 0.5),
        ([(0, 2)], [(2, 3)], 0.0),
        ([(0, 4)], [(0, 1), (2, 3)], 0.5),
        # what overlaps counts once
        ([(0, 4)], [(0, 2), (1, 2), (1, 3)], 0.75),
        # gathers on several threads count each
        ([(0, 2), (0, 2), (4, 8)], [(0, 2)], 0.5),
        ([], [(0, 1)], 0.0),
        ([(0, 1)], [], 0.0),
    ],
)
def test_the_share_of_overlapped_time_is_computed(gathers, computes, share):
    found = overlap_share(
        spans("gather", *gathers) + spans("compute", *computes), "gather", "compute"
    )
    assert found == pytest.approx(share)
    seconds = sum(end - begin for begin, end in gathers)
    outside = seconds_outside(spans("gather", *gathers), spans("compute", *computes))
    assert outside == pytest.approx(seconds * (1 - share))


def test_a_trace_has_a_lane_for_each_thread(tmp_path):
    made = spans("gather", (10.0, 10.5), (11.0, 11.25), lane="worker 1")
    made += spans("compute", (10.25, 12.0), lane="model")
    write_trace(made, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert sorted(names.values()) == ["model", "worker 1"]
    told = [(names[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert told == [
        ("worker 1", "gather", 0.0, 500_000.0),
        ("worker 1", "gather", 1_000_000.0, 250_000.0),
        ("model", "compute", 250_000.0, 1_750_000.0),
    ]


class Later:
    """A moment that is past when it is told to be, or waited for."""

    def __init__(self, time_s):
        self.at_s, self.past = time_s, False

    def is_done(self):
        return self.past

    def time_s(self):
        self.past = True
        return self.at_s

    def seconds_to(self, later):
        return later.time_s() - self.time_s()


def test_seconds_include_stages_that_end_later():
    moments = [Later(second) for second in (1.0, 1.5, 4.0)]
    seconds = Seconds({"gather_s": 2.0})
    gather = Stage("gather", "stream", *moments[:2])
    compute = Stage("compute", "model", *moments[1:])
    seconds.add([gather, compute])
    # nobody waited for them
    assert not any(moment.past for moment in moments)
    moments[1].past = True
    seconds.add([])
    assert not moments[2].past
    seconds.add_seconds("sample_s", 0.25)
    assert seconds.all() == {"gather_s": 2.5, "compute_s": 2.5, "sample_s": 0.25}
    assert moments[2].past
    assert gather.span() == Span("gather", "stream", 1.0, 1.5)


def test_host_events_are_complete_immediately():
    now = clock_of(torch.device("cpu"))
    first, second = now(), now()
    assert first.is_done()
    assert first.time_s() <= second.time_s()
    assert first.seconds_to(second) == second.time_s() - first.time_s()
