"""Convert sampled minibatches to DGL's blocks and graphs.

DGL's public constructors check every id and wrap every tensor, which takes longer than sampling the
block. This module constructs DGL's graph index from our tensors directly, as DGL's samplers do.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from gcnzc.graph.graph import Graph
from gcnzc.graph.stores import EdgeStore, EdgeType, NodeStore
from gcnzc.graph.values import as_weights
from gcnzc.interop.column import as_table, gather_on_host
from gcnzc.interop.dgl.importing import block_class, import_dgl
from gcnzc.interop.engine import CscGraph, cached_graph, invert_edge_ids
from gcnzc.kernels.buffers import Pool
from gcnzc.kernels.structure.relation_columns import index_dtype
from gcnzc.kernels.threads import ForkSafeLock
from gcnzc.sampling.hetero import HeteroBatch

FORMATS = ["coo", "csr", "csc"]
# a node type, or an edge type with its source and destination types
Kind: TypeAlias = str | tuple[str, str, str]
# sources and destinations of edges, by edge type
Ends: TypeAlias = Mapping[EdgeType, tuple[Tensor, Tensor]]

_pool = Pool()


def is_typed(graph: Any) -> bool:
    """Whether a DGL graph has several types of nodes or edges."""
    return len(graph.ntypes) != 1 or len(graph.canonical_etypes) != 1


def to_csc(graph: Any) -> CscGraph:
    """Return the edges of a DGL graph as CSC on the host; cached while in use.

    They are copied, since some DGL functions sort DGL's own CSC in place. DGL creates and keeps its
    CSC format, as it does when its own samplers run.
    """
    arrays = {each: graph.adj_tensors("csc", etype=each) for each in graph.canonical_etypes}
    counts = {each: graph.num_nodes(each) for each in graph.ntypes}

    def build() -> CscGraph:
        edges, edge_ids = {}, {}
        for each, (indptr, indices, ids) in arrays.items():
            dtypes = index_dtype(counts[each[0]]), index_dtype(len(ids))
            sources, edge_ids[each] = sort_columns(indptr, indices, ids, *dtypes)
            edges[each] = EdgeStore(indptr.to(torch.int64, copy=True), sources)
        nodes = {each: NodeStore(count) for each, count in counts.items()}
        return CscGraph(Graph.from_stores(nodes, edges, check=False), edge_ids, is_typed(graph))

    tensors = [part for own in arrays.values() for part in own]
    return cached_graph((tuple(counts.items()), tuple(arrays)), tensors, build)


def sort_columns(
    indptr: Tensor, indices: Tensor, ids: Tensor, dtype: torch.dtype, id_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return copies of sources and DGL's edge ids, sorted by id in each column.

    Some DGL functions, such as `GlobalUniform`, sort DGL's CSC in place by source. In the order of
    the ids, a seed samples the same edges whether or not they ran.

    Args:
        indptr: (N + 1,) offsets of the columns.
        indices: (E,) sources.
        ids: (E,) edge ids, a permutation.
        dtype: of the copy of the sources.
        id_dtype: of the copy of the ids.

    Returns:
        The sources; and the ids, or None if each edge's id is its position.
    """
    starts = torch.zeros(len(ids) + 1, dtype=torch.bool)
    starts[indptr.long()] = True
    if bool((starts[1:-1] | (ids[1:] > ids[:-1])).all()):
        indices, ids = indices.to(dtype, copy=True), ids.to(id_dtype, copy=True)
    else:
        columns = torch.arange(len(indptr) - 1).repeat_interleave(indptr.long().diff())
        order = invert_edge_ids(ids)
        order = order[torch.argsort(columns[order], stable=True)]
        indices, ids = indices[order].to(dtype), ids[order].to(id_dtype)
    is_range = torch.equal(ids, torch.arange(len(ids), dtype=ids.dtype))
    return indices, None if is_range else ids


