"""Compute one layer of a model for many nodes, with layer outputs on disk, in bounded memory.

A range of targets is aggregated in chunks: the rows of the in-neighbours of a chunk are gathered
into memory. Linear layers are computed for the whole range, so that outputs are rounded as in
memory.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gcnzc.exchange.long_work import joint_work
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.kernels.aggregate.degree_scales import inverse_sqrt_degrees
from gcnzc.models.layer_edges import LayerEdges
from gcnzc.models.stack import Model
from gcnzc.train.layerwise.layer import FullLayer, gather_rows
from gcnzc.train.layerwise.ranges import assign_equal_ranges, degrees_of, ids_of_range, row_index
from gcnzc.train.layerwise.scratch import Scratch
from gcnzc.train.layerwise.stored_rows import StoredTable, bytes_of, map_rows
from gcnzc.train.layerwise.workers import Workers


class StreamedLayer(FullLayer):
    """A layer whose rows are read from a scratch folder; see `FullLayer`.

    Args:
        model, index, graph, table, row_of, device: see `FullLayer`.
        scratch: the scratch folder, and the memory for rows.
    """

    def __init__(
        self,
        model: Model,
        index: int,
        graph: Graph,
        table: FeatureTable,
        row_of: Tensor | None,
        device: torch.device,
        scratch: Scratch,
    ) -> None:
        super().__init__(model, index, graph, table, row_of, device)
        self.scratch = scratch
        self.score_table: StoredTable | None = None
        # the row of each node in `score_table`
        self.score_row_of: Tensor | None = None
        self._compact = _Compact(graph.num_nodes)

    def prepare_sources(self, sources: Tensor | None, batch_nodes: int, workers: Workers) -> None:
        """See `FullLayer.prepare_sources`; norms are computed for each chunk instead."""
        has_scores = self.layer.has_scores and (self.is_projected or self.is_in_place)
        count = self.graph.num_nodes if sources is None else len(sources)
        self.scores = torch.empty(count, 0, dtype=self.dtype)
        if not (self.is_projected or has_scores):
            return
        computed: list[tuple[str, int, Callable[[Tensor], Tensor]]] = []
        if self.is_projected:
            columns = self.layer.heads * self.layer.out_features
            computed.append(("messages", columns, self.layer.project))
        if has_scores:
            computed.append(("scores", self.layer.heads, self.layer.scores))
        stored = [
            self.scratch.rows(f"{what}-{self.index + 1}", count, columns, self.dtype)
            for what, columns, _ in computed
        ]
        shares = assign_equal_ranges(count, batch_nodes, workers.count)
        with joint_work(workers.group) as work:
            for begin, end in shares[workers.rank]:
                missing = [not rows.has(begin, end) for rows in stored]
                if any(missing):
                    x = self.inputs(ids_of_range(sources, begin, end))
                    for rows, (*_, compute) in zip(stored, computed, strict=True):
                        rows.write(begin, end, compute(x))
                work.report_progress()
            for rows in stored:
                rows.sync()
        for rows in stored:
            if not rows.is_finished:
                self.scratch.finish(rows, shares)
        tables = [rows.table() for rows in stored]
        if has_scores:
            self.score_table, self.score_row_of = tables[-1], row_index(sources, self.graph)
            self.scores = self.score_table.rows
        if self.is_projected:
            self.aggregated, self.aggregated_row_of = tables[0], row_index(sources, self.graph)

    def aggregate_in_place(self, ids: Tensor, is_range: bool) -> tuple[Tensor, Tensor]:
        """See `FullLayer.aggregate_in_place`; the rows of one chunk at a time are gathered."""
        indptr, indices = self.edges_of(ids, is_range)
        degrees = indptr.diff() if self.layer.needs_degrees else None
        # a marker: the norms of each chunk are computed from its degrees
        norms = torch.empty(0, dtype=self.dtype) if degrees is not None else None
        edges = _ChunkedLayerEdges(indptr, indices, ids, norms, degrees, self)
        x_target = self.inputs(ids)
        out = self.layer.compute_targets(
            edges, self.aggregated.rows, self.scores, x_target, self.is_projected
        )
        return out, x_target

    @property
    def max_rows(self) -> int:
        """The number of rows that fit into the memory, beside the window of a gather."""
        row_bytes = self.aggregated.num_columns * self.dtype.itemsize
        row_bytes += self.layer.heads * self.dtype.itemsize  # scores, or a norm
        return max(1, (self.scratch.memory - self.scratch.window_bytes) // row_bytes)

    def rows_of(self, ids: Tensor) -> Tensor:
        """Return the rows of nodes that are aggregated: input rows, or projected rows.

        If they exceed the memory, because a single node has so many in-neighbours, they are written
        to a file and mapped.
        """
        at = ids if self.aggregated_row_of is None else self.aggregated_row_of[ids]
        if len(ids) <= self.max_rows:
            return gather_rows(self.aggregated, at, self.device, self.dtype)
        # deleted with its last reference
        with tempfile.TemporaryFile(dir=self.scratch.folder) as file:
            for begin in range(0, len(at), self.max_rows):
                part = at[begin : begin + self.max_rows]
                rows = gather_rows(self.aggregated, part, self.device, self.dtype)
                file.write(bytes_of(rows))
            file.flush()
            return map_rows(file.fileno(), len(at), self.aggregated.num_columns, self.dtype)

    def scores_of(self, ids: Tensor) -> Tensor:
        """Return the attention scores of nodes, (n, heads); (n, 0) without attention."""
        if self.score_table is None:
            return torch.empty(len(ids), 0, dtype=self.dtype)
        return self.score_table.gather(ids if self.score_row_of is None else self.score_row_of[ids])

    def norms_of(self, ids: Tensor) -> Tensor:
        """Return 1 / sqrt(degree + 1) of nodes."""
        return inverse_sqrt_degrees(degrees_of(self.graph, ids), self.dtype)

    def compact(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distinct ids of `nodes` in ascending order, and the index in them of each."""
        return self._compact(nodes)


