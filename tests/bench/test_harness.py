"""Benchmark records have their machine and commit, and measurements are interleaved."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import harness


def test_measure_returns_the_median_and_the_spread():
    timing = harness.measure(lambda: time.sleep(0.002), calls=5, warmup=1)
    assert timing.calls == 5
    assert 0.002 <= timing.fast_s <= timing.median_s <= timing.slow_s < 0.1


def test_side_by_side_interleaves_the_measurements():
    called = []
    ways = {name: (lambda name=name: called.append(name)) for name in "abc"}
    timings = harness.side_by_side(ways, 3, warmup=1)
    rounds = ["".join(called[i : i + 3]) for i in range(0, 12, 3)]
    assert all(sorted(round_) == ["a", "b", "c"] for round_ in rounds)
    assert len(set(rounds)) > 1
    assert timings.keys() == ways.keys()
    assert {timing.calls for timing in timings.values()} == {3}


def test_record_appends_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    for way in ("ours", "theirs"):
        line = harness.record("x", {"way": way}, harness.Timing(0.25, 0.2, 0.3, 7), seeds_per_s=4.0)
    first, second = map(json.loads, (tmp_path / "results" / "x.jsonl").read_text().splitlines())
    assert (first["way"], second["way"]) == ("ours", "theirs")
    assert second == line
    assert second["median_s"] == 0.25
    assert second["seeds_per_s"] == 4.0
    for name in ("time", "commit", "cpu", "cores", "threads", "gpu", "python", "torch", "numba"):
        assert second[name], name
    assert "250.000 ms" in capsys.readouterr().out


@pytest.mark.parametrize("module", ["triton", "numba"])
def test_the_harness_works_without_optional_modules(module):
    # peers are measured in environments of their own
    program = (
        f"import sys; sys.modules[{module!r}] = None; from bench import harness; harness.machine()"
    )
    subprocess.run(
        [sys.executable, "-c", program], cwd=Path(harness.__file__).parents[1], check=True
    )