def with_weights(graph: Any, csc: CscGraph, name: str) -> CscGraph:
    """Return the edges with sampling weights, for the edge types that have them.

    Args:
        graph: a DGL graph.
        csc: its edges.
        name: of the edge data with the weights, which may be a mask.

    Raises:
        ValueError: no edge type has the data, or a weight is negative or not finite.
    """
    found, edges = csc.graph, {}
    for each in found.edge_types:
        store, data = found.edges(each), graph.edges[each].data
        if name in data:
            weights = as_weights(f"{name!r} of {each}", data[name], store.num_edges)
            ids = csc.edge_ids[each]
            # always a copy: the user may change the weights during an epoch
            weights = weights.clone() if ids is None else weights[ids.long()]
            store = replace(store, weight=weights)
        edges[each] = store
    if all(store.weight is None for store in edges.values()):
        raise ValueError(
            f"the sampler's prob or mask is {name!r}, which no edge type of the graph has"
        )
    nodes = {each: found.nodes(each) for each in found.node_types}
    return replace(csc, graph=Graph.from_stores(nodes, edges, check=False))


class BlockBuilder:
    """Builds DGL's blocks and graphs, with the data that the whole graph had at one time.

    As in DGL's own blocks, rows of the data are gathered when they are first read.

    Args:
        graph: a DGL graph on the host.

    Attributes:
        graph: a local copy of `graph`, whose data does not change.
        dtype: of all ids in the graph.
    """

    def __init__(self, graph: Any) -> None:
        # `local_var` gives each epoch its own columns. A column of a subgraph holds the parent's
        # rows and an index. On its first read DGL replaces the rows, then the index; a thread that
        # reads in between would index twice.
        self._given_graph, self.graph = graph, graph.local_var()
        self._structure = graph._graph
        self._dgl, self._block_class = import_dgl(), block_class()
        self.dtype: torch.dtype = graph.idtype
        self._empty = torch.empty(0, dtype=self.dtype)
        # the sources' types, then the destinations'
        numbers = {kind: number for number, kind in enumerate(graph.ntypes)}
        src, dst = ([numbers[each[end]] for each in graph.canonical_etypes] for end in (0, 2))
        self._block_metagraph = self._dgl.graph_index.from_coo(
            2 * len(numbers), src, [len(numbers) + number for number in dst], True
        )

    @property
    def is_outdated(self) -> bool:
        """Whether nodes or edges were added or removed since this object was created."""
        return self._given_graph._graph is not self._structure

    def with_current_data(self) -> Self:
        """Return a copy with the data that the graph has now."""
        other = copy.copy(self)
        other.graph = self._given_graph.local_var()
        return other

    @cached_property
    def csc(self) -> CscGraph:
        """The edges, which gcnzc samples."""
        return to_csc(self.graph)

    def to_dgl(self, ids: Mapping[Any, Tensor]) -> Any:
        """Return ids of the graph's dtype by type; without types, those of the only one."""
        found = {kind: convert_ids(own, self.dtype) for kind, own in ids.items()}
        return found if self.csc.is_typed else next(iter(found.values()))

    def build(self, batch: HeteroBatch) -> list[Any]:
        """Return the DGL blocks of a batch of complete blocks, input layer first, on the host.

        Args:
            batch: of a `gcnzc.Sampler` with `once=False`, with edge ids.
        """
        assert batch.edge_ids is not None, "the sampler returns edge ids"
        dgl, graph, convert = self._dgl, self.graph, partial(convert_ids, dtype=self.dtype)
        num_nodes = {kind: [*accumulate(own)] for kind, own in batch.num_nodes.items()}
        # converted once, for all blocks
        nodes = {kind: convert(ids) for kind, ids in batch.nodes.items()}
        # the numbers of edges in earlier hops
        ends = dict.fromkeys(batch.indices, 0)
        blocks = []
        for hop in range(len(next(iter(num_nodes.values()))) - 1):
            num_dst, num_src = (
                {kind: own[end] for kind, own in num_nodes.items()} for end in (hop, hop + 1)
            )
            relations, id_columns = [], []
            for each in graph.canonical_etypes:
                indptr, indices = batch.csc(each, hop)
                begin, ends[each] = ends[each], ends[each] + len(indices)
                relation = dgl.heterograph_index.create_unitgraph_from_csr(
                    *(2, num_src[each[0]], num_dst[each[2]], convert(indptr), convert(indices)),
                    *(make_edge_numbers(len(indices), self.dtype), FORMATS, True),
                )
                relations.append(relation)
                positions = batch.edge_ids[each][begin : ends[each]]
                id_columns.append(make_id_column(self.csc.edge_ids[each], positions, self.dtype))
            counts = [own[kind] for own in (num_src, num_dst) for kind in graph.ntypes]
            index = self._join(self._block_metagraph, relations, counts)
            block = self._block_class(index, (graph.ntypes, graph.ntypes), graph.etypes)
            ids = [nodes[kind][:n] for kind, n in zip(graph.ntypes * 2, counts, strict=True)]
            blocks.append(self._attach_data(block, graph._node_frames * 2, ids, id_columns))
        return blocks[::-1]

    def build_pair_graph(
        self, nodes: Mapping[str, Tensor], ends: Ends, edges: Mapping[EdgeType, Tensor] | None
    ) -> Any:
        """Return a DGL graph of pairs of nodes, on the host.

        Args:
            nodes: for each node type int64 ids in the whole graph.
            ends: for edge types with pairs, the indices of their ends in `nodes`.
            edges: DGL's ids of the edges, like `ends`; None for negative pairs, which have no data.
        """
        dgl, graph = self._dgl, self.graph
        relations = []
        for each in graph.canonical_etypes:
            src, dst = ends.get(each, (self._empty, self._empty))
            relation = dgl.heterograph_index.create_unitgraph_from_coo(
                1 if each[0] == each[2] else 2,
                *(len(nodes[each[0]]), len(nodes[each[2]])),
                *(convert_ids(src, self.dtype), convert_ids(dst, self.dtype)),
                FORMATS,
            )
            relations.append(relation)
        sizes = [len(nodes[each]) for each in graph.ntypes]
        index = self._join(graph._graph.metagraph, relations, sizes)
        pair_graph = dgl.DGLGraph(index, graph.ntypes, graph.etypes)
        ids = [convert_ids(nodes[each], self.dtype) for each in graph.ntypes]
        if edges is None:
            for each, own in zip(graph.ntypes, ids, strict=True):
                pair_graph.nodes[each].data[dgl.NID] = own
            return pair_graph
        id_columns = [
            dgl.frame.Column(convert_ids(edges.get(each, self._empty), self.dtype))
            for each in graph.canonical_etypes
        ]
        return self._attach_data(pair_graph, graph._node_frames, ids, id_columns)

    def _join(self, metagraph: Any, relations: list[Any], sizes: list[int]) -> Any:
        """Return DGL's index of a graph with these edge types."""
        if not self.csc.is_typed:
            return relations[0]
        numbers = self._dgl.utils.toindex(sizes, "int64")
        join = self._dgl.heterograph_index.create_heterograph_from_relations
        return join(metagraph, relations, numbers)

    def _attach_data(
        self, subgraph: Any, node_frames: Any, nodes: list[Tensor], id_columns: list[Any]
    ) -> Any:
        """Set the data of nodes and edges, with their ids, in the order of the subgraph's types."""
        dgl = self._dgl
        frames = [frame.subframe(ids) for frame, ids in zip(node_frames, nodes, strict=True)]
        for frame, ids in zip(frames, nodes, strict=True):
            frame[dgl.NID] = ids
        pairs = zip(self.graph._edge_frames, id_columns, strict=True)
        edge_frames = [make_edge_frame(*pair) for pair in pairs]
        dgl.utils.set_new_frames(subgraph, node_frames=frames, edge_frames=edge_frames)
        return subgraph


