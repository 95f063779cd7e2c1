"""Heartbeats of all ranks in a shared store, which show the rank that made an exchange fail.

If a rank stops responding, the others get a socket error that does not name it. Therefore each rank
writes its step and activity to the store every second. A rank whose exchange failed reads the
heartbeats, and reports the ranks that have stopped sending them.
"""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import NamedTuple, TypeVar

from gcnzc.exchange.errors import Cause
from gcnzc.exchange.store import Store, StoreThread, read_existing, start_thread

T = TypeVar("T")


# interval of heartbeats
BEAT_S = 1.0


# poll interval of the wait for the ends of the other ranks
ENDS_POLL_S = 0.2


# time limit of store requests, which take microseconds if the store is reachable
STORE_S = 10.0


# time for a worker to print its error before its launcher is ended
ERROR_OUTPUT_S = 5.0


# the failure of an exchange for which no other rank is the cause
ALL_RUNNING = "all other ranks are running, so the network may be broken"


# number of missed heartbeats after which a rank counts as stopped
MISSED_BEATS = 3


class Heartbeat(NamedTuple):
    """The last heartbeat of a rank."""

    beat: int  # the number of this heartbeat, from 1
    step: int | None  # the rank's training step; None before the first
    activity: str
    host: str  # the name of the rank's machine
    # why the rank has ended; without a text while it is running, or if it reported no reason
    end: Cause = Cause()


class StoreHost(NamedTuple):
    """The process that hosts the store, for error messages if the store does not respond."""

    name: str  # in messages, such as `rank 0` or `the first machine's launcher`
    address: tuple[str, int]  # host and port of the store


