"""How often each row is read, counted over sampled minibatches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcnzc.features import peer_memory

RANKINGS = ("in-degree", "presampled")


@dataclass(frozen=True, eq=False)
class Presample:
    """In how many minibatches each node was, and what follows for minibatches to come.

    The minibatches are two halves that share no choice, so that one can tell how well a hot set
    does that the other has chosen.
    """

    halves: tuple[Tensor, Tensor]  # (N,) int32 counts of each half, on the host
    batches: int  # M, in each half
    kinds: Tensor  # (N,) int16: class of degree, seeds apart

    @property
    def nodes_per_batch(self) -> float:
        """Mean of the rows that a minibatch needs."""
        return sum(int(half.sum()) for half in self.halves) / (2 * self.batches)

    @cached_property
    def scores(self) -> Tensor:
        """(N,) float32, on the host: the estimated chance of each node to be in a minibatch."""
        first, second = self.halves
        return _chances(first + second, 2 * self.batches, self.kinds)

    def hit_rates(self, sizes: Sequence[int]) -> list[float]:
        """The predicted hit rate of the hot sets of these many rows that `scores` rank highest.

        Each half chooses a set, and the other says how often it would have been hit; the mean of
        both is a little too low for a set that both choose together.
        """
        return self._by_halves(lambda ranking, tell: hit_rates_of(ranking, tell, sizes))

    def own_hit_rates(self, sizes: Sequence[int], gpus: int) -> list[list[float]]:
        """The parts of `hit_rates(sizes)` that each of `gpus` has which split the sets."""
        return self._by_halves(lambda ranking, tell: own_hit_rates_of(ranking, tell, sizes, gpus))

    def hit_rates_by(self, scores: Tensor, sizes: Sequence[int]) -> list[float]:
        """The predicted hit rate of hot sets by scores that these minibatches had no part in.

        Args:
            scores: (N,), such as `graph.in_degrees()`.
            sizes: of the hot sets, in rows.
        """
        return hit_rates_of(rank_by_score(scores), self.halves[0] + self.halves[1], sizes)

    def own_hit_rates_by(
        self, scores: Tensor, sizes: Sequence[int], gpus: int
    ) -> list[list[float]]:
        """The parts of `hit_rates_by(scores, sizes)` that each of `gpus` has."""
        return own_hit_rates_of(rank_by_score(scores), self.halves[0] + self.halves[1], sizes, gpus)

    def _by_halves(self, rates: Callable[[Tensor, Tensor], list[Any]]) -> list[Any]:
        """The mean of `rates` of each half's ranking, as told by the other half's counts."""
        first, second = self.halves
        both = [
            np.array(rates(rank_by_score(_chances(choose, self.batches, self.kinds)), tell))
            for choose, tell in ((first, second), (second, first))
        ]
        mean: list[Any] = ((both[0] + both[1]) / 2).tolist()
        return mean


def rank_by_score(scores: Tensor) -> Tensor:
    """(N,) int64: the highest score first, and of equal ones the lower id."""
    return scores.sort(descending=True, stable=True).indices


def hit_rates_of(ranking: Tensor, counts: Tensor, sizes: Sequence[int]) -> list[float]:
    """The shares of `counts` that the first `sizes` of `ranking` have.

    Args:
        ranking: (N,) ids, the hottest first.
        counts: (N,) how often each row is needed.
        sizes: of the hot sets, in rows.
    """
    sums = torch.cat([torch.zeros(1), counts[ranking].cumsum(0, dtype=torch.float64)])
    return (sums[list(sizes)] / sums[-1].clamp(min=1)).tolist()


def own_hit_rates_of(
    ranking: Tensor, counts: Tensor, sizes: Sequence[int], gpus: int
) -> list[list[float]]:
    """For each size, the shares of `counts` that each GPU has of the first of `ranking`.

    Args:
        ranking: (N,) ids, the hottest first.
        counts: (N,) how often each row is needed.
        sizes: of the hot sets, in rows.
        gpus: how many split each of them.
    """
    by_rank = counts[ranking]
    total = max(1, int(by_rank.sum(dtype=torch.int64)))
    return [
        [
            int(part.sum(dtype=torch.int64)) / total
            for part in peer_memory.parts_of(by_rank[:size], gpus)
        ]
        for size in sizes
    ]


def _chances(counts: Tensor, batches: int, kinds: Tensor) -> Tensor:
    """(N,) float32: the mean of each node's chance to be in a minibatch, its count being known.

    Counts are binomial, and the chances of the nodes of a kind have a beta distribution, whose mean
    and spread are those that give the counts' mean and variance.
    """
    seen, kind = counts.numpy(), kinds.numpy()
    size = np.maximum(np.bincount(kind), 1)
    mean = np.bincount(kind, seen) / size
    variance = np.bincount(kind, np.square(seen, dtype=np.float64)) / size - mean**2
    share = mean / batches
    alone = batches * share * (1 - share)  # the variance, if all nodes of the kind had one chance
    with np.errstate(divide="ignore", invalid="ignore"):
        alike = (variance / alone - 1) / (batches - 1)
    # of few nodes, or of those in every minibatch, nothing is known but the mean
    alike = np.clip(np.nan_to_num(alike, nan=0.0), 1e-6, 1.0)
    weight = 1 / alike - 1  # minibatches that the kind's mean counts for
    chance = (seen + (weight * share)[kind]) / (batches + weight[kind])
    return torch.from_numpy(chance.astype(np.float32))
