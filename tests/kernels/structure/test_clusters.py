import numpy as np
import pytest
from slow_cases import seeds

from gcnzc.kernels.structure import clusters

# (N, edges in one direction, L)
CASES = [(1, 0, 1), (12, 20, 3), (60, 300, 4), (60, 40, 60), (200, 1500, 7)]


def random_graph(num_nodes, num_edges, rng, *, ids=np.int32, is_weighted=True):
    """A symmetric graph with self loops and duplicates."""
    ends = rng.integers(0, num_nodes, (2, num_edges))
    edge_weights = rng.integers(1, 5, num_edges)
    source, target = np.concatenate([ends, ends[::-1]], axis=1)
    order = np.argsort(target, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(target, minlength=num_nodes))])
    weights = np.concatenate([edge_weights, edge_weights])[order]
    weights = weights if is_weighted else np.empty(0, np.int64)
    return indptr, source[order].astype(ids), weights


def random_case(case, seed, is_weighted, ids=np.int32):
    num_nodes, num_edges, num_labels = case
    rng = np.random.default_rng(seed)
    graph = random_graph(num_nodes, num_edges, rng, ids=ids, is_weighted=is_weighted)
    size, load = rng.integers(1, 4, num_nodes), rng.integers(0, 3, num_nodes)
    tight = rng.uniform(0.7, 1.5)
    max_sizes = np.full(num_labels, int(np.ceil(size.sum() * tight / num_labels)))
    max_loads = rng.integers(0, 2, num_labels) + int(load.sum() * tight / num_labels)
    order, labels = rng.permutation(num_nodes), rng.integers(0, num_labels, num_nodes)
    return (*graph, order, size, load, max_sizes, max_loads), labels


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("ids", [np.int32, np.int64])
@pytest.mark.parametrize("seed", seeds(5, 2))
def test_propagation_equals_its_reference(case, is_weighted, ids, seed):
    given, labels = random_case(case, seed, is_weighted, ids)
    expected = labels.copy()
    for _ in range(3):
        moves = clusters.propagate_labels(*given, labels)
        assert moves == clusters.propagate_labels_reference(*given, expected)
        assert labels.tolist() == expected.tolist()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("seed", seeds(5, 2))
def test_assignment_equals_its_reference(case, is_weighted, seed):
    given, _ = random_case(case, seed, is_weighted)
    labels = clusters.assign_labels(*given)
    assert labels.tolist() == clusters.assign_labels_reference(*given).tolist()
    assert labels.min() >= 0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("seed", seeds(3, 2))
def test_contraction_equals_its_reference(case, is_weighted, seed):
    given, labels = random_case(case, seed, is_weighted)
    num_labels = case[2]
    indptr, indices, weights = clusters.contract(*given[:3], labels, num_labels)
    # the order of the edges of a node is that in which they are found
    order = np.lexsort([indices, np.repeat(np.arange(num_labels), np.diff(indptr))])
    expected = clusters.contract_reference(*given[:3], labels, num_labels)
    for found, right in zip((indptr, indices[order], weights[order]), expected, strict=True):
        assert found.tolist() == right.tolist()


def test_no_label_exceeds_a_limit_that_it_has_met():
    given, _ = random_case(CASES[-1], 0, True)
    size, load, num_labels = given[4], given[5], CASES[-1][2]
    labels = np.arange(len(size)) % num_labels
    sizes, loads = (np.bincount(labels, each, num_labels) for each in (size, load))
    limits = np.ceil(sizes * 1.1).astype(np.int64), np.ceil(loads * 1.1).astype(np.int64)
    assert clusters.propagate_labels(*given[:6], *limits, labels) > 0
    assert (np.bincount(labels, size, num_labels) <= limits[0]).all()
    assert (np.bincount(labels, load, num_labels) <= limits[1]).all()