class HeartbeatMonitor:
    """Writes the heartbeats of this rank in a thread, and reads those of the other ranks.

    Args:
        store: shared by all ranks of this attempt, and not used by an earlier attempt. It should
            have its own connection, because a request that waits blocks the others of its
            connection.
        rank: this rank.
        world_size: the number of ranks.
        store_host: the process that hosts the store; None if it is not known.
        global_ranks: for a subgroup, its members' ranks in the default group.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        store_host: StoreHost | None = None,
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.store_host, self.host = store_host, socket.gethostname()
        self.global_ranks = range(world_size) if global_ranks is None else global_ranks
        self.beat = 0
        self.step: int | None = None
        self.activity, self.end = "start", Cause()
        # `Group.count_step` sets the step, because `set_status` was not called
        self.is_step_counted = True
        self.parent = os.getppid()
        self.has_launcher = "TORCHELASTIC_RUN_ID" in os.environ
        self.stopped = threading.Event()
        self.write()
        self.thread = StoreThread("gcnzc-heartbeats", self._write_heartbeats, self.stopped.set)

    def set_status(self, step: int, activity: str) -> None:
        """Set the step and activity of the next heartbeats; does not access the store."""
        self.step, self.activity, self.is_step_counted = step, activity, False

    def write(self) -> None:
        """Write one heartbeat of this rank."""
        self.beat += 1
        fields = Heartbeat(self.beat, self.step, self.activity, self.host, self.end)
        self.store.set(f"gcnzc/alive/{self.rank}", json.dumps(fields))

    def read_heartbeats(self) -> dict[int, Heartbeat]:
        """Return the last heartbeat of each rank that has written one.

        Takes two requests to the store if all ranks have.
        """
        keys = {f"gcnzc/alive/{rank}": rank for rank in range(self.world_size)}
        found = {}
        for key, text in read_existing(self.store, list(keys)).items():
            beat, step, activity, host, end = json.loads(text)
            found[keys[key]] = Heartbeat(beat, step, activity, host, Cause(*end))
        return found

    def describe_failure(self) -> Cause:
        """Describe which ranks have stopped or are behind; takes some seconds.

        Time is counted by this rank's own heartbeats in the store, so that other ranks do not seem
        stopped if the store is slow. If the store does not respond, the result names its host.
        """
        if self._has_store_ended():
            return Cause(self._describe_store_failure(), is_follow_up=True)
        try:
            before = _run_with_timeout(STORE_S, self.read_heartbeats)
            end = time.monotonic() + STORE_S
            while True:
                time.sleep(BEAT_S)
                after = _run_with_timeout(STORE_S, self.read_heartbeats)
                if self._count_beats(after) - self._count_beats(before) >= MISSED_BEATS:
                    break
                if time.monotonic() > end:
                    return Cause(f"unknown: the store accepted no heartbeats in {STORE_S:g} s")
        except RuntimeError:
            return Cause(self._describe_store_failure(), self.store_host is not None)
        return describe_stopped_ranks(self.rank, self.step, self.global_ranks, before, after)

    def _has_store_ended(self) -> bool:
        """Whether nothing listens at the store's address.

        torch prints a stack trace if a request is made to such a store.
        """
        host = self.store_host
        return host is not None and can_connect(host.address, BEAT_S) is False

    def wait_for_ends(self) -> None:
        """Wait until all other ranks have ended or stopped, on the rank that hosts the store.

        They read in the store why this rank ended. Call it after `stop`, and after the connections
        of this rank are closed, so that they do not wait for its messages.
        """
        end = time.monotonic() + STORE_S
        others = (rank for rank in range(self.world_size) if rank != self.rank)
        changed_at = dict.fromkeys(others, time.monotonic())
        before: dict[int, Heartbeat] = {}
        while changed_at and time.monotonic() < end:
            try:
                found = _run_with_timeout(STORE_S, self.read_heartbeats)
            except RuntimeError:
                return
            now = time.monotonic()
            for rank in list(changed_at):
                own = found.get(rank)
                if own is not None and own != before.get(rank):
                    changed_at[rank] = now
                if own is None or own.end.text or now - changed_at[rank] > MISSED_BEATS * BEAT_S:
                    del changed_at[rank]
            before = found
            time.sleep(ENDS_POLL_S)

    def _count_beats(self, heartbeats: dict[int, Heartbeat]) -> int:
        """Return the number of this rank's heartbeats that the store has accepted."""
        return heartbeats[self.rank].beat if self.rank in heartbeats else 0

    def _describe_store_failure(self) -> str:
        """Describe why the store does not respond.

        If nothing at the store's address responds, this ends the launcher, which would otherwise
        wait for the store for a quarter of an hour. A store that is only slow or stopped does not
        end the launcher, because the kernel of its machine still accepts connections.
        """
        if self.store_host is None:
            return "unknown: the store does not respond"
        name = self.store_host.name
        is_accepted = can_connect(self.store_host.address, STORE_S)
        if is_accepted:
            return f"{name}, which hosts the store, does not respond: it is stopped or very slow"
        if is_accepted is False:
            return f"{name}, which hosted the store, has ended"
        if self.has_launcher:
            _end_launcher(self.parent)
        return (
            f"{name}, which hosts the store, cannot be reached: its machine or the network of this "
            "machine has failed"
        )

    def stop(self, end: Cause | None = None) -> None:
        """Stop the heartbeats, and write why this rank ends, if there is a reason.

        Args:
            end: for the error messages of the other ranks; the first one with a text is kept.
        """
        self.thread.end()
        # a thread that is still alive waits for a store that does not respond
        if end is not None and end.text and not self.end.text and not self.thread.is_alive():
            self.end = end
            # RuntimeError: the store has already ended
            with suppress(RuntimeError):
                if not self._has_store_ended():
                    self.write()

    def _write_heartbeats(self) -> None:
        written_at = time.monotonic()
        while not self.stopped.wait(BEAT_S):
            if self.has_launcher and os.getppid() != self.parent:
                # the launcher has ended, so nothing would end or restart this worker; files are
                # replaced atomically, so a kill leaves no partial ones
                os.kill(os.getpid(), signal.SIGKILL)
            # this process may have been suspended, and the store may have ended meanwhile
            is_late = time.monotonic() - written_at > MISSED_BEATS * BEAT_S
            if is_late and self._has_store_ended():
                continue
            # the store may have ended with its launcher; the next exchange reports that
            with suppress(RuntimeError):
                self.write()
                written_at = time.monotonic()


def _run_with_timeout(seconds: float, function: Callable[[], T]) -> T:
    """Run a function in a thread with a time limit, and return its result.

    Requests to torch's store have no time limit of their own if the network drops their packets.
    After the limit the thread continues to run.

    Raises:
        RuntimeError: the function took longer, or raised this error.
    """
    try:
        return start_thread("gcnzc-heartbeat-reader", function).result(seconds)
    except FutureTimeout as error:
        raise RuntimeError(f"no result within {seconds:g} s") from error


