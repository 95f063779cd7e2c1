import itertools
import tracemalloc

import numpy as np
import pytest
from tiny_graph import edges_of, rows_of

from gcnzc.datasets.generated import QUADRANTS, rmat


@pytest.mark.parametrize("threads", [2, 8])
def test_the_graph_does_not_depend_on_the_number_of_threads(threads):
    one, many = (rmat(1000, 200_000, 3, 7, seed=5, threads=number) for number in (1, threads))
    np.testing.assert_array_equal(edges_of(one), edges_of(many))
    np.testing.assert_array_equal(rows_of(one.features), rows_of(many.features))


def test_edges_are_distributed_over_quadrants_as_requested():
    counts = np.zeros((4, 4))
    np.add.at(counts, tuple(edges_of(rmat(4, 400_000, 1, 2))), 1)
    expected = 400_000 * np.kron(np.reshape(QUADRANTS, (2, 2)), np.reshape(QUADRANTS, (2, 2)))
    # of all ways to name four nodes, one fits within four standard deviations
    fitting = [
        order
        for order in itertools.permutations(range(4))
        if (abs(counts[np.ix_(order, order)] - expected) <= 4 * np.sqrt(expected)).all()
    ]
    assert fitting


@pytest.mark.parametrize("num_bits", [5, 6, 7, 13])
def test_degrees_are_as_expected_for_any_number_of_bits(num_bits):
    # groups of bits that are whole, short, and both
    degree = np.bincount(edges_of(rmat(1 << num_bits, 300_000, 1, 2))[0], minlength=1 << num_bits)
    ones = np.array([bin(node).count("1") for node in range(1 << num_bits)])
    expected = 300_000 * 0.76 ** (num_bits - ones) * 0.24**ones
    hubs = np.sort(expected)[::-1][:3]
    found = np.sort(degree)[::-1][:3]
    assert (abs(found - hubs) <= 5 * np.sqrt(hubs)).all()


@pytest.mark.parametrize("num_nodes", [3, 5, 1000])
def test_edges_have_valid_nodes_for_any_number_of_nodes(num_nodes):
    shares = {"train": 0, "valid": 0, "test": 0}
    edges = edges_of(rmat(num_nodes, 200_000, 1, 2, shares=shares))
    assert edges.min() == 0
    assert edges.max() == num_nodes - 1


def test_memory_is_bounded_by_a_few_chunks():
    graph = rmat(1 << 20, 8_000_000, 1, 2, threads=2)
    tracemalloc.start()
    num_edges = sum(ends.shape[1] for ends in graph.edge_chunks())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_edges == 8_000_000
    # 128 MB of edges came by
    assert peak < 30e6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_classes": 0}, "0 classes"),
        ({"quadrants": (0.5, 0.5, 0.5, 0.5)}, r"quadrants are \(0.5"),
        ({"quadrants": (1.5, -0.5, 0, 0)}, r"quadrants are \(1.5"),
    ],
)
def test_invalid_parameters_are_rejected(wrong, message):
    sizes = {"num_nodes": 100, "num_edges": 500, "num_features": 4, "num_classes": 5}
    with pytest.raises(ValueError, match=f"{message}(.|\n)*\n\nhint: "):
        rmat(**sizes | wrong)
