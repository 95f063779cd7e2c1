"""The requests to the store that all ranks share, and their execution over processes."""

import time
import uuid
from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gcnzc.exchange.errors import ConnectionBroken
from gcnzc.exchange.ledger import Ledger
from gcnzc.exchange.rendezvous import read_existing
from gcnzc.exchange.requests import BaseRequest
from gcnzc.exchange.started_requests import network

# poll interval of a wait, at first and at most; a request takes 15 us to a store on this machine
POLL_S, MAX_POLL_S = 0.0005, 0.01
# separates the keys of algorithms from those of this package
PREFIX = "gcnzc/keys/"
# no key has this value
_NO_VALUE = f"gcnzc/no-value/{uuid.uuid4()}"
# the store of torch.distributed closes the connections of ranks that send more than 8 MiB
MAX_VALUE_BYTES = 1 << 22
# it closes them, too, for a key of more than 8 KiB, which includes the prefixes of its group
MAX_KEY_BYTES = 1 << 12


class StoreRequest(BaseRequest, ABC):
    """The base of requests to the store, which has values of bytes by key, common to all ranks.

    The store executes requests one after the other. It is independent of messages and collectives:
    a rank can wait for a decision without a message from each of the other ranks. In answers, the
    value of a key that does not exist is b"". A group of several ranks uses the store of
    torch.distributed; `lockstep` simulates one.
    """

    __slots__ = ()

    def check(self) -> None:
        """Check the request.

        Raises:
            ValueError: it is invalid.
        """

    def count(self, ledger: Ledger, world_size: int) -> None:
        """Count the request, and the values that one of several ranks sends with it."""
        ledger.count(type(self).__name__)


@dataclass(slots=True)
class CompareAndSet(StoreRequest):
    """Set a key if it has the expected value; the answer is the value of the key afterwards.

    If several ranks set a key with the same expected value, exactly one of them succeeds, and the
    answers of all of them are its value.
    """

    key: str
    """of at most 4 KiB in UTF-8, as all keys"""
    expected: bytes
    """of at most 4 MiB; b"" if the key must not exist"""
    value: bytes
    """not empty, of at most 4 MiB"""

    def describe(self) -> str:
        """Describe the key, for error messages."""
        return f"CompareAndSet of the key {self.key}"

    def check(self) -> None:
        """Check the key, and the types and sizes of the values; raises ValueError."""
        _check_key(self, self.key)
        for value in (self.expected, self.value):
            if not isinstance(value, bytes):
                raise ValueError(
                    f"{self.describe()} with a value of the type {type(value).__name__}\n\n"
                    "hint: give bytes, such as text.encode()"
                )
            if len(value) > MAX_VALUE_BYTES:
                raise ValueError(
                    f"{self.describe()} with a value of {len(value):,} bytes\n\n"
                    f"hint: at most {MAX_VALUE_BYTES:,} bytes; send larger values as messages"
                )
        if not self.value:
            raise ValueError(
                f"{self.describe()} to an empty value\n\n"
                "hint: an empty value means that the key does not exist; DeleteKeys deletes it"
            )

    def count(self, ledger: Ledger, world_size: int) -> None:
        """See `StoreRequest`; the expected value is sent too."""
        StoreRequest.count(self, ledger, world_size)
        if world_size > 1:
            ledger.add(type(self).__name__, len(self.expected) + len(self.value))


@dataclass(slots=True)
class ReadKeys(StoreRequest):
    """Read several keys; the answer is a list of their values.

    Over processes, keys that exist are read at the same instant. A key that is set while others are
    looked up may be missing in the answer.
    """

    keys: Sequence[str]

    def describe(self) -> str:
        """Describe the number of keys, for error messages."""
        return _describe_keys(self)

    def check(self) -> None:
        """Check the keys; raises ValueError."""
        _check_keys(self)


@dataclass(slots=True)
class WaitForKey(StoreRequest):
    """Wait until a key exists, or for a limited time; the answer is its value, None if too late.

    Over processes the key is polled, at least once, every `POLL_S` to `MAX_POLL_S` seconds of
    `gcnzc.exchange.store_requests`.
    """

    key: str
    seconds: float | None = None
    """the limit, at least 0. With None, `run` raises `WorkerLost` after the time limit of the
    group, and `lockstep` if no rank can continue and one has ended with an error"""

    def describe(self) -> str:
        """Describe the key, for error messages."""
        return f"the key {self.key}"

    def check(self) -> None:
        """Check the key, and that the limit is not negative or NaN; raises ValueError."""
        _check_key(self, self.key)
        is_number = self.seconds is None or isinstance(self.seconds, int | float)
        if not is_number or (self.seconds is not None and not self.seconds >= 0):
            raise ValueError(
                f"a wait of {self.seconds!r} s for {self.describe()}\n\n"
                "hint: give at least 0 s, or None"
            )


@dataclass(slots=True)
class DeleteKeys(StoreRequest):
    """Delete keys, and ignore those that do not exist; the answer is None."""

    keys: Sequence[str]

    def describe(self) -> str:
        """Describe the number of keys, for error messages."""
        return _describe_keys(self)

    def check(self) -> None:
        """Check the keys; raises ValueError."""
        _check_keys(self)


