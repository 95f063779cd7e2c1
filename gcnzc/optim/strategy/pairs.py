"""Exchanges of pairs of ranks: in each round a rank averages with one peer.

    c    <- k random indices, equal on all ranks
    x_i[c] <- (x_i[c] + x_j[c]) / 2                  j: the peer of rank i in a matching

Only the k values are sent. Each pair keeps the sum of its parameters, so the mean of all ranks does
not change.

Notation: n elements of the flat parameter vector, k of them exchanged.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm, Receive, Send, SendReceive
from gcnzc.exchange.topology import Edge, find_peer
from gcnzc.kernels.codec.random_indices import draw_indices
from gcnzc.kernels.finite import are_finite, can_be_squared
from gcnzc.optim.finite_gradients import delete_nonfinite_state
from gcnzc.optim.strategy.recipe import Exchange, RecipePart, Update
from gcnzc.optim.validation import check_range

if TYPE_CHECKING:
    from gcnzc.optim.strategy.strategy import Strategy


class Matching(RecipePart, ABC):
    """Chooses the pairs of ranks of each round, equal on all ranks; a part of `Pairs`."""

    @abstractmethod
    def describe(self) -> str:
        """Return the options, which must be equal on all ranks, as text."""

    @abstractmethod
    def choose(self, round: int) -> Algorithm[list[Edge]]:
        """Return the pairs of a round, equal on all ranks.

        Args:
            round: the number of exchanges so far; each round is chosen once, in order.
        """


class Pairs(Exchange):
    """The mean of this rank and its peer in a matching, at random indices.

    The indices are the same on all ranks. A rank whose vector has an element that is not finite, or
    too large to be squared, sends NaN instead of the values. Its peer then sends it the whole
    vector, and does not change its own. If both ranks have such vectors, neither vector changes.

    Args:
        matching: chooses the pairs.
        density: the fraction of exchanged elements, in (0, 1]; at least one element is exchanged.
        seed: random seed of the indices.

    Raises:
        ValueError: `density` is out of range.
    """

    def __init__(self, matching: Matching, density: float = 1.0, seed: int = 0) -> None:
        check_range(
            "density",
            density,
            lambda share: 0 < share <= 1,
            "the fraction of elements to exchange, above 0 and at most 1",
        )
        self.matching, self.density, self.seed = matching, density, seed
        self.children = (matching,)
        self.pairs: list[Edge] = []
        """the pairs of ranks in the last exchange, equal on all ranks"""

    def attach(self, strategy: "Strategy") -> None:
        """See `RecipePart`."""
        super().attach(strategy)
        count = strategy.recipe.update.num_elements
        self.num_exchanged = min(max(round(self.density * count), 1), count)
        """k, the number of exchanged elements"""

    def describe(self) -> str:
        """See `Exchange`."""
        return f"density={self.density}, {self.matching.describe()}"

    def indices(self) -> Tensor | None:
        """Return the indices (k,) of the next exchange, equal on all ranks; None for all."""
        count = self.strategy.recipe.update.num_elements
        if self.num_exchanged == count:
            return None
        found = draw_indices(count, self.num_exchanged, self.seed, self.strategy.num_exchanges)
        return found.to(self.strategy.flat_params.device)

    def mean(self, values: Tensor) -> Algorithm[Tensor | None]:
        """See `Exchange`: the vector (n,) of this rank, with means at the exchanged indices.

        None if this rank is idle, or its peer's vector is not finite.
        """
        strategy = self.strategy
        own = values[: strategy.recipe.update.num_elements]
        self.pairs = yield from self.matching.choose(strategy.num_exchanges)
        rank = strategy.group.rank
        peer = find_peer(self.pairs, rank)
        indices = self.indices()
        is_finite = strategy.is_counted = bool(can_be_squared(own))
        sent = own.clone() if indices is None else own[indices]
        if not is_finite:
            sent.fill_(torch.nan)
        # all ranks make the same request; an idle rank with itself
        received = yield SendReceive(sent, rank if peer is None else peer)
        if peer is None:
            return None
        # a rank whose vector is not finite has sent only NaN
        is_peer_finite = bool(are_finite(received[:1]))
        if is_finite and is_peer_finite:
            sent.add_(received).div_(2)
            return sent if indices is None else own.index_copy_(0, indices, sent)
        bad = [each for each, is_good in ((rank, is_finite), (peer, is_peer_finite)) if not is_good]
        names = " and ".join(map(str, sorted(bad)))
        strategy.record_drop(f"the parameters of rank {names} are not finite or too large")
        if is_finite:
            yield Send(own, peer)
        elif is_peer_finite:
            return (yield Receive(own, peer))
        return None


class PairMean(Update):
    """Exchange the parameters, and set those of this rank to the mean with its peer."""

    def read(self, out: Tensor) -> None:
        """See `Update`."""
        self.strategy.flat_params.read_parameters(out)

    def apply(self, mean: Tensor) -> Algorithm[None]:
        """See `Update`; the ranks of other pairs have other parameters."""
        strategy = self.strategy
        strategy.flat_params.write_parameters(mean)
        if not strategy.is_counted:
            delete_nonfinite_state(strategy.state, strategy.flat_params.parameters)
        return
        yield
