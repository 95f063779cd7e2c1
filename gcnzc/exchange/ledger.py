"""Counters of the requests, messages and bytes that a rank has sent."""

from dataclasses import dataclass, field


@dataclass
class Entry:
    """The counters of one kind of request."""

    requests: int = 0
    messages: int = 0
    bytes_sent: int = 0


@dataclass
class Ledger:
    """Counters of one rank, by kind of request; bytes are those of payloads, without headers."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def count(self, kind: str) -> None:
        """Count one request of a kind."""
        entry = self.entries.get(kind) or self._create(kind)
        entry.requests += 1

    def add(self, kind: str, num_bytes: int, messages: int = 1) -> None:
        """Add the messages and bytes that were sent for a request of a kind."""
        entry = self.entries.get(kind) or self._create(kind)
        entry.messages += messages
        entry.bytes_sent += num_bytes

    @property
    def bytes_sent(self) -> int:
        """The bytes sent for all kinds of requests."""
        return sum(entry.bytes_sent for entry in self.entries.values())

    @property
    def requests(self) -> int:
        """The number of requests of all kinds."""
        return sum(entry.requests for entry in self.entries.values())

    def _create(self, kind: str) -> Entry:
        entry = self.entries[kind] = Entry()
        return entry
