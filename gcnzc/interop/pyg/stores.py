"""Read a pair of PyG's `FeatureStore` and `GraphStore`, and give a `HeteroGraph` as such a pair.

`TableStore` is a `FeatureStore` of feature tables.

Importing this module imports PyG.
"""

import copy
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.graph.hetero.graph import EdgeType, HeteroGraph
from gcnzc.graph.hetero.times import TimeUnit
from gcnzc.interop.engine import NODE
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
            self._read_types(graph_store, {each.edge_type: None for each in attrs}, chosen, tensors)
        else:
            attr = chosen[None]
            self.structure.edge_index = _to_coo(graph_store.get_edge_index(attr), attr)
            self.structure.num_nodes = self._num_nodes(attr, tensors)
        for attr in tensors:
            if attr.attr_name in names:
                store = self._store_of(attr.group_name)
                if store is not None:
                    attr = _indexed(attr, None)
                    store[attr.attr_name] = _to_tensor(attr, feature_store.get_tensor(attr))

    def _read_types(
        self,
        graph_store: Any,
        edge_types: Mapping[EdgeType, None],
        chosen: Mapping[EdgeType, Any],
        tensors: list[Any],
    ) -> None:
        groups = [attr.group_name for attr in tensors if isinstance(attr.group_name, str)]
        ends = [name for each in edge_types for name in (each[0], each[2])]
        for name in dict.fromkeys([*groups, *ends]):
            try:
                number = _pyg.data.remote_backend_utils.num_nodes(self._features, graph_store, name)
            except ValueError:
                raise _unknown_size(f"node type {name!r}") from None
            self.structure[name].num_nodes = int(number)
        for each in edge_types:
            attr = chosen[each]
            self.structure[each].edge_index = _to_coo(graph_store.get_edge_index(attr), attr)

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
    """Return edges in the layout of `attr` as (2, E) int64 sources and destinations.

    Raises:
        ValueError: they are not integers, or their lengths or offsets do not fit together.
    """
    row, col = (torch.as_tensor(ids).cpu() for ids in edges)
    layout = attr.layout.value
    name = "the edges" if attr.edge_type is None else f"the edges of {attr.edge_type}"
    for ids in (row, col):
        if ids.ndim != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise ValueError(
                f"the graph store returned {describe(ids)} for {name}, not integers (E,)"
            )
    row, col = row.long(), col.long()
    if layout == "csr":
        row = _expand(row, len(col), name)
    elif layout == "csc":
        col = _expand(col, len(row), name)
    elif len(row) != len(col):
        raise ValueError(
            f"the graph store returned {len(row)} sources and {len(col)} destinations for {name}"
        )
    return torch.stack([row, col])


def _expand(offsets: Tensor, num_edges: int, name: str) -> Tensor:
    """Return the (E,) row (CSR) or column (CSC) of each edge."""
    steps = offsets.diff()
    is_valid = len(offsets) > 0 and int(offsets[0]) == 0 and int(offsets[-1]) == num_edges
    if not is_valid or bool((steps < 0).any()):
        raise ValueError(
            f"the graph store returned offsets for {name} that do not fit its {num_edges} edges"
        )
    return torch.arange(len(steps)).repeat_interleave(steps)


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
    count = 0 if is_whole else len(attr.index)
    ids = f"{count} id{'s' * (count != 1)} of " if count else ""
    hint = "hint: get_tensor returns a tensor or an array with one row for each id"
    if count == 1:
        # NumPy takes a tensor with one element as a number
        hint += "; index a NumPy array by attr.index.numpy()"
    raise ValueError(
        f"the feature store returned {describe(rows)} for {ids}{attr.group_name}, "
        f"{attr.attr_name}\n\n{hint}"
    )


def _unknown_size(what: str) -> ValueError:
    return ValueError(
        f"the number of nodes of {what} is unknown\n\n"
        "hint: put_edge_index(..., size=(num_src, num_dst)), or a tensor with a row for each node"
    )


class HeteroFeatureStore(_pyg.data.FeatureStore):  # type: ignore[misc, name-defined]
    """The features, labels and times of a `HeteroGraph` as a PyG `FeatureStore`.

    Node types have the attributes `x`, `y` and `time`, edge types `edge_attr`, `time` and `weight`,
    as far as the graph has them. Rows of edges are in the order of the columns of the graph, which
    is the order of the edges of `HeteroGraphStore`. The store is read-only.

    Args:
        graph: the graph; its values are not copied.

    Attributes:
        time_unit: `graph.time_unit`, to which loaders convert dates.

    Raises:
        TypeError: `graph` is not a `HeteroGraph`.
    """

    time_unit: TimeUnit | None

    def __init__(self, graph: HeteroGraph) -> None:
        check_kind("graph", graph, HeteroGraph, "HeteroGraph.from_pyg, from_tables or load")
        super().__init__()
        found: dict[tuple[Any, str], tuple[FeatureTable | Tensor, Tensor | None]] = {}
        for node_type in graph.node_types:
            nodes = graph.nodes(node_type)
            for name, values in (("x", nodes.table), ("y", nodes.labels), ("time", nodes.time)):
                if values is not None:
                    found[node_type, name] = values, None
        for edge_type in graph.edge_types:
            edges = graph.edges(edge_type)
            if edges.table is not None:
                # features are in the order of the edge ids
                found[edge_type, "edge_attr"] = edges.table, edges.edge_ids
            for name, values in (("time", edges.time), ("weight", edges.weight)):
                if values is not None:
                    found[edge_type, name] = values, None
        self.__dict__["_values"] = found
        self.__dict__["time_unit"] = graph.time_unit

    def _get_tensor(self, attr: Any) -> Tensor | None:
        values, order = self._values.get((attr.group_name, attr.attr_name), (None, None))
        if values is None:
            return None
        num_rows = values.num_rows if isinstance(values, FeatureTable) else len(values)
        ids = attr.index
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
            # None, a slice, a mask, a list or one id
            ids = torch.arange(num_rows)[slice(None) if ids is None else ids]
        index = ids.flatten()
        if order is not None:
            index = order[index]
        if isinstance(values, FeatureTable):
            rows = values.gather(index)
        else:
            rows = values.index_select(0, index)
        return rows.unflatten(0, ids.shape) if ids.ndim else rows[0]

    def _get_tensor_size(self, attr: Any) -> tuple[int, ...] | None:
        values, _ = self._values.get((attr.group_name, attr.attr_name), (None, None))
        if isinstance(values, FeatureTable):
            return values.num_rows, values.num_columns
        return None if values is None else tuple(values.shape)

    def get_all_tensor_attrs(self) -> list[Any]:
        """Return the type and the name of each attribute."""
        return [_pyg.data.TensorAttr(*key) for key in self._values]

    def _put_tensor(self, tensor: Any, attr: Any) -> NoReturn:
        raise _read_only(f"{attr.group_name}, {attr.attr_name}")

    def _remove_tensor(self, attr: Any) -> NoReturn:
        raise _read_only(f"{attr.group_name}, {attr.attr_name}")


