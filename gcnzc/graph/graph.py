"""Graphs in CSC format: the in-neighbours of every node.

Column `i` is `indices[indptr[i] : indptr[i + 1]]`: the sources of the in-edges of node `i`, in the
order of the edge list that the graph was built from, as in DGL and PyG.

Notation: N nodes, E edges.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Unpack

from gcnzc.kernels.structure import csc
from gcnzc.system.arguments import (
    as_ids,
    check_choice,
    check_edge_index,
    check_flag,
    check_integer,
    describe,
)

Ids: TypeAlias = Tensor | NDArray[np.integer] | Sequence[int]


Loops: TypeAlias = Literal["keep", "add", "remove"]


Duplicates: TypeAlias = Literal["keep", "remove"]


class BuildOptions(TypedDict, total=False):
    """Options of `Graph.from_edges` that all functions share that build a graph."""

    bidirected: bool
    self_loops: Loops
    duplicates: Duplicates


class Graph:
    """A directed graph in CSC format, on the host.

    Args:
        indptr: (N + 1,) offsets of the columns in `indices`: a tensor, a numpy array (may be
            memory-mapped) or a list, on the host. int64 is used without a copy; int32 is copied.
        indices: (E,) sources of the edges, in [0, N), on the host like `indptr`. int32 for fewer
            than 2**31 nodes, otherwise int64; the other dtype is copied.
        check: validate all values now. With False, they are validated when `check` is called; use
            this for memory-mapped files and for arrays that derive from a checked graph. A sampler
            checks the values that it reads in any case.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: sizes, dtypes, order or range are wrong.
    """

    def __init__(self, indptr: Ids, indices: Ids, *, check: bool = True) -> None:
        check = check_flag("check", check)
        offsets, sources = _to_array(indptr, "indptr"), _to_array(indices, "indices")
        _check_sizes(offsets, sources)
        self._is_checked = False
        self._folder: Path | None = None
        if check:
            if found := _find_invalid(offsets, sources):
                array, wrong = found
                raise ValueError(f"{wrong}\n\n{_remedy(array, len(offsets) - 1)}")
            self._is_checked = True
        self._indptr = _tensor(offsets.astype(np.int64, copy=False))
        self._indices = _tensor(sources.astype(csc.index_dtype(len(offsets) - 1), copy=False))

    def check(self) -> None:
        """Validate all values of `indptr` and `indices`, unless this was done before.

        Code that uses the arrays without bounds checks calls this first.

        Raises:
            ValueError: `indptr` decreases, or an index is not in [0, N).
        """
        if not self._is_checked:
            if found := _find_invalid(self._indptr.numpy(), self._indices.numpy()):
                raise damage_error(self, *found)
            self._is_checked = True

    @property
    def indptr(self) -> Tensor:
        """(N + 1,) int64 on the host: offsets of the columns in `indices`."""
        return self._indptr

    @property
    def indices(self) -> Tensor:
        """(E,) int32, or int64 with 2**31 nodes or more, on the host: sources of the in-edges."""
        return self._indices

    @property
    def num_nodes(self) -> int:
        """Number of nodes, N."""
        return self._indptr.shape[0] - 1

    @property
    def num_edges(self) -> int:
        """Number of directed edges, E."""
        return self._indices.shape[0]

    def in_degrees(self) -> Tensor:
        """Return the in-degrees of all nodes, (N,) int64 on the host.

        Raises:
            ValueError: the graph is unchecked and `indptr` decreases, see `check`.
        """
        degrees = self._indptr.diff()
        if not self._is_checked and len(degrees) and int(degrees.min()) < 0:
            self.check()
        return degrees

    def edges(self) -> tuple[Tensor, Tensor]:
        """Return the (E,) sources and (E,) targets of all edges, in column order.

        The sources are `indices` itself, not a copy.
        """
        nodes = torch.arange(self.num_nodes, dtype=self._indices.dtype)
        return self._indices, nodes.repeat_interleave(self.in_degrees())

    def __repr__(self) -> str:
        return f"Graph(num_nodes={self.num_nodes}, num_edges={self.num_edges})"

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
    def from_dgl(cls, graph: Any, **options: Unpack[BuildOptions]) -> "Graph":
        """Build a graph from a homogeneous `dgl.DGLGraph`.

        See `from_edges` for the options.

        Raises:
            TypeError: `graph` is not a `dgl.DGLGraph`.
            ValueError: the graph is heterogeneous.
        """
        if not hasattr(graph, "canonical_etypes"):
            raise TypeError(f"graph is {describe(graph)}")
        if len(graph.ntypes) != 1 or len(graph.etypes) != 1:
            raise ValueError(
                f"from_dgl: the graph has node types {graph.ntypes} and edge types "
                f"{graph.etypes}\n\nhint: gcnzc.Graph is homogeneous; pass graph[etype] with an "
                "edge type that connects nodes of one type"
            )
        src, dst = graph.edges(order="eid")
        return cls.from_edges(src.cpu(), dst.cpu(), graph.num_nodes(), **options)

    @classmethod
    def from_pyg(cls, data: Any, **options: Unpack[BuildOptions]) -> "Graph":
        """Build a graph from the `edge_index` of a `torch_geometric.data.Data`, or its `adj_t`.

        `adj_t` is a `torch_sparse.SparseTensor` or a sparse CSR tensor whose rows are targets.
        It is used if there is no `edge_index`. See `from_edges` for the options.

        Raises:
            ValueError: `data` has neither, or is heterogeneous, or its `adj_t` is not square.
        """
        if isinstance(getattr(data, "edge_types", None), list):
            raise ValueError(
                f"from_pyg: {type(data).__name__} has node types {data.node_types} and edge types "
                f"{data.edge_types}\n\nhint: gcnzc.Graph is homogeneous; use "
                "Graph.from_edges(*data[edge_type].edge_index, num_nodes) with an edge type that "
                "connects nodes of one type"
            )
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
                f"data.adj_t has {num_targets} targets and {num_sources} sources\n\nhint: "
                "gcnzc.Graph is homogeneous, so both are the number of nodes"
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
        """Return this graph rebuilt with the options of `from_edges`; itself with the defaults."""
        bidirected = check_flag("bidirected", bidirected)
        if not bidirected and self_loops == "keep" and duplicates == "keep":
            return self
        self.check()
        offsets, sources = self._indptr.numpy(), self._indices.numpy()
        return _build(
            csc.csc_segments(offsets, sources),
            csc.csc_segments(offsets, sources, reverse=True) if bidirected else [],
            self.num_nodes,
            self_loops,
            duplicates,
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
    indptr: NDArray[np.integer], indices: NDArray[np.integer]
) -> tuple[str, str] | None:
    """Return the name of an array with an invalid value, and what is wrong; None if none has."""
    node = csc.find_descent(indptr)
    if node >= 0:
        ends = f"from {indptr[node]} to {indptr[node + 1]}"
        return "indptr", f"indptr decreases {ends} at node {node}"
    num_nodes = len(indptr) - 1
    place = csc.find_out_of_range(indices, num_nodes)
    if place >= 0:
        wrong = f"indices[{place}] is {indices[place]}, but the graph has {num_nodes} nodes"
        return "indices", wrong
    return None


def _remedy(array: str, num_nodes: int) -> str:
    if array == "indptr":
        return "hint: it is the cumulative sum of the in-degrees, with a leading 0"
    return f"hint: nodes are numbered from 0 to {num_nodes - 1}"


def mapped_graph(indptr: NDArray[np.integer], indices: NDArray[np.integer], folder: Path) -> Graph:
    """Return the graph of a prepared folder, whose errors name the damaged file.

    It is not checked, because that would read the whole files; samplers check what they read.
    """
    graph = Graph(indptr, indices, check=False)
    graph._folder = folder
    return graph


def damage_error(graph: Graph, array: str, wrong: str) -> ValueError:
    """Return the error for an invalid value that was found after a graph was created.

    Args:
        graph: the graph.
        array: "indptr" or "indices".
        wrong: what is wrong.
    """
    if graph._folder is None:
        return ValueError(f"{wrong}\n\n{csc.VERIFY_HINT}")
    return ValueError(
        f"{graph._folder / array}.npy is damaged: {wrong}\n\n"
        f"hint: `gcnzc info {graph._folder} --verify` says which files are damaged; "
        "prepare the folder again"
    )


def _tensor(array: NDArray[np.integer]) -> Tensor:
    if array.flags.writeable:
        return torch.from_numpy(array)
    # torch warns about read-only memory, but nothing here writes to a graph
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
