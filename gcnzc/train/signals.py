"""Signals that stop or save a run."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# what workers tell each other with their gradients
STOP, SAVE = 0, 1


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; a second signal ends the process as usual."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: FrameType | None) -> None:
        stopped.set()
        signal.signal(number, usual[signal.Signals(number)])

    for number in usual:
        signal.signal(number, ask)
    try:
        yield stopped
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
