import numpy as np
import pytest
from scipy.spatial.distance import cdist
from tiny_graph import edges_of, rows_of

from gcnzc.datasets.generate import digits


@pytest.fixture(scope="module")
def graph():
    return digits()


def test_the_graph_has_the_documented_sizes(graph):
    rows, edges = rows_of(graph.features), edges_of(graph)
    # each pair is stored once
    assert edges.shape[1] == graph.num_edges == np.unique(edges, axis=1).shape[1]
    assert (edges[0] < edges[1]).all()
    assert rows.shape == (graph.num_nodes, graph.features.num_columns) == (1797, 64)
    assert (rows.min(), rows.max()) == (0, 1)
    assert np.bincount(graph.labels()).min() > 170
    assert graph.num_classes == 10
    assert graph.best_accuracy is None


def test_every_image_is_connected_to_its_nearest_images(graph):
    rows, edges = rows_of(graph.features), edges_of(graph)
    distance = cdist(rows, rows)
    np.fill_diagonal(distance, np.inf)
    joined = np.zeros((1797, 1797), bool)
    joined[edges[0], edges[1]] = joined[edges[1], edges[0]] = True
    # as near as the eighth, whoever it is among equals
    limit = np.sort(distance, axis=1)[:, 7:8] + 1e-5
    nearest = distance <= limit
    assert (joined <= (nearest | nearest.T)).all()
    assert (joined.sum(axis=1) >= 8).all()
