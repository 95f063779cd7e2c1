"""Read a PyG `Data` or `HeteroData`: its graph as CSC, and its attributes of nodes and edges.

A `Data` has the node type `NODE` and the edge type `EDGE`.
"""

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import EDGE, NODE, Graph
from gcnzc.graph.times import TimeUnit
from gcnzc.interop.column import Column
from gcnzc.interop.engine import CscGraph, cached_graph, without_edge_ids
from gcnzc.interop.pyg.importing import import_pyg
from gcnzc.system.arguments import describe

_pyg = import_pyg()

# a node type or an edge type, and the name of an attribute
Key: TypeAlias = tuple[Any, str]
Ids: TypeAlias = Mapping[Any, Tensor | None]


def is_typed(data: Any) -> bool:
    """Whether data is a `HeteroData`, not a `Data`.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(data, _pyg.data.Data | _pyg.data.HeteroData):
        what = "a tuple that is not a pair of stores" if isinstance(data, tuple) else describe(data)
        raise ValueError(
            f"data: gcnzc's loader does not support {what}\n\n"
            "hint: a Data, a HeteroData, or a pair (FeatureStore, GraphStore)"
        )
    return isinstance(data, _pyg.data.HeteroData)


def part_of(data: Any, kind: Any) -> Any:
    """Return the part of a `HeteroData` with the attributes of a type; a `Data` itself."""
    return data[kind] if is_typed(data) else data


def iter_attributes(data: Any) -> Iterator[tuple[Any, str, Any, int | None]]:
    """Yield the type, the name and the value of each attribute.

    The fourth element is the dimension of the nodes or edges; None if the attribute has none.
    The type is None for attributes of a whole `HeteroData`, and such attributes of a `Data`.
    """
    for store in data.stores:
        kind = store._key
        for name, value in dict(store.items()).items():
            is_nodes = hasattr(store, "is_node_attr") and store.is_node_attr(name)
            is_edges = hasattr(store, "is_edge_attr") and store.is_edge_attr(name)
            own = kind
            if kind is None:
                own = NODE if is_nodes else EDGE if is_edges else None
            dim = data.__cat_dim__(name, value, store) if is_nodes or is_edges else None
            yield own, name, value, dim


def to_csc(
    data: Any, time_attr: str | None, weight_attr: str | None, time_unit: TimeUnit | None = None
) -> CscGraph:
    """Return the graph of a `Data` or `HeteroData`; it is cached while it is in use.

    Edge ids are positions in `edge_index`, from whose row 0 to row 1 messages go.

    Args:
        data: a PyG `Data` or `HeteroData`.
        time_attr: attribute of nodes or edges with times.
        weight_attr: attribute of edges with sampling weights.
        time_unit: of the times; None if it is not known.

    Raises:
        ValueError: the data does not have an attribute, an edge type has no `edge_index`, or values
            are wrong, see `gcnzc.Graph.from_arrays`.
    """
    has_types = is_typed(data)
    times = _values(data, "time_attr", time_attr)
    weights = _values(data, "weight_attr", weight_attr)
    if not has_types:
        # of edges also if the graph has as many nodes
        weights = {EDGE: next(iter(weights.values()), None)}
    node_types, edge_types = (data.node_types, data.edge_types) if has_types else ([NODE], [EDGE])
    nodes = {
        each: {"num_nodes": _num_nodes(each, part_of(data, each)), "time": times.get(each)}
        for each in node_types
    }
    edges = {
        each: {
            "edge_index": _edge_index(each, part_of(data, each), has_types),
            "time": times.get(each),
            "weight": weights.get(each),
        }
        for each in edge_types
    }

    def build() -> CscGraph:
        of_nodes, of_edges = (any(each in times for each in own) for own in (nodes, edges))
        time: Any = "both" if of_nodes and of_edges else "node" if of_nodes else "edge"
        graph, ids = without_edge_ids(Graph.from_arrays(nodes, edges, time_unit=time_unit))
        return CscGraph(graph, ids, has_types, None if time_attr is None else time)

    given = [
        (kind, name, value)
        for kind, own in (*nodes.items(), *edges.items())
        for name, value in own.items()
    ]
    key = (has_types, time_unit, *((kind, name) for kind, name, _ in given))
    return cached_graph(key, [value for *_, value in given], build)


def _values(data: Any, argument: str, name: str | None) -> dict[Any, Any]:
    """Return the values of an attribute of nodes or edges by type."""
    if name is None:
        return {}
    if is_typed(data):
        found = {s._key: s[name] for s in (*data.node_stores, *data.edge_stores) if name in s}
        if argument == "weight_attr":
            found = {kind: value for kind, value in found.items() if isinstance(kind, tuple)}
    else:
        found = {
            kind: value for kind, own, value, _ in iter_attributes(data) if own == name and kind
        }
    if not found:
        raise ValueError(f"{argument} is {name!r:.100}, which no nodes or edges of the data have")
    return found


def _num_nodes(node_type: str, store: Any) -> int:
    number = store.num_nodes
    if number is None:
        raise ValueError(f"the number of nodes of node type {node_type!r} is unknown")
    return int(number)


def _edge_index(edge_type: Any, store: Any, has_types: bool) -> Any:
    edges = store.get("edge_index")
    if edges is None and "adj_t" in store:
        raise ValueError(
            f"gcnzc's loader does not support adj_t: edge type {edge_type} has it\n\n"
            "hint: edge_index of shape (2, E), with sources in row 0 and destinations in row 1; "
            "torch_geometric.utils.to_edge_index(adj_t)[0].flip(0) converts adj_t"
        )
    if edges is None and not has_types:
        # as PyG does
        return torch.empty((2, 0), dtype=torch.int64)
    return edges.as_tensor() if isinstance(edges, _pyg.EdgeIndex) else edges


@dataclass(eq=False)
class Attributes:
    """The attributes of the data by type, by how minibatches get their values."""

    template: Any  # the data without attributes of nodes and edges; minibatches are copies of it
    has_num_nodes: set[str]  # node types with an attribute `num_nodes`
    columns: dict[Key, Column] = field(default_factory=dict)
    # features that the GPU gathers, on the GPU or in page-locked host memory
    read_in_place: dict[Key, Column] = field(default_factory=dict)
    # values that PyG slices, and the dimension of the nodes or edges
    others: dict[Key, tuple[Any, int]] = field(default_factory=dict)

    def __contains__(self, key: Key) -> bool:
        return key in self.columns or key in self.read_in_place or key in self.others

    @property
    def prefetched(self) -> dict[str, tuple[str, Column]]:
        """The features in `read_in_place` that a loader prefetches: name and column by node type.

        They are those named `x`, or for a node type without `x`, the first.
        """
        found: dict[str, tuple[str, Column]] = {}
        for (kind, name), column in self.read_in_place.items():
            is_of_nodes = isinstance(kind, str)
            if is_of_nodes and (kind not in found or name == "x"):
                found[kind] = name, column
        return found

    def slice_on_host(self, ids: Ids) -> dict[Key, Any]:
        """Gather the attributes on the host, except those that the GPU reads in place.

        Args:
            ids: node ids by node type and edge ids by edge type, on the host. The attributes of
                types without ids are left out.
        """
        return self._slice(ids, are_on_host=True)

    def slice_on_gpus(self, ids: Ids) -> dict[Key, Any]:
        """Gather the attributes that are on GPUs, each on its own GPU; see `slice_on_host`."""
        return self._slice(ids, are_on_host=False)

    def gather_in_place(self, ids: Ids, keys: Collection[Key]) -> dict[Key, Any]:
        """Gather some of the features that a GPU reads in place.

        Args:
            ids: see `slice_on_host`, but on the GPU, which then gathers; or on the host.
            keys: of the features.
        """
        found = {}
        for kind, name in keys:
            column, own = self.read_in_place[kind, name], ids.get(kind)
            if own is None:
                continue
            assert column.table is not None, "only tables are read in place"
            if own.device.type == "cpu":
                found[kind, name] = column.gather_on_device(own)
            else:
                found[kind, name] = column.table.gather(own).view(len(own), *column.shape)
        return found

    def _slice(self, ids: Ids, are_on_host: bool) -> dict[Key, Any]:
        found = {}
        for (kind, name), column in self.columns.items():
            own = ids.get(kind)
            if own is not None and column.is_on_host == are_on_host:
                found[kind, name] = column.gather_on_device(own)
        for (kind, name), (value, dim) in self.others.items():
            own = ids.get(kind)
            if own is not None and _is_on_host(value) == are_on_host:
                own = own if are_on_host else own.to(value.device)
                found[kind, name] = _pyg.loader.utils.index_select(value, own, dim=dim)
        return found


def read_attributes(
    data: Any,
    graph: Graph,
    tables: Mapping[Key, FeatureTable],
    device: torch.device,
    locks: ExitStack,
    excluded: Collection[str] = (),
) -> Attributes:
    """Divide the attributes, as PyG does, into those of nodes or edges of each type, and others.

    Args:
        data: a PyG `Data` or `HeteroData`.
        graph: the graph of `data`.
        tables: tables by type and name, which replace attributes.
        device: the device of the minibatches.
        locks: keeps rows page-locked for a GPU until it is closed.
        excluded: names of attributes that minibatches do not take from `data`.

    Raises:
        ValueError: an attribute of nodes or edges cannot be sliced, or requires a gradient, or
            `data` has other types than `graph`.
    """
    found = Attributes(copy.copy(data), set())
    numbers: dict[Any, int] = {kind: graph.nodes(kind).num_nodes for kind in graph.node_types}
    numbers |= {kind: graph.edges(kind).num_edges for kind in graph.edge_types}
    if is_typed(data) and (other := {*data.node_types, *data.edge_types} ^ numbers.keys()):
        raise ValueError(
            f"data has gained or lost the type {min(other, key=str)!r} since the loader was created"
        )
    for (kind, name), table in tables.items():
        label = f"tables[{(kind, name)!r}]"
        found.columns[kind, name] = Column(label, table, numbers[kind], device, locks)
    for kind, name, value, dim in iter_attributes(data):
        if kind is None and is_typed(data):
            continue
        is_structure = name in ("edge_index", "num_nodes")
        is_replaced = name in excluded or (kind, name) in tables
        if is_structure or is_replaced or dim is not None:
            del part_of(found.template, kind)[name]
        if name == "num_nodes":
            found.has_num_nodes.add(kind or NODE)
        elif dim is not None and not is_structure and not is_replaced:
            label = f"data[{kind!r}].{name}" if is_typed(data) else f"data.{name}"
            if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
                value = torch.from_numpy(value)
            if isinstance(value, Tensor) and dim == 0:
                found.columns[kind, name] = Column(label, value, numbers[kind], device, locks)
            elif isinstance(value, Tensor | _pyg.typing.TensorFrame):
                found.others[kind, name] = value, dim
            else:
                raise ValueError(f"{label} is {describe(value)}, which cannot be sliced")
    for key, column in found.columns.items():
        if (key in tables or key[1] == "x") and column.is_read_in_place:
            column.lock()
            found.read_in_place[key] = column
    for key in found.read_in_place:
        del found.columns[key]
    return found


def _is_on_host(value: Any) -> bool:
    return torch.device(getattr(value, "device", "cpu") or "cpu").type == "cpu"
