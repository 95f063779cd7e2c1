"""A run that is killed at any moment resumes and ends with the same parameters."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from limits import HANG_S
from training import assert_same_run

from gcnzc.graph import load

OPTIONS = ["--epochs", "4", "--batch-size", "64", "--fanouts", "5,5"]
OPTIONS += ["--hidden", "32", "--checkpoint-every-s", "0.02", "--threads", "2"]


def start(*words: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "gcnzc", *map(str, words)]
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, **quiet)


def finish(*words: object) -> str:
    process = start(*words)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, err
    return out


def killed_after(seconds: float, *words: object) -> float | None:
    """Kill the command if it is still at work after `seconds`; else, how long it took."""
    begin = time.monotonic()
    process = start(*words)
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode in (0, -signal.SIGKILL)
    return time.monotonic() - begin if process.returncode == 0 else None


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graph")
    finish("make", folder / "raw", "--nodes", 4000, "--edges", 20000, "--num-features", 32)
    finish("prepare", folder / "raw", folder / "prepared")
    return folder / "prepared"


@pytest.fixture(scope="module")
def uninterrupted(graph):
    """A whole run, and the seconds it took."""
    begin = time.monotonic()
    finish("train", graph, *OPTIONS, "--out", graph.parent / "whole")
    return graph.parent / "whole", time.monotonic() - begin


@pytest.mark.processes
@pytest.mark.parametrize(
    "kills", [1, pytest.param(20, marks=pytest.mark.slow, id="20 random moments")]
)
def test_a_run_killed_while_training_resumes(kills, graph, uninterrupted, tmp_path):
    whole, seconds = uninterrupted
    dice, killed, runs = random.Random(kills), 0, 0
    while killed < kills:
        run, runs = tmp_path / f"run-{runs}", runs + 1
        words: list[object] = ["train", graph, *OPTIONS, "--out", run]
        while killed < kills:
            # start-up is about half of the time, and kills there show little
            took = killed_after(seconds * dice.uniform(0.4, 1.0), *words)
            if took is not None:
                # the run that was timed compiled, or the machine was busy
                seconds = min(seconds, took)
                break
            killed += 1
            if (run / "config.json").exists():
                words = ["train", "--resume", run]
        if not (run / "result.json").exists():
            finish(*words)
        assert_same_run(run, whole)


@pytest.mark.processes
def test_a_run_interrupted_by_the_user_resumes(graph, uninterrupted, tmp_path):
    process = start("train", graph, *OPTIONS, "--out", tmp_path / "run")
    while not (tmp_path / "run" / "record.jsonl").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert out == ""
    assert "error: stopped in epoch" in err
    assert f"hint: `gcnzc train --resume {tmp_path / 'run'}` resumes the run" in err
    assert "Traceback" not in err
    assert (tmp_path / "run" / "curves.png").stat().st_size > 1000
    line = json.loads(finish("train", "--resume", tmp_path / "run"))
    assert line["epochs"] == 4
    assert_same_run(tmp_path / "run", uninterrupted[0])


@pytest.mark.processes
@pytest.mark.parametrize(
    "kills", [1, pytest.param(20, marks=pytest.mark.slow, id="20 random moments")]
)
def test_a_preparation_that_is_killed_leaves_no_folder(kills, graph, tmp_path):
    source, dest = graph.parent / "raw", tmp_path / "prepared"
    begin = time.monotonic()
    finish("prepare", source, tmp_path / "whole")
    seconds, dice = time.monotonic() - begin, random.Random(kills)
    killed = 0
    while killed < kills:
        took = killed_after(seconds * dice.uniform(0.4, 1.0), "prepare", source, dest)
        if took is None:
            killed += 1
        else:
            seconds = min(seconds, took)
        if dest.exists():
            load.verify(dest)
            for path in sorted(dest.rglob("*"), reverse=True):
                path.unlink() if path.is_file() else path.rmdir()
            dest.rmdir()
    finish("prepare", source, dest)
    load.verify(dest)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["prepared", "whole"]
