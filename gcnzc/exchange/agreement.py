"""Check that all ranks make the same requests in the same order, and report mismatches.

Each message has a header: the kind, dtype and size of its request, its caller, such as one of
several optimizers, the number of the request, and a checksum of all requests before it. Over gloo a
hash of the header is the message's tag, which gloo sends in any case, so it costs no byte and no
round trip. gloo does not match messages with different tags: no message is read with the wrong size
or dtype, and both ranks wait. A rank that waits for longer than `STALL_S` compares its last
requests with those of the rank that it waits for, through the store. The comparison proves a
mismatch or finds none, so a slow rank is never reported as a mismatch.

The collectives of torch.distributed have no headers. A barrier with headers precedes a collective
that follows the previous request for the first time, and at least one of 128 requests. Limit: if
ranks differ at two requests that each of them has made in this order before, torch's collective
starts on both. It may hang, which is reported too; fail; or give a wrong result, which the next
message with a header detects, at most 127 requests later.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from gcnzc.exchange.engine import Header, Need, RequestLog
from gcnzc.exchange.requests import Request
from gcnzc.exchange.store import Store, StoreThread

# a rank that waits for longer compares its requests with those of other ranks
STALL_S = 0.5
# interval of these comparisons, at first and at most
COMPARE_S, MAX_COMPARE_S = 0.25, 5.0
# how long a rank whose connections broke waits for another rank to write the reason
REASON_S = 1.5
# the most messages on other channels that an error lists
MAX_OTHERS = 4
_VERDICT_KEY = "gcnzc/mismatch"


class RequestMismatch(RuntimeError):
    """Ranks made different requests, or wait for one another in a cycle; raised on all of them."""


def name_channel(sequence: str) -> str:
    """Return " on channel" and the name, for the requests of a sequence on a named channel."""
    # the name of a channel may contain "channel "
    name = sequence.partition("channel ")[2]
    return f" on channel {name}" if name not in ("", "default") else ""


def describe_other_channels(pairs: Iterable[tuple[str, str, tuple[int, int]]]) -> list[str]:
    """Describe messages that ranks have started on other channels than their peers expect.

    Args:
        pairs: names of sequences of messages, the started and the expected one, and two ranks: the
            one that has started the messages, and its peer.

    Returns:
        At most `MAX_OTHERS` descriptions, of pairs that differ only in the channel.
    """
    found = [
        f"rank {ranks[0]} has started {started}, and rank {ranks[1]} has not"
        for started, expected, ranks in pairs
        if started != expected
        and started.startswith("messages ")
        and started.partition(" on channel ")[0] == expected.partition(" on channel ")[0]
    ]
    return found[:MAX_OTHERS]


def find_difference(ranks: tuple[int, int], sequence: str, one: Header, other: Header) -> str:
    """Describe how two ranks' requests of the same number differ; empty if they do not."""
    first, second = ranks
    if one.words != other.words:
        return (
            f"request {one.number} of {sequence}: rank {first} requests {one.words}, rank {second} "
            f"requests {other.words}"
        )
    if one.digest != other.digest:
        return f"requests before number {one.number} of {sequence} differ on ranks {ranks}"
    for sender, all_sent, receiver, all_expected in (
        (first, one.sent, second, other.expected),
        (second, other.sent, first, one.expected),
    ):
        sent = all_sent.get(str(receiver), "nothing")
        expected = all_expected.get(str(sender), "nothing")
        if all_expected and sent != expected:
            return (
                f"request {one.number} of {sequence}, {one.words}: rank {sender} sends {sent} to "
                f"rank {receiver}, which expects {expected}"
            )
    return ""


def mismatch(difference: str) -> RequestMismatch:
    """Return the error of ranks whose requests differ."""
    return RequestMismatch(
        f"the ranks' requests do not match: {difference}\n\n"
        "hint: every rank must make the same requests in the same order, with the same sizes and "
        "dtypes, and construct and step its optimizers in the same order; a Send needs a Receive "
        "that its peer starts at the same time, on the same channel"
    )


class CurrentWait(NamedTuple):
    """The wait of a rank for a request that has not ended."""

    began_s: float  # by `time.perf_counter`
    request: Request
    find_need: Callable[[], Need | None]


