"""Heartbeats of all workers on a shared store, which identify the worker that an exchange lacks.

If a worker stops responding, the others get a socket error that does not name it. Therefore each
worker writes its step and activity to the store every second. A worker whose exchange failed reads
the heartbeats, and reports the workers that have stopped writing.
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

from gcnzc.exchange.rendezvous import Store, read_existing

T = TypeVar("T")


BEAT_S = 1.0


# time limit of store requests, which take microseconds if the store is reachable
STORE_S = 10.0


LAST_WORDS_S = 5.0  # time for a worker to print its error before its launcher is ended


# number of missed heartbeats after which a worker counts as stopped
MISSED = 3


@dataclass(frozen=True)
class Heartbeat:
    """A worker's last heartbeat."""

    beat: int
    step: int
    doing: str
    host: str
    left: str = ""
    """why the worker ended; empty if it did not report that"""


@dataclass(frozen=True)
class StoreHost:
    """The process that hosts the store, for error messages if the store does not respond."""

    name: str
    address: tuple[str, int]
    """host and port of the store"""


class _Reach(Enum):
    """The result of connecting to the store's address."""

    ANSWERS = "the kernel there accepts connections"
    REFUSED = "the machine answers, and nothing listens there"
    NOTHING = "no answer"


class HeartbeatMonitor:
    """Writes the heartbeats of this worker in a thread, and reads those of the others.

    Args:
        store: shared by all workers of this attempt, and not used by an earlier attempt. It should
            have its own connection, because a request that waits blocks the others of its
            connection.
        rank: this worker.
        world_size: the number of workers.
        host: the name of this machine.
        keeper: the process that hosts the store; None if it is not known.
        global_ranks: of a subgroup, the ranks of its workers among all workers.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        host: str,
        keeper: StoreHost | None = None,
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        self.global_ranks = global_ranks
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
        """Set the step and activity of the next heartbeats; does not access the store."""
        self.step, self.doing = step, doing

    def write(self) -> None:
        """Write one heartbeat of this worker."""
        with self.lock:
            self.beat += 1
            sign = (self.beat, self.step, self.doing, self.host, self.left)
            self.store.set(f"gcnzc/alive/{self.rank}", json.dumps(sign))

    def signs(self) -> dict[int, Heartbeat]:
        """Return the last heartbeat of each worker that has written one.

        Takes two requests to the store if all workers have.
        """
        keys = {f"gcnzc/alive/{rank}": rank for rank in range(self.world_size)}
        found = read_existing(self.store, list(keys))
        return {keys[key]: Heartbeat(*json.loads(text)) for key, text in found.items()}

    def culprits(self) -> str:
        """Describe which workers have stopped or are behind; takes some seconds.

        Time is counted by this worker's own heartbeats in the store, so that a slow store does not
        make workers look stopped. If the store does not respond, the result names its host instead.
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
        ranks = range(self.world_size)
        return describe_stopped_workers(
            self.rank, self.step, ranks, before, after, self.global_ranks
        )

    def _beats(self, signs: dict[int, Heartbeat]) -> int:
        return signs[self.rank].beat if self.rank in signs else 0

    def _without_store(self) -> str:
        """Describe why the store does not respond.

        If nothing at the store's address responds, this ends the launcher, which would otherwise
        wait for the store for a quarter of an hour. A store that is only slow or stopped does not
        end the launcher, because the kernel of its machine still accepts connections.
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
        """Stop the heartbeats; if `why` is given, write it as the reason for the other workers."""
        self.done.set()
        self.thread.join(MISSED * BEAT_S)
        # a thread that is still alive waits for a store that does not respond
        if why and not self.thread.is_alive():
            self.left = why
            try:
                self.write()
            except RuntimeError:
                return  # the store is gone already

    def _live(self) -> None:
        while not self.done.wait(BEAT_S):
            if self.has_launcher and os.getppid() != self.parent:
                # the launcher is gone, so nothing would end or restart this worker; files are
                # replaced atomically, so a kill leaves no partial ones in their place
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                self.write()
            except RuntimeError:
                # the store is gone with its launcher; the next exchange reports that
                continue


def _within(seconds: float, deed: Callable[[], T]) -> T:
    """Run a function in a thread with a time limit, and return its result.

    Requests to torch's store have no time limit of their own if the network drops their packets.
    After the limit the thread goes on.

    Raises:
        RuntimeError: it took longer, or raised this error.
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
    """Connect to an address, and retry until there is a response or `seconds` have passed."""
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
            # a name lookup has no time limit
            reach = _within(end - time.monotonic() + 1.0, attempt)
        except RuntimeError:
            break
        if reach is not _Reach.NOTHING:
            return reach
        time.sleep(min(BEAT_S, seconds / 10))
    return _Reach.NOTHING


def _end_launcher(parent: int) -> None:
    """End this worker's launcher after `LAST_WORDS_S`, so that the worker can print its error."""
    if os.getppid() != parent:
        return
    wait = f"sleep {LAST_WORDS_S:g}"
    # in a separate process, which outlives this one and is no child of it
    subprocess.run(
        ["sh", "-c", f"({wait}; kill -TERM {parent}; {wait}; kill -KILL {parent}) &"],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )


def describe_stopped_workers(
    rank: int,
    step: int,
    ranks: Sequence[int],
    before: dict[int, Heartbeat],
    after: dict[int, Heartbeat],
    global_ranks: Sequence[int] | None = None,
) -> str:
    """Describe which workers made an exchange of worker `rank` in step `step` fail.

    Args:
        rank: the worker whose exchange failed.
        step: its step.
        ranks: the ranks of all workers.
        before, after: heartbeats by rank, read some intervals apart.
        global_ranks: of a subgroup, the ranks of its workers among all workers.
    """
    lines, told = [], []
    for other in ranks:
        if other == rank:
            continue
        if other not in after:
            lines.append(f"{name_of(other, global_ranks)} never came")
            continue
        sign = after[other]
        where = f"{name_of(other, global_ranks)} on {sign.host}"
        if sign.left:
            told.append(f"{where} left: {sign.left}")
        elif other in before and before[other].beat == sign.beat:
            lines.append(
                f"{where} gives no sign of life; it was last in step {sign.step}, at {sign.doing}"
            )
        elif sign.step < step:
            lines.append(f"{where} is alive and still in step {sign.step}, at {sign.doing}")
    # workers that reported their end are named only if no worker is missing or behind
    return "; ".join(lines or told) or "all other workers are alive, so the network may be broken"


def name_of(rank: int, global_ranks: Sequence[int] | None) -> str:
    """Return the name of a worker in messages, in a subgroup also its rank among all workers."""
    if global_ranks is None or list(global_ranks) == list(range(len(global_ranks))):
        return f"worker {rank}"
    return f"worker {global_ranks[rank]}, rank {rank} of the subgroup,"
