"""Sample negatives for link prediction: pairs of nodes with random ends.

Notation: E seed edges, S edges of a minibatch, K negatives for each edge, N destination nodes.
"""

import copy
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gcnzc.graph.graph import Graph
from gcnzc.graph.stores import EdgeType
from gcnzc.kernels.sample.exclude import is_sorted, sort_columns
from gcnzc.kernels.sample.negatives import (
    in_batch_negatives,
    sample_negatives,
    sample_timed_negatives,
)

Negatives: TypeAlias = Literal["uniform", "both", "in-batch"]


class NegativeSampler:
    """Sample the negatives of edges of one type.

    Args:
        known: graph with the edges that are not valid negatives.
        edge_type: of the edges.
        kind: how negatives are sampled, see `gcnzc.LinkSampler`.
        num_negatives: K.
        strict: reject negatives that are edges of `known`.
        seed: 64-bit integer key.
        node_times: (N,) int64 times of the destinations; None if all of them are eligible.

    Attributes:
        first: index of the first sampled negative among those of an edge, which selects the random
            numbers.
    """

    def __init__(
        self,
        known: Graph,
        edge_type: EdgeType,
        kind: Negatives,
        num_negatives: int,
        strict: bool,
        seed: int,
        node_times: Tensor | None,
    ) -> None:
        self.edge_type, self.kind, self.num_negatives = edge_type, kind, num_negatives
        self.strict, self.seed, self.first = strict, seed, 0
        store = known.edges(edge_type)
        indptr, indices = store.indptr.numpy(), store.indices.numpy()
        if strict:
            known.check()
            if not is_sorted(indptr, indices):
                indices = sort_columns(indptr, indices)[0]
        self._edges: tuple[Any, Any] = indptr, indices
        self._order: Any = None
        if node_times is not None:
            own = node_times.numpy()
            self._order = np.argsort(own, kind="stable")
            self._times = own[self._order]

    def check_eligible(self, edges: Tensor, times: Tensor) -> None:
        """Check that each edge has a destination that is not later.

        Args:
            edges: (2, E).
            times: (E,) of the edges.

        Raises:
            ValueError: all destinations are later than an edge; the message has its time.
        """
        if self._order is None or not self.num_negatives:
            return
        place = int(times.argmin())
        if times[place] < self._times[0]:
            source, target = edges[:, place].tolist()
            raise ValueError(
                f"all nodes of type {self.edge_type[2]!r} are later than the edge from {source} to "
                f"{target} of {self.edge_type}, whose time is {int(times[place])}, so that it has "
                f"no negative: the earliest node has time {self._times[0]}\n\n"
                "hint: remove such edges; if nodes exist before their times, or these have another "
                "unit, Sampler(..., time='edge') (gcnzc train: --temporal last:time=edge) "
                "ignores them; or build the graph without them"
            )

    def check_negatives(self, edges: Tensor, times: Tensor | None) -> None:
        """Check that each edge has a negative, before a run starts.

        Only sources with as many edges as there are eligible destinations can have none.

        Args:
            edges: (2, E).
            times: (E,) of the edges; None without temporal sampling.

        Raises:
            ValueError: an edge has no valid negative.
        """
        if times is not None:
            self.check_eligible(edges, times)
        if not self.strict or not self.num_negatives or self.kind != "uniform":
            return
        indptr, indices = self._edges
        sources, num_eligible = edges[0].numpy(), np.array(len(indptr) - 1)
        if self._order is not None and times is not None:
            num_eligible = np.searchsorted(self._times, times.numpy(), side="right")
        # a node of the same type is not its own negative
        num_known = np.bincount(indices, minlength=int(sources.max(initial=-1)) + 1)[sources]
        num_known += self.edge_type[0] == self.edge_type[2]
        candidates = np.flatnonzero(num_known >= num_eligible)
        limits = np.broadcast_to(num_eligible, sources.shape)
        keys = np.stack([sources, limits])[:, candidates]
        items = torch.from_numpy(candidates[np.unique(keys, axis=1, return_index=True)[1]])
        one = copy.copy(self)
        one.num_negatives = 1
        one.sample(edges[:, items], items, None if times is None else times[items], 0)

    def sample(self, positives: Tensor, items: Tensor, times: Tensor | None, epoch: int) -> Tensor:
        """Sample the negatives of edges.

        Args:
            positives: (2, S) the edges.
            items: (S,) their indices, which select the random numbers.
            times: (S,) their times; None without temporal sampling.
            epoch: in [0, 2**32).

        Returns:
            (2, S * K) int64, grouped by edge; fewer if they are in-batch negatives.

        Raises:
            ValueError: an edge has no valid negative.
        """
        if not self.num_negatives:
            return positives[:, :0]
        sources, is_bipartite = positives[0].numpy(), self.edge_type[0] != self.edge_type[2]
        if self.kind == "in-batch":
            given = positives.numpy()
            found = in_batch_negatives(*self._edges, given, self.num_negatives, self.strict)
            return torch.from_numpy(found)
        if self._order is None or times is None:
            found = sample_negatives(
                *self._edges,
                sources,
                items.numpy(),
                self.num_negatives,
                self.kind,
                self.strict,
                self.seed,
                epoch,
                is_bipartite,
                self.first,
            )
            return torch.from_numpy(found)
        num_eligible = np.searchsorted(self._times, times.numpy(), side="right")
        found, failed = sample_timed_negatives(
            *self._edges,
            sources,
            items.numpy(),
            self.num_negatives,
            self._order,
            num_eligible,
            self.strict,
            self.seed,
            epoch,
            is_bipartite,
            self.first,
        )
        if failed is not None:
            raise ValueError(
                f"the edge from {sources[failed]} to {int(positives[1, failed])} of "
                f"{self.edge_type}, whose time is {int(times[failed])}, has no negative: the graph "
                f"has edges between its source and each of the {num_eligible[failed]} nodes of "
                f"type {self.edge_type[2]!r} that are not later\n\n"
                "hint: strict=False (gcnzc train: --task link:strict=false) allows negatives "
                "that are edges of the graph"
            )
        return torch.from_numpy(found)
