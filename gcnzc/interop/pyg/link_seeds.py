"""The endpoints of a minibatch's edges and of their negatives, as the seeds of a subgraph."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gcnzc.interop.options import unique_with_inverse


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
