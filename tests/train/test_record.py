"""Records survive crashes, and their curves are drawn."""

import numpy as np
import pytest
from PIL import Image

from gcnzc.system import files
from gcnzc.train import record, tensorboard
from gcnzc.train.plots import curves
from gcnzc.train.tensorboard import EventFile

LINE = {
    "metric": "accuracy",
    "loss": 1.0,
    "minibatch_accuracy": 0.5,
    "sample_s": 1.0,
    "gather_s": 0.5,
    "compute_s": 2.0,
    "wait_s": 0.1,
    "epoch_s": 2.1,
}


def test_a_line_truncated_by_a_crash_is_ignored(tmp_path):
    path = tmp_path / "r.jsonl"
    record.rewrite(path, [{"epoch": 0}])
    with path.open("a") as file:
        file.write('{"epoch": 1, "lo')
    assert record.read(path) == [{"epoch": 0}]
    record.rewrite(path, record.read(path))
    journal = record.Journal(path)
    journal.pending = record.to_line({"epoch": 1})
    journal.append()
    assert record.read(path) == [{"epoch": 0}, {"epoch": 1}]


def test_damaged_json_is_reported(tmp_path):
    (tmp_path / "a.json").write_text('{"x": ')
    with pytest.raises(ValueError, match="damaged"):
        files.read_json(tmp_path / "a.json")


def test_curves_of_one_run_and_of_two_are_drawn(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        lines = []
        for epoch in range(3):
            valid = {"valid_accuracy": 0.4 + epoch / 10, "test_accuracy": 0.4} if epoch % 2 else {}
            lines.append(LINE | {"epoch": epoch, "best_possible_accuracy": 0.9} | valid)
        record.rewrite(tmp_path / name / "record.jsonl", lines)
    curves([tmp_path / "one"], tmp_path / "one.png")
    curves([tmp_path / "one", tmp_path / "two"], tmp_path / "two.png")
    for name in ("one.png", "two.png"):
        with Image.open(tmp_path / name) as picture:
            pixels = np.asarray(picture.convert("L"))
        assert pixels.shape[1] == 900
        assert (pixels < 200).mean() > 0.01  # something is drawn


def test_a_run_without_epochs_has_no_curves(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no epochs in(.|\n)*hint: give a run folder"):
        curves([tmp_path], tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []
    # of a run that was stopped in its first epoch
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=rf"hint: `gcnzc train --resume {tmp_path}`"):
        curves([tmp_path], tmp_path / "x.png")


def test_tensorboard_events_are_written_if_it_is_installed(tmp_path):
    pytest.importorskip("tensorboard")
    for first in (0, 2):
        events = EventFile(tmp_path / "events")
        for step in range(first, first + 3):
            events.add(step, {"loss": 1.0 / (step + 1), "metric": "accuracy"})
            events.append()
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(tmp_path / "events")).Reload()
    assert found.Tags()["scalars"] == ["loss"]
    assert [event.step for event in found.Scalars("loss")] == [0, 1, 2, 3, 4]


def test_a_tensorboard_that_cannot_be_imported_is_reported(tmp_path, monkeypatch):
    def fail(step):
        raise ModuleNotFoundError("No module named 'tensorboard.compat'")

    monkeypatch.setattr(tensorboard.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(tensorboard, "_head", fail)
    said = []
    events = EventFile(tmp_path / "events", said.append)
    for step in range(2):
        events.add(step, {"loss": 1.0})
        events.append()
    assert list(tmp_path.iterdir()) == []
    (text,) = said
    assert "TensorBoard does not import: ModuleNotFoundError" in text
