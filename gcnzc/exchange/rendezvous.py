"""Rendezvous of restarted workers on a store that still has keys of earlier attempts.

torch's elastic agents use one store for all attempts, which still has the addresses of ended
workers, and agents on different machines may number attempts differently. Therefore rank 0 draws a
random name for each round, which prefixes all keys of the round. The other ranks register under
this name, and use it once rank 0 has confirmed them.
"""

import json
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcnzc.exchange.store import Store, read_existing

POLL_S = 0.05


# poll interval per rank, so that many ranks do not overload the store
POLL_S_PER_WORKER = 0.001


# interval at which rank 0 writes the missing ranks, and all check the processes of their machine
CHECK_S = 1.0


def _check_nothing(seconds: float) -> None:
    """Check nothing; the default if the processes of the other ranks are not visible."""


def join_workers(
    store: Store,
    rank: int,
    world_size: int,
    timeout_s: float,
    stopped_s: float | None = None,
    check_running: Callable[[float], None] = _check_nothing,
) -> str:
    """Wait until all ranks of this round have joined, and return the round's name.

    Args:
        store: shared by all ranks.
        rank: this rank.
        world_size: the number of ranks.
        timeout_s: time limit in seconds.
        stopped_s: seconds after which a rank counts as stopped: rank 0 if it has written nothing,
            and a process of this machine if it is stopped; None for `timeout_s`.
        check_running: raises TimeoutError if a process of this machine was stopped for the given
            number of seconds.

    Returns:
        The unique name of the round, the same on all ranks.

    Raises:
        TimeoutError: ranks are missing or stopped; the message names them.
    """
    stopped_s = timeout_s if stopped_s is None else stopped_s
    limits = _Limits(timeout_s, stopped_s, check_running, world_size)
    own = uuid.uuid4().hex
    if rank == 0:
        return _join_as_rank_zero(store, own, world_size, limits)
    return _join_as_other_rank(store, own, rank, limits)


class _Limits:
    """The time limits and poll interval of a rendezvous."""

    def __init__(
        self,
        timeout_s: float,
        stopped_s: float,
        check_running: Callable[[float], None],
        world_size: int,
    ) -> None:
        self.end, self.stopped_s = time.monotonic() + timeout_s, stopped_s
        self.check_running = lambda: check_running(stopped_s)
        self.poll_s = max(POLL_S, world_size * POLL_S_PER_WORKER)
        self.checked_at = float("-inf")

    def is_check_due(self) -> bool:
        """Whether `CHECK_S` has passed since the last call that returned True."""
        if time.monotonic() - self.checked_at < CHECK_S:
            return False
        self.checked_at = time.monotonic()
        return True

    def wait(self, missing: Sequence[int]) -> None:
        """Sleep for the poll interval.

        Raises:
            TimeoutError: the time limit has passed.
        """
        if time.monotonic() > self.end:
            ranks = f"{', '.join(map(str, missing))} never connected"
            raise TimeoutError(f"rank {ranks}" if len(missing) == 1 else f"ranks {ranks}")
        time.sleep(self.poll_s)


def _join_as_rank_zero(store: Store, own: str, world_size: int, limits: _Limits) -> str:
    store.set("gcnzc/round", own)
    seen: dict[int, str] = {}
    count, unread, beat = 0, set[str](), 0
    while len(seen) < world_size - 1:
        missing = [rank for rank in range(1, world_size) if rank not in seen]
        if limits.is_check_due():
            beat += 1
            store.set(f"{own}/waiting", json.dumps([beat, missing]))
            limits.check_running()
        # arrivals are numbered, so that a poll takes three requests for any number of ranks
        arrived = store.add(f"{own}/arrivals", 0)
        unread |= {f"{own}/arrival/{number}" for number in range(count + 1, arrived + 1)}
        count = arrived
        for key, value in read_existing(store, sorted(unread)).items():
            rank, name = json.loads(value)
            seen[rank] = name
            unread.discard(key)
        if len(seen) < world_size - 1:
            limits.wait([rank for rank in missing if rank not in seen])
    store.set(f"{own}/all", json.dumps(list(seen.values())))
    return own


