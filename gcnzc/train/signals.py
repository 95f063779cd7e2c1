"""Signals that stop a run."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# indices of the flags that workers exchange with their gradients
STOP, SAVE = 0, 1


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """Provide an event that SIGINT and SIGTERM set; a second signal has its previous effect."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def request_stop(number: int, frame: FrameType | None) -> None:
        stopped.set()
        signal.signal(number, previous[signal.Signals(number)])

    for number in previous:
        signal.signal(number, request_stop)
    try:
        yield stopped
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
