"""Compute one layer of a model for many nodes, with all their neighbours and rows in memory."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

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
from gcnzc.train.layerwise.workers import MemoryRows, Rows, Store


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

    # whether rows are read from a scratch folder
    is_streamed = False

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
        self.is_projected = is_projected(self.layer)
        # a gather also dequantizes rows and converts their dtype
        has_same_dtype = table.is_readable and table.rows.dtype == self.dtype
        is_readable = has_same_dtype and not table.rows.is_cuda and not model.transforms_inputs
        self.is_in_place = device.type == "cpu" and (self.is_projected or is_readable)
        self.neighbours = Sampler(graph, [-1])
        # the rows that are aggregated: input rows, or projected rows
        self.aggregated, self.aggregated_row_of = table, row_of
        self.scores = torch.empty(0, 0)
        self.score_table: FeatureTable | None = None
        self.norms: Tensor | None = None

    def prepare_sources(self, sources: Tensor | None, batch_nodes: int, store: Store) -> None:
        """Compute the projected rows, attention scores and norms of the sources.

        Args:
            sources: (S,) int64 ids of the nodes that are sources; None for all nodes.
            batch_nodes: maximum number of nodes that are computed at a time.
            store: keeps what is computed.
        """
        layer, count = self.layer, self.graph.num_nodes if sources is None else len(sources)
        # name, columns, dtype, and function of the ids and the input rows of nodes
        computed: list[tuple[str, int, torch.dtype, Callable[[Tensor, Tensor], Tensor]]] = []
        if self.is_projected:
            columns = layer.heads * layer.out_features
            computed.append(("messages", columns, self.dtype, lambda _, x: layer.project(x)))
        if layer.has_scores and (self.is_projected or self.is_in_place):
            computed.append(("scores", layer.heads, self.dtype, lambda _, x: layer.scores(x)))
        reads_inputs = bool(computed)
        if layer.needs_degrees and self.is_in_place and not self.is_streamed:
            computed.append(
                ("norms", 1, scale_dtype(self.dtype), lambda ids, _: self.norms_of(ids)[:, None])
            )
        if self.is_projected:
            self.aggregated_row_of = row_index(sources, self.graph)
        rows = {
            name: self._rows_of_sources(store, name, sources, columns, dtype)
            for name, columns, dtype, _ in computed
        }

        def compute(begin: int, end: int) -> list[Tensor]:
            ids = ids_of_range(sources, begin, end)
            x = self.inputs(ids) if reads_inputs else ids
            return [function(ids, x) for *_, function in computed]

        if rows:
            shares = assign_equal_ranges(count, batch_nodes, store.workers.count)
            store.compute(list(rows.values()), shares, compute)
        tables = {name: each.table() for name, each in rows.items()}
        self.aggregated = tables.get("messages", self.aggregated)
        self.scores = torch.empty(self.aggregated.num_rows, 0, dtype=self.dtype)
        self.score_table = tables.get("scores")
        if self.score_table is not None:
            self.scores = self.score_table.rows
        if "norms" in tables:
            self.norms = tables["norms"].rows.flatten()

    def _rows_of_sources(
        self, store: Store, name: str, sources: Tensor | None, columns: int, dtype: torch.dtype
    ) -> Rows:
        """Return the rows of a name of the sources, at the indices of the aggregated rows."""
        if self.aggregated_row_of is None and sources is not None and not self.is_streamed:
            # the aggregated rows are the features of all nodes
            return MemoryRows(store.workers.empty(dtype, self.table.num_rows, columns), sources)
        count = self.graph.num_nodes if sources is None else len(sources)
        return store.rows(f"{name}-{self.index + 1}", count, columns, dtype)

    def norms_of(self, ids: Tensor) -> Tensor:
        """Return 1 / sqrt(degree + 1) of nodes."""
        return inverse_sqrt_degrees(degrees_of(self.graph, ids), self.dtype)

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
        """Return the in-edges of nodes in CSC format, see `in_edges` and `outputs`."""
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


def is_projected(layer: Layer) -> bool:
    """Whether rows are projected before the aggregation, which may make them smaller."""
    return layer.must_project_first or layer.heads * layer.out_features < layer.in_features


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
