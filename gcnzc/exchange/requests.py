"""The requests of distributed algorithms: point-to-point messages, and the base of collectives.

An algorithm is a generator: it yields requests, receives each answer as the value of the `yield`,
and returns its result. It does not use a process group itself, so the same code runs on processes
(`run`) and is simulated for W ranks in one process (`lockstep`). All ranks must yield the same
collectives in the same order. Each `Send` needs a `Receive` on its peer; other ranks need neither.

The collectives are in `gcnzc.exchange.collectives`, each with its checks and its algorithms.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gcnzc.exchange.process_group import BuiltinCollectives
    from gcnzc.exchange.staging import StagingBuffers

T = TypeVar("T")

# size of the cache of each kind's header descriptions; a training run has few shapes
DESCRIPTIONS_KEPT = 1024

BUILTIN = "builtin"
"""name of the process group's own collective; simulations use the algorithm that gloo uses"""

DEFAULT_CHANNEL = "background"
"""name of the channel of started collectives and algorithms"""

HeaderFields: TypeAlias = tuple[str, dict[int, str], dict[int, str]]
"""the description of a request that must be the same on all ranks, and by peer the size and dtype
sent to it and expected from it"""

Paths: TypeAlias = Mapping[str, tuple[float, float]]
"""by algorithm, the messages and the bytes on the critical path, where each message waits for the
one before it"""


class BaseRequest:
    """The base class of all requests."""

    __slots__ = ()

    def describe(self) -> str:
        """Describe the request, for error messages."""
        return type(self).__name__

    @property
    def is_on_gpu(self) -> bool:
        """Whether the tensors of the request are on a GPU."""
        return False


class Collective(BaseRequest, ABC):
    """A request that all ranks make together.

    A subclass has the checks of a collective, its algorithms and the process group's own collective
    that executes it. `gcnzc.exchange.collectives.COLLECTIVES` lists the subclasses. Headers and
    ledgers use the name of the class.
    """

    __slots__ = ()

    kind: ClassVar[str]
    """the kind of request in `Choices`: the name of the class, or "Sum" for a `Mean`"""
    algorithms: ClassVar[tuple[str, ...]]
    """names of the algorithms"""
    is_from_all: ClassVar[bool] = True
    """whether the answer of each rank needs the requests of all ranks"""

    @property
    def name(self) -> str:
        """The name of the request, for the ledger and for headers."""
        return type(self).__name__

    def describe(self) -> str:
        """Describe the kind and the size of the request, for error messages."""
        return f"{type(self).__name__} of {self.num_bytes:,} bytes"

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """The bytes of the values on this rank; `Choices` selects algorithms by them."""

    @abstractmethod
    def check(self, world_size: int) -> None:
        """Check the request.

        Raises:
            ValueError: it is invalid, or does not match the number of ranks.
        """

    @abstractmethod
    def describe_header(self) -> HeaderFields:
        """Describe the request for its header; the results are cached, and must not be changed."""

    @abstractmethod
    def messages(self, name: str, rank: int, world_size: int) -> "Algorithm[Any]":
        """Execute the request by point-to-point messages, and return its answer.

        Args:
            name: one of `algorithms`, or for a `Broadcast` also a chain with its piece size.
            rank: this rank.
            world_size: the number of ranks; `check` accepts it.
        """

    @abstractmethod
    def sent_bytes(self, name: str, rank: int, world_size: int) -> float:
        """Return the bytes that a rank sends, by the formula of an algorithm.

        The formula is exact if the number of elements is a multiple of the number of ranks and, for
        sums by halving, the number of ranks is a power of two. For "builtin" it is that of gloo's
        algorithms.
        """

    @abstractmethod
    def copy_to_host(self, buffers: "StagingBuffers") -> "Collective":
        """Return the request with copies of its tensors in buffers on the host."""

    @abstractmethod
    def copy_answer(self, answer: Any) -> Any:
        """Copy the answer of `copy_to_host`'s request to this request's device, and return it."""

    @abstractmethod
    def start_builtin(self, process_group: "BuiltinCollectives") -> tuple[Any, Callable[[], Any]]:
        """Start the process group's own collective.

        Returns:
            The work of torch.distributed, or None if there is none, and a function that returns the
            answer after the work has finished.
        """

    @classmethod
    def has_algorithm(cls, name: str) -> bool:
        """Whether there is an algorithm with that name."""
        return name in cls.algorithms

    @classmethod
    def critical_paths(cls, num_bytes: int, world_size: int) -> Paths:
        """Return the cost of each algorithm that may be the default one, for W > 1 ranks.

        Empty if the first of `algorithms` is always the default.
        """
        return {}


