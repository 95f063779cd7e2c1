"""The requests of distributed algorithms, with their checks and their descriptions.

An algorithm is a generator: it yields requests, receives each answer as the value of the `yield`,
and returns its result. It does not use a process group itself, so the same code runs on processes
(`run`) and is simulated for W ranks in one process (`lockstep`). All ranks must yield the same
collectives in the same order. Each `Send` needs a `Receive` on its peer; other ranks need neither.

The collectives are in `gcnzc.exchange.collectives`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

DEFAULT_CHANNEL = "background"
"""name of the channel of started collectives and algorithms"""

HeaderFields: TypeAlias = tuple[str, dict[int, str], dict[int, str]]
"""the description of a request that must be the same on all ranks, and by peer the size and dtype
sent to it and expected from it"""

# the store of torch.distributed closes the connections of ranks that send more than 8 MiB
MAX_VALUE_BYTES = 1 << 22
# it closes them, too, for a key of more than 8 KiB, which includes the prefixes of its group
MAX_KEY_BYTES = 1 << 12


def require(is_valid: object, what: str, hint: str) -> None:
    """Raise a ValueError unless `is_valid`; its message says what is wrong, and the remedy."""
    if not is_valid:
        raise ValueError(f"{what}\n\nhint: {hint}")


class Request:
    """The base class of all requests."""

    __slots__ = ()

    def describe(self) -> str:
        """Describe the request, for error messages."""
        return type(self).__name__


class Exchange(Request, ABC):
    """A request that needs a request of another rank: a message or a collective."""

    __slots__ = ()

    @property
    @abstractmethod
    def is_on_gpu(self) -> bool:
        """Whether the tensors of the request are on a GPU."""

    @abstractmethod
    def describe_header(self) -> HeaderFields:
        """Describe what ranks compare; the result may be cached, and must not be changed."""


class Message(Exchange):
    """The base of `Send`, `Receive` and `ReceiveAny`.

    Without a tag, the messages from one rank to another are received in the order in which they are
    sent, and each `Receive` must have the size and dtype of its message. A `Send` with a tag
    matches the first receive with the same tag, size, dtype and caller on the same channel, in any
    order with respect to other messages.
    """

    __slots__ = ()

    values: Tensor
    tag: int | None

    def describe(self) -> str:
        """Describe the size, the peer and the tag of the message, for error messages."""
        peer = getattr(self, "peer", None)
        with_peer = "" if peer is None else f" with rank {peer}"
        tag = "" if self.tag is None else f" with tag {self.tag}"
        return f"{type(self).__name__} of {self.values.nbytes:,} bytes{with_peer}{tag}"

    @property
    def is_on_gpu(self) -> bool:
        """See `Exchange`."""
        return self.values.is_cuda

    def check(self, rank: int, world_size: int) -> None:
        """Check the message of `rank`.

        Raises:
            ValueError: the peer is this rank or does not exist, the tag is not an integer of at
                least 0, or the values are not a contiguous tensor.
        """
        peer, tag = getattr(self, "peer", None), self.tag
        if peer is not None and (peer == rank or not 0 <= peer < world_size):
            raise ValueError(
                f"{self.describe()} on rank {rank} of {world_size}\n\n"
                f"hint: give a rank from 0 to {world_size - 1} that is not {rank}"
            )
        if not self.values.is_contiguous():
            raise ValueError(
                f"{self.describe()}: the values, of shape {tuple(self.values.shape)}, are not "
                "contiguous\n\nhint: send values.contiguous(), or receive into a contiguous tensor "
                "and copy it"
            )
        is_tag = tag is None and peer is not None
        if not is_tag and not (isinstance(tag, int) and tag >= 0):
            raise ValueError(
                f"{type(self).__name__} with tag {tag!r}\n\nhint: use an integer of at least 0, or "
                "None in a Send and Receive for messages that are received in the order in which "
                "they are sent"
            )

    def describe_header(self) -> HeaderFields:
        """Describe the size and dtype of the message, and its tag if it has one."""
        size = describe_size(self.values.numel(), self.values.dtype)
        return size if self.tag is None else f"{size} with tag {self.tag}", {}, {}

    def sequence(
        self, rank: int, channel: str = "", caller: str = "", peer: int | None = None
    ) -> str:
        """Return the name of the sequence of messages that this one of `rank` belongs to.

        The messages of a tag, size, dtype and caller are a sequence, since only these must be
        received in the order in which they are sent.

        Args:
            rank: the rank whose request it is.
            channel: the channel; empty for none.
            caller: the caller; empty for none.
            peer: the sender, for a `ReceiveAny`.
        """
        other = self.peer if peer is None else peer  # type: ignore[attr-defined]
        sender, receiver = (rank, other) if isinstance(self, Send) else (other, rank)
        what = ""
        if self.tag is not None:
            what = f" of {self.describe_header()[0]}" + (f" for {caller}" if caller else "")
        words = f"messages{what} from rank {sender} to rank {receiver}"
        return f"{words} on channel {channel}" if channel else words


@dataclass(eq=False, slots=True)
class Send(Message):
    """Send a message to one rank, which needs a matching `Receive` or `ReceiveAny`.

    The answer is None. The message is sent when its receive has started.
    """

    values: Tensor
    """contiguous; must not change until the message is sent"""
    peer: int
    """the rank that receives the message"""
    tag: int | None = None
    """at least 0; messages with different tags may be received in another order than they are sent.
    None: messages are received in order"""


@dataclass(eq=False, slots=True)
class Receive(Message):
    """Receive the next message from one rank; the answer is `values`, written in place."""

    values: Tensor
    """contiguous, with the number of elements and dtype of the message"""
    peer: int
    """the rank that sends the message"""
    tag: int | None = None
    """the tag of the message; None for the next message without a tag"""


@dataclass(eq=False, slots=True)
class ReceiveAny(Message):
    """Receive the next message with a tag from any rank.

    The answer is the pair of `values`, written in place, and the rank that sent the message. Of
    several messages, the one whose `Send` started first is received. With `Start` on a channel,
    `First` limits the time of the wait, and `Abandon` ends it. Without a message, it raises
    `WorkerLost` after the time limit of the group, even if all other ranks have ended; `lockstep`
    raises it if no rank can continue and one has ended with an error.
    """

    values: Tensor
    """contiguous, with the number of elements and dtype of the message"""
    tag: int
    """the tag of the message"""


@dataclass(eq=False, slots=True)
class Scratch(Request):
    """Allocate scratch memory; the answer is an uninitialized tensor like `values`.

    It is valid until the end of the algorithm that yields this request, such as a ring all-reduce.
    """

    values: Tensor

    def describe(self) -> str:
        """Describe the size, for error messages."""
        return f"Scratch of {self.values.nbytes:,} bytes"


@dataclass(slots=True)
class Caller(Request):
    """Set the name of the caller of the requests that follow, such as an optimizer.

    The name is part of the requests' headers, so equal requests of different callers are a
    mismatch. The answer is the previous name, which is empty at the start of an algorithm. Requests
    that have started keep their name.
    """

    name: str


@dataclass(slots=True)
class Compute(Request):
    """Simulate a computation: `lockstep` advances the clock of the simulation, `run` sleeps."""

    seconds: float
    """the duration of the computation at full speed"""

    def describe(self) -> str:
        """Describe the time, for error messages."""
        return f"Compute of {self.seconds} s"

    def check(self) -> None:
        """Check that the duration is not negative or NaN; raises ValueError."""
        if not self.seconds >= 0:
            raise ValueError(f"{self.describe()}\n\nhint: give at least 0 s")

    def sleep(self) -> None:
        """Check the duration, and sleep."""
        self.check()
        time.sleep(self.seconds)


@dataclass(slots=True)
class Now(Request):
    """Read the clock; the answer is the time in seconds, from an arbitrary beginning.

    `lockstep` answers the virtual time, and `run` that of `time.monotonic`. The clocks of ranks
    differ, so ranks must not base a decision about collectives on it.
    """


@dataclass(eq=False, slots=True)
class Start(Request):
    """Start a request, or a whole algorithm, that is overlapped with the requests that follow.

    The answer is a handle for `Wait`. The tensors of the request must not be used before the answer
    of `Wait`. Keep the handle of a `Send` until then: without it, the message may not be sent.
    """

    request: "Request | Algorithm[Any]"
    """a collective, a message, or an algorithm that yields only collectives, `Scratch` and
    `Compute`"""
    channel: str | None = None
    """Requests on one channel run in order, and channels run concurrently. All ranks open a channel
    together: the first `Start` with its name waits until all ranks have requested it. A `Send` or
    `ReceiveAny` on a channel starts at once, also while earlier requests run, and a `Send` needs a
    receive on it; their tensors are on the host. None or "": the channel "background", or for
    messages no channel, so that `First` cannot wait for them"""

    def describe(self) -> str:
        """Describe what is started, for error messages; an algorithm by its name."""
        if isinstance(self.request, Generator):
            return f"the start of {getattr(self.request, '__name__', 'an algorithm')}"
        return f"the start of {self.request.describe()}"


@dataclass(eq=False, slots=True)
class Wait(Request):
    """Wait for a started request; the answer is the request's answer."""

    pending: Any
    """the answer of `Start`"""

    def describe(self) -> str:
        """Describe the wait, for error messages."""
        return "the end of a started request"


