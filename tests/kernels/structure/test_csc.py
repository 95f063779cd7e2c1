import numpy as np
import pytest
import torch
from blocks import random_block

from gcnzc.graph.graph import Graph
from gcnzc.kernels.structure import csc

RNG = np.random.default_rng(0)


def random_edges(num_nodes, num_edges, skew=1.0, dtype=np.int64):
    """Sources anywhere; destinations the more crowded at the low end, the larger the skew."""
    src = RNG.integers(0, num_nodes, num_edges)
    dst = RNG.random(num_edges) ** skew * num_nodes
    return src.astype(dtype), dst.astype(dtype)


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def short_segments(monkeypatch):
    monkeypatch.setattr(csc, "SEGMENT_EDGES", 1000)


# bucket bounds: one node a bucket up to 256 nodes, 2**16 from 2**24 nodes on
@pytest.mark.parametrize("num_nodes", [1, 2, 255, 256, 257, 1000, 65_537, (1 << 24) + 3])
@pytest.mark.parametrize("num_edges", [0, 1, 999, 1000, 1001, 20_000])
def test_equals_a_stable_sort(num_nodes, num_edges, short_segments):
    ends = random_edges(num_nodes, num_edges, skew=2)
    assert_equal(
        csc.build_csc(csc.edge_list_segments(*ends), num_nodes), csc.csc_reference(*ends, num_nodes)
    )


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("skew", [1, 30])
def test_the_result_does_not_depend_on_the_number_of_threads(threads, skew):
    src, dst = random_edges(300_000, 400_000, skew)
    built = csc.build_csc(csc.edge_list_segments(src, dst), 300_000, threads=threads)
    assert_equal(built, csc.csc_reference(src, dst, 300_000))


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_large_buckets_are_sorted_too(threads, short_segments):
    # more edges than fit a thread's bucket, into two single nodes and into a few next to each other
    src = RNG.integers(0, 70_000, 400_000)
    dst = np.concatenate([np.full(150_000, 5), np.full(150_000, 69_999), np.arange(100_000) % 7])
    RNG.shuffle(dst)
    src[:100] = dst[:100]
    built = csc.build_csc(csc.edge_list_segments(src, dst), 70_000, threads=threads)
    assert_equal(built, csc.csc_reference(src, dst, 70_000))
    apart = src != dst
    built = csc.build_csc(
        csc.edge_list_segments(src, dst), 70_000, num_without_loops=400, threads=threads
    )
    assert_equal(built, csc.csc_reference(src[apart], dst[apart], 70_000))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_dtypes_strides_and_read_only_memory_are_supported(dtype, short_segments):
    src, dst = random_edges(5000, 20_000, dtype=dtype)
    expected = csc.csc_reference(src, dst, 5000)
    pairs = np.stack([src, dst], axis=1)
    pairs.setflags(write=False)
    indptr, indices = csc.build_csc(csc.edge_list_segments(*pairs.T), 5000)
    assert_equal((indptr, indices), expected)
    assert (indptr.dtype, indices.dtype) == (np.int64, np.int32)


def test_indices_may_be_int64(monkeypatch):
    # 2**31 nodes need 17 GB of indptr, so the choice of type is made smaller, not the graph larger
    monkeypatch.setattr(csc, "index_dtype", lambda num_nodes: np.int64)
    src, dst = random_edges(3000, 20_000)
    indptr, indices = csc.build_csc(csc.edge_list_segments(src, dst), 3000)
    assert indices.dtype == np.int64
    assert_equal((indptr, indices), csc.csc_reference(src, dst, 3000))


def test_index_dtype_is_the_narrowest():
    assert csc.index_dtype(2**31 - 1) is np.int32
    assert csc.index_dtype(2**31) is np.int64


def test_csc_segments_return_the_edges(short_segments):
    src, dst = random_edges(3000, 20_000, skew=3)
    indptr, indices = csc.build_csc(csc.edge_list_segments(src, dst), 3000)
    ends = [segment() for segment in csc.csc_segments(indptr, indices)]
    backward = [segment() for segment in csc.csc_segments(indptr, indices, reverse=True)]
    order = np.argsort(dst, kind="stable")
    assert_equal(map(np.concatenate, zip(*ends, strict=True)), (src[order], dst[order]))
    assert_equal(map(np.concatenate, zip(*backward, strict=True)), (dst[order], src[order]))
    assert max(len(src) for src, _ in ends) == 1000


