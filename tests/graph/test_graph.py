from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse
import torch

from gcnzc.graph.graph import Graph
from gcnzc.interop.dgl import import_dgl
from gcnzc.sampling import Sampler

RNG = np.random.default_rng(0)
NUM_NODES = 300
SRC, DST = RNG.integers(0, NUM_NODES, (2, 4000))
DST[:50] = SRC[:50]  # self loops
SRC[60:120], DST[60:120] = SRC[:60], DST[:60]  # duplicates, of self loops too

CHOICES = [
    {"bidirected": bidirected, "self_loops": self_loops, "duplicates": duplicates}
    for bidirected in (False, True)
    for self_loops in ("keep", "add", "remove")
    for duplicates in ("keep", "remove")
]


def columns(graph):
    return [column.tolist() for column in graph.indices.split(graph.in_degrees().tolist())]


def expected_columns(src, dst, num_nodes, bidirected, self_loops, duplicates):
    """What the choices mean, edge by edge."""
    edges = list(zip(src.tolist(), dst.tolist(), strict=True))
    if bidirected:
        edges += [(v, u) for u, v in edges]
    if self_loops != "keep":
        edges = [(u, v) for u, v in edges if u != v]
    if self_loops == "add":
        edges += [(u, u) for u in range(num_nodes)]
    if duplicates == "remove":
        edges = sorted(set(edges))
    found = [[] for _ in range(num_nodes)]
    for u, v in edges:
        found[v].append(u)
    return found


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_from_edges_supports_every_option(choices):
    graph = Graph.from_edges(SRC, DST, NUM_NODES, **choices)
    assert columns(graph) == expected_columns(SRC, DST, NUM_NODES, **choices)
    Graph(graph.indptr, graph.indices)


def test_equals_scipys_csc():
    pairs = np.unique(np.stack([SRC, DST]), axis=1)
    expected = scipy.sparse.csc_array((np.ones(pairs.shape[1]), pairs), (NUM_NODES, NUM_NODES))
    graph = Graph.from_edges(SRC, DST, NUM_NODES, duplicates="remove")
    np.testing.assert_array_equal(graph.indptr, expected.indptr)
    np.testing.assert_array_equal(graph.indices, expected.indices)


def memory_mapped(path, array):
    np.save(path, array)
    return np.load(path, mmap_mode="r")


def test_sizes_types_and_views():
    graph = Graph.from_edges(SRC, DST, NUM_NODES)
    assert (graph.num_nodes, graph.num_edges) == (NUM_NODES, 4000)
    assert (graph.indptr.dtype, graph.indices.dtype) == (torch.int64, torch.int32)
    np.testing.assert_array_equal(graph.in_degrees(), np.bincount(DST, minlength=NUM_NODES))
    src, dst = graph.coo()
    assert src is graph.indices
    assert (dst.diff() >= 0).all()
    assert repr(graph) == "Graph(num_nodes=300, num_edges=4000)"


def test_graphs_without_edges_or_nodes_are_valid():
    none = np.empty(0, np.int64)
    # PyTorch's and NumPy's empty tensors are of a floating-point dtype
    for empty in (none, torch.tensor([]), np.array([]), []):
        graph = Graph.from_edges(empty, empty, 5)
        assert (graph.num_nodes, graph.num_edges) == (5, 0)
    assert columns(graph.rebuild(self_loops="add")) == [[0], [1], [2], [3], [4]]
    empty = Graph.from_edges(none, none, 0, bidirected=True, self_loops="add", duplicates="remove")
    assert (empty.num_nodes, empty.num_edges) == (0, 0)


def test_memory_is_shared_if_the_dtypes_match(tmp_path):
    built = Graph.from_edges(SRC, DST, NUM_NODES)
    again = Graph(built.indptr, built.indices)
    assert again.indices.data_ptr() == built.indices.data_ptr()
    mapped = memory_mapped(tmp_path / "indices.npy", built.indices.numpy())
    graph = Graph(memory_mapped(tmp_path / "indptr.npy", built.indptr.numpy()), mapped)
    assert graph.indices.data_ptr() == mapped.ctypes.data
    assert columns(graph) == columns(built)
    assert graph.rebuild() is graph