def _join_as_other_rank(store: Store, own: str, rank: int, limits: _Limits) -> str:
    announced, rank_zero = "", _RankZero(limits.stopped_s)
    while True:
        # the name may be that of an earlier round, which gets no confirmation
        name = store.get("gcnzc/round").decode() if store.check(["gcnzc/round"]) else ""
        if name and name != announced:
            number = store.add(f"{name}/arrivals", 1)
            store.set(f"{name}/arrival/{number}", json.dumps([rank, own]))
            announced, rank_zero = name, _RankZero(limits.stopped_s)
        if name and own in json.loads(
            read_existing(store, [f"{name}/all"]).get(f"{name}/all", b"[]")
        ):
            return name
        if limits.is_check_due():
            limits.check_running()
            if name:
                rank_zero.read(read_existing(store, [f"{name}/waiting"]))
        limits.wait([each for each in rank_zero.missing if each != rank] or [0])


class _RankZero:
    """The state of rank 0: the ranks that it waits for, and whether it is still running."""

    def __init__(self, stopped_s: float) -> None:
        self.stopped_s = stopped_s
        self.beats: list[int] = []
        self.changed_at = time.monotonic()
        self.waiting: list[int] = []

    def read(self, found: Mapping[str, Any]) -> None:
        """Update from the values read from the store.

        Raises:
            TimeoutError: rank 0 has written before, but not for `stopped_s`.
        """
        for text in found.values():
            beat, self.waiting = json.loads(text)
            if beat not in self.beats:
                self.beats.append(beat)
                self.changed_at = time.monotonic()
        # rank 0 of an earlier round does not write any more, which is not an error
        if self.is_alive and time.monotonic() - self.changed_at > self.stopped_s:
            raise TimeoutError(
                f"rank 0 has stopped sending heartbeats for {self.stopped_s:g} s while the ranks "
                "connected"
            )

    @property
    def is_alive(self) -> bool:
        """Whether rank 0 has written at least twice since this rank registered."""
        return len(self.beats) > 1

    @property
    def missing(self) -> list[int]:
        """The ranks that rank 0 waits for; empty unless `is_alive`."""
        return self.waiting if self.is_alive else []


# worker processes of this machine: a worker that is stopped while it imports torch never connects
# to the store, so in the store it cannot be distinguished from a slow one. It can in /proc, since
# all workers of a machine are children of the same launcher

# states in /proc/PID/stat; a process in state D waits for a device, and is not stopped
STATES = {"T": "stopped by a signal", "t": "stopped by a debugger"}


@dataclass(frozen=True)
class Process:
    """A process, as described by /proc/PID/stat."""

    pid: int
    parent: int
    state: str
    ticks: int
    """clock ticks of CPU time used so far, by all threads"""


class LocalProcesses:
    """The other processes that this process's launcher started as workers."""

    def __init__(self) -> None:
        self.parent, self.own = os.getppid(), os.getpid()
        self.found: dict[int, tuple[Process, float]] = {}

    def check_running(self, seconds: float) -> None:
        """Check that no worker of this machine is stopped; call it about once a second.

        Raises:
            TimeoutError: a worker was stopped at every call during the last `seconds`, and used no
                CPU time in between; the message names it.
        """
        if stopped := self._find_stopped(seconds):
            texts = [f"rank {rank} is {reason}" for rank, reason in sorted(stopped.items())]
            raise TimeoutError(f"{'; '.join(texts)} and did not run for {seconds:g} s")

    def _find_stopped(self, seconds: float) -> dict[int, str]:
        """Return the ranks of workers that were stopped for `seconds`, each with the reason."""
        now = time.monotonic()
        before, self.found = self.found, {}
        stopped = {}
        for process in find_children(self.parent):
            if process.pid == self.own or process.state not in STATES:
                continue
            earlier, since = before.get(process.pid, (process, now))
            if earlier.ticks != process.ticks:
                since = now
            self.found[process.pid] = (process, since)
            rank = _read_rank(process.pid)
            if rank is not None and now - since >= seconds:
                stopped[rank] = f"{STATES[process.state]} (process {process.pid})"
        return stopped


def find_children(parent: int) -> list[Process]:
    """Return the child processes of a process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # the process may have ended, or belong to another user
            with suppress(OSError):
                process = _parse_stat((entry / "stat").read_text())
                if process.parent == parent:
                    found.append(process)
    return found


def _parse_stat(stat: str) -> Process:
    # the program's name, in parentheses, may contain spaces and parentheses
    begin, end = stat.index("("), stat.rindex(")")
    fields = stat[end + 1 :].split()
    return Process(int(stat[:begin]), int(fields[1]), fields[0], int(fields[11]) + int(fields[12]))


def _read_rank(pid: int) -> int | None:
    """Return RANK from a process's environment; None if it is not a worker."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                return int(entry[5:])
    return None
