"""The benchmark of deep models records each kind and depth, and fails below its target."""

import json

import pytest

from bench import harness
from bench.training import depth

QUICK = "--model gcn --batch-size all --hidden 8 --norm layer --input-linear --output-linear"


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(depth, "OPTIONS", QUICK)
    monkeypatch.setattr(depth, "TARGET_LAYERS", 2)
    return tmp_path / "results" / "depth.jsonl"


@pytest.mark.processes
def test_kinds_and_depths_are_recorded_and_the_target_decides(results, monkeypatch):
    monkeypatch.setattr(depth, "TARGET_PERCENT", 0.0)
    words = ["--graph", "digits", "--seeds", "2", "--epochs", "1", "--layers", "2"]
    assert depth.main([*words, "--kinds", "pre-activation"]) == 0
    (line,) = map(json.loads, results.read_text().splitlines())
    assert (line["kind"], line["layers"], line["epochs"]) == ("pre-activation", 2, 1)
    assert line["test_percent"] == pytest.approx(sum(line["tests_percent"]) / 2, abs=0.01)
    assert line["peak_memory_bytes"] > 1 << 20
    assert "--pre-activation --residual --layers 2" in line["command"]
    # the same results, below another target
    monkeypatch.setattr(depth, "TARGET_PERCENT", 100.1)
    monkeypatch.setattr(depth, "gcnzc", lambda words: None)
    monkeypatch.setattr(depth, "measure", lambda *_: line)
    assert depth.main([*words, "--kinds", "pre-activation"]) == 1


def test_a_deviation_needs_two_seeds(capsys):
    with pytest.raises(SystemExit):
        depth.main(["--seeds", "1"])
    assert "at least two seeds" in capsys.readouterr().err
