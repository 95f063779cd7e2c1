"""Blocks of heterogeneous minibatches: the edges of all relations of one layer, as one CSC.

The rows of all node types are concatenated in the order of the types. The columns of a destination,
one for each relation into its type, are adjacent; see `gcnzc.kernels.structure.relation_columns`.
One call of a kernel therefore aggregates over all relations of a layer.

Notation: C columns, E edges; for node type t: S_t sources, D_t destinations, R_t edge types into t
and O_t edge types out of t.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gcnzc.graph.hetero.graph import EdgeType, HeteroGraph
from gcnzc.kernels.buffers import Allocate
from gcnzc.kernels.structure.relation_columns import InvalidEdge, RelationEdges, merge_relations
from gcnzc.system.arguments import check_integer, check_kind

if TYPE_CHECKING:
    from gcnzc.sampling.hetero import HeteroBatch


@dataclass(frozen=True)
class HeteroMetadata:
    """The node types and edge types of a heterogeneous graph, in their order.

    Attributes:
        node_types: names.
        edge_types: triples of a source type, a relation and a destination type.
    """

    node_types: tuple[str, ...]
    edge_types: tuple[EdgeType, ...]

    @cached_property
    def edge_types_in(self) -> tuple[tuple[int, ...], ...]:
        """For each node type the positions in `edge_types` of those into it."""
        return self._edge_types_with(2)

    @cached_property
    def edge_types_out(self) -> tuple[tuple[int, ...], ...]:
        """For each node type the positions in `edge_types` of those out of it."""
        return self._edge_types_with(0)

    def _edge_types_with(self, end: int) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(r for r, each in enumerate(self.edge_types) if each[end] == name)
            for name in self.node_types
        )


@lru_cache(maxsize=64)
def _metadata(node_types: tuple[str, ...], edge_types: tuple[EdgeType, ...]) -> HeteroMetadata:
    # shared by the blocks of all minibatches, so that its properties are computed once
    return HeteroMetadata(node_types, edge_types)


@dataclass(frozen=True, repr=False)
class HeteroBlock:
    """The bipartite graph of one layer with all edge types, as one CSC structure.

    The sources of node type t are the rows from `row_offsets[t]` on; the first D_t of them are the
    destinations of the type. Destination d of type t has the R_t columns from
    `column_offsets[t] + d * R_t` on, one for each edge type in `metadata.edge_types_in[t]`.

    Attributes:
        indptr: (C + 1,) int64 offsets of the columns.
        indices: (E,) int32 rows of the sources; int64 from 2**31 rows on.
        pairs: (E,) the pair of the source and the edge type of each edge: source s of type t has
            O_t pairs, one for each edge type in `metadata.edge_types_out[t]`, and pairs are
            numbered in the order of the rows.
        num_src: S_t for each node type.
        num_dst: D_t for each node type.
        metadata: node types and edge types.
    """

    indptr: Tensor
    indices: Tensor
    pairs: Tensor
    num_src: tuple[int, ...]
    num_dst: tuple[int, ...]
    metadata: HeteroMetadata

    @property
    def num_edges(self) -> int:
        """E."""
        return self.indices.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.indices.device

    @cached_property
    def row_offsets(self) -> tuple[int, ...]:
        """First row of each node type, and the number of rows."""
        return _offsets(self.num_src)

    @cached_property
    def num_columns(self) -> tuple[int, ...]:
        """Number of columns of each node type, D_t * R_t."""
        return _products(self.num_dst, self.metadata.edge_types_in)

    @cached_property
    def column_offsets(self) -> tuple[int, ...]:
        """First column of each node type, and the number of columns."""
        return _offsets(self.num_columns)

    @cached_property
    def destination_indptr(self) -> Tensor:
        """Offsets of the in-edges of each destination, over all edge types: int64 on `device`.

        The destinations are those of all node types with edge types into them, in the order of the
        types.
        """
        parts = [
            self.indptr[begin : end : len(relations)]
            for (begin, end), relations in zip(
                pairwise(self.column_offsets), self.metadata.edge_types_in, strict=True
            )
            if relations
        ]
        return torch.cat([*parts, self.indptr[-1:]])

    def split_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Split the rows of all sources into those of each node type.

        Args:
            rows: (sum of S_t, F).

        Returns:
            For each node type (S_t, F), a view.
        """
        return rows.split(list(self.num_src))

    def destination_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of the destinations of each node type.

        Args:
            rows: (sum of S_t, F) rows of all sources.

        Returns:
            For each node type (D_t, F), a view.
        """
        sizes = []
        for num_src, num_dst in zip(self.num_src, self.num_dst, strict=True):
            sizes += [num_dst, num_src - num_dst]
        # one split instead of slices: the gradient of each slice would have the rows of all sources
        return rows.split(sizes)[::2]

    def split_columns(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Split the rows of all columns into those of each node type.

        Args:
            rows: (C, ...).

        Returns:
            For each node type (D_t * R_t, ...), a view.
        """
        return rows.split(list(self.num_columns))

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{name}={num_src}->{num_dst}"
            for name, num_src, num_dst in zip(
                self.metadata.node_types, self.num_src, self.num_dst, strict=True
            )
        )
        return f"HeteroBlock({sizes}; num_edges={self.num_edges})"

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "HeteroBlock":
        """Return a copy of the block with its tensors on `device`."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=non_blocking)
            for name in ("indptr", "indices", "pairs")
        }
        return replace(self, **moved)


def build_hetero_blocks(
    batch: "HeteroBatch", *, empty: Allocate | None = None
) -> tuple[HeteroBlock, ...]:
    """Return the blocks of a minibatch, one for each hop of its sampler, input layer first.

    The sources of the first block are all nodes of the minibatch, and the destinations of the last
    block are the seeds. With directional subgraphs of L hops, the destinations of block i are the
    nodes that the first L - 1 - i hops found. Their in-edges are, if the sampler has `once=True`,
    those of the first L - i hops; otherwise those of hop L - 1 - i. With bidirectional and
    induced subgraphs, the destinations are all nodes in each block but the last, with all edges.

    The function is thread-safe, and releases the GIL during the work on edges.

    Args:
        batch: from a `HeteroSampler`, on the host.
        empty: allocates the tensors of the blocks, such as `Pool.empty`. Default: a pool of
            ordinary memory.

    Raises:
        ValueError: the minibatch has no hops, or an edge has a position out of range.
    """
    metadata = _metadata(tuple(batch.nodes), tuple(batch.row))
    found = [tuple(accumulate(batch.num_nodes[name])) for name in metadata.node_types]
    # the nodes known before each hop, and in the end
    known = tuple(zip(*found, strict=True))
    num_hops = len(known) - 1
    if num_hops < 1:
        raise ValueError(f"{batch} has no hops\n\nhint: sample with one fanout for each layer")
    blocks: list[HeteroBlock] = []
    for hop in reversed(range(num_hops)):
        relations = []
        if batch.num_edges is None:
            if 0 < hop < num_hops - 1:
                blocks.append(blocks[-1])
                continue
            num_src, num_dst, num_known = known[-1], known[-1] if hop else known[0], known[-1]
        else:
            num_src, num_dst, num_known = known[hop + 1], known[hop], known[hop]
        for edge_type in metadata.edge_types:
            begin, end = 0, len(batch.row[edge_type])
            if batch.num_edges is not None:
                counts = batch.num_edges[edge_type]
                begin, end = 0 if batch.once else sum(counts[:hop]), sum(counts[: hop + 1])
            part = slice(begin, end)
            relations.append((batch.row[edge_type][part], batch.col[edge_type][part], None))
        blocks.append(_merge(metadata, relations, num_src, num_dst, num_known, empty))
    return tuple(blocks)


def build_full_hetero_blocks(
    graph: HeteroGraph,
    num_layers: int,
    *,
    targets: Iterable[str] | None = None,
    device: torch.device | str = "cpu",
) -> tuple[HeteroBlock, ...]:
    """Return blocks of a whole graph, for training on all nodes and edges in each step.

    Args:
        graph: its arrays are checked first, see `HeteroGraph.check`.
        num_layers: number of layers.
        targets: node types whose outputs are computed by the last layer. Default: all.
        device: device of the blocks.

    Returns:
        One block per layer. Layers with the same destinations have the same block.

    Raises:
        ValueError: a target is not a node type, or the graph has a value out of range.
    """
    check_kind("graph", graph, HeteroGraph, "HeteroGraph.from_pyg, from_dgl or from_arrays")
    num_layers = check_integer("num_layers", num_layers, 1)
    graph.check()
    metadata = _metadata(tuple(graph.node_types), tuple(graph.edge_types))
    sizes = tuple(graph.num_nodes(name) for name in metadata.node_types)
    last = set(metadata.node_types if targets is None else targets)
    unknown = sorted(last - set(metadata.node_types))
    if unknown:
        raise ValueError(
            f"targets has the node type {unknown[0]!r}, which the graph does not have\n\n"
            f"hint: the node types are {', '.join(metadata.node_types)}"
        )
    relations = [
        (graph.edges(each).indices, None, graph.edges(each).indptr) for each in graph.edge_types
    ]
    last_sizes = tuple(
        size if name in last else 0 for name, size in zip(metadata.node_types, sizes, strict=True)
    )
    final = _merge(metadata, relations, sizes, last_sizes, sizes).to(device)
    if num_layers == 1:
        return (final,)
    if last_sizes == sizes:
        return (final,) * num_layers
    inner = _merge(metadata, relations, sizes, sizes, sizes).to(device)
    return (*[inner] * (num_layers - 1), final)


def _merge(
    metadata: HeteroMetadata,
    relations: Sequence[tuple[Tensor, Tensor | None, Tensor | None]],
    num_src: tuple[int, ...],
    num_dst: tuple[int, ...],
    num_known: tuple[int, ...],
    empty: Allocate | None = None,
) -> HeteroBlock:
    """Return the block of relations, each given as rows, and columns or offsets."""
    types = {name: t for t, name in enumerate(metadata.node_types)}
    rows = _offsets(num_src)
    columns = _offsets(_products(num_dst, metadata.edge_types_in))
    pairs = _offsets(_products(num_src, metadata.edge_types_out))
    edges = []
    for r, (row, col, indptr) in enumerate(relations):
        source, _, destination = metadata.edge_types[r]
        s, d = types[source], types[destination]
        into, out = metadata.edge_types_in[d], metadata.edge_types_out[s]
        edges.append(
            RelationEdges(
                row=row,
                col=col,
                indptr=indptr,
                num_src=num_src[s],
                num_known=num_known[d],
                num_dst=num_dst[d],
                first_row=rows[s],
                first_pair=pairs[s],
                num_out=len(out),
                out_number=out.index(r),
                first_column=columns[d],
                num_in=len(into),
                in_number=into.index(r),
            )
        )
    try:
        merged = merge_relations(edges, columns[-1], rows[-1], pairs[-1], empty=empty)
    except InvalidEdge as error:
        edge_type, own = metadata.edge_types[error.relation], edges[error.relation]
        end = "" if own.col is None else f" to {int(own.col[error.edge])}"
        raise ValueError(
            f"edge type {edge_type} has an edge from {int(own.row[error.edge])}{end}, but its "
            f"block has {own.num_src} sources and {own.num_known} destinations\n\n"
            "hint: build blocks of unchanged minibatches of a HeteroSampler"
        ) from None
    return HeteroBlock(merged.indptr, merged.indices, merged.pairs, num_src, num_dst, metadata)


def _offsets(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(accumulate(sizes, initial=0))


def _products(sizes: Iterable[int], groups: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(size * len(group) for size, group in zip(sizes, groups, strict=True))
