"""The ledger: bytes that a rank sent, by kind of request."""

from dataclasses import dataclass, field


@dataclass
class Entry:
    """What one kind of request came to."""

    requests: int = 0
    messages: int = 0
    bytes_sent: int = 0


@dataclass
class Ledger:
    """The payload that one worker sent, by kind of request; headers are not counted."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def count(self, kind: str) -> None:
        """Count a request."""
        self._of(kind).requests += 1

    def add(self, kind: str, num_bytes: int, messages: int = 1) -> None:
        """Count what is sent for a kind of request."""
        entry = self._of(kind)
        entry.messages += messages
        entry.bytes_sent += num_bytes

    @property
    def bytes_sent(self) -> int:
        """Of all requests."""
        return sum(entry.bytes_sent for entry in self.entries.values())

    @property
    def requests(self) -> int:
        """Of all kinds."""
        return sum(entry.requests for entry in self.entries.values())

    def _of(self, kind: str) -> Entry:
        return self.entries.setdefault(kind, Entry())
