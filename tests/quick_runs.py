"""Fixtures that make tiny training runs quick."""

from collections.abc import Iterator

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
