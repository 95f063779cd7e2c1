"""How workers that were started again meet on a store that remembers those before them.

torch's elastic agents keep one store for all attempts, with the addresses of workers that are gone
still in it, and agents on several machines do not count attempts alike. So worker 0 draws a name
for the round, and the others take it when worker 0 has seen them under it.
"""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

POLL_S = 0.05
# between two polls for each worker, so that many workers do not load the store
POLL_S_PER_WORKER = 0.001
# how often worker 0 writes whom it waits for, and processes of this machine are looked at
LOOK_S = 1.0


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str) -> object:
        """Write."""

    def get(self, key: str) -> bytes:
        """Read; waits until the key is there."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first, and return it."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read all of them by one request; waits until they are there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of them are there."""


def read_existing(store: Store, keys: Sequence[str]) -> dict[str, bytes]:
    """The values of those keys that are in the store.

    Two requests if all are there; if k of n are missing, about 2 * k * log2(n) more.
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


def _demand_nothing(seconds: float) -> None:
    """Of workers that no kernel can see from here."""


def met(
    store: Store,
    rank: int,
    world_size: int,
    timeout_s: float,
    silent_s: float | None = None,
    demand_running: Callable[[float], None] = _demand_nothing,
) -> str:
    """A name for this round that all its workers know, and that no round had before.

    Args:
        store: that all workers reach.
        rank: of this worker.
        world_size: how many come.
        timeout_s: what all wait for at most.
        silent_s: after which a worker that came, or that the kernel sees, counts as stopped;
            `timeout_s` if None.
        demand_running: raises TimeoutError if a worker was stopped for so many seconds.

    Raises:
        TimeoutError: not all came, or one is stopped; the message names them.
    """
    silent_s = timeout_s if silent_s is None else silent_s
    limits = _Limits(timeout_s, silent_s, demand_running, world_size)
    own = uuid.uuid4().hex
    if rank == 0:
        return _lead(store, own, world_size, limits)
    return _follow(store, own, rank, limits)


class _Limits:
    """How long a worker waits, and for whom."""

    def __init__(
        self,
        timeout_s: float,
        silent_s: float,
        demand_running: Callable[[float], None],
        world_size: int,
    ) -> None:
        self.end, self.silent_s = time.monotonic() + timeout_s, silent_s
        self.demand_running = lambda: demand_running(silent_s)
        self.poll_s = max(POLL_S, world_size * POLL_S_PER_WORKER)
        self.looked_at = float("-inf")

    def is_time_to_look(self) -> bool:
        """Whether `LOOK_S` has passed since it last was."""
        if time.monotonic() - self.looked_at < LOOK_S:
            return False
        self.looked_at = time.monotonic()
        return True

    def wait(self, missing: Sequence[int]) -> None:
        """Wait a little, or raise if the time is over."""
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
            limits.demand_running()
        # numbered, so that a poll costs three requests however many workers are missing
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
        # an earlier round's name may stand there still; nobody answers under it
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
            limits.demand_running()
            if name:
                first.read(read_existing(store, [f"{name}/waiting"]))
        limits.wait([each for each in first.missing if each != rank] or [0])


class _First:
    """What worker 0 wrote of the round: whom it waits for, as long as it goes on writing."""

    def __init__(self, silent_s: float) -> None:
        self.silent_s = silent_s
        self.beats: list[int] = []
        self.changed_at = time.monotonic()
        self.waiting: list[int] = []

    def read(self, found: Mapping[str, Any]) -> None:
        """Take in what is there now.

        Raises:
            TimeoutError: worker 0 wrote for a while, and stopped.
        """
        for text in found.values():
            beat, self.waiting = json.loads(text)
            if beat not in self.beats:
                self.beats.append(beat)
                self.changed_at = time.monotonic()
        # an earlier round's worker 0 is silent from the start
        if self.is_alive and time.monotonic() - self.changed_at > self.silent_s:
            raise TimeoutError(
                f"worker 0 gives no sign of life for {self.silent_s:g} s while workers meet"
            )

    @property
    def is_alive(self) -> bool:
        """Whether worker 0 wrote while this worker looked."""
        return len(self.beats) > 1

    @property
    def missing(self) -> list[int]:
        """The ranks that worker 0 waits for; none if it does not write."""
        return self.waiting if self.is_alive else []
