"""Collectives made of messages: who sends what to whom, and when.

Each is a generator that yields the begins and ends of `Send` and `Receive`, and `Scratch`, so that
its steps are the lines of the function. Times below are of W workers, M bytes, α seconds a message
and B bytes a second out of each worker (Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005):

    doubling_sum     ⌈log2 W⌉ (α + M/B)
    halving_sum      2 log2 W α + 2 (W - 1)/W M/B
    ring_sum         2 (W - 1) α + 2 (W - 1)/W M/B
    doubling_gather  ⌈log2 W⌉ α + (W - 1) M/B
    chain            (⌈M/C⌉ + W - 2) (α + C/B), in pieces of C bytes
    binomial         ⌈log2 W⌉ (α + M/B)

Sums are equal on all workers bit for bit: an element is either summed on one worker, or by the same
pairs on all, and a + b is b + a.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gcnzc.exchange.requests import Algorithm, Begin, End, Receive, Scratch, Send

PIECE_BYTES = 32 * 1024  # of a chain; the best from 16 to 32 KiB at 100 Mbit/s with 2 to 8 workers


def doubling_sum(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """Sum (n,) in place by recursive doubling: whole vectors, in few rounds."""
    other = yield Scratch(values)
    fold = _Fold(rank, world_size)
    if (yield from fold.enter(values, other)):
        step = 1
        while step < fold.power:
            yield from _swap(values, other, fold.worker(fold.place ^ step))
            values += other
            step *= 2
    yield from fold.leave(values)
    return values


def halving_sum(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """Sum (n,) in place: halves are summed until a worker has one share, then doubled again."""
    other = yield Scratch(values)
    fold = _Fold(rank, world_size)
    if (yield from fold.enter(values, other)):
        begin, end, step = 0, len(values), fold.power // 2
        done = []
        while step:
            middle = (begin + end) // 2
            lower, upper = slice(begin, middle), slice(middle, end)
            mine, theirs = (upper, lower) if fold.place & step else (lower, upper)
            peer = fold.worker(fold.place ^ step)
            yield from _swap(values[theirs], other[mine], peer)
            values[mine] += other[mine]
            done.append((mine, theirs, peer))
            begin, end, step = mine.start, mine.stop, step // 2
        for mine, theirs, peer in reversed(done):
            yield from _swap(values[mine], values[theirs], peer)
    yield from fold.leave(values)
    return values


def ring_sum(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """Sum (n,) in place around a ring: the fewest bytes, in the most rounds."""
    shares = values.tensor_split(world_size)
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    other = yield Scratch(shares[0])
    for turn in range(world_size - 1):
        leaving, coming = shares[(rank - turn) % world_size], shares[(rank - turn - 1) % world_size]
        yield from _pass(leaving, after, other[: len(coming)], before)
        coming += other[: len(coming)]
    for turn in range(world_size - 1):
        leaving, coming = shares[(rank + 1 - turn) % world_size], shares[(rank - turn) % world_size]
        yield from _pass(leaving, after, coming, before)
    return values


def direct_scatter(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """Sum this worker's share of (n,), which all others send it, in the order of ranks."""
    shares = values.view(world_size, -1)
    parts = yield from direct_exchange(list(shares), [shares.shape[1]] * world_size, rank)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def direct_exchange(
    parts: Sequence[Tensor], counts: Sequence[int], rank: int
) -> Algorithm[list[Tensor]]:
    """Send part r to worker r, and receive `counts[r]` elements from it, all at once."""
    world_size = len(parts)
    received = [parts[rank].new_empty(count) for count in counts]
    received[rank] = parts[rank]
    pending = []
    for distance in range(1, world_size):
        # everybody's first message goes to another worker
        after, before = (rank + distance) % world_size, (rank - distance) % world_size
        if counts[before]:
            pending.append((yield Begin(Receive(received[before], before))))
        if len(parts[after]):
            pending.append((yield Begin(Send(parts[after].contiguous(), after))))
    for each in pending:
        yield End(each)
    return received


