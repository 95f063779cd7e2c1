"""Report messages and progress: a progress bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from gcnzc.system.progress import ProgressCallback

REFRESH_S = 0.25


PLAIN_LINE_S = 10.0


class Reporter:
    """Prints messages and progress to a console, by default standard error."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, markup=False)

    @contextmanager
    def task(self, what: str) -> Iterator[ProgressCallback]:
        """Show the progress of a task within a `with`; yields a function (done, total, figures)."""
        bar = self._bar if self.console.is_terminal else self._lines
        with bar(what) as advance:
            yield advance

    @contextmanager
    def stages(self, what: str) -> Iterator[Callable[[str, int, int], None]]:
        """Show the progress of work in stages; yields a function (stage, done, total)."""
        with self.task(what) as advance:
            yield lambda stage, done, total: advance(done, total, stage)

    @contextmanager
    def _bar(self, what: str) -> Iterator[ProgressCallback]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task(what, total=None, figures="")
            last = 0.0

            def advance(done: int, total: int, figures: str | Callable[[], str] = "") -> None:
                nonlocal last
                if time.monotonic() - last >= REFRESH_S or done == total:
                    last = time.monotonic()
                    progress.update(task, completed=done, total=total, figures=_text(figures))

            yield advance

    @contextmanager
    def _lines(self, what: str) -> Iterator[ProgressCallback]:
        last = time.monotonic()

        def advance(done: int, total: int, figures: str | Callable[[], str] = "") -> None:
            nonlocal last
            if time.monotonic() - last >= PLAIN_LINE_S:
                last = time.monotonic()
                self.say(f"{what}  {done}/{total}  {_text(figures)}".rstrip())

        yield advance


class NullReporter(Reporter):
    """A reporter that prints nothing, for library calls and tests."""

    def say(self, text: str) -> None:
        """Do nothing."""

    @contextmanager
    def task(self, what: str) -> Iterator[ProgressCallback]:
        """Show nothing."""
        yield lambda done, total, figures="": None


def _text(figures: str | Callable[[], str]) -> str:
    return figures if isinstance(figures, str) else figures()
