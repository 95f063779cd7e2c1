"""SAPS-PSGD: average a few parameters with one peer, preferably one with a fast link.

    M_t  <- matching of fast pairs that keeps the ranks connected over time
    c_t  <- random indices of a fraction p of the parameters, equal on all ranks
    x_i  <- InnerOpt(x_i, gradient of rank i)        a local step
    x_i[c_t] <- (x_i[c_t] + x_j[c_t]) / 2            (i, j) in M_t

as in Tang, Shi and Chu, "Communication-Efficient Decentralized Learning with Sparsification and
Adaptive Peer Selection" (2020, https://arxiv.org/abs/2002.09692). In the paper an index is
exchanged with probability p; here the number of indices is fixed. All ranks compute the matching
from the seed, the round and the bandwidths, so there is no coordinator.

Notation: W ranks, n parameters, p their exchanged fraction, B (W, W) bandwidths.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gcnzc.exchange import Algorithm
from gcnzc.exchange.collectives import AllGather, AllGatherScalar, SendReceive
from gcnzc.exchange.requests import Now
from gcnzc.exchange.topology import (
    NEVER,
    Edge,
    Matrix,
    bandwidth_matching,
    bottleneck_threshold,
    find_peer,
    round_robin,
)
from gcnzc.optim.state_layout import SavedTensor, check_value, saved_world_size
from gcnzc.optim.strategy.every_interval import EveryInterval
from gcnzc.optim.strategy.pairs import Matching, PairMean, Pairs
from gcnzc.optim.strategy.recipe import Recipe
from gcnzc.optim.validation import check_count
from gcnzc.system.arguments import describe

if TYPE_CHECKING:
    from gcnzc.optim.strategy.strategy import Strategy

# Measure the bandwidth between all pairs of ranks.
#
# Notation: W ranks.


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


def saps(
    density: float = 0.01,
    bandwidth: Tensor | NDArray[Any] | Sequence[Sequence[float]] | None = None,
    *,
    probe_interval: int | None = None,
    seed: int = 0,
    local_steps: int | str = 1,
    control_interval: int = 10,
) -> Recipe:
    """Return the recipe of SAPS-PSGD.

    Each exchange sends `density` * n values, without indices, to one rank. With an odd number of
    ranks, the ranks are idle in turn.

    Each parameter is averaged in a fraction `density` of the exchanges. With a small `density`, the
    parameters of the ranks remain different. Their final mean is then a worse model in a short run,
    or if the ranks have different data.

    Args:
        density: p, the fraction of the parameters of an exchange, in (0, 1].
        bandwidth: (W, W), the bandwidth of each pair of ranks in any unit, the same matrix on all
            ranks; 0 for pairs that cannot communicate. The lower one of (i, j) and (j, i) counts.
            None for equal bandwidths, or to measure them with `probe_interval`.
        probe_interval: measure the bandwidths in bytes per second before the first exchange, and
            again every `probe_interval` exchanges, in place of `bandwidth`. A measurement exchanges
            1 MiB between all pairs; the runs are no longer reproducible. None to not measure.
        seed: random seed of the pairs and indices.
        local_steps: the number of local steps from one exchange to the next, or "auto".
        control_interval: the number of steps from one sum of signals over all ranks to the next.

    Raises:
        ValueError: an option is out of range, or `bandwidth` is not a matrix of numbers from 0 on.
    """
    check_count("control_interval", control_interval, 1)
    check_count("seed", seed)
    matching = AdaptiveMatching(bandwidth, probe_interval, seed)
    return Recipe(
        "SAPS",
        EveryInterval(),
        PairMean(),
        Pairs(matching, density, seed),
        local_steps=local_steps,
        control_interval=control_interval,
    )


class AdaptiveMatching(Matching):
    """Pairs with fast links that keep the ranks connected over time; see `saps`."""

    window: int
    """the number of rounds in which a pair is recent: W / 2, rounded up, the least with which any
    2 * `window` exchanges are guaranteed to connect all ranks"""

    def __init__(self, bandwidth: Any, probe_interval: int | None, seed: int) -> None:
        if probe_interval is not None:
            check_count("probe_interval", probe_interval, 1)
        if bandwidth is not None and probe_interval is not None:
            raise ValueError(
                "both bandwidth and probe_interval are given\n\nhint: give the bandwidths, or "
                "measure them"
            )
        self.given_bandwidth = None if bandwidth is None else _read_matrix(bandwidth)
        self.probe_interval, self.seed = probe_interval, seed

    def attach(self, strategy: "Strategy") -> None:
        """See `RecipePart`.

        Raises:
            ValueError: the bandwidths are those of another number of ranks.
        """
        super().attach(strategy)
        world_size = strategy.group.world_size
        if self.given_bandwidth is not None and len(self.given_bandwidth) != world_size:
            raise ValueError(
                f"bandwidths of {len(self.given_bandwidth)} ranks for {world_size} ranks\n\n"
                "hint: give a matrix with a row and a column for each rank"
            )
        self.window = (world_size + 1) // 2
        self.initialize()

    def initialize(self) -> None:
        """See `RecipePart`."""
        world_size = self.strategy.group.world_size
        self.last_met: NDArray[np.int64] = np.full((world_size, world_size), NEVER, np.int64)
        """(W, W): the last round in which two ranks were a pair, or `NEVER`; equal on all ranks"""
        self.measured_in = NEVER
        """the round of the last measurement, or `NEVER`"""
        equal = np.ones((world_size, world_size)) - np.eye(world_size)
        self._set_bandwidth(equal if self.given_bandwidth is None else self.given_bandwidth)

    def describe(self) -> str:
        """See `Matching`; a given bandwidth by its size and a hash."""
        bandwidth = "None"
        if self.given_bandwidth is not None:
            digest = hashlib.sha256(self.given_bandwidth.tobytes()).hexdigest()[:8]
            bandwidth = f"{self.given_bandwidth.shape} {digest}"
        return f"bandwidth={bandwidth}, probe_interval={self.probe_interval}, seed={self.seed}"

    def choose(self, round: int) -> Algorithm[list[Edge]]:
        """See `Matching`; communicates only to measure bandwidths."""
        group = self.strategy.group
        if self.probe_interval is not None and (
            self.measured_in == NEVER or round >= self.measured_in + self.probe_interval
        ):
            device = self.strategy.flat_params.device
            self._set_bandwidth(
                (yield from measure_bandwidths(group.rank, group.world_size, device=device))
            )
            self.measured_in = round
        pairs = bandwidth_matching(
            self.bandwidth,
            self.last_met,
            self.seed,
            round=round,
            window=self.window,
            threshold=self.fast_threshold,
        )
        for low, high in pairs:
            self.last_met[low, high] = self.last_met[high, low] = round
        return pairs

    def shared_state(self) -> dict[str, Any]:
        """See `RecipePart`; measured bandwidths are part of it, given ones are not."""
        state: dict[str, Any] = {"last_met": torch.from_numpy(self.last_met.copy())}
        if self.measured_in != NEVER:
            state["bandwidth"] = torch.from_numpy(self.bandwidth.copy())
            state["measured_in"] = self.measured_in
        return state

    def check_state(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`."""
        if "bandwidth" in shared:
            check_value(shared, "measured_in", NEVER)

    def saved_tensors(self, snapshot: Mapping[str, Any]) -> dict[str, SavedTensor]:
        """See `RecipePart`; the matrices are of the number of ranks that saved the state."""
        world_size = saved_world_size(snapshot)
        shape = (world_size, world_size)
        # only measured bandwidths are saved
        measured = (
            {"bandwidth": SavedTensor(shape, least=0)} if "bandwidth" in snapshot["shared"] else {}
        )
        return {"last_met": SavedTensor(shape, dtype=torch.int64, least=NEVER), **measured}

    def load(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `RecipePart`; the state of another number of ranks is initialized again."""
        self.initialize()
        if len(shared["last_met"]) != self.strategy.group.world_size:
            return
        self.last_met = shared["last_met"].cpu().numpy().copy()
        if "bandwidth" in shared and self.probe_interval is not None:
            self.measured_in = shared["measured_in"]
            self._set_bandwidth(shared["bandwidth"].cpu().numpy().copy())

    def _set_bandwidth(self, bandwidth: Matrix) -> None:
        self.bandwidth = bandwidth
        """(W, W): the current bandwidths, symmetric, equal on all ranks"""
        self.fast_threshold = bottleneck_threshold(bandwidth)
        """the bandwidth from which a pair is fast"""


def _read_matrix(bandwidth: Any) -> Matrix:
    """Return bandwidths of the caller as a symmetric matrix (W, W) with a diagonal of 0."""
    found = bandwidth.detach().cpu().numpy() if isinstance(bandwidth, Tensor) else bandwidth
    hint = "hint: give a matrix with a row and a column for each rank, of finite numbers from 0 on"
    try:
        matrix = np.array(found, np.float64)
    except (TypeError, ValueError):
        raise ValueError(
            f"bandwidth is {describe(bandwidth)}, not a matrix of numbers\n\n{hint}"
        ) from None
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"bandwidth has the shape {matrix.shape}\n\n{hint}")
    np.fill_diagonal(matrix, 0)
    if not ((matrix >= 0) & np.isfinite(matrix)).all():
        raise ValueError(f"bandwidth has a number that is negative, infinite or NaN\n\n{hint}")
    matrix = np.minimum(matrix, matrix.T)
    if len(matrix) > 1 and not matrix.any():
        raise ValueError(
            "bandwidth is 0 for every pair of ranks, so that no pair could exchange\n\nhint: give "
            "a bandwidth above 0 in both directions of at least one pair"
        )
    return matrix
