"""The callback with which long work reports its progress."""

from collections.abc import Callable
from typing import Protocol


class ProgressCallback(Protocol):
    """Called repeatedly during long work."""

    def __call__(self, done: int, total: int, figures: str | Callable[[], str] = "") -> None:
        """Report progress.

        Args:
            done: finished units of work.
            total: all units of work.
            figures: text to show after the progress bar, or a function that returns it, which is
                called only when the bar is drawn.
        """
