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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gcnzc.exchange.store import Store, read_existing

POLL_S = 0.05


# poll interval per rank, so that many ranks do not overload the store
POLL_S_PER_WORKER = 0.001


# interval at which rank 0 writes the missing ranks, and all check the processes of their machine
CHECK_S = 1.0


def join_workers(
    store: Store,
    rank: int,
    world_size: int,
    timeout_s: float,
    stopped_s: float | None = None,
    check_running: Callable[[float], None] = lambda seconds: None,
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
    end = time.monotonic() + timeout_s
    joining = _Joining(store, world_size, uuid.uuid4().hex, end, stopped_s, check_running)
    return joining.lead() if rank == 0 else joining.follow(rank)


@dataclass
class _Joining:
    """The rendezvous of one rank; see `join_workers`."""

    store: Store
    world_size: int
    own: str  # a random name
    end: float  # of the time limit, by `time.monotonic`
    stopped_s: float
    check_running: Callable[[float], None]
    checked_at: float = float("-inf")

    def check(self) -> bool:
        """Check the processes of this machine each `CHECK_S`, and return whether it was done."""
        is_due = time.monotonic() - self.checked_at >= CHECK_S
        if is_due:
            self.checked_at = time.monotonic()
            self.check_running(self.stopped_s)
        return is_due

    def wait(self, missing: Sequence[int]) -> None:
        """Sleep for the poll interval.

        Raises:
            TimeoutError: the time limit has passed.
        """
        if time.monotonic() > self.end:
            ranks = f"{', '.join(map(str, missing))} never connected"
            raise TimeoutError(f"rank {ranks}" if len(missing) == 1 else f"ranks {ranks}")
        time.sleep(max(POLL_S, self.world_size * POLL_S_PER_WORKER))

    def lead(self) -> str:
        """Join as rank 0, which confirms the others."""
        store, own = self.store, self.own
        store.set("gcnzc/round", own)
        seen: dict[int, str] = {}
        count, unread, beat = 0, set[str](), 0
        while len(seen) < self.world_size - 1:
            missing = [rank for rank in range(1, self.world_size) if rank not in seen]
            if self.check():
                beat += 1
                store.set(f"{own}/waiting", json.dumps([beat, missing]))
            # arrivals are numbered, so that a poll takes three requests for any number of ranks
            arrived = store.add(f"{own}/arrivals", 0)
            unread |= {f"{own}/arrival/{number}" for number in range(count + 1, arrived + 1)}
            count = arrived
            for key, value in read_existing(store, sorted(unread)).items():
                rank, name = json.loads(value)
                seen[rank] = name
                unread.discard(key)
            if len(seen) < self.world_size - 1:
                self.wait([rank for rank in missing if rank not in seen])
        store.set(f"{own}/all", json.dumps(list(seen.values())))
        return own

    def follow(self, rank: int) -> str:
        """Join as another rank, which registers under the name that rank 0 has drawn.

        Raises:
            TimeoutError: rank 0 has written before, but not for `stopped_s`.
        """
        store, announced = self.store, ""
        missing, beats, changed_at = [0], set[int](), time.monotonic()
        while True:
            # the name may be that of an earlier round, which gets no confirmation
            name = store.get("gcnzc/round").decode() if store.check(["gcnzc/round"]) else ""
            if name and name != announced:
                number = store.add(f"{name}/arrivals", 1)
                store.set(f"{name}/arrival/{number}", json.dumps([rank, self.own]))
                announced, missing, beats, changed_at = name, [0], set(), time.monotonic()
            confirmed = read_existing(store, [f"{name}/all"]) if name else {}
            if any(self.own in json.loads(names) for names in confirmed.values()):
                return name
            found = read_existing(store, [f"{name}/waiting"]) if self.check() and name else {}
            for text in found.values():
                beat, waiting = json.loads(text)
                if beat not in beats:
                    beats.add(beat)
                    changed_at = time.monotonic()
                # rank 0 of an earlier round does not write any more, which is not an error
                if len(beats) > 1:
                    missing = waiting
                    if time.monotonic() - changed_at > self.stopped_s:
                        raise TimeoutError(
                            f"rank 0 has stopped sending heartbeats for {self.stopped_s:g} s while "
                            "the ranks connected"
                        )
            self.wait([each for each in missing if each != rank] or [0])


# worker processes of this machine: a worker that is stopped while it imports torch never connects
# to the store, so in the store it cannot be distinguished from a slow one. It can in /proc, since
# all workers of a machine are children of the same launcher

# states in /proc/PID/stat; a process in state D waits for a device, and is not stopped
STATES = {"T": "stopped by a signal", "t": "stopped by a debugger"}


class Process(NamedTuple):
    """A process, as described by /proc/PID/stat."""

    pid: int
    parent: int
    state: str
    ticks: int  # clock ticks of CPU time used so far, by all threads


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
        now, before, self.found = time.monotonic(), self.found, {}
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
                stopped[rank] = f"rank {rank} is {STATES[process.state]} (process {process.pid})"
        if stopped:
            texts = [stopped[rank] for rank in sorted(stopped)]
            raise TimeoutError(f"{'; '.join(texts)} and did not run for {seconds:g} s")


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
