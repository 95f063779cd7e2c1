"""Sampled minibatches as DGL's blocks and graphs.

DGL's public constructors check every number and wrap every tensor; a block from them costs more
than drawing it. Here DGL's graph index is made of our tensors as they are, as DGL's samplers do.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.interop.column import as_table, gather_on_host
from gcnzc.interop.dgl.importing import block_class, import_dgl
from gcnzc.kernels.buffers import Pool
from gcnzc.sampling.batch import Batch, Block

FORMATS = ["coo", "csr", "csc"]


_pool = Pool()


@dataclass(frozen=True, eq=False)
class DglColumns:
    """The in-edges of a DGL graph's nodes, in memory of our own."""

    graph: Graph
    # (E,) DGL's number of each edge of `graph`, int32 below 2**31 edges; None: its place there
    edge_ids: Tensor | None
    held: Tensor  # of DGL, so that its address stays its own


# Training and evaluation load from one graph, whose ids are then copied once.
_known: weakref.WeakValueDictionary[Any, DglColumns] = weakref.WeakValueDictionary()


def columns_of(graph: Any) -> DglColumns:
    """The in-edges of a DGL graph, on the host; made once as long as anything refers to them.

    They are copied, since DGL sorts its columns in place when something asks for that.

    Args:
        graph: with one type of nodes and one of edges. DGL keeps its columns from now on, as it
            does when it samples itself.
    """
    indptr, indices, ids = graph.adj_tensors("csc")
    key = (indptr.data_ptr(), indices.data_ptr(), ids.data_ptr(), graph.num_edges())
    found = _known.get(key)
    if found is None:
        edge_ids = None
        if not torch.equal(ids, torch.arange(len(ids), dtype=ids.dtype)):
            narrow = len(ids) < 2**31
            edge_ids = ids.to(torch.int32 if narrow else torch.int64, copy=True)
        sources = indices.to(torch.int32 if graph.num_nodes() < 2**31 else torch.int64, copy=True)
        made = Graph(indptr.clone(), sources, check=False)
        found = _known[key] = DglColumns(made, edge_ids, indices)
    return found


