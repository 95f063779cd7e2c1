"""Measure the bandwidth between all pairs of ranks.

Notation: W ranks.
"""

import numpy as np
import torch
from torch import Tensor

from gcnzc.exchange.collectives import AllGather, AllGatherScalar, SendReceive
from gcnzc.exchange.requests import Algorithm, Now
from gcnzc.exchange.topology import Matrix, find_peer, round_robin

PROBE_BYTES = 1 << 20
"""default size of a message of `measure_bandwidths`"""


def measure_bandwidths(
    rank: int, world_size: int, num_bytes: int = PROBE_BYTES, device: torch.device | None = None
) -> Algorithm[Matrix]:
    """Measure the bandwidth between all pairs of ranks, which exchange a message of zeros.

    All pairs of a round exchange at the same time, as in a decentralized algorithm, so a link that
    several pairs share is measured with their traffic. There are W - 1 rounds, or W if W is odd.
    Each begins with an all-gather, so that all ranks start at about the same time. A bandwidth
    includes the latency of a message.

    Args:
        rank: this rank.
        world_size: W.
        num_bytes: the size of a message.
        device: the device of the messages; the CPU if None.

    Returns:
        (W, W): bytes per second in each direction, the lower one of the measurements of both ranks;
        equal on all ranks. 0 on the diagonal.
    """
    own = torch.zeros(world_size, dtype=torch.float64, device=device)
    sent = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    for matching in round_robin(world_size):
        peer = find_peer(matching, rank)
        yield AllGatherScalar(0)
        began = yield Now()
        received = yield SendReceive(sent, rank if peer is None else peer)
        _wait_for(received)
        ended = yield Now()
        if peer is not None:
            # at least a nanosecond, so that a link without limits has a finite bandwidth
            own[peer] = num_bytes / max(ended - began, 1e-9)
    measured = (yield AllGather(own)).cpu().numpy()
    return np.asarray(np.minimum(measured, measured.T))


def _wait_for(values: Tensor) -> None:
    """Wait until a tensor on a GPU has been received."""
    if values.is_cuda:
        int(values[-1])
