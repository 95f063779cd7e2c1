"""The benchmark of mixed precision compares the same seeds."""

import json
import math

import pytest

from bench import harness
from bench.training import accuracy, precision
from gcnzc.cli import parser

QUICK = "--model sage --layers 1 --fanouts 4 --hidden 8 --lr 0.05 --batch-size 256 --epochs 2"


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    return tmp_path / "results" / "precision.jsonl"


def test_the_same_seeds_are_compared(monkeypatch, results):
    recipes = [accuracy.Recipe("digits", 0.0, QUICK)]
    monkeypatch.setattr(accuracy, "RECIPES", recipes)
    status = precision.main(["digits", "--seeds", "2", "--options", "--epochs 3"])
    (line,) = map(json.loads, results.read_text().splitlines())
    assert status == int(not line["passes"])
    assert line["epochs"] == [3] * 4
    low, high = line["interval_points"]
    assert low <= line["difference_points"] <= high
    assert line["passes"] == (abs(line["difference_points"]) <= 0.2 or low <= 0 <= high)
    difference = line["test_percent"] - line["float32_percent"]
    assert math.isclose(line["difference_points"], difference, abs_tol=1e-9)
    assert math.isclose(
        line["difference_points"], sum(line["differences_points"]) / 2, abs_tol=1e-3
    )
    assert line["epoch_s"] > 0
    assert line["float32_epoch_s"] > 0
    assert line["command"].endswith("--epochs 3 --precision bf16")


def test_cases_are_presets_and_graphs(capsys):
    for name in ("tuned/cora-gcn", "amazon_photo"):
        case = precision.find_case(name)
        assert parser.parse(["train", "data", *case.options.split()]).epochs >= 1
        assert parser.parse(case.prepare.split()) is not None
    for words in (["corra"], ["cora", "--seeds", "1"]):
        with pytest.raises(SystemExit):
            precision.main(words)
    assert "neither a preset nor a graph" in capsys.readouterr().err.split("\n\n")[0]
