"""Benchmark records have their machine and commit, and measurements are interleaved."""

import json
import re
import subprocess

import pytest
from programs import output_of
from virtual_time import VirtualTime

from bench import harness


def test_measure_returns_the_median_and_the_spread(monkeypatch):
    clock, seconds = VirtualTime(), iter([9.0, 3.0, 1.0, 2.0, 5.0, 4.0])
    monkeypatch.setattr(harness, "time", clock)
    timing = harness.measure(lambda: clock.sleep(next(seconds)), calls=5, warmup=1)
    # the warm-up is not counted
    assert timing == harness.Timing(
        median_s=3.0, fast_s=pytest.approx(1.2), slow_s=pytest.approx(4.8), calls=5
    )


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
    results = tmp_path / "of" / "runs"
    monkeypatch.setattr(harness, "RESULTS", results)
    for way in ("ours", "theirs"):
        line = harness.record("x", {"way": way}, harness.Timing(0.25, 0.2, 0.3, 7), seeds_per_s=4.0)
    first, second = map(json.loads, (results / "x.jsonl").read_text().splitlines())
    assert (first["way"], second["way"]) == ("ours", "theirs")
    assert second == line
    assert second["median_s"] == 0.25
    assert second["seeds_per_s"] == 4.0
    for name in ("time", "commit", "cpu", "cores", "threads", "gpu", "python", "torch", "numba"):
        assert second[name], name
    assert "250.000 ms" in capsys.readouterr().out


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with a commit, where `record` adds lines."""
    root = tmp_path / "checkout"
    results = root / "bench" / "results"
    results.mkdir(parents=True)
    for name in ("gcnzc/a.py", "bench/b.py", "docs/page.md", "pyproject.toml"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("x\n")
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "x")):
        subprocess.run(["git", *words], cwd=root, check=True)
    for name, value in (("ROOT", root), ("OWN_RESULTS", results), ("RESULTS", results)):
        monkeypatch.setattr(harness, name, value)
    harness._changed_code.cache_clear()
    harness.commit.cache_clear()
    yield root
    harness._changed_code.cache_clear()
    harness.commit.cache_clear()


@pytest.mark.parametrize("name", ["gcnzc/a.py", "bench/new.py", "kernels/new.py", "pyproject.toml"])
def test_nothing_is_recorded_with_uncommitted_changes_to_code(name, checkout, monkeypatch):
    (checkout / name).parent.mkdir(exist_ok=True)
    (checkout / name).write_text("y\n")
    folder = name.partition("/")[0]
    with pytest.raises(SystemExit, match=rf"^error: .*({name}|{folder}/)\nhint: "):
        harness.record("x", {})
    assert not list((checkout / "bench" / "results").iterdir())
    # elsewhere, a line says so
    monkeypatch.setattr(harness, "RESULTS", checkout / "runs")
    assert harness.record("x", {})["commit"].endswith("-dirty")


def test_lines_and_pages_are_no_changes_to_code(checkout):
    (checkout / "docs" / "page.md").write_text("y\n")
    # and neither is the first line for the second
    commits = {harness.record(name, {})["commit"] for name in ("x", "y", "x")}
    assert len(commits) == 1
    assert re.fullmatch(r"[0-9a-f]{7,}", commits.pop())
    assert len((checkout / "bench" / "results" / "x.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("missing", ["git", "checkout"])
def test_nothing_is_recorded_without_a_commit(missing, checkout, monkeypatch):
    if missing == "git":
        monkeypatch.setenv("PATH", "")
    else:
        (checkout / ".git").rename(checkout / "git")
    with pytest.raises(
        SystemExit, match=r"^error: .* git finds none in .*\nhint: set GCNZC_COMMIT"
    ):
        harness.record("x", {})
    assert not list((checkout / "bench" / "results").iterdir())
    monkeypatch.setattr(harness, "RESULTS", checkout / "runs")
    assert harness.record("x", {})["commit"] == "unknown"
    monkeypatch.setattr(harness, "RESULTS", harness.OWN_RESULTS)
    monkeypatch.setenv("GCNZC_COMMIT", "abc")
    assert harness.record("x", {})["commit"] == "abc"


@pytest.mark.processes
@pytest.mark.parametrize("module", ["triton", "numba"])
def test_the_harness_works_without_optional_modules(module):
    # peers are measured in environments of their own
    program = (
        f"import sys; sys.modules[{module!r}] = None; from bench import harness; harness.machine()"
    )
    output_of("-c", program)
