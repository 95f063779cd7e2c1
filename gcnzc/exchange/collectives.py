"""Collective algorithms made of point-to-point messages.

Each is a generator that yields `Scratch`, `Send` and `Receive`, and `Start` and `Wait` of messages.
The table has their times for W ranks, M bytes, a latency of α seconds per message and an outgoing
bandwidth of B bytes/s per rank (Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005):

    doubling_sum     log2 W (α + M/B), if W is a power of two
    halving_sum      2 log2 W α + 2 (W - 1)/W M/B, if W is a power of two
    ring_sum         2 (W - 1) α + 2 (W - 1)/W M/B
    doubling_gather  ⌈log2 W⌉ α + (W - 1) M/B
    chain            (⌈M/C⌉ + W - 2) (α + C/B), in pieces of C bytes
    binomial         ⌈log2 W⌉ (α + M/B)

For another W, both use the next lower power of two, and two more messages of M bytes: some ranks
first send their values to another rank, which sends the result back (`_Fold`).

Sums are equal on all ranks bit for bit: an element is either summed on one rank, or by the same
pairs on all ranks, and addition is commutative.

All receives are posted at the start, or in a ring of many ranks those of the next turns. gloo sends
a message only when its receiver has posted the receive, and the notification takes as long as a
message; so only the first round takes 2 α. A message cannot overwrite memory that is still read:
the sender computed the message from the data that this rank sent from that memory.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange.requests import Algorithm, Receive, Scratch, Send, Start, Wait

# piece size of a chain: 16 to 32 KiB are fastest at 100 Mbit/s with 2 to 8 ranks
PIECE_BYTES = 32 * 1024

# turns of a ring whose receives are posted ahead
LOOK_AHEAD = 16


def doubling_sum(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """All-reduce (n,) in place by recursive doubling: whole vectors in log2 W rounds.

    If W is not a power of two, there are ⌊log2 W⌋ + 2 rounds. Uses log2 W times the memory of the
    values as scratch; the other sums use at most their size.
    """
    fold = yield from _make_fold(values, rank, world_size)
    peers = [fold.find_rank(fold.position ^ step) for step in fold.steps]
    receives = []
    for peer in peers:
        receives.append((yield from _start_receive((yield Scratch(values)), peer)))
    yield from fold.reduce_pairs(values)
    for peer, receive in zip(peers, receives, strict=True):
        yield from _send_and_wait(values, peer, receive)
        values += receive.values
    yield from fold.send_results(values)
    return values


def halving_sum(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """All-reduce (n,) in place by recursive halving (reduce-scatter) and doubling (all-gather)."""
    fold = yield from _make_fold(values, rank, world_size)
    halves = []
    begin, end = 0, len(values)
    for step in reversed(fold.steps):
        middle = (begin + end) // 2
        lower, upper = values[begin:middle], values[middle:end]
        is_upper = bool(fold.position & step)
        own, other = (upper, lower) if is_upper else (lower, upper)
        halves.append((own, other, fold.find_rank(fold.position ^ step)))
        begin, end = (middle, end) if is_upper else (begin, middle)
    reduces, gathers = [], []
    for own, _, peer in halves:
        reduces.append((yield from _start_receive((yield Scratch(own)), peer)))
    for _, other, peer in reversed(halves):
        gathers.append((yield from _start_receive(other, peer)))
    yield from fold.reduce_pairs(values)
    for (own, other, peer), receive in zip(halves, reduces, strict=True):
        yield from _send_and_wait(other, peer, receive)
        own += receive.values
    for (own, _, peer), receive in zip(reversed(halves), gathers, strict=True):
        yield from _send_and_wait(own, peer, receive)
    yield from fold.send_results(values)
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


def direct_scatter(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """Reduce-scatter (n,): each rank receives its share from all others, and adds them by rank.

    Returns:
        (n / W,): the sum of this rank's share.
    """
    shares = values.view(world_size, -1)
    parts = yield from direct_exchange(list(shares), [shares.shape[1]] * world_size, rank)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def direct_exchange(
    parts: Sequence[Tensor], counts: Sequence[int], rank: int
) -> Algorithm[list[Tensor]]:
    """All-to-all: send part r to rank r, and receive `counts[r]` elements from it, concurrently."""
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
        receive = yield from _start_receive(rows[gathered : gathered + count], after)
        rounds.append((rows[:count], before, receive))
        gathered += count
    for sent, peer, receive in rounds:
        yield from _send_and_wait(sent, peer, receive)
    return rows.roll(rank, 0)


def ring_gather(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """All-gather (n,) to (W, n) around a ring, one row per round."""
    rows = values.new_empty(world_size, len(values))
    rows[rank] = values
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    receives = []
    for turn in range(1, world_size):
        receives.append((yield from _start_receive(rows[(rank - turn) % world_size], before)))
    for turn, receive in enumerate(receives):
        yield from _send_and_wait(rows[(rank - turn) % world_size], after, receive)
    return rows


def chain(
    values: Tensor, root: int, rank: int, world_size: int, piece_bytes: int = PIECE_BYTES
) -> Algorithm[Tensor]:
    """Broadcast (n,) along a chain: each rank forwards a piece while it receives the next one."""
    position = (rank - root) % world_size
    pieces = values.split(max(piece_bytes // values.element_size(), 1))
    if world_size == 1 or not len(values):
        return values
    before, after = (rank - 1) % world_size, (rank + 1) % world_size
    receives, sends = [], []
    if position > 0:
        for piece in pieces:
            receives.append((yield Start(Receive(piece, before))))
    for index, piece in enumerate(pieces):
        if position > 0:
            yield Wait(receives[index])
        if position < world_size - 1:
            sends.append((yield Start(Send(piece, after))))
    for send in sends:
        yield Wait(send)
    return values


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


def barrier(rank: int, world_size: int) -> Algorithm[None]:
    """Wait until all ranks have called it, by a dissemination barrier of ⌈log2 W⌉ rounds."""
    rounds, distance = [], 1
    while distance < world_size:
        before, after = (rank - distance) % world_size, (rank + distance) % world_size
        token = torch.zeros(1, dtype=torch.uint8)
        rounds.append((after, (yield from _start_receive(token, before))))
        distance *= 2
    for after, receive in rounds:
        yield from _send_and_wait(torch.zeros(1, dtype=torch.uint8), after, receive)


def send_receive(values: Tensor, peer: int, rank: int) -> Algorithm[Tensor]:
    """Send `values` to `peer`, and return the values that it sends to this rank."""
    if peer == rank:
        return values.clone()
    receive = yield from _start_receive(values.new_empty(*values.shape), peer)
    yield from _send_and_wait(values, peer, receive)
    return receive.values


class _Fold:
    """Folds W ranks to the next lower power of two, which recursive doubling and halving need.

    If W is not a power of two, the first ranks form pairs: the odd rank of a pair sends its values
    to the even one, which takes part for both and sends the result back. Each pair, and each rank
    without a pair, has a position in [0, power of two).
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        power = 1 << (world_size.bit_length() - 1)
        self.num_pairs = world_size - power
        in_pair = rank < 2 * self.num_pairs
        self.is_folded = in_pair and rank % 2 == 1
        self.has_folded = in_pair and rank % 2 == 0
        self.position = rank // 2 if in_pair else rank - self.num_pairs
        # the positions of a rank and of its peers differ in one of these bits
        self.steps = [] if self.is_folded else [1 << bit for bit in range(power.bit_length() - 1)]
        self.receive: _PendingReceive | None = None

    def find_rank(self, position: int) -> int:
        """Return the rank that takes part for a position."""
        return 2 * position if position < self.num_pairs else position + self.num_pairs

    def reduce_pairs(self, values: Tensor) -> Algorithm[None]:
        """Add the values of each odd rank to those of its even one."""
        if self.is_folded:
            yield from _send(values, self.rank - 1)
        elif self.receive is not None:
            yield from self.receive.wait()
            values += self.receive.values

    def send_results(self, values: Tensor) -> Algorithm[None]:
        """Send the result of each even rank to its odd one."""
        if self.is_folded:
            assert self.receive is not None, "_make_fold has started it"
            yield from self.receive.wait()
        elif self.has_folded:
            yield from _send(values, self.rank + 1)


