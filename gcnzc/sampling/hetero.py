"""Minibatches of graphs with types of nodes and edges, and their blocks.

A block has the edges of all relations of one layer, as one CSC. The rows of all node types are
concatenated in the order of the types. The columns of a destination, one for each relation into its
type, are adjacent; see `gcnzc.kernels.structure.relation_columns`. One call of a kernel therefore
aggregates over all relations of a layer.

Notation of blocks: C columns, E edges; for node type t: S_t sources, D_t destinations, R_t edge
types into t and O_t edge types out of t.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from torch import Tensor

from gcnzc.graph.graph import Graph
from gcnzc.graph.stores import EdgeType
from gcnzc.kernels.buffers import Allocate, Pool
from gcnzc.kernels.structure.csc import csc_to_coo
from gcnzc.kernels.structure.relation_columns import InvalidEdge, RelationEdges, merge_relations
from gcnzc.sampling.batch import Compact, CopyTensors
from gcnzc.system.arguments import check_integer, check_kind
from gcnzc.system.spans import Span, Stage


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
class HeteroBlock(Compact):
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
        batch: from a `Sampler`, on the host.
        empty: allocates the tensors of the blocks, such as `Pool.empty`. Default: a pool of
            ordinary memory.

    Raises:
        ValueError: the minibatch has no hops, or an edge has a position out of range.
    """
    metadata = _metadata(tuple(batch.nodes), tuple(batch.indptr))
    found = [tuple(accumulate(batch.num_nodes[name])) for name in metadata.node_types]
    # the nodes known before each hop, and in the end
    known = tuple(zip(*found, strict=True))
    num_hops = len(known) - 1
    if num_hops < 1:
        raise ValueError(f"{batch} has no hops\n\nhint: sample with one fanout for each layer")
    blocks: list[HeteroBlock] = []
    for hop in reversed(range(num_hops)):
        num_src, num_dst = known[hop + 1], known[hop]
        if batch.num_edges is None:
            if 0 < hop < num_hops - 1:
                blocks.append(blocks[-1])
                continue
            num_src, num_dst = known[-1], known[-1] if hop else known[0]
        relations = [batch.csc(each, hop) for each in metadata.edge_types]
        blocks.append(_merge(metadata, relations, num_src, num_dst, empty))
    return tuple(blocks)


def build_full_hetero_blocks(
    graph: Graph,
    num_layers: int,
    *,
    targets: Iterable[str] | None = None,
    device: torch.device | str = "cpu",
) -> tuple[HeteroBlock, ...]:
    """Return blocks of a whole graph, for training on all nodes and edges in each step.

    Args:
        graph: its arrays are checked first, see `Graph.check`.
        num_layers: number of layers.
        targets: node types whose outputs are computed by the last layer. Default: all.
        device: device of the blocks.

    Returns:
        One block per layer. Layers with the same destinations have the same block.

    Raises:
        ValueError: a target is not a node type, or the graph has a value out of range.
    """
    check_kind("graph", graph, Graph, "Graph.from_pyg, from_dgl or from_arrays")
    num_layers = check_integer("num_layers", num_layers, 1)
    graph.check()
    metadata = _metadata(tuple(graph.node_types), tuple(graph.edge_types))
    sizes = tuple(graph.nodes(name).num_nodes for name in metadata.node_types)
    last = set(metadata.node_types if targets is None else targets)
    unknown = sorted(last - set(metadata.node_types))
    if unknown:
        raise ValueError(f"targets has the node type {unknown[0]!r}, which the graph does not have")
    relations = [(graph.edges(each).indptr, graph.edges(each).indices) for each in graph.edge_types]
    last_sizes = tuple(
        size if name in last else 0 for name, size in zip(metadata.node_types, sizes, strict=True)
    )
    final = _merge(metadata, relations, sizes, last_sizes).to(device)
    if num_layers == 1:
        return (final,)
    if last_sizes == sizes:
        return (final,) * num_layers
    inner = _merge(metadata, relations, sizes, sizes).to(device)
    return (*[inner] * (num_layers - 1), final)