def test_self_loops_are_removed_only_from_the_given_segments():
    src, dst = np.array([0, 1, 2, 2]), np.array([1, 1, 0, 2])
    segments = [*csc.edge_list_segments(src, dst), *csc.self_loop_segments(3)]
    indptr, indices = csc.build_csc(segments, 3, num_without_loops=1)
    assert indptr.tolist() == [0, 2, 4, 5]
    assert indices.tolist() == [2, 0, 0, 1, 2]


@pytest.mark.parametrize("wrong", [-1, 50, 2**40])
@pytest.mark.parametrize("end", [0, 1])
def test_an_edge_to_an_unknown_node_is_rejected(wrong, end, short_segments):
    ends = np.stack(random_edges(50, 5000))
    ends[end, 4321] = wrong
    source, target = ends[:, 4321]
    with pytest.raises(ValueError, match=rf"edge goes from {source} to {target}.*50 nodes"):
        csc.build_csc(csc.edge_list_segments(*ends), 50)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_coalesce_sorts_and_removes_duplicates(threads):
    src, dst = random_edges(2000, 100_000, skew=5)
    indptr, indices = csc.coalesce(
        *csc.build_csc(csc.edge_list_segments(src, dst), 2000), threads=threads
    )
    pairs = np.unique(np.stack([dst, src]), axis=1)
    assert len(indices) == pairs.shape[1] < 100_000
    assert_equal((indptr, indices), csc.csc_reference(pairs[1], pairs[0], 2000))


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_the_first_invalid_position_is_found(threads):
    indptr = np.arange(20_001)
    assert csc.find_descent(indptr, threads=threads) == -1
    # of two threads the second one sees its own first
    indptr[[9990, 10_010]] = 0
    assert csc.find_descent(indptr, threads=threads) == 9989
    indices = np.arange(20_000, dtype=np.int32)
    assert csc.find_out_of_range(indices, 20_000, threads=threads) == -1
    assert csc.find_out_of_range(indices, 15_000, threads=threads) == 15_000
    indices[[9990, 10_010]] = -1
    assert csc.find_out_of_range(indices, 20_000, threads=threads) == 9990


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("first", [0, 3, 20])
@pytest.mark.parametrize("most", [0, 4])
def test_lists_of_edges_equal_the_reference(ids, first, most):
    indptr, indices = random_block(30, 20, most, pointers=torch.int64, ids=ids)
    expected = csc.csc_to_coo_reference(indptr, indices, first)
    # a part of a larger list, whose other entries stay
    whole = torch.full((2, expected.shape[1] + 5), -1)
    out = whole[:, 2 : 2 + expected.shape[1]]
    assert csc.csc_to_coo(indptr, indices, out, first) is out
    assert torch.equal(out, expected)
    assert int((whole == -1).sum()) == 10


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("num_nodes", "num_edges"), [(1, 0), (1, 5), (7, 40), (300, 2000)])
def test_the_order_of_edges_equals_the_reference_and_fits_the_graph(num_nodes, num_edges, dtype):
    src, dst = torch.randint(num_nodes, (2, num_edges), dtype=dtype)
    graph = Graph.from_edges(src, dst, num_nodes)
    found = csc.csc_order(graph.indptr, dst)
    assert found.dtype == torch.int64
    assert torch.equal(found, csc.csc_order_reference(dst))
    assert torch.equal(src[found].long(), graph.indices.long())


def test_destinations_may_be_strided():
    src, dst = torch.randint(9, (50, 2)).T
    found = csc.csc_order(Graph.from_edges(src, dst, 9).indptr, dst)
    assert torch.equal(found, csc.csc_order_reference(dst.clone()))


# nodes of the graph, the most in-edges of a node, selected nodes; the last has several threads
SELECTIONS = [(70, 9, 20), (5, 0, 3), (40, 6, 0), (20_000, 4, 12_000)]


@pytest.mark.parametrize("case", SELECTIONS)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_marked_sources_and_selected_columns_equal_the_reference(case, ids):
    num_nodes, most, num_selected = case
    indptr, indices = random_block(num_nodes, num_nodes, most, pointers=torch.int64, ids=ids)
    nodes = torch.randperm(num_nodes)[:num_selected]
    mask = torch.zeros(num_nodes, dtype=torch.bool)
    csc.mark_sources(indptr, indices, nodes, mask)
    assert torch.equal(mask, csc.mark_sources_reference(indptr, indices, nodes))
    number_of = torch.randperm(num_nodes).to(ids)
    found = csc.select_columns(indptr, indices, nodes, number_of)
    expected = csc.select_columns_reference(indptr, indices, nodes, number_of)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_marks_are_added():
    indptr, indices = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
    mask = torch.tensor([True, False])
    csc.mark_sources(indptr, indices, torch.tensor([0]), mask)
    assert mask.tolist() == [True, True]
