"""The store of torch.distributed that all ranks share, and the requests of algorithms to it."""

import atexit
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from gcnzc.exchange.errors import ConnectionBroken, network
from gcnzc.exchange.requests import (
    CompareAndSet,
    DeleteKeys,
    ReadKeys,
    StoreRequest,
    WaitForKey,
)

T = TypeVar("T")

# poll interval of a wait, at first and at most; a request takes 15 us to a store on this machine
POLL_S, MAX_POLL_S = 0.0005, 0.01
# separates the keys of algorithms from those of this package
PREFIX = "gcnzc/keys/"
# no key has this value
_NO_VALUE = f"gcnzc/no-value/{uuid.uuid4()}"
# time limit of the wait for a request to a store that does not respond, in seconds
END_S = 3.0


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


class StoreThread(threading.Thread):
    """A daemon thread that makes requests to the store until `end` is called.

    It ends before the interpreter does: a thread that returns from torch's store while the
    interpreter ends aborts the process.

    Args:
        name: of the thread.
        work: what the thread runs.
        stop: makes `work` return after its current request.
    """

    def __init__(self, name: str, work: Callable[[], None], stop: Callable[[], None]) -> None:
        super().__init__(target=work, name=name, daemon=True)
        self._stop_work = stop
        self.start()
        atexit.register(self.end)

    def end(self) -> None:
        """Stop the work, and wait until the thread has ended, at most `END_S`."""
        atexit.unregister(self.end)
        self._stop_work()
        # the garbage collector may close a group in this thread
        if threading.current_thread() is not self:
            self.join(END_S)


def start_thread(name: str, function: Callable[[], T]) -> "Future[T]":
    """Run a function in a daemon thread, which does not delay the end of the process."""
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(function())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return outcome


class MemoryStore:
    """A store of one process: of a single rank, or of a simulation."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def compare_and_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Set a key if it has the expected value, and return the value of the key afterwards."""
        if self.values.get(key, b"") == expected:
            self.values[key] = value
        return self.values.get(key, b"")

    def read(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys."""
        return [self.values.get(key, b"") for key in keys]

    def delete(self, keys: Sequence[str]) -> None:
        """Delete keys that may not exist."""
        for key in keys:
            self.values.pop(key, None)


class SharedStore:
    """The keys of algorithms in a store of torch.distributed; see `MemoryStore`."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def compare_and_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Set a key if it has the expected value, and return the value of the key afterwards."""
        answer = bytes(self.store.compare_set(PREFIX + key, expected, value))
        # torch's store answers the expected value if the key does not exist
        if answer == expected == value:
            return self.read([key])[0]
        return b"" if answer == expected else answer

    def read(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys."""
        names = [PREFIX + key for key in keys]
        if len(names) == 1:
            # `get` would wait for a key that does not exist
            value = bytes(self.store.compare_set(names[0], _NO_VALUE, _NO_VALUE))
            return [b"" if value == _NO_VALUE.encode() else value]
        found = read_existing(self.store, names)
        return [bytes(found.get(name, b"")) for name in names]

    def delete(self, keys: Sequence[str]) -> None:
        """Delete keys that may not exist."""
        for key in keys:
            self.store.delete_key(PREFIX + key)


def execute(request: StoreRequest, stored: MemoryStore | SharedStore) -> Any:
    """Execute a request that does not wait, and return its answer."""
    if isinstance(request, CompareAndSet):
        return stored.compare_and_set(request.key, request.expected, request.value)
    if isinstance(request, ReadKeys):
        return stored.read(request.keys)
    assert isinstance(request, DeleteKeys), "there are no other kinds"
    return stored.delete(request.keys)


class StoreRequests:
    """Executes requests to the store of a group.

    Args:
        store: a store of torch.distributed that all ranks share; None for a single rank.
        timeout_s: time limit of waits without one, in seconds.
    """

    def __init__(self, store: Any, timeout_s: float) -> None:
        self.stored = MemoryStore() if store is None else SharedStore(store)
        self.timeout_s = timeout_s

    def execute(self, request: StoreRequest) -> Any:
        """Execute a request, which is valid, and return its answer.

        Raises:
            ConnectionBroken: the store does not respond, or a wait without a limit took longer than
                the time limit of the group.
        """
        with network():
            if isinstance(request, WaitForKey):
                return self._wait(request)
            return execute(request, self.stored)

    def _wait(self, request: WaitForKey) -> bytes | None:
        limit_s = self.timeout_s if request.seconds is None else request.seconds
        end, pause_s = time.monotonic() + limit_s, POLL_S
        while True:
            (value,) = self.stored.read([request.key])
            if value:
                return value
            remaining_s = end - time.monotonic()
            if remaining_s <= 0:
                break
            time.sleep(min(pause_s, remaining_s))
            pause_s = min(1.5 * pause_s, MAX_POLL_S)
        if request.seconds is not None:
            return None
        limit = TimeoutError("no rank has set the key within the time limit")
        raise ConnectionBroken from limit
