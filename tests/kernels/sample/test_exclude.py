"""Columns are sorted, and edges are found in sorted columns."""

import numpy as np
import pytest

from gcnzc.kernels.sample.exclude import (
    are_edges,
    find_edges,
    find_edges_reference,
    has_edge,
    is_sorted,
    sort_columns,
)


@pytest.fixture
def columns():
    """60 nodes with up to 40 sources each, among them equal ones; not sorted."""
    random = np.random.default_rng(0)
    degrees = random.integers(0, 40, 60)
    degrees[7] = 0
    indptr = np.concatenate([[0], degrees.cumsum()])
    return indptr, random.integers(0, 60, indptr[-1])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("threads", [1, 3])
def test_columns_are_sorted(columns, dtype, threads):
    indptr, indices = columns[0], columns[1].astype(dtype)
    assert not is_sorted(indptr, indices, threads=threads)
    out, order = sort_columns(indptr, indices, order=True, threads=threads)
    assert is_sorted(indptr, out, threads=threads)
    assert out.dtype == dtype
    assert np.array_equal(indices[order], out)
    for node in range(60):
        begin, end = indptr[node : node + 2]
        expected = begin + np.argsort(indices[begin:end], kind="stable")
        assert np.array_equal(order[begin:end], expected)
    alone, none = sort_columns(indptr, indices)
    assert none is None
    assert np.array_equal(alone, out)


def test_a_descent_between_columns_does_not_count():
    assert is_sorted(np.array([0, 1, 2]), np.array([1, 0]))
    assert is_sorted(np.array([0]), np.empty(0, np.int32))


def test_has_edge_is_correct_for_every_pair(columns):
    indptr = columns[0]
    indices, _ = sort_columns(*columns)
    there = {(int(s), t) for t in range(60) for s in indices[indptr[t] : indptr[t + 1]]}
    found = {(s, t) for s in range(60) for t in range(60) if has_edge(indptr, indices, s, t)}
    assert found == there
    sources, targets = (part.ravel() for part in np.mgrid[:60, :60])
    several = are_edges(indptr, indices.astype(np.int32), sources, targets, threads=2)
    assert set(zip(sources[several].tolist(), targets[several].tolist(), strict=True)) == there


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_edges_between_pairs_are_found(columns, share, dtype):
    indptr = columns[0]
    indices = sort_columns(*columns)[0].astype(dtype)
    random = np.random.default_rng(1)
    # pairs in any order, some twice, and some that are no edges
    sources, targets = np.nonzero(random.random((60, 60)) < share)
    order = random.permutation(np.tile(np.arange(len(sources)), 2))
    found = find_edges(indptr, indices, sources[order], targets[order])
    assert found.dtype == np.int64
    assert np.array_equal(found, find_edges_reference(indptr, indices, sources, targets))
    assert (len(found) > 0) == (share > 0)
