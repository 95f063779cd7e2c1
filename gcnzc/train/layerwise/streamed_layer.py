"""Compute one layer of a model for many nodes, with layer outputs on disk, in bounded memory.

A range of targets is aggregated in chunks: the rows of the in-neighbours of a chunk are gathered
into memory. Linear layers are computed for the whole range, so that outputs are rounded as in
memory.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.models.layer_edges import LayerEdges
from gcnzc.models.stack import Model
from gcnzc.train.layerwise.layer import FullLayer, gather_rows
from gcnzc.train.layerwise.ranges import row_index
from gcnzc.train.layerwise.scratch import Scratch, bytes_of, map_rows
from gcnzc.train.layerwise.workers import Store


class StreamedLayer(FullLayer):
    """A layer whose rows are read from a scratch folder; see `FullLayer`.

    Args:
        model, index, graph, table, row_of, device: see `FullLayer`.
        scratch: the scratch folder, and the memory for rows.
    """

    is_streamed = True

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
        # the row of each node in `score_table`
        self.score_row_of: Tensor | None = None
        self.compact = _Compact(graph.num_nodes)

    def prepare_sources(self, sources: Tensor | None, batch_nodes: int, store: Store) -> None:
        """See `FullLayer.prepare_sources`; norms are computed for each chunk instead."""
        super().prepare_sources(sources, batch_nodes, store)
        if self.score_table is not None:
            self.score_row_of = row_index(sources, self.graph)

    def aggregate_in_place(self, ids: Tensor, is_range: bool) -> tuple[Tensor, Tensor]:
        """See `FullLayer.aggregate_in_place`; the rows of one chunk at a time are gathered."""
        indptr, indices = self.edges_of(ids, is_range)
        degrees = indptr.diff() if self.layer.needs_degrees else None
        # a marker: the norms of each chunk are computed from its degrees
        norms = torch.empty(0, dtype=self.dtype) if degrees is not None else None
        edges = _ChunkedLayerEdges(indptr, indices, ids, norms, degrees, source=self)
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
            return map_rows(file.fileno(), len(at), self.aggregated.num_columns, self.dtype)[1]

    def scores_of(self, ids: Tensor) -> Tensor:
        """Return the attention scores of nodes, (n, heads)."""
        assert self.score_table is not None, "the layer has attention"
        return self.score_table.gather(ids if self.score_row_of is None else self.score_row_of[ids])


class _Compact:
    """Finds the distinct ids of nodes, with buffers of one element for each node of the graph."""

    def __init__(self, num_nodes: int) -> None:
        self.seen = torch.zeros(num_nodes, dtype=torch.bool)
        self.position = torch.empty(num_nodes, dtype=torch.int32)

    def __call__(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distinct ids of `nodes` in ascending order, and the index in them of each."""
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

    source: StreamedLayer = field(kw_only=True)

    def target_rows(self, rows: Tensor) -> Tensor:
        """See `LayerEdges`; `rows` are not read."""
        assert self.self_index is not None, "as constructed"
        parts = self.self_index.split(self.source.max_rows)
        return torch.cat([self.source.rows_of(part) for part in parts])

    def aggregate(
        self, rows: Tensor, target_scale: Tensor, source_scale: Tensor | None = None
    ) -> Tensor:
        """See `LayerEdges`; `rows` are not read."""

        def compute(chunk: _Chunk, chunk_rows: Tensor) -> Tensor:
            norms = None if source_scale is None else self.source.norms_of(chunk.ids)
            return chunk.edges.aggregate(chunk_rows, target_scale[chunk.targets], norms)

        return self._aggregate_chunks(compute)

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

        def compute(chunk: _Chunk, chunk_rows: Tensor) -> Tensor:
            rows = chunk_rows.view(-1, *rows_SHF.shape[1:])
            own = self.source.scores_of(chunk.ids), target_scores[chunk.targets]
            return chunk.edges.gat_aggregate(rows, *own)

        return self._aggregate_chunks(compute)

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

        def compute(chunk: _Chunk, chunk_rows: Tensor) -> Tensor:
            rows = chunk_rows.view(-1, *rows_SHF.shape[1:])
            return chunk.edges.gatv2_aggregate(rows, targets_THF[chunk.targets], attention_HF)

        return self._aggregate_chunks(compute)

    def _aggregate_chunks(self, compute: Callable[[_Chunk, Tensor], Tensor]) -> Tensor:
        """Aggregate chunk by chunk, of which only one at a time has its rows in memory."""
        parts = [compute(chunk, self.source.rows_of(chunk.ids)) for chunk in self._chunks()]
        # a single part is not copied
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _chunks(self) -> Iterator[_Chunk]:
        """Yield chunks of targets whose source rows fit into memory, but of at least one target."""
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
