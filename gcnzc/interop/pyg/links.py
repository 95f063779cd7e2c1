"""The seeds of link prediction with PyG's semantics: edges, and negative edges."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gcnzc.interop.options import unique_with_inverse
from gcnzc.interop.pyg.importing import import_pyg
from gcnzc.system.arguments import check_number, describe

# maximum of `neg_sampling_ratio`
MAX_NEGATIVES = 2**31


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
            raise ValueError(f"neg_sampling has {len(weight)} weights for {num_nodes} nodes")
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


@dataclass(frozen=True)
class LinkSeeds:
    """The seeds of a minibatch of S edges; tensors are int64 on the host.

    Without disjoint subgraphs each node is one seed. In disjoint subgraphs each endpoint is a seed
    of its own.

    Attributes:
        nodes: ids of the seeds, by node type.
        src: positions in the seeds of the sources of the edges, then of the negative ones.
        dst: positions of the destinations.
        edges: for each source and then each destination, the number in [0, S) of its edge, or of
            the edge that it is a negative of. In disjoint subgraphs of each seed.
        times: times of the seeds, for temporal sampling.
        num_edges: S.
        disjoint: whether each endpoint is a seed of its own.
    """

    nodes: dict[str, Tensor]
    src: Tensor
    dst: Tensor
    edges: Tensor
    times: Tensor | None
    num_edges: int
    disjoint: bool

    @property
    def positive(self) -> Tensor:
        """Positions of the destinations of the edges, (S,)."""
        return self.dst[: self.num_edges]

    @property
    def negative_by_edge(self) -> Tensor:
        """Positions of the negative destinations, (S,) or (S, A) for A negatives of each edge."""
        negative = self.dst[self.num_edges :]
        # in disjoint subgraphs node i is a negative of edge i % S, as in PyG
        by_edge = (
            negative.view(-1, self.num_edges).t()
            if self.disjoint
            else negative.view(self.num_edges, -1)
        )
        return by_edge.reshape(self.num_edges, -1).squeeze(-1)


def link_seeds(
    edges: Tensor,
    negatives: Sequence[Tensor | None],
    node_types: tuple[str, str],
    times: Tensor | None,
    disjoint: bool,
) -> LinkSeeds:
    """Return the seeds of a minibatch.

    Args:
        edges: (2, S) the edges of the minibatch.
        negatives: negative sources and negative destinations; None for none.
        node_types: types of the sources and of the destinations.
        times: (S,) times of the edges, for temporal sampling, which is always disjoint.
        disjoint: make each endpoint a seed of its own.
    """
    num_edges = edges.shape[1]
    ends = [
        own if others is None else torch.cat([own, others])
        for own, others in zip(edges, negatives, strict=True)
    ]
    is_one_type = node_types[0] == node_types[1]
    nodes = (
        {node_types[0]: torch.cat(ends)}
        if is_one_type
        else dict(zip(node_types, ends, strict=True))
    )
    numbers = torch.cat([torch.arange(len(own)) % max(num_edges, 1) for own in ends])
    if disjoint:
        local = [torch.arange(len(own)) for own in nodes.values()]
    else:
        unique = {kind: unique_with_inverse(own) for kind, own in nodes.items()}
        nodes = {kind: found for kind, (found, _) in unique.items()}
        local = [inverse for _, inverse in unique.values()]
    src, dst = local[0].split([len(own) for own in ends]) if is_one_type else local
    seed_times = None if times is None else times[numbers]
    return LinkSeeds(nodes, src, dst, numbers, seed_times, num_edges, disjoint)


def cast_negative_sampling(given: Any, ratio: Any) -> Any:
    """Return PyG's `NegativeSampling` for the arguments `neg_sampling` and `neg_sampling_ratio`."""
    NegativeSampling = import_pyg().sampler.NegativeSampling
    if ratio is not None:
        hint = "negatives for each edge, 0 or more"
        ratio = check_number(
            "neg_sampling_ratio", ratio, lambda ratio: 0 <= ratio < MAX_NEGATIVES, hint
        )
    try:
        return NegativeSampling("binary", ratio) if ratio else NegativeSampling.cast(given)
    # what `cast` raises for values that it cannot convert
    except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
        raise ValueError(
            f"neg_sampling is {describe(given)}: {error or type(error).__name__}"
        ) from error
