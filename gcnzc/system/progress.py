"""The callback with which long work reports its progress."""

from collections.abc import Callable
from typing import Protocol


class ProgressCallback(Protocol):
    """Called while work goes on."""

    def __call__(self, done: int, total: int, figures: str | Callable[[], str] = "") -> None:
        """Say how far the work is, and what to show beside it, or what gives that when it shows."""
