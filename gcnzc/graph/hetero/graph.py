"""Heterogeneous graphs: several types of nodes and edges, with features, labels, times and weights.

The edges of a type are stored in CSC format, as in `gcnzc.Graph`: column `i` has the sources of the
in-edges of destination `i`. Features of edges are stored in the order of the edge ids, which
are the positions in the edge list that the graph was built from; times and weights, which the
sampler reads, in the order of the columns.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gcnzc.graph.hetero.stores import EdgeStore, NodeStore
from gcnzc.graph.hetero.times import UNITS, TimeUnit
from gcnzc.kernels.structure import csc
from gcnzc.kernels.structure.bipartite import find_unsorted, sort_by_time
from gcnzc.system.arguments import check_choice, check_integer, check_kind, describe

EdgeType: TypeAlias = tuple[str, str, str]
# which times count: of edges, of sources of edges, or the later of both
TimeKind: TypeAlias = Literal["edge", "node", "both"]
TIME_KINDS = ("edge", "node", "both")


class HeteroGraph:
    """A directed graph with several types of nodes and edges, on the host.

    Args:
        nodes: the nodes of each type.
        edges: the edges of each type `(source, relation, destination)`.
        name: of the graph.
        time_unit: unit of all times, "s", "ms", "us" or "ns" since 1970, to which the dates of
            seeds are converted. None for integers of an unknown unit; dates are rejected then.
        check: validate all offsets, sources, times and weights now. With False, only sizes are
            checked, and the rest when `check` is called; use this for memory-mapped files. The
            sampler checks the offsets and sources that it reads in any case.

    Raises:
        TypeError: a name or a value has the wrong type.
        ValueError: a type has no nodes, an edge type has an unknown node type, or sizes, dtypes or
            values are wrong. The message names the type and the value.
    """

    def __init__(
        self,
        nodes: Mapping[str, NodeStore],
        edges: Mapping[EdgeType, EdgeStore],
        *,
        name: str = "graph",
        time_unit: TimeUnit | None = None,
        check: bool = True,
    ) -> None:
        check_names(nodes, edges)
        if time_unit is not None:
            check_choice("time_unit", time_unit, tuple(UNITS))
        self._nodes, self._edges, self.name = dict(nodes), dict(edges), name
        self.time_unit = time_unit
        self.folder: Path | None = None
        for node_type, store in self._nodes.items():
            _check_nodes(node_type, store)
        for edge_type, own in self._edges.items():
            _check_edges(edge_type, own, self.num_nodes(edge_type[0]), self.num_nodes(edge_type[2]))
        self._is_checked = False
        # edge types whose columns are known to be sorted by a kind of time
        self._sorted: set[tuple[EdgeType, str]] = set()
        if check:
            self.check()

    def check(self) -> None:
        """Validate all offsets, sources, edge ids and weights, unless this was done before.

        Raises:
            ValueError: a value is out of range; the message names the edge type.
        """
        if not self._is_checked:
            for edge_type, store in self._edges.items():
                _check_values(edge_type, store, self.num_nodes(edge_type[0]))
            self._is_checked = True

    @property
    def node_types(self) -> list[str]:
        """Names of the node types, in the order in which they were given."""
        return list(self._nodes)

    @property
    def edge_types(self) -> list[EdgeType]:
        """The edge types, in the order in which they were given; sampling follows this order."""
        return list(self._edges)

    def metadata(self) -> tuple[list[str], list[EdgeType]]:
        """Return the node types and the edge types, as PyG's `HeteroData.metadata` does."""
        return self.node_types, self.edge_types

    def nodes(self, node_type: str) -> NodeStore:
        """Return the nodes of a type.

        Raises:
            ValueError: there is no such type.
        """
        if node_type not in self._nodes:
            raise ValueError(
                f"there is no node type {node_type!r:.100}\n\nhint: {', '.join(self._nodes)}"
            )
        return self._nodes[node_type]

    def edges(self, edge_type: EdgeType | str) -> EdgeStore:
        """Return the edges of a type, given as a triple or as the name of a unique relation."""
        return self._edges[self.edge_type(edge_type)]

    def edge_type(self, edge_type: EdgeType | str) -> EdgeType:
        """Return the triple of an edge type.

        Args:
            edge_type: a triple; the name of a relation that only one edge type has; or the three
                names joined by "__", as PyG writes them.

        Raises:
            ValueError: there is no such edge type, or several have the relation.
        """
        found = [edge_type] if edge_type in self._edges else []
        if isinstance(edge_type, str):
            found = [each for each in self._edges if edge_type in (each[1], "__".join(each))]
        if len(found) != 1 or not isinstance(found[0], tuple):
            reason = f"{len(found)} edge types have" if found else "there is no edge type with"
            raise ValueError(
                f"{reason} the name {edge_type!r:.200}\n\n"
                f"hint: {', '.join(map(str, self._edges)) or 'the graph has no edge types'}"
            )
        return found[0]

    def num_nodes(self, node_type: str) -> int:
        """Return the number of nodes of a type."""
        return self.nodes(node_type).num_nodes

    def num_edges(self, edge_type: EdgeType | str) -> int:
        """Return the number of edges of a type."""
        return self.edges(edge_type).num_edges

    def __repr__(self) -> str:
        nodes = ", ".join(f"{name}={store.num_nodes}" for name, store in self._nodes.items())
        edges = ", ".join(f"{edge}={store.num_edges}" for edge, store in self._edges.items())
        return f"HeteroGraph(nodes: {nodes}; edges: {edges})"

    def times(
        self, edge_type: EdgeType, kind: TimeKind = "both"
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the times of the edges and of the sources of an edge type that a kind counts."""
        check_choice("kind", kind, TIME_KINDS)
        edge_time = self.edges(edge_type).time if kind != "node" else None
        node_time = self.nodes(edge_type[0]).time if kind != "edge" else None
        return edge_time, node_time

    def check_time_order(self, kind: TimeKind = "both") -> None:
        """Check that each column is sorted by time, which temporal sampling requires.

        The time of an edge is the later of its own time and of the time of its source, as far as
        they exist and `kind` counts them.

        Raises:
            ValueError: a column is not sorted, or no type has times of this kind.
        """
        self.check()
        has_times = False
        for edge_type, store in self._edges.items():
            edge_time, node_time = self.times(edge_type, kind)
            if edge_time is None and node_time is None:
                continue
            has_times = True
            if (edge_type, kind) in self._sorted:
                continue
            arrays = (_numpy(edge_time), _numpy(node_time))
            found = find_unsorted(store.indptr.numpy(), store.indices.numpy(), *arrays)
            if found is not None:
                node, position, before, time = found
                damage = ""
                if self.folder is not None:
                    damage = f", unless `gcnzc info {self.folder} --verify` reports a damaged file"
                raise ValueError(
                    f"edge type {edge_type} is not sorted by time: the in-edges of node {node} "
                    f"have time {before} before {time}, at position {position}\n\n"
                    f"hint: graph.sort_by_time({kind!r}){damage}"
                )
            self._sorted.add((edge_type, kind))
        if not has_times:
            of = {"edge": "edge", "node": "node", "both": "node or edge"}[kind]
            raise ValueError(
                f"no {of} type of {self} has times\n\nhint: from_pyg(data, time_attr='time'), or "
                "time= of the nodes or edges"
            )

    def sort_by_time(self, kind: TimeKind = "both") -> "HeteroGraph":
        """Return this graph with each column sorted by time, see `check_time_order`.

        Columns that are sorted are shared, others are copied. Edge ids are kept.
        """
        self.check()
        edges = {}
        for edge_type, store in self._edges.items():
            edge_time, node_time = (_numpy(time) for time in self.times(edge_type, kind))
            arrays = store.indptr.numpy(), store.indices.numpy()
            edges[edge_type] = store
            if find_unsorted(*arrays, edge_time, node_time) is not None:
                order = np.arange(store.num_edges)
                indices = arrays[1].copy()
                sort_by_time(arrays[0], indices, order, edge_time, node_time)
                edges[edge_type] = _permuted(store, indices, torch.from_numpy(order))
        graph = HeteroGraph(
            self._nodes, edges, name=self.name, time_unit=self.time_unit, check=False
        )
        graph._is_checked = True
        graph._sorted = {(each, kind) for each in edges}
        graph.folder = self.folder
        return graph

    @classmethod
    def from_arrays(
        cls,
        nodes: Mapping[str, Any],
        edges: Mapping[EdgeType, Any],
        *,
        name: str = "graph",
        time_unit: TimeUnit | None = None,
    ) -> "HeteroGraph":
        """Build a graph from dicts of arrays; see `gcnzc.graph.hetero.build.from_arrays`."""
        from gcnzc.graph.hetero.build import from_arrays

        return from_arrays(nodes, edges, name=name, time_unit=time_unit)

    @classmethod
    def from_pyg(cls, data: Any, **options: Any) -> "HeteroGraph":
        """Build a graph from PyG's `HeteroData`; see `gcnzc.graph.hetero.objects.from_pyg`."""
        from gcnzc.graph.hetero.objects import from_pyg

        return from_pyg(data, **options)

    @classmethod
    def from_dgl(cls, graph: Any, **options: Any) -> "HeteroGraph":
        """Build a graph from a `dgl.DGLGraph`; see `gcnzc.graph.hetero.objects.from_dgl`."""
        from gcnzc.graph.hetero.objects import from_dgl

        return from_dgl(graph, **options)

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any], **options: Any) -> "HeteroGraph":
        """Build a graph from tables with keys; see `gcnzc.graph.hetero.tables.from_tables`."""
        from gcnzc.graph.hetero.tables import from_tables

        return from_tables(tables, **options)

    @classmethod
    def from_ogb(cls, folder: str | Path, **options: Any) -> "HeteroGraph":
        """Read a dataset in OGB's layout; see `gcnzc.graph.hetero.ogb.from_ogb`."""
        from gcnzc.graph.hetero.ogb import from_ogb

        return from_ogb(folder, **options)

    @classmethod
    def load(cls, folder: str | Path) -> "HeteroGraph":
        """Memory-map a prepared folder; see `gcnzc.graph.hetero.folder.load`."""
        from gcnzc.graph.hetero.folder import load

        return load(folder)

    def save(self, dest: str | Path, **options: Any) -> None:
        """Write a prepared folder; see `gcnzc.graph.hetero.folder.save`."""
        from gcnzc.graph.hetero.folder import save

        save(self, dest, **options)

    def to_ogb(self, path: str | Path, **options: Any) -> None:
        """Write a folder in OGB's layout; see `gcnzc.graph.hetero.ogb.to_ogb`."""
        from gcnzc.graph.hetero.ogb import to_ogb

        to_ogb(self, path, **options)


