"""All-reduce: the requests `Sum` and `Mean`, by doubling, halving and a ring.

Sums are equal on all ranks bit for bit: an element is either summed on one rank, or by the same
pairs on all ranks, and addition is commutative.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gcnzc.exchange.collectives.messages import PendingReceive, send, send_and_wait, start_receive
from gcnzc.exchange.collectives.one_tensor import TensorCollective, check_contiguous
from gcnzc.exchange.requests import BUILTIN, Algorithm, Paths, Receive, Scratch, Send, Start, Wait

if TYPE_CHECKING:
    from gcnzc.exchange.process_group import BuiltinCollectives

# turns of a ring whose receives are posted ahead
LOOK_AHEAD = 16


class AllReduce(TensorCollective):
    """The base of `Sum` and `Mean`."""

    __slots__ = ()

    kind = "Sum"
    algorithms = ("doubling", "halving", "ring", BUILTIN)

    def check(self, world_size: int) -> None:
        """Check that the values are contiguous, and require no gradient."""
        check_contiguous(self)
        if getattr(self.values, "requires_grad", False):
            raise ValueError(
                f"{type(self).__name__} of values that require a gradient, which it would change "
                "in place\n\nhint: give values.detach(), which has the same memory"
            )

    def finish(self, world_size: int) -> Tensor:
        """Return the answer, after the values have become the sum."""
        return self.values

    def messages(self, name: str, rank: int, world_size: int) -> Algorithm[Tensor]:
        """Add the values of all ranks in place, by point-to-point messages."""
        yield from _ALGORITHMS[name](self.values.view(-1), rank, world_size)
        return self.finish(world_size)

    def sent_bytes(self, name: str, rank: int, world_size: int) -> float:
        """Return the bytes that a rank sends, by the formula of an algorithm."""
        size = self.num_bytes
        if name in ("ring", BUILTIN):
            return 2 * (world_size - 1) / world_size * size
        rounds = world_size.bit_length() - 1
        power = 1 << rounds
        pairs = world_size - power
        if rank < 2 * pairs and rank % 2:
            return size
        own = rounds * size if name == "doubling" else 2 * (power - 1) / power * size
        return own + (size if rank < 2 * pairs else 0)

    def copy_answer(self, answer: Tensor) -> Tensor:
        """Copy the answer to the values, and return them."""
        return self.values.copy_(answer)

    def start_builtin(
        self, process_group: "BuiltinCollectives"
    ) -> tuple[Any, Callable[[], Tensor]]:
        """Start the all-reduce of the process group."""
        work = process_group.all_reduce(self.values.view(-1))
        return work, lambda: self.finish(process_group.world_size)

    @classmethod
    def critical_paths(cls, num_bytes: int, world_size: int) -> Paths:
        """Return the costs of doubling, halving and the process group's ring."""
        rounds = world_size.bit_length() - 1
        power = 1 << rounds
        fold = 0 if power == world_size else 2
        turns = 2 * (world_size - 1)
        halves = 2 * (power - 1) / power
        return {
            "doubling": (rounds + fold, (rounds + fold) * num_bytes),
            "halving": (2 * rounds + fold, (halves + fold) * num_bytes),
            BUILTIN: (2 * turns, turns / world_size * num_bytes),
        }


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

    def check(self, world_size: int) -> None:
        """Check that the values are contiguous and floating-point, and require no gradient."""
        AllReduce.check(self, world_size)
        if not self.values.dtype.is_floating_point:
            raise ValueError(
                f"Mean of {self.values.dtype}\n\nhint: use a floating-point dtype, or Sum"
            )

    def finish(self, world_size: int) -> Tensor:
        """Divide the sum by the number of ranks, and return it."""
        self.values.div_(world_size)
        return self.values


