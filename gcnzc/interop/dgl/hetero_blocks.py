"""Convert sampled minibatches of heterogeneous graphs to DGL's blocks and graphs.

As in `gcnzc.interop.dgl.blocks`, DGL's graph index is constructed from our tensors directly.
"""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gcnzc.graph.hetero.graph import EdgeType, HeteroGraph
from gcnzc.graph.hetero.stores import EdgeStore, NodeStore
from gcnzc.graph.hetero.values import as_weights
from gcnzc.interop.dgl.blocks import (
    FORMATS,
    GraphView,
    convert_ids,
    invert_edge_ids,
    make_edge_frame,
    make_edge_numbers,
    make_id_column,
    sort_columns,
)
from gcnzc.kernels.structure.relation_columns import index_dtype
from gcnzc.sampling.hetero import HeteroBatch

# sources and destinations of edges, by edge type
Ends: TypeAlias = Mapping[EdgeType, tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class TypedCsc:
    """The edges of a DGL graph in our own memory."""

    # without edge ids
    graph: HeteroGraph
    # by edge type (E,) DGL's id of each edge in CSC order; None: its position
    edge_ids: Mapping[EdgeType, Tensor | None]
    # keeps DGL's tensors alive, since their addresses are in the cache's key
    dgl_tensors: tuple[Tensor, ...]
    # what `positions` computed
    _positions: dict[EdgeType, Tensor] = field(default_factory=dict)

    def positions(self, edge_type: EdgeType, ids: Tensor) -> Tensor:
        """Return the CSC positions of edges of a type, given by DGL's ids."""
        edge_ids = self.edge_ids[edge_type]
        if edge_ids is None:
            return ids
        found = self._positions.get(edge_type)
        if found is None:
            # two threads may both compute it, and one is kept
            found = self._positions.setdefault(edge_type, invert_edge_ids(edge_ids))
        return found[ids]


# The loaders of training and evaluation share one copy.
_cache: weakref.WeakValueDictionary[Any, TypedCsc] = weakref.WeakValueDictionary()


def to_typed_csc(graph: Any) -> TypedCsc:
    """Return the edges of a DGL graph with any types as CSC on the host; cached while in use.

    They are copied, since some DGL functions sort DGL's own CSC in place. DGL creates and keeps its
    CSC format, as it does when its own samplers run.
    """
    arrays = {each: graph.adj_tensors("csc", etype=each) for each in graph.canonical_etypes}
    counts = {each: graph.num_nodes(each) for each in graph.ntypes}
    key = (
        tuple(counts.items()),
        *((each, len(own[1]), *(part.data_ptr() for part in own)) for each, own in arrays.items()),
    )
    found = _cache.get(key)
    if found is None:
        edges, edge_ids = {}, {}
        for each, (indptr, indices, ids) in arrays.items():
            dtypes = index_dtype(counts[each[0]]), index_dtype(len(ids))
            sources, edge_ids[each] = sort_columns(indptr, indices, ids, *dtypes)
            edges[each] = EdgeStore(indptr.to(torch.int64, copy=True), sources)
        nodes = {each: NodeStore(count) for each, count in counts.items()}
        tensors = tuple(part for own in arrays.values() for part in own)
        found = _cache[key] = TypedCsc(HeteroGraph(nodes, edges, check=False), edge_ids, tensors)
    return found


def read_weights(graph: Any, csc: TypedCsc, name: str) -> HeteroGraph:
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
            f"the sampler's prob or mask is {name!r}, which no edge type of the graph has\n\n"
            f"hint: graph.edges[{found.edge_types[0]!r}].data[{name!r}] = ..."
        )
    return HeteroGraph({each: found.nodes(each) for each in found.node_types}, edges, check=False)