class StallMonitor:
    """A thread that compares this rank's requests with those of other ranks during long waits.

    Args:
        store: shared by all ranks.
        rank: this rank.
        log: its requests.
        find_busy: returns the sequences whose next requests are made by another thread than the
            one that waits.
        abort: ends all waits of this rank for messages with an error.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        log: RequestLog,
        find_busy: Callable[[], list[str]],
        abort: Callable[[], None],
    ) -> None:
        self.store, self.rank, self.log = store, rank, log
        self.find_busy, self.abort = find_busy, abort
        self.wait: CurrentWait | None = None  # set and cleared by the thread that makes requests
        self.verdict = ""  # how the ranks' requests differ; empty until a mismatch is found
        self._num_records = 0
        self._cycle: dict[int, _Record] = {}
        self._requested, self._compared = threading.Event(), threading.Event()
        self._closed = threading.Event()
        self._thread = StoreThread("gcnzc-stalls", self._watch, self._stop)

    def find_reason(self) -> str:
        """Return how requests differ, after this rank's connections broke.

        Waits for at most `REASON_S`. Empty if no mismatch was found.
        """
        if not self.verdict:
            self._compared.clear()
            self._requested.set()
            self._compared.wait(REASON_S)
        return self.verdict

    def close(self) -> None:
        """Stop the thread."""
        self._thread.end()

    def _stop(self) -> None:
        self._closed.set()
        self._requested.set()

    def _watch(self) -> None:
        pause_s = COMPARE_S
        while not self._closed.is_set() and not self.verdict:
            is_requested = self._requested.wait(pause_s)
            self._requested.clear()
            wait = self.wait
            if wait is not None and time.perf_counter() - wait.began_s < STALL_S:
                wait = None
            # the interval grows, so that many waiting ranks do not overload the store
            pause_s = COMPARE_S if wait is None else min(1.5 * pause_s, MAX_COMPARE_S)
            if not self._closed.is_set() and (wait is not None or is_requested):
                self._compare(wait)
            if is_requested:
                self._compared.set()

    def _compare(self, wait: CurrentWait | None) -> None:
        try:
            if self.store.check([_VERDICT_KEY]):
                self.verdict = self.store.get(_VERDICT_KEY).decode()
            elif wait is not None and (need := wait.find_need()) is not None:
                verdict = self._follow(self._publish(wait, need))
                if verdict:
                    # write it before the others' connections break, so that they can read it
                    self.store.set(_VERDICT_KEY, verdict)
                    self.verdict = verdict
        except RuntimeError:
            return  # the store has ended or is slow; the wait ends with its time limit
        if self.verdict:
            self.abort()

    def _publish(self, wait: CurrentWait, need: Need) -> "_Record":
        """Write what this rank waits for, and its last requests, to the store."""
        self._num_records += 1
        # copies, since other threads append to the originals
        sequences = {name: list(each) for name, each in list(self.log.sequences.items())}
        own = _Record(
            self._num_records,
            wait.began_s,
            wait.request.describe(),
            need,
            self.find_busy(),
            sequences,
        )
        self.store.set(f"gcnzc/waits/{self.rank}", json.dumps(own))
        return own

    def _read(self, rank: int) -> "_Record | None":
        key = f"gcnzc/waits/{rank}"
        return _parse_record(self.store.get(key)) if self.store.check([key]) else None

    def _follow(self, own: "_Record") -> str:
        """Follow the chain of waits from this rank, and compare the requests of adjacent ranks.

        Returns:
            How requests differ, or the cycle of waits; empty if no mismatch is proved.
        """
        path, unread, last = {self.rank: own}, [self.rank], self.rank
        while unread:
            rank = unread.pop()
            record = path[rank]
            for last, sequence, number in _find_alternatives(record.need, path):
                other = path.get(last) or self._read(last)
                if other is None:
                    return ""
                if difference := _find_difference((rank, last), record, other):
                    return difference
                if other.has_made(sequence, number) or other.is_busy_with(sequence):
                    return ""
                if last not in path:
                    path[last] = other
                    unread.append(last)
        ranks = list(path)
        if not any(each.need.alternatives for each in path.values()):
            # the ranks before the cycle only wait for it
            ranks = ranks[ranks.index(last) :]
        return self._confirm({each: path[each] for each in ranks})

    def _confirm(self, cycle: "dict[int, _Record]") -> str:
        """Describe a cycle of waits, once all its ranks have waited at the same time.

        Records may be out of date. If each rank has published twice more and is still in the same
        wait, all of them were waiting when the cycle was first seen.
        """
        first = self._cycle
        if {rank: each.began_s for rank, each in first.items()} != {
            rank: each.began_s for rank, each in cycle.items()
        }:
            self._cycle = cycle
            return ""
        if any(each.number < first[rank].number + 2 for rank, each in cycle.items()):
            return ""
        waits = "; ".join(
            f"rank {rank} waits for {each.words}{name_channel(each.need.sequence)}"
            for rank, each in cycle.items()
        )
        others = describe_other_channels(
            (name, each.need.sequence, (each.need.peer, rank))
            for rank, each in cycle.items()
            if each.need.peer in cycle
            for name, headers in cycle[each.need.peer].sequences.items()
            if headers and not each.has_made(name, headers[-1].number)
        )
        return "; ".join([f"{waits}, and none of them can continue", *others])


class _Record(NamedTuple):
    """The record that a waiting rank writes to the store."""

    number: int  # of the record, from 1; each publication has the next number
    began_s: float
    words: str
    need: Need
    busy: list[str]
    sequences: dict[str, list[Header]]

    def is_busy_with(self, sequence: str) -> bool:
        """Whether a channel's thread makes the requests of a sequence, and is not idle."""
        return any(sequence == each or sequence.endswith(f" on {each}") for each in self.busy)

    def has_made(self, sequence: str, number: int) -> bool:
        headers = self.sequences.get(sequence, [])
        return any(each.number >= number for each in headers[-1:])


def _parse_record(text: bytes) -> _Record:
    number, began_s, words, need, busy, sequences = json.loads(text)
    parsed = {name: [Header(*each) for each in headers] for name, headers in sequences.items()}
    return _Record(number, began_s, words, Need(*need), busy, parsed)


def _find_alternatives(need: Need, path: dict[int, _Record]) -> Sequence[tuple[int, str, int]]:
    """Return peer, sequence and number of the requests of which one ends a wait."""
    return need.alternatives or [(_find_peer(need, path), need.sequence, need.number)]


def _find_peer(need: Need, path: dict[int, _Record]) -> int:
    """Return the rank that a rank waits for; if it waits for all, one on the path if possible."""
    missing = (
        rank
        for rank, record in path.items()
        if not record.has_made(need.sequence, need.number) and need.sequence not in record.busy
    )
    return next(missing, need.peer) if need.is_for_all else need.peer


def _find_difference(ranks: tuple[int, int], own: _Record, other: _Record) -> str:
    """Describe the first difference of two ranks' requests; empty if there is none."""
    for name, headers in own.sequences.items():
        others = {each.number: each for each in other.sequences.get(name, ())}
        for each in headers:
            if each.number in others and (
                difference := find_difference(ranks, name, each, others[each.number])
            ):
                return difference
    return ""