class Message(BaseRequest, ABC):
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
        size = count_bytes(self.values)
        tag = "" if self.tag is None else f" with tag {self.tag}"
        return f"{type(self).__name__} of {size:,} bytes{self.describe_peer()}{tag}"

    def describe_peer(self) -> str:
        """Describe the peer, for error messages; empty if it may be any rank."""
        return ""

    @property
    def is_on_gpu(self) -> bool:
        """Whether the values are on a GPU."""
        return self.values.is_cuda

    def check(self) -> None:
        """Check the message.

        Raises:
            ValueError: the tag is not an integer of at least 0, or the values are not a contiguous
                tensor.
        """
        if not self.values.is_contiguous():
            raise ValueError(
                f"{self.describe()}: the values, of shape {tuple(self.values.shape)}, are not "
                "contiguous\n\nhint: send values.contiguous(), or receive into a contiguous tensor "
                "and copy it"
            )
        tag = self.tag
        if tag is not None and not (isinstance(tag, int) and tag >= 0):
            raise ValueError(
                f"{type(self).__name__} with tag {tag!r}\n\nhint: use an integer of at least 0, or "
                "None for messages that are received in the order in which they are sent"
            )

    def describe_header(self) -> HeaderFields:
        """Describe the message for its header: its size and dtype, and its tag if it has one."""
        size = describe_size(self.values.numel(), self.values.dtype)
        return size if self.tag is None else f"{size} with tag {self.tag}", {}, {}

    def name_sequence(self, sender: int, receiver: int, channel: str, caller: str) -> str:
        """Return the name of the sequence of messages that this one belongs to.

        The messages of a tag, size, dtype and caller are a sequence, since only these must be
        received in the order in which they are sent.
        """
        what = ""
        if self.tag is not None:
            what = f" of {self.describe_header()[0]}" + (f" for {caller}" if caller else "")
        words = f"messages{what} from rank {sender} to rank {receiver}"
        return f"{words} on channel {channel}" if channel else words

    @abstractmethod
    def copy_to_host(self, host: Tensor) -> "Message":
        """Return the message with `host`, (n,), as its values; of a `Send`, copy them to it."""

    @abstractmethod
    def copy_answer(self, host: Tensor, answer: Any) -> Any:
        """Return the answer, after the message with the values `host` has the answer `answer`."""


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

    def describe_peer(self) -> str:
        """Describe the peer, for error messages."""
        return f" with rank {self.peer}"

    def sequence(self, rank: int, channel: str = "", caller: str = "") -> str:
        """Return the name of the sequence of messages that this one of `rank` belongs to."""
        return self.name_sequence(rank, self.peer, channel, caller)

    def copy_to_host(self, host: Tensor) -> "Send":
        """Copy the values to `host`, (n,), and return a message with them."""
        host.view(self.values.shape).copy_(self.values)
        return Send(host, self.peer, self.tag)

    def copy_answer(self, host: Tensor, answer: None) -> None:
        """Return the answer, None."""


@dataclass(eq=False, slots=True)
class Receive(Message):
    """Receive the next message from one rank; the answer is `values`, written in place."""

    values: Tensor
    """contiguous, with the number of elements and dtype of the message"""
    peer: int
    """the rank that sends the message"""
    tag: int | None = None
    """the tag of the message; None for the next message without a tag"""

    def describe_peer(self) -> str:
        """Describe the peer, for error messages."""
        return f" with rank {self.peer}"

    def sequence(self, rank: int, channel: str = "", caller: str = "") -> str:
        """Return the name of the sequence of messages that this one of `rank` belongs to."""
        return self.name_sequence(self.peer, rank, channel, caller)

    def copy_to_host(self, host: Tensor) -> "Receive":
        """Return a message that is received into `host`, (n,)."""
        return Receive(host, self.peer, self.tag)

    def copy_answer(self, host: Tensor, answer: Tensor) -> Tensor:
        """Copy the received values from `host` to those of this request, and return them."""
        return self.values.copy_(host.view(self.values.shape))


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

    def check(self) -> None:
        """Check the message; see `Message`."""
        if self.tag is None:
            raise ValueError(
                "ReceiveAny without a tag\n\n"
                "hint: give the tag of the Send, an integer of at least 0"
            )
        Message.check(self)

    def copy_to_host(self, host: Tensor) -> "ReceiveAny":
        """Return a message that is received into `host`, (n,)."""
        return ReceiveAny(host, self.tag)

    def copy_answer(self, host: Tensor, answer: tuple[Tensor, int]) -> tuple[Tensor, int]:
        """Copy the received values from `host` to those of this request, and return the answer."""
        return self.values.copy_(host.view(self.values.shape)), answer[1]