def convert_ids(ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ids on the host with another dtype, in memory that is reused."""
    if ids.dtype == dtype:
        return ids
    out = _pool.empty(len(ids), dtype)
    # NumPy copies in this thread; torch would start more threads
    np.copyto(out.numpy(), ids.numpy())
    return out


def make_edge_numbers(count: int, dtype: torch.dtype) -> Tensor:
    """Return the numbers of the edges of a block in CSC order, from 0.

    DGL's CPU kernels that read edges require them. Each block has its own, since DGL may sort a
    graph's CSC in place.
    """
    return torch.from_numpy(np.arange(count, dtype=str(dtype).removeprefix("torch.")))


def make_id_column(edge_ids: Tensor | None, positions: Tensor, dtype: torch.dtype) -> Any:
    """Return a column of the DGL ids of edges, which are gathered when they are first read.

    Few training loops read them, and gathering them takes as long as reading the neighbours. Until
    they are read, the column keeps `edge_ids` in memory.

    Args:
        edge_ids: (E,) DGL's id of each edge in CSC order; None if the ids are the positions.
        positions: (B,) int64 positions in CSC order.
        dtype: of ids in the graph.
    """
    frame = import_dgl().frame
    if edge_ids is None:
        return frame.Column(convert_ids(positions, dtype))
    return _column_class()(edge_ids, frame.Scheme((), dtype), positions, None, dtype)


def make_edge_frame(frame: Any, id_column: Any) -> Any:
    """Return the data of edges, with their ids.

    Args:
        frame: the data of all edges. If there is any, the ids are read now.
        id_column: column of the ids of the edges.
    """
    dgl = import_dgl()
    if not frame._columns:
        found = dgl.frame.Frame(num_rows=len(id_column))
        found._initializers = frame._initializers
        found._default_initializer = frame._default_initializer
    else:
        found = frame.subframe(id_column.data)
    # Frame's constructor and item assignment would copy the column to one of DGL's class
    found._columns[dgl.EID] = id_column
    return found


def fill_lazy_features(subgraph: Any, gather: Callable[[Kind, str, Tensor], Tensor | None]) -> None:
    """Replace DGL's `LazyFeature`s by rows, and gather other data when it is read.

    Args:
        subgraph: a DGL block or graph.
        gather: called with the node type or edge type of the data, its name, and the ids; returns
            the rows, or None to keep the `LazyFeature`.
    """
    dgl = import_dgl()
    column_class, lazy_class = dgl.frame.Column, _column_class()
    for kinds, frames, id_name in (
        # of a block first the sources' types, then the destinations'
        (subgraph.ntypes, subgraph._node_frames, dgl.NID),
        (subgraph.canonical_etypes, subgraph._edge_frames, dgl.EID),
    ):
        for kind, frame in zip(kinds, frames, strict=True):
            for name, column in list(frame._columns.items()):
                if isinstance(column, dgl.frame.LazyFeature):
                    ids = frame[id_name] if column.id_ is None else column.id_
                    rows = gather(kind, column.name or name, ids)
                    if rows is not None:
                        frame[name] = rows
                elif type(column) is column_class and column.index is not None:
                    frame._columns[name] = lazy_class(
                        *(column.storage, column.scheme, column.index),
                        *(column.device, column.deferred_dtype),
                    )


@cache
def _column_class() -> Any:
    """Return a subclass of DGL's column that gathers its rows with `gather_on_host` when read."""
    Column = import_dgl().frame.Column

    class GatheredColumn(Column):  # type: ignore[misc, valid-type]
        def __init__(self: Any, *args: Any) -> None:
            super().__init__(*args)
            self._reading = ForkSafeLock()

        def _gathered(self: Any) -> Tensor:
            # threads of a training loop may read it at once
            with self._reading:
                return self._gather()

        def _gather(self: Any) -> Tensor:
            storage = self.storage
            if self.index is not None and storage.device.type == "cpu":
                # that of a subgraph's data is a chain of indices, which `flatten` combines
                index, table = self.index.flatten(), None
                if index.device.type == "cpu" and not storage.requires_grad:
                    table = as_table(storage)
                if table is not None:
                    shape = (len(index), *storage.shape[1:])
                    self.storage, self.index = gather_on_host(table, index).view(shape), None
            return Column.data.fget(self)

        data = property(_gathered, Column.data.fset)

        def __reduce__(self: Any) -> tuple[Any, tuple[Any, ...]]:
            # a worker process sends only the gathered rows, in a column of DGL's own class
            return Column, (self.data, self.scheme)

    return GatheredColumn
