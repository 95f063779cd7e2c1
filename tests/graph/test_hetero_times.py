"""The unit of times: dates of graphs and seeds, time zones, and folders that keep the unit."""

import datetime

import numpy as np
import pandas as pd
import pytest
import torch
from hetero_graphs import pyg_sampler

import gcnzc
from gcnzc.graph import Graph, Table, from_tables
from gcnzc.graph.times import describe_wrong_time, parse_times

KNOWS = ("user", "knows", "user")
FACTORS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
DATES = ["2020-01-01", "2020-01-02", "2020-01-03"]


def graph_of(times, **options):
    """A graph in which user 0 is known by users 1, 2 and 3, at three times."""
    edges = {"edge_index": np.array([[1, 2, 3], [0, 0, 0]]), "time": times}
    return Graph.from_arrays({"user": 4}, {KNOWS: edges}, **options)


def seen(graph, time):
    """The users that user 0 sees at a time."""
    sampler = pyg_sampler(graph, [-1], temporal="uniform")
    return sampler.sample(("user", [0]), 0, time).nodes["user"][1:].tolist()


@pytest.mark.parametrize("unit", [None, "s", "ms", "us", "ns"])
def test_dates_of_seeds_have_the_unit_of_the_graph(unit, tmp_path):
    graph = graph_of(np.array(DATES, "M8[D]"), time_unit=unit)
    assert graph.time_unit == (unit or "s")
    gcnzc.prepare(graph, tmp_path / "g")
    split = graph.sort_by_time("edge")
    for own in (graph, gcnzc.load(tmp_path / "g").graph, split):
        assert own.time_unit == graph.time_unit
        for kind in ("s", "ns"):
            assert seen(own, np.array(["2020-01-02"], f"M8[{kind}]")) == [1, 2]
        assert seen(own, [pd.Timestamp("2020-01-01 23:59:59")]) == [1]
        assert seen(own, pd.to_datetime(["2020-01-03"])) == [1, 2, 3]
        assert seen(own, pd.Series(pd.to_datetime(["2019-12-31"]))) == []
        assert seen(own, [datetime.datetime(2020, 1, 2)]) == [1, 2]
        assert seen(own, [datetime.date(2020, 1, 2)]) == [1, 2]
        assert seen(own, {"user": np.array(["2020-01-02"], "M8[D]")}) == [1, 2]
        integer = int(pd.Timestamp("2020-01-02").timestamp()) * FACTORS[unit or "s"]
        assert seen(own, [integer]) == [1, 2]
        assert seen(own, [integer - 1]) == [1]


def test_dates_of_seeds_are_rounded_down_and_those_of_the_graph_up():
    # the second edge is visible from 2020-01-01T00:00:02 on
    times = np.array(["2020-01-01T00:00:01.0", "2020-01-01T00:00:01.7", "2021-01-01"], "M8[ms]")
    graph = graph_of(times)
    assert seen(graph, np.array(["2020-01-01T00:00:01.5"], "M8[ms]")) == [1]
    assert seen(graph, np.array(["2020-01-01T00:00:01.9"], "M8[ms]")) == [1]
    assert seen(graph, np.array(["2020-01-01T00:00:02"], "M8[ms]")) == [1, 2]
    # also before 1970
    before = graph_of(np.array(["1960-01-01T00:00:01", "1970-01-01", "1970-01-01"], "M8[ms]"))
    assert seen(before, np.array(["1960-01-01T00:00:00.9"], "M8[ms]")) == []
    assert seen(before, np.array(["1960-01-01T00:00:01.1"], "M8[ms]")) == [1]


@pytest.mark.parametrize("zone", ["Europe/Berlin", "US/Pacific"])
def test_time_zones_are_converted_to_utc(zone):
    dates = pd.Series(pd.to_datetime(DATES)).dt.tz_localize("UTC")
    expected = graph_of(np.array(DATES, "M8[D]")).edges(KNOWS).time
    for given in (
        dates.dt.tz_convert(zone),
        pd.DatetimeIndex(dates).tz_convert(zone),
        dates.dt.tz_convert(zone).tolist(),
        [each.to_pydatetime() for each in dates.dt.tz_convert(zone)],
        dates.dt.tz_convert(zone).astype(object),
        dates.dt.tz_convert(zone).astype(f"datetime64[s, {zone}]"),
    ):
        assert torch.equal(graph_of(given).edges(KNOWS).time, expected)
    frame = pd.DataFrame({"date": dates.dt.tz_convert(zone)})
    graph = from_tables({"visit": Table(frame, time="date")})
    assert torch.equal(graph.nodes("visit").time, expected)
    assert graph.time_unit == "s"
    one = pd.Series(pd.to_datetime(["2020-01-02"])).dt.tz_localize("UTC").dt.tz_convert(zone)
    assert seen(graph_of(np.array(DATES, "M8[D]")), one) == [1, 2]


def test_wrong_units_and_missing_dates_are_rejected_with_a_message_that_names_them(tmp_path):
    with pytest.raises(ValueError, match="time_unit is 'days'"):
        graph_of([1, 2, 3], time_unit="days")
    with pytest.raises(ValueError, match=r"\[1\] is NaT, a missing time"):
        graph_of([pd.Timestamp("2020-01-01"), None, pd.Timestamp("2020-01-01")])
    with pytest.raises(ValueError, match="has type object\n\nhint: times are integers or dates"):
        graph_of([pd.Timestamp("2020-01-01"), "later", None])
    gcnzc.prepare(graph_of([1, 2, 3], time_unit="ms"), tmp_path / "g")
    assert gcnzc.load(tmp_path / "g").graph.time_unit == "ms"


@pytest.mark.parametrize("unit", list(FACTORS))
def test_an_integer_that_could_be_a_date_is_no_time(unit):
    for text, date in (
        ("20240301", "2024-03-01"),
        ("19000101", "1900-01-01"),
        ("21001231", "2100-12-31"),
        ("20240229", "2024-02-29"),
    ):
        for texts in ([text], ["7", date, text, "7"]):
            assert parse_times(texts, unit)[1] == texts.index(text)
        error = str(describe_wrong_time(f"--time {text}", text, unit))
        moment = np.datetime64(int(text), unit)
        assert f"--time {text} could be the date {date}, or {text} {unit} since 1970" in error
        assert f"which is {moment}" in error
        assert error.endswith(f"hint: write {date} for the date, or {text}{unit} for the integer")
        # both readings have a form, and the hint is followed
        seconds = int(np.datetime64(date, "s").astype(int)) * FACTORS[unit]
        times, wrong = parse_times([date, f"{text}{unit}", str(moment)], unit)
        assert wrong is None
        assert times.tolist() == [seconds, int(text), int(text)]
        # without a unit, there are no dates
        assert parse_times([text], None)[0].tolist() == [int(text)]
        assert parse_times([text], None)[1] is None
        assert parse_times([f"{text}{unit}"], None)[1] == 0
    assert "times of the graph are plain integers" in str(describe_wrong_time("x", "x", None))
