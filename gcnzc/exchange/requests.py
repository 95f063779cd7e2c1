"""The requests of distributed algorithms: collectives and point-to-point messages.

An algorithm is a generator: it yields requests, receives each answer as the value of the `yield`,
and returns its result. It does not use a process group itself, so the same code runs on processes
(`run`) and is simulated for W ranks in one process (`lockstep`). All ranks must yield the same
collectives in the same order. Each `Send` needs a `Receive` on its peer; other ranks need neither.

Notation: W ranks, n elements.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Sum:
    """All-reduce with a sum; the answer is `values`, written in place, equal on all ranks."""

    values: Tensor
    """contiguous, of any shape, with the same size and dtype on all ranks"""


@dataclass(eq=False, slots=True)
class Mean:
    """All-reduce with a mean; the answer is `values`, written in place, equal on all ranks."""

    values: Tensor
    """contiguous, floating-point, of any shape, with the same size and dtype on all ranks"""


@dataclass(eq=False, slots=True)
class AllGather:
    """All-gather; the answer is (W, n), with one row per rank."""

    values: Tensor
    """(n,), contiguous, with the same size and dtype on all ranks"""


@dataclass(eq=False, slots=True)
class ReduceScatter:
    """Reduce-scatter with a sum; the answer is (n / W,), this rank's share of the sum."""

    values: Tensor
    """(n,), contiguous; n is a multiple of W, and rank r gets share r"""


@dataclass(eq=False, slots=True)
class AllToAll:
    """All-to-all; the answer is a list of W tensors, the parts that the ranks sent to this rank."""

    parts: Sequence[Tensor]
    """W one-dimensional tensors of one dtype and of any lengths; part r is sent to rank r"""
    counts: Sequence[int] | None = None
    """the number of elements to receive from each rank; None exchanges the lengths first"""


@dataclass(eq=False, slots=True)
class Broadcast:
    """Broadcast from one rank; the answer is `values`, written in place on the other ranks."""

    values: Tensor
    """of any shape, with the same size and dtype on all ranks"""
    root: int = 0
    """the rank that sends its values"""


@dataclass(eq=False, slots=True)
class SendReceive:
    """Exchange of tensors between pairs of ranks; the answer is the peer's tensor."""

    values: Tensor
    """contiguous, with the same shape and dtype on both ranks"""
    peer: int
    """the other rank, whose `peer` must be this rank; if it is this rank itself, the answer is a
    copy of `values`"""


@dataclass(slots=True)
class AllGatherScalar:
    """All-gather of a number; the answer is a tuple of W numbers, in the order of ranks."""

    value: int | float
    """sent as int64 or float64; of the same type on all ranks"""


@dataclass(eq=False, slots=True)
class Send:
    """Send a message to one rank, which needs a matching `Receive`; the answer is None."""

    values: Tensor
    """contiguous; must not change until the message is sent"""
    peer: int
    """the rank that receives the message"""


@dataclass(eq=False, slots=True)
class Receive:
    """Receive the next message from one rank; the answer is `values`, written in place."""

    values: Tensor
    """contiguous, with the number of elements and dtype of the message"""
    peer: int
    """the rank that sends the message"""


@dataclass(eq=False, slots=True)
class Scratch:
    """Allocate scratch memory; the answer is an uninitialized tensor like `values`.

    It is valid until the end of the algorithm that yields this request, such as a ring all-reduce.
    """

    values: Tensor


@dataclass(slots=True)
class Caller:
    """Set the name of the caller of the requests that follow, such as an optimizer.

    The name is part of the requests' headers, so equal requests of different callers are a
    mismatch. The answer is the previous name, which is empty at the start of an algorithm. Requests
    that have started keep their name.
    """

    name: str


@dataclass(slots=True)
class Compute:
    """Simulate a computation: `lockstep` advances the clock of the simulation, `run` sleeps."""

    seconds: float


@dataclass(slots=True)
class Now:
    """Read the clock; the answer is the time in seconds, from an arbitrary beginning.

    `lockstep` answers the virtual time, and `run` that of `time.monotonic`. The clocks of ranks
    differ, so ranks must not base a decision about collectives on it.
    """


@dataclass(eq=False, slots=True)
class Start:
    """Start a request, or a whole algorithm, that is overlapped with the requests that follow.

    The answer is a handle for `Wait`. The tensors of the request must not be used before the answer
    of `Wait`.
    """

    request: "Request | Algorithm[Any]"
    """a collective, a `Send` or `Receive`, or an algorithm that yields only collectives, `Scratch`
    and `Compute`"""
    channel: str = "background"
    """requests on one channel run one after the other, those on different channels concurrently;
    ignored for `Send` and `Receive`"""


@dataclass(eq=False, slots=True)
class Wait:
    """Wait for a started request; the answer is the request's answer."""

    pending: Any
    """the answer of `Start`"""


Collective: TypeAlias = (
    Sum | Mean | AllGather | ReduceScatter | AllToAll | Broadcast | SendReceive | AllGatherScalar
)
Message: TypeAlias = Send | Receive
Request: TypeAlias = Collective | Message | Scratch | Compute | Now | Caller | Start | Wait
Algorithm: TypeAlias = Generator[Request, Any, T]


def num_bytes_of(request: Collective) -> int:
    """Return the bytes of a request's values on this rank; `Choices` selects algorithms by them."""
    if isinstance(request, AllToAll):
        return sum(part.numel() * part.element_size() for part in request.parts)
    if isinstance(request, AllGatherScalar):
        return 8
    return request.values.numel() * request.values.element_size()


def describe_request(request: object) -> str:
    """Describe a request, for error messages."""
    if isinstance(request, Start):
        return f"the start of {describe_request(request.request)}"
    if isinstance(request, Wait):
        return "the end of a started request"
    if isinstance(request, Generator):
        return getattr(request, "__name__", "an algorithm")
    name = type(request).__name__
    if isinstance(request, Compute):
        return f"{name} of {request.seconds:g} s"
    peer = getattr(request, "peer", None)
    text = f"{name} of {num_bytes_of(request):,} bytes"  # type: ignore[arg-type]
    return text if peer is None else f"{text} with rank {peer}"
