"""Refuse a second training run in a process while another one trains in it.

torch's global random generators, which initial weights and dropout use, belong to the process.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_is_training = threading.Lock()


@contextmanager
def only_run() -> Iterator[None]:
    """Mark this process as training within the `with`.

    Raises:
        RuntimeError: another run trains in this process.
    """
    lock = _is_training
    if not lock.acquire(blocking=False):
        raise RuntimeError(
            "train: another run is training in this process, and would draw the same random "
            "generators\n\nhint: start a process for each run, such as with "
            "multiprocessing.get_context('spawn'), or train one after the other"
        )
    try:
        yield
    finally:
        lock.release()


def _reset() -> None:
    """Release the lock in a process that was forked during a run, and does not train itself."""
    global _is_training
    _is_training = threading.Lock()


os.register_at_fork(after_in_child=_reset)
