"""In-edges of one layer's targets, with the aggregations over them.

Notation: S sources, T targets (destination nodes), E edges, H heads, F columns (of a head). In a
block of all edge types, C columns: one for each destination and each edge type into its type.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gcnzc.kernels.aggregate import aggregate, aggregate_with_targets, sum_dtype
from gcnzc.kernels.aggregate.degree_scales import gcn_scales, gcn_scales_reference, scale_dtype
from gcnzc.kernels.aggregate.dot_attention import dot_attention
from gcnzc.kernels.aggregate.dropout import dropout as drop
from gcnzc.kernels.aggregate.edge_softmax import edge_softmax
from gcnzc.kernels.aggregate.gat import gat_aggregate
from gcnzc.kernels.aggregate.gatv2 import gatv2_aggregate
from gcnzc.kernels.aggregate.weighted import weighted_spmm
from gcnzc.sampling.hetero import HeteroBlock


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
        self, rows_SHF: Tensor, scores: Tensor, target_scores: Tensor, **training: Any
    ) -> Tensor:
        """Return GAT's weighted sums, see `gcnzc.kernels.aggregate.gat`.

        Args:
            rows_SHF: (S, H, F) projected rows of the sources; or (S, 1, F), a row for all heads.
            scores: (S, H) terms of the sources in the attention scores.
            target_scores: (T, H) terms of the targets.
            training: `dropout`, the probability of an attention weight to be zeroed, and the
                random `seed` of the dropout.

        Returns:
            (T, H, F).
        """
        training["self_index"] = self.self_index
        return gat_aggregate(self.indptr, self.indices, rows_SHF, scores, target_scores, **training)

    def gatv2_aggregate(
        self, rows_SHF: Tensor, targets_THF: Tensor, attention_HF: Tensor, **training: Any
    ) -> Tensor:
        """Return GATv2's weighted sums, see `gcnzc.kernels.aggregate.gatv2`.

        Args:
            rows_SHF: (S, H, F) projected rows of the sources.
            targets_THF: (T, H, F) projected rows of the targets.
            attention_HF: (H, F) attention vectors.
            training: `dropout`, the probability of an attention weight to be zeroed, and the
                random `seed` of the dropout.

        Returns:
            (T, H, F).
        """
        training["self_index"] = self.self_index
        return gatv2_aggregate(
            self.indptr, self.indices, rows_SHF, targets_THF, attention_HF, **training
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


@dataclass(frozen=True)
class TypedEdges:
    """In-edges of a block of all edge types, with the aggregations over them.

    Rows and columns are those of `HeteroBlock`. A subclass in `gcnzc.models.export` uses torch's
    operations.
    """

    block: HeteroBlock

    def mean(self, rows: Tensor) -> Tensor:
        """Return the (C, F) means of the rows of in-neighbours; zeros without in-neighbours.

        Args:
            rows: (S, F) rows of the sources of all node types.
        """
        indptr = self.block.indptr
        scale = 1 / indptr.diff().clamp(min=1).to(scale_dtype(rows.dtype))
        return aggregate(indptr, self.block.indices, rows, None, scale)

    def gat_aggregate(
        self, rows: Tensor, scores: Tensor, target_scores: Tensor, *, dropout: float, seed: int
    ) -> Tensor:
        """Return GAT's weighted sums, with a softmax over the in-edges of each column.

        Args:
            rows: (S, F) rows of the sources of all node types.
            scores: (pairs of the block, H) terms of the sources in the attention scores.
            target_scores: (C, H) terms of the columns.
            dropout: probability of an attention weight to be zeroed.
            seed: random seed of the dropout.

        Returns:
            (C, H, F).
        """
        block = self.block
        # the weights of bfloat16 and float16 scores stay float32
        dtype, _ = sum_dtype(scores)
        weight = edge_softmax(block.indptr, block.pairs, scores.to(dtype), target_scores.to(dtype))
        if dropout:
            weight = drop(weight, dropout, seed)
        return weighted_spmm(block.indptr, block.indices, weight, rows.unsqueeze(1))

    def dot_attention(self, keys: Tensor, queries: Tensor, values: Tensor) -> Tensor:
        """Return the sums of values, with a softmax over the in-edges of each destination.

        Args:
            keys: (S, H, F) of the sources of all node types.
            queries: (C, H, F).
            values: (S, H, F).

        Returns:
            (C, H, F).
        """
        block = self.block
        owners = block.destination_indptr
        return dot_attention(block.indptr, block.indices, owners, keys, queries, values)
