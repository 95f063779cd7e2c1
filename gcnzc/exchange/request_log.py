"""The requests that a rank has made: what they sent, and headers that are equal on all ranks.

A header has the kind, dtype and size of a request, its caller, such as one of several optimizers,
the number of the request, and a checksum of all requests before it. Over gloo a hash of the header
is the tag of a message, see `gcnzc.exchange.agreement`.
"""

import threading
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gcnzc.exchange.requests import Exchange

# requests of each sequence whose headers are kept for comparison; those between two checks of
# torch's collectives are fewer
HEADERS_KEPT = 160
# tag of the message that ends a rank's waits; no header has this tag
ABORT_TAG = 2**31 - 1


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


class Header(NamedTuple):
    """The description of a request, which ranks compare."""

    number: int
    """the number of the request in its sequence, from 1"""
    digest: int
    """32-bit checksum of this header and of all before it in the sequence"""
    words: str
    """kind, dtype, size and caller, which must be the same on all ranks"""
    sent: dict[int, str]
    """size and dtype sent to each peer, if they differ between peers"""
    expected: dict[int, str]
    """size and dtype expected from each peer"""


NO_HEADER = Header(0, 0, "", {}, {})
"""the predecessor of the first header of a sequence"""


class Need(NamedTuple):
    """The request of a peer that a rank waits for."""

    peer: int
    sequence: str
    number: int
    is_for_all: bool = False
    """whether the rank waits for this request of all ranks; `peer` is one of them"""
    alternatives: Sequence[tuple[int, str, int]] = ()
    """peer, sequence and number of several requests, if one of them is enough"""


class RequestLog:
    """The requests that one rank has made, as sequences that must be the same on all ranks.

    The collectives of a channel are one sequence. The messages from one rank to another are one
    sequence.
    """

    def __init__(self) -> None:
        self.sequences: dict[str, deque[Header]] = {}

    def count(self, sequence: str) -> int:
        """Return the number of requests in a sequence."""
        headers = self.sequences.get(sequence)
        return headers[-1].number if headers else 0

    def find(self, sequence: str, number: int) -> Header | None:
        """Return the header of a request; None if it is not made yet or no longer kept."""
        headers = self.sequences.get(sequence)
        if not headers or not headers[0].number <= number <= headers[-1].number:
            return None
        return headers[number - headers[0].number]

    def record(
        self, sequence: str, request: Exchange | str, caller: str = "", *, is_ordered: bool = True
    ) -> Header:
        """Add a request to a sequence, and return its header.

        Args:
            sequence: the name of the sequence.
            request: the request, or a description of a call that is none.
            caller: the caller; empty for none.
            is_ordered: whether the digest depends on the requests before this one. If it does not,
                all requests of the sequence have the same header but for their numbers.
        """
        words, sent, expected = (
            (request, {}, {}) if isinstance(request, str) else request.describe_header()
        )
        if caller:
            words = f"{words} for {caller}"
        headers = self.sequences.get(sequence)
        if headers is None:
            kept = HEADERS_KEPT if is_ordered else 1
            headers = self.sequences[sequence] = deque(maxlen=kept)
        before = headers[-1] if headers else NO_HEADER
        digest = zlib.crc32(words.encode(), before.digest if is_ordered else 0)
        header = Header(before.number + 1, digest, words, sent, expected)
        headers.append(header)
        return header


def channel_sequence(channel: str) -> str:
    """Return the name of the sequence of a channel's collectives."""
    return f"channel {channel or 'default'}"


def message_tag(header: Header, num_bytes: int) -> int:
    """Return the tag, below `ABORT_TAG`, of a message of a request."""
    return zlib.crc32(num_bytes.to_bytes(8, "little"), header.digest) % ABORT_TAG
