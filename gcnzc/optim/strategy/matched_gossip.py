"""Gossip in rounds: in each round, pairs of neighbours in a graph take the mean of their vectors.

All ranks compute the pairs of a round from its number, so a run is reproducible bit for bit. A rank
waits for its peer, but not for other ranks.

Notation: W ranks, n elements of the flat parameter vector.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm, SendReceive
from gcnzc.exchange.topology import Edge, color_edges
from gcnzc.kernels.finite import can_be_squared
from gcnzc.optim.strategy.gossip_graph import GossipGraph
from gcnzc.optim.strategy.recipe import Exchange, Policy
from gcnzc.optim.strategy.strategy import Strategy
from gcnzc.optim.strategy.two_variables import TwoVariables
from gcnzc.optim.validation import check_above_zero


class GossipRounds(Policy):
    """Exchange in rounds at equal intervals of time, whose unit is a step.

    Step t is the time from t - 1 to t, with the gradient event at its beginning. Round r, from 0,
    is at time (r + 1/2) / rate.

    Args:
        rate: the number of rounds per step.
        update: the vectors of this rank.
        exchange: the exchange, which has the pairs of each round.
    """

    def __init__(self, rate: float, update: TwoVariables, exchange: "MatchedPairs") -> None:
        check_above_zero("gossip_rate", rate)
        self.rate, self.update, self.exchange = rate, update, exchange

    def describe(self) -> str:
        """See `Policy`."""
        return f"gossip_rate={self.rate}"

    def observe(self) -> None:
        """See `Policy`."""
        self.update.observe()

    def rounds_until(self, step: int) -> int:
        """Return the number of rounds in the steps up to this one."""
        return math.floor(self.rate * step + 0.5)

    def is_due(self) -> Algorithm[bool]:
        """See `Policy`; without communication."""
        steps = self.strategy.steps
        return self.rounds_until(steps) > self.rounds_until(steps - 1)
        yield

    def after_step(self) -> Algorithm[None]:
        """See `Policy`: the events of this step."""
        strategy, update = self.strategy, self.update
        begin, now = strategy.steps - 1, 0.0
        update.apply_gradient()
        for number in range(self.rounds_until(begin), self.rounds_until(begin + 1)):
            time = (number + 0.5) / self.rate - begin
            update.mix(time - now)
            now, self.exchange.round = time, number
            yield from strategy.synchronize_algorithm()
        update.mix(1.0 - now)
        update.write()


class MatchedPairs(Exchange):
    """The mean of pairs of ranks that are neighbours in a graph.

    If the vector of one rank is not finite, that rank takes the vector of the other.

    Args:
        graph: the graph. The rounds use its matchings of `color_edges` in turn, so that each edge
            is used equally often.
    """

    def __init__(self, graph: GossipGraph) -> None:
        self.graph = graph
        self.round = 0
        """the number of the next round"""
        self.num_exchanges = 0
        """the number of rounds in which this rank had a peer"""

    def attach(self, strategy: Strategy) -> None:
        """See `RecipePart`."""
        super().attach(strategy)
        self.cycle = color_edges(self.graph.edges(strategy.group.world_size))

    def describe(self) -> str:
        """See `Exchange`."""
        return f"topology={self.graph.topology!r}"

    def rates(self, world_size: int, rate: float) -> dict[Edge, float]:
        """Return by edge the exchanges per step, for `rate` rounds per step."""
        edges = self.graph.edges(world_size)
        return dict.fromkeys(edges, rate / max(1, len(color_edges(edges))))

    def pairs(self, number: int) -> Sequence[Edge]:
        """Return the matching of a round, the same on all ranks."""
        return self.cycle[number % len(self.cycle)]

    def peer(self, number: int) -> int | None:
        """Return the peer of this rank in a round; None if it has none."""
        rank = self.strategy.group.rank
        pair = next((each for each in self.pairs(number) if rank in each), None)
        return None if pair is None else sum(pair) - rank

    def mean(self, values: Tensor) -> Algorithm[Tensor | None]:
        """See `Exchange`: the mean over this rank and its peer of the current round."""
        strategy = self.strategy
        count, rank = strategy.recipe.update.num_elements, strategy.group.rank
        # the elements, and whether they are finite and can be squared
        sent = values[: count + 1]
        peer = self.peer(self.round)
        if peer is None:
            # collectives must be the same on all ranks
            yield SendReceive(sent[:0], rank)
            return None
        self.num_exchanges += 1
        sent[count] = can_be_squared(sent[:count])
        received = yield SendReceive(sent, peer)
        is_own_usable, is_other_usable = torch.stack([sent[count], received[count]]).tolist()
        strategy.is_counted = bool(is_own_usable)
        for each, is_usable in ((rank, is_own_usable), (peer, is_other_usable)):
            if not is_usable:
                strategy.record_drop(f"the parameters of rank {each} are not finite or too large")
        if not is_other_usable:
            return None
        own, other = sent[:count], received[:count]
        return other if not is_own_usable else own.add_(other).mul_(0.5)
