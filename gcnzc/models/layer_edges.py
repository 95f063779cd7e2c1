"""In-edges of one layer's targets, with the aggregations over them.

Notation: S sources, T targets (destination nodes), E edges, H heads, F columns (of a head).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gcnzc.kernels.aggregate import aggregate, aggregate_with_targets
from gcnzc.kernels.aggregate.degree_scales import gcn_scales, gcn_scales_reference
from gcnzc.kernels.aggregate.gat import gat_aggregate
from gcnzc.kernels.aggregate.gatv2 import gatv2_aggregate


@dataclass(frozen=True)
class LayerEdges:
    """In-edges of one layer's T targets, with the aggregations over them.

    The degrees are given if the layer needs them. Subclasses aggregate in other ways: the rows of
    `gcnzc.train.layerwise` may be on disk, and `gcnzc.models.export` uses torch's operations.
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
        """Return the targets' rows.

        Args:
            rows: (S, F) rows of the sources.

        Returns:
            (T, F).
        """
        return rows[: self.num_targets] if self.self_index is None else rows[self.self_index]

    def aggregate(
        self, rows: Tensor, target_scale: Tensor, source_scale: Tensor | None = None
    ) -> Tensor:
        """Return the scaled sums of the rows of in-neighbours, see `gcnzc.kernels.aggregate`.

        Args:
            rows: (S, F) rows of the sources.
            target_scale: (T,) factors of the sums.
            source_scale: (S,) factors of the rows; None for ones.

        Returns:
            (T, F).
        """
        return aggregate(self.indptr, self.indices, rows, source_scale, target_scale)

    def aggregate_with_targets(
        self, rows: Tensor, target_scale: Tensor, source_scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the results of `aggregate` and `target_rows`.

        Args:
            rows, target_scale, source_scale: see `aggregate`.

        Returns:
            (T, F) sums, and (T, F) rows of the targets.
        """
        return self.aggregate(rows, target_scale, source_scale), self.target_rows(rows)

    def gcn_scales(self, row_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the scales of GCN's sums and of the targets' rows, (T,) each.

        See `gcnzc.kernels.aggregate.degree_scales`.

        Args:
            row_dtype: dtype of the rows.
        """
        assert self.target_degrees is not None, "a layer with needs_degrees gets degrees"
        return gcn_scales_reference(self.indptr, self.target_degrees, row_dtype)

    def gat_aggregate(
        self,
        rows_SHF: Tensor,
        scores: Tensor,
        target_scores: Tensor,
        *,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> Tensor:
        """Return GAT's weighted sums, see `gcnzc.kernels.aggregate.gat`.

        Args:
            rows_SHF: (S, H, F) projected rows of the sources; or (S, 1, F), a row for all heads.
            scores: (S, H) terms of the sources in the attention scores.
            target_scores: (T, H) terms of the targets.
            dropout: probability of an attention weight to be zeroed.
            seed: random seed of the dropout.

        Returns:
            (T, H, F).
        """
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
        """Return GATv2's weighted sums, see `gcnzc.kernels.aggregate.gatv2`.

        Args:
            rows_SHF: (S, H, F) projected rows of the sources.
            targets_THF: (T, H, F) projected rows of the targets.
            attention_HF: (H, F) attention vectors.
            dropout: probability of an attention weight to be zeroed.
            seed: random seed of the dropout.

        Returns:
            (T, H, F).
        """
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
class BlockEdges(LayerEdges):
    """In-edges of a block's targets, which are its first T sources; used in training."""

    def aggregate_with_targets(
        self, rows: Tensor, target_scale: Tensor, source_scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `LayerEdges`."""
        return aggregate_with_targets(self.indptr, self.indices, rows, source_scale, target_scale)

    def gcn_scales(self, row_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `LayerEdges`."""
        assert self.target_degrees is not None, "a layer with needs_degrees gets degrees"
        return gcn_scales(self.indptr, self.target_degrees, row_dtype)
