"""Read a pair of PyG's `FeatureStore` and `GraphStore`, and give a `Graph` as such a pair.

`TableStore` is a `FeatureStore` of feature tables.

Importing this module imports PyG.
"""

import copy
from collections.abc import Collection, Mapping
from functools import partialmethod
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import NODE, Graph
from gcnzc.graph.times import TimeUnit
from gcnzc.interop.pyg.importing import import_pyg
from gcnzc.kernels.threads import ForkSafeLock
from gcnzc.system.arguments import check_kind, describe

_pyg = import_pyg()

# layouts of edges, from the one that costs the least to sample from; as PyG chooses
_LAYOUTS = ("csc", "coo", "csr")


def is_store_pair(data: Any) -> bool:
    """Whether `data` is a pair of a feature store and a graph store."""
    return (
        isinstance(data, tuple | list)
        and len(data) == 2
        and isinstance(data[0], _pyg.data.FeatureStore)
        and isinstance(data[1], _pyg.data.GraphStore)
    )


def has_types(data: Any) -> bool:
    """Whether the edges of a pair of stores have types, as those of a `HeteroData`."""
    return all(attr.edge_type is not None for attr in data[1].get_all_edge_attrs())


def open_stores(data: Any, custom_cls: Any, names: Collection[str | None]) -> "StoredData | None":
    """Return the data of a pair of stores, see `StoredData`; None for other data."""
    return StoredData(data[0], data[1], custom_cls, names) if is_store_pair(data) else None


class StoredData:
    """The graph of a pair of stores, and a view of the features that the feature store gathers.

    Threads of a loader call the feature store, one at a time.

    Args:
        feature_store: has tensors of node types. Tensors whose group is an edge type are of its
            edges. Without types, all tensors are of the nodes.
        graph_store: has the edges, in any layout. Edge ids are positions in the layout of the
            store; of several layouts CSC, COO or CSR is read.
        custom_cls: class of the minibatches. Default: `Data` or `HeteroData`.
        names: attributes that are read now, such as times.

    Raises:
        TypeError: `custom_cls` does not construct the data.
        ValueError: the number of nodes is unknown, or a tensor is missing.

    Attributes:
        structure: a `Data` or `HeteroData` with the numbers of nodes, `edge_index` and `names`.
        time_unit: of the times of a `HeteroFeatureStore`; None if the unit is not known.
    """

    def __init__(
        self,
        feature_store: Any,
        graph_store: Any,
        custom_cls: Any,
        names: Collection[str | None],
    ) -> None:
        self._features, self._lock = feature_store, ForkSafeLock()
        self.time_unit: TimeUnit | None = None
        if isinstance(feature_store, HeteroFeatureStore):
            self.time_unit = feature_store.time_unit
        self._is_typed = has_types((feature_store, graph_store))
        base = _pyg.data.HeteroData if self._is_typed else _pyg.data.Data
        self.structure = base() if custom_cls is None else custom_cls()
        check_kind("custom_cls()", self.structure, base, f"a subclass of {base.__name__}")
        attrs = graph_store.get_all_edge_attrs()
        chosen: dict[Any, Any] = {}
        for attr in sorted(attrs, key=lambda attr: _LAYOUTS.index(attr.layout.value)):
            chosen.setdefault(attr.edge_type, attr)
        tensors = feature_store.get_all_tensor_attrs()
        if self._is_typed:
            # in the order of the store
            types = dict.fromkeys(attr.edge_type for attr in attrs)
            groups = [attr.group_name for attr in tensors if isinstance(attr.group_name, str)]
            for name in dict.fromkeys([*groups, *(end for each in types for end in each[::2])]):
                self.structure[name].num_nodes = self._num_nodes_of(name, graph_store)
        else:
            types = {None: None}
            self.structure.num_nodes = self._num_nodes(chosen[None], tensors)
        for each in types:
            edges = graph_store.get_edge_index(chosen[each])
            (self.structure[each] if each else self.structure).edge_index = _to_coo(
                edges, chosen[each]
            )
        for attr in tensors:
            store = self._store_of(attr.group_name) if attr.attr_name in names else None
            if store is not None:
                attr = _indexed(attr, None)
                store[attr.attr_name] = _to_tensor(attr, feature_store.get_tensor(attr))

    def _num_nodes_of(self, node_type: str, graph_store: Any) -> int:
        find = _pyg.data.remote_backend_utils.num_nodes
        try:
            return int(find(self._features, graph_store, node_type))
        except ValueError:
            raise _unknown_size(f"node type {node_type!r}") from None

    def _num_nodes(self, edge_attr: Any, tensors: list[Any]) -> int:
        if edge_attr.size is not None:
            return max(edge_attr.size)
        for attr in tensors:
            size = self._features.get_tensor_size(_indexed(attr, None))
            if size is not None:
                return int(size[0])
        raise _unknown_size("the graph")

    def _store_of(self, group: Any) -> Any:
        """Return the part of `structure` of a group of the feature store, or None."""
        if not self._is_typed:
            return self.structure
        known = group in self.structure.node_types or group in self.structure.edge_types
        return self.structure[group] if known else None

    def attributes(self, excluded: Collection[Any]) -> "StoredAttributes":
        """Return the tensors that the feature store has now, except those read before.

        Args:
            excluded: names, or pairs of a type and a name, to leave out.
        """
        attrs = []
        for attr in self._features.get_all_tensor_attrs():
            key = (attr.group_name if self._is_typed else NODE), attr.attr_name
            store = self._store_of(attr.group_name)
            is_excluded = key in excluded or attr.attr_name in excluded
            if store is not None and attr.attr_name not in store and not is_excluded:
                attrs.append((key, attr))
        return StoredAttributes(self._features, attrs, self._lock)


