"""Collective algorithms made of point-to-point messages.

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

What will be received is expected from the begin. Over gloo a message leaves when its sender knows
that it is expected, and to tell it takes as long as a message: so only the first round waits, and
takes 2 α. Nothing comes too early into memory that is still read: what a worker gets in its place
was made with what it sent from there.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange.requests import Algorithm, Receive, Scratch, Send, Start, Wait

PIECE_BYTES = 32 * 1024  # of a chain; the best from 16 to 32 KiB at 100 Mbit/s with 2 to 8 workers


def doubling_sum(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """Sum (n,) in place by recursive doubling: whole vectors, in few rounds.

    It works in log2 W times the memory of the values; the other sums in no more than they take.
    """
    fold = yield from _folded(values, rank, world_size)
    peers = [fold.worker(fold.place ^ step) for step in fold.steps]
    coming = []
    for peer in peers:
        coming.append((yield from _expect((yield Scratch(values)), peer)))
    yield from fold.enter(values)
    for peer, receipt in zip(peers, coming, strict=True):
        yield from _trade(values, peer, receipt)
        values += receipt.into
    yield from fold.leave(values)
    return values


def halving_sum(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """Sum (n,) in place: halves are summed until a worker has one share, then doubled again."""
    fold = yield from _folded(values, rank, world_size)
    halves = []
    begin, end = 0, len(values)
    for step in reversed(fold.steps):
        middle = (begin + end) // 2
        lower, upper = values[begin:middle], values[middle:end]
        is_upper = bool(fold.place & step)
        mine, theirs = (upper, lower) if is_upper else (lower, upper)
        halves.append((mine, theirs, fold.worker(fold.place ^ step)))
        begin, end = (middle, end) if is_upper else (begin, middle)
    summed, gathered = [], []
    for mine, _, peer in halves:
        summed.append((yield from _expect((yield Scratch(mine)), peer)))
    for _, theirs, peer in reversed(halves):
        gathered.append((yield from _expect(theirs, peer)))
    yield from fold.enter(values)
    for (mine, theirs, peer), receipt in zip(halves, summed, strict=True):
        yield from _trade(theirs, peer, receipt)
        mine += receipt.into
    for (mine, _, peer), receipt in zip(reversed(halves), gathered, strict=True):
        yield from _trade(mine, peer, receipt)
    yield from fold.leave(values)
    return values


def ring_sum(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """Sum (n,) in place around a ring: the fewest bytes, in the most rounds."""
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    parts = values.tensor_split(world_size)
    # the share that leaves in each turn; the next one's is what comes
    shares = [parts[(rank - turn) % world_size] for turn in range(world_size)]
    summed, gathered = [], []
    for share in shares[1:]:
        summed.append((yield from _expect((yield Scratch(share)), before)))
    for share in shares[:-1]:
        gathered.append((yield from _expect(share, before)))
    for turn, receipt in enumerate(summed):
        yield from _trade(shares[turn], after, receipt)
        shares[turn + 1] += receipt.into
    for turn, receipt in enumerate(gathered):
        yield from _trade(shares[turn - 1], after, receipt)
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
        before = (rank - distance) % world_size
        if counts[before]:
            pending.append((yield Start(Receive(received[before], before))))
    for distance in range(1, world_size):
        # everybody's first message goes to another worker
        after = (rank + distance) % world_size
        if len(parts[after]):
            pending.append((yield Start(Send(parts[after].contiguous(), after))))
    for each in pending:
        yield Wait(each)
    return received


def doubling_gather(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """Gather (n,) of every worker as (W, n), in rounds that double what each has.

    Source: Bruck et al., "Efficient Algorithms for All-to-All Communications", 1997.
    """
    # row i is of worker rank + i until the end
    rows = values.new_empty(world_size, len(values))
    rows[0] = values
    rounds = []
    have = 1
    while have < world_size:
        count = min(have, world_size - have)
        before, after = (rank - have) % world_size, (rank + have) % world_size
        receipt = yield from _expect(rows[have : have + count], after)
        rounds.append((rows[:count], before, receipt))
        have += count
    for leaving, to, receipt in rounds:
        yield from _trade(leaving, to, receipt)
    return rows.roll(rank, 0)


def ring_gather(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """Gather (n,) of every worker as (W, n), a row a round."""
    rows = values.new_empty(world_size, len(values))
    rows[rank] = values
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    coming = []
    for turn in range(1, world_size):
        coming.append((yield from _expect(rows[(rank - turn) % world_size], before)))
    for turn, receipt in enumerate(coming):
        yield from _trade(rows[(rank - turn) % world_size], after, receipt)
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
            coming.append((yield Start(Receive(piece, before))))
    for number, piece in enumerate(pieces):
        if place > 0:
            yield Wait(coming[number])
        if place < world_size - 1:
            leaving.append((yield Start(Send(piece, after))))
    for each in leaving:
        yield Wait(each)
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


def barrier(rank: int, world_size: int) -> Algorithm[None]:
    """Wait until all workers have come here, in rounds that double whom each has heard of."""
    rounds, distance = [], 1
    while distance < world_size:
        before, after = (rank - distance) % world_size, (rank + distance) % world_size
        token = torch.zeros(1, dtype=torch.uint8)
        rounds.append((after, (yield from _expect(token, before))))
        distance *= 2
    for after, receipt in rounds:
        yield from _trade(torch.zeros(1, dtype=torch.uint8), after, receipt)


def swap(values: Tensor, peer: int, rank: int) -> Algorithm[Tensor]:
    """The values of `peer`, which gets this worker's."""
    if peer == rank:
        return values.clone()
    receipt = yield from _expect(torch.empty_like(values), peer)
    yield from _trade(values, peer, receipt)
    return receipt.into


