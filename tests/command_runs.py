"""A small graph and a run on it, as commands make them, and what commands answer."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from limits import HANG_S
from quick_runs import made_once

from gcnzc.cli import main

ROOT = Path(__file__).parents[1]
SIZES = ["--nodes", "1500", "--edges", "6000", "--num-features", "16", "--classes", "4"]
SMALL = ["--epochs", "2", "--fanouts", "4,4", "--hidden", "16"]
SMALL += ["--batch-size", "32", "--lr", "0.01"]


@pytest.fixture(scope="session")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small graph in OGB's layout; beside it are the prepared graph and a run."""

    def make(folder: Path) -> None:
        for words in (
            ["make", folder / "raw", *SIZES],
            ["prepare", folder / "raw", folder / "graph"],
            ["train", folder / "graph", *SMALL, "--out", folder / "run"],
        ):
            assert main([str(word) for word in words]) == 0

    return made_once(tmp_path_factory, "commands", make) / "raw"


@pytest.fixture(scope="session")
def graph(raw: Path) -> Path:
    """The same graph, prepared."""
    return raw.parent / "graph"


@pytest.fixture(scope="session")
def run(raw: Path) -> Path:
    """A finished run."""
    return raw.parent / "run"


def ran(capsys: Any, *words: object, status: int = 0) -> tuple[Any, str]:
    """Run a command: the JSON line that it prints, None if it fails, and its messages."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == status
    out, err = capsys.readouterr()
    assert out.count("\n") == (not status)
    return json.loads(out) if out else None, err


@contextmanager
def started(
    *words: object,
    program: Sequence[str] = (sys.executable, "-m", "gcnzc"),
    cwd: Path | None = None,
    **environment: str,
) -> Iterator[subprocess.Popen[str]]:
    """A command in a process of its own, which has ended at the end."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [*program, *map(str, words)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | environment,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(
    condition: Callable[[], object], process: "subprocess.Popen[str] | None" = None
) -> None:
    """Wait until a condition holds, while the process has not ended."""
    end = time.monotonic() + HANG_S
    while not condition():
        assert process is None or process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)


def failed(capsys: Any, words: list[object], status: int) -> tuple[str, str]:
    """The one error and the one hint that a command prints, without a traceback."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line.startswith(("error: ", "hint: "))]
    assert [line.split(":")[0] for line in lines] == ["error", "hint"], err
    return lines[0], lines[1]
