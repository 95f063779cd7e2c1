"""A disk that is full, for a while or to the end, costs a run no step and no file it can save.

The limit of a process on the size of its files stands for the disk: a write beyond it is short, and
the next one fails.
"""

import errno
import json
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
from training import Listener, lines, planted, saved

from gcnzc.cli import main
from gcnzc.system import files
from gcnzc.train import checkpoint, listeners
from gcnzc.train.config import TrainConfig
from gcnzc.train.run import train

FILES = ("best.pt", "checkpoints", "record.jsonl")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> TrainConfig:
    graph = planted(tmp_path_factory, 600, 4000, 24, 4)
    sizes = {"fanouts": (5, 5), "hidden": 8, "batch_size": 64}
    return TrainConfig(data=graph, **sizes, epochs=6, checkpoint_every_s=0.0)


@pytest.fixture
def after_epoch(monkeypatch):
    """Call functions of a dict when the line of the epoch that is the key is written."""
    calls = {}
    format_epoch = listeners.format_epoch

    def watched(line, epochs):
        calls.get(line["epoch"] + 1, lambda: None)()
        return format_epoch(line, epochs)

    monkeypatch.setattr(listeners, "format_epoch", watched)
    return calls


def limit(num_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


@contextmanager
def restored_limit():
    """Decorates a test: pytest may write its report to a file as soon as the test returns."""
    try:
        yield
    finally:
        limit(resource.RLIM_INFINITY)


def warnings(text):
    return [line for line in text.splitlines() if line.startswith("warning: ")]


def steps_in_tensorboard(run: Path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(run / "tensorboard")).Reload()
    wanted = {"train/lr", "train/seeds", "valid/accuracy", "minibatch/accuracy", "time/epoch_s"}
    assert wanted <= set(events.Tags()["scalars"])
    return [event.step for event in events.Scalars("train/loss")]


@restored_limit()
def test_all_files_are_written_once_the_disk_has_space_again(config, tmp_path, after_epoch):
    run, listener = tmp_path / "run", Listener()
    # the record of two epochs fits, and a part of the next line
    after_epoch[2] = lambda: limit((run / "record.jsonl").stat().st_size + 100)
    whole = []
    after_epoch[4] = lambda: whole.append((lines(run), limit(resource.RLIM_INFINITY)))
    result = train(config, run, listener)
    assert result["unsaved"] == {}
    # no line is torn while the disk is full
    assert [line["epoch"] for line in whole[0][0]] == [0, 1]
    said = warnings("\n".join(listener.said))
    for name in FILES:
        assert (
            sum(f"{run / name} could not be written: File too large" in line for line in said) == 1
        )
        assert f"{run / name} could be written again" in listener.said
    assert [line["epoch"] for line in lines(run)] == list(range(6))
    assert checkpoint.load(run / "best.pt")["epoch"] + 1 == result["best_epoch"]
    assert saved(run)["epoch"] == 6
    assert not [path for path in run.rglob("*") if "partial" in path.name]
    assert steps_in_tensorboard(run) == list(range(1, 7))


@restored_limit()
def test_states_of_workers_are_written_once_the_disk_has_space_again(config, tmp_path, after_epoch):
    run, listener = tmp_path / "run", Listener()
    config = config.replace(strategy="local-sgd", epochs=4)
    after_epoch[2] = lambda: limit((run / "record.jsonl").stat().st_size + 100)
    after_epoch[3] = lambda: limit(resource.RLIM_INFINITY)
    assert train(config, run, listener)["unsaved"] == {}
    name = run / "checkpoints"
    assert sum(f"{name} could not be written: " in line for line in listener.said) == 1
    assert saved(run)["epoch"] == 4


def test_a_run_folder_that_is_moved_ends_the_run_and_is_resumed(config, tmp_path, after_epoch):
    run, moved = tmp_path / "run", tmp_path / "moved"
    after_epoch[2] = lambda: run.rename(moved)
    with pytest.raises(ValueError, match=r"run was moved or removed .*\n\nhint: .*--resume FOLDER"):
        train(config, run)
    after_epoch.clear()
    assert train(config.replace(resume=moved), moved)["epochs"] == 6


@pytest.mark.usefixtures("draws_curves")
@restored_limit()
def test_a_run_that_cannot_save_its_results_prints_them_and_fails(
    config, tmp_path, after_epoch, capsys
):
    run = tmp_path / "run"
    after_epoch[2] = lambda: limit(0)
    words = ["--fanouts", "5,5", "--hidden", "8", "--batch-size", "64"]
    words += ["--epochs", "4", "--checkpoint-every-s", "0"]
    assert main(["train", str(config.graph.data), "--out", str(run), *words]) == 1
    limit(resource.RLIM_INFINITY)
    after_epoch.clear()
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    result = json.loads(out)
    assert set(result["unsaved"]) == {*FILES, "tensorboard", "curves.png", "result.json"}
    last = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(last) == 1
    for name in result["unsaved"]:
        assert str(run / name) in last[0]
        assert sum(f"{run / name} could not be written" in line for line in warnings(err)) == 1
    assert [line["epoch"] for line in lines(run)] == [0, 1]
    assert not [path for path in run.rglob("*") if "partial" in path.name]
    # as the hint says
    assert (
        "hint: free space on that disk or make the folder writable, then "
        f"`gcnzc train --resume {run}` writes" in err
    )
    assert main(["train", "--resume", str(run)]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["test_accuracy"], again["unsaved"]) == (result["test_accuracy"], {})
    assert [line["epoch"] for line in lines(run)] == list(range(4))
    assert json.loads((run / "result.json").read_text())["best_epoch"] == again["best_epoch"]
    assert checkpoint.load(run / "best.pt")["epoch"] + 1 == again["best_epoch"]
    assert (run / "curves.png").stat().st_size > 0


def test_a_summary_of_runs_that_cannot_be_saved_is_printed(config, tmp_path, monkeypatch, capsys):
    write = files.write_json

    def write_unless_summary(path, value):
        if path.name == "summary.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, value)

    monkeypatch.setattr(files, "write_json", write_unless_summary)
    runs = tmp_path / "runs"
    words = ["--fanouts", "5,5", "--hidden", "8", "--epochs", "1", "--runs", "2"]
    assert main(["train", str(config.graph.data), "--out", str(runs), *words]) == 1
    out, err = capsys.readouterr()
    line = json.loads(out)
    assert line["unsaved"] == {"summary.json": "No space left on device"}
    assert line["runs"] == 2
    assert f"error: not saved: {runs / 'summary.json'} (No space left on device)" in err
    monkeypatch.undo()
    assert main(["train", "--resume", str(runs)]) == 0
    assert json.loads((runs / "summary.json").read_text())["unsaved"] == {}