class HeteroGraphStore(_pyg.data.GraphStore):  # type: ignore[misc, name-defined]
    """The edges of a `HeteroGraph` as a PyG `GraphStore`, in CSC layout; it is read-only.

    Args:
        graph: the graph. Offsets are not copied; sources are, since PyG reads int64.

    Raises:
        TypeError: `graph` is not a `HeteroGraph`.
    """

    def __init__(self, graph: HeteroGraph) -> None:
        check_kind("graph", graph, HeteroGraph, "HeteroGraph.from_pyg, from_tables or load")
        super().__init__()
        self.__dict__["_graph"] = graph

    def get_all_edge_attrs(self) -> list[Any]:
        """Return the edge type, the layout and the size of each edge type."""
        graph: HeteroGraph = self._graph
        return [
            _pyg.data.EdgeAttr(
                each, "csc", size=(graph.num_nodes(each[0]), graph.num_nodes(each[2]))
            )
            for each in graph.edge_types
        ]

    def _get_edge_index(self, edge_attr: Any) -> tuple[Tensor, Tensor] | None:
        graph: HeteroGraph = self._graph
        if edge_attr.edge_type not in graph.edge_types or edge_attr.layout.value != "csc":
            return None
        edges = graph.edges(edge_attr.edge_type)
        return edges.indices.long(), edges.indptr

    def _put_edge_index(self, edge_index: Any, edge_attr: Any) -> NoReturn:
        raise _read_only(f"edge type {edge_attr.edge_type}")

    def _remove_edge_index(self, edge_attr: Any) -> NoReturn:
        raise _read_only(f"edge type {edge_attr.edge_type}")


def as_stores(graph: HeteroGraph) -> tuple[HeteroFeatureStore, HeteroGraphStore]:
    """Return a graph as the pair of stores that PyG's loaders accept in place of data."""
    return HeteroFeatureStore(graph), HeteroGraphStore(graph)


def _read_only(what: str) -> ValueError:
    return ValueError(
        f"{what}: the stores of a HeteroGraph are read-only\n\n"
        "hint: build another graph, or put the tensor into a store of your own"
    )


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
        self.__dict__["_tables"] = {}
        for key, table in tables.items():
            self._put_tensor(table, _pyg.data.TensorAttr(*_as_key(key), None))

    def _put_tensor(self, tensor: Any, attr: Any) -> bool:
        if attr.index is not None:
            raise ValueError(
                f"{attr.group_name}, {attr.attr_name} was given with an index: a store of tables "
                "cannot replace single rows"
            )
        if isinstance(tensor, np.ndarray):
            tensor = torch.from_numpy(tensor)
        if isinstance(tensor, Tensor):
            tensor = FeatureTable(tensor)
        if not isinstance(tensor, FeatureTable):
            raise ValueError(f"{attr.group_name}, {attr.attr_name} is a {type(tensor).__name__}")
        self._tables[attr.group_name, attr.attr_name] = tensor
        return True

    def _get_tensor(self, attr: Any) -> Tensor | None:
        table: FeatureTable | None = self._tables.get((attr.group_name, attr.attr_name))
        if table is None:
            return None
        index = attr.index
        if index is None:
            index = slice(None)
        if isinstance(index, slice):
            index = torch.arange(*index.indices(table.num_rows), device=table.device)
        if isinstance(index, int):
            index = [index]
        return table.gather(torch.as_tensor(index))

    def _remove_tensor(self, attr: Any) -> bool:
        return self._tables.pop((attr.group_name, attr.attr_name), None) is not None

    def _get_tensor_size(self, attr: Any) -> tuple[int, ...] | None:
        table = self._tables.get((attr.group_name, attr.attr_name))
        return None if table is None else (table.num_rows, table.num_columns)

    def get_all_tensor_attrs(self) -> list[Any]:
        """Return the group and the name of every table."""
        return [_pyg.data.TensorAttr(*key) for key in self._tables]


def _as_key(key: Any) -> tuple[Any, str]:
    return key if isinstance(key, tuple) else (None, key)
