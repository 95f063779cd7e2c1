"""A run that is killed at any moment resumes and ends with the same parameters."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from limits import HANG_S
from training import assert_same_run, lines

from gcnzc.exchange.rendezvous import find_children
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


def killed_after(seconds: float, dice: random.Random, *words: object) -> float | None:
    """Kill a process of the command if it is still at work after `seconds`; else, how long it took.

    A launcher replaces a worker that is killed, and the run goes on.
    """
    begin, killed = time.monotonic(), False
    process = start(*words)
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        workers = (
            [child.pid for child in find_children(process.pid)] if "--workers" in words else []
        )
        os.kill(dice.choice([process.pid, *workers]), signal.SIGKILL)
        killed = True
    # which includes the end of workers, since they have its pipes
    process.communicate(timeout=HANG_S)
    assert process.returncode in (0, -signal.SIGKILL)
    return None if killed else time.monotonic() - begin


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graph")
    finish("make", folder / "raw", "--nodes", 4000, "--edges", 20000, "--num-features", 32)
    finish("prepare", folder / "raw", folder / "prepared")
    return folder / "prepared"


def whole_run(graph: Path, run: Path, *more: object) -> float:
    """The seconds that a run takes which nothing interrupts."""
    begin = time.monotonic()
    finish("train", graph, *OPTIONS, *more, "--out", run)
    return time.monotonic() - begin


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kills", "more"),
    [
        (1, []),
        pytest.param(20, [], marks=pytest.mark.slow, id="20 random moments"),
        pytest.param(10, ["--workers", 2], marks=pytest.mark.slow, id="10 of two workers"),
    ],
)
def test_a_run_killed_while_training_resumes(kills, more, graph, tmp_path):
    whole = tmp_path / "whole"
    seconds = whole_run(graph, whole, *more)
    dice, killed, runs = random.Random(kills), 0, 0
    while killed < kills:
        run, runs = tmp_path / f"run-{runs}", runs + 1
        words: list[object] = ["train", graph, *OPTIONS, *more, "--out", run]
        while killed < kills:
            # start-up is about half of the time, and kills there show little
            took = killed_after(seconds * dice.uniform(0.4, 1.0), dice, *words)
            if took is not None:
                # the run that was timed compiled, or the machine was busy
                seconds = min(seconds, took)
                break
            killed += 1
            if (run / "result.json").exists():
                break
            if (run / "config.json").exists():
                words = ["train", "--resume", run, *more]
        if not (run / "result.json").exists():
            finish(*words)
        assert_same_run(run, whole)
        times = [value for line in lines(run) for key, value in line.items() if key.endswith("_s")]
        assert min(times) >= 0


@pytest.mark.processes
def test_a_run_interrupted_by_the_user_resumes(graph, tmp_path):
    whole_run(graph, tmp_path / "whole")
    process = start("train", graph, *OPTIONS, "--out", tmp_path / "run")
    while not (tmp_path / "run" / "record.jsonl").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert out == ""
    place = rf"(in|after) epoch \d; resume with `gcnzc train --resume {tmp_path / 'run'}`$"
    assert re.search(f"^stopped {place}", err, re.MULTILINE)
    assert "Traceback" not in err
    assert (tmp_path / "run" / "curves.png").stat().st_size > 1000
    line = json.loads(finish("train", "--resume", tmp_path / "run"))
    assert line["epochs"] == 4
    assert_same_run(tmp_path / "run", tmp_path / "whole")


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
        took = killed_after(seconds * dice.uniform(0.4, 1.0), dice, "prepare", source, dest)
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
