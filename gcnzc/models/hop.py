"""The edges of one layer, and the sums over them.

Notation: S sources, T targets, E edges, H heads, F columns (of a head).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gcnzc.kernels.aggregate import aggregate, aggregate_with_targets
from gcnzc.kernels.aggregate.degree_scales import gcn_scales, gcn_scales_reference
from gcnzc.kernels.aggregate.gat import gat_aggregate
from gcnzc.kernels.aggregate.gatv2 import gatv2_aggregate


@dataclass(frozen=True)
class Hop:
    """The edges of one layer, from S sources to T targets; with degrees if the layer needs them.

    Subclasses aggregate in other ways: the rows of `gcnzc.train.layerwise` may be on disk, and
    `gcnzc.models.export` uses torch's operations.
    """

    indptr: Tensor  # (T + 1,)
    indices: Tensor  # (E,) rows of the sources
    self_index: Tensor | None  # (T,) index of each target among the sources; None: the first T
    source_norms: Tensor | None = None  # (S,) 1 / sqrt(degree + 1)
    target_degrees: Tensor | None = None  # (T,) in the graph, without the self loop

    @property
    def num_targets(self) -> int:
        """The number of targets, T."""
        return self.indptr.shape[0] - 1

    def target_rows(self, rows: Tensor) -> Tensor:
        """Return the rows of the targets, given those of the sources."""
        return rows[: self.num_targets] if self.self_index is None else rows[self.self_index]

    def aggregate(
        self, rows: Tensor, target_scale: Tensor, source_scale: Tensor | None = None
    ) -> Tensor:
        """Return the scaled sums of the rows of in-neighbours, see `gcnzc.kernels.aggregate`."""
        return aggregate(self.indptr, self.indices, rows, source_scale, target_scale)

    def aggregate_with_targets(
        self, rows: Tensor, target_scale: Tensor, source_scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the results of `aggregate` and `target_rows`."""
        return self.aggregate(rows, target_scale, source_scale), self.target_rows(rows)

    def gcn_scales(self, rows: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the scales of GCN's sums and of the targets' own rows, (T,) each.

        See `gcnzc.kernels.aggregate.degree_scales`.
        """
        assert self.target_degrees is not None, "a layer with needs_degrees gets degrees"
        return gcn_scales_reference(self.indptr, self.target_degrees, rows)

    def gat_aggregate(
        self,
        rows_SHF: Tensor,
        scores: Tensor,
        target_scores: Tensor,
        *,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> Tensor:
        """Return GAT's weighted sums, see `gcnzc.kernels.aggregate.gat`."""
        return gat_aggregate(
            self.indptr,
            self.indices,
            rows_SHF,
            scores,
            target_scores,
            self_index=self.self_index,
            dropout=dropout,
            seed=seed,
        )

    def gatv2_aggregate(
        self,
        rows_SHF: Tensor,
        targets_THF: Tensor,
        attention_HF: Tensor,
        *,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> Tensor:
        """Return GATv2's weighted sums, see `gcnzc.kernels.aggregate.gatv2`."""
        return gatv2_aggregate(
            self.indptr,
            self.indices,
            rows_SHF,
            targets_THF,
            attention_HF,
            self_index=self.self_index,
            dropout=dropout,
            seed=seed,
        )


@dataclass(frozen=True)
class BlockHop(Hop):
    """The edges of a block, whose first T sources are the targets; used in training."""

    def aggregate_with_targets(
        self, rows: Tensor, target_scale: Tensor, source_scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Hop`."""
        return aggregate_with_targets(self.indptr, self.indices, rows, source_scale, target_scale)

    def gcn_scales(self, rows: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `Hop`."""
        assert self.target_degrees is not None, "a layer with needs_degrees gets degrees"
        return gcn_scales(self.indptr, self.target_degrees, rows)