class _Fold:
    """Of W workers, a power of two of them that do the work of all.

    The first pairs share a place: the even one takes the odd one's values, and gives it the result.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        power = 1 << (world_size.bit_length() - 1)
        self.pairs = world_size - power
        in_pair = rank < 2 * self.pairs
        self.is_folded = in_pair and rank % 2 == 1
        self.has_folded = in_pair and rank % 2 == 0
        self.place = rank // 2 if in_pair else rank - self.pairs
        # bits of a place, in which a worker differs from its peers
        self.steps = [] if self.is_folded else [1 << bit for bit in range(power.bit_length() - 1)]
        self.receipt: _Receipt | None = None

    def worker(self, place: int) -> int:
        return 2 * place if place < self.pairs else place + self.pairs

    def enter(self, values: Tensor) -> Algorithm[None]:
        """Add up the pairs."""
        if self.is_folded:
            yield from _send(values, self.rank - 1)
        elif self.receipt is not None:
            yield from self.receipt.end()
            values += self.receipt.into

    def leave(self, values: Tensor) -> Algorithm[None]:
        if self.is_folded:
            assert self.receipt is not None, "expected from the begin"
            yield from self.receipt.end()
        elif self.has_folded:
            yield from _send(values, self.rank + 1)


def _folded(values: Tensor, rank: int, world_size: int) -> Algorithm[_Fold]:
    """A fold that expects what comes into it, or out of it."""
    fold = _Fold(rank, world_size)
    if fold.is_folded:
        fold.receipt = yield from _expect(values, rank - 1)
    elif fold.has_folded:
        fold.receipt = yield from _expect((yield Scratch(values)), rank + 1)
    return fold


class _Receipt:
    """A message that is expected, and where it will lie."""

    def __init__(self, into: Tensor, pending: Any) -> None:
        self.into, self.pending = into, pending

    def end(self) -> Algorithm[None]:
        """Wait for it."""
        if self.pending is not None:
            yield Wait(self.pending)


def _expect(into: Tensor, source: int) -> Algorithm[_Receipt]:
    """Begin to receive. An empty message is not sent, as both sides know its size."""
    return _Receipt(into, (yield Start(Receive(into, source))) if into.numel() else None)


def _send(values: Tensor, to: int) -> Algorithm[None]:
    if values.numel():
        yield Send(values, to)


def _trade(leaving: Tensor, to: int, coming: _Receipt) -> Algorithm[None]:
    """Send, and wait for what is expected."""
    sent = (yield Start(Send(leaving, to))) if leaving.numel() else None
    yield from coming.end()
    if sent is not None:
        yield Wait(sent)
