"""Who is missing, and what it was doing: signs of life of all workers, on a common store.

A worker that stops answering leaves the others with an error of their sockets, which names nobody.
So each worker writes every second what it is at, and one whose exchange failed looks who still
does.
"""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from gcnzc.exchange.meeting import Store, read_existing

T = TypeVar("T")

BEAT_S = 1.0
# what a worker waits for the store at most, which answers in microseconds if it is there
STORE_S = 10.0
LAST_WORDS_S = 5.0  # until an error is printed
# of beats missed, after which a worker counts as silent
MISSED = 3


@dataclass(frozen=True)
class Sign:
    """What a worker wrote last."""

    beat: int
    step: int
    doing: str
    host: str
    left: str = ""
    """why it left, if it did"""


@dataclass(frozen=True)
class Keeper:
    """Who keeps the store, and where; what is needed to say why it does not answer."""

    name: str
    address: tuple[str, int]
    """host and port of the store"""


class _Reach(Enum):
    """What came of connecting to the store's address."""

    ANSWERS = "the kernel there accepts connections"
    REFUSED = "the machine answers, and nothing listens there"
    NOTHING = "no answer"


class Watch:
    """The signs of life of this worker, written by a thread, and those of the others.

    Args:
        store: that all workers of this attempt share, and no earlier attempt used. Best on a
            connection of its own: a request that waits blocks the others of its connection.
        rank: of this worker.
        world_size: how many there are.
        host: name of this machine.
        keeper: of the store; None if it is not known.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, host: str, keeper: Keeper | None = None
    ) -> None:
        self.store, self.rank, self.world_size, self.host = store, rank, world_size, host
        self.keeper = keeper
        self.beat = 0
        self.step, self.doing, self.left = 0, "start", ""
        self.parent = os.getppid()
        self.has_launcher = "TORCHELASTIC_RUN_ID" in os.environ
        self.done = threading.Event()
        self.lock = threading.Lock()
        self.write()
        self.thread = threading.Thread(target=self._live, name="gcnzc-watch", daemon=True)
        self.thread.start()

    def at(self, step: int, doing: str) -> None:
        """Say what this worker does from now on; costs nothing, as it is written every second."""
        self.step, self.doing = step, doing

    def write(self) -> None:
        """Write this worker's sign."""
        with self.lock:
            self.beat += 1
            sign = (self.beat, self.step, self.doing, self.host, self.left)
            self.store.set(f"gcnzc/alive/{self.rank}", json.dumps(sign))

    def signs(self) -> dict[int, Sign]:
        """What each worker that ever wrote has written last; two requests if all did."""
        keys = {f"gcnzc/alive/{rank}": rank for rank in range(self.world_size)}
        found = read_existing(self.store, list(keys))
        return {keys[key]: Sign(*json.loads(text)) for key, text in found.items()}

    def culprits(self) -> str:
        """Who is missing or behind, in words; takes some seconds.

        Time is counted in this worker's own signs as the store shows them, so that a slow store
        makes nobody look silent. If the store does not answer, who keeps it is named instead.
        """
        try:
            before = _within(STORE_S, self.signs)
            end = time.monotonic() + STORE_S
            while True:
                time.sleep(BEAT_S)
                after = _within(STORE_S, self.signs)
                if self._beats(after) - self._beats(before) >= MISSED:
                    break
                if time.monotonic() > end:
                    return f"unknown: in {STORE_S:g} s the store took in no signs of life"
        except RuntimeError:
            return self._without_store()
        return blamed(self.rank, self.step, range(self.world_size), before, after)

    def _beats(self, signs: dict[int, Sign]) -> int:
        return signs[self.rank].beat if self.rank in signs else 0

    def _without_store(self) -> str:
        """Why the store does not answer, in words.

        Where this machine is cut off, a launcher of torch's waits for the store for a quarter of an
        hour, so it is ended from here. A store that is only slow or stopped is never a reason: the
        kernel of its machine accepts connections all the same.
        """
        if self.keeper is None:
            return "unknown: the store does not answer"
        who, reach = self.keeper.name, _reach(self.keeper.address, STORE_S)
        if reach is _Reach.ANSWERS:
            return f"{who}, which keeps the store, does not answer: it is stopped, or very slow"
        if reach is _Reach.REFUSED:
            return f"{who}, which kept the store, is gone"
        if self.has_launcher:
            _end_launcher(self.parent)
        return f"{who} does not answer either: it is gone, or this machine is cut off"

    def leave(self, why: str = "") -> None:
        """Stop writing; `why` tells the others, so that they do not look for this worker."""
        self.done.set()
        self.thread.join(MISSED * BEAT_S)
        # else it waits for a store that does not answer
        if why and not self.thread.is_alive():
            self.left = why
            try:
                self.write()
            except RuntimeError:
                return  # the store went first

    def _live(self) -> None:
        while not self.done.wait(BEAT_S):
            if self.has_launcher and os.getppid() != self.parent:
                # nobody would end this worker, or start it again: what is saved is whole
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                self.write()
            except RuntimeError:
                # the store went with its launcher; the exchange will tell
                continue


