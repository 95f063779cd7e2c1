"""A full or read-only disk is an error with a hint; no file is left half written or lost.

A process with mounts of its own runs the commands on a small disk in memory.
"""

import contextlib
import gc
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gcnzc.cli import main
from gcnzc.train import checkpoint

pytestmark = pytest.mark.slow

SIZES = ["--nodes", "1500", "--edges", "6000", "--num-features", "16", "--classes", "4"]
TRAINING = ["--layers", "2", "--fanouts", "4,4", "--hidden", "16", "--epochs", "3"]
TRAINING += ["--batch-size", "128", "--threads", "1", "--checkpoint-every-s", "0"]
DISK_BYTES = 4 << 20
# bytes that are free: each command fails with some, at different places, and succeeds with others
FREE = [0, 1 << 12, 1 << 14, 1 << 16, 1 << 17, 1 << 20]
OLD = b"old" * 1000
# commands by what they write on the disk
FOLDERS = {
    "make": lambda base, disk: ["make", disk / "new", *SIZES],
    "prepare": lambda base, disk: ["prepare", base / "raw", disk / "new"],
    "embed": lambda base, disk: ["embed", base / "graph", disk / "new", "--dims", 8],
}
FILES = {
    "evaluate": ("p.npy", lambda run, out: ["evaluate", run, "--predictions", out]),
    "predict npy": ("p.npy", lambda run, out: ["predict", run, "--out", out]),
    "predict csv": ("p.csv", lambda run, out: ["predict", run, "--out", out]),
    "predict gz": ("p.csv.gz", lambda run, out: ["predict", run, "--out", out]),
    "embed-nodes": ("p.npy", lambda run, out: ["embed-nodes", run, "--out", out]),
    "embed-nodes scratch": (
        "p.npy",
        lambda run, out: ["embed-nodes", run, "--out", out, "--scratch", out.parent / "scratch"],
    ),
    "export": ("p.pt2", lambda run, out: ["export", run, "--out", out]),
    "plot": ("p.png", lambda run, out: ["plot", run, "--out", out]),
}
RUNS = {
    "train": lambda base, disk: ["train", base / "graph", *TRAINING, "--out", disk / "run"],
    "train runs": lambda base, disk: [
        *("train", base / "graph", *TRAINING, "--runs", 2, "--out", disk / "run")
    ],
}
READ_ONLY = {
    **FOLDERS,
    **RUNS,
    "prepare deep": lambda base, disk: ["prepare", base / "raw", disk / "new" / "deep"],
    "resume": lambda base, disk: ["train", "--resume", disk / "old", "--epochs", 4],
    "plot": lambda base, disk: ["plot", disk / "old"],
    "evaluate": lambda base, disk: ["evaluate", disk / "old", "--predictions", disk / "p.npy"],
    "predict": lambda base, disk: ["predict", disk / "old", "--out", disk / "p.csv"],
}


