import numpy as np
import pytest
import scipy.sparse
from tiny_graph import edges_of, rows_of

from gcnzc.datasets import generated
from gcnzc.datasets.generated import log_posterior, planted


@pytest.fixture(scope="module")
def graph():
    return planted(60_000, 400_000, 32, 10, seed=3, threads=2)


@pytest.fixture(scope="module")
def edges(graph):
    return edges_of(graph)


@pytest.fixture(scope="module")
def community(graph):
    """Where the labels come from: the same draw without noise."""
    return planted(60_000, 400_000, 32, 10, seed=3, noise=0.0, threads=2).node_labels


@pytest.mark.parametrize("threads", [1, 8])
def test_the_graph_does_not_depend_on_the_number_of_threads(graph, edges, threads):
    again = planted(60_000, 400_000, 32, 10, seed=3, threads=threads)
    np.testing.assert_array_equal(edges_of(again), edges)
    np.testing.assert_array_equal(rows_of(again.features), rows_of(graph.features))
    np.testing.assert_array_equal(again.labels(), graph.labels())
    assert again.best_accuracy == graph.best_accuracy


def test_the_graph_has_the_requested_sizes(graph, edges):
    assert edges.shape == (2, graph.num_edges) == (2, 400_000)
    assert edges.min() >= 0
    assert edges.max() < graph.num_nodes == 60_000
    assert rows_of(graph.features).shape == (60_000, 32)
    assert rows_of(graph.features).dtype == graph.features.dtype == np.float32
    assert set(np.unique(graph.labels())) == set(range(10))
    assert [len(part) for part in graph.parts.values()] == [32_400, 10_800, 16_800]


@pytest.mark.parametrize("homophily", [0.3, 0.6, 0.9, 1.0])
def test_the_homophily_is_as_requested(homophily):
    graph = planted(20_000, 200_000, 4, 10, homophily=homophily, noise=0.0)
    labels = graph.labels()[edges_of(graph)]
    deviation = np.sqrt(homophily * (1 - homophily) / 200_000)
    assert abs((labels[0] == labels[1]).mean() - homophily) <= 4 * deviation


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.4])
def test_the_noise_of_the_labels_is_as_requested(community, noise):
    labels = planted(60_000, 400_000, 32, 10, seed=3, noise=noise).labels()
    wrong = labels != community
    assert abs(wrong.mean() - noise) <= 4 * np.sqrt(noise * (1 - noise) / 60_000)
    # the other classes, all alike
    steps = np.bincount((labels - community)[wrong] % 10, minlength=10)[1:]
    assert (abs(steps - wrong.sum() / 9) <= 4 * np.sqrt(wrong.sum() / 9)).all()


@pytest.mark.parametrize("exponent", [2.5, 3.0])
def test_degrees_follow_a_power_law(exponent):
    graph = planted(200_000, 2_000_000, 1, 4, exponent=exponent)
    degree = np.bincount(edges_of(graph).reshape(-1))
    assert abs(degree.mean() - 20) < 1e-9
    # maximum likelihood for the tail (Clauset, Shalizi, Newman, SIAM Review 51, 2009, eq. 3.7);
    # the cut-off makes it seem a little steeper
    least = 40
    tail = degree[degree >= least]
    found = 1 + len(tail) / np.log(tail / (least - 0.5)).sum()
    assert exponent - 0.05 < found < exponent + 0.15
    assert degree.max() > 50 * degree.mean()


def test_the_largest_class_has_three_times_the_nodes_of_the_smallest(community):
    expected = 6000 * np.linspace(1.5, 0.5, 10)
    assert (abs(np.bincount(community) - expected) <= 4 * np.sqrt(expected)).all()


def test_features_are_the_communities_means_plus_noise(graph, community):
    features = rows_of(graph.features).astype(np.float64)
    means = np.stack([features[community == k].mean(axis=0) for k in range(10)])
    np.testing.assert_allclose(np.linalg.norm(means, axis=1), 2.2, atol=0.15)
    rest = features - means[community]
    assert abs(rest.std() - 1) < 0.01
    assert abs(np.corrcoef(rest.T) - np.eye(32)).max() < 0.02


def brute_force(blocks, edges, features, node):
    """The log of the model's joint probability with `node` in each community: (K,)."""
    weight = blocks.weights[blocks.level]
    community = blocks.community.astype(int)
    total = []
    for k in range(len(blocks.shares)):
        community[node] = k
        mass = np.bincount(community, weight, len(blocks.shares))
        first, second = community[edges]
        second_by = blocks.affinity * (first == second) / mass[second]
        second_by += (1 - blocks.affinity) / mass.sum()
        total.append(
            np.log(blocks.shares[community]).sum()
            - ((features - blocks.means[community]) ** 2).sum() / 2
            + np.log(weight[edges[0]] / mass.sum() * weight[edges[1]] * second_by).sum()
        )
    return np.array(total)


@pytest.mark.parametrize("seed", range(3))
def test_the_oracle_computes_the_posterior_of_the_model(seed):
    # 12 nodes: loops, equal edges, and communities of a single node all occur
    graph = planted(12, 60, 3, 4, seed=seed)
    blocks = generated._draw_blocks(12, 60, 3, 4, seed, 0.75, 2.2, 2.75)
    edges, features = edges_of(graph), rows_of(graph.features)
    assert (edges[0] == edges[1]).any()
    found = log_posterior(blocks, np.arange(12), graph.edge_chunks, iter([features]))
    for node in range(12):
        expected = brute_force(blocks, edges, features, node)
        np.testing.assert_allclose(found[node] - found[node, 0], expected - expected[0], rtol=1e-4)


def test_no_classifier_exceeds_the_best_accuracy(graph, edges, community):
    test, labels = graph.parts["test"], graph.labels()
    features = rows_of(graph.features)
    means = np.stack([features[community == k].mean(axis=0) for k in range(10)])
    alone = (features @ means.T - (means**2).sum(axis=1) / 2)[test]
    alone_accuracy = (alone.argmax(axis=1) == labels[test]).mean()
    # the true communities of the neighbours, counted
    src, dst = np.concatenate([edges, edges[::-1]], axis=1)
    votes = scipy.sparse.csr_array((np.ones(len(src)), (dst, community[src])), (60_000, 10))
    votes_accuracy = (votes[test].toarray().argmax(axis=1) == labels[test]).mean()
    both = 3 * votes[test].toarray() + alone
    both_accuracy = (both.argmax(axis=1) == labels[test]).mean()
    assert alone_accuracy < graph.best_accuracy - 0.2
    assert alone_accuracy < votes_accuracy <= both_accuracy <= graph.best_accuracy
    # such a guess is good, so the oracle is not far off either
    assert both_accuracy > graph.best_accuracy - 0.01


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_classes": 1}, "1 classes for 1000 nodes"),
        ({"homophily": 0.01}, "homophily is 0.01"),
        ({"noise": 0.9}, "noise is 0.9"),
        ({"exponent": 2}, "exponent is 2"),
        ({"shares": {"train": 1, "valid": 1, "test": 1}}, "1000 nodes cannot be split"),
    ],
)
def test_invalid_parameters_are_rejected(wrong, message):
    sizes = {"num_nodes": 1000, "num_edges": 5000, "num_features": 4, "num_classes": 5}
    with pytest.raises(ValueError, match=f"{message}(.|\n)*\n\nhint: "):
        planted(**sizes | wrong)
