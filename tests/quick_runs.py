"""Fixtures that make tiny training runs quick, and folders that are made once for all tests."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import gcnzc.train.results
from gcnzc.train.plots import curves


@pytest.fixture(autouse=True, scope="module")
def quick_runs() -> Iterator[None]:
    """Leave the curves of runs empty, and give torch one thread.

    Plots, and threads of torch that wait for one another, take most of the time of tiny runs.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gcnzc.train.results, "curves", lambda runs, file: file.touch())
        yield
    torch.set_num_threads(before)


@pytest.fixture
def draws_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the curves of runs in a test."""
    monkeypatch.setattr(gcnzc.train.results, "curves", curves)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder `name` that `make` fills, once for all test processes of a session.

    Tests only read it.
    """
    base = factory.getbasetemp()
    # the processes of pytest-xdist have folders of their own in a common one
    made = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "made"
    made.mkdir(exist_ok=True)
    folder, done = made / name, made / f"{name}.done"
    with (made / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                done.touch()
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)
    return folder
