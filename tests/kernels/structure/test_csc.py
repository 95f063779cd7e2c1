import numpy as np
import pytest

from gcnzc.kernels.structure import csc as module
from gcnzc.kernels.structure.csc import (
    build_csc,
    coalesce,
    csc_reference,
    csc_segments,
    edge_list_segments,
    find_descent,
    find_out_of_range,
    index_dtype,
    self_loop_segments,
)

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
    monkeypatch.setattr(module, "SEGMENT_EDGES", 1000)


# bucket bounds: one node a bucket up to 256 nodes, 2**16 from 2**24 nodes on
@pytest.mark.parametrize("num_nodes", [1, 2, 255, 256, 257, 1000, 65_537, (1 << 24) + 3])
@pytest.mark.parametrize("num_edges", [0, 1, 999, 1000, 1001, 20_000])
def test_equals_a_stable_sort(num_nodes, num_edges, short_segments):
    ends = random_edges(num_nodes, num_edges, skew=2)
    assert_equal(build_csc(edge_list_segments(*ends), num_nodes), csc_reference(*ends, num_nodes))


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("skew", [1, 30])
def test_the_result_does_not_depend_on_the_number_of_threads(threads, skew):
    src, dst = random_edges(300_000, 400_000, skew)
    built = build_csc(edge_list_segments(src, dst), 300_000, threads=threads)
    assert_equal(built, csc_reference(src, dst, 300_000))


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_large_buckets_are_sorted_too(threads, short_segments):
    # more edges than fit a thread's bucket, into two single nodes and into a few next to each other
    src = RNG.integers(0, 70_000, 400_000)
    dst = np.concatenate([np.full(150_000, 5), np.full(150_000, 69_999), np.arange(100_000) % 7])
    RNG.shuffle(dst)
    src[:100] = dst[:100]
    built = build_csc(edge_list_segments(src, dst), 70_000, threads=threads)
    assert_equal(built, csc_reference(src, dst, 70_000))
    apart = src != dst
    built = build_csc(edge_list_segments(src, dst), 70_000, num_without_loops=400, threads=threads)
    assert_equal(built, csc_reference(src[apart], dst[apart], 70_000))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_dtypes_strides_and_read_only_memory_are_supported(dtype, short_segments):
    src, dst = random_edges(5000, 20_000, dtype=dtype)
    expected = csc_reference(src, dst, 5000)
    pairs = np.stack([src, dst], axis=1)
    pairs.setflags(write=False)
    indptr, indices = build_csc(edge_list_segments(*pairs.T), 5000)
    assert_equal((indptr, indices), expected)
    assert (indptr.dtype, indices.dtype) == (np.int64, np.int32)


def test_indices_may_be_int64(monkeypatch):
    # 2**31 nodes need 17 GB of indptr, so the choice of type is made smaller, not the graph larger
    monkeypatch.setattr(module, "index_dtype", lambda num_nodes: np.int64)
    src, dst = random_edges(3000, 20_000)
    indptr, indices = build_csc(edge_list_segments(src, dst), 3000)
    assert indices.dtype == np.int64
    assert_equal((indptr, indices), csc_reference(src, dst, 3000))


def test_index_dtype_is_the_narrowest():
    assert index_dtype(2**31 - 1) is np.int32
    assert index_dtype(2**31) is np.int64


def test_csc_segments_return_the_edges(short_segments):
    src, dst = random_edges(3000, 20_000, skew=3)
    indptr, indices = build_csc(edge_list_segments(src, dst), 3000)
    ends = [segment() for segment in csc_segments(indptr, indices)]
    backward = [segment() for segment in csc_segments(indptr, indices, reverse=True)]
    order = np.argsort(dst, kind="stable")
    assert_equal(map(np.concatenate, zip(*ends, strict=True)), (src[order], dst[order]))
    assert_equal(map(np.concatenate, zip(*backward, strict=True)), (dst[order], src[order]))
    assert max(len(src) for src, _ in ends) == 1000


def test_self_loops_are_removed_only_from_the_given_segments():
    src, dst = np.array([0, 1, 2, 2]), np.array([1, 1, 0, 2])
    segments = [*edge_list_segments(src, dst), *self_loop_segments(3)]
    indptr, indices = build_csc(segments, 3, num_without_loops=1)
    assert indptr.tolist() == [0, 2, 4, 5]
    assert indices.tolist() == [2, 0, 0, 1, 2]


@pytest.mark.parametrize("wrong", [-1, 50, 2**40])
@pytest.mark.parametrize("end", [0, 1])
def test_an_edge_to_an_unknown_node_is_rejected(wrong, end, short_segments):
    ends = np.stack(random_edges(50, 5000))
    ends[end, 4321] = wrong
    source, target = ends[:, 4321]
    with pytest.raises(ValueError, match=rf"edge goes from {source} to {target}.*50 nodes"):
        build_csc(edge_list_segments(*ends), 50)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_coalesce_sorts_and_removes_duplicates(threads):
    src, dst = random_edges(2000, 100_000, skew=5)
    indptr, indices = coalesce(*build_csc(edge_list_segments(src, dst), 2000), threads=threads)
    pairs = np.unique(np.stack([dst, src]), axis=1)
    assert len(indices) == pairs.shape[1] < 100_000
    assert_equal((indptr, indices), csc_reference(pairs[1], pairs[0], 2000))


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_the_first_invalid_position_is_found(threads):
    indptr = np.arange(20_001)
    assert find_descent(indptr, threads=threads) == -1
    # of two threads the second one sees its own first
    indptr[[9990, 10_010]] = 0
    assert find_descent(indptr, threads=threads) == 9989
    indices = np.arange(20_000, dtype=np.int32)
    assert find_out_of_range(indices, 20_000, threads=threads) == -1
    assert find_out_of_range(indices, 15_000, threads=threads) == 15_000
    indices[[9990, 10_010]] = -1
    assert find_out_of_range(indices, 20_000, threads=threads) == 9990
