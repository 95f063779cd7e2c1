"""Requests: collectives and messages that algorithms yield.

An algorithm is a generator: it yields a request, is sent the answer, and returns its result. It
never touches a process group, so the same lines run over processes (`run`) and for W workers in one
process (`lockstep`). Every worker must yield the same requests in the same order; `SendReceive`,
`Send` and `Receive` name the worker they are for.

Letters: W workers, n elements.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Sum:
    """The sum over the workers. The answer is `values`, written in place, equal on all workers."""

    values: Tensor
    """contiguous, of any shape, of the same size and dtype on every worker"""


@dataclass(frozen=True, eq=False)
class Mean:
    """The mean over the workers. The answer is `values`, written in place, equal on all workers."""

    values: Tensor
    """contiguous, floating-point, of any shape, of the same size and dtype on every worker"""


@dataclass(frozen=True, eq=False)
class AllGather:
    """Everybody's values: the answer is (W, n), a row for each worker."""

    values: Tensor
    """(n,), contiguous, of the same size and dtype on every worker"""


@dataclass(frozen=True, eq=False)
class ReduceScatter:
    """This worker's share of the sum over the workers: the answer is (n / W,)."""

    values: Tensor
    """(n,), contiguous; n is a multiple of W, and share r goes to worker r"""


@dataclass(frozen=True, eq=False)
class AllToAll:
    """A part for each worker: the answer is the W parts that are for this one."""

    parts: Sequence[Tensor]
    """W tensors of one dimension and one dtype, of any lengths; number r goes to worker r"""
    counts: Sequence[int] | None = None
    """elements that come from each worker; asked for first if None"""


@dataclass(frozen=True, eq=False)
class Broadcast:
    """One worker's values for all. The answer is `values`, written in place."""

    values: Tensor
    """of any shape, of the same size and dtype on every worker"""
    root: int = 0


@dataclass(frozen=True, eq=False)
class SendReceive:
    """An exchange of two workers: the answer is the other's values."""

    values: Tensor
    """contiguous, of the same shape and dtype on both"""
    peer: int
    """the other, who names this one; a worker that names itself gets a copy of its own"""


@dataclass(frozen=True)
class AllGatherScalar:
    """Everybody's number: the answer is W of them, in the order of ranks."""

    value: int | float
    """int64 or float64, of the same type on every worker"""


@dataclass(frozen=True, eq=False)
class Send:
    """A message to one worker, which it must receive; the answer, None, comes when it has left."""

    values: Tensor
    """contiguous; not to be changed before"""
    peer: int


@dataclass(frozen=True, eq=False)
class Receive:
    """The next message from one worker. The answer is `values`, written in place."""

    values: Tensor
    """contiguous, of as many bytes as are sent"""
    peer: int


@dataclass(frozen=True, eq=False)
class Scratch:
    """Memory to work in: the answer is like `values`, and lasts to the end of the collective."""

    values: Tensor


@dataclass(frozen=True)
class Caller:
    """The name of what makes the requests from here on, such as an optimizer; headers include it.

    Ranks whose requests are equal but have different callers are then a mismatch. The answer is the
    name before; at the start of an algorithm it is empty. What is begun keeps the name.
    """

    name: str


@dataclass(frozen=True)
class Compute:
    """Seconds of work that is not exchange: a virtual clock advances, a real worker sleeps."""

    seconds: float


@dataclass(frozen=True, eq=False)
class Start:
    """The start of a request, or of a whole algorithm, that goes on beside this one.

    The answer is something to be given to `Wait`. Until then tensors of the request belong to it.
    """

    request: "Request | Algorithm[Any]"
    """an algorithm asks for collectives alone, and for memory"""
    channel: str = "background"
    """what is begun on one channel is answered one after the other, that on several side by side; a
    single message needs none"""


@dataclass(frozen=True, eq=False)
class Wait:
    """The end of a request that was begun; the answer is that request's."""

    pending: Any


Collective: TypeAlias = (
    Sum | Mean | AllGather | ReduceScatter | AllToAll | Broadcast | SendReceive | AllGatherScalar
)
Message: TypeAlias = Send | Receive
Request: TypeAlias = Collective | Message | Scratch | Compute | Caller | Start | Wait
Algorithm: TypeAlias = Generator[Request, Any, T]


def bytes_of(request: Collective) -> int:
    """The bytes that a request is about: what its algorithm is chosen by."""
    if isinstance(request, AllToAll):
        return sum(part.numel() * part.element_size() for part in request.parts)
    if isinstance(request, AllGatherScalar):
        return 8
    return request.values.numel() * request.values.element_size()


def describe_request(request: object) -> str:
    """A request in words, for messages."""
    if isinstance(request, Start):
        return f"the start of {describe_request(request.request)}"
    if isinstance(request, Wait):
        return "the end of a request begun before"
    if isinstance(request, Generator):
        return getattr(request, "__name__", "an algorithm")
    name = type(request).__name__
    if isinstance(request, Compute):
        return f"{name} of {request.seconds:g} s"
    peer = getattr(request, "peer", None)
    of = f"{name} of {bytes_of(request):,} bytes"  # type: ignore[arg-type]
    return of if peer is None else f"{of} with worker {peer}"
