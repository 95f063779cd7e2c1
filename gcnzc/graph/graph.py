"""Graphs as CSC: the in-neighbours of every node.

Column `i` is `indices[indptr[i] : indptr[i + 1]]`: the sources of the edges into node `i`, in the
order of the edge list they came from, as DGL and PyG keep them.

Letters: N nodes, E edges.
"""

import warnings
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gcnzc.kernels.structure import csc
from gcnzc.system.arguments import as_ids, check_choice, check_flag, check_integer, describe

Ids: TypeAlias = Tensor | NDArray[np.integer] | Sequence[int]


Loops: TypeAlias = Literal["keep", "add", "remove"]


Duplicates: TypeAlias = Literal["keep", "remove"]


class Graph:
    """A directed graph: for every node, the nodes with an edge to it.

    Args:
        indptr: (N + 1,), where each column starts in `indices`; int64, or int32 and then copied.
            On the host, memory-mapped or not, as a tensor, a numpy array or a list.
        indices: (E,), sources of edges, in [0, N); int32 below 2**31 nodes, else int64; the other
            type is copied. On the host like `indptr`.
        check: look at every number now. False leaves that to `check`, for files that are mapped
            and for what is made from a checked graph; a sampler checks the numbers that it reads.

    Raises:
        TypeError: an argument of another type.
        ValueError: sizes, dtypes, order or range are wrong.
    """

    def __init__(self, indptr: Ids, indices: Ids, *, check: bool = True) -> None:
        check = check_flag("check", check)
        offsets, sources = _numbers(indptr, "indptr"), _numbers(indices, "indices")
        _check_sizes(offsets, sources)
        self._is_checked = False
        if check:
            _check_numbers(offsets, sources)
            self._is_checked = True
        self._indptr = _tensor(offsets.astype(np.int64, copy=False))
        self._indices = _tensor(sources.astype(csc.index_dtype(len(offsets) - 1), copy=False))

    def check(self) -> None:
        """Look at every number, unless that was done: code that trusts all of them calls this.

        Raises:
            ValueError: `indptr` falls somewhere, or an index is no node.
        """
        if not self._is_checked:
            _check_numbers(self._indptr.numpy(), self._indices.numpy(), csc.VERIFY_HINT)
            self._is_checked = True

    @property
    def indptr(self) -> Tensor:
        """(N + 1,) int64 on the host: where each column starts in `indices`."""
        return self._indptr

    @property
    def indices(self) -> Tensor:
        """(E,) int32, or int64 from 2**31 nodes on, on the host: sources, column by column."""
        return self._indices

    @property
    def num_nodes(self) -> int:
        """N."""
        return self._indptr.shape[0] - 1

    @property
    def num_edges(self) -> int:
        """E; both directions count."""
        return self._indices.shape[0]

    def in_degrees(self) -> Tensor:
        """(N,) int64: the length of each column.

        Raises:
            ValueError: one is negative, see `check`.
        """
        degrees = self._indptr.diff()
        if not self._is_checked and len(degrees) and int(degrees.min()) < 0:
            self.check()
        return degrees

    def edges(self) -> tuple[Tensor, Tensor]:
        """(E,) sources and (E,) destinations, column by column; the sources are not copied."""
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
        """The graph of the edges `src[e] -> dst[e]`.

        Args:
            src: (E,) int32 or int64 in [0, num_nodes), on the host; may be strided, memory-mapped,
                or a row of (2, E).
            dst: like `src`.
            num_nodes: N.
            bidirected: add the reverse of every edge, behind all edges of the list; of a self loop
                too, which is then there twice.
            self_loops: "remove" takes them out; "add" does so, and ends every column with one.
            duplicates: "remove" keeps one of each (source, destination), and sorts every column.

        Raises:
            ValueError: an edge has an end that is no node, or sizes, types or choices are wrong.
        """
        bidirected = check_flag("bidirected", bidirected)
        source, target = _numbers(src, "src"), _numbers(dst, "dst")
        if source.shape != target.shape:
            raise ValueError(
                f"from_edges: src has {len(source)} numbers, dst {len(target)}\n\n"
                "hint: an edge is one number in each"
            )
        return _build(
            csc.edge_list_segments(source, target),
            csc.edge_list_segments(target, source) if bidirected else [],
            num_nodes,
            self_loops,
            duplicates,
        )

    @classmethod
    def from_csc(
        cls,
        indptr: Ids,
        indices: Ids,
        *,
        bidirected: bool = False,
        self_loops: Loops = "keep",
        duplicates: Duplicates = "keep",
    ) -> "Graph":
        """The graph whose column `i` of `indices` has the sources of the edges into `i`.

        Without a choice this is `Graph(indptr, indices)`; for the choices see `from_edges`.
        """
        return cls(indptr, indices).rebuilt(
            bidirected=bidirected, self_loops=self_loops, duplicates=duplicates
        )

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
        """The graph whose row `i` of `indices` has the destinations of the edges out of `i`.

        Such is scipy's adjacency matrix with `A[source, destination]`. For the choices see
        `from_edges`; the edges of a column come in the order of their sources.
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
    def from_dgl(
        cls,
        graph: Any,
        *,
        bidirected: bool = False,
        self_loops: Loops = "keep",
        duplicates: Duplicates = "keep",
    ) -> "Graph":
        """The edges of a `dgl.DGLGraph` with one type of nodes and one of edges.

        For the choices see `from_edges`.

        Raises:
            TypeError: it is no such graph.
            ValueError: there are more types.
        """
        if not hasattr(graph, "canonical_etypes"):
            raise TypeError(f"graph is {describe(graph)}\n\nhint: a dgl.DGLGraph")
        if len(graph.ntypes) != 1 or len(graph.etypes) != 1:
            raise ValueError(
                f"from_dgl: the graph has node types {graph.ntypes} and edge types "
                f"{graph.etypes}\n\nhint: gcnzc.Graph has no types; graph[etype] of an edge type "
                "whose ends are of one node type is a graph without them"
            )
        src, dst = graph.edges(order="eid")
        return cls.from_edges(
            src.cpu(),
            dst.cpu(),
            graph.num_nodes(),
            bidirected=bidirected,
            self_loops=self_loops,
            duplicates=duplicates,
        )

    @classmethod
    def from_pyg(
        cls,
        data: Any,
        *,
        bidirected: bool = False,
        self_loops: Loops = "keep",
        duplicates: Duplicates = "keep",
    ) -> "Graph":
        """The edges of a `torch_geometric.data.Data`: its `edge_index`, or else its `adj_t`.

        `adj_t` is a `torch_sparse.SparseTensor` or a tensor of torch's CSR layout whose rows are
        destinations. For the choices see `from_edges`.

        Raises:
            ValueError: it has neither, or several types of nodes and edges.
        """
        if isinstance(getattr(data, "edge_types", None), list):
            raise ValueError(
                f"from_pyg: {type(data).__name__} has node types {data.node_types} and edge types "
                f"{data.edge_types}\n\nhint: gcnzc.Graph has no types; "
                "Graph.from_edges(*data[edge_type].edge_index, num_nodes) is of one edge type, if "
                "its ends are of one node type"
            )
        edge_index = getattr(data, "edge_index", None)
        if edge_index is not None:
            if not isinstance(edge_index, Tensor) or edge_index.ndim != 2 or len(edge_index) != 2:
                raise ValueError(
                    f"data.edge_index is {describe(edge_index)}\n\n"
                    "hint: a tensor of shape (2, E), sources above destinations"
                )
            src, dst = edge_index.cpu()
            return cls.from_edges(
                src,
                dst,
                data.num_nodes,
                bidirected=bidirected,
                self_loops=self_loops,
                duplicates=duplicates,
            )
        adjacency = getattr(data, "adj_t", None)
        if adjacency is None:
            raise ValueError(
                f"data is {describe(data)}, which has no edge_index and no adj_t\n\n"
                "hint: a torch_geometric.data.Data with edge_index of shape (2, E)"
            )
        if isinstance(adjacency, Tensor):
            indptr, indices = adjacency.crow_indices(), adjacency.col_indices()
        else:
            indptr, indices, _ = adjacency.csr()
        return cls.from_csc(
            indptr.cpu(),
            indices.cpu(),
            bidirected=bidirected,
            self_loops=self_loops,
            duplicates=duplicates,
        )

    def rebuilt(
        self,
        *,
        bidirected: bool = False,
        self_loops: Loops = "keep",
        duplicates: Duplicates = "keep",
    ) -> "Graph":
        """This graph with other choices, see `from_edges`; itself if there is nothing to change."""
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
    listed = [*forward, *backward]
    added = csc.self_loop_segments(num_nodes) if self_loops == "add" else []
    indptr, indices = csc.build_csc(
        [*listed, *added], num_nodes, num_without_loops=0 if self_loops == "keep" else len(listed)
    )
    if duplicates == "remove":
        indptr, indices = csc.coalesce(indptr, indices)
    return Graph(indptr, indices, check=False)


def _numbers(ids: Ids, name: str) -> NDArray[np.integer]:
    if isinstance(ids, Tensor):
        if ids.device.type != "cpu":
            raise ValueError(
                f"{name} is on {ids.device}\n\nhint: a graph lies on the host; pass {name}.cpu()"
            )
        ids = ids.detach().numpy()
    elif not isinstance(ids, np.ndarray):
        return as_ids(name, ids, "one dimension of int32 or int64").numpy()
    # a view as a plain array: np.memmap's own slices cost microseconds each
    array = np.asarray(ids)
    if array.ndim != 1 or array.dtype not in (np.int32, np.int64):
        raise ValueError(
            f"{name} has shape {array.shape} and type {array.dtype}\n\n"
            "hint: one dimension of int32 or int64"
        )
    return array


def _check_sizes(indptr: NDArray[np.integer], indices: NDArray[np.integer]) -> None:
    for name, array in (("indptr", indptr), ("indices", indices)):
        if not array.flags.c_contiguous:
            raise ValueError(
                f"{name} is strided, {array.strides[0]} bytes from number to number\n\n"
                f"hint: pass {name}.contiguous(), or {name}.copy() of a numpy array"
            )
    if len(indptr) == 0:
        raise ValueError("indptr is empty\n\nhint: N nodes need N + 1 numbers, the first of them 0")
    if indptr[0] != 0 or indptr[-1] != len(indices):
        raise ValueError(
            f"indptr goes from {indptr[0]} to {indptr[-1]}, with {len(indices)} indices\n\n"
            "hint: it must start at 0 and end at the number of indices"
        )


def _check_numbers(
    indptr: NDArray[np.integer], indices: NDArray[np.integer], hint: str | None = None
) -> None:
    num_nodes = len(indptr) - 1
    node = csc.find_descent(indptr)
    if node >= 0:
        raise ValueError(
            f"indptr falls from {indptr[node]} to {indptr[node + 1]} at node {node}\n\n"
            + (hint or "hint: it is the running sum of the numbers of in-neighbours")
        )
    place = csc.find_out_of_range(indices, num_nodes)
    if place >= 0:
        raise ValueError(
            f"indices[{place}] is {indices[place]}, but the graph has {num_nodes} nodes\n\n"
            + (hint or f"hint: nodes are numbered from 0 to {num_nodes - 1}")
        )


def _tensor(array: NDArray[np.integer]) -> Tensor:
    if array.flags.writeable:
        return torch.from_numpy(array)
    # torch warns of read-only memory; nothing here writes to a graph
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
