"""Read a PyG `HeteroData`: its graph, and its attributes by type."""

import copy
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.graph.hetero.graph import EdgeType, HeteroGraph, TimeKind
from gcnzc.graph.hetero.times import TimeUnit
from gcnzc.interop.column import Column
from gcnzc.interop.pyg.importing import import_pyg
from gcnzc.loader.checks import is_copied
from gcnzc.system.arguments import describe

# a node type or an edge type, and the name of an attribute
Key: TypeAlias = tuple[Any, str]
Ids: TypeAlias = Mapping[Any, Tensor | None]


@dataclass(frozen=True, eq=False)
class TypedGraph:
    """The graph of a `HeteroData`, whose edge ids are positions in `edge_index`."""

    graph: HeteroGraph
    time: TimeKind | None  # the types that have the times; None without `time_attr`
    # keeps the values alive, since the addresses of tensors are in the cache's key
    values: tuple[Any, ...]


# The loaders of training and evaluation share one sorted graph.
_cache: weakref.WeakValueDictionary[Any, TypedGraph] = weakref.WeakValueDictionary()


def to_typed_graph(
    data: Any,
    time_attr: str | None,
    weight_attr: str | None,
    time_unit: TimeUnit | None = None,
) -> TypedGraph:
    """Return the graph of a `HeteroData`; it is cached while it is in use.

    Args:
        data: a PyG `HeteroData`; messages go from `edge_index[0]` to `edge_index[1]`.
        time_attr: attribute of node types or edge types with times.
        weight_attr: attribute of edge types with sampling weights.
        time_unit: of the times; None if it is not known.

    Raises:
        ValueError: no type has the attribute, an edge type has no `edge_index`, or values are
            wrong, see `gcnzc.graph.hetero.build.from_arrays`.
    """
    of_nodes = any(time_attr in store for store in data.node_stores)
    of_edges = any(time_attr in store for store in data.edge_stores)
    if time_attr is not None and not (of_nodes or of_edges):
        raise _missing("time_attr", time_attr)
    if weight_attr is not None and not any(weight_attr in store for store in data.edge_stores):
        raise _missing("weight_attr", weight_attr)
    nodes = {
        each: {"num_nodes": _num_nodes(each, data[each]), "time": _get(data[each], time_attr)}
        for each in data.node_types
    }
    edges = {
        each: {
            "edge_index": _edge_index(each, data[each]),
            "time": _get(data[each], time_attr),
            "weight": _get(data[each], weight_attr),
        }
        for each in data.edge_types
    }
    values = [
        (kind, name, value)
        for kind, own in (*nodes.items(), *edges.items())
        for name, value in own.items()
    ]

    def build() -> TypedGraph:
        time: TimeKind = "both" if of_nodes and of_edges else "node" if of_nodes else "edge"
        graph = HeteroGraph.from_arrays(nodes, edges, time_unit=time_unit)
        kept = tuple(value for *_, value in values)
        return TypedGraph(graph, None if time_attr is None else time, kept)

    key = (time_unit, *((kind, name) for kind, name, _ in values))
    return cached_graph(key, [value for *_, value in values], build)


def cached_graph(key: Any, values: Sequence[Any], build: Callable[[], TypedGraph]) -> TypedGraph:
    """Return the graph that `build` returned for the same values, as long as it is in use.

    Args:
        key: tells graphs apart that are built from the same values.
        values: from which the graph is built; it is cached if they are tensors, integers or None.
        build: builds the graph, which keeps a reference to the values.
    """
    if not all(value is None or isinstance(value, Tensor | int) for value in values):
        return build()
    key = (key, *map(_identity, values))
    found = _cache.get(key)
    if found is None:
        found = _cache[key] = build()
    return found


@dataclass(eq=False)
class TypedAttributes:
    """The attributes of a `HeteroData` by type, by how minibatches get their values."""

    template: Any  # the data without attributes of nodes and edges; minibatches are copies of it
    has_num_nodes: set[str]  # node types with an attribute `num_nodes`
    columns: dict[Key, Column] = field(default_factory=dict)
    # features that the GPU gathers, in page-locked host memory
    read_in_place: dict[Key, Column] = field(default_factory=dict)
    # values that PyG slices, and the dimension of the nodes or edges
    others: dict[Key, tuple[Any, int]] = field(default_factory=dict)

    def __contains__(self, key: Key) -> bool:
        return key in self.columns or key in self.read_in_place or key in self.others

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
                found[kind, name] = column.gather_in_thread(own)
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
                found[kind, name] = import_pyg().loader.utils.index_select(value, own, dim=dim)
        return found