@pytest.mark.parametrize(
    ("indptr", "indices", "message"),
    [
        ([0, 2, 1, 3], [0, 1, 2], "decreases from 2 to 1 at node 1"),
        ([1, 2, 3, 3], [0, 1, 2], "goes from 1 to 3, with 3 indices"),
        ([0, 1, 2, 2], [0, 1, 2], "goes from 0 to 2, with 3 indices"),
        ([0, 1, 2, 3], [0, 1, 3], r"indices\[2\] is 3, but the graph has 3 nodes"),
        ([0, 1, 2, 3], [0, -1, 2], r"indices\[1\] is -1"),
        ([0, 1, 2, 3], [0, 2**33, 2], r"indices\[1\] is 8589934592"),
        ([], [], "indptr is empty"),
    ],
)
def test_invalid_indices_are_rejected(indptr, indices, message):
    with pytest.raises(ValueError, match=message):
        Graph(np.array(indptr, np.int64), np.array(indices, np.int64))


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (np.zeros(2), r"indices has shape \(2,\), type float64"),
        (np.zeros(2, np.uint32), "type uint32"),
        (np.zeros(2, ">i8"), "type >i8"),
        (np.zeros((1, 2), np.int64), r"shape \(1, 2\)"),
        (np.zeros(4, np.int64)[::2], "strided, 16 bytes"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "is on meta"),
    ],
)
def test_arrays_of_wrong_shapes_or_dtypes_are_rejected(indices, message):
    with pytest.raises(ValueError, match=message):
        Graph(np.array([0, 2]), indices)


def test_check_false_skips_the_checks():
    graph = Graph(torch.tensor([0, 1]), torch.tensor([7], dtype=torch.int32), check=False)
    assert graph.indices.tolist() == [7]
    with pytest.raises(ValueError, match=r"node 0 has the in-neighbours \[7\](.|\n)*hint: "):
        Sampler(graph, [1]).sample(torch.tensor([0]), 0)


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_from_dgl_converts_a_graph(idtype):
    dgl = import_dgl()
    theirs = dgl.graph((SRC, DST), num_nodes=NUM_NODES, idtype=idtype)
    graph = Graph.from_dgl(theirs)
    assert columns(graph) == columns(Graph.from_edges(SRC, DST, NUM_NODES))
    indptr, indices, _ = theirs.adj_tensors("csc")
    assert graph.indptr.tolist() == indptr.tolist()
    assert graph.indices.tolist() == indices.tolist()
    both = dgl.to_bidirected(theirs)
    found = Graph.from_dgl(theirs, bidirected=True, duplicates="remove")
    assert columns(found) == columns(Graph.from_dgl(both, duplicates="remove"))


class SparseTensor:
    """What torch_sparse's class of this name promises of rows that are destinations."""

    def __init__(self, indptr, indices):
        self.parts = indptr, indices, None

    def csr(self):
        return self.parts

    def size(self, dim):
        return NUM_NODES


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_from_pyg_converts_data():
    expected = Graph.from_edges(SRC, DST, NUM_NODES, self_loops="add")
    edge_index = torch.from_numpy(np.stack([SRC, DST]))
    data = SimpleNamespace(edge_index=edge_index, adj_t=None, num_nodes=NUM_NODES)
    assert columns(Graph.from_pyg(data, self_loops="add")) == columns(expected)
    built = Graph.from_edges(SRC, DST, NUM_NODES)
    parts, ones = (built.indptr, built.indices.long()), torch.ones(4000)
    for adjacency in (
        SparseTensor(*parts),
        torch.sparse_csr_tensor(*parts, ones, check_invariants=False),
    ):
        data = SimpleNamespace(edge_index=None, adj_t=adjacency, num_nodes=NUM_NODES)
        assert columns(Graph.from_pyg(data, self_loops="add")) == columns(expected)
    adjacency = torch.eye(5)[:2].to_sparse_csr()
    with pytest.raises(ValueError, match="adj_t has 2 targets and 5 sources"):
        Graph.from_pyg(SimpleNamespace(edge_index=None, adj_t=adjacency, num_nodes=5))