def can_connect(address: tuple[str, int], seconds: float) -> bool | None:
    """Connect to an address, and retry until there is a response or `seconds` have passed.

    Returns:
        Whether the machine accepts the connection; False if no process listens on the port. None if
        there is no response.
    """
    end = time.monotonic() + seconds

    def attempt() -> bool | None:
        try:
            with socket.create_connection(address, max(end - time.monotonic(), 0.1)):
                return True
        except ConnectionRefusedError:
            return False
        except OSError:
            return None

    while time.monotonic() < end:
        try:
            # a name lookup has no time limit
            is_accepted = _run_with_timeout(end - time.monotonic() + 1.0, attempt)
        except RuntimeError:
            break
        if is_accepted is not None:
            return is_accepted
        time.sleep(min(BEAT_S, seconds / 10))
    return None


def _end_launcher(parent: int) -> None:
    """End this worker's launcher after `ERROR_OUTPUT_S`, so that the worker can print its error."""
    if os.getppid() != parent:
        return
    wait = f"sleep {ERROR_OUTPUT_S:g}"
    # in a process that is not a child of this one, and may run longer
    subprocess.run(
        ["sh", "-c", f"({wait}; kill -TERM {parent}; {wait}; kill -KILL {parent}) &"],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )


def describe_stopped_ranks(
    rank: int,
    step: int | None,
    global_ranks: Sequence[int],
    before: dict[int, Heartbeat],
    after: dict[int, Heartbeat],
) -> Cause:
    """Describe which ranks made an exchange of rank `rank` in step `step` fail.

    Args:
        rank: the rank whose exchange failed.
        step: its step; None before the first.
        global_ranks: the ranks of the group in the default group.
        before, after: heartbeats by rank, read some intervals apart.
    """
    failed, ended, causes = [], [], []
    for other, global_rank in enumerate(global_ranks):
        if other == rank:
            continue
        name, last = describe_rank(other, global_ranks), after.get(other)
        if last is None:
            failed.append(Cause(f"{name} never connected", ranks=[global_rank]))
            continue
        name, end, status = f"{name} on {last.host}", last.end, _describe_status(last)
        if end.is_follow_up and global_ranks[rank] in end.ranks:
            # a rank that ended because this one was too slow
            text = f"{name} ended, because {end.text}"
            causes.append(Cause(text, ranks=[global_rank, *end.ranks]))
        elif end.is_follow_up:
            causes.append(end)
        elif end.text:
            ended.append(Cause(f"{name} ended: {end.text}", ranks=[global_rank]))
        elif other in before and before[other].beat == last.beat:
            text = f"{name} has stopped sending heartbeats; it was last {status}"
            failed.append(Cause(text, ranks=[global_rank]))
        elif (last.step or 0) < (step or 0):
            text = f"{name} is running and still {status}"
            failed.append(Cause(text, ranks=[global_rank]))
    # ranks that reported an end of their own are named only if no rank is missing or behind; if all
    # of them ended because of others, the first reason is shown
    found = failed or ended or causes[:1]
    if not found:
        return Cause(ALL_RUNNING)
    named_ranks = [each for cause in found for each in cause.ranks]
    return Cause("; ".join(cause.text for cause in found), True, named_ranks)


def _describe_status(heartbeat: Heartbeat) -> str:
    step = heartbeat.step
    return f"{'' if step is None else f'in step {step}, '}at {heartbeat.activity}"


def describe_rank(rank: int, global_ranks: Sequence[int]) -> str:
    """Return the name of a rank in messages; in a subgroup that of its rank in the default group.

    Args:
        rank: the rank in the group.
        global_ranks: the members' ranks in the default group.
    """
    if list(global_ranks) == list(range(len(global_ranks))):
        return f"rank {rank}"
    return f"rank {global_ranks[rank]} (rank {rank} of the subgroup)"


def explain(monitor: HeartbeatMonitor, error: BaseException | None) -> tuple[str, Cause]:
    """Describe the failed ranks, with the first line of torch's error.

    The other lines of torch's error may be C++ stack frames. A `TimeoutError` is raised by gcnzc,
    so it is not attributed to torch.

    Returns:
        The description for this rank's error, and the first cause, for those of other ranks.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    reporter = "" if isinstance(error, TimeoutError) else "torch.distributed reports: "
    cause, source = monitor.describe_failure(), f" ({reporter}{lines[0]})"
    # another rank may have ended with the same error
    text = cause.text if cause.text.endswith(source) else cause.text + source
    return text, cause if cause.is_follow_up else cause._replace(text=text)