def doubling_sum(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """All-reduce (n,) in place by recursive doubling: whole vectors in log2 W rounds.

    If W is not a power of two, there are ⌊log2 W⌋ + 2 rounds. Uses log2 W times the memory of the
    values as scratch; the other sums use at most their size.
    """
    fold = _find_fold(rank, world_size)
    if not values.numel():
        return values
    pair = None
    if fold.partner >= 0:
        scratch = values if fold.is_folded else (yield Scratch(values))
        pair = yield Start(Receive(scratch, fold.partner))
    # requests are made here and not by functions, since small sums spend their time with them
    receives = []
    for peer in fold.peers:
        receives.append((yield Start(Receive((yield Scratch(values)), peer))))
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


def halving_sum(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """All-reduce (n,) in place by recursive halving (reduce-scatter) and doubling (all-gather)."""
    fold = _find_fold(rank, world_size)
    pair = yield from _start_pair(fold, values)
    halves = []
    begin, end = 0, len(values)
    for step, peer in zip(reversed(fold.steps), reversed(fold.peers), strict=True):
        middle = (begin + end) // 2
        lower, upper = values[begin:middle], values[middle:end]
        is_upper = bool(fold.position & step)
        own, other = (upper, lower) if is_upper else (lower, upper)
        halves.append((own, other, peer))
        begin, end = (middle, end) if is_upper else (begin, middle)
    reduces, gathers = [], []
    for own, _, peer in halves:
        reduces.append((yield from start_receive((yield Scratch(own)), peer)))
    for _, other, peer in reversed(halves):
        gathers.append((yield from start_receive(other, peer)))
    if fold.is_folded:
        yield from send(values, rank - 1)
        yield from pair.wait()
        return values
    yield from pair.wait()
    if fold.has_folded:
        values += pair.values
    for (own, other, peer), receive in zip(halves, reduces, strict=True):
        yield from send_and_wait(other, peer, receive)
        own += receive.values
    for (own, _, peer), receive in zip(reversed(halves), gathers, strict=True):
        yield from send_and_wait(own, peer, receive)
    if fold.has_folded:
        yield from send(values, rank + 1)
    return values


def ring_sum(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """All-reduce (n,) in place around a ring: the fewest bytes in the most rounds."""
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    parts = values.tensor_split(world_size)
    # part `turn` is sent in this turn, and part `turn + 1` is received
    shares = [parts[(rank - turn) % world_size] for turn in range(world_size)]
    turns = 2 * (world_size - 1)
    scratch = []
    for _ in range(min(LOOK_AHEAD, world_size - 1)):
        # the first part is the largest
        scratch.append((yield Scratch(parts[0])))
    # all parts have elements, and often the same number
    is_full = len(values) >= world_size
    is_even = is_full and len(values) % world_size == 0

    def target(turn: int) -> Tensor:
        if turn < world_size - 1:
            buffer = scratch[turn % LOOK_AHEAD]
            return buffer if is_even else buffer[: len(shares[turn + 1])]
        # the whole sum of a share
        return shares[turn - world_size + 1]

    receives: list[tuple[Tensor, Any]] = []
    # requests are made here and not by functions, since a simulation spends its time with them
    for turn in range(min(LOOK_AHEAD, turns)):
        into = target(turn)
        is_sent = is_full or into.numel()
        receives.append((into, (yield Start(Receive(into, before))) if is_sent else None))
    for turn in range(turns):
        sent = shares[turn % world_size]
        send = (yield Start(Send(sent, after))) if is_full or sent.numel() else None
        into, receive = receives[turn % LOOK_AHEAD]
        if receive is not None:
            yield Wait(receive)
        if send is not None:
            yield Wait(send)
        if turn < world_size - 1:
            shares[turn + 1] += into
        if turn + LOOK_AHEAD < turns:
            into = target(turn + LOOK_AHEAD)
            is_sent = is_full or into.numel()
            receive = (yield Start(Receive(into, before))) if is_sent else None
            receives[turn % LOOK_AHEAD] = into, receive
    return values


@dataclass(frozen=True, slots=True)
class _Fold:
    """Folds W ranks to the next lower power of two, which recursive doubling and halving need.

    If W is not a power of two, the first ranks form pairs: the odd rank of a pair sends its values
    to the even one, which takes part for both and sends the result back. Each pair, and each rank
    without a pair, has a position in [0, power of two).
    """

    partner: int
    """the other rank of the pair; -1 for a rank without a pair"""
    is_folded: bool
    """whether the partner takes part for this rank"""
    position: int
    steps: tuple[int, ...]
    """the bits in which the positions of this rank and of its peers differ"""
    peers: tuple[int, ...]

    @property
    def has_folded(self) -> bool:
        """Whether this rank takes part for its partner."""
        return self.partner >= 0 and not self.is_folded


@lru_cache(maxsize=4096)
def _find_fold(rank: int, world_size: int) -> _Fold:
    power = 1 << (world_size.bit_length() - 1)
    num_pairs = world_size - power
    if rank < 2 * num_pairs and rank % 2:
        return _Fold(rank - 1, True, rank // 2, (), ())
    in_pair = rank < 2 * num_pairs
    position = rank // 2 if in_pair else rank - num_pairs
    steps = tuple(1 << bit for bit in range(power.bit_length() - 1))
    positions = [position ^ step for step in steps]
    peers = tuple(2 * each if each < num_pairs else each + num_pairs for each in positions)
    return _Fold(rank + 1 if in_pair else -1, False, position, steps, peers)


def _start_pair(fold: _Fold, values: Tensor) -> Algorithm[PendingReceive]:
    """Start the receive of this rank's pair, if it has one."""
    if fold.partner < 0:
        return PendingReceive(values, None)
    scratch = values if fold.is_folded else (yield Scratch(values))
    return (yield from start_receive(scratch, fold.partner))


_ALGORITHMS = {
    "doubling": doubling_sum,
    "halving": halving_sum,
    "ring": ring_sum,
    # as in gloo
    BUILTIN: ring_sum,
}
