"""Compute one layer of a model for many nodes, with all their neighbours and rows in memory."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from gcnzc.exchange.long_work import joint_work
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.kernels.aggregate.degree_scales import inverse_sqrt_degrees, scale_dtype
from gcnzc.models.layer_edges import LayerEdges
from gcnzc.models.layers import Layer
from gcnzc.models.stack import Model, parameter_dtype
from gcnzc.sampling.neighbor import Sampler
from gcnzc.train.layerwise.ranges import (
    assign_equal_ranges,
    degrees_of,
    ids_of_range,
    in_edges,
    row_index,
)
from gcnzc.train.layerwise.workers import MemoryRows, Workers


class FullLayer:
    """Computes one layer of a model for many nodes, with all their neighbours.

    On the CPU, rows are aggregated in place if they are projected, or dense, on the host and of the
    model's dtype. Otherwise the rows of the sources are gathered for each range of targets.

    Args:
        model: the model.
        index: index of the layer.
        graph: the whole graph.
        table: the layer's input rows.
        row_of: (N,) the row index of each node in `table`; None if that is the node's id.
        device: device of the model.
    """

    def __init__(
        self,
        model: Model,
        index: int,
        graph: Graph,
        table: FeatureTable,
        row_of: Tensor | None,
        device: torch.device,
    ) -> None:
        self.model, self.index, self.graph, self.device = model, index, graph, device
        self.layer = cast(Layer, model.layers[index])
        self.dtype = parameter_dtype(model)
        self.table, self.row_of = table, row_of
        # rows are projected before the aggregation if that makes them smaller
        is_smaller = self.layer.heads * self.layer.out_features < self.layer.in_features
        self.is_projected = is_smaller or self.layer.must_project_first
        # a gather also dequantizes rows and converts their dtype
        has_same_dtype = table.is_readable and table.rows.dtype == self.dtype
        is_readable = has_same_dtype and not table.rows.is_cuda and not model.transforms_inputs
        self.is_in_place = device.type == "cpu" and (self.is_projected or is_readable)
        self.neighbours = Sampler(graph, [-1])
        # the rows that are aggregated: input rows, or projected rows
        self.aggregated, self.aggregated_row_of = table, row_of
        self.scores = torch.empty(0, 0)
        self.norms: Tensor | None = None

    def prepare_sources(self, sources: Tensor | None, batch_nodes: int, workers: Workers) -> None:
        """Compute the projected rows, attention scores and norms of the sources.

        Args:
            sources: (S,) int64 ids of the nodes that are sources; None for all nodes.
            batch_nodes: maximum number of nodes that are computed at a time.
            workers: the workers among which the sources are divided.
        """
        if not (self.is_projected or self.is_in_place):
            return
        num_rows = self.table.num_rows
        count = self.graph.num_nodes if sources is None else len(sources)
        dtype, projected = self.dtype, None
        if self.is_projected:
            num_rows, self.aggregated_row_of = count, row_index(sources, self.graph)
            projected = workers.empty(dtype, num_rows, self.layer.heads * self.layer.out_features)
        score_columns = self.layer.heads if self.layer.has_scores else 0
        self.scores = workers.empty(dtype, num_rows, score_columns)
        if self.layer.needs_degrees and self.is_in_place:
            self.norms = workers.empty(scale_dtype(dtype), num_rows)

        def indices_of(begin: int, end: int) -> Tensor:
            ids = ids_of_range(sources, begin, end)
            return ids if self.aggregated_row_of is None else self.aggregated_row_of[ids].long()

        shares = assign_equal_ranges(count, batch_nodes, workers.count)
        with joint_work(workers.group) as work:
            for begin, end in shares[workers.rank]:
                ids = ids_of_range(sources, begin, end)
                at = indices_of(begin, end)
                if self.norms is not None:
                    self.norms[at] = inverse_sqrt_degrees(degrees_of(self.graph, ids), dtype)
                if self.is_projected or self.layer.has_scores:
                    x = self.inputs(ids)
                    if projected is not None:
                        projected[at] = self.layer.project(x).cpu()
                    self.scores[at] = self.layer.scores(x).cpu()
                work.report_progress()
        for rows in (projected, self.scores, self.norms):
            if rows is not None:
                workers.distribute(MemoryRows(rows, indices_of), shares)
        if projected is not None:
            self.aggregated = FeatureTable(projected)

    def outputs(self, ids: Tensor, *, is_range: bool) -> Tensor:
        """Compute the output rows of nodes.

        Args:
            ids: (T,) int64 node ids.
            is_range: whether the ids are consecutive numbers.

        Returns:
            (T, columns) on the device of the model.
        """
        aggregate: Callable[[Tensor, bool], tuple[Tensor, Tensor]] = (
            self.aggregate_in_place if self.is_in_place else self._aggregate_gathered
        )
        out, x_target = aggregate(ids, is_range)
        if self.model.pre_activation:
            x_target = self._rows(self.table, self.row_of, ids)
        return self.model.transform_output(self.index, out, x_target)

    def aggregate_in_place(self, ids: Tensor, is_range: bool) -> tuple[Tensor, Tensor]:
        """Aggregate the rows of in-neighbours from the table, without gathering them first.

        Args:
            ids, is_range: see `outputs`.

        Returns:
            (T, columns) outputs of the layer, and (T, in_features) input rows of the nodes.
        """
        indptr, indices = self.edges_of(ids, is_range)
        self_index = ids
        if self.aggregated_row_of is not None:
            indices, self_index = (
                self.aggregated_row_of[indices],
                self.aggregated_row_of[ids].long(),
            )
        degrees = indptr.diff() if self.layer.needs_degrees else None
        edges = LayerEdges(indptr, indices, self_index, self.norms, degrees)
        x_target = self.inputs(ids)
        out = self.layer.compute_targets(
            edges, self.aggregated.rows, self.scores, x_target, self.is_projected
        )
        return out, x_target

    def edges_of(self, ids: Tensor, is_range: bool) -> tuple[Tensor, Tensor]:
        """Return the in-edges of nodes in CSC format, see `in_edges`.

        Args:
            ids, is_range: see `outputs`.
        """
        return in_edges(self.graph, slice(int(ids[0]), int(ids[-1]) + 1) if is_range else ids)

    def _aggregate_gathered(self, ids: Tensor, is_range: bool) -> tuple[Tensor, Tensor]:
        batch = self.neighbours.sample(ids, epoch=0)
        block = batch.blocks[0].to(self.device)
        if not self.is_projected:
            rows = self.inputs(batch.nodes)
            return self.layer(block, rows, rows[: len(ids)]), rows[: len(ids)]
        rows = self._rows(self.aggregated, self.aggregated_row_of, batch.nodes)
        at = batch.nodes
        if self.aggregated_row_of is not None:
            at = self.aggregated_row_of[at].long()
        norms = degrees = None
        if self.layer.needs_degrees:
            norms, degrees = (
                inverse_sqrt_degrees(block.in_degrees, rows.dtype),
                block.in_degrees[: len(ids)],
            )
        edges = LayerEdges(block.indptr, block.indices, None, norms, degrees)
        x_target = self.inputs(ids)
        scores = self.scores[at].to(self.device)
        return self.layer.compute_targets(edges, rows, scores, x_target, True), x_target

    def inputs(self, ids: Tensor) -> Tensor:
        """Return the layer's input rows of nodes.

        Args:
            ids: (T,) int64 node ids.

        Returns:
            (T, in_features) on the device of the model.
        """
        return self.model.transform_input(self.index, self._rows(self.table, self.row_of, ids))

    def _rows(self, table: FeatureTable, row_of: Tensor | None, ids: Tensor) -> Tensor:
        at = ids if row_of is None else row_of[ids]
        return gather_rows(table, at, self.device, self.dtype)


def gather_rows(
    table: FeatureTable, at: Tensor, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Gather rows of a table, and convert them to the dtype and device of a model.

    Args:
        table: (n, columns) rows.
        at: (B,) integer row indices.
        device, dtype: of the model.

    Returns:
        (B, columns).
    """
    is_zero_copy = device.type == "cuda" and not table.is_sparse and table.rows.is_pinned()
    return table.gather(at.to(device if is_zero_copy else table.device)).to(device, dtype)