def _merge(
    metadata: HeteroMetadata,
    relations: Sequence[tuple[Tensor, Tensor]],
    num_src: tuple[int, ...],
    num_dst: tuple[int, ...],
    empty: Allocate | None = None,
) -> HeteroBlock:
    """Return the block of relations, each given as offsets and sources."""
    types = {name: t for t, name in enumerate(metadata.node_types)}
    rows = _offsets(num_src)
    columns = _offsets(_products(num_dst, metadata.edge_types_in))
    pairs = _offsets(_products(num_src, metadata.edge_types_out))
    edges = []
    for r, (indptr, indices) in enumerate(relations):
        source, _, destination = metadata.edge_types[r]
        s, d = types[source], types[destination]
        into, out = metadata.edge_types_in[d], metadata.edge_types_out[s]
        edges.append(
            RelationEdges(
                indptr=indptr,
                indices=indices,
                num_src=num_src[s],
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
        raise ValueError(
            f"edge type {edge_type} has an edge from {int(own.indices[error.edge])}, but its "
            f"block has {own.num_src} sources"
        ) from None
    return HeteroBlock(merged.indptr, merged.indices, merged.pairs, num_src, num_dst, metadata)


def _offsets(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(accumulate(sizes, initial=0))


def _products(sizes: Iterable[int], groups: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(size * len(group) for size, group in zip(sizes, groups, strict=True))


K = TypeVar("K", bound=Hashable)

# page faults of newly allocated memory would take longer than writing row and col
_pool = Pool()


@dataclass(repr=False)
class HeteroBatch(Compact):
    """A sampled subgraph with several types of nodes and edges; ids and positions are int64.

    A sampler returns tensors on the host. In a minibatch of a loader for a GPU, all tensors but
    `items` are on the GPU.

    Attributes:
        nodes: for each node type (B_t,) node ids: the seeds, then the other nodes in the order in
            which they were found. In disjoint subgraphs each has its own copy of a node.
        seeds: for each node type of the seeds (S_t,) ids, a view of `nodes`.
        indptr: for each edge type int64 offsets of the in-edges of its destinations in `indices`.
            With `once`, and for induced and bidirectional subgraphs, they are those of one CSC, and
            the edges of the first hops are a prefix of it. Otherwise each hop has offsets for all
            destinations that are known before it, one after another. See `csc`.
        indices: for each edge type (E_r,) int32 positions of the sources in `nodes` of their type,
            in the order of hops and destinations.
        edge_ids: for each edge type (E_r,) edge ids in the graph; None if they are not returned.
            In bidirectional subgraphs without the edge types whose edges were merged.
        num_nodes: for each node type L + 1 numbers: of the seeds, and of the nodes that each hop
            found.
        num_edges: for each edge type L numbers of sampled edges, by hop; None for induced and
            bidirectional subgraphs.
        subgraphs: for disjoint subgraphs (B_t,) the number of the seed that each node belongs to;
            seeds of several types are numbered consecutively in their order. PyG's `batch`.
        seed_times: (S,) times of the seeds, for temporal sampling.
        times: seconds that the work on this minibatch took, by keys that end in `_s`.
        once: whether each hop has only in-edges of the nodes that the hop before found; otherwise
            of all nodes that were known.
        blocks: for a loader's minibatch one block for each layer, input layer first.
        x: for a loader's minibatch (B_t, D_t) features of `nodes` of the types that have some, with
            the dtype of the features. The models convert them; `torch.nn.Linear` requires
            `x[name].float()` for dtypes other than float32.
        y: (S,) or (S, T) labels of the seeds; for link prediction (P,) float32, 1 for edges and 0
            for negatives.
        pairs: for link prediction (2, P) positions of the pairs to score: of their sources in
            `nodes` of the source type, and of their destinations in `nodes` of theirs.
        reordered: for bidirectional subgraphs (2, E_r) rows and columns of each edge type in the
            order of PyG; see `edge_index`.
        items: the elements of the loader's `seeds` in this minibatch, on the host.
        spans: start, end and thread of the work of the loader's threads.
        stages: timed work on CUDA streams, finished or pending.
    """

    nodes: dict[str, Tensor]
    seeds: dict[str, Tensor]
    indptr: dict[EdgeType, Tensor]
    indices: dict[EdgeType, Tensor]
    edge_ids: dict[EdgeType, Tensor] | None
    num_nodes: dict[str, tuple[int, ...]]
    num_edges: dict[EdgeType, tuple[int, ...]] | None
    subgraphs: dict[str, Tensor] | None = None
    seed_times: Tensor | None = None
    times: dict[str, float] = field(default_factory=dict)
    once: bool = True
    blocks: tuple[HeteroBlock, ...] = ()
    x: dict[str, Tensor] | None = None
    y: Tensor | None = None
    pairs: Tensor | None = None
    reordered: dict[EdgeType, Tensor] = field(default_factory=dict)
    items: Tensor | None = None
    spans: list[Span] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)

    @property
    def row(self) -> dict[EdgeType, Tensor]:
        """For each edge type (E_r,) int64 positions of the sources in `nodes` of their type."""
        return {each: edges[0] for each, edges in self._edge_indices.items()}

    @property
    def col(self) -> dict[EdgeType, Tensor]:
        """For each edge type (E_r,) int64 positions of the destinations in `nodes` of their type.

        With directional subgraphs, the edges of a hop are in the order of their destinations.
        """
        return {each: edges[1] for each, edges in self._edge_indices.items()}

    @cached_property
    def _edge_indices(self) -> dict[EdgeType, Tensor]:
        return {each: self.edge_index(each) for each in self.indptr}

    def to(self, device: torch.device | str) -> "HeteroBatch":
        """Return a copy whose tensors but `items` are on `device`; it waits for the copies."""

        def copy(tensors: Iterable[Tensor]) -> list[Tensor]:
            return [tensor.to(device) for tensor in tensors]

        moved = self.copy_tensors(
            dict(zip(self.nodes, copy(self.nodes.values()), strict=True)), copy
        )
        if self.x is not None:
            moved.x = dict(zip(self.x, copy(self.x.values()), strict=True))
        return moved

    def node_ids(self) -> dict[str, Tensor]:
        """Return the ids of all nodes by node type."""
        return self.nodes

    def copy_tensors(self, nodes: Mapping[str, Tensor], copy: CopyTensors) -> "HeteroBatch":
        """Return a minibatch of copies of the tensors but `x` and `items`; views remain views.

        Each tensor is copied once, even if it belongs to several blocks or edge types.

        Args:
            nodes: copies of `node_ids`.
            copy: returns copies of tensors of one dtype.
        """
        blocks = {id(block): block for block in self.blocks}
        given: list[Tensor] = [*self.indptr.values(), *self.indices.values()]
        given += [*(self.edge_ids or {}).values(), *(self.subgraphs or {}).values()]
        given += self.reordered.values()
        given += [] if self.seed_times is None else [self.seed_times]
        for block in blocks.values():
            given += [block.indptr, block.indices, block.pairs]
        by_dtype: dict[torch.dtype, dict[int, Tensor]] = {}
        for tensor in given:
            by_dtype.setdefault(tensor.dtype, {})[id(tensor)] = tensor
        copies: dict[int, Tensor] = {}
        for own in by_dtype.values():
            copies |= zip(own, copy([*own.values()]), strict=True)

        def copied(tensors: Mapping[K, Tensor]) -> dict[K, Tensor]:
            return {key: copies[id(tensor)] for key, tensor in tensors.items()}

        copied_blocks = {
            key: replace(
                block,
                indptr=copies[id(block.indptr)],
                indices=copies[id(block.indices)],
                pairs=copies[id(block.pairs)],
            )
            for key, block in blocks.items()
        }
        return replace(
            self,
            nodes=dict(nodes),
            seeds={name: nodes[name][: len(own)] for name, own in self.seeds.items()},
            indptr=copied(self.indptr),
            indices=copied(self.indices),
            reordered=copied(self.reordered),
            edge_ids=None if self.edge_ids is None else copied(self.edge_ids),
            subgraphs=None if self.subgraphs is None else copied(self.subgraphs),
            seed_times=None if self.seed_times is None else copies[id(self.seed_times)],
            blocks=tuple(copied_blocks[id(block)] for block in self.blocks),
            # not with the others: labels that are kept would keep the memory of the edges
            y=None if self.y is None else copy([self.y])[0],
            pairs=None if self.pairs is None else copy([self.pairs])[0],
        )

    def set_features(self, x: Mapping[str, Tensor]) -> None:
        """Set `x` to the features by node type."""
        self.x = dict(x)

    def edge_index(self, edge_type: EdgeType, empty: Allocate | None = None) -> Tensor:
        """Return the (2, E_r) int64 rows and columns of an edge type, as PyG's `edge_index`.

        Args:
            edge_type: the edge type.
            empty: allocates the result, on the host.
        """
        if edge_type in self.reordered:
            return self.reordered[edge_type]
        indices, num_hops = self.indices[edge_type], len(self.num_nodes[edge_type[2]]) - 1
        parts = [self.csc(edge_type, hop) for hop in ([-1] if self.is_prefix else range(num_hops))]
        if indices.device.type != "cpu":
            cols = [torch.repeat_interleave(indptr.diff()) for indptr, _ in parts]
            return torch.stack([indices.long(), torch.cat(cols)])
        out = (empty or _pool.empty)(2 * len(indices), torch.int64).view(2, len(indices))
        begin = 0
        for indptr, own in parts:
            csc_to_coo(indptr, own, out[:, begin : begin + len(own)])
            begin += len(own)
        return out

    @property
    def is_prefix(self) -> bool:
        """Whether the edges of an edge type are one CSC, of which those of a hop are a prefix."""
        return self.once or self.num_edges is None

    def csc(self, edge_type: EdgeType, hop: int = -1) -> tuple[Tensor, Tensor]:
        """Return edges of an edge type in CSC format.

        Args:
            edge_type: the edge type.
            hop: number of a hop, -1 for the last one. The edges are those into the nodes that were
                known before the hop: of this hop, and with `once` also those of earlier hops.
                Induced and bidirectional subgraphs have all edges at each hop.

        Returns:
            `indptr` (destinations + 1,) int64 and `indices` int32 positions of the sources.
        """
        indptr, indices = self.indptr[edge_type], self.indices[edge_type]
        if self.num_edges is None:
            return indptr, indices
        num_dst = [*accumulate(self.num_nodes[edge_type[2]])]
        num_edges = [0, *accumulate(self.num_edges[edge_type])]
        hop = range(len(num_dst) - 1)[hop]
        first = 0 if self.once else sum(num_dst[:hop]) + hop
        begin = 0 if self.once else num_edges[hop]
        return indptr[first : first + num_dst[hop] + 1], indices[begin : num_edges[hop + 1]]

    def __repr__(self) -> str:
        """Return the numbers of nodes and edges, without their ids."""
        nodes = ", ".join(f"{name}={len(ids)}" for name, ids in self.nodes.items())
        edges = ", ".join(f"{name}={len(own)}" for name, own in self.indices.items())
        return f"HeteroBatch(nodes: {nodes}; edges: {edges})"