def _make_fold(values: Tensor, rank: int, world_size: int) -> Algorithm[_Fold]:
    """Create a fold, and start the receive of this rank's pair."""
    fold = _Fold(rank, world_size)
    if fold.is_folded:
        fold.receive = yield from _start_receive(values, rank - 1)
    elif fold.has_folded:
        fold.receive = yield from _start_receive((yield Scratch(values)), rank + 1)
    return fold


class _PendingReceive:
    """A receive that has started, and the tensor that it writes."""

    def __init__(self, values: Tensor, pending: Any) -> None:
        self.values, self.pending = values, pending

    def wait(self) -> Algorithm[None]:
        """Wait until the message is received."""
        if self.pending is not None:
            yield Wait(self.pending)


def _start_receive(values: Tensor, source: int) -> Algorithm[_PendingReceive]:
    """Start to receive `values`; empty messages are not sent, since both ranks know their size."""
    pending = (yield Start(Receive(values, source))) if values.numel() else None
    return _PendingReceive(values, pending)


def _send(values: Tensor, peer: int) -> Algorithm[None]:
    if values.numel():
        yield Send(values, peer)


def _send_and_wait(values: Tensor, peer: int, receive: _PendingReceive) -> Algorithm[None]:
    """Send `values`, and wait for both the send and a receive."""
    pending = (yield Start(Send(values, peer))) if values.numel() else None
    yield from receive.wait()
    if pending is not None:
        yield Wait(pending)
