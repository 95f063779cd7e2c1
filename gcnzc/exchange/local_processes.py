"""Detect stopped worker processes of this machine from /proc, before they write heartbeats.

A worker that is stopped while it imports torch never connects to the store, so in the store it
cannot be distinguished from a slow one. It can in /proc, since all workers of a machine are
children of the same launcher.
"""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
