"""Standard output: one JSON line."""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from gcnzc.cli.errors import OutputClosed


def print_json(line: Mapping[str, Any]) -> None:
    """Print one JSON line. A closed pipe ends the command without a message."""
    try:
        print(json.dumps(line, default=str), flush=True)
    except BrokenPipeError:
        # the interpreter flushes stdout when it exits, and would report the closed pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputClosed from None