def doubling_gather(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """Gather (n,) of every worker as (W, n), in rounds that double what each has.

    Source: Bruck et al., "Efficient Algorithms for All-to-All Communications", 1997.
    """
    # row i is of worker rank + i until the end
    rows = values.new_empty(world_size, len(values))
    rows[0] = values
    have = 1
    while have < world_size:
        count = min(have, world_size - have)
        before, after = (rank - have) % world_size, (rank + have) % world_size
        yield from _pass(rows[:count], before, rows[have : have + count], after)
        have += count
    return rows.roll(rank, 0)


def ring_gather(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """Gather (n,) of every worker as (W, n), a row a round."""
    rows = values.new_empty(world_size, len(values))
    rows[rank] = values
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    for turn in range(world_size - 1):
        leaving, coming = (rank - turn) % world_size, (rank - turn - 1) % world_size
        yield from _pass(rows[leaving], after, rows[coming], before)
    return rows


def chain(
    values: Tensor, root: int, rank: int, world_size: int, piece_bytes: int = PIECE_BYTES
) -> Algorithm[Tensor]:
    """Broadcast (n,) along a chain, each worker passing on a piece while the next one comes."""
    place = (rank - root) % world_size
    pieces = values.split(max(piece_bytes // values.element_size(), 1))
    if world_size == 1 or not len(values):
        return values
    before, after = (rank - 1) % world_size, (rank + 1) % world_size
    coming, leaving = [], []
    if place > 0:
        for piece in pieces:
            coming.append((yield Begin(Receive(piece, before))))
    for number, piece in enumerate(pieces):
        if place > 0:
            yield End(coming[number])
        if place < world_size - 1:
            leaving.append((yield Begin(Send(piece, after))))
    for each in leaving:
        yield End(each)
    return values


def binomial(values: Tensor, root: int, rank: int, world_size: int) -> Algorithm[Tensor]:
    """Broadcast (n,) down a tree: whoever has it sends it to one more, in every round."""
    place = (rank - root) % world_size
    step = 1
    while step < world_size and not place & step:
        step *= 2
    if place > 0:
        yield Receive(values, (rank - step) % world_size)
    step //= 2
    while step:
        if place + step < world_size:
            yield Send(values, (rank + step) % world_size)
        step //= 2
    return values


def swap(values: Tensor, peer: int, rank: int) -> Algorithm[Tensor]:
    """The values of `peer`, which gets this worker's."""
    if peer == rank:
        return values.clone()
    other = torch.empty_like(values)
    yield from _swap(values, other, peer)
    return other


class _Fold:
    """Of W workers, a power of two of them that do the work of all.

    The first pairs share a place: the even one takes the odd one's values, and gives it the result.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.power = 1 << (world_size.bit_length() - 1)
        self.pairs = world_size - self.power
        in_pair = rank < 2 * self.pairs
        self.is_folded = in_pair and rank % 2 == 1
        self.has_folded = in_pair and rank % 2 == 0
        self.place = rank // 2 if in_pair else rank - self.pairs

    def worker(self, place: int) -> int:
        return 2 * place if place < self.pairs else place + self.pairs

    def enter(self, values: Tensor, other: Tensor) -> Algorithm[bool]:
        """Add up the pairs; whether this worker goes on."""
        if self.is_folded:
            yield Send(values, self.rank - 1)
        elif self.has_folded:
            yield Receive(other, self.rank + 1)
            values += other
        return not self.is_folded

    def leave(self, values: Tensor) -> Algorithm[None]:
        if self.is_folded:
            yield Receive(values, self.rank - 1)
        elif self.has_folded:
            yield Send(values, self.rank + 1)


def _swap(values: Tensor, into: Tensor, peer: int) -> Algorithm[None]:
    yield from _pass(values, peer, into, peer)


def _pass(leaving: Tensor, to: int, coming: Tensor, source: int) -> Algorithm[None]:
    """Send and receive at once; empty messages are not sent, as both sides know their sizes."""
    pending = []
    if coming.numel():
        pending.append((yield Begin(Receive(coming, source))))
    if leaving.numel():
        pending.append((yield Begin(Send(leaving, to))))
    for each in pending:
        yield End(each)