class _Compact:
    """Finds the distinct ids of nodes, with buffers of one element for each node of the graph."""

    def __init__(self, num_nodes: int) -> None:
        self.seen = torch.zeros(num_nodes, dtype=torch.bool)
        self.position = torch.empty(num_nodes, dtype=torch.int32)

    def __call__(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        at = nodes.long()
        self.seen[at] = True
        ids = self.seen.nonzero().flatten()
        self.seen[ids] = False
        self.position[ids] = torch.arange(len(ids), dtype=torch.int32)
        return ids, self.position[at]


@dataclass(frozen=True)
class _Chunk:
    """Consecutive targets of a layer, with only their in-edges and distinct sources."""

    targets: slice
    ids: Tensor  # (S,) node ids of the sources
    edges: LayerEdges  # its indices refer to `ids`


@dataclass(frozen=True)
class _ChunkedLayerEdges(LayerEdges):
    """In-edges of one layer's targets, whose rows are gathered for one chunk of targets at a time.

    The indices are node ids.
    """

    source: StreamedLayer | None = None

    def target_rows(self, rows: Tensor) -> Tensor:
        """See `LayerEdges`; `rows` are not read."""
        assert self.source is not None, "as constructed"
        assert self.self_index is not None, "as constructed"
        parts = self.self_index.split(self.source.max_rows)
        return torch.cat([self.source.rows_of(part) for part in parts])

    def aggregate(
        self, rows: Tensor, target_scale: Tensor, source_scale: Tensor | None = None
    ) -> Tensor:
        """See `LayerEdges`; `rows` are not read."""
        assert self.source is not None, "as constructed"
        parts = []
        for chunk in self._chunks():
            norms = None if source_scale is None else self.source.norms_of(chunk.ids)
            chunk_rows, scale = self.source.rows_of(chunk.ids), target_scale[chunk.targets]
            parts.append(chunk.edges.aggregate(chunk_rows, scale, norms))
        return _concatenate(parts)

    def gat_aggregate(
        self,
        rows_SHF: Tensor,
        scores: Tensor,
        target_scores: Tensor,
        *,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> Tensor:
        """See `LayerEdges`; `rows_SHF` and `scores` are not read."""
        assert self.source is not None, "as constructed"
        parts = []
        for chunk in self._chunks():
            chunk_rows = self.source.rows_of(chunk.ids).view(-1, *rows_SHF.shape[1:])
            chunk_scores, targets = self.source.scores_of(chunk.ids), target_scores[chunk.targets]
            parts.append(chunk.edges.gat_aggregate(chunk_rows, chunk_scores, targets))
        return _concatenate(parts)

    def gatv2_aggregate(
        self,
        rows_SHF: Tensor,
        targets_THF: Tensor,
        attention_HF: Tensor,
        *,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> Tensor:
        """See `LayerEdges`; `rows_SHF` are not read."""
        assert self.source is not None, "as constructed"
        parts = []
        for chunk in self._chunks():
            chunk_rows = self.source.rows_of(chunk.ids).view(-1, *rows_SHF.shape[1:])
            targets = targets_THF[chunk.targets]
            parts.append(chunk.edges.gatv2_aggregate(chunk_rows, targets, attention_HF))
        return _concatenate(parts)

    def _chunks(self) -> Iterator[_Chunk]:
        """Yield chunks of targets whose source rows fit into memory, but of at least one target."""
        assert self.source is not None, "as constructed"
        assert self.self_index is not None, "as constructed"
        # the edges and targets up to each target bound the number of distinct sources
        ends = self.indptr + torch.arange(len(self.indptr))
        begin, count = 0, self.num_targets
        while begin < count:
            limit = ends[begin] + self.source.max_rows
            end = int(torch.searchsorted(ends, limit, right=True)) - 1
            end = min(max(end, begin + 1), count)
            bounds = self.indptr[begin : end + 1]
            indices = self.indices[int(bounds[0]) : int(bounds[-1])]
            targets = self.self_index[begin:end]
            ids, index = self.source.compact(torch.cat([indices.long(), targets.long()]))
            num_edges = len(indices)
            edges = LayerEdges(bounds - bounds[0], index[:num_edges], index[num_edges:].long())
            yield _Chunk(slice(begin, end), ids, edges)
            begin = end


def _concatenate(parts: list[Tensor]) -> Tensor:
    """Concatenate rows, without a copy of a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
