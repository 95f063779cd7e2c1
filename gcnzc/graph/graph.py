"""Graphs in CSC format: the in-neighbours of every node, by type of nodes and of edges.

Column `i` is `indices[indptr[i] : indptr[i + 1]]`: the sources of the in-edges of node `i`, in the
order of the edge list that the graph was built from, as in DGL and PyG. Most graphs have one type
of nodes and one of edges, `NODE` and `EDGE`, which need not be named.

Notation: N nodes, E edges.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Unpack

from gcnzc.datasets.store import front_of
from gcnzc.graph import build, objects
from gcnzc.graph.stores import EdgeStore, EdgeType, NodeStore
from gcnzc.graph.times import UNITS, TimeUnit
from gcnzc.kernels.structure import csc
from gcnzc.kernels.structure.bipartite import find_unsorted, sort_by_time
from gcnzc.system.arguments import (
    as_ids,
    check_choice,
    check_edge_index,
    check_flag,
    check_integer,
    check_kind,
    describe,
)

Ids: TypeAlias = Tensor | NDArray[np.integer] | Sequence[int]
# which times count: of edges, of sources of edges, or the later of both
TimeKind: TypeAlias = Literal["edge", "node", "both"]
TIME_KINDS = ("edge", "node", "both")
Loops: TypeAlias = Literal["keep", "add", "remove"]
Duplicates: TypeAlias = Literal["keep", "remove"]
# the types of a graph that is built without types
NODE = "node"
EDGE = (NODE, "to", NODE)


class BuildOptions(TypedDict, total=False):
    """Options of `Graph.from_edges` that all functions share that build a graph."""

    bidirected: bool
    self_loops: Loops
    duplicates: Duplicates


class Graph:
    """A directed graph in CSC format, on the host: of one type of nodes and edges, or of several.

    A graph with types is built by `from_arrays`, `from_pyg`, `from_dgl` or `from_stores`, and by
    `gcnzc.graph.from_tables`. `gcnzc.load` reads graphs, and `gcnzc.prepare` writes them.

    Args:
        indptr: (N + 1,) offsets of the columns in `indices`: a tensor, a numpy array (may be
            memory-mapped) or a list, on the host. int64 is used without a copy; int32 is copied.
        indices: (E,) sources of the edges, in [0, N), on the host like `indptr`. int32 for fewer
            than 2**31 nodes, otherwise int64; the other dtype is copied.
        check: validate all values now. With False, they are validated when `check` is called; use
            this for memory-mapped files and for arrays that derive from a checked graph. A sampler
            checks the values that it reads in any case.

    Attributes:
        has_types: whether the nodes and edges have types, of which there may be one of each.
        num_nodes: number of nodes of all types.
        num_edges: number of directed edges of all types.
        name: of the graph.
        time_unit: unit of all times, "s", "ms", "us" or "ns" since 1970, to which the dates of
            seeds are converted. None for integers of an unknown unit; dates are rejected then.
        folder: the prepared folder whose files are mapped, which errors name; None for a graph in
            memory.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: sizes, dtypes, order or range are wrong.
    """

    def __init__(self, indptr: Ids, indices: Ids, *, check: bool = True) -> None:
        check = check_flag("check", check)
        offsets, sources = _to_array(indptr, "indptr"), _to_array(indices, "indices")
        _check_sizes(offsets, sources)
        num_nodes = len(offsets) - 1
        if check and (found := _find_invalid(offsets, sources, num_nodes, "the graph")):
            array, wrong = found
            raise ValueError(f"{wrong}\n\n{_remedy(array, num_nodes)}")
        edges = EdgeStore(
            _tensor(offsets.astype(np.int64, copy=False)),
            _tensor(sources.astype(csc.index_dtype(num_nodes), copy=False)),
        )
        self._set({NODE: NodeStore(num_nodes)}, {EDGE: edges}, "graph", None, has_types=False)
        self._is_checked = check

    def _set(
        self,
        nodes: Mapping[str, NodeStore],
        edges: Mapping[EdgeType, EdgeStore],
        name: str,
        time_unit: TimeUnit | None,
        has_types: bool,
    ) -> None:
        self._nodes, self._edges, self.has_types = dict(nodes), dict(edges), has_types
        self.name, self.time_unit = name, time_unit
        self.num_nodes = sum(store.num_nodes for store in nodes.values())
        self.num_edges = sum(store.num_edges for store in edges.values())
        self.folder: Path | None = None
        self._is_checked = False
        # edge types whose columns are known to be sorted by a kind of time
        self._sorted: set[tuple[EdgeType, str]] = set()

    @classmethod
    def from_stores(
        cls,
        nodes: Mapping[str, NodeStore],
        edges: Mapping[EdgeType, EdgeStore],
        *,
        name: str = "graph",
        time_unit: TimeUnit | None = None,
        check: bool = True,
    ) -> "Graph":
        """Build a graph from the nodes and edges of each type, which are shared.

        Args:
            nodes: the nodes of each type.
            edges: the edges of each type `(source, relation, destination)`.
            name: of the graph.
            time_unit: of all times, see `Graph`.
            check: validate all offsets, sources and weights now. With False, only sizes are
                checked, and the rest when `check` is called.

        Raises:
            TypeError: a name or a value has the wrong type.
            ValueError: a type has no nodes, an edge type has an unknown node type, or sizes, dtypes
                or values are wrong. The message names the type and the value.
        """
        check_names(nodes, edges)
        if time_unit is not None:
            check_choice("time_unit", time_unit, tuple(UNITS))
        for node_type, store in nodes.items():
            _check_nodes(node_type, store)
        for each, own in edges.items():
            _check_edges(each, own, nodes[each[0]].num_nodes, nodes[each[2]].num_nodes)
        graph = cls.__new__(cls)
        graph._set(nodes, edges, name, time_unit, has_types=True)
        if check:
            graph.check()
        return graph

    def with_nodes(self, nodes: Mapping[str, NodeStore], name: str | None = None) -> "Graph":
        """Return a graph with the edges of this one, and other values of its nodes.

        Raises:
            ValueError: the types or the numbers of nodes are others.
        """
        counts = {each: store.num_nodes for each, store in nodes.items()}
        if counts != {each: store.num_nodes for each, store in self._nodes.items()}:
            raise ValueError(f"the nodes are {counts}, but the graph is {self}")
        graph = Graph.__new__(Graph)
        graph._set(nodes, self._edges, name or self.name, self.time_unit, self.has_types)
        graph.folder, graph._is_checked = self.folder, self._is_checked
        return graph

    def with_edges(self, edges: Mapping[EdgeType, EdgeStore]) -> "Graph":
        """Return a graph with the nodes of this one, and edges that derive from checked ones."""
        graph = Graph.__new__(Graph)
        graph._set(self._nodes, edges, self.name, self.time_unit, self.has_types)
        graph.folder, graph._is_checked = self.folder, True
        return graph

    def check_untyped(self) -> None:
        """Check that nodes and edges have no types, for functions of one array of each.

        Raises:
            ValueError: they have types.
        """
        if self.has_types:
            raise ValueError(
                f"{self} has types of nodes and edges\n\nhint: this takes graphs without types; "
                "Graph(store.indptr, store.indices), with the edges of a type, is one"
            )

    def check(self) -> None:
        """Validate all offsets, sources, edge ids and weights, unless this was done before.

        Code that uses the arrays without bounds checks calls this first.

        Raises:
            ValueError: `indptr` decreases, an id is out of range, or a weight is wrong. The message
                names the edge type, or the damaged file.
        """
        if not self._is_checked:
            for edge_type, store in self._edges.items():
                source = edge_type[0]
                owner = "the graph" if source == NODE else repr(source)
                arrays = store.indptr.numpy(), store.indices.numpy()
                found = _find_invalid(*arrays, self._nodes[source].num_nodes, owner)
                if found := found or _find_invalid_values(store):
                    raise damage_error(self, *found, edge_type)
            self._is_checked = True

    @property
    def indptr(self) -> Tensor:
        """(N + 1,) int64 on the host: offsets of the columns; of the only edge type."""
        return self.edges().indptr

    @property
    def indices(self) -> Tensor:
        """(E,) int32, or int64 with 2**31 nodes or more, on the host: sources of the in-edges."""
        return self.edges().indices

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

    def nodes(self, node_type: str | None = None) -> NodeStore:
        """Return the nodes of a type, by default of the only one.

        Raises:
            ValueError: there is no such type, or none is given and there are several.
        """
        if node_type is None and len(self._nodes) == 1:
            return next(iter(self._nodes.values()))
        if node_type is None or node_type not in self._nodes:
            wrong = "the graph has several node types"
            if node_type is not None:
                wrong = f"there is no node type {node_type!r:.100}"
            raise ValueError(f"{wrong}\n\nhint: {', '.join(self._nodes)}")
        return self._nodes[node_type]

    def edges(self, edge_type: EdgeType | str | None = None) -> EdgeStore:
        """Return the edges of a type, by default of the only one.

        Args:
            edge_type: see `edge_type`.

        Raises:
            ValueError: there is no such type, or none is given and there is not exactly one.
        """
        if edge_type is None and len(self._edges) == 1:
            return next(iter(self._edges.values()))
        return self._edges[self.edge_type(edge_type)]

    def edge_type(self, edge_type: EdgeType | str | None = None) -> EdgeType:
        """Return the triple of an edge type.

        Args:
            edge_type: a triple; the name of a relation that only one edge type has; the three names
                joined by "__", as PyG writes them; or None for the only one.

        Raises:
            ValueError: there is no such edge type, or several have the relation.
        """
        found = [
            each for each in self._edges if edge_type in (None, each, each[1], "__".join(each))
        ]
        if len(found) != 1:
            named = "" if edge_type is None else f" the name {edge_type!r:.200}"
            reason = f"{len(found)} edge types have" if found else "there is no edge type with"
            if edge_type is None:
                reason = f"the graph has {len(found)} edge types"
            raise ValueError(
                f"{reason}{named}\n\n"
                f"hint: {', '.join(map(str, self._edges)) or 'the graph has no edge types'}"
            )
        return found[0]

    def in_degrees(self) -> Tensor:
        """Return the in-degrees of all nodes of the only type, (N,) int64 on the host.

        Raises:
            ValueError: the graph is unchecked and `indptr` decreases, see `check`.
        """
        degrees = self.indptr.diff()
        if not self._is_checked and len(degrees) and int(degrees.min()) < 0:
            self.check()
        return degrees

    def coo(self) -> tuple[Tensor, Tensor]:
        """Return the (E,) sources and (E,) targets of all edges of the only type, in column order.

        The sources are `indices` itself, not a copy.
        """
        indices = self.indices
        nodes = torch.arange(len(self.indptr) - 1, dtype=indices.dtype)
        return indices, nodes.repeat_interleave(self.in_degrees())

    def __repr__(self) -> str:
        if not self.has_types:
            return f"Graph(num_nodes={self.num_nodes}, num_edges={self.num_edges})"
        nodes = ", ".join(f"{name}={store.num_nodes}" for name, store in self._nodes.items())
        edges = ", ".join(f"{edge}={store.num_edges}" for edge, store in self._edges.items())
        return f"Graph(nodes: {nodes}; edges: {edges})"

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

    def sort_by_time(self, kind: TimeKind = "both") -> "Graph":
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
        graph = self.with_edges(edges)
        graph._sorted = {(each, kind) for each in edges}
        return graph

    @classmethod
    def from_arrays(
        cls,
        nodes: Mapping[str, Any],
        edges: Mapping[EdgeType, Any],
        *,
        name: str = "graph",
        time_unit: TimeUnit | None = None,
    ) -> "Graph":
        """Build a graph with node types and edge types from arrays::

            Graph.from_arrays(
                nodes={"user": {"features": x, "labels": y, "split": {"train": ids}}, "item": 1000},
                edges={("user", "buys", "item"): {"edge_index": pairs, "time": seconds}},
            )

        Features are shared, not copied. Columns are sorted by time if there are times, see
        `Graph.check_time_order`; otherwise the edges of a column keep the order of the list.

        Args:
            nodes: for each type the number of nodes, or a dict with some of `num_nodes`;
                `features`, (N, D) numbers, a sparse tensor or a SciPy matrix; `labels`, (N,)
                classes with -1 for no label, (N, T) numbers, or floating-point numbers; `split`, a
                dict of "train", "valid" and "test" with ids or masks, or (N,) of these words;
                `time`, (N,) integers or dates; `keys`, (N,) ids of the nodes in their source, all
                different; and `classes`, names of the classes, or of the columns of labels if there
                are several. Predictions have the keys and the names. Without `num_nodes`, the other
                values determine N.
            edges: for each type `(source, relation, destination)` a (2, E) tensor or array of
                sources and destinations, a pair of (E,) ids, or a dict with `edge_index` and some
                of `features` (E, D), `time` (E,) and `weight` (E,), all in the order of the edges.
            name: of the graph.
            time_unit: unit of all times: "s", "ms", "us" or "ns". Dates become the time since 1970
                in this unit, in UTC. Default: seconds if all times are dates; integers have no
                known unit. If only some types have dates, the unit of the integers is required.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an edge is outside the nodes of its types, a time is missing, some times are
                dates and others are integers of an unknown unit, a label is not a class, a node is
                in two parts of a split, sizes do not match, or a type is unknown. The message names
                the type and the value.
        """
        if time_unit is not None:
            check_choice("time_unit", time_unit, tuple(UNITS))
        check_names(nodes, edges)
        if time_unit is None and build.have_dates(nodes, edges):
            time_unit = "s"
        stores = {each: build.node_store(each, given, time_unit) for each, given in nodes.items()}
        found = {
            each: build.edge_store(each, given, stores, time_unit) for each, given in edges.items()
        }
        graph = cls.from_stores(stores, found, name=name, time_unit=time_unit, check=False)
        graph._is_checked = True
        graph._sorted = {
            (each, kind) for each in found for kind in build.sorted_kinds(stores, found, each)
        }
        return graph

    @classmethod
    def from_edges(
        cls,
        src: Ids,
        dst: Ids,
        num_nodes: int,
        *,
        bidirected: bool = False,
        self_loops: Loops = "keep",
        duplicates: Duplicates = "keep",
    ) -> "Graph":
        """Build a graph from an edge list (COO) with the edges `src[e] -> dst[e]`.

        Args:
            src: (E,) int32 or int64 in [0, num_nodes), on the host; may be strided, memory-mapped,
                or a row of a (2, E) tensor.
            dst: like `src`.
            num_nodes: N.
            bidirected: append the reverse of every edge to the edge list. A self loop is also
                appended, so that the graph contains it twice.
            self_loops: "remove" removes self loops; "add" removes them, then appends one to every
                column.
            duplicates: "remove" keeps one of the edges with equal source and target, and
                sorts every column.

        Raises:
            ValueError: an id is not in [0, num_nodes), or sizes, dtypes or options are wrong.
        """
        bidirected = check_flag("bidirected", bidirected)
        source, target = _to_array(src, "src"), _to_array(dst, "dst")
        if source.shape != target.shape:
            raise ValueError(f"from_edges: src has {len(source)} elements, dst {len(target)}")
        return _build(
            csc.edge_list_segments(source, target),
            csc.edge_list_segments(target, source) if bidirected else [],
            num_nodes,
            self_loops,
            duplicates,
        )

    @classmethod
    def from_csc(cls, indptr: Ids, indices: Ids, **options: Unpack[BuildOptions]) -> "Graph":
        """Build a graph from CSC arrays: column `i` has the sources of the in-edges of node `i`.

        With default options this is `Graph(indptr, indices)`; see `from_edges` for the options.
        """
        return cls(indptr, indices).rebuild(**options)

    @classmethod
    def from_csr(
        cls,
        indptr: Ids,
        indices: Ids,
        *,
        bidirected: bool = False,
        self_loops: Loops = "keep",
        duplicates: Duplicates = "keep",
    ) -> "Graph":
        """Build a graph from CSR arrays: row `i` has the targets of the out-edges of node `i`.

        For example a scipy CSR adjacency matrix with `A[source, target]`. The sources of each
        column are in ascending order. See `from_edges` for the options.
        """
        bidirected = check_flag("bidirected", bidirected)
        rows = cls(indptr, indices)
        offsets, targets = rows.indptr.numpy(), rows.indices.numpy()
        return _build(
            csc.csc_segments(offsets, targets, reverse=True),
            csc.csc_segments(offsets, targets) if bidirected else [],
            rows.num_nodes,
            self_loops,
            duplicates,
        )

    @classmethod
    def from_dgl(cls, graph: Any, **options: Any) -> "Graph":
        """Build a graph from a `dgl.DGLGraph` with any number of node types and edge types.

        Of a graph with one type of each, the structure is taken, unless `options` name its times or
        weights; of others also features, labels and splits: node data `train_mask`, `val_mask` and
        `test_mask`. Edge ids are DGL's.

        Args:
            graph: a DGL graph.
            options: for a structure, those of `from_edges`; for a graph with data, `time`, the name
                of the node or edge data with times; `weight`, of the edge data with sampling
                weights; `features` ("feat"), of the node and edge data with features; `labels`
                ("label"), of the node data with labels; `time_unit`, see `from_arrays`; and `name`,
                of the graph.

        Raises:
            TypeError: `graph` is not a `dgl.DGLGraph`, or has no such option.
            ValueError: no type has the given data, or values are wrong, see `from_arrays`.
        """
        if not hasattr(graph, "canonical_etypes"):
            raise TypeError(f"graph is {describe(graph)}, not a dgl.DGLGraph")
        has_types = len(graph.ntypes) != 1 or len(graph.etypes) != 1
        if has_types or options.keys() & {"time", "weight"}:
            return cls.from_arrays(**objects.read_dgl(graph, **options))
        src, dst = graph.edges(order="eid")
        return cls.from_edges(src.cpu(), dst.cpu(), graph.num_nodes(), **options)

    @classmethod
    def from_pyg(cls, data: Any, **options: Any) -> "Graph":
        """Build a graph from a PyG `Data` or `HeteroData`.

        Of a `Data`, the structure is taken: `edge_index`, or without it `adj_t`, a
        `torch_sparse.SparseTensor` or a sparse CSR tensor whose rows are targets. Of a
        `HeteroData`, also features, which are shared, labels, and as splits `train_mask`,
        `val_mask` and `test_mask`. Edge ids are positions in `edge_index`.

        Args:
            data: a `Data` or a `HeteroData`.
            options: for a `Data`, those of `from_edges`; for a `HeteroData`, `time_attr`, the
                attribute of node types, of edge types, or of both with times; `weight_attr`, of
                edge types with sampling weights; `feature_attr` ("x") and `label_attr` ("y"), of
                node types; `edge_feature_attr` ("edge_attr"), of edge types; `time_unit`, see
                `from_arrays`; and `name`, of the graph.

        Raises:
            TypeError: there is no such option for `data`.
            ValueError: `data` has no edges, its `adj_t` is not square, no type has an attribute,
                the number of nodes of a type is unknown, or values are wrong, see `from_arrays`.
        """
        if isinstance(getattr(data, "edge_types", None), list):
            return cls.from_arrays(**objects.read_pyg(data, **options))
        edge_index = getattr(data, "edge_index", None)
        if edge_index is not None:
            src, dst = check_edge_index("data.edge_index", edge_index).cpu()
            return cls.from_edges(src, dst, data.num_nodes, **options)
        adjacency = getattr(data, "adj_t", None)
        if adjacency is None:
            raise ValueError(f"data is {describe(data)}, which has no edge_index and no adj_t")
        num_targets, num_sources = adjacency.size(0), adjacency.size(1)
        if num_targets != num_sources:
            raise ValueError(
                f"data.adj_t has {num_targets} targets and {num_sources} sources, of the same nodes"
            )
        if isinstance(adjacency, Tensor):
            indptr, indices = adjacency.crow_indices(), adjacency.col_indices()
        else:
            indptr, indices, _ = adjacency.csr()
        return cls.from_csc(indptr.cpu(), indices.cpu(), **options)

    def rebuild(
        self,
        *,
        bidirected: bool = False,
        self_loops: Loops = "keep",
        duplicates: Duplicates = "keep",
    ) -> "Graph":
        """Return this graph without types, rebuilt with the options of `from_edges`.

        With the default options, this is the graph itself; otherwise edges have no features, times
        and weights.
        """
        bidirected = check_flag("bidirected", bidirected)
        if not bidirected and self_loops == "keep" and duplicates == "keep":
            return self
        self.check_untyped()
        self.check()
        offsets, sources = self.indptr.numpy(), self.indices.numpy()
        built = _build(
            csc.csc_segments(offsets, sources),
            csc.csc_segments(offsets, sources, reverse=True) if bidirected else [],
            self.num_nodes,
            self_loops,
            duplicates,
        )
        return self.with_edges({self.edge_type(): built.edges()})


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
    check_kind(name, store, NodeStore, "Graph.from_arrays converts dicts of arrays")
    if check_integer(f"num_nodes of {name}", store.num_nodes, 0) == 0:
        raise ValueError(f"{name} has no nodes\n\nhint: remove the type and its edge types")
    check_kind(f"split of {name}", store.split, Mapping, "{'train': ids}, with tensors of int64")
    for what, rows in (("features", store.features), ("labels", store.labels)):
        if rows is not None:
            check_kind(f"{what} of {name}", rows, Tensor, "Graph.from_arrays converts arrays")
        if rows is not None and len(rows) != store.num_nodes:
            raise ValueError(f"{name} has {store.num_nodes} nodes, but {len(rows)} rows of {what}")
    if store.quantized is not None and len(store.quantized.rows) != store.num_nodes:
        raise ValueError(
            f"{name} has {store.num_nodes} nodes, but {len(store.quantized.rows)} rows of features"
        )
    _check_vector(f"time of {name}", store.time, store.num_nodes, torch.int64)


def _check_edges(edge_type: EdgeType, store: EdgeStore, num_src: int, num_dst: int) -> None:
    name = f"edge type {edge_type}"
    check_kind(name, store, EdgeStore, "Graph.from_arrays converts edge lists")
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


def _build(
    forward: Sequence[csc.Segment],
    backward: Sequence[csc.Segment],
    num_nodes: int,
    self_loops: Loops,
    duplicates: Duplicates,
) -> Graph:
    check_choice("self_loops", self_loops, ("keep", "add", "remove"))
    check_choice("duplicates", duplicates, ("keep", "remove"))
    num_nodes = check_integer("num_nodes", num_nodes, 0, hint="the number of nodes")
    segments = [*forward, *backward]
    added_loops = csc.self_loop_segments(num_nodes) if self_loops == "add" else []
    num_filtered = 0 if self_loops == "keep" else len(segments)
    indptr, indices = csc.build_csc(
        [*segments, *added_loops], num_nodes, num_without_loops=num_filtered
    )
    if duplicates == "remove":
        indptr, indices = csc.coalesce(indptr, indices)
    return Graph(indptr, indices, check=False)


def _to_array(ids: Ids, name: str) -> NDArray[np.integer]:
    if isinstance(ids, Tensor):
        if ids.device.type != "cpu":
            raise ValueError(f"{name} is on {ids.device}")
        ids = ids.detach().numpy()
    elif not isinstance(ids, np.ndarray):
        return as_ids(name, ids, "one dimension of int32 or int64").numpy()
    # a plain ndarray view, because each slice of an np.memmap costs microseconds
    array = np.asarray(ids)
    if array.shape == (0,):
        # `torch.tensor([])` and `np.array([])` are of a floating-point dtype
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype not in (np.int32, np.int64):
        raise ValueError(
            f"{name} has shape {array.shape}, type {array.dtype}: not one row of int64"
        )
    return array


def _check_sizes(indptr: NDArray[np.integer], indices: NDArray[np.integer]) -> None:
    for name, array in (("indptr", indptr), ("indices", indices)):
        if not array.flags.c_contiguous:
            raise ValueError(f"{name} is strided, {array.strides[0]} bytes between elements")
    if len(indptr) == 0:
        raise ValueError("indptr is empty\n\nhint: N nodes need N + 1 offsets, the first of them 0")
    if indptr[0] != 0 or indptr[-1] != len(indices):
        raise ValueError(
            f"indptr goes from {indptr[0]} to {indptr[-1]}, with {len(indices)} indices"
        )


def _find_invalid(
    indptr: NDArray[np.integer], indices: NDArray[np.integer], num_nodes: int, owner: str
) -> tuple[str, str] | None:
    """Return the name of an array with an invalid value, and what is wrong; None if none has."""
    node = csc.find_descent(indptr)
    if node >= 0:
        ends = f"from {indptr[node]} to {indptr[node + 1]}"
        return "indptr", f"indptr decreases {ends} at node {node}"
    place = csc.find_out_of_range(indices, num_nodes)
    if place >= 0:
        return "indices", f"indices[{place}] is {indices[place]}, but {owner} has {num_nodes} nodes"
    return None


def _find_invalid_values(store: EdgeStore) -> tuple[str, str] | None:
    """Return what is wrong with the edge ids and weights of a type, as `_find_invalid` does."""
    if store.edge_ids is not None:
        place = csc.find_out_of_range(store.edge_ids.numpy(), store.num_edges)
        if place >= 0:
            wrong = f"edge_ids[{place}] is {int(store.edge_ids[place])}"
            return "edge_ids", f"{wrong}, but there are {store.num_edges} edges"
    if store.weight is not None and store.num_edges:
        is_wrong = ~(torch.isfinite(store.weight) & (store.weight >= 0))
        if bool(is_wrong.any()):
            place = int(is_wrong.nonzero()[0])
            wrong = f"the weight of the edge at position {place} is {float(store.weight[place])}"
            return "weight", wrong
    return None


def _remedy(array: str, num_nodes: int) -> str:
    if array == "indptr":
        return "hint: it is the cumulative sum of the in-degrees, with a leading 0"
    return f"hint: nodes are numbered from 0 to {num_nodes - 1}"


def damage_error(
    graph: Graph, array: str, wrong: str, edge_type: EdgeType | None = None
) -> ValueError:
    """Return the error for an invalid value that was found after a graph was created.

    Args:
        graph: the graph.
        array: name of the array of the edges with the value, such as "indptr".
        wrong: what is wrong.
        edge_type: of the edges; None for the only one.
    """
    edge_type = graph.edge_type(edge_type)
    if graph.has_types:
        wrong = f"edge type {edge_type}: {wrong}"
    if graph.folder is None:
        return ValueError(f"{wrong}\n\n{csc.VERIFY_HINT}")
    number = graph.edge_types.index(edge_type)
    file = graph.folder / (front_of("edges", number) if graph.has_types else "") / f"{array}.npy"
    return ValueError(
        f"{file} is damaged: {wrong}\n\n"
        f"hint: `gcnzc info {graph.folder} --verify` says which files are damaged; "
        "prepare the folder again"
    )


def _tensor(array: NDArray[np.integer]) -> Tensor:
    if array.flags.writeable:
        return torch.from_numpy(array)
    # torch warns about read-only memory, but nothing here writes to a graph
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
