"""Rendezvous of restarted workers on a store that still has keys of earlier attempts.

torch's elastic agents keep one store for all attempts, with the addresses of ended workers still in
it, and agents on several machines may number attempts differently. Therefore worker 0 draws a
random name for each round, which prefixes all keys of the round. The other workers register under
it, and use it once worker 0 has confirmed them.
"""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

POLL_S = 0.05


# poll interval for each worker, so that many workers do not overload the store
POLL_S_PER_WORKER = 0.001


# interval at which worker 0 writes the missing ranks, and all check the processes of their machine
LOOK_S = 1.0


class Store(Protocol):
    """The methods of torch's stores that this package uses."""

    def set(self, key: str, value: str) -> object:
        """Write a key."""

    def get(self, key: str) -> bytes:
        """Read a key; waits until it exists."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return the result."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read all keys with one request; waits until they exist."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys exist."""


def read_existing(store: Store, keys: Sequence[str]) -> dict[str, bytes]:
    """Return the values of the keys that exist.

    Takes two requests if all exist; if k of n are missing, about 2 * k * log2(n) more.
    """
    found = _existing(store, list(keys))
    return dict(zip(found, store.multi_get(found), strict=True)) if found else {}


def _existing(store: Store, keys: list[str]) -> list[str]:
    if not keys or store.check(keys):
        return keys
    if len(keys) == 1:
        return []
    middle = len(keys) // 2
    return _existing(store, keys[:middle]) + _existing(store, keys[middle:])


def _check_nothing(seconds: float) -> None:
    """Check nothing; the default where the processes of the other workers are not visible."""


def join_workers(
    store: Store,
    rank: int,
    world_size: int,
    timeout_s: float,
    silent_s: float | None = None,
    check_running: Callable[[float], None] = _check_nothing,
) -> str:
    """Wait for all workers of this round, and return the round's unique name, the same on all.

    Args:
        store: shared by all workers.
        rank: this worker.
        world_size: the number of workers.
        timeout_s: how long to wait for all workers, in seconds.
        silent_s: after how many seconds without a sign worker 0, or a worker whose process is
            visible, counts as stopped; `timeout_s` if None.
        demand_running: raises TimeoutError if a worker was stopped for so many seconds.

    Raises:
        TimeoutError: workers are missing or stopped; the message names them.
    """
    silent_s = timeout_s if silent_s is None else silent_s
    limits = _Limits(timeout_s, silent_s, check_running, world_size)
    own = uuid.uuid4().hex
    if rank == 0:
        return _lead(store, own, world_size, limits)
    return _follow(store, own, rank, limits)


class _Limits:
    """The time limits and poll interval of a rendezvous."""

    def __init__(
        self,
        timeout_s: float,
        silent_s: float,
        check_running: Callable[[float], None],
        world_size: int,
    ) -> None:
        self.end, self.silent_s = time.monotonic() + timeout_s, silent_s
        self.check_running = lambda: check_running(silent_s)
        self.poll_s = max(POLL_S, world_size * POLL_S_PER_WORKER)
        self.looked_at = float("-inf")

    def is_time_to_look(self) -> bool:
        """Whether `LOOK_S` has passed since the last call that returned True."""
        if time.monotonic() - self.looked_at < LOOK_S:
            return False
        self.looked_at = time.monotonic()
        return True

    def wait(self, missing: Sequence[int]) -> None:
        """Sleep for the poll interval.

        Raises:
            TimeoutError: the time limit has passed.
        """
        if time.monotonic() > self.end:
            raise TimeoutError(f"no sign of worker {', '.join(map(str, missing))}")
        time.sleep(self.poll_s)


def _lead(store: Store, own: str, world_size: int, limits: _Limits) -> str:
    store.set("gcnzc/round", own)
    seen: dict[int, str] = {}
    count, unread, beat = 0, set[str](), 0
    while len(seen) < world_size - 1:
        missing = [rank for rank in range(1, world_size) if rank not in seen]
        if limits.is_time_to_look():
            beat += 1
            store.set(f"{own}/waiting", json.dumps([beat, missing]))
            limits.check_running()
        # arrivals are numbered, so that a poll takes three requests for any number of workers
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


def _follow(store: Store, own: str, rank: int, limits: _Limits) -> str:
    announced, first = "", _First(limits.silent_s)
    while True:
        # the name may be that of an earlier round, which gets no confirmation
        name = store.get("gcnzc/round").decode() if store.check(["gcnzc/round"]) else ""
        if name and name != announced:
            number = store.add(f"{name}/arrivals", 1)
            store.set(f"{name}/arrival/{number}", json.dumps([rank, own]))
            announced, first = name, _First(limits.silent_s)
        if name and own in json.loads(
            read_existing(store, [f"{name}/all"]).get(f"{name}/all", b"[]")
        ):
            return name
        if limits.is_time_to_look():
            limits.check_running()
            if name:
                first.read(read_existing(store, [f"{name}/waiting"]))
        limits.wait([each for each in first.missing if each != rank] or [0])


class _First:
    """The ranks that worker 0 waits for, and whether worker 0 is still running."""

    def __init__(self, silent_s: float) -> None:
        self.silent_s = silent_s
        self.beats: list[int] = []
        self.changed_at = time.monotonic()
        self.waiting: list[int] = []

    def read(self, found: Mapping[str, Any]) -> None:
        """Update from the values read from the store.

        Raises:
            TimeoutError: worker 0 has written, and then stopped for `silent_s`.
        """
        for text in found.values():
            beat, self.waiting = json.loads(text)
            if beat not in self.beats:
                self.beats.append(beat)
                self.changed_at = time.monotonic()
        # worker 0 of an earlier round never writes again, and is no error
        if self.is_alive and time.monotonic() - self.changed_at > self.silent_s:
            raise TimeoutError(
                f"worker 0 gives no sign of life for {self.silent_s:g} s while workers meet"
            )

    @property
    def is_alive(self) -> bool:
        """Whether worker 0 has written at least twice since this worker registered."""
        return len(self.beats) > 1

    @property
    def missing(self) -> list[int]:
        """The ranks that worker 0 waits for; empty unless `is_alive`."""
        return self.waiting if self.is_alive else []