@dataclass(eq=False, slots=True)
class Scratch(BaseRequest):
    """Allocate scratch memory; the answer is an uninitialized tensor like `values`.

    It is valid until the end of the algorithm that yields this request, such as a ring all-reduce.
    """

    values: Tensor

    def describe(self) -> str:
        """Describe the size, for error messages."""
        return f"Scratch of {count_bytes(self.values):,} bytes"


@dataclass(slots=True)
class Caller(BaseRequest):
    """Set the name of the caller of the requests that follow, such as an optimizer.

    The name is part of the requests' headers, so equal requests of different callers are a
    mismatch. The answer is the previous name, which is empty at the start of an algorithm. Requests
    that have started keep their name.
    """

    name: str


@dataclass(slots=True)
class Compute(BaseRequest):
    """Simulate a computation: `lockstep` advances the clock of the simulation, `run` sleeps."""

    seconds: float
    """the duration of the computation at full speed"""

    def describe(self) -> str:
        """Describe the time, for error messages."""
        is_number = isinstance(self.seconds, int | float)
        return f"Compute of {f'{self.seconds:g}' if is_number else repr(self.seconds)} s"

    def check(self) -> None:
        """Check that the duration is not negative or NaN; raises ValueError."""
        if not isinstance(self.seconds, int | float) or not self.seconds >= 0:
            raise ValueError(f"{self.describe()}\n\nhint: give at least 0 s")

    def sleep(self) -> None:
        """Check the duration, and sleep."""
        self.check()
        time.sleep(self.seconds)


@dataclass(slots=True)
class Now(BaseRequest):
    """Read the clock; the answer is the time in seconds, from an arbitrary beginning.

    `lockstep` answers the virtual time, and `run` that of `time.monotonic`. The clocks of ranks
    differ, so ranks must not base a decision about collectives on it.
    """


@dataclass(eq=False, slots=True)
class Start(BaseRequest):
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
class Wait(BaseRequest):
    """Wait for a started request; the answer is the request's answer."""

    pending: Any
    """the answer of `Start`"""

    def describe(self) -> str:
        """Describe the wait, for error messages."""
        return "the end of a started request"


@dataclass(eq=False, slots=True)
class First(BaseRequest):
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
class Abandon(BaseRequest):
    """Stop waiting for a `Receive` on a channel, a collective or an algorithm; the answer is None.

    It still runs before the next request of its channel. A message that arrives still overwrites
    `values`. An algorithm abandons requests that may not end before it does, such as receives from
    ranks that have nothing left to send. `First` and `Wait` may still name the request, also in a
    later algorithm.
    """

    pending: Any
    """the answer of `Start`"""


Request: TypeAlias = BaseRequest
Algorithm: TypeAlias = Generator[Request, Any, T]


def check_on_channels(request: First | Abandon, kind: type) -> None:
    """Check that the requests that `First` or `Abandon` names run on channels.

    Args:
        request: the request.
        kind: the type of their handles.

    Raises:
        ValueError: there are none, one has no channel, or a time limit is negative or NaN.
    """
    if isinstance(request, First) and request.seconds is not None and not request.seconds >= 0:
        raise ValueError(
            f"{request.describe()} for {request.seconds} s\n\nhint: give at least 0 s, or None"
        )
    pending = request.pending if isinstance(request, First) else [request.pending]
    if not pending or not all(isinstance(each, kind) for each in pending):
        raise ValueError(
            f"{request.describe()}: {'a request has no channel' if pending else 'none is given'}"
            '\n\nhint: start receives with the name of a channel, as Start(Receive(...), "mail")'
        )


def yield_request(request: Request) -> Algorithm[Any]:
    """Yield one request, and return its answer: the algorithm of a single request."""
    return (yield request)


def describe_size(num_elements: int, dtype: torch.dtype) -> str:
    """Return the size and dtype of a tensor as text."""
    return f"{num_elements} {str(dtype).removeprefix('torch.')}"


def count_bytes(values: Tensor) -> int:
    """Return the bytes of the elements of a tensor."""
    return values.numel() * values.element_size()