def _permuted(store: EdgeStore, indices: Any, order: Tensor) -> EdgeStore:
    return replace(
        store,
        indices=torch.from_numpy(indices),
        edge_ids=order if store.edge_ids is None else store.edge_ids[order],
        time=None if store.time is None else store.time[order],
        weight=None if store.weight is None else store.weight[order],
    )


def _numpy(array: Tensor | None) -> Any:
    return None if array is None else array.numpy()


def check_names(nodes: object, edges: object) -> None:
    """Check the names of the node types and edge types, which are the keys of two dicts.

    Raises:
        TypeError: an argument is not a dict, or a name has the wrong type.
        ValueError: there are no node types, or an edge type has an unknown one.
    """
    for name, value in (("nodes", nodes), ("edges", edges)):
        check_kind(name, value, Mapping, "{type: values}, a dict")
    assert isinstance(nodes, Mapping)
    assert isinstance(edges, Mapping)
    if not nodes:
        raise ValueError("the graph has no node types\n\nhint: nodes={'user': 100, 'item': 50}")
    for node_type in nodes:
        if not isinstance(node_type, str) or not node_type:
            raise TypeError(f"a node type is {describe(node_type)}, not a name")
    for edge_type in edges:
        if (
            not isinstance(edge_type, tuple)
            or len(edge_type) != 3
            or not all(isinstance(part, str) for part in edge_type)
        ):
            raise TypeError(f"an edge type is {describe(edge_type)}, not three strings")
        for part in (edge_type[0], edge_type[2]):
            if part not in nodes:
                raise ValueError(
                    f"edge type {edge_type} has the node type {part!r}, which the graph does not "
                    f"have\n\nhint: the node types are {', '.join(nodes)}"
                )


