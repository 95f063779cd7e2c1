"""Kill a process at a function call, a moment that no load of the machine moves."""

import os
import signal
import sys
from collections.abc import Callable


def count_calls(work: Callable[[], object], last: int | None = None) -> int:
    """Return how many functions this thread calls for some work; kill the process at call `last`.

    Functions in C count as well, so that a process is also killed between two writes to a file.
    """
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls
