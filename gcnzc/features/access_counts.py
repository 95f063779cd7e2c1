"""Access counts of rows over sampled minibatches, and the hit rates that they predict."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcnzc.features import peer_memory


@dataclass(frozen=True, eq=False)
class Presample:
    """Access counts of nodes over sampled minibatches, returned by `gcnzc.presample`.

    The minibatches form two halves that are sampled independently. The hit rate of a cache that one
    half ranks is measured on the other half, so that the prediction is not biased upwards.
    """

    halves: tuple[Tensor, Tensor]  # (N,) int32 counts of each half, on the host
    batches: int  # M, the number of minibatches in each half
    kinds: Tensor  # (N,) int16: bin of each node, by its degree and by whether it is a seed

    @property
    def nodes_per_batch(self) -> float:
        """Mean number of rows in a minibatch."""
        return sum(int(half.sum()) for half in self.halves) / (2 * self.batches)

    @cached_property
    def scores(self) -> Tensor:
        """Estimated probability that a minibatch contains each node, (N,) float32 on the host."""
        first, second = self.halves
        return _estimate_probabilities(first + second, 2 * self.batches, self.kinds)

    def hit_rates(self, sizes: Sequence[int]) -> list[float]:
        """Predict the hit rates of caches of the rows with the highest `scores`.

        Each half ranks the rows for the other half, which measures the hit rate. The mean of both
        is slightly too low for a cache that is ranked by both halves together.

        Args:
            sizes: numbers of cached rows.
        """
        return self._cross_validate(
            lambda ranking, counts: compute_hit_rates(ranking, counts, sizes)
        )

    def own_hit_rates(self, sizes: Sequence[int], gpus: int) -> list[list[float]]:
        """Predict the hit rate of each GPU's own memory, for caches sharded over `gpus` GPUs.

        The rates of all GPUs add up to `hit_rates(sizes)`.
        """
        return self._cross_validate(
            lambda ranking, counts: compute_own_hit_rates(ranking, counts, sizes, gpus)
        )

    def _cross_validate(self, rates: Callable[[Tensor, Tensor], list[Any]]) -> list[Any]:
        """Return the mean of `rates(ranking, counts)`: one half ranks, the other one counts."""
        first, second = self.halves
        both = [
            np.array(
                rates(
                    rank_by_score(_estimate_probabilities(ranked, self.batches, self.kinds)), counts
                )
            )
            for ranked, counts in ((first, second), (second, first))
        ]
        mean: list[Any] = ((both[0] + both[1]) / 2).tolist()
        return mean


def rank_by_score(scores: Tensor) -> Tensor:
    """Return ids by descending score, and of equal scores by ascending id, (N,) int64."""
    return scores.sort(descending=True, stable=True).indices


def compute_hit_rates(ranking: Tensor, counts: Tensor, sizes: Sequence[int]) -> list[float]:
    """Return the fraction of all accesses that go to the first rows of a ranking.

    Args:
        ranking: (N,) ids, most accessed first.
        counts: (N,) number of accesses of each row.
        sizes: numbers of cached rows.
    """
    sums = torch.cat([torch.zeros(1), counts[ranking].cumsum(0, dtype=torch.float64)])
    return (sums[list(sizes)] / sums[-1].clamp(min=1)).tolist()


def compute_own_hit_rates(
    ranking: Tensor, counts: Tensor, sizes: Sequence[int], gpus: int
) -> list[list[float]]:
    """Return, for each size, the fraction of all accesses that go to the rows on each GPU.

    Args:
        ranking: (N,) ids, most accessed first.
        counts: (N,) number of accesses of each row.
        sizes: numbers of cached rows, on all GPUs together.
        gpus: number of GPUs over which the cache is sharded.
    """
    by_rank = counts[ranking]
    total = max(1, int(by_rank.sum(dtype=torch.int64)))
    return [
        [
            int(part.sum(dtype=torch.int64)) / total
            for part in peer_memory.split_round_robin(by_rank[:size], gpus)
        ]
        for size in sizes
    ]


def _estimate_probabilities(counts: Tensor, batches: int, kinds: Tensor) -> Tensor:
    """Return the posterior mean of each node's probability to be in a minibatch, (N,) float32.

    Counts are binomial. The probabilities of the nodes of a class have a beta distribution, whose
    mean and variance are fitted to the mean and variance of the class's counts.
    """
    seen, kind = counts.numpy(), kinds.numpy()
    size = np.maximum(np.bincount(kind), 1)
    mean = np.bincount(kind, seen) / size
    variance = np.bincount(kind, np.square(seen, dtype=np.float64)) / size - mean**2
    share = mean / batches
    # the variance of the counts if all nodes of the class had the same probability
    binomial = batches * share * (1 - share)
    with np.errstate(divide="ignore", invalid="ignore"):
        correlation = (variance / binomial - 1) / (batches - 1)
    # a class of few nodes, or of nodes that are in every minibatch, determines only the mean
    correlation = np.clip(np.nan_to_num(correlation, nan=0.0), 1e-6, 1.0)
    # the prior counts as this many minibatches
    weight = 1 / correlation - 1
    probability = (seen + (weight * share)[kind]) / (batches + weight[kind])
    return torch.from_numpy(probability.astype(np.float32))