def _check_nodes(node_type: str, store: NodeStore) -> None:
    name = f"node type {node_type!r}"
    check_kind(name, store, NodeStore, "HeteroGraph.from_arrays converts dicts of arrays")
    if check_integer(f"num_nodes of {name}", store.num_nodes, 0) == 0:
        raise ValueError(f"{name} has no nodes\n\nhint: remove the type and its edge types")
    check_kind(f"split of {name}", store.split, Mapping, "{'train': ids}, with tensors of int64")
    for what, rows in (("features", store.features), ("labels", store.labels)):
        if rows is not None:
            check_kind(f"{what} of {name}", rows, Tensor, "HeteroGraph.from_arrays converts arrays")
        if rows is not None and len(rows) != store.num_nodes:
            raise ValueError(f"{name} has {store.num_nodes} nodes, but {len(rows)} rows of {what}")
    if store.quantized is not None and len(store.quantized.rows) != store.num_nodes:
        raise ValueError(
            f"{name} has {store.num_nodes} nodes, but {len(store.quantized.rows)} rows of features"
        )
    _check_vector(f"time of {name}", store.time, store.num_nodes, torch.int64)


def _check_edges(edge_type: EdgeType, store: EdgeStore, num_src: int, num_dst: int) -> None:
    name = f"edge type {edge_type}"
    check_kind(name, store, EdgeStore, "HeteroGraph.from_arrays converts edge lists")
    _check_vector(f"indptr of {name}", store.indptr, num_dst + 1, torch.int64)
    ids = torch.int32 if csc.index_dtype(num_src) is np.int32 else torch.int64
    _check_vector(f"indices of {name}", store.indices, store.num_edges, ids)
    if int(store.indptr[0]) != 0 or int(store.indptr[-1]) != store.num_edges:
        raise ValueError(
            f"indptr of {name} goes from {int(store.indptr[0])} to {int(store.indptr[-1])}, with "
            f"{store.num_edges} edges"
        )
    for what, dtype in (
        ("edge_ids", torch.int64),
        ("time", torch.int64),
        ("weight", torch.float32),
    ):
        _check_vector(f"{what} of {name}", getattr(store, what), store.num_edges, dtype)
    rows = store.features if store.quantized is None else store.quantized.rows
    if rows is not None and len(rows) != store.num_edges:
        raise ValueError(f"{name} has {store.num_edges} edges, but {len(rows)} rows of features")


def _check_vector(name: str, vector: Tensor | None, length: int, dtype: torch.dtype) -> None:
    if vector is None:
        return
    is_vector = isinstance(vector, Tensor) and vector.ndim == 1 and vector.is_contiguous()
    if not is_vector or vector.dtype != dtype or len(vector) != length or vector.is_cuda:
        raise ValueError(
            f"{name} is {describe(vector)}\n\n"
            f"hint: a contiguous vector of {length} elements of {dtype} on the host"
        )


def _check_values(edge_type: EdgeType, store: EdgeStore, num_src: int) -> None:
    name = f"edge type {edge_type}"
    offsets = store.indptr.numpy()
    node = csc.find_descent(offsets)
    if node >= 0:
        raise ValueError(
            f"indptr of {name} decreases from {offsets[node]} to {offsets[node + 1]} at node {node}"
            f"\n\n{csc.VERIFY_HINT}"
        )
    place = csc.find_out_of_range(store.indices.numpy(), num_src)
    if place >= 0:
        raise ValueError(
            f"{name}: indices[{place}] is {int(store.indices[place])}, but {edge_type[0]!r} has "
            f"{num_src} nodes\n\n{csc.VERIFY_HINT}"
        )
    if store.edge_ids is not None:
        place = csc.find_out_of_range(store.edge_ids.numpy(), store.num_edges)
        if place >= 0:
            raise ValueError(
                f"{name}: edge_ids[{place}] is {int(store.edge_ids[place])}, but there are "
                f"{store.num_edges} edges\n\n{csc.VERIFY_HINT}"
            )
    if store.weight is not None and store.num_edges:
        is_wrong = ~(torch.isfinite(store.weight) & (store.weight >= 0))
        if bool(is_wrong.any()):
            place = int(is_wrong.nonzero()[0])
            raise ValueError(
                f"{name}: the weight of the edge at position {place} is "
                f"{float(store.weight[place])}"
            )
