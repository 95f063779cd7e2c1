"""Counters of the requests, messages and bytes that a rank has sent."""

import threading
from dataclasses import dataclass, field


@dataclass
class Entry:
    """The counters of one kind of request."""

    requests: int = 0
    messages: int = 0
    bytes_sent: int = 0


@dataclass
class Ledger:
    """Counters of one rank, by kind of request; bytes are those of payloads, without headers.

    The threads of channels count too. A request to the store counts the values that the rank sends;
    the answers are sent by the process that hosts the store.
    """

    entries: dict[str, Entry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def count(self, kind: str) -> None:
        """Count one request of a kind."""
        with self._lock:
            self._find(kind).requests += 1

    def add(self, kind: str, num_bytes: int, messages: int = 1) -> None:
        """Add the messages and bytes that were sent for a request of a kind."""
        with self._lock:
            entry = self._find(kind)
            entry.messages += messages
            entry.bytes_sent += num_bytes

    @property
    def bytes_sent(self) -> int:
        """The bytes sent for all kinds of requests."""
        with self._lock:
            return sum(entry.bytes_sent for entry in self.entries.values())

    @property
    def requests(self) -> int:
        """The number of requests of all kinds."""
        with self._lock:
            return sum(entry.requests for entry in self.entries.values())

    def _find(self, kind: str) -> Entry:
        if kind not in self.entries:
            self.entries[kind] = Entry()
        return self.entries[kind]
