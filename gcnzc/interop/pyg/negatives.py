"""Sample negative nodes of one type, not later than the edges that they are negatives of."""

import math

import torch
from torch import Tensor


class NegativeNodes:
    """The nodes of one type, from which negative nodes are sampled with replacement.

    Args:
        num_nodes: N.
        weight: (N,) weights, at least 0. Default: the same for all nodes.
        times: (N,) int64 times of the nodes; None if they have none.

    Raises:
        ValueError: there is not one weight for each node.
    """

    def __init__(self, num_nodes: int, weight: Tensor | None, times: Tensor | None) -> None:
        if weight is not None and len(weight) != num_nodes:
            raise ValueError(
                f"neg_sampling has {len(weight)} weights for {num_nodes} nodes\n\n"
                "hint: one weight for each node"
            )
        self.num_nodes, self.weight = num_nodes, None if weight is None else weight.cpu()
        self._order = self._times = None
        if times is not None:
            self._times, self._order = times.sort(stable=True)
            if self.weight is not None:
                self._totals = self.weight.double()[self._order].cumsum(0)

    def sample(
        self, num_edges: int, amount: float, times: Tensor | None, random: torch.Generator
    ) -> Tensor:
        """Sample `ceil(num_edges * amount)` nodes, (M,) int64; node i is of edge i % num_edges.

        Args:
            num_edges: S.
            amount: negatives for each edge.
            times: (S,) int64 times of the edges. If all nodes are later, the earliest is sampled.
            random: generates the random numbers.
        """
        count = math.ceil(num_edges * amount)
        if times is None or self._times is None or self._order is None:
            if self.weight is None:
                return torch.randint(self.num_nodes, (count,), generator=random)
            return torch.multinomial(self.weight, count, replacement=True, generator=random)
        uniform = torch.rand(count, generator=random, dtype=torch.float64)
        limits = times[torch.arange(count) % max(num_edges, 1)]
        # the nodes that are not later are the first ones by time
        num_eligible = torch.searchsorted(self._times, limits, right=True)
        last = (num_eligible - 1).clamp(min=0)
        if self.weight is None:
            chosen = (uniform * num_eligible).long()
        else:
            chosen = torch.searchsorted(self._totals, uniform * self._totals[last], right=True)
        return self._order[torch.minimum(chosen, last)]
