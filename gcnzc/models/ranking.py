"""Rank the destinations of held-out edges among all nodes of their type, and score the ranks.

Notation: E edges, U sources, N nodes of the destination type, D columns of an embedding.
"""

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gcnzc.models.link import PAIRS_PER_CHUNK
from gcnzc.models.metrics import HITS_K, check_rankable, count_better

# K of recall@K and hit_rate@K
RECALL_K = (10, 20, 50)


class HeldOutEdges:
    """Edges to rank among all nodes of the destination type, except those that are known already.

    The candidates for a source are all N nodes without its known destinations. Destinations that
    are held out are candidates, even if they are also known. With sources and destinations of one
    type, a source is not a candidate for itself.

    Args:
        edges: (2, E) int64 sources and destinations to rank; may have duplicates.
        known: (2, any) int64 known edges.
        num_destinations: N.
        is_one_type: whether sources and destinations have the same type.

    Attributes:
        edges: the edges, sorted by source.
        sources: (U,) the different sources, ascending.
    """

    def __init__(
        self, edges: Tensor, known: Tensor, num_destinations: int, *, is_one_type: bool = False
    ) -> None:
        # sources whose scores are computed at once
        self._step = max(1, PAIRS_PER_CHUNK // num_destinations)
        self.edges = edges[:, edges[0].argsort(stable=True)]
        self.sources, self._rows = self.edges[0].unique_consecutive(return_inverse=True)
        if is_one_type:
            known = torch.cat([known, self.sources.expand(2, -1)], dim=1)
        self._held_out = _group(self.edges.unique(dim=1), self.sources)
        self._known = _group(known, self.sources)

    def compute_ranks(
        self, spans: Sequence[tuple[int, int]], score: Callable[[Tensor], Tensor]
    ) -> Generator[Tensor, None, None]:
        """Yield the ranks of ranges of the sorted edges.

        With ties, a rank is the mean of the best and the worst possible rank.

        Args:
            spans: ranges (begin, end) of positions of sorted edges.
            score: `score(rows)` returns the (n, N) scores of sources, given their (n,) positions in
                `sources`.

        Yields:
            For each range (end - begin, 2) float64, from 1: the rank of an edge among the
            candidates without the other held-out destinations of its source, and its rank among
            all candidates.

        Raises:
            ValueError: a score is NaN or infinite.
        """
        for begin, end in spans:
            rows = self._rows[begin:end]
            first, last = int(rows[0]), int(rows[-1]) + 1
            items, found = self.edges[1, begin:end], []
            for own in torch.arange(first, last).split(self._step):
                bounds = torch.searchsorted(rows, torch.stack([own[0], own[-1] + 1]))
                edges = slice(*bounds.tolist())
                found.append(self._ranks_of(score(own), own, rows[edges] - own[0], items[edges]))
            yield torch.cat(found)

    def _ranks_of(self, scores: Tensor, own: Tensor, rows: Tensor, items: Tensor) -> Tensor:
        """Return the (n, 2) ranks of edges.

        Args:
            scores: (sources, N) scores of all nodes; they are changed.
            own: positions of the sources in `sources`.
            rows: (n,) rows of the edges in `scores`.
            items: (n,) destinations of the edges.
        """
        check_rankable("scores", scores)
        held_rows, held_items = self._held_out.of(own)
        held_scores = scores[held_rows, held_items]
        scores[self._known.of(own)] = -torch.inf
        scores[held_rows, held_items] = held_scores
        ranks = []
        for row, item in zip(rows.split(self._step), items.split(self._step), strict=True):
            of_edge = scores[row, item]
            everything = count_better(scores[row], of_edge)
            # the held-out destinations of each edge's source, padded to the longest list
            bounds = torch.searchsorted(held_rows, torch.stack([row, row + 1]))
            columns = bounds[0][:, None] + torch.arange(int((bounds[1] - bounds[0]).max()))
            is_own = columns < bounds[1][:, None]
            values = held_scores[columns.clamp(max=len(held_scores) - 1)]
            others = count_better(values.masked_fill(~is_own, -torch.inf), of_edge)
            # both counts include 0.5 for the edge, which equals itself
            ranks.append(torch.stack([everything - others + 1, everything + 0.5], dim=1))
        return torch.cat(ranks)


class _Groups(NamedTuple):
    """Destinations by source."""

    indptr: Tensor  # (U + 1,)
    items: Tensor

    def of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions in `rows`, consecutive sources, and the destinations of each."""
        first, last = int(rows[0]), int(rows[-1]) + 1
        bounds = self.indptr[first : last + 1]
        return (
            torch.arange(last - first).repeat_interleave(bounds.diff()),
            self.items[int(bounds[0]) : int(bounds[-1])],
        )


def _group(edges: Tensor, sources: Tensor) -> _Groups:
    """Return the destinations of sources, which are sorted; other edges are left out."""
    edges = edges[:, torch.isin(edges[0], sources)]
    edges = edges[:, edges[0].argsort(stable=True)]
    ends = torch.searchsorted(edges[0].contiguous(), sources, right=True)
    return _Groups(torch.cat([torch.zeros(1, dtype=torch.int64), ends]), edges[1])


def score_ranks(edges: Tensor, ranks: Tensor) -> dict[str, float]:
    """Compute metrics of a ranking of held-out edges.

    Args:
        edges: (2, E) sources and destinations.
        ranks: (E, 2) ranks of `HeldOutEdges.compute_ranks`, in the order of `edges`.

    Returns:
        Values in [0, 1] by metric:

        - `mrr`, the mean over the edges of the inverse rank, and `hits@1`, `hits@3` and `hits@10`,
          the fractions of edges with at most that rank. These compare an edge with no other
          held-out destination of its source;
        - `recall@K` for each K of `RECALL_K`, the mean over the sources of the fraction of their
          held-out destinations with a rank of at most K;
        - `hit_rate@K`, the fraction of sources with at least one such destination.
    """
    result = {"mrr": (1 / ranks[:, 0]).mean().item()}
    result |= {f"hits@{k}": (ranks[:, 0] <= k).double().mean().item() for k in HITS_K}
    # a pair that occurs twice counts once; its ranks are equal
    pairs, numbers = edges.unique(dim=1, return_inverse=True)
    rank = ranks.new_empty(pairs.shape[1])
    rank[numbers] = ranks[:, 1]
    _, source = pairs[0].unique_consecutive(return_inverse=True)
    total = source.bincount().double()
    for k in RECALL_K:
        found = source.bincount((rank <= k).double())
        result[f"recall@{k}"] = (found / total).mean().item()
        result[f"hit_rate@{k}"] = (found > 0).double().mean().item()
    return result
