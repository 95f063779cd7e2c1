"""Collectives: the requests that all ranks make together, and their messages.

A small request is executed by messages between two ranks, whose receives are all posted at the
start; a larger one by the process group's own collective. The switch sizes are fixed: up to them
the median gain over the process group's collective was above 1.5 in each recorded network of 8
ranks, and no size was slower than 0.9 of it (`python -m bench.network.gains`). An `AllToAll` stays
with messages at any size, since only their headers show that two ranks expect different sizes,
unless it is started on a channel.

The times for W ranks, M bytes, a latency of α seconds per message and an outgoing bandwidth of B
bytes/s per rank (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005):

    doubling_sum     log2 W (α + M/B), if W is a power of two
    doubling_gather  ⌈log2 W⌉ α + (W - 1) M/B
    ring_sum         2 (W - 1) α + 2 (W - 1)/W M/B
    ring_gather      (W - 1) (α + M/B)
    binomial         ⌈log2 W⌉ (α + M/B)

The last three are gloo's algorithms, which stand for the process group in simulations and execute
large collectives of some ranks (`among`). gloo sends a message only when its receiver has posted
the receive, and the notification takes as long as a message; since all receives are posted at the
start, or in a ring of many ranks those of the next turns, only the first round takes 2 α. A message
cannot overwrite memory that is still read: the sender computed the message from the data that this
rank sent from that memory.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Integral
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gcnzc.exchange.requests import (
    Algorithm,
    Exchange,
    HeaderFields,
    Receive,
    Send,
    Start,
    Wait,
    describe_dtype,
    describe_size,
)

# size of the cache of header descriptions; a training run has few shapes
DESCRIPTIONS_KEPT = 4096
# turns of a ring whose receives are posted ahead
LOOK_AHEAD = 16


class Collective(Exchange, ABC):
    """A request that all ranks make together.

    A subclass has the checks of a collective and its messages. Headers and ledgers use the name of
    the class.
    """

    __slots__ = ()

    is_from_all: ClassVar[bool] = True
    """whether the answer of each rank needs the requests of all ranks"""
    small_bytes: ClassVar[float] = math.inf
    """the largest request that is executed by messages, in bytes; -1 for none"""
    small_bytes_started: ClassVar[float] = math.inf
    """the largest one of started requests: a channel's thread shares the GIL with the training
    thread, so on busy cores its messages cost more time than they save"""

    def is_builtin(self, *, is_started: bool = False) -> bool:
        """Whether the process group's own collective executes the request, for its size."""
        return self.num_bytes > (self.small_bytes_started if is_started else self.small_bytes)

    def describe(self) -> str:
        """Describe the kind and the size of the request, for error messages."""
        return f"{type(self).__name__} of {self.num_bytes:,} bytes"

    @property
    def num_bytes(self) -> int:
        """The bytes of the values on this rank."""
        return self.values.nbytes

    def check(self, world_size: int) -> None:
        """Check the request, before other ranks see it.

        Raises:
            ValueError: it is invalid, or does not match the number of ranks.
        """
        return

    @abstractmethod
    def messages(self, rank: int, world_size: int, *, is_builtin: bool) -> Algorithm[Any]:
        """Execute the request by point-to-point messages, and return its answer.

        Args:
            rank: this rank.
            world_size: the number of ranks; `check` accepts it.
            is_builtin: whether to send the messages of gloo's algorithm.
        """

    def sent_bytes(self, rank: int, world_size: int) -> float:
        """Return the bytes that a rank sends, by the formula of gloo's algorithm.

        The formula is exact if the number of elements is a multiple of the number of ranks.
        """
        return (world_size - 1) * self.num_bytes

    def copy_to_host(self, to_host: Callable[[Tensor], Tensor]) -> "Collective":
        """Return the request with copies of its tensors on the host."""
        return self

    def copy_answer(self, answer: Any) -> Any:
        """Copy the answer of `copy_to_host`'s request to this request's device, and return it."""
        return answer


