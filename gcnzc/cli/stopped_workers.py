"""Let stopped workers continue once the launcher has asked them to end.

A process that was stopped, as by SIGSTOP, handles no signal but SIGKILL and SIGCONT. The launcher
would wait 30 s for it, and then kill it; the other workers could not save the run, because they
wait for its part of the next exchange.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gcnzc.exchange.local_processes import find_children

# seconds from one look at the workers to the next
INTERVAL_S = 1.0
# signals by which the launcher asks workers to end, as a mask in /proc/PID/status
END = 1 << (signal.SIGINT - 1) | 1 << (signal.SIGTERM - 1)


@contextmanager
def continue_stopped_workers() -> Iterator[None]:
    """Within the `with`, continue child processes that are stopped and have a signal to end.

    Child processes that are stopped, but have no such signal, remain stopped.
    """
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(INTERVAL_S):
            for child in find_children(os.getpid()):
                if child.state == "T" and _has_signal_to_end(child.pid):
                    # it may have ended
                    with suppress(ProcessLookupError):
                        os.kill(child.pid, signal.SIGCONT)

    thread = threading.Thread(target=watch, name="stopped workers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _has_signal_to_end(process: int) -> bool:
    """Whether a process has a pending signal to end."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return False
    fields = dict(line.split(":", 1) for line in lines)
    pending = int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)
    return bool(pending & END)