@dataclass(eq=False, slots=True)
class First(Request):
    """Wait until one of several requests on channels has ended, or for a limited time.

    The answer is the index of a request in `pending` that has ended, the smallest index if several
    have ended, or None if none has ended in time. `Wait` for it returns its answer, or raises its
    error. The others continue. Ranks must not base a decision about collectives on the answer.
    """

    pending: Sequence[Any]
    """answers of `Start`, at least one"""
    seconds: float | None = None
    """the limit, at least 0; None for no limit. It does not affect the requests"""

    def describe(self) -> str:
        """Describe the wait, for error messages."""
        return f"the first of {len(self.pending)} started requests"


@dataclass(eq=False, slots=True)
class Abandon(Request):
    """Stop waiting for a `Receive` on a channel, a collective or an algorithm; the answer is None.

    It still runs before the next request of its channel. A message that arrives still overwrites
    `values`. An algorithm abandons requests that may not end before it does, such as receives from
    ranks that have nothing left to send. `First` and `Wait` may still name the request, also in a
    later algorithm.
    """

    pending: Any
    """the answer of `Start`"""


class StoreRequest(Request, ABC):
    """The base of requests to the store, which has values of bytes by key, common to all ranks.

    The store executes requests one after the other. It is independent of messages and collectives:
    a rank can wait for a decision without a message from each of the other ranks. In answers, the
    value of a key that does not exist is b"". A group of several ranks uses the store of
    torch.distributed; `lockstep` simulates one.
    """

    __slots__ = ()

    @abstractmethod
    def all_keys(self) -> Sequence[str]:
        """Return the keys of the request."""

    def sent_values(self) -> Sequence[bytes]:
        """Return the values that a rank sends with the request."""
        return ()

    def check(self) -> None:
        """Check that the keys are strings, and the types and sizes of keys and values.

        Raises:
            ValueError: a key or value is too long, or a value is invalid.
        """
        name = type(self).__name__
        for key in self.all_keys():
            num_bytes = len(key.encode())
            what = f"{name} with the key {_shorten(key)} of {num_bytes:,} bytes"
            hint = f"at most {MAX_KEY_BYTES:,} bytes; use a hash of a longer key"
            require(num_bytes <= MAX_KEY_BYTES, what, hint)
        for value in self.sent_values():
            is_valid = isinstance(value, bytes) and len(value) <= MAX_VALUE_BYTES
            what = f"{name} with a value of {len(value):,} {type(value).__name__}"
            hint = f"give at most {MAX_VALUE_BYTES:,} bytes; send larger values as messages"
            require(is_valid, what, hint)


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

    def all_keys(self) -> Sequence[str]:
        """See `StoreRequest`."""
        return [self.key]

    def sent_values(self) -> Sequence[bytes]:
        """See `StoreRequest`."""
        return self.expected, self.value

    def check(self) -> None:
        """See `StoreRequest`."""
        StoreRequest.check(self)
        hint = "an empty value means that the key does not exist; DeleteKeys deletes it"
        require(self.value, f"{self.describe()} to an empty value", hint)


