"""What commands print: one JSON line, or the help, and tables."""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TextIO

from gcnzc.cli.errors import OutputClosed
from gcnzc.system.files import to_json


@contextlib.contextmanager
def flushed_output() -> Iterator[None]:
    """Flush stdout at the end of the `with`.

    Raises:
        OutputClosed: the reader of stdout has closed the pipe, as `head` does.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # the interpreter flushes stdout when it exits, and would report the closed pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputClosed from None


def print_json(line: Mapping[str, Any]) -> None:
    """Print one JSON line. A closed pipe ends the command without a message."""
    with flushed_output():
        print(to_json(line))


def align_columns(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """Format rows as lines of text with aligned columns; a row may have fewer cells than others.

    Args:
        rows: the cells of each row.
        left: the columns that are aligned left; the others are aligned right.
    """
    widths = [
        max(len(row[column]) for row in rows if column < len(row))
        for column in range(max(map(len, rows)))
    ]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in rows
    ]


@contextlib.contextmanager
def result_lines_to_stderr() -> Iterator[None]:
    """Within the `with`, what child processes print to standard output goes to standard error."""
    sys.stdout.flush()
    before = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(before, 1)
        os.close(before)


@contextlib.contextmanager
def logged_with(say: Callable[[str], object]) -> Iterator[None]:
    """Within the `with`, call `say` with each message that the package logs."""
    logger, handler = logging.getLogger("gcnzc"), _Handler(say)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def warned_with(say: Callable[[str], object]) -> Iterator[None]:
    """Within the `with`, call `say` with the text of a user warning, without its line of code."""
    shown = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, UserWarning) and file is None:
            say(f"warning: {message}")
        else:
            shown(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown


class _Handler(logging.Handler):
    def __init__(self, say: Callable[[str], object]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(self.format(record))