def _within(seconds: float, deed: Callable[[], T]) -> T:
    """Do it, in a thread that is left behind if it takes longer.

    Raises:
        RuntimeError: it did, or failed. Requests to torch's store know no time limit of their own
            where the network swallows them.
    """
    answers: list[T] = []
    failures: list[RuntimeError] = []

    def work() -> None:
        try:
            answers.append(deed())
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=work, name="gcnzc-watch-signs", daemon=True)
    thread.start()
    thread.join(seconds)
    if not answers:
        raise failures[0] if failures else RuntimeError(f"no answer within {seconds:g} s")
    return answers[0]


def _reach(address: tuple[str, int], seconds: float) -> _Reach:
    """What comes of connecting to an address, tried again until something answers."""
    end = time.monotonic() + seconds

    def attempt() -> _Reach:
        try:
            with socket.create_connection(address, max(end - time.monotonic(), 0.1)):
                return _Reach.ANSWERS
        except ConnectionRefusedError:
            return _Reach.REFUSED
        except OSError:
            return _Reach.NOTHING

    while time.monotonic() < end:
        try:
            # looking up a name knows no time limit
            reach = _within(end - time.monotonic() + 1.0, attempt)
        except RuntimeError:
            break
        if reach is not _Reach.NOTHING:
            return reach
        time.sleep(min(BEAT_S, seconds / 10))
    return _Reach.NOTHING


def _end_launcher(parent: int) -> None:
    """End this worker's launcher, one of torch's, soon after the worker has said why."""
    if os.getppid() != parent:
        return
    wait = f"sleep {LAST_WORDS_S:g}"
    # by a process that outlives this one, and has no parent to wait for it
    subprocess.run(
        ["sh", "-c", f"({wait}; kill -TERM {parent}; {wait}; kill -KILL {parent}) &"],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )


def blamed(
    rank: int,
    step: int,
    ranks: Sequence[int],
    before: dict[int, Sign],
    after: dict[int, Sign],
) -> str:
    """Who is to blame that an exchange of worker `rank` in step `step` failed, in words.

    Args:
        rank: who asks.
        step: that it is in.
        ranks: of all workers.
        before, after: signs of life, read some beats apart.
    """
    lines, told = [], []
    for other in ranks:
        if other == rank:
            continue
        if other not in after:
            lines.append(f"worker {other} never came")
            continue
        sign = after[other]
        where = f"worker {other} on {sign.host}"
        if sign.left:
            told.append(f"{where} left: {sign.left}")
        elif other in before and before[other].beat == sign.beat:
            lines.append(
                f"{where} gives no sign of life; it was last in step {sign.step}, at {sign.doing}"
            )
        elif sign.step < step:
            lines.append(f"{where} is alive and still in step {sign.step}, at {sign.doing}")
    # those who left did so for the same reason, or for a better one
    return "; ".join(lines or told) or "all other workers are alive, so the network may be broken"
