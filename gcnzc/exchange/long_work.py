"""Long work on some ranks, for which the others wait without a time limit.

A request waits for a limited time, so that nobody waits for a worker that is gone. Work such as
reading a graph may take longer: those who are at it say so now and then, by a vote in which those
who are done take part.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

import torch

from gcnzc.exchange import Algorithm, AllGatherScalar, Broadcast, Group, WorkerLost, run
from gcnzc.exchange.sync import all_gather_scalar

T = TypeVar("T")


# how often a worker at long work says so, in the time that a request waits for at most
SIGNS = 6


# what a worker says of its part of some work
_AT_WORK, _DONE, _FAILED = range(3)


# errors that other workers get as they are; anything else is the machine's
_KINDS: tuple[type[Exception], ...] = (FileNotFoundError, OSError, ValueError, RuntimeError)


@contextmanager
def joint_work(group: Group) -> Iterator["Work"]:
    """Work of which each worker does a part by itself; the end of the `with` waits for all.

    Nobody waits longer than the group's time limit for a sign of the others, however long the work
    takes, if those that are at it call `Work.goes_on` between its pieces.

    Raises:
        Exception: what the block raised, on the worker where it did; the others get an error of
            the same kind that names that worker.
        WorkerLost: another worker is gone.
    """
    work, error = Work(group), None
    try:
        yield work
    except WorkerLost:
        raise
    except Exception as failure:  # whatever it is, the others must not wait for it
        error = failure
    work.end(error)


class Work:
    """The part of one worker in what all are at; made by `joint_work`."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.every_s = group.timeout_s / SIGNS
        self.told_at = time.monotonic()

    def goes_on(self) -> None:
        """Tell those who wait that this worker is at work, if it is time to."""
        if time.monotonic() - self.told_at >= self.every_s and self.group.world_size > 1:
            run(all_gather_scalar(_AT_WORK), self.group)
            self.told_at = time.monotonic()

    def meanwhile(self, deed: Callable[[], T]) -> T:
        """The result of `deed`, which a thread does while this one tells that it goes on."""
        outcome: Future[T] = Future()

        def work() -> None:
            try:
                outcome.set_result(deed())
            except Exception as error:
                outcome.set_exception(error)

        # a daemon, so that Ctrl-C need not wait for it
        thread = threading.Thread(target=work, name="gcnzc-work", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(self.every_s)
            self.goes_on()
        return outcome.result()

    def end(self, error: Exception | None = None) -> None:
        """Wait until all are done; raise if one has failed."""
        state = _DONE if error is None else _FAILED
        while _AT_WORK in (states := run(all_gather_scalar(state), self.group)):
            continue
        if _FAILED in states:
            told = run(_told(error, states.index(_FAILED), self.group), self.group)
            raise told if error is None else error


def _told(error: Exception | None, root: int, group: Group) -> Algorithm[Exception]:
    """The error of worker `root`, for all."""
    kind = next((i for i, kind in enumerate(_KINDS) if isinstance(error, kind)), len(_KINDS) - 1)
    text = bytes([kind]) + (str(error) or type(error).__name__).encode()
    lengths = yield AllGatherScalar(len(text))
    values = torch.zeros(lengths[root], dtype=torch.uint8)
    if group.rank == root:
        values = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    yield Broadcast(values, root)
    told = bytes(values.tolist())
    return _KINDS[told[0]](f"worker {root}: {told[1:].decode()}")
