"""SAPS-PSGD: average a few parameters with one peer, preferably one with a fast link.

    M_t  <- matching of fast pairs that keeps the ranks connected over time
    c_t  <- random indices of a fraction p of the parameters, equal on all ranks
    x_i  <- InnerOpt(x_i, gradient of rank i)        a local step
    x_i[c_t] <- (x_i[c_t] + x_j[c_t]) / 2            (i, j) in M_t

as in Tang, Shi and Chu, "Communication-Efficient Decentralized Learning with Sparsification and
Adaptive Peer Selection" (2020, https://arxiv.org/abs/2002.09692). In the paper an index is
exchanged with probability p; here the number of indices is fixed. All ranks compute the matching
from the seed, the round and the bandwidths, so there is no coordinator.

Notation: W ranks, n parameters, p their exchanged fraction, k their exchanged number, B (W, W)
bandwidths.
"""

import hashlib
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from gcnzc.exchange import Algorithm, AllGather, AllGatherScalar, Now, SendReceive
from gcnzc.exchange.topology import (
    NEVER,
    Edge,
    Matrix,
    bandwidth_matching,
    bottleneck_threshold,
    find_peer,
    round_robin,
)
from gcnzc.kernels.codec.random_indices import draw_indices
from gcnzc.optim.gossip import Gossip
from gcnzc.optim.options import option
from gcnzc.optim.state import scalar, vector
from gcnzc.optim.validation import check_above_zero, check_count

PROBE_BYTES = 1 << 20
"""default size of a message of `measure_bandwidths`"""
AGAIN: dict[str, Any] = {"kind": "local", "resize": "drop"}
"""what begins again with another number of ranks: the pairs"""


def num_pairs(own: Any) -> int:
    """Return W W."""
    return int(own.group.world_size**2)


