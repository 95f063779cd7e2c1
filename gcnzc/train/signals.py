"""Signals that stop a run."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# indices of the flags that workers exchange with their gradients
STOP, SAVE = 0, 1


@contextmanager
def stop_requests() -> Iterator[Callable[[], int]]:
    """Provide a function that returns the SIGINT or SIGTERM that was received; 0 if none was.

    A second signal has its previous effect.
    """
    received = 0
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def request_stop(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = number
        signal.signal(number, previous[signal.Signals(number)])

    for number in previous:
        signal.signal(number, request_stop)
    try:
        yield lambda: received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
