"""The requests of distributed algorithms, with their checks and their descriptions.

An algorithm is a generator: it yields requests, receives each answer as the value of the `yield`,
and returns its result. It does not use a process group itself, so the same code runs on processes
(`run`) and is simulated for W ranks in one process (`lockstep`). All ranks must yield the same
collectives in the same order. Each `Send` needs a `Receive` on its peer; other ranks need neither.

The collectives are in `gcnzc.exchange.collectives`.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

DEFAULT_CHANNEL = "background"
"""name of the channel of started collectives and algorithms"""

HeaderFields: TypeAlias = tuple[str, dict[str, str], dict[str, str]]
"""the description of a request that must be the same on all ranks, and by peer (as text, for JSON)
the size and dtype sent to it and expected from it"""

# the store of torch.distributed closes the connections of ranks that send more than 8 MiB
MAX_VALUE_BYTES = 1 << 22
# it closes them, too, for a key of more than 8 KiB, which includes the prefixes of its group
MAX_KEY_BYTES = 1 << 12


def require(is_valid: object, what: str, hint: str = "") -> None:
    """Raise a ValueError unless `is_valid`; its message says what is wrong, and the remedy."""
    if not is_valid:
        raise ValueError(f"{what}\n\nhint: {hint}" if hint else what)


class Request:
    """The base class of all requests."""

    __slots__ = ()

    def describe(self) -> str:
        """Describe the request, for error messages."""
        return type(self).__name__


class Exchange(Request):
    """A request that needs a request of another rank: a message or a collective."""

    __slots__ = ()

    values: Tensor

    @property
    def is_on_gpu(self) -> bool:
        """Whether the tensors of the request are on a GPU."""
        return self.values.is_cuda

    def describe_header(self) -> HeaderFields:
        """Describe what ranks compare; the result may be cached, and must not be changed."""
        return describe_size(self.values.numel(), self.values.dtype), {}, {}


class Message(Exchange):
    """The base of `Send` and `Receive`.

    The messages from one rank to another on a channel are received in the order in which they are
    sent, and each `Receive` must have the size and dtype of its message.
    """

    __slots__ = ()

    peer: int

    def describe(self) -> str:
        """Describe the size and the peer of the message, for error messages."""
        return f"{type(self).__name__} of {self.values.nbytes:,} bytes with rank {self.peer}"

    def check(self, rank: int, world_size: int) -> None:
        """Check the message of `rank`.

        Raises:
            ValueError: the peer is this rank or does not exist, or the values are not contiguous.
        """
        if self.peer == rank or not 0 <= self.peer < world_size:
            raise ValueError(f"{self.describe()} on rank {rank} of {world_size}")
        if not self.values.is_contiguous():
            raise ValueError(
                f"{self.describe()}: the values, of shape {tuple(self.values.shape)}, are not "
                "contiguous"
            )

    def sequence(self, rank: int, channel: str | None) -> str:
        """Return the name of the sequence of messages that this one of `rank` belongs to."""
        ends = (rank, self.peer) if isinstance(self, Send) else (self.peer, rank)
        return message_sequence(*ends, channel)


def message_sequence(sender: int, receiver: int, channel: str | None) -> str:
    """Return the name of the sequence of messages from one rank to another on a channel."""
    words = f"messages from rank {sender} to rank {receiver}"
    return f"{words} on channel {channel}" if channel else words


@dataclass(eq=False, slots=True)
class Send(Message):
    """Send a message to one rank, which needs a matching `Receive`; the answer is None.

    The message is sent when its receive has started.
    """

    values: Tensor
    """contiguous; must not change until the message is sent"""
    peer: int
    """the rank that receives the message"""


@dataclass(eq=False, slots=True)
class Receive(Message):
    """Receive the next message from one rank; the answer is `values`, written in place."""

    values: Tensor
    """contiguous, with the number of elements and dtype of the message"""
    peer: int
    """the rank that sends the message"""


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
    """the duration of the computation at full speed, at least 0"""

    def __post_init__(self) -> None:
        require(self.seconds >= 0, f"Compute of {self.seconds} s")


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
    """a collective, a message, or an algorithm that yields only collectives and `Compute`"""
    channel: str | None = None
    """Requests on one channel run in order, and channels run concurrently. All ranks open a channel
    together: the first `Start` with its name waits until all ranks have requested it. A `Send` on a
    channel starts at once, also while earlier requests run, and needs a receive on it; the tensors
    of messages on a channel are on the host. None or "": the channel "background", or for messages
    no channel, so that `First` cannot wait for them"""

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

    def __post_init__(self) -> None:
        require(self.pending, "First of no requests")
        _check_on_channels(self, self.pending)
        _check_limit(self)

    def describe(self) -> str:
        """Describe the wait, for error messages."""
        return f"the first of {len(self.pending)} started requests"


@dataclass(eq=False, slots=True)
class Abandon(Request):
    """Allow a simulation to end while a request is pending; the answer is None.

    Over processes it has no effect. The request is a `Receive` on a channel, a collective or an
    algorithm. It still runs before the next request of its channel. A message that arrives still
    overwrites `values`. An algorithm abandons requests that may not end before it does, such as
    receives from ranks that have nothing left to send. `First` and `Wait` may still name the
    request, also in a later algorithm.
    """

    pending: Any
    """the answer of `Start`"""

    def __post_init__(self) -> None:
        _check_on_channels(self, [self.pending])


def _check_on_channels(request: Request, pending: Sequence[Any]) -> None:
    is_valid = all(getattr(each, "is_on_channel", False) for each in pending)
    hint = 'start receives with the name of a channel, as Start(Receive(...), "mail")'
    require(is_valid, f"{type(request).__name__}: a request has no channel", hint)


class StoreRequest(Request):
    """The base of requests to the store, which has values of bytes by key, common to all ranks.

    The store executes requests one after the other. It is independent of messages and collectives:
    a rank can wait for a decision without a message from each of the other ranks. In answers, the
    value of a key that does not exist is b"". A group of several ranks uses the store of
    torch.distributed; `lockstep` simulates one.
    """

    __slots__ = ()

    key: str

    def describe(self) -> str:
        """Describe the key, for error messages."""
        return f"{type(self).__name__} of the key {self.key}"

    def all_keys(self) -> Sequence[str]:
        """Return the keys of the request."""
        return [self.key]

    def sent_values(self) -> Sequence[bytes]:
        """Return the values that a rank sends with the request."""
        return ()

    def __post_init__(self) -> None:
        name = type(self).__name__
        for key in self.all_keys():
            if (num_bytes := len(key.encode())) > MAX_KEY_BYTES:
                raise ValueError(
                    f"{name} with the key {key!a:.40}... of {num_bytes:,} bytes\n\n"
                    f"hint: at most {MAX_KEY_BYTES:,} bytes; use a hash of a longer key"
                )
        for value in self.sent_values():
            if len(value) > MAX_VALUE_BYTES:
                raise ValueError(
                    f"{name} with a value of {len(value):,} bytes\n\n"
                    f"hint: give at most {MAX_VALUE_BYTES:,} bytes; send larger values as messages"
                )


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

    def sent_values(self) -> Sequence[bytes]:
        """See `StoreRequest`."""
        return self.expected, self.value

    def __post_init__(self) -> None:
        StoreRequest.__post_init__(self)
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

    def __post_init__(self) -> None:
        StoreRequest.__post_init__(self)
        _check_limit(self)

    def describe(self) -> str:
        """Describe the key, for error messages."""
        return f"the key {self.key}"


def _check_limit(request: First | WaitForKey) -> None:
    seconds = request.seconds
    if seconds is not None and not seconds >= 0:
        raise ValueError(f"a wait of {seconds!r} s for {request.describe()}")


Algorithm: TypeAlias = Generator[Request, Any, T]
"""yields requests, and returns its result"""


def yield_request(request: Request) -> Algorithm[Any]:
    """Yield one request, and return its answer: the algorithm of a single request."""
    return (yield request)


def describe_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as float32."""
    return str(dtype).removeprefix("torch.")


def describe_size(num_elements: int, dtype: torch.dtype) -> str:
    """Return the size and dtype of a tensor as text."""
    return f"{num_elements} {describe_dtype(dtype)}"
