"""Commands that use one folder at the same time, and files that change while they are in use."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from command_runs import failed, started, wait_for
from limits import HANG_S
from stopped import STOPS, wait_for_state
from training import saved

from gcnzc import prepare
from gcnzc.cli import main
from gcnzc.datasets.generate import Shape, make

OPTIONS = ["--fanouts", "3,3", "--hidden", "4", "--batch-size", "100"]
OPTIONS += ["--threads", "1"]
# until a signal ends it; nothing is evaluated
ENDLESS = [*OPTIONS, "--epochs", "1000000", "--evaluate-every", "1000000"]


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graph")
    # of several pages per file
    make(folder / "raw", "planted", Shape(1000, 5000, 16, 3), seed=3)
    prepare(folder / "raw", folder / "graph")
    return folder / "graph"


@pytest.mark.processes
def test_a_run_in_progress_is_left_alone_until_its_process_ends(graph, tmp_path, capsys):
    run = tmp_path / "run"
    with started("train", graph, *ENDLESS, "--out", run) as process:
        wait_for((run / "record.jsonl").exists, process)
        refusal = f"error: another process (pid {process.pid}) is training in {run}"
        for words in (
            ["train", graph, *OPTIONS, "--out", run],
            ["train", graph, *OPTIONS, "--out", run, "--runs", "2"],
            ["train", "--resume", run],
        ):
            assert failed(capsys, words, 1)[0] == refusal
        for words in (["evaluate", run], ["predict", run, "--out", tmp_path / "p.csv"]):
            error, hint = failed(capsys, words, 1)
            assert error.startswith(f"error: the run in {run} has no evaluated model yet")
            assert hint.startswith("hint: wait for its first evaluation")
        # the kernel releases the lock of a process that is killed
        process.kill()
        process.wait()
        assert main(["train", "--resume", str(run), "--epochs", "1"]) == 0
    assert not (run / "runs.json").exists()


def test_a_run_that_does_not_begin_leaves_no_folder(graph, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in ([], ["--runs", "2"]):
        failed(capsys, ["train", graph, *OPTIONS, "--hidden", 10**13, *words], 1)
        assert not [path for path in Path().rglob("*") if path.is_file()]
        assert not Path("runs").exists()


@pytest.mark.processes
def test_a_second_process_does_not_prepare_the_same_folder(graph, tmp_path, capsys):
    raw, dest = graph.parent / "raw", tmp_path / "new"
    with started("prepare", raw, dest, program=STOPS) as process:
        wait_for_state(process)
        assert not dest.exists()
        error, _ = failed(capsys, ["prepare", raw, dest], 1)
        process.send_signal(signal.SIGCONT)
        _, of_first = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, of_first
    assert error == f"error: another process (pid {process.pid}) is writing {dest}"
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert main(["info", str(dest), "--verify"]) == 0


@pytest.mark.processes
def test_a_file_that_is_truncated_while_it_is_read_is_named(graph, tmp_path, capsys):
    data, run = tmp_path / "graph", tmp_path / "run"
    shutil.copytree(graph, data)
    with started("train", data, *ENDLESS, "--out", run) as process:
        wait_for((run / "record.jsonl").exists, process)
        os.truncate(data / "features.npy", 4096)
        out, err = process.communicate(timeout=HANG_S)
    # not killed by SIGBUS
    assert process.returncode == 1
    assert out == ""
    wrong = f"error: {data / 'features.npy'} was truncated while it was in use, or its disk failed"
    assert f"{wrong}\nhint: restore the file" in err
    assert "features.npy has 4,096 bytes" in failed(capsys, ["train", "--resume", run], 1)[0]
    shutil.copyfile(graph / "features.npy", data / "features.npy")
    assert main(["train", "--resume", str(run), "--epochs", "1"]) == 0


def test_a_run_does_not_resume_on_another_graph_in_the_folder_of_its_graph(graph, tmp_path, capsys):
    data, run = tmp_path / "graph", tmp_path / "run"
    shutil.copytree(graph, data)
    assert main(["train", str(data), *OPTIONS, "--epochs", "1", "--out", str(run)]) == 0
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    # of the same sizes: with other splits, and with other features
    make(tmp_path / "raw", "planted", Shape(1000, 5000, 16, 3), seed=4)
    for features, differing in (
        ([], "features.npy, indices.npy, indptr.npy, labels.npy, split/"),
        (["--features", tmp_path / "other.npy"], "features.npy differ"),
    ):
        shutil.rmtree(data)
        source = graph.parent / "raw" if features else tmp_path / "raw"
        np.save(tmp_path / "other.npy", np.ones((1000, 16), np.float32))
        assert main(["prepare", str(source), str(data), *map(str, features)]) == 0
        err, _ = failed(capsys, ["train", "--resume", run, "--epochs", "2"], 1)
        assert f"error: {data} is not the graph that the run in {run} was trained on: " in err
        assert f"trained on: {differing}" in err
    assert before == {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    # a copy of the graph
    assert main(["train", str(graph), "--resume", str(run), "--epochs", "2"]) == 0


@pytest.mark.processes
def test_files_that_are_removed_from_the_run_folder_are_written_again(graph, tmp_path):
    run = tmp_path / "run"
    words = [*OPTIONS, "--epochs", "1000000", "--checkpoint-every-s", "0"]
    with started("train", graph, *words, "--out", run) as process:
        wait_for(lambda: (run / "best.pt").exists(), process)
        for path in run.iterdir():
            if path.is_file():
                path.unlink(missing_ok=True)
        wait_for((run / "config.json").exists, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert "; resume with `gcnzc train --resume " in err
    lines = [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(len(lines)))
    assert main(["evaluate", str(run)]) == 0
    assert main(["train", "--resume", str(run), "--epochs", str(len(lines) + 1)]) == 0


@pytest.mark.processes
def test_half_written_files_of_a_killed_run_are_removed_when_it_resumes(graph, tmp_path):
    run = tmp_path / "run"
    words = [*ENDLESS, "--checkpoint-every-s", "0"]
    with started("train", graph, *words, "--out", run) as process:
        wait_for((run / "record.jsonl").exists, process)
        while not (left := list(run.glob("checkpoints/.*"))):
            process.send_signal(signal.SIGCONT)
            time.sleep(0.01)
            process.send_signal(signal.SIGSTOP)
        process.kill()
        process.wait()
    (path,) = left
    assert path.name.endswith(f"-0.{process.pid}.partial.pt")
    # of a process that runs
    others = run / f".classes.{os.getpid()}.partial.csv"
    others.touch()
    last = str(saved(run)["epoch"] + 1)
    assert main(["train", "--resume", str(run), "--epochs", last]) == 0
    assert list(run.rglob(".*")) == [others]