@contextlib.contextmanager
def mounted(disk: Path):
    """A disk in memory, which only this process sees."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(disk)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        gc.collect()
        # lazily, since a library may keep a file open after a failed write
        subprocess.run(["umount", "-l", str(disk)], check=True)


def outcome_of(words) -> dict:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(word) for word in words])
    return {"status": status, "out": out.getvalue(), "err": err.getvalue()}


def listed(disk: Path) -> list[str]:
    return sorted(str(path.relative_to(disk)) for path in disk.rglob("*") if path.name != "filler")


def damaged_files(folder: Path) -> list[str]:
    """The files of a run that are not whole, with the reason."""
    wrong = []
    for path in folder.rglob("*"):
        try:
            if path.suffix == ".json":
                json.loads(path.read_text())
            elif path.suffix == ".jsonl":
                [json.loads(line) for line in path.read_text().splitlines()]
            elif path.suffix == ".pt":
                checkpoint.load(path)
            elif path.suffix == ".png":
                assert path.read_bytes().endswith(b"IEND\xaeB`\x82"), "it is cut short"
        except (ValueError, AssertionError) as error:
            wrong.append(f"{path.name}: {error}")
    return wrong


def write_outcomes(base: Path) -> None:
    """Run all commands, and write a line for each."""
    torch.set_num_threads(1)
    disk = base / "disk"
    disk.mkdir()
    found = {}
    for free in FREE:
        commands = {name: (None, make(base, disk)) for name, make in (FOLDERS | RUNS).items()}
        for name, (file, words) in FILES.items():
            commands[name] = file, words(base / "run", disk / file)
        for name, (file, words) in commands.items():
            with mounted(disk):
                if file is not None:
                    (disk / file).write_bytes(OLD)
                rest = shutil.disk_usage(disk).free - free
                with (disk / "filler").open("wb") as filler:
                    os.posix_fallocate(filler.fileno(), 0, rest)
                outcome = outcome_of(words)
                outcome |= {"files": listed(disk), "damaged": damaged_files(disk / "run")}
                if file is not None:
                    outcome["is_old"] = (disk / file).read_bytes() == OLD
                found[f"{name} {free}"] = outcome
    for name, make in READ_ONLY.items():
        with mounted(disk):
            shutil.copytree(base / "run", disk / "old")
            before = listed(disk)
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            found[f"{name} read-only"] = outcome_of(make(base, disk)) | {
                "is_same": listed(disk) == before
            }
    (base / "outcomes.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What each command printed and left."""
    private = ["unshare", "--mount", "--propagation", "private"]
    trial = subprocess.run([*private, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True)
    if trial.returncode:
        pytest.skip("this user may not mount disks")
    base = tmp_path_factory.mktemp("disk")
    for words in (
        ["make", base / "raw", *SIZES],
        ["prepare", base / "raw", base / "graph"],
        ["train", base / "graph", *TRAINING, "--out", base / "run"],
    ):
        assert main([str(word) for word in words]) == 0
    code = f"import test_full_disk as t; t.write_outcomes(t.Path({str(base)!r}))"
    done = subprocess.run(
        [*private, sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((base / "outcomes.json").read_text())


def error_of(outcome) -> tuple[str, str]:
    """The error and the hint of a command that failed."""
    assert outcome["status"] in (1, 2), outcome
    assert "Traceback" not in outcome["err"], outcome
    lines = [line for line in outcome["err"].splitlines() if line.startswith(("error:", "hint:"))]
    assert [line.split(":")[0] for line in lines] == ["error", "hint"], outcome
    return lines[0], lines[1]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_on_a_full_disk_is_whole_or_not_there(outcomes, name):
    statuses = set()
    for free in FREE:
        outcome = outcomes[f"{name} {free}"]
        statuses.add(outcome["status"])
        if outcome["status"]:
            error, hint = error_of(outcome)
            assert error.startswith("error: no space for "), outcome
            assert "free some space" in hint
            assert outcome["files"] == [], outcome
    assert statuses == {0, 1}


@pytest.mark.parametrize("name", FILES)
def test_a_file_on_a_full_disk_remains_as_it_was(outcomes, name):
    file, _ = FILES[name]
    statuses = set()
    for free in FREE:
        outcome = outcomes[f"{name} {free}"]
        statuses.add(outcome["status"])
        # a scratch folder that has rows remains, for the next attempt
        kept = [path for path in outcome["files"] if path.startswith("scratch")]
        assert outcome["files"] == [file, *kept], outcome
        assert not kept or "scratch/scratch.json" in kept
        assert outcome["is_old"] == (outcome["status"] != 0)
        if outcome["status"]:
            error, hint = error_of(outcome)
            assert error.startswith("error: no space left on "), outcome
            assert file in error or "/scratch/" in error
            assert "free space on it" in hint
    assert statuses == {0, 1}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_full_disk_has_no_file_that_is_half_written(outcomes, name):
    statuses = set()
    for free in FREE:
        outcome = outcomes[f"{name} {free}"]
        statuses.add(outcome["status"])
        assert outcome["damaged"] == [], outcome
        assert not [file for file in outcome["files"] if "partial" in file], outcome
        if outcome["status"]:
            error, hint = error_of(outcome)
            assert re.search("no space left|No space left", error), outcome
            assert "free space on" in hint, outcome
    assert statuses == {0, 1}


@pytest.mark.parametrize("name", READ_ONLY)
def test_a_read_only_disk_is_an_error_with_a_hint(outcomes, name):
    outcome = outcomes[f"{name} read-only"]
    error, hint = error_of(outcome)
    # the path of a single file is checked before the work begins
    assert re.search("Read-only file system|this user may not write to", error), outcome
    assert "choose" in hint, outcome
    assert outcome["is_same"]