class StoredAttributes:
    """Tensors of a feature store, of which minibatches get some rows."""

    def __init__(self, store: Any, attrs: list[tuple[tuple[Any, str], Any]], lock: Any) -> None:
        self._store, self._attrs, self._lock = store, attrs, lock

    def gather(self, ids: Mapping[Any, Tensor | None]) -> dict[Any, Tensor]:
        """Return the rows of nodes or edges, by type and name; without types, of nodes.

        Args:
            ids: (B,) ids on the host, by type.

        Raises:
            ValueError: the feature store does not have a tensor, or returns another number of rows.
        """
        found = {
            key: _indexed(attr, own)
            for key, attr in self._attrs
            if (own := ids.get(key[0])) is not None
        }
        with self._lock:
            rows = self._store.multi_get_tensor([*found.values()])
        pairs = zip(found.items(), rows, strict=True)
        return {key: _to_tensor(attr, own) for (key, attr), own in pairs}


def _to_coo(edges: Any, attr: Any) -> Tensor:
    """Return edges in the layout of `attr` as (2, E) sources and destinations."""
    row, col = (torch.as_tensor(ids).cpu() for ids in edges)
    if attr.layout.value == "csr":
        row = _pyg.index.ptr2index(row)
    elif attr.layout.value == "csc":
        col = _pyg.index.ptr2index(col)
    return torch.stack([row, col])


def _indexed(attr: Any, index: Tensor | None) -> Any:
    attr = copy.copy(attr)
    attr.index = index
    return attr


def _to_tensor(attr: Any, rows: Any) -> Tensor:
    if isinstance(rows, np.ndarray):
        rows = torch.from_numpy(rows)
    is_whole = attr.index is None
    if isinstance(rows, Tensor) and rows.ndim and (is_whole or len(rows) == len(attr.index)):
        return rows
    raise ValueError(
        f"the feature store returned {describe(rows)} for {attr.group_name}, {attr.attr_name}, not "
        f"{'a tensor' if is_whole else f'{len(attr.index)} rows'}"
    )


def _unknown_size(what: str) -> ValueError:
    return ValueError(f"the number of nodes of {what} is unknown")


class TableStore(_pyg.data.FeatureStore):  # type: ignore[misc, name-defined]
    """A PyG feature store of tables: `store["paper", "x", ids]` gathers rows.

    Args:
        tables: feature tables by (node type, name); or by name, for a graph without types, whose
            node type is None in PyG.

    Raises:
        TypeError: `tables` is not a mapping.
        ValueError: a value is neither a table nor a tensor of two dimensions.
    """

    def __init__(self, tables: Mapping[Any, FeatureTable]) -> None:
        check_kind("tables", tables, Mapping, "{'x': gcnzc.FeatureTable(rows)}")
        super().__init__()
        # the rows, and the rows that ids stand for; None if they are the ids
        values: dict[tuple[Any, str], tuple[FeatureTable | Tensor, Tensor | None]] = {}
        self.__dict__["_values"] = values
        for key, table in tables.items():
            key = key if isinstance(key, tuple) else (None, key)
            self._put_tensor(table, _pyg.data.TensorAttr(*key, None))

    def _put_tensor(self, tensor: Any, attr: Any) -> bool:
        name = f"{attr.group_name}, {attr.attr_name}"
        if attr.index is not None:
            raise ValueError(f"{name} was given with an index: a table cannot replace single rows")
        if isinstance(tensor, Tensor | np.ndarray):
            tensor = FeatureTable(torch.as_tensor(tensor))
        if not isinstance(tensor, FeatureTable):
            raise ValueError(f"{name} is a {type(tensor).__name__}")
        self._values[attr.group_name, attr.attr_name] = tensor, None
        return True

    def _get_tensor(self, attr: Any) -> Tensor | None:
        values, order = self._values.get((attr.group_name, attr.attr_name), (None, None))
        if values is None:
            return None
        ids = attr.index
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
            # None, a slice, a mask, a list or one id
            num_rows = values.num_rows if isinstance(values, FeatureTable) else len(values)
            ids = torch.arange(num_rows, device=values.device)[slice(None) if ids is None else ids]
        index = ids.flatten() if order is None else order[ids.flatten()]
        if isinstance(values, FeatureTable):
            rows = values.gather(index)
        else:
            rows = values.index_select(0, index)
        return rows.unflatten(0, ids.shape) if ids.ndim else rows[0]

    def _remove_tensor(self, attr: Any) -> bool:
        return self._values.pop((attr.group_name, attr.attr_name), None) is not None

    def _get_tensor_size(self, attr: Any) -> tuple[int, ...] | None:
        values, _ = self._values.get((attr.group_name, attr.attr_name), (None, None))
        if isinstance(values, FeatureTable):
            return values.num_rows, values.num_columns
        return None if values is None else tuple(values.shape)

    def get_all_tensor_attrs(self) -> list[Any]:
        """Return the group and the name of each tensor."""
        return [_pyg.data.TensorAttr(*key) for key in self._values]


