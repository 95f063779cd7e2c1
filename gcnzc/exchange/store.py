"""The store of torch.distributed that all ranks share, and the requests of algorithms to it."""

import atexit
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed import Store as Store  # type: ignore[attr-defined]

from gcnzc.exchange.errors import ConnectionBroken, network
from gcnzc.exchange.requests import CompareAndSet, ReadKeys, StoreRequest, WaitForKey

T = TypeVar("T")

# poll interval of a wait, at first and at most; a request takes 15 us to a store on this machine
POLL_S, MAX_POLL_S = 0.0005, 0.01
# separates the keys of algorithms from those of this package
PREFIX = "gcnzc/keys/"
# no key has this value
_NO_VALUE = f"gcnzc/no-value/{uuid.uuid4()}"
# time limit of the wait for a request to a store that does not respond, in seconds
END_S = 3.0


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


class StoredKeys:
    """The keys of algorithms in a store of torch.distributed, and the requests to them.

    Args:
        store: the store that all ranks share; None for one of this process, as for a single rank.
    """

    def __init__(self, store: Any = None) -> None:
        self.store: Any = HashStore() if store is None else store

    def read(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys."""
        names = [PREFIX + key for key in keys]
        if len(names) == 1:
            # `get` would wait for a key that does not exist
            value = bytes(self.store.compare_set(names[0], _NO_VALUE, _NO_VALUE))
            return [b"" if value == _NO_VALUE.encode() else value]
        found = read_existing(self.store, names)
        return [bytes(found.get(name, b"")) for name in names]

    def execute(self, request: StoreRequest) -> Any:
        """Execute a request that does not wait, and return its answer."""
        if isinstance(request, ReadKeys):
            return self.read(request.keys)
        if isinstance(request, CompareAndSet):
            expected, value = request.expected, request.value
            answer = bytes(self.store.compare_set(PREFIX + request.key, expected, value))
            # torch's store answers the expected value if the key does not exist
            if answer == expected == value:
                return self.read([request.key])[0]
            return b"" if answer == expected else answer
        for key in request.all_keys():
            self.store.delete_key(PREFIX + key)
        return None

    def answer(self, request: StoreRequest, timeout_s: float) -> Any:
        """Execute a request, and return its answer.

        Args:
            request: the request.
            timeout_s: the time limit of waits without one, in seconds.

        Raises:
            ConnectionBroken: the store does not respond, or a wait without a limit took too long.
        """
        with network():
            if isinstance(request, WaitForKey):
                return self._wait(request, timeout_s)
            return self.execute(request)

    def _wait(self, request: WaitForKey, timeout_s: float) -> bytes | None:
        seconds, pause_s = request.seconds, POLL_S
        end = time.monotonic() + (timeout_s if seconds is None else seconds)
        while not (value := self.read([request.key])[0]):
            remaining_s = end - time.monotonic()
            if remaining_s <= 0:
                if seconds is not None:
                    return None
                limit = TimeoutError("no rank has set the key within the time limit")
                raise ConnectionBroken from limit
            time.sleep(min(pause_s, remaining_s))
            pause_s = min(1.5 * pause_s, MAX_POLL_S)
        return value
