"""Long work between exchanges, for which the other ranks wait without a time limit.

A request has a time limit, so that no rank waits forever for one that has failed. Work such as
reading a graph may take longer. Ranks that are still working therefore report it at intervals, by
an all-gather of a scalar, in which ranks that have finished take part while they wait.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from typing import TypeVar

from gcnzc.exchange import Algorithm, Group, WorkerLost, run
from gcnzc.exchange.store import start_thread
from gcnzc.exchange.sync import all_gather_scalar, broadcast_bytes

T = TypeVar("T")


# number of reports within the time limit of a request
REPORTS = 6


# the state that a rank reports
_WORKING, _DONE, _FAILED = range(3)


# errors that are raised on the other ranks with the same type; other types become a RuntimeError
_ERROR_TYPES: tuple[type[Exception], ...] = (FileNotFoundError, OSError, ValueError, RuntimeError)


@contextmanager
def joint_work(group: Group) -> Iterator["Work"]:
    """Work on all ranks without exchanges; the end of the `with` waits for all ranks.

    The work may take longer than the group's time limit, if each rank that works calls
    `Work.report_progress` between the pieces of its work.

    Yields:
        This rank's work.

    Raises:
        Exception: the error of the block, on the rank where it was raised. The other ranks raise an
            error that names this rank, of the same type or of a base class that is built in.
        WorkerLost: another rank did not respond in time, or has ended.
    """
    work, error = Work(group), None
    try:
        yield work
    except WorkerLost:
        raise
    except Exception as failure:  # any error, so that the other ranks do not wait
        error = failure
    work.finish(error)


class Work:
    """The work of one rank, which `joint_work` creates.

    Args:
        group: the ranks that work.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.interval_s = group.timeout_s / REPORTS
        self.reported_at = time.monotonic()

    def report_progress(self) -> None:
        """Report to the other ranks that this one is working, if the last report is long ago."""
        is_due = time.monotonic() - self.reported_at >= self.interval_s
        if is_due and self.group.world_size > 1:
            run(all_gather_scalar(_WORKING), self.group)
            self.reported_at = time.monotonic()

    def run_in_thread(self, function: Callable[[], T]) -> T:
        """Run a function in another thread, report progress meanwhile, and return its result.

        A single rank runs it in this thread, so that signals interrupt it.

        Raises:
            Exception: the error of the function.
        """
        if self.group.world_size == 1:
            return function()
        outcome = start_thread("gcnzc-work", function)
        while wait([outcome], self.interval_s).not_done:
            self.report_progress()
        return outcome.result()

    def finish(self, error: Exception | None = None) -> None:
        """Wait until all ranks have finished.

        Args:
            error: the error of this rank's work, which is raised; None if it succeeded.

        Raises:
            Exception: the work of a rank has failed; see `joint_work`.
        """
        state = _DONE if error is None else _FAILED
        while _WORKING in (states := run(all_gather_scalar(state), self.group)):
            continue
        if _FAILED in states:
            failed = run(_broadcast_error(error, states.index(_FAILED), self.group), self.group)
            raise failed if error is None else error


def _broadcast_error(error: Exception | None, root: int, group: Group) -> Algorithm[Exception]:
    """Broadcast the error of rank `root`, and return it."""
    types = len(_ERROR_TYPES)
    index = next((i for i in range(types) if isinstance(error, _ERROR_TYPES[i])), types - 1)
    text = bytes([index]) + (str(error) or type(error).__name__).encode()
    received = yield from broadcast_bytes(text, group.rank, root)
    return _ERROR_TYPES[received[0]](f"rank {root}: {received[1:].decode()}")
