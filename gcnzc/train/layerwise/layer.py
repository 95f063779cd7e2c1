"""Compute one layer of a model for many nodes, with all their neighbours.

Rows that fit into memory are aggregated where they are, if the CPU can read them there. Otherwise a
range of targets is divided into chunks, and the rows of the sources of one chunk at a time are
gathered. Linear layers are computed for the whole range, so that the outputs do not depend on the
chunks.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.kernels.aggregate.degree_scales import inverse_sqrt_degrees
from gcnzc.models.layer_edges import LayerEdges
from gcnzc.models.layers import Layer
from gcnzc.models.stack import Model, parameter_dtype
from gcnzc.sampling.neighbor import Sampler
from gcnzc.train.layerwise.ranges import (
    assign_equal_ranges,
    degrees_of,
    ids_of_range,
    in_edges,
    offsets,
    row_index,
)
from gcnzc.train.layerwise.scratch import Scratch, bytes_of, map_rows
from gcnzc.train.layerwise.store import Store


class FullLayer:
    """Computes one layer of a model for many nodes, with all their neighbours.

    Args:
        model: the model.
        index: index of the layer.
        graph: the whole graph.
        table: the layer's input rows.
        row_of: (N,) the row index of each node in `table`; None if that is the node's id.
        device: device of the model.
        store: keeps what is computed for the sources.
    """

    def __init__(
        self,
        model: Model,
        index: int,
        graph: Graph,
        table: FeatureTable,
        row_of: Tensor | None,
        device: torch.device,
        store: Store,
    ) -> None:
        self.model, self.index, self.graph, self.device = model, index, graph, device
        self.layer, self.dtype = cast(Layer, model.layers[index]), parameter_dtype(model)
        self.table, self.row_of, self.store = table, row_of, store
        self.is_projected = is_projected(self.layer)
        # a gather also dequantizes rows and converts their dtype
        has_same_dtype = table.is_readable and table.rows.dtype == self.dtype
        is_readable = has_same_dtype and not table.rows.is_cuda and not model.transforms_inputs
        is_in_memory = device.type == "cpu" and not isinstance(store, Scratch)
        self.is_in_place = is_in_memory and (self.is_projected or is_readable)
        self.sampler = Sampler(graph, [-1])
        # of the sources, with the row index of each node
        self.messages: FeatureTable | None = None
        self.scores: FeatureTable | None = None
        self.source_of: Tensor | None = None

    def prepare_sources(self, sources: Tensor | None, batch_nodes: int) -> None:
        """Compute the projected rows and attention scores of the sources.

        Args:
            sources: (S,) int64 ids of the nodes that are sources; None for all nodes.
            batch_nodes: maximum number of nodes that are computed at a time.
        """
        layer, count = self.layer, self.graph.num_nodes if sources is None else len(sources)
        # columns, and function of the input rows
        computed: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {}
        if self.is_projected:
            computed["messages"] = layer.heads * layer.out_features, layer.project
        if layer.has_scores:
            computed["scores"] = layer.heads, layer.scores
        rows = {
            name: self.store.rows(f"{name}-{self.index + 1}", count, columns, self.dtype)
            for name, (columns, _) in computed.items()
        }

        def compute(begin: int, end: int) -> list[Tensor]:
            x = self.inputs(ids_of_range(sources, begin, end))
            return [function(x) for _, function in computed.values()]

        if rows:
            shares = assign_equal_ranges(count, batch_nodes, self.store.group.world_size)
            self.store.compute(list(rows.values()), shares, compute)
        tables = {name: each.table() for name, each in rows.items()}
        self.messages, self.scores = tables.get("messages"), tables.get("scores")
        self.source_of = row_index(sources, self.graph)
        if self.is_in_place:
            self._prepare_in_place(sources, batch_nodes)

    def _prepare_in_place(self, sources: Tensor | None, batch_nodes: int) -> None:
        """Set the rows that are aggregated in place, and the scores and norms of these rows."""
        num_rows = self.graph.num_nodes if sources is None else len(sources)
        self.aggregated, self.aggregated_of = self.messages, self.source_of
        if self.messages is None:
            self.aggregated, self.aggregated_of = self.table, self.row_of

        def place(values: Tensor) -> Tensor:
            """Return values of the sources at the indices of the aggregated rows."""
            if sources is None or self.aggregated_of is not None:
                return values
            placed = values.new_empty(self.graph.num_nodes, *values.shape[1:])
            placed[sources] = values
            return placed

        scores = torch.empty(num_rows, 0, dtype=self.dtype)
        self.placed_scores = place(scores if self.scores is None else self.scores.rows)
        self.norms: Tensor | None = None
        if self.layer.needs_degrees:
            parts = [
                self.norms_of(ids_of_range(sources, begin, min(begin + batch_nodes, num_rows)))
                for begin in range(0, num_rows, batch_nodes)
            ]
            self.norms = place(_join(parts)) if parts else None

    def outputs(self, ids: Tensor) -> Tensor:
        """Compute the output rows of nodes.

        Args:
            ids: (T,) int64 ids of distinct nodes.

        Returns:
            (T, columns) on the device of the model.
        """
        x_target = self.inputs(ids)
        edges, rows, scores = self._in_place(ids) if self.is_in_place else self._gathered(ids)
        out = self.layer.compute_targets(edges, rows, scores, x_target, self.is_projected)
        if self.model.pre_activation:
            x_target = self._rows(self.table, self.row_of, ids)
        return self.model.transform_output(self.index, out, x_target)

    def _in_place(self, ids: Tensor) -> tuple[LayerEdges, Tensor, Tensor]:
        """Return the in-edges of nodes, and the rows and scores to which their indices refer."""
        assert self.aggregated is not None, "prepared"
        indptr, indices = in_edges(self.graph, ids)
        self_index = ids
        if self.aggregated_of is not None:
            indices, self_index = self.aggregated_of[indices], self.aggregated_of[ids].long()
        degrees = indptr.diff() if self.layer.needs_degrees else None
        edges = LayerEdges(indptr, indices, self_index, self.norms, degrees)
        return edges, self.aggregated.rows, self.placed_scores

    def _gathered(self, ids: Tensor) -> tuple[LayerEdges, Tensor, Tensor]:
        """Return the in-edges of nodes, and one row in place of those that they gather."""
        indptr, layer = offsets(self.graph, ids).to(self.device), self.layer
        degrees = norms = None
        if layer.needs_degrees:
            degrees, norms = indptr.diff(), torch.empty(0, device=self.device)
        indices = indptr.new_empty(0)
        edges = _GatheredEdges(indptr, indices, None, norms, degrees, layer=self, ids=ids)
        columns = layer.heads * layer.out_features if self.is_projected else layer.in_features
        row = torch.empty(1, columns, dtype=self.dtype, device=self.device)
        return edges, row, row[:, : layer.heads if layer.has_scores else 0]

    def chunks(self, ids: Tensor) -> Iterator[tuple[slice, Tensor, LayerEdges]]:
        """Yield chunks of targets whose source rows fit into memory, but of at least one target.

        Yields:
            The positions of the targets in `ids`; (S,) ids of their sources, the targets first; and
            their in-edges.
        """
        # the edges and targets up to each target bound the number of distinct sources
        ends = offsets(self.graph, ids) + torch.arange(len(ids) + 1)
        begin = 0
        while begin < len(ids):
            limit = ends[begin] + self.max_rows
            end = max(int(torch.searchsorted(ends, limit, right=True)) - 1, begin + 1)
            block = self.sampler.sample(ids[begin:end], epoch=0).blocks[0]
            indptr, indices = block.indptr.to(self.device), block.indices.to(self.device)
            yield slice(begin, end), block.nodes, LayerEdges(indptr, indices, None)
            begin = end

    @property
    def max_rows(self) -> int:
        """The number of rows that fit into the memory, beside the window of a gather."""
        if not isinstance(self.store, Scratch):
            return 1 << 62
        columns = self.table.num_columns if self.messages is None else self.messages.num_columns
        row_bytes = (columns + self.layer.heads) * self.dtype.itemsize  # with scores, or a norm
        return max(1, (self.store.memory - self.store.window_bytes) // row_bytes)

    def source_rows(self, ids: Tensor) -> Tensor:
        """Return the rows of nodes that are aggregated: input rows, or projected rows.

        If they exceed the memory, because a single node has so many in-neighbours, they are written
        to a file and mapped.
        """
        if len(ids) <= self.max_rows:
            if self.messages is None:
                return self.inputs(ids)
            return self._rows(self.messages, self.source_of, ids)
        assert isinstance(self.store, Scratch), "otherwise all fit"
        # deleted with its last reference
        with tempfile.TemporaryFile(dir=self.store.folder) as file:
            for part in ids.split(self.max_rows):
                rows = self.source_rows(part).cpu()
                file.write(bytes_of(rows))
            file.flush()
            return map_rows(file.fileno(), len(ids), rows.shape[1], rows.dtype)[1].to(self.device)

    def source_scores(self, ids: Tensor) -> Tensor:
        """Return the attention scores of nodes, (n, heads)."""
        assert self.scores is not None, "the layer has attention"
        return self._rows(self.scores, self.source_of, ids)

    def norms_of(self, ids: Tensor) -> Tensor:
        """Return 1 / sqrt(degree + 1) of nodes."""
        return inverse_sqrt_degrees(degrees_of(self.graph, ids), self.dtype).to(self.device)

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


@dataclass(frozen=True)
class _GatheredEdges(LayerEdges):
    """In-edges of targets, which gather the rows and scores of one chunk of targets at a time.

    The indices and the rows and scores of the sources that are passed are not read.
    """

    layer: FullLayer = field(kw_only=True)
    ids: Tensor = field(kw_only=True)  # (T,) node ids of the targets

    def aggregate(
        self, rows: Tensor, target_scale: Tensor, source_scale: Tensor | None = None
    ) -> Tensor:
        """See `LayerEdges`."""
        return self.aggregate_with_targets(rows, target_scale, source_scale)[0]

    def aggregate_with_targets(
        self, rows: Tensor, target_scale: Tensor, source_scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `LayerEdges`."""

        def compute(at: slice, nodes: Tensor, edges: LayerEdges) -> tuple[Tensor, Tensor]:
            own = self.layer.source_rows(nodes)
            norms = None if source_scale is None else self.layer.norms_of(nodes)
            # a copy, so that the other rows are freed
            return edges.aggregate(own, target_scale[at], norms), edges.target_rows(own).clone()

        parts = [compute(*chunk) for chunk in self.layer.chunks(self.ids)]
        return _join([sums for sums, _ in parts]), _join([own for _, own in parts])

    def gat_aggregate(
        self, rows_SHF: Tensor, scores: Tensor, target_scores: Tensor, **training: Any
    ) -> Tensor:
        """See `LayerEdges`; there is no dropout."""
        parts = [
            edges.gat_aggregate(
                self.layer.source_rows(nodes).view(-1, *rows_SHF.shape[1:]),
                self.layer.source_scores(nodes),
                target_scores[at],
            )
            for at, nodes, edges in self.layer.chunks(self.ids)
        ]
        return _join(parts)

    def gatv2_aggregate(
        self, rows_SHF: Tensor, targets_THF: Tensor, attention_HF: Tensor, **training: Any
    ) -> Tensor:
        """See `LayerEdges`; there is no dropout."""
        parts = [
            edges.gatv2_aggregate(
                self.layer.source_rows(nodes).view(-1, *rows_SHF.shape[1:]),
                targets_THF[at],
                attention_HF,
            )
            for at, nodes, edges in self.layer.chunks(self.ids)
        ]
        return _join(parts)


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


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
