"""Convert sampled minibatches to DGL's blocks and graphs.

DGL's public constructors check every id and wrap every tensor, which takes longer than sampling the
block. This module constructs DGL's graph index from our tensors directly, as DGL's samplers do.
"""

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from gcnzc.graph.graph import Graph
from gcnzc.interop.column import as_table, gather_on_host
from gcnzc.interop.dgl.importing import block_class, import_dgl
from gcnzc.kernels.buffers import Pool
from gcnzc.kernels.structure.relation_columns import index_dtype
from gcnzc.kernels.threads import ForkSafeLock
from gcnzc.sampling.batch import Batch, Block

FORMATS = ["coo", "csr", "csc"]
# a node type, or an edge type with its source and destination types
Kind: TypeAlias = str | tuple[str, str, str]

_pool = Pool()


@dataclass(frozen=True, eq=False)
class CscEdges:
    """The edges of a DGL graph as CSC, in our own memory."""

    graph: Graph
    # (E,) DGL's id of each edge of `graph`, int32 below 2**31 edges; None: its index in `graph`
    edge_ids: Tensor | None
    # keeps DGL's tensor alive, since its address is in the cache's key
    dgl_indices: Tensor


# The loaders of training and evaluation share one copy.
_cache: weakref.WeakValueDictionary[Any, CscEdges] = weakref.WeakValueDictionary()


def to_csc(graph: Any) -> CscEdges:
    """Return the edges of a DGL graph as CSC on the host; cached per graph while in use.

    They are copied, since some DGL functions sort DGL's own CSC in place.

    Args:
        graph: with one node type and one edge type. DGL creates and keeps its CSC format, as it
            does when its own samplers run.
    """
    indptr, indices, ids = graph.adj_tensors("csc")
    key = (indptr.data_ptr(), indices.data_ptr(), ids.data_ptr(), graph.num_edges())
    found = _cache.get(key)
    if found is None:
        sources, edge_ids = sort_columns(
            *(indptr, indices, ids, index_dtype(graph.num_nodes()), index_dtype(len(ids)))
        )
        csc = Graph(indptr.clone(), sources, check=False)
        found = _cache[key] = CscEdges(csc, edge_ids, indices)
    return found


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


class GraphView:
    """The data of a DGL graph as it was at one time, for the epochs that began then.

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

    @property
    def is_outdated(self) -> bool:
        """Whether nodes or edges were added or removed since this object was created."""
        return self._given_graph._graph is not self._structure

    def with_current_data(self) -> Self:
        """Return a copy with the data that the graph has now."""
        other = copy.copy(self)
        other.graph = self._given_graph.local_var()
        return other


class BlockBuilder(GraphView):
    """Builds DGL's blocks and graphs, with the node and edge data of the whole graph.

    As in DGL's own blocks, rows of the data are gathered when they are first read.

    Args:
        graph: with one node type and one edge type, on the host.
    """

    def __init__(self, graph: Any) -> None:
        super().__init__(graph)
        self.csc = to_csc(graph)

    def build(self, batch: Batch) -> list[Any]:
        """Return the DGL blocks of a batch with edge ids, input layer first, on the host."""
        return [self._block(block) for block in batch.blocks]

    def build_pair_graph(
        self, nodes: Tensor, src: Tensor, dst: Tensor, edges: Tensor | None
    ) -> Any:
        """Return a DGL graph of pairs of nodes, on the host.

        Args:
            nodes: (S,) int64 ids in the whole graph.
            src: (P,) int64 indices in `nodes`.
            dst: (P,) int64 indices in `nodes`.
            edges: (P,) DGL's ids of the edges; None for negative pairs, which have no edge data.
        """
        dgl, graph = self._dgl, self.graph
        index = dgl.heterograph_index.create_unitgraph_from_coo(
            1, len(nodes), len(nodes), self._to_idtype(src), self._to_idtype(dst), FORMATS
        )
        pair_graph = dgl.DGLGraph(index, graph.ntypes, graph.etypes)
        ids = self._to_idtype(nodes)
        if edges is None:
            pair_graph.ndata[dgl.NID] = ids
            return pair_graph
        id_column = dgl.frame.Column(self._to_idtype(edges))
        return self._attach_data(pair_graph, [ids], id_column)

    def _block(self, block: Block) -> Any:
        dgl, graph = self._dgl, self.graph
        assert block.edge_ids is not None, "DGL's blocks have edge ids"
        index = dgl.heterograph_index.create_unitgraph_from_csr(
            2,
            block.num_src,
            block.num_dst,
            self._to_idtype(block.indptr),
            self._to_idtype(block.indices),
            make_edge_numbers(block.num_edges, self.dtype),
            FORMATS,
            True,
        )
        dgl_block = self._block_class(index, (graph.ntypes, graph.ntypes), graph.etypes)
        nodes = self._to_idtype(block.nodes)
        id_column = make_id_column(self.csc.edge_ids, block.edge_ids, self.dtype)
        return self._attach_data(dgl_block, [nodes, nodes[: block.num_dst]], id_column)

    def _attach_data(self, subgraph: Any, nodes: list[Tensor], id_column: Any) -> Any:
        dgl, graph = self._dgl, self.graph
        frames = [graph._node_frames[0].subframe(ids) for ids in nodes]
        for frame, ids in zip(frames, nodes, strict=True):
            frame[dgl.NID] = ids
        edge_frame = make_edge_frame(graph._edge_frames[0], id_column)
        dgl.utils.set_new_frames(subgraph, node_frames=frames, edge_frames=[edge_frame])
        return subgraph

    def _to_idtype(self, ids: Tensor) -> Tensor:
        return convert_ids(ids, self.dtype)


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


def invert_edge_ids(edge_ids: Tensor) -> Tensor:
    """Return the (E,) int64 positions of edges by their ids, a permutation."""
    positions = torch.empty(len(edge_ids), dtype=torch.int64)
    positions[edge_ids.long()] = torch.arange(len(edge_ids))
    return positions


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
