"""A small graph and a run on it, as commands make them, and what commands answer."""

from pathlib import Path
from typing import Any

import pytest
from quick_runs import made_once

from gcnzc.cli import main

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