class Blocks:
    """Makes DGL's blocks and graphs, with the data of the nodes and edges of a whole graph.

    Data is taken when it is first read, as from DGL's own blocks.

    Args:
        graph: with one type of nodes and one of edges, on the host.
    """

    def __init__(self, graph: Any) -> None:
        self._whole = graph
        self.renew()
        self.columns = columns_of(graph)
        self._dgl, self._block_class = import_dgl(), block_class()
        # DGL joins the tensors of a graph by their type
        self.dtype: torch.dtype = graph.idtype
        ids = self.columns.edge_ids
        self._ids = None if ids is None else FeatureTable(ids.view(-1, 1))
        self._none = torch.empty(0, dtype=self.dtype)

    def renew(self) -> None:
        """Take the data that the graph has now.

        Data of a graph that was cut from another is rows and their numbers until the first time it
        is read, and DGL then changes the one after the other. So threads have columns of their own.
        """
        self.graph = self._whole.local_var()

    def edge_ids(self, edges: Tensor) -> Tensor:
        """(E,) DGL's numbers of edges, from their places in the columns, of the graph's type."""
        if self._ids is None:
            return self._typed(edges)
        return self._typed(gather_on_host(self._ids, edges, threads=1).view(-1))

    def of(self, batch: Batch) -> list[Any]:
        """The blocks of a batch that was drawn with edge ids, outermost first, on the host."""
        return [self._block(block) for block in batch.blocks]

    def pairs(self, nodes: Tensor, src: Tensor, dst: Tensor, edges: Tensor | None) -> Any:
        """A graph of edges between some nodes, on the host.

        Args:
            nodes: (S,) int64 ids in the graph.
            src: (P,) int64 places in `nodes`.
            dst: like `src`.
            edges: (P,) DGL's numbers of the edges; None of pairs that are none, which have no data.
        """
        dgl, graph = self._dgl, self.graph
        index = dgl.heterograph_index.create_unitgraph_from_coo(
            1, len(nodes), len(nodes), self._typed(src), self._typed(dst), FORMATS
        )
        made = dgl.DGLGraph(index, graph.ntypes, graph.etypes)
        ids = self._typed(nodes)
        if edges is None:
            made.ndata[dgl.NID] = ids
            return made
        return self._with_data(made, [ids], self._typed(edges))

    def _block(self, block: Block) -> Any:
        dgl, graph = self._dgl, self.graph
        assert block.edge_ids is not None, "blocks of DGL know their edges"
        index = dgl.heterograph_index.create_unitgraph_from_csr(
            2,
            block.num_src,
            block.num_dst,
            self._typed(block.indptr),
            self._typed(block.indices),
            self._none,
            FORMATS,
            True,
        )
        made = self._block_class(index, (graph.ntypes, graph.ntypes), graph.etypes)
        nodes = self._typed(block.nodes)
        edges = self.edge_ids(block.edge_ids)
        return self._with_data(made, [nodes, nodes[: block.num_dst]], edges)

    def _with_data(self, made: Any, nodes: list[Tensor], edges: Tensor) -> Any:
        dgl, graph = self._dgl, self.graph
        frames = [graph._node_frames[0].subframe(ids) for ids in nodes]
        for frame, ids in zip(frames, nodes, strict=True):
            frame[dgl.NID] = ids
        of_edges = graph._edge_frames[0].subframe(edges)
        of_edges[dgl.EID] = edges
        dgl.utils.set_new_frames(made, node_frames=frames, edge_frames=[of_edges])
        return made

    def _typed(self, numbers: Tensor) -> Tensor:
        if numbers.dtype == self.dtype:
            return numbers
        out = _pool.empty(len(numbers), self.dtype)
        # torch would start threads beside the one that makes the minibatch
        np.copyto(out.numpy(), numbers.numpy())
        return out


def fill(made: Any, rows_of: Callable[[bool, str, Tensor], Tensor | None]) -> None:
    """Put rows where a sampler marked that data should be there; the rest waits until it is read.

    Args:
        made: a block or graph of DGL's.
        rows_of: rows from whether they are of nodes, a name, and ids; None leaves the mark.
    """
    dgl = import_dgl()
    column_class, lazy_class = dgl.frame.Column, _column_class()
    for frames, of_nodes, name_of_ids in (
        (made._node_frames, True, dgl.NID),
        (made._edge_frames, False, dgl.EID),
    ):
        for frame in frames:
            for name, column in list(frame._columns.items()):
                if isinstance(column, dgl.frame.LazyFeature):
                    ids = frame[name_of_ids] if column.id_ is None else column.id_
                    rows = rows_of(of_nodes, column.name or name, ids)
                    if rows is not None:
                        frame[name] = rows
                elif type(column) is column_class and column.index is not None:
                    frame._columns[name] = lazy_class(
                        *(column.storage, column.scheme, column.index),
                        *(column.device, column.deferred_dtype),
                    )


@cache
def _column_class() -> Any:
    """A column of DGL's whose rows come by our gather, into memory that is used again."""
    Column = import_dgl().frame.Column

    class GatheredColumn(Column):  # type: ignore[misc, valid-type]
        def _gathered(self: Any) -> Tensor:
            storage = self.storage
            if self.index is not None and storage.device.type == "cpu":
                # of a graph cut from another, ids of ids
                index, table = self.index.flatten(), None
                if index.device.type == "cpu" and not storage.requires_grad:
                    table = as_table(storage)
                if table is not None:
                    shape = (len(index), *storage.shape[1:])
                    self.storage, self.index = gather_on_host(table, index).view(shape), None
            return Column.data.fget(self)

        data = property(_gathered, Column.data.fset)

        def __reduce__(self: Any) -> tuple[Any, tuple[Any, ...]]:
            # a worker process sends its rows alone, in a column of DGL's
            return Column, (self.data, self.scheme)

    return GatheredColumn