def read_typed_attributes(
    data: Any,
    graph: HeteroGraph,
    tables: Mapping[Key, FeatureTable],
    device: torch.device,
    locks: ExitStack,
) -> TypedAttributes:
    """Divide the attributes of each type, as PyG does, into those of nodes or edges, and others.

    Args:
        data: a PyG `HeteroData`.
        graph: the graph of `data`.
        tables: tables by type and name, which replace attributes.
        device: the device of the minibatches.
        locks: keeps rows page-locked for a GPU until it is closed.

    Raises:
        ValueError: an attribute of nodes or edges cannot be sliced, or requires a gradient, or
            `data` has other types than `graph`.
    """
    found = TypedAttributes(copy.copy(data), set())
    numbers: dict[Any, int] = {kind: graph.num_nodes(kind) for kind in graph.node_types}
    numbers |= {kind: graph.num_edges(kind) for kind in graph.edge_types}
    for (kind, name), table in tables.items():
        label = f"tables[{(kind, name)!r}]"
        found.columns[kind, name] = Column(label, table, numbers[kind], device, locks)
    stores = (*data.node_stores, *data.edge_stores)
    if gone := numbers.keys() - {store._key for store in stores}:
        raise ValueError(
            f"data no longer has the type {min(gone, key=str)!r}, which it had when the loader was "
            "created"
        )
    for store in stores:
        kind = store._key
        if kind not in numbers:
            raise ValueError(
                f"data has the type {kind!r}, which it did not have when the loader was created"
            )
        for name, value in dict(store.items()).items():
            if name == "num_nodes" and kind in graph.node_types:
                found.has_num_nodes.add(kind)
            is_structure = name == ("num_nodes" if kind in graph.node_types else "edge_index")
            is_sliced = store.is_node_attr(name) or store.is_edge_attr(name)
            if is_structure or (kind, name) in tables:
                del found.template[kind][name]
            elif is_sliced:
                del found.template[kind][name]
                dim = data.__cat_dim__(name, value, store)
                _add(found, (kind, name), value, dim, numbers[kind], device, locks)
    for key, column in found.columns.items():
        if device.type == "cuda" and (key in tables or key[1] == "x") and _is_readable(column):
            is_sparse = column.table is not None and column.table.is_sparse
            if not is_sparse and not is_copied(device, column.table):
                column.lock()
                found.read_in_place[key] = column
    for key in found.read_in_place:
        del found.columns[key]
    return found


def _add(
    found: TypedAttributes,
    key: Key,
    value: Any,
    dim: int,
    num_rows: int,
    device: torch.device,
    locks: ExitStack,
) -> None:
    name = f"data[{key[0]!r}].{key[1]}"
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(value)
    if isinstance(value, Tensor) and dim == 0:
        found.columns[key] = Column(name, value, num_rows, device, locks)
    elif isinstance(value, Tensor | import_pyg().typing.TensorFrame):
        found.others[key] = value, dim
    else:
        raise ValueError(f"{name} is {describe(value)}, which cannot be sliced to a minibatch")


def _is_readable(column: Column) -> bool:
    return column.is_on_host and column.is_prefetched


def _is_on_host(value: Any) -> bool:
    return torch.device(getattr(value, "device", "cpu") or "cpu").type == "cpu"


def _identity(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    place = (value.data_ptr(), value._version, value.stride(), value.shape)
    return (*place, value.dtype, value.device)


def _get(store: Any, name: str | None) -> Any:
    return store[name] if name is not None and name in store else None


def _missing(argument: str, name: str) -> ValueError:
    return ValueError(
        f"{argument} is {name!r:.100}, which no type of the data has\n\n"
        "hint: data['paper'].time = ... or data['user', 'buys', 'item'].time = ..."
    )


def _num_nodes(node_type: str, store: Any) -> int:
    number = store.num_nodes
    if number is None:
        raise ValueError(f"the number of nodes of node type {node_type!r} is unknown")
    return int(number)


def _edge_index(edge_type: EdgeType, store: Any) -> Any:
    if "edge_index" not in store and "adj_t" in store:
        raise ValueError(
            f"gcnzc's loader does not support adj_t: edge type {edge_type} has it\n\n"
            "hint: edge_index of shape (2, E), with sources in row 0 and destinations in row 1; "
            "torch_geometric.utils.to_edge_index(adj_t)[0].flip(0) converts adj_t"
        )
    edges = _get(store, "edge_index")
    return edges.as_tensor() if isinstance(edges, import_pyg().EdgeIndex) else edges
