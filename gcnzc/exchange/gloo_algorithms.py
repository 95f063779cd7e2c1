"""The algorithms of gloo's collectives, by messages.

They stand for the process group's own collectives in simulations, and execute large collectives of
some ranks; `gcnzc.exchange.collectives` has their times.
"""

from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange.requests import Algorithm, Receive, Send, Start, Wait

# turns of a ring whose receives are posted ahead
LOOK_AHEAD = 16


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


def start_receive(values: Tensor, source: int) -> Algorithm[Any]:
    """Start to receive `values`, and return the handle; None for empty ones, which are not sent."""
    return (yield Start(Receive(values, source))) if values.numel() else None


def send_and_wait(values: Tensor, peer: int, receive: Any) -> Algorithm[None]:
    """Send `values`, unless they are empty, and wait for both the send and a receive, if any."""
    pending = (yield Start(Send(values, peer))) if values.numel() else None
    for each in (receive, pending):
        if each is not None:
            yield Wait(each)