class HeteroBlockBuilder(GraphView):
    """Builds DGL's blocks and graphs of several types, with the data of the whole graph.

    As in DGL's own blocks, rows of the data are gathered when they are first read.

    Args:
        graph: a DGL graph on the host.
    """

    def __init__(self, graph: Any) -> None:
        super().__init__(graph)
        # the sources' types, then the destinations'
        numbers = {kind: number for number, kind in enumerate(graph.ntypes)}
        src, dst = ([numbers[each[end]] for each in graph.canonical_etypes] for end in (0, 2))
        self._block_metagraph = self._dgl.graph_index.from_coo(
            2 * len(numbers), src, [len(numbers) + number for number in dst], True
        )

    @cached_property
    def csc(self) -> TypedCsc:
        """The edges, which gcnzc samples."""
        return to_typed_csc(self.graph)

    def build(self, batch: HeteroBatch) -> list[Any]:
        """Return the DGL blocks of a batch of complete blocks, input layer first, on the host.

        Args:
            batch: of a `HeteroSampler` with `once=False`, with edge ids.
        """
        assert batch.num_edges is not None, "directional subgraphs have numbers of edges"
        num_nodes = {kind: [*accumulate(own)] for kind, own in batch.num_nodes.items()}
        num_hops = len(next(iter(num_nodes.values()))) - 1
        # converted once, for all blocks
        nodes = {kind: convert_ids(ids, self.dtype) for kind, ids in batch.nodes.items()}
        ends = dict.fromkeys(batch.indices, 0)
        blocks = []
        for hop in range(num_hops):
            counts = {kind: (own[hop], own[hop + 1]) for kind, own in num_nodes.items()}
            edges = {each: batch.csc(each, hop) for each in batch.indices}
            begins = ends
            ends = {each: begins[each] + len(indices) for each, (_, indices) in edges.items()}
            slices = {each: slice(begins[each], ends[each]) for each in edges}
            blocks.append(self._block(batch, nodes, counts, edges, slices))
        return blocks[::-1]

    def _block(
        self,
        batch: HeteroBatch,
        nodes: Mapping[str, Tensor],
        counts: Mapping[str, tuple[int, int]],
        edges: Mapping[EdgeType, tuple[Tensor, Tensor]],
        slices: Mapping[EdgeType, slice],
    ) -> Any:
        """Return the block of one hop.

        Args:
            batch: the batch.
            nodes: ids of all its nodes by type.
            counts: the numbers of destinations and sources by type.
            edges: offsets and sources of the edges of the hop by type.
            slices: their places among the edges of all hops.
        """
        assert batch.edge_ids is not None, "DGL's blocks have edge ids"
        dgl, graph = self._dgl, self.graph
        relations, id_columns = [], []
        for each in graph.canonical_etypes:
            (indptr, indices), part = edges[each], slices[each]
            num_dst, num_src = counts[each[2]][0], counts[each[0]][1]
            relation = dgl.heterograph_index.create_unitgraph_from_csr(
                *(2, num_src, num_dst),
                convert_ids(indptr, self.dtype),
                convert_ids(indices, self.dtype),
                make_edge_numbers(part.stop - part.start, self.dtype),
                *(FORMATS, True),
            )
            relations.append(relation)
            edge_ids = self.csc.edge_ids[each]
            id_columns.append(make_id_column(edge_ids, batch.edge_ids[each][part], self.dtype))
        num_src_nodes = [counts[each][1] for each in graph.ntypes]
        num_dst_nodes = [counts[each][0] for each in graph.ntypes]
        sizes = dgl.utils.toindex([*num_src_nodes, *num_dst_nodes], "int64")
        index = dgl.heterograph_index.create_heterograph_from_relations(
            self._block_metagraph, relations, sizes
        )
        block = self._block_class(index, (graph.ntypes, graph.ntypes), graph.etypes)
        ids = [nodes[kind][: counts[kind][end]] for end in (1, 0) for kind in graph.ntypes]
        return self._attach_data(block, graph._node_frames * 2, ids, id_columns)

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
        sizes = dgl.utils.toindex([len(nodes[each]) for each in graph.ntypes], "int64")
        index = dgl.heterograph_index.create_heterograph_from_relations(
            graph._graph.metagraph, relations, sizes
        )
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