def _describe_keys(request: ReadKeys | DeleteKeys) -> str:
    keys = request.keys
    is_list = isinstance(keys, Sequence) and not isinstance(keys, str | bytes)
    what = f"{len(keys)} keys" if is_list else f"the keys {_shorten(keys)}"
    return f"{type(request).__name__} of {what}"


def _check_keys(request: ReadKeys | DeleteKeys) -> None:
    """Raise a ValueError if the keys are not a sequence of valid keys, such as a single string."""
    keys = request.keys
    if not isinstance(keys, Sequence) or isinstance(keys, str | bytes):
        raise ValueError(
            f'{request.describe()}\n\nhint: give a list of strings, such as ["a", "b"]'
        )
    for key in keys:
        _check_key(request, key)


def _check_key(request: StoreRequest, key: object) -> None:
    """Raise a ValueError if a key is not a string, cannot be encoded, or is too long."""
    name = type(request).__name__
    if not isinstance(key, str):
        raise ValueError(
            f"{name} with the key {_shorten(key)} of the type {type(key).__name__}\n\n"
            "hint: a key is a string"
        )
    try:
        num_bytes = len(key.encode())
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} with the key {_shorten(key)}, which UTF-8 cannot encode\n\n"
            "hint: use a key without surrogates"
        ) from error
    if num_bytes > MAX_KEY_BYTES:
        raise ValueError(
            f"{name} with the key {_shorten(key)} of {num_bytes:,} bytes\n\n"
            f"hint: at most {MAX_KEY_BYTES:,} bytes; use a hash of a longer key"
        )


def _shorten(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else text[:40] + "..."


class MemoryStore:
    """A store of one process: of a single rank, or of a simulation."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def compare_and_set(self, request: CompareAndSet) -> bytes:
        """Execute a `CompareAndSet`."""
        if self.values.get(request.key, b"") == request.expected:
            self.values[request.key] = request.value
        return self.values.get(request.key, b"")

    def read(self, request: ReadKeys) -> list[bytes]:
        """Execute a `ReadKeys`."""
        return [self.values.get(key, b"") for key in request.keys]

    def delete(self, request: DeleteKeys) -> None:
        """Execute a `DeleteKeys`."""
        for key in request.keys:
            self.values.pop(key, None)


class StoreRequests:
    """Executes requests to the store of a group.

    Args:
        store: a store of torch.distributed that all ranks share; None for a single rank.
        timeout_s: time limit of waits without one, in seconds.
        ledger: counts the requests.
        world_size: the number of ranks.
    """

    kinds = (CompareAndSet, ReadKeys, WaitForKey, DeleteKeys)
    """the types of requests"""

    def __init__(self, store: Any, timeout_s: float, ledger: Ledger, world_size: int) -> None:
        self.store, self.timeout_s = store, timeout_s
        self.ledger, self.world_size = ledger, world_size
        self.memory = MemoryStore()
        """of a single rank"""

    def execute(self, request: StoreRequest) -> Any:
        """Execute a request, and return its answer.

        Raises:
            ConnectionBroken: the store does not respond, or a wait without a limit took longer than
                the time limit of the group.
            ValueError: the request is invalid.
        """
        request.check()
        request.count(self.ledger, self.world_size)
        with network():
            if isinstance(request, WaitForKey):
                return self._wait(request)
            if isinstance(request, CompareAndSet):
                return self._compare_and_set(request)
            if isinstance(request, ReadKeys):
                return self._read(request.keys)
            assert isinstance(request, DeleteKeys), "there are no other kinds"
            return self._delete(request)

    def _compare_and_set(self, request: CompareAndSet) -> bytes:
        if self.store is None:
            return self.memory.compare_and_set(request)
        key, expected, value = PREFIX + request.key, request.expected, request.value
        answer = bytes(self.store.compare_set(key, expected, value))
        # torch's store answers the expected value if the key does not exist
        if answer == expected == value:
            return self._read([request.key])[0]
        return b"" if answer == expected else answer

    def _read(self, keys: Sequence[str]) -> list[bytes]:
        if self.store is None:
            return self.memory.read(ReadKeys(keys))
        names = [PREFIX + key for key in keys]
        if len(names) == 1:
            # `get` would wait for a key that does not exist
            value = bytes(self.store.compare_set(names[0], _NO_VALUE, _NO_VALUE))
            return [b"" if value == _NO_VALUE.encode() else value]
        found = read_existing(self.store, names)
        return [bytes(found.get(name, b"")) for name in names]

    def _delete(self, request: DeleteKeys) -> None:
        if self.store is None:
            self.memory.delete(request)
            return
        for key in request.keys:
            self.store.delete_key(PREFIX + key)

    def _wait(self, request: WaitForKey) -> bytes | None:
        limit_s = self.timeout_s if request.seconds is None else request.seconds
        end, pause_s = time.monotonic() + limit_s, POLL_S
        while True:
            (value,) = self._read([request.key])
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