@dataclass(slots=True)
class _KeysRequest(StoreRequest):
    keys: Sequence[str]

    def describe(self) -> str:
        """Describe the number of keys, for error messages."""
        return f"{type(self).__name__} of {len(self.keys)} keys"

    def all_keys(self) -> Sequence[str]:
        """See `StoreRequest`."""
        what = f"{type(self).__name__} of the key {_shorten(self.keys)}"
        require(not isinstance(self.keys, str), what, "give a list of strings")
        return self.keys


class ReadKeys(_KeysRequest):
    """Read several keys; the answer is a list of their values.

    Over processes, keys that exist are read at the same instant. A key that is set while others are
    looked up may be missing in the answer.
    """

    __slots__ = ()


class DeleteKeys(_KeysRequest):
    """Delete keys, and ignore those that do not exist; the answer is None."""

    __slots__ = ()


@dataclass(slots=True)
class WaitForKey(StoreRequest):
    """Wait until a key exists, or for a limited time; the answer is its value, None if too late.

    Over processes the key is polled, at least once, every `POLL_S` to `MAX_POLL_S` seconds of
    `gcnzc.exchange.store`.
    """

    key: str
    seconds: float | None = None
    """the limit, at least 0. With None, `run` raises `WorkerLost` after the time limit of the
    group, and `lockstep` if no rank can continue and one has ended with an error"""

    def describe(self) -> str:
        """Describe the key, for error messages."""
        return f"the key {self.key}"

    def all_keys(self) -> Sequence[str]:
        """See `StoreRequest`."""
        return [self.key]

    def check(self) -> None:
        """See `StoreRequest`; the limit must not be negative or NaN."""
        StoreRequest.check(self)
        seconds = self.seconds
        is_limit = seconds is None or (isinstance(seconds, int | float) and seconds >= 0)
        what = f"a wait of {seconds!r} s for {self.describe()}"
        require(is_limit, what, "give at least 0 s, or None")


def _shorten(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else text[:40] + "..."


Algorithm: TypeAlias = Generator[Request, Any, T]
"""yields requests, and returns its result"""


def check_kind(value: object, kinds: type | UnionType, what: str) -> None:
    """Check the type of a request, or of what a `Start` starts.

    Raises:
        TypeError: it is of another type; `what` says where it was found.
    """
    if not isinstance(value, kinds):
        raise TypeError(f"{what} {value!r:.100}")


def yield_request(request: Request) -> Algorithm[Any]:
    """Yield one request, and return its answer: the algorithm of a single request."""
    return (yield request)


def describe_size(num_elements: int, dtype: torch.dtype) -> str:
    """Return the size and dtype of a tensor as text."""
    return f"{num_elements} {str(dtype).removeprefix('torch.')}"
