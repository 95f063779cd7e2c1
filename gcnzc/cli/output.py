"""Standard output: one JSON line, or the help."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from gcnzc.cli.errors import OutputClosed


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
        print(json.dumps(line, default=str))