@dataclass(eq=False, slots=True)
class TensorCollective(Collective):
    """A collective of one tensor."""

    values: Tensor

    is_in_place: ClassVar[bool] = False
    """whether the answer is written to the values"""

    @property
    def is_on_gpu(self) -> bool:
        """Whether the values are on a GPU."""
        return self.values.is_cuda

    def check(self, world_size: int) -> None:
        """Check that the values are contiguous."""
        if not self.values.is_contiguous():
            strides = tuple(self.values.stride())
            raise ValueError(f"{self.describe()}: values with strides {strides} are not contiguous")

    def describe_header(self) -> HeaderFields:
        """Describe the kind, size and dtype, which must be the same on all ranks."""
        return _describe(type(self).__name__, self.values.numel(), self.values.dtype)

    def copy_to_host(self, to_host: Callable[[Tensor], Tensor]) -> "TensorCollective":
        """See `Collective`."""
        return replace(self, values=to_host(self.values))

    def copy_answer(self, answer: Tensor) -> Tensor:
        """See `Collective`."""
        if self.is_in_place:
            return self.values.copy_(answer)
        return answer.to(self.values.device)


@lru_cache(DESCRIPTIONS_KEPT)
def _describe(name: str, num_elements: int, dtype: torch.dtype, suffix: str = "") -> HeaderFields:
    return f"{name} of {describe_size(num_elements, dtype)}{suffix}", {}, {}


# all-reduce: sums are equal on all ranks bit for bit, since an element is either summed on one
# rank, or by the same pairs on all ranks, and addition is commutative


class AllReduce(TensorCollective):
    """The base of `Sum` and `Mean`."""

    __slots__ = ()

    is_in_place = True
    small_bytes = 32 * 1024
    small_bytes_started = 16 * 1024

    def check(self, world_size: int) -> None:
        """Check that the values are contiguous, and require no gradient."""
        TensorCollective.check(self, world_size)
        if self.values.requires_grad:
            raise ValueError(
                f"{type(self).__name__} of values that require a gradient, which it would change "
                "in place\n\nhint: give values.detach(), which has the same memory"
            )

    def finish(self, world_size: int) -> Tensor:
        """Return the answer, after the values have become the sum."""
        return self.values

    def messages(self, rank: int, world_size: int, *, is_builtin: bool) -> Algorithm[Tensor]:
        """Add the values of all ranks in place, by point-to-point messages."""
        algorithm = ring_sum if is_builtin else doubling_sum
        yield from algorithm(self.values.view(-1), rank, world_size)
        return self.finish(world_size)

    def sent_bytes(self, rank: int, world_size: int) -> float:
        """Return the bytes that a rank sends, by the formula of a ring."""
        return 2 * (world_size - 1) / world_size * self.num_bytes


@dataclass(eq=False, slots=True)
class Sum(AllReduce):
    """All-reduce with a sum; the answer is `values`, written in place, equal on all ranks."""

    values: Tensor
    """contiguous, of any shape, with the same size and dtype on all ranks"""


@dataclass(eq=False, slots=True)
class Mean(AllReduce):
    """All-reduce with a mean; the answer is `values`, written in place, equal on all ranks.

    The values are added in their dtype, and the sum is then divided by the number of ranks. A sum
    outside the range of the dtype, for float16 beyond 65,504, makes the mean infinite.
    """

    values: Tensor
    """contiguous, floating-point, of any shape, with the same size and dtype on all ranks"""

    def finish(self, world_size: int) -> Tensor:
        """Divide the sum by the number of ranks, and return it."""
        return self.values.div_(world_size)


