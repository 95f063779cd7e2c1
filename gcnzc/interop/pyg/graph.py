"""Read a PyG `Data`: its graph as CSC, and its attributes by kind."""

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
from gcnzc.kernels.structure.order import csc_order
from gcnzc.system.arguments import describe

Tables = Mapping[str, FeatureTable]


@dataclass(frozen=True, eq=False)
class Columns:
    """The edges of an `edge_index`, column by column."""

    graph: Graph
    order: Column | None  # (E, 1): where each edge of the graph stands in the list; None: there
    edge_index: Tensor  # held, so that its address stays its own


# Training and evaluation load from one graph, which is then sorted once.
_known: weakref.WeakValueDictionary[Any, Columns] = weakref.WeakValueDictionary()


def columns_of(data: Any, is_sorted: bool) -> Columns:
    """The graph of a `Data`, made once for an `edge_index` as long as anything refers to it.

    Args:
        data: of PyG; messages go from `edge_index[0]` to `edge_index[1]`.
        is_sorted: trust that `edge_index[1]` ascends.

    Raises:
        ValueError: it is no `Data`, has another form of edges or none, or edges without a node.
    """
    edge_index = _check_edges(data)
    num_nodes = data.num_nodes
    key = (
        *(edge_index.data_ptr(), edge_index._version, edge_index.stride(), edge_index.shape),
        *(edge_index.device, num_nodes, is_sorted),
    )
    found = _known.get(key)
    if found is None:
        # neighbours are drawn on the host
        src, dst = edge_index.cpu()
        graph = Graph.from_edges(src, dst, num_nodes)
        places = None
        if not is_sorted and bool((dst[1:] < dst[:-1]).any()):
            rows = csc_order(graph.indptr, dst)
            places = Column("e_id", rows, len(rows), torch.device("cpu"), ExitStack())
        found = _known[key] = Columns(graph, places, edge_index)
    return found


@dataclass(eq=False)
class Attributes:
    """The attributes of a `Data` by what becomes of them in a minibatch."""

    template: Any  # the Data without what is cut to a minibatch
    has_num_nodes: bool
    wide: Column | None  # of the nodes, which `gcnzc.Loader` gathers
    nodes: dict[str, Column] = field(default_factory=dict)
    edges: dict[str, Column] = field(default_factory=dict)
    # cut along another dimension than the first
    odd: list[tuple[str, Tensor, int, bool]] = field(default_factory=list)

    def on_host(self, nodes: Tensor, edges: Tensor) -> dict[str, Tensor]:
        """What lies on the host, but the wide column, cut to a minibatch there.

        Args:
            nodes: (B,) ids, on the host.
            edges: (E,) places in `edge_index`, on the host.
        """
        return self._cut(nodes, edges, are_on_host=True)

    def on_gpus(self, nodes: Tensor, edges: Tensor) -> dict[str, Tensor]:
        """What lies on a GPU, but the wide column, cut to a minibatch where it lies.

        Args:
            nodes: (B,) ids, on any device.
            edges: (E,) places in `edge_index`, on any device.
        """
        return self._cut(nodes, edges, are_on_host=False)

    def _cut(self, nodes: Tensor, edges: Tensor, are_on_host: bool) -> dict[str, Tensor]:
        found = {}
        for columns, ids in ((self.nodes, nodes), (self.edges, edges)):
            for name, column in columns.items():
                if column.is_on_host == are_on_host:
                    found[name] = column.in_place(ids)
        for name, value, dim, is_nodes in self.odd:
            if (value.device.type == "cpu") == are_on_host:
                ids = nodes if is_nodes else edges
                found[name] = value.index_select(dim, ids.to(value.device))
        return found


def attributes_of(
    data: Any,
    graph: Graph,
    tables: Tables,
    replaced: Collection[str],
    device: torch.device,
    locks: ExitStack,
) -> Attributes:
    """Sort the attributes of a `Data`, as PyG does, into those of nodes, of edges, and others.

    Args:
        data: of PyG.
        graph: its graph.
        tables: in the place of attributes of the nodes.
        replaced: attributes that are left out.
        device: where minibatches are handed out.
        locks: keeps what is page-locked for a GPU.

    Raises:
        ValueError: one of nodes or edges is no tensor, or wants a gradient.
    """
    template = copy.copy(data)
    found = Attributes(template, "num_nodes" in data, None)
    for name, table in tables.items():
        found.nodes[name] = Column(name, table, graph.num_nodes, device, locks)
    for name, value in data.to_dict().items():
        is_nodes = data.is_node_attr(name)
        if name in ("edge_index", "num_nodes") or name in replaced or name in tables:
            del template[name]
        elif is_nodes or data.is_edge_attr(name):
            del template[name]
            rows, dim = _check_tensor(name, value), data.__cat_dim__(name, value)
            if dim != 0:
                found.odd.append((name, rows, dim, is_nodes))
                continue
            of = found.nodes if is_nodes else found.edges
            num_rows = graph.num_nodes if is_nodes else graph.num_edges
            of[name] = Column(name, rows, num_rows, device, locks)
    found.wide = _wide(found.nodes, tables)
    if found.wide is not None:
        del found.nodes[found.wide.name]
    return found


def _wide(nodes: dict[str, Column], tables: Tables) -> Column | None:
    for name in (*tables, "x"):
        if name in nodes and nodes[name].is_prefetched:
            return nodes[name]
    return None


def _check_tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if not isinstance(value, Tensor):
        raise ValueError(
            f"data.{name} is a {type(value).__name__}, which cannot be cut to a minibatch\n\n"
            "hint: a tensor with one row for each node or edge"
        )
    return value


def _check_edges(data: Any) -> Tensor:
    Data = import_pyg().data.Data
    if not isinstance(data, Data):
        what, hint = describe(data), "a torch_geometric.data.Data"
        if isinstance(data, import_pyg().data.HeteroData):
            what = f"HeteroData: node types {data.node_types}, edge types {data.edge_types}"
            hint = "the loader of torch_geometric.loader, with pyg-lib, for graphs with types"
        elif isinstance(data, tuple):
            what = "a pair of stores"
            hint += "; a feature store's tables go into tables={'x': table}"
        raise ValueError(f"data: a loader of gcnzc does not support {what}\n\nhint: {hint}")
    edge_index = getattr(data, "edge_index", None)
    if isinstance(edge_index, import_pyg().EdgeIndex):
        edge_index = edge_index.as_tensor()
    if edge_index is None and "adj_t" not in data:
        # as PyG does
        return torch.empty((2, 0), dtype=torch.int64)
    if not isinstance(edge_index, Tensor):
        other = "adj_t" if "adj_t" in data else f"edge_index of type {type(edge_index).__name__}"
        raise ValueError(
            f"a loader of gcnzc does not support {other}\n\n"
            "hint: edge_index of shape (2, E), sources above destinations; "
            "torch_geometric.utils.to_edge_index(adj_t) gives them"
        )
    if edge_index.ndim != 2 or edge_index.shape[0] != 2:
        raise ValueError(
            f"edge_index has shape {tuple(edge_index.shape)}\n\n"
            "hint: (2, E), sources above destinations"
        )
    return edge_index
