"""Read a PyG `Data`: its graph as CSC, and its attributes of nodes and of edges."""

import copy
import weakref
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.interop.column import Column
from gcnzc.interop.pyg.importing import import_pyg
from gcnzc.kernels.structure.csc import csc_order
from gcnzc.system.arguments import check_edge_index, describe

Tables = Mapping[str, FeatureTable]


@dataclass(frozen=True, eq=False)
class CscEdges:
    """The edges of an `edge_index` as CSC."""

    graph: Graph
    # (E, 1): the index in `edge_index` of each edge of the graph; None: the same order
    order: Column | None
    # keeps the tensor alive, since its address is in the cache's key
    edge_index: Tensor


# The loaders of training and evaluation share one sorted graph.
_cache: weakref.WeakValueDictionary[Any, CscEdges] = weakref.WeakValueDictionary()


def to_csc(data: Any, is_sorted: bool) -> CscEdges:
    """Return the graph of a `Data` as CSC; it is cached per `edge_index` while it is in use.

    Args:
        data: a PyG `Data`; messages go from `edge_index[0]` to `edge_index[1]`.
        is_sorted: assume that `edge_index[1]` is ascending, without a check.

    Raises:
        ValueError: `data` is not a `Data`, has no `edge_index` of integers and shape (2, E), or
            has edges with ids that are not nodes.
    """
    edge_index = _check_edges(data)
    num_nodes = data.num_nodes
    key = (
        *(edge_index.data_ptr(), edge_index._version, edge_index.stride(), edge_index.shape),
        *(edge_index.device, num_nodes, is_sorted),
    )
    found = _cache.get(key)
    if found is None:
        # neighbours are sampled on the host
        src, dst = edge_index.cpu()
        graph = Graph.from_edges(src, dst, num_nodes)
        order = None
        if not is_sorted and bool((dst[1:] < dst[:-1]).any()):
            rows = csc_order(graph.indptr, dst)
            order = Column("e_id", rows, len(rows), torch.device("cpu"), ExitStack())
        found = _cache[key] = CscEdges(graph, order, edge_index)
    return found


@dataclass(eq=False)
class Attributes:
    """The attributes of a `Data`, by how minibatches get their values."""

    template: Any  # the Data without attributes of nodes and edges; minibatches are copies of it
    has_num_nodes: bool
    prefetched: Column | None  # the node attribute that `gcnzc.Loader` gathers
    nodes: dict[str, Column] = field(default_factory=dict)
    edges: dict[str, Column] = field(default_factory=dict)
    # name, values, dimension of the nodes or edges (not 0), whether it is of nodes
    other_dims: list[tuple[str, Tensor, int, bool]] = field(default_factory=list)

    def slice_on_host(self, nodes: Tensor, edges: Tensor) -> dict[str, Tensor]:
        """Gather the attributes on the host, except the prefetched one, for a minibatch.

        Args:
            nodes: (B,) node ids, on the host.
            edges: (E,) indices in `edge_index`, on the host.
        """
        return self._slice(nodes, edges, are_on_host=True)

    def slice_on_gpus(self, nodes: Tensor, edges: Tensor) -> dict[str, Tensor]:
        """Gather the attributes on GPUs, except the prefetched one, each on its own GPU.

        Args:
            nodes: (B,) node ids, on any device.
            edges: (E,) indices in `edge_index`, on any device.
        """
        return self._slice(nodes, edges, are_on_host=False)

    def _slice(self, nodes: Tensor, edges: Tensor, are_on_host: bool) -> dict[str, Tensor]:
        found = {}
        for attributes, ids in ((self.nodes, nodes), (self.edges, edges)):
            for name, column in attributes.items():
                if column.is_on_host == are_on_host:
                    found[name] = column.gather_on_device(ids)
        for name, value, dim, is_nodes in self.other_dims:
            if (value.device.type == "cpu") == are_on_host:
                ids = nodes if is_nodes else edges
                found[name] = value.index_select(dim, ids.to(value.device))
        return found


def read_attributes(
    data: Any,
    graph: Graph,
    tables: Tables,
    excluded: Collection[str],
    device: torch.device,
    locks: ExitStack,
) -> Attributes:
    """Divide the attributes of a `Data`, as PyG does, into those of nodes, of edges, and others.

    Args:
        data: a PyG `Data`.
        graph: the graph of `data`.
        tables: tables by name, which replace node attributes.
        excluded: names of attributes that minibatches do not take from `data`.
        device: the device of the minibatches.
        locks: keeps rows page-locked for a GPU until it is closed.

    Raises:
        ValueError: an attribute of nodes or edges is not a tensor, or requires a gradient.
    """
    template = copy.copy(data)
    found = Attributes(template, "num_nodes" in data, None)
    for name, table in tables.items():
        found.nodes[name] = Column(name, table, graph.num_nodes, device, locks)
    for name, value in data.to_dict().items():
        is_nodes = data.is_node_attr(name)
        if name in ("edge_index", "num_nodes") or name in excluded or name in tables:
            del template[name]
        elif is_nodes or data.is_edge_attr(name):
            del template[name]
            rows, dim = _check_tensor(name, value), data.__cat_dim__(name, value)
            if dim != 0:
                found.other_dims.append((name, rows, dim, is_nodes))
                continue
            attributes = found.nodes if is_nodes else found.edges
            num_rows = graph.num_nodes if is_nodes else graph.num_edges
            attributes[name] = Column(name, rows, num_rows, device, locks)
    found.prefetched = _prefetched_column(found.nodes, tables)
    if found.prefetched is not None:
        del found.nodes[found.prefetched.name]
    return found


def _prefetched_column(nodes: dict[str, Column], tables: Tables) -> Column | None:
    for name in (*tables, "x"):
        if name in nodes and nodes[name].is_prefetched:
            return nodes[name]
    return None


def _check_tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(value)
    if not isinstance(value, Tensor):
        raise ValueError(f"data.{name} is {describe(value)}, which cannot be sliced to a minibatch")
    return value


def _check_edges(data: Any) -> Tensor:
    Data = import_pyg().data.Data
    if not isinstance(data, Data):
        what, hint = describe(data), "a torch_geometric.data.Data"
        if isinstance(data, import_pyg().data.HeteroData):
            what = f"HeteroData: node types {data.node_types}, edge types {data.edge_types}"
            hint = "derive classes from HeteroNeighborLoader or HeteroLinkNeighborLoader"
        elif isinstance(data, tuple):
            what = "a tuple that is not a pair of stores"
            hint += ", a HeteroData, or a pair (FeatureStore, GraphStore)"
        raise ValueError(f"data: gcnzc's loader does not support {what}\n\nhint: {hint}")
    edge_index = getattr(data, "edge_index", None)
    if isinstance(edge_index, import_pyg().EdgeIndex):
        edge_index = edge_index.as_tensor()
    if edge_index is None and "adj_t" not in data:
        # as PyG does
        return torch.empty((2, 0), dtype=torch.int64)
    if not isinstance(edge_index, Tensor):
        other = "adj_t" if "adj_t" in data else f"edge_index of type {type(edge_index).__name__}"
        raise ValueError(
            f"gcnzc's loader does not support {other}\n\n"
            "hint: edge_index of shape (2, E), with sources in row 0 and destinations in row 1; "
            "torch_geometric.utils.to_edge_index(adj_t)[0].flip(0) converts adj_t"
        )
    return check_edge_index("edge_index", edge_index)
