"""A barrier: all ranks wait until all have called it."""

import torch

from gcnzc.exchange.collectives.messages import send_and_wait, start_receive
from gcnzc.exchange.requests import Algorithm


def barrier(rank: int, world_size: int) -> Algorithm[None]:
    """Wait until all ranks have called it, by a dissemination barrier of ⌈log2 W⌉ rounds."""
    rounds, distance = [], 1
    while distance < world_size:
        before, after = (rank - distance) % world_size, (rank + distance) % world_size
        token = torch.zeros(1, dtype=torch.uint8)
        rounds.append((after, (yield from start_receive(token, before))))
        distance *= 2
    for after, receive in rounds:
        yield from send_and_wait(torch.zeros(1, dtype=torch.uint8), after, receive)
