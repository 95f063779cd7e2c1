"""Structural embeddings: what they depend on, and that they represent the graph's structure."""

import os

import numpy as np
import pytest
from scipy import sparse
from sklearn.linear_model import LogisticRegression

from gcnzc.datasets import embed as module
from gcnzc.datasets.embed import embed
from gcnzc.datasets.rows import Array
from gcnzc.kernels.structure.csc import csc_reference


def communities(num_nodes: int, num_parts: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """Each edge once, nine of ten within a part; and the part of each node."""
    random = np.random.default_rng(seed)
    part = random.integers(num_parts, size=num_nodes)
    src = random.integers(num_nodes, size=64 * num_nodes)
    dst = random.integers(num_nodes, size=64 * num_nodes)
    kept = (part[src] == part[dst]) | (random.random(len(src)) < 1 / (9 * num_parts))
    return src[kept], dst[kept], part


def of_edges(src: Array, dst: Array, num_nodes: int, dims: int = 16, seed: int = 0) -> Array:
    indptr, indices = csc_reference(src, dst, num_nodes)
    return embed(indptr, indices.astype(np.int32), dims, seed=seed)


def test_embeddings_separate_communities():
    src, dst, part = communities(2000, 8)
    rows = of_edges(src, dst, 2000)
    seen = np.bincount(np.concatenate([src, dst]), minlength=2000) > 0
    seen_rows, seen_part = rows[seen], part[seen]
    half = len(seen_rows) // 2
    model = LogisticRegression(max_iter=500).fit(seen_rows[:half], seen_part[:half])
    assert model.score(seen_rows[half:], seen_part[half:]) > 0.95


@pytest.mark.parametrize("cores", [{0}, {0, 1}, set(range(8))])
def test_the_result_does_not_depend_on_the_number_of_threads(monkeypatch, cores):
    monkeypatch.setattr(module, "CHUNK_ROWS", 100)
    src, dst, _ = communities(1500, 5)
    once = of_edges(src, dst, 1500)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    np.testing.assert_array_equal(of_edges(src, dst, 1500), once)


def test_directions_repeated_edges_and_self_loops_are_ignored():
    src, dst, _ = communities(400, 4)
    plain = of_edges(src, dst, 400)
    loops = np.arange(400)
    ends = np.concatenate([src, src, dst, loops]), np.concatenate([dst, dst, src, loops])
    np.testing.assert_array_equal(of_edges(*ends, 400), plain)


def test_connected_components_have_orthogonal_rows():
    one = np.array([(i, j) for i in range(12) for j in range(i)]).T
    ends = np.concatenate([one, one + 12, one + 24], axis=1)
    rows = of_edges(*ends, 40, dims=8)
    assert not rows[36:].any()
    rows = rows[:36] / np.sqrt(8)
    nearness = rows @ rows.T
    part = np.repeat(range(3), 12)
    same = part[:, None] == part
    assert nearness[same].min() > 0.9
    assert np.abs(nearness[~same]).max() < 0.1


def test_dimensions_beyond_the_number_of_nodes_are_zero():
    src, dst, _ = communities(20, 2)
    rows = of_edges(src, dst, 20, dims=64)
    assert rows[:, :5].any()
    assert not rows[:, 20:].any()


def test_cooccurrences_agree_with_powers_of_the_transition_matrix(monkeypatch):
    monkeypatch.setattr(module, "WALKS", 20_000)
    random = np.random.default_rng(0)
    adjacency = np.triu(random.random((9, 9)) < 0.4, 1)
    adjacency |= adjacency.T
    adjacency[0, 1] = adjacency[1, 0] = True
    links = sparse.csr_matrix(adjacency.astype(np.float32))
    met = module._count_cooccurrences(links, 0, lambda what, done, total: None).toarray() / 20_000
    degrees = adjacency.sum(1)
    step = adjacency / np.maximum(degrees, 1)[:, None]
    expected = sum(np.linalg.matrix_power(step, power) for power in range(1, module.STEPS + 1))
    expected = expected + expected.T
    np.fill_diagonal(expected, 0)
    # the mean of at most 5 visits over 20,000 walks has a standard deviation below 0.01
    np.testing.assert_allclose(met, expected, atol=0.05)
    np.testing.assert_array_equal(met, met.T)


def test_leading_vectors_are_those_of_a_dense_factorisation(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ROWS", 64)
    random = np.random.default_rng(0)
    axes, _ = np.linalg.qr(random.standard_normal((200, 200)))
    values = np.zeros(200)
    values[:12] = [40, -35, 30, 25, -20, 15, 12, 10, 2, -1, 1, 0.5]
    dense = (axes * values) @ axes.T
    matrix = sparse.csr_matrix(dense.astype(np.float32))
    found = module._leading_vectors(matrix, 8, 0, lambda *told: None)
    assert found.shape == (200, 8)
    # signs of the columns are arbitrary, the products of rows are not
    expected = (axes[:, :8] * np.abs(values[:8])) @ axes[:, :8].T
    np.testing.assert_allclose(found @ found.T, expected, atol=1e-4 * 40)
