"""The network and the machines of a simulation: bandwidths, latencies, slow-downs and crashes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TypeAlias

# bytes of payload in a frame with an MTU of 1500 B, of the frame with its headers, and of an
# acknowledgement, which is sent for two frames
_PAYLOAD_BYTES, _FRAME_BYTES, _ACKNOWLEDGEMENT_BYTES = 1448, 1514, 66

TCP_SHARE = _PAYLOAD_BYTES / (_FRAME_BYTES + _ACKNOWLEDGEMENT_BYTES / 2)
"""the part of a link's rate that is payload, if both directions are busy"""

SEND_BUFFER_BYTES = 2e6
"""payload in the send buffer of a connection that has been used: Linux increases it to 4 MiB
(`tcp_wmem`), of which about half is overhead"""

MESSAGE_S = 100e-6
"""seconds of a processor core to start a message; a round value, which was not measured"""


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_time(fault: "Crash | SlowDown") -> None:
    """Raise a ValueError if the time of a fault is negative, NaN or not a number."""
    if not _is_number(fault.at_s) or not fault.at_s >= 0:
        raise ValueError(
            f"a {type(fault).__name__} at {fault.at_s!r} s is invalid\n\n"
            "hint: give a time of at least 0"
        )


@dataclass(frozen=True)
class Link:
    """The network link of a rank, or from one rank to another.

    Raises:
        ValueError: a bandwidth is not above 0, or another number is negative or not finite.
    """

    bytes_per_s: float = float("inf")
    """bandwidth of outgoing messages, in bytes per second"""
    delay_s: float = 0.0
    """latency in seconds, from the departure of the last byte to its arrival"""
    message_s: float = 0.0
    """overhead of the sender per message in seconds; only of the link of a rank"""
    in_bytes_per_s: float = float("inf")
    """bandwidth of incoming messages, in bytes per second. They are received one after the other in
    the order in which their first bytes arrive; only of the link of a rank"""
    is_shared: bool = False
    """False: messages of the rank leave it one after the other. True: each peer and channel has a
    TCP connection, all of which share the links; of the links of all ranks or none"""
    buffer_bytes: float = 0.0
    """size of the send buffer of each connection; a send ends when the rest of the message fits in
    it. 0: none. Only of shared links"""

    def __post_init__(self) -> None:
        """Check the bandwidths and times; raises ValueError."""
        for name in ("bytes_per_s", "in_bytes_per_s"):
            if not _is_number(rate := getattr(self, name)) or not rate > 0:
                raise ValueError(
                    f"a link with {name}={rate!r} is invalid\n\n"
                    "hint: give a bandwidth above 0, or infinity"
                )
        for name in ("delay_s", "message_s", "buffer_bytes"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < float("inf"):
                raise ValueError(
                    f"a link with {name}={value!r} is invalid\n\n"
                    "hint: give a finite number of at least 0"
                )

    @classmethod
    def tcp(cls, mbit_per_s: float, delay_s: float = 0.0) -> "Link":
        """Return a link that behaves as TCP over Ethernet, in both directions.

        docs/benchmarks/networks.md compares it with emulated networks.

        Args:
            mbit_per_s: rate of the Ethernet frames.
            delay_s: latency from one rank to another.
        """
        if not _is_number(mbit_per_s) or not mbit_per_s > 0:
            raise ValueError(
                f"a link of {mbit_per_s!r} Mbit/s is invalid\n\n"
                "hint: give a rate above 0, such as 100"
            )
        rate = mbit_per_s * 1e6 / 8 * TCP_SHARE
        return cls(rate, delay_s, MESSAGE_S, rate, is_shared=True, buffer_bytes=SEND_BUFFER_BYTES)


@dataclass(frozen=True)
class Crash:
    """A rank ends without a message; its connections break, so that its peers raise `WorkerLost`.

    Messages that have not left it are lost.

    Raises:
        ValueError: the time is negative, NaN or not a number.
    """

    at_s: float
    """virtual time in seconds"""

    def __post_init__(self) -> None:
        """Check the time; raises ValueError."""
        _check_time(self)


@dataclass(frozen=True)
class SlowDown:
    """A rank computes more slowly for some time.

    Raises:
        ValueError: the factor is below 1, NaN or not a number; a time is negative, NaN or not a
            number; or a pause has no end.
    """

    at_s: float
    """virtual time of the beginning, in seconds"""
    factor: float
    """by which a `Compute` takes longer, at least 1; infinite to pause the rank, which then neither
    computes nor starts requests. Messages that it has sent continue"""
    seconds: float = float("inf")
    """duration in seconds; finite for an infinite factor"""

    def __post_init__(self) -> None:
        _check_time(self)
        if not _is_number(self.seconds) or not self.seconds >= 0:
            raise ValueError(
                f"a slow-down for {self.seconds!r} s is invalid\n\n"
                "hint: give a duration of at least 0"
            )
        if not _is_number(self.factor) or not self.factor >= 1:
            raise ValueError(
                f"a slow-down by {self.factor!r} is invalid\n\n"
                "hint: give a factor of at least 1; a factor of 2 takes twice the time"
            )
        if self.factor == self.seconds == float("inf"):
            raise ValueError("a pause without an end is invalid\n\nhint: use Crash")


Fault: TypeAlias = Crash | SlowDown

_NO_LIMITS = Link()
_UNKNOWN = float("inf"), float("inf"), float("inf")


class SimulatedNetwork:
    """The links of all ranks, and until when they are occupied.

    Args:
        world_size: W, the number of ranks.
        link: the link of each rank, or a sequence of W links; None has no limits.
        links: by (sender, receiver), links that limit their messages in addition.

    Raises:
        ValueError: the number of links is not W, or some are shared and others are not, or
            a pair has a rank that does not exist.
    """

    def __init__(
        self,
        world_size: int,
        link: Link | Sequence[Link] | None = None,
        links: Mapping[tuple[int, int], Link] | None = None,
    ) -> None:
        one = _NO_LIMITS if link is None else link
        self.of_rank = [one] * world_size if isinstance(one, Link) else list(one)
        if len(self.of_rank) != world_size:
            raise ValueError(
                f"{len(self.of_rank)} links for {world_size} ranks\n\n"
                "hint: give one link for all ranks, or one for each"
            )
        self.is_shared = any(each.is_shared for each in self.of_rank)
        if self.is_shared and not all(each.is_shared for each in self.of_rank):
            raise ValueError(
                "the links of some ranks are shared, and others are not\n\n"
                "hint: use the same value of is_shared for all of them"
            )
        self.of_pair = dict(links or {})
        for pair in self.of_pair:
            if any(rank not in range(world_size) for rank in pair):
                raise ValueError(
                    f"links has the pair {pair!r}, but there are {world_size} ranks\n\n"
                    f"hint: give pairs (sender, receiver) of ranks from 0 to {world_size - 1}"
                )
        self.has_receiver_limit = any(each.in_bytes_per_s != float("inf") for each in self.of_rank)
        # when the outgoing link of a rank, of a pair, and the incoming one of a rank, are free
        self.sent_at = [0.0] * world_size
        self.pair_sent_at = dict.fromkeys(self.of_pair, 0.0)
        self.received_at = [0.0] * world_size

    def send(
        self, sender: int, receiver: int, num_bytes: int, now: float
    ) -> tuple[float, float, float]:
        """Occupy the outgoing links for a message.

        Returns:
            Three times in seconds: when the last byte has left the sender, when the first byte
            arrives, and when the last one arrives if the receiver has no limit. Over shared links
            they are not known yet, and infinite; see `SharedNetwork`.
        """
        if self.is_shared:
            return _UNKNOWN
        link = self.of_rank[sender]
        free = self.sent_at[sender]
        begin = (now if now > free else free) + link.message_s
        sent = self.sent_at[sender] = begin + num_bytes / link.bytes_per_s
        pair_link = self.of_pair.get((sender, receiver)) if self.of_pair else None
        if pair_link is None:
            return sent, begin + link.delay_s, sent + link.delay_s
        pair = sender, receiver
        pair_sent = max(begin, self.pair_sent_at[pair]) + num_bytes / pair_link.bytes_per_s
        self.pair_sent_at[pair] = pair_sent
        delay_s = link.delay_s + pair_link.delay_s
        return sent, begin + delay_s, max(sent, pair_sent) + delay_s

    def receive(self, receiver: int, num_bytes: int, first: float, last: float) -> float:
        """Occupy the incoming link for a message, and return when its last byte has arrived.

        Call it in the order of `first`, the arrival of the first byte.

        Args:
            receiver: the rank.
            num_bytes: of the message.
            first, last: when its first and last byte arrive at the link.
        """
        begin = max(first, self.received_at[receiver])
        end = max(last, begin + num_bytes / self.of_rank[receiver].in_bytes_per_s)
        self.received_at[receiver] = end
        return end


class Machine:
    """The speed of one rank over time.

    Args:
        faults: its crash, if any, and its slow-downs, which do not overlap.

    Raises:
        ValueError: slow-downs overlap, or a fault is neither a `Crash` nor a `SlowDown`.
    """

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        is_list = isinstance(faults, Sequence)
        if not is_list or not all(isinstance(each, Crash | SlowDown) for each in faults):
            raise ValueError(
                f"the faults {faults!r} of a rank are invalid\n\n"
                "hint: give a list of Crash and SlowDown"
            )
        self.crashes_at = min(
            (each.at_s for each in faults if isinstance(each, Crash)), default=float("inf")
        )
        slow = sorted(
            (each for each in faults if isinstance(each, SlowDown)), key=lambda each: each.at_s
        )
        self.slow_downs = [(each.at_s, each.at_s + each.seconds, each.factor) for each in slow]
        for (_, end, _), (begin, _, _) in zip(self.slow_downs, self.slow_downs[1:], strict=False):
            if begin < end:
                raise ValueError(
                    f"a slow-down begins at {begin:g} s, before the previous one ends at {end:g} s"
                    "\n\nhint: slow-downs of a rank must not overlap"
                )

    def resume_at(self, now: float) -> float:
        """Return when the rank runs if it could continue at `now`: after a pause."""
        for begin, end, factor in self.slow_downs:
            if factor == float("inf") and begin <= now < end:
                return end
        return now

    def end_of(self, now: float, seconds: float) -> float:
        """Return when a computation that takes `seconds` at full speed ends."""
        for begin, end, factor in self.slow_downs:
            if now >= end:
                continue
            if now + seconds <= begin:
                break
            if now < begin:
                seconds -= begin - now
                now = begin
            if seconds * factor <= end - now:
                return now + seconds * factor
            seconds -= (end - now) / factor
            now = end
        return now + seconds
