"""The algorithms of gloo's collectives, by messages.

They stand for the process group's own collectives in simulations, and execute large collectives of
some ranks; `gcnzc.exchange.collectives` has their times.
"""

from typing import Any

from torch import Tensor

from gcnzc.exchange.requests import Algorithm, Receive, Scratch, Send, Start, Wait

# turns of a ring whose receives are posted ahead
LOOK_AHEAD = 16


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


def ring_gather(values: Tensor, rank: int, world_size: int) -> Algorithm[Tensor]:
    """All-gather (n,) to (W, n) around a ring, one row per round."""
    rows = values.new_empty(world_size, len(values))
    rows[rank] = values
    if not values.numel():
        return rows
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    receives = []
    for turn in range(1, world_size):
        receives.append((yield Start(Receive(rows[(rank - turn) % world_size], before))))
    for turn, receive in enumerate(receives):
        send = yield Start(Send(rows[(rank - turn) % world_size], after))
        yield Wait(receive)
        yield Wait(send)
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
