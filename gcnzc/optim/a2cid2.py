"""A2CiD2: gossip in pairs of ranks, accelerated by a second vector of each rank.

Each rank takes local steps, and averages its parameters x with those of one neighbour at a time.
Its second vector x~ reduces the differences between ranks faster, as if they exchanged more often:

    mixing, for a time t      e = exp(-2 eta t);  (x, x~) <- (x + c (x~ - x), x~ - c (x~ - x)),
                              c = (1 - e) / 2
    gradient                  x' = InnerOpt(x, g);  (x, x~) <- (x', x~ + (x' - x))
    exchange of ranks i, j    d = x_i - x_j;  x_i <- x_i - d / 2,  x~_i <- x~_i - alpha~ d

    eta = 1 / (2 sqrt(chi_1 chi_2)),  alpha~ = sqrt(chi_1 / chi_2) / 2

as in Nabli, Belilovsky and Oyallon, "A2CiD2: Accelerating Asynchronous Communication in
Decentralized Deep Learning" (2023, https://arxiv.org/abs/2306.08289). chi_1 and chi_2 are
constants of the graph and its rates; see `gcnzc.exchange.topology`. Mixing solves the differential
equation of x and x~. It preserves x + x~, and commutes with a gradient event. An exchange preserves
the sums over both ranks.

Notation: n elements of the flat parameter vector.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm, Now, Start, Sum
from gcnzc.exchange.engine import identify_caller
from gcnzc.exchange.topology import (
    Edge,
    color_edges,
    find_peer,
    inverse_connectivity,
    laplacian,
    maximal_resistance,
)
from gcnzc.optim.defaults import MAX_GOSSIP_RATE
from gcnzc.optim.finite_gradients import delete_nonfinite_state
from gcnzc.optim.gossip import GossipGraph
from gcnzc.optim.local_method import Fragment, has_exchanges
from gcnzc.optim.offers import OverlappedGossip
from gcnzc.optim.options import option
from gcnzc.optim.state import OWN, scalar, vector
from gcnzc.optim.validation import check_above_zero, check_at_least_zero, check_count
from gcnzc.system.arguments import check_flag

RATE_WEIGHT = 0.1
"""the weight of the newest step in the moving average of the exchanges per step"""
MAX_TIME = 10.0
"""limit of the mixing time after a step, in steps; it applies after a pause of the process"""


class A2CiD2(OverlappedGossip):
    """A2CiD2: take local steps, and exchange with neighbours in a graph, with a momentum.

    With `asynchronous=False` the ranks exchange in rounds of pairs, and a rank waits for its peer.
    A run is reproducible bit for bit, even if it is resumed. With `asynchronous=True` exchanges are
    overlapped with the steps, and a rank waits for others only in `average_parameters` and
    `finalize`, or if it is `control_interval` to twice as many steps ahead. Use it if ranks differ
    in speed, or if exchanges take a large fraction of the time. All ranks still take the same
    number of steps. A saved state does not contain pending exchanges, so the mean of the ranks'
    parameters changes slightly when the state is loaded.

    The momentum reduces the differences between ranks if the graph has many hops, as a ring has. In
    a complete graph, and between two ranks, it has no benefit.

    Gradients are not averaged: use the learning rate of a single rank, or scale it as for large
    batches.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        topology: the graph of the ranks: "ring", "exponential", "complete", a regular graph such
            as "4-regular", or edges (i, j) that connect all ranks. A rank exchanges with its
            neighbours in the graph only.
        gossip_rate: the number of exchanges per rank and step, at most 1,000, because a step takes
            the time of all its exchanges. With `asynchronous=True` it is an upper limit: an
            exchange takes at least a step.
        asynchronous: whether exchanges are overlapped with the steps.
        eta: replaces the constant of the graph; 0 for gossip without momentum, which needs no
            memory for x~. None for the constant of the graph.
        control_interval: the number of steps from one sum of the signals and comparison of options
            over all ranks to the next; 10 by default. With `asynchronous=True` it is 32 by default,
            and the sums overlap with the steps.
        options: the options of `DistributedOptimizer`.

    Raises:
        ValueError: an option is out of range, or there is no such graph of so many ranks.
    """

    topology: GossipGraph = option("ring", GossipGraph)
    gossip_rate: float = option(1.0, partial(check_above_zero, most=MAX_GOSSIP_RATE))
    asynchronous: bool = option(False, check_flag)
    eta: float | None = option(None, check_at_least_zero)
    control_interval: Any = option(None, partial(check_count, least=1))

    second: Tensor | None = vector(exists=has_exchanges, when=lambda own: own.has_momentum, **OWN)
    """(n,): x~; None without momentum"""
    measured_rate: float = scalar(lambda own: float(own.gossip_rate), **OWN)
    """with `asynchronous`, exchanges per step, a moving average"""
    step_s: float = scalar(0.0, **OWN)
    """with `asynchronous`, the duration of a step, in seconds; 0 until it is measured"""
    last_s: float | None = None
    """when the last step ended; None after a pause"""
    num_before = 0
    """`num_pairs` at the end of the last step"""

    def configure(self) -> None:
        """See `DistributedOptimizer`."""
        world_size = self.group.world_size
        self.has_momentum = self.eta != 0
        # ranks that do not wait for each other make their offers at different steps
        self.is_uniform = not self.asynchronous
        if self.control_interval is None:
            self.control_interval = 32 if self.asynchronous else 10
        super().configure()
        self.edges = self.topology.edges(world_size)
        self.matchings = color_edges(self.edges)
        """the matchings of the rounds, so that each edge is used equally often"""
        if self.asynchronous:
            rates = self.topology.rates(world_size, self.gossip_rate)
        else:
            rates = dict.fromkeys(self.edges, self.gossip_rate / max(1, len(self.matchings)))
        self.momentum = compute_momentum(world_size, rates, self.eta)

    def restart(self) -> None:
        """See `LocalMethod`."""
        self.x = self.parameters
        self.second = self.x.clone() if self.has_momentum else None

    def on_load(self) -> None:
        """See `DistributedOptimizer`."""
        super().on_load()
        if not self.is_inner_only:
            self.x = self.parameters
        # exchanges with parameters from before the load are ignored
        self.num_loads += 1
        self.last_s, self.num_before = None, self.num_pairs

    # --- the events

    def local_step(self) -> None:
        """See `LocalMethod`: the gradient event of x; that of x~ follows in `exchange`."""
        if not self.is_inner_only:
            self.flat.read_parameters(self.x)
        super().local_step()

    @torch.no_grad()
    def apply_gradient(self) -> None:
        """Read the parameters after the local step: the gradient event."""
        after = self.flat.read_parameters(self.flat.scratch())
        if self.second is not None:
            for here, _ in self.flat.tiles():
                self.second[here].add_(after[here] - self.x[here])
        self.x.copy_(after)

    @torch.no_grad()
    def mix(self, time: float) -> None:
        """Mix x and x~ for a time in units of a step."""
        if self.second is None or time <= 0:
            return
        share = -math.expm1(-2 * self.momentum.eta * time) / 2
        for here, _ in self.flat.tiles():
            moved = (self.second[here] - self.x[here]).mul_(share)
            self.x[here].add_(moved)
            self.second[here].sub_(moved)

    def read(self, fragment: Fragment, out: Tensor) -> None:
        """See `LocalMethod`: x."""
        out.copy_(self.x)

    @torch.no_grad()
    def apply(self, fragment: Fragment, mean: Tensor) -> None:
        """See `LocalMethod`: the exchange event, of which x becomes the mean of both ranks."""
        if not fragment.is_finite:
            self.replace(mean)
            return
        if self.second is not None:
            for here, _ in self.flat.tiles():
                # x - mean is half of the difference
                half = self.x[here] - mean[here]
                self.second[here].add_(half, alpha=-2 * self.momentum.alpha)
        self.x.copy_(mean)

    @torch.no_grad()
    def exchange_with(self, own: Tensor, other: Tensor) -> None:
        """See `OverlappedGossip`: the exchange event of parameters that may be older than x."""
        for here, _ in self.flat.tiles():
            difference = own[here] - other[here]
            self.x[here].add_(difference, alpha=-0.5)
            if self.second is not None:
                self.second[here].add_(difference, alpha=-self.momentum.alpha)

    def replace(self, other: Tensor) -> None:
        """See `OverlappedGossip`."""
        self.x.copy_(other)
        if self.second is not None:
            self.second.copy_(other)
        delete_nonfinite_state(self.state, self.flat.parameters)

    # --- when the ranks exchange

    def take_part(self, step: int) -> Algorithm[None]:
        """See `PartialExchanges`: the events of the time from `step` - 1 to `step`."""
        yield from self._overlap_exchanges() if self.asynchronous else self._take_rounds(step - 1)
        self.flat.write_parameters(self.x)

    def _take_rounds(self, begin: int) -> Algorithm[None]:
        """Exchange in rounds; round r, from 0, is at time (r + 1/2) / rate."""
        now = 0.0
        self.apply_gradient()
        for number in range(self._rounds_until(begin), self._rounds_until(begin + 1)):
            time = (number + 0.5) / self.gossip_rate - begin
            self.mix(time - now)
            now = time
            pairs = self.matchings[number % len(self.matchings)]
            peer = find_peer(pairs, self.group.rank)
            self.num_pairs += peer is not None
            yield from self.average_pair(peer)
        self.mix(1.0 - now)

    def _rounds_until(self, step: int) -> int:
        """Return the number of rounds in the steps up to this one."""
        return math.floor(self.gossip_rate * step + 0.5)

    def _overlap_exchanges(self) -> Algorithm[None]:
        """Process messages and make offers; see `gcnzc.optim.offers`.

        The unit of time is the duration of a step of this rank: an exponential moving average, in
        which the newest step has the weight 1/2. eta is proportional to the exchanges per step, and
        was computed for `gossip_rate` of them. If fewer exchanges end, mixing is reduced in
        proportion.
        """
        yield from self.open_channels()
        self.apply_gradient()
        time = self._time_since_last((yield Now()))
        self.mix(time * min(1.0, self.measured_rate / self.gossip_rate))
        yield from self.process_messages()
        yield from self.make_offers(self.gossip_rate)
        applied, self.num_before = self.num_pairs - self.num_before, self.num_pairs
        self.measured_rate += RATE_WEIGHT * (applied - self.measured_rate)

    def _time_since_last(self, now: float) -> float:
        """Return the time since the last call in steps, and update the duration of a step."""
        last, self.last_s = self.last_s, now
        if last is None or now <= last:
            return 1.0
        elapsed = now - last
        self.step_s = (self.step_s + elapsed) / 2 if self.step_s else elapsed
        return min(elapsed / self.step_s, MAX_TIME)

    # --- collectives of all ranks, if the ranks do not wait for each other

    @identify_caller
    def pause_exchanges_algorithm(self) -> Algorithm[None]:
        """See `LocalMethod`; processes messages until all ranks have called this method."""
        yield from super().pause_exchanges_algorithm()
        if self.asynchronous and not self.is_inner_only:
            # the pause does not count as the time of a step
            self.last_s = None
            yield from self.open_channels()
            self.flat.read_parameters(self.x)
            yield from self.wait_for_all((yield Start(Sum(torch.zeros(1)), self.channel)))

    def apply_pending_algorithm(self) -> Algorithm[None]:
        """See `LocalMethod`: end the exchanges with all ranks, until the next step."""
        if self.asynchronous:
            yield from self.open_channels()
            self.flat.read_parameters(self.x)
            yield from super().apply_pending_algorithm()
            yield from self.close()
            self.flat.write_parameters(self.x)

    @property
    def state_bytes(self) -> int:
        """See `DistributedOptimizer`; includes x, which is kept so that events need no memory."""
        return super().state_bytes + self.x.nbytes


class MomentumConstants(NamedTuple):
    """The constants of A2CiD2's momentum, from section 3 of Nabli, Belilovsky and Oyallon (2023).

    `compute_momentum` computes them from a graph.
    """

    eta: float
    """how fast x and x~ mix, per step; 0 for gossip without momentum"""
    alpha: float
    """alpha~, the factor of an exchange's difference in x~; it is 1/2 in x"""


def compute_momentum(
    world_size: int, rates: Mapping[Edge, float], eta: float | None = None
) -> MomentumConstants:
    """Return the constants for exchanges at given rates over the edges of a connected graph.

    Args:
        world_size: W.
        rates: the exchanges per step of each edge.
        eta: replaces the computed value; None to compute it.
    """
    if world_size == 1 or eta == 0:
        return MomentumConstants(0.0, 0.5)
    matrix = laplacian(world_size, rates, rates)
    chi_1, chi_2 = inverse_connectivity(matrix), maximal_resistance(matrix, rates)
    computed = 1 / (2 * (chi_1 * chi_2) ** 0.5)
    return MomentumConstants(computed if eta is None else eta, (chi_1 / chi_2) ** 0.5 / 2)