class HeteroFeatureStore(TableStore):
    """The features, labels and times of a `Graph` as a PyG `FeatureStore`.

    Node types have the attributes `x`, `y` and `time`, edge types `edge_attr`, `time` and `weight`,
    as far as the graph has them. Rows of edges are in the order of the columns of the graph, which
    is the order of the edges of `HeteroGraphStore`. The store is read-only.

    Args:
        graph: the graph; its values are not copied.

    Attributes:
        time_unit: `graph.time_unit`, to which loaders convert dates.

    Raises:
        TypeError: `graph` is not a `Graph`.
    """

    time_unit: TimeUnit | None

    def __init__(self, graph: Graph) -> None:
        check_kind("graph", graph, Graph, "Graph.from_pyg, from_tables or load")
        super().__init__({})
        self.__dict__["time_unit"] = graph.time_unit
        kinds: list[Any] = [*graph.node_types, *graph.edge_types]
        for kind in kinds:
            store: Any = graph.nodes(kind) if isinstance(kind, str) else graph.edges(kind)
            # features of edges are in the order of the edge ids
            order = getattr(store, "edge_ids", None)
            table = "x" if isinstance(kind, str) else "edge_attr"
            for name, of in ((table, "table"), ("y", "labels"), ("time",) * 2, ("weight",) * 2):
                values = getattr(store, of, None)
                if values is not None:
                    self._values[kind, name] = values, order if of == "table" else None

    def _put_tensor(self, tensor: Any, attr: Any) -> NoReturn:
        raise _read_only(f"{attr.group_name}, {attr.attr_name}")

    _remove_tensor = partialmethod(_put_tensor, None)


class HeteroGraphStore(_pyg.data.GraphStore):  # type: ignore[misc, name-defined]
    """The edges of a `Graph` as a PyG `GraphStore`, in CSC layout; it is read-only.

    Args:
        graph: the graph. Offsets are not copied; sources are, since PyG reads int64.

    Raises:
        TypeError: `graph` is not a `Graph`.
    """

    def __init__(self, graph: Graph) -> None:
        check_kind("graph", graph, Graph, "Graph.from_pyg, from_tables or load")
        super().__init__()
        self.__dict__["_graph"] = graph

    def get_all_edge_attrs(self) -> list[Any]:
        """Return the edge type, the layout and the size of each edge type."""
        graph: Graph = self._graph
        return [
            _pyg.data.EdgeAttr(
                each, "csc", size=(graph.nodes(each[0]).num_nodes, graph.nodes(each[2]).num_nodes)
            )
            for each in graph.edge_types
        ]

    def _get_edge_index(self, edge_attr: Any) -> tuple[Tensor, Tensor] | None:
        graph: Graph = self._graph
        if edge_attr.edge_type not in graph.edge_types or edge_attr.layout.value != "csc":
            return None
        edges = graph.edges(edge_attr.edge_type)
        return edges.indices.long(), edges.indptr

    def _put_edge_index(self, edge_index: Any, edge_attr: Any) -> NoReturn:
        raise _read_only(f"edge type {edge_attr.edge_type}")

    _remove_edge_index = partialmethod(_put_edge_index, None)


def as_stores(graph: Graph) -> tuple[HeteroFeatureStore, HeteroGraphStore]:
    """Return a graph as the pair of stores that PyG's loaders accept in place of data."""
    return HeteroFeatureStore(graph), HeteroGraphStore(graph)


def _read_only(what: str) -> ValueError:
    return ValueError(f"{what}: the stores of a Graph are read-only")
