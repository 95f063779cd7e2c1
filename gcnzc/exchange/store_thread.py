"""Threads that make requests to the store in the background."""

import atexit
import threading
from collections.abc import Callable

# time limit of the wait for a request to a store that does not respond, in seconds
END_S = 3.0


class StoreThread(threading.Thread):
    """A daemon thread that makes requests to the store until `end` is called.

    It ends before the interpreter does: a thread that returns from torch's store while the
    interpreter ends aborts the process.

    Args:
        name: of the thread.
        work: what the thread runs.
        stop: makes `work` return after its current request.
    """

    def __init__(self, name: str, work: Callable[[], None], stop: Callable[[], None]) -> None:
        super().__init__(target=work, name=name, daemon=True)
        self._stop_work = stop
        self.start()
        atexit.register(self.end)

    def end(self) -> None:
        """Stop the work, and wait until the thread has ended, at most `END_S`."""
        atexit.unregister(self.end)
        self._stop_work()
        # the garbage collector may close a group in this thread
        if threading.current_thread() is not self:
            self.join(END_S)
