"""`gcnzc train`: what it prints and records at the end of a run, and of a resumed one."""

import json
import signal
from pathlib import Path

import pytest
from command_runs import ran
from training import planted

from gcnzc.cli.parser import parse
from gcnzc.train import run as train_run
from gcnzc.train.errors import Interrupted
from gcnzc.train.progress import NullReporter

OPTIONS = ["--fanouts", "3,3", "--hidden", "4", "--batch-size", "100"]


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> Path:
    return planted(tmp_path_factory, 400, 2000, 8, 3)


def record_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]


def test_the_summary_of_a_run_with_a_feature_cache_has_its_hit_rates(graph, tmp_path, capsys):
    cache = ["--features", "cached:size=0.5"]
    result, err = ran(
        capsys, "train", graph, *OPTIONS, "--epochs", 1, *cache, "--out", tmp_path / "run"
    )
    (line,) = [line for line in err.splitlines() if "feature cache" in line and "hit" in line]
    assert f"{result['hit_rate']:.1%}" in line
    assert f"{result['predicted_hit_rate']:.1%} predicted" in line
    assert f"{result['bytes_saved'] / 1e6:.1f} MB" in line
    assert "function" not in line
    # a graph this small is gathered at a few megabytes per second
    assert " 0.0 GB/s" not in err


class StopAt(NullReporter):
    """Sends this process SIGTERM at the first message or task that begins with a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def say(self, text):
        if text.startswith(self.text):
            signal.raise_signal(signal.SIGTERM)

    def task(self, what):
        self.say(what)
        return super().task(what)


def stopped_run(graph, run, text):
    """Start a run of 9 epochs, evaluated after each fifth one, and stop it; see `StopAt`."""
    _, config = parse(["train", str(graph), *OPTIONS, "--epochs", "9", "--evaluate-every", "5"])
    with pytest.raises(Interrupted):
        train_run.train(config, run, StopAt(text))
    return run


def test_a_resumed_run_that_ends_between_two_evaluations_is_evaluated(graph, tmp_path, capsys):
    options = [graph, *OPTIONS, "--epochs", 2, "--evaluate-every", 5]
    expected, _ = ran(capsys, "train", *options, "--out", tmp_path / "whole")
    run = stopped_run(graph, tmp_path / "stopped", "epoch 2/9  loss")
    result, _ = ran(capsys, "train", "--resume", run, "--epochs", 2)
    assert result["test_accuracy"] == expected["test_accuracy"]
    assert result["best_epoch"] == 2
    lines = record_of(run)
    assert [line["epoch"] for line in lines] == [0, 1]
    assert lines[1]["valid_accuracy"] == record_of(tmp_path / "whole")[1]["valid_accuracy"]
    # the run can still be resumed with more epochs
    assert ran(capsys, "train", "--resume", run, "--epochs", 3)[0]["epochs"] == 3
    assert "valid_accuracy" in record_of(run)[2]


def test_a_run_without_an_evaluation_cannot_end_before_its_current_epoch(graph, tmp_path, capsys):
    run = stopped_run(graph, tmp_path / "run", "epoch 3/9")
    _, err = ran(capsys, "train", "--resume", run, "--epochs", 2, status=1)
    assert "was stopped in epoch 3, before its first evaluation" in err
    assert "hint: --epochs 3, or more" in err
    assert ran(capsys, "train", "--resume", run, "--epochs", 3)[0]["epochs"] == 3