def doubling_sum(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """All-reduce (n,) in place by recursive doubling: whole vectors in log2 W rounds.

    If W is not a power of two, there are ⌊log2 W⌋ + 2 rounds. Uses log2 W times the memory of the
    values as scratch.
    """
    fold = _find_fold(rank, world_size)
    if not values.numel():
        return values
    pair = None
    if fold.partner >= 0:
        scratch = values if fold.is_folded else torch.empty_like(values)
        pair = yield Start(Receive(scratch, fold.partner))
    # requests are made here and not by functions, since small sums spend their time with them
    receives = []
    for peer in fold.peers:
        receives.append((yield Start(Receive(torch.empty_like(values), peer))))
    if fold.is_folded:
        yield Send(values, fold.partner)
        yield Wait(pair)
        return values
    if pair is not None:
        values += yield Wait(pair)
    for peer, receive in zip(fold.peers, receives, strict=True):
        send = yield Start(Send(values, peer))
        received = yield Wait(receive)
        yield Wait(send)
        values += received
    if pair is not None:
        yield Send(values, fold.partner)
    return values


class Fold(NamedTuple):
    """Folds W ranks to the next lower power of two, which recursive doubling needs.

    If W is not a power of two, the first ranks form pairs: the odd rank of a pair sends its values
    to the even one, which takes part for both and sends the result back. Each pair, and each rank
    without a pair, has a position in [0, power of two).
    """

    partner: int
    """the other rank of the pair; -1 for a rank without a pair"""
    is_folded: bool
    """whether the partner takes part for this rank"""
    peers: tuple[int, ...]
    """the other ranks of each round"""


@lru_cache(DESCRIPTIONS_KEPT)
def _find_fold(rank: int, world_size: int) -> Fold:
    power = 1 << (world_size.bit_length() - 1)
    num_pairs = world_size - power
    if rank < 2 * num_pairs and rank % 2:
        return Fold(rank - 1, True, ())
    in_pair = rank < 2 * num_pairs
    position = rank // 2 if in_pair else rank - num_pairs
    positions = [position ^ (1 << bit) for bit in range(power.bit_length() - 1)]
    peers = tuple(2 * each if each < num_pairs else each + num_pairs for each in positions)
    return Fold(rank + 1 if in_pair else -1, False, peers)


# all-gather


@dataclass(eq=False, slots=True)
class AllGather(TensorCollective):
    """All-gather; the answer is (W, n), with one row per rank."""

    values: Tensor
    """(n,), contiguous, with the same size and dtype on all ranks"""

    small_bytes = 8 * 1024
    small_bytes_started = -1

    def messages(self, rank: int, world_size: int, *, is_builtin: bool) -> Algorithm[Tensor]:
        """Gather the values of all ranks by point-to-point messages."""
        algorithm = ring_gather if is_builtin else doubling_gather
        rows = yield from algorithm(as_bytes(self.values), rank, world_size)
        return from_bytes(rows, self.values, world_size, *self.values.shape)


@dataclass(slots=True)
class AllGatherScalar(Collective):
    """All-gather of a number; the answer is a tuple of W numbers, in the order of ranks."""

    value: int | float
    """sent as int64 or float64; of the same type on all ranks"""

    is_on_gpu = False
    num_bytes = 8

    def describe_header(self) -> HeaderFields:
        """Describe the dtype, which must be the same on all ranks."""
        return f"AllGatherScalar of {describe_dtype(self._dtype)}", {}, {}

    @property
    def _dtype(self) -> torch.dtype:
        return torch.int64 if isinstance(self.value, Integral) else torch.float64

    def messages(
        self, rank: int, world_size: int, *, is_builtin: bool
    ) -> Algorithm[tuple[int | float, ...]]:
        """Gather the numbers of all ranks by point-to-point messages."""
        number = torch.tensor([self.value], dtype=self._dtype)
        rows = yield from doubling_gather(number, rank, world_size)
        return tuple(rows[:, 0].tolist())


def doubling_gather(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """All-gather (n,) to (W, n) in ⌈log2 W⌉ rounds, each of which doubles the gathered rows.

    Source: Bruck et al., "Efficient Algorithms for All-to-All Communications", 1997.
    """
    # row i belongs to rank `rank + i` until the rows are rolled at the end
    rows = values.new_empty(world_size, len(values))
    rows[0] = values
    rounds = []
    gathered = 1
    while gathered < world_size:
        count = min(gathered, world_size - gathered)
        before, after = (rank - gathered) % world_size, (rank + gathered) % world_size
        receive = yield from start_receive(rows[gathered : gathered + count], after)
        rounds.append((rows[:count], before, receive))
        gathered += count
    for sent, peer, receive in rounds:
        yield from send_and_wait(sent, peer, receive)
    return rows.roll(rank, 0)


# broadcast


@dataclass(eq=False, slots=True)
class Broadcast(TensorCollective):
    """Broadcast from one rank; the answer is `values`, written in place on the other ranks."""

    values: Tensor
    """of any shape, with the same size and dtype on all ranks"""
    root: int = 0
    """the rank that sends its values"""

    is_from_all = False
    is_in_place = True
    small_bytes = small_bytes_started = -1

    def check(self, world_size: int) -> None:
        """Check that the root is one of the ranks; the values may have any strides."""
        if self.root not in range(world_size):
            raise ValueError(f"Broadcast from rank {self.root!r} of {world_size}")

    def describe_header(self) -> HeaderFields:
        """Describe the size, dtype and root, which must be the same on all ranks."""
        suffix = f" from rank {self.root}"
        return _describe("Broadcast", self.values.numel(), self.values.dtype, suffix)

    def messages(self, rank: int, world_size: int, *, is_builtin: bool) -> Algorithm[Tensor]:
        """Send the values of the root to all ranks, by point-to-point messages."""
        flat = as_bytes(self.values)
        yield from binomial(flat, self.root, rank, world_size)
        return self.copy_back(flat)

    def sent_bytes(self, rank: int, world_size: int) -> float:
        """Return the bytes that a rank sends, by the formula of a binomial tree."""
        position, step, count = (rank - self.root) % world_size, 1, 0
        while step < world_size and not position & step:
            count += position + step < world_size
            step *= 2
        return count * self.num_bytes

    def copy_back(self, flat: Tensor) -> Tensor:
        """Return the values, after copying their bytes to them if `as_bytes` has copied them."""
        if not self.values.is_contiguous():
            self.values.copy_(from_bytes(flat, self.values))
        return self.values


# all-to-all and reduce-scatter


@dataclass(eq=False, slots=True)
class AllToAll(Collective):
    """All-to-all; the answer is a list of W new tensors, the parts that ranks sent to this rank."""

    parts: Sequence[Tensor]
    """W one-dimensional tensors of one dtype and of any lengths; part r is sent to rank r"""
    counts: Sequence[int] | None = None
    """the number of elements to receive from each rank, which is not checked if the request is
    started; None exchanges the lengths first"""

    # messages at any size, because each rank knows only the sizes of its own parts; started on a
    # channel, it is the process group's collective, which has no headers
    small_bytes_started = -1

    @property
    def num_bytes(self) -> int:
        """The bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    @property
    def is_on_gpu(self) -> bool:
        """Whether the parts are on a GPU."""
        return self.parts[0].is_cuda

    def check(self, world_size: int) -> None:
        """Check that there is a one-dimensional tensor for each rank, and that all have one dtype.

        Raises:
            ValueError: a part is not one-dimensional, dtypes differ, or there are not W parts or
                counts.
        """
        counts, parts = self.counts, self.parts
        if len(parts) != world_size or (counts is not None and len(counts) != world_size):
            with_counts = "" if counts is None else f" and {len(counts)} counts"
            raise ValueError(f"AllToAll: {len(parts)} parts{with_counts} for {world_size} ranks")
        kinds = {(len(part.shape), part.dtype) for part in parts}
        if kinds != {(1, parts[0].dtype)}:
            shapes = [tuple(part.shape) for part in parts]
            raise ValueError(f"AllToAll: parts of several dtypes, or of the shapes {shapes}")

    def describe_header(self) -> HeaderFields:
        """Describe the dtype, and the sizes sent to each peer and expected from it."""
        counts = None if self.counts is None else tuple(self.counts)
        lengths = tuple(part.numel() for part in self.parts)
        return _describe_parts(self.parts[0].dtype, lengths, counts)

    def messages(self, rank: int, world_size: int, *, is_builtin: bool) -> Algorithm[list[Tensor]]:
        """Exchange the parts, and before them their lengths if need be, by direct messages."""
        counts = self.counts
        if counts is None:
            lengths = [torch.tensor([len(part)]) for part in self.parts]
            received = yield from direct_exchange(lengths, [1] * world_size, rank)
            counts = [int(count) for count in received]
        dtype = self.parts[0].dtype
        sent = self.parts if dtype == torch.uint8 else [as_bytes(part) for part in self.parts]
        parts = yield from direct_exchange(sent, [count * dtype.itemsize for count in counts], rank)
        # the caller may change the parts that it has sent
        parts[rank] = parts[rank].clone()
        return parts if dtype == torch.uint8 else [part.view(dtype) for part in parts]

    def sent_bytes(self, rank: int, world_size: int) -> float:
        """Return the bytes that a rank sends to others, with the lengths if they are exchanged."""
        own = self.parts[rank].nbytes
        return self.num_bytes - own + (8 * (world_size - 1) if self.counts is None else 0)

    def copy_to_host(self, to_host: Callable[[Tensor], Tensor]) -> "AllToAll":
        """Return the request with copies of the parts on the host."""
        return replace(self, parts=[to_host(part) for part in self.parts])

    def copy_answer(self, answer: list[Tensor]) -> list[Tensor]:
        """Return copies of the received parts on the device of the sent ones."""
        return [part.to(self.parts[0].device) for part in answer]


@dataclass(eq=False, slots=True)
class ReduceScatter(TensorCollective):
    """Reduce-scatter with a sum; the answer is (n / W,), this rank's share of the sum."""

    values: Tensor
    """(n,), contiguous; n is a multiple of W, and rank r gets share r"""

    def check(self, world_size: int) -> None:
        """Check that the values are contiguous, and that all shares have the same size."""
        TensorCollective.check(self, world_size)
        if (count := self.values.numel()) % world_size:
            raise ValueError(f"ReduceScatter: {count} elements for {world_size} ranks")

    def messages(self, rank: int, world_size: int, *, is_builtin: bool) -> Algorithm[Tensor]:
        """Exchange the shares by direct messages, and add those of this rank, by rank."""
        shares = self.values.view(world_size, -1)
        counts = [shares.shape[1]] * world_size
        first, *others = yield from direct_exchange(list(shares), counts, rank)
        total = first.clone()
        for part in others:
            total += part
        return total

    def sent_bytes(self, rank: int, world_size: int) -> float:
        """Return the bytes that a rank sends: the shares of the other ranks."""
        return (world_size - 1) / world_size * self.num_bytes


@lru_cache(DESCRIPTIONS_KEPT)
def _describe_parts(
    dtype: torch.dtype, lengths: tuple[int, ...], counts: tuple[int, ...] | None
) -> HeaderFields:
    sent, expected = (
        {str(rank): describe_size(count, dtype) for rank, count in enumerate(each or ())}
        for each in (lengths, counts)
    )
    are_given = "not given" if counts is None else "given"
    return f"AllToAll of {describe_dtype(dtype)}, counts {are_given}", sent, expected


def direct_exchange(
    parts: Sequence[Tensor], counts: Sequence[int], rank: int
) -> Algorithm[list[Tensor]]:
    """All-to-all: send part r to rank r, and receive `counts[r]` elements from it, concurrently.

    Returns:
        The parts by rank; that of this rank is not a copy.
    """
    world_size = len(parts)
    received = [parts[rank].new_empty(count) for count in counts]
    received[rank] = parts[rank]
    pending = []
    for distance in range(1, world_size):
        before = (rank - distance) % world_size
        if counts[before]:
            pending.append((yield Start(Receive(received[before], before))))
    for distance in range(1, world_size):
        # each rank starts with another receiver, so that no rank receives all first messages
        after = (rank + distance) % world_size
        if len(parts[after]):
            pending.append((yield Start(Send(parts[after].contiguous(), after))))
    for each in pending:
        yield Wait(each)
    return received


# pairs


@dataclass(eq=False, slots=True)
class SendReceive(TensorCollective):
    """Exchange of tensors between pairs of ranks; the answer is the peer's tensor."""

    values: Tensor
    """contiguous, with the same shape and dtype on both ranks"""
    peer: int
    """the other rank, whose `peer` must be this rank; if it is this rank itself, the answer is a
    copy of `values`"""

    is_from_all = False

    def describe(self) -> str:
        """Describe the size and the peer, for error messages."""
        return f"SendReceive of {self.num_bytes:,} bytes with rank {self.peer}"

    def check(self, world_size: int) -> None:
        """Check that the values are contiguous, and that the peer is one of the ranks."""
        TensorCollective.check(self, world_size)
        if self.peer not in range(world_size):
            raise ValueError(f"SendReceive with rank {self.peer} of {world_size}")

    def describe_header(self) -> HeaderFields:
        """Describe the peer, size and dtype; pairs of ranks may differ in size and dtype."""
        size = describe_size(self.values.numel(), self.values.dtype)
        return "SendReceive", {str(self.peer): size}, {str(self.peer): size}

    def messages(self, rank: int, world_size: int, *, is_builtin: bool) -> Algorithm[Tensor]:
        """Send the values to the peer, and return those that it sends to this rank."""
        sent = as_bytes(self.values)
        if self.peer == rank:
            received = sent.clone()
        else:
            received = sent.new_empty(*sent.shape)
            receive = yield from start_receive(received, self.peer)
            yield from send_and_wait(sent, self.peer, receive)
        return from_bytes(received, self.values)

    def sent_bytes(self, rank: int, world_size: int) -> float:
        """Return the bytes that a rank sends: 0 if it is its own peer."""
        return 0 if self.peer == rank else self.num_bytes


# what the algorithms of several collectives have in common


def as_bytes(values: Tensor) -> Tensor:
    """Return (bytes,) uint8: a view of `values`, or of a copy if it is not contiguous."""
    # a zero-dimensional tensor has no view of another element size
    return values.contiguous().view(-1).view(torch.uint8)


def from_bytes(flat: Tensor, like: Tensor, *shape: int) -> Tensor:
    """Return a view of bytes with the dtype of a tensor, of `shape` or that of the tensor."""
    return flat.view(-1).view(like.dtype).view(shape or like.shape)


def start_receive(values: Tensor, source: int) -> Algorithm[Any]:
    """Start to receive `values`, and return the handle; None for empty ones, which are not sent."""
    return (yield Start(Receive(values, source))) if values.numel() else None


def send_and_wait(values: Tensor, peer: int, receive: Any) -> Algorithm[None]:
    """Send `values`, unless they are empty, and wait for both the send and a receive, if any."""
    pending = (yield Start(Send(values, peer))) if values.numel() else None
    for each in (receive, pending):
        if each is not None:
            yield Wait(each)


def among(ranks: Sequence[int], rank: int, request: Collective) -> Algorithm[Any]:
    """Execute a collective among some ranks by messages between them, and return its answer.

    Only these ranks take part, and disjoint sets of ranks run at the same time. In the collective
    they have the ranks 0, 1, ... in the order of `ranks`; so the `root` of a `Broadcast` and the
    `peer` of a `SendReceive` are indices of `ranks`. `Group.subgroup` creates a process group
    instead, for an optimizer of some ranks.

    Args:
        ranks: ranks of the group, each once, the same list on all of them.
        rank: this rank, one of them.
        request: the same on all of these ranks.
    """
    request.check(len(ranks))
    is_builtin = request.is_builtin()
    algorithm = request.messages(list(ranks).index(rank), len(ranks), is_builtin=is_builtin)
    answer: Any = None
    while True:
        try:
            step: Any = algorithm.send(answer)
        except StopIteration as stop:
            return stop.value
        message = step.request if type(step) is Start else step
        if isinstance(message, Send | Receive):
            message.peer = ranks[message.peer]
        answer = yield step


# the algorithms of gloo


def ring_sum(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """All-reduce (n,) in place around a ring: the fewest bytes in the most rounds."""
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    parts = values.tensor_split(world_size)
    # part `turn` is sent in this turn, and part `turn + 1` is received
    shares = [parts[(rank - turn) % world_size] for turn in range(world_size)]
    turns = 2 * (world_size - 1)
    # the first part is the largest
    scratch = [torch.empty_like(parts[0]) for _ in range(min(LOOK_AHEAD, world_size - 1))]

    def post(turn: int) -> Algorithm[tuple[Tensor, Any]]:
        if turn < world_size - 1:
            into = scratch[turn % LOOK_AHEAD][: len(shares[turn + 1])]
        else:
            # the whole sum of a share
            into = shares[turn - world_size + 1]
        return into, (yield from start_receive(into, before))

    receives: list[tuple[Tensor, Any]] = []
    for turn in range(min(LOOK_AHEAD, turns)):
        receives.append((yield from post(turn)))
    for turn in range(turns):
        into, receive = receives[turn % LOOK_AHEAD]
        yield from send_and_wait(shares[turn % world_size], after, receive)
        if turn < world_size - 1:
            shares[turn + 1] += into
        if turn + LOOK_AHEAD < turns:
            receives[turn % LOOK_AHEAD] = yield from post(turn + LOOK_AHEAD)
    return values


def ring_gather(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """All-gather (n,) to (W, n) around a ring, one row per round."""
    rows = values.new_empty(world_size, len(values))
    rows[rank] = values
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    receives = []
    for turn in range(1, world_size):
        receives.append((yield from start_receive(rows[(rank - turn) % world_size], before)))
    for turn, receive in enumerate(receives):
        yield from send_and_wait(rows[(rank - turn) % world_size], after, receive)
    return rows


def binomial(values: Tensor, root: int, rank: int, world_size: int) -> Algorithm[Tensor]:
    """Broadcast (n,) down a binomial tree: each round doubles the ranks that have the values."""
    position = (rank - root) % world_size
    step = 1
    while step < world_size and not position & step:
        step *= 2
    if position > 0:
        yield Receive(values, (rank - step) % world_size)
    step //= 2
    while step:
        if position + step < world_size:
            yield Send(values, (rank + step) % world_size)
        step //= 2
    return values