class SAPS(Gossip):
    """SAPS-PSGD: average a fraction of the parameters with one peer at a time.

    Each exchange sends `density` * n values, without indices, to one rank. With an odd number of
    ranks, the ranks are idle in turn.

    Each parameter is averaged in a fraction `density` of the exchanges. With a small `density`, the
    parameters of the ranks remain different. Their final mean is then a worse model in a short run,
    or if the ranks have different data.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        density: p, the fraction of the parameters of an exchange, in (0, 1]; at least one is
            exchanged.
        bandwidth: (W, W), the bandwidth of each pair of ranks in any unit, the same matrix on all
            ranks, on the host; 0 for pairs that cannot communicate. The lower one of (i, j) and
            (j, i) counts. None for equal bandwidths, or to measure them with `probe_interval`.
        probe_interval: measure the bandwidths in bytes per second before the first exchange, and
            again every `probe_interval` exchanges, in place of `bandwidth`. A measurement exchanges
            1 MiB between all pairs; the runs are no longer reproducible. None to not measure.
        seed: random seed of the pairs and indices.
        options: `control_interval` of `PartialExchanges`, and the options of `LocalMethod`, such as
            `local_steps`, which is 1 by default, or "auto".

    Raises:
        ValueError: an option is out of range, or `bandwidth` is not a matrix of numbers from 0 on
            for this number of ranks.
    """

    density: float = option(0.01, partial(check_above_zero, most=1))
    bandwidth: ArrayLike | None = option(None)
    probe_interval: int | None = option(None, partial(check_count, least=1))
    seed: int = option(0, check_count)

    last_met: Tensor = vector(num_pairs, torch.int64, initial=NEVER, on_host=True, **AGAIN)
    """(W W,) int64: the last round in which two ranks were a pair, or `NEVER`; the same on all"""
    measured_in: int = scalar(NEVER, **AGAIN)
    """the round of the last measurement, or `NEVER`"""
    measured: Tensor | None = vector(
        num_pairs, torch.float64, exists=lambda own: own.measured_in != NEVER, on_host=True, **AGAIN
    )
    """(W W,) float64: the measured bandwidths; None if there was no measurement"""
    given: Matrix
    """(W, W): the given bandwidths, or equal ones"""

    def configure(self) -> None:
        """See `DistributedOptimizer`."""
        super().configure()
        world_size = self.group.world_size
        if self.bandwidth is not None and self.probe_interval is not None:
            raise ValueError("both bandwidth and probe_interval\n\nhint: omit one of them")
        given = np.ones((world_size, world_size)) if self.bandwidth is None else self.bandwidth
        self.given = symmetric_bandwidths(np.array(given, np.float64), world_size)
        self.pairs: list[Edge] = []
        """the pairs of ranks in the last exchange, equal on all ranks"""

    def start(self) -> None:
        """See `DistributedOptimizer`."""
        super().start()
        self._find_threshold()

    def compared_options(self) -> dict[str, Any]:
        """See `DistributedOptimizer`; of the given bandwidths, their size and a hash."""
        digest = hashlib.sha256(self.given.tobytes()).hexdigest()[:8]
        return super().compared_options() | {"bandwidth": f"{self.given.shape} {digest}"}

    def on_load(self) -> None:
        """See `DistributedOptimizer`."""
        super().on_load()
        if self.probe_interval is None:
            self.measured, self.measured_in = None, NEVER
        self._find_threshold()

    def take_part(self, step: int) -> Algorithm[None]:
        """See `PartialExchanges`: an exchange after every `local_steps` steps."""
        (interval,) = self.fragments
        if step - interval.started >= self.local_steps:
            interval.started = step
            yield from self.sync_interval.time_exchange(self._average())

    def _average(self) -> Algorithm[None]:
        self.pairs = yield from self._choose_pairs(self.num_exchanges)
        yield from self.average_pair(find_peer(self.pairs, self.group.rank), self.indices())

    def _choose_pairs(self, number: int) -> Algorithm[list[Edge]]:
        """Return the pairs of a round; communicates only to measure bandwidths."""
        group, interval = self.group, self.probe_interval
        if interval and (self.measured_in == NEVER or number >= self.measured_in + interval):
            device = self.flat.device
            measured = yield from measure_bandwidths(group.rank, group.world_size, device=device)
            self.measured, self.measured_in = torch.from_numpy(measured).flatten(), number
            self._find_threshold()
        last_met = self.last_met.view(group.world_size, -1)
        pairs = bandwidth_matching(
            self.matrix,
            last_met.numpy(),
            self.seed,
            round=number,
            # the least with which any 2 * `window` exchanges are guaranteed to connect all ranks
            window=(group.world_size + 1) // 2,
            threshold=self.fast_threshold,
        )
        for low, high in pairs:
            last_met[low, high] = last_met[high, low] = number
        return pairs

    @property
    def matrix(self) -> Matrix:
        """B: the current bandwidths, symmetric, equal on all ranks."""
        if self.measured is None:
            return self.given
        return np.asarray(self.measured.view(self.given.shape).numpy())

    def _find_threshold(self) -> None:
        self.fast_threshold = bottleneck_threshold(self.matrix)
        """the bandwidth from which a pair is fast"""

    @property
    def num_exchanged(self) -> int:
        """k, the number of exchanged elements."""
        count = self.flat.num_elements
        return min(max(round(self.density * count), 1), count)

    def indices(self) -> Tensor | None:
        """Return the indices (k,) of the next exchange, equal on all ranks; None for all."""
        count = self.flat.num_elements
        if self.num_exchanged == count:
            return None
        found = draw_indices(count, self.num_exchanged, self.seed, self.num_exchanges)
        return found.to(self.flat.device)


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
        if received.is_cuda:
            # wait until it has been received
            int(received[-1])
        ended = yield Now()
        if peer is not None:
            # at least a nanosecond, so that a link without limits has a finite bandwidth
            own[peer] = num_bytes / max(ended - began, 1e-9)
    measured = (yield AllGather(own)).cpu().numpy()
    return np.asarray(np.minimum(measured, measured.T))


def symmetric_bandwidths(matrix: Matrix, world_size: int) -> Matrix:
    """Return bandwidths of the caller with the lower one of both directions, and a diagonal of 0.

    Raises:
        ValueError: there are not W x W finite numbers from 0 on, or no pair can exchange.
    """
    np.fill_diagonal(matrix, 0)
    is_valid = matrix.shape == (world_size, world_size) and np.isfinite(matrix).all()
    lower = np.minimum(matrix, matrix.T) if is_valid else matrix
    if not is_valid or (lower < 0).any() or (world_size > 1 and not lower.any()):
        raise ValueError(
            f"bandwidth is {matrix.tolist()}\n\nhint: give a finite number from 0 on for each pair "
            f"of {world_size} ranks, and above 0 in both directions of at least one pair"
        )
    return lower
