import networkx
import numpy as np
import pytest

from gcnzc.exchange import topology

ring, exponential, complete = topology.GRAPHS.values()


def is_connected(world_size, edges):
    graph = networkx.Graph(edges)
    graph.add_nodes_from(range(world_size))
    return networkx.is_connected(graph)


def is_matching(edges):
    ranks = [rank for edge in edges for rank in edge]
    return len(set(ranks)) == len(ranks)


def islands(world_size, fast=100.0, slow=10.0):
    island = np.arange(world_size) // ((world_size + 1) // 2)
    return np.where(island[:, None] == island, fast, slow) * (1 - np.eye(world_size))


def matchings(bandwidth, window, rounds, seed=0):
    world_size = len(bandwidth)
    last_met = np.full((world_size, world_size), topology.NEVER)
    threshold = topology.bottleneck_threshold(bandwidth)
    found = []
    for number in range(rounds):
        matching = topology.bandwidth_matching(
            bandwidth, last_met, seed, round=number, window=window, threshold=threshold
        )
        for low, high in matching:
            last_met[low, high] = last_met[high, low] = number
        found.append(matching)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8, 13])
def test_graphs_connect_all_ranks(world_size):
    for make in (ring, exponential, complete):
        edges = make(world_size)
        assert edges == sorted({(low, high) for low, high in edges if low < high})
        assert is_connected(world_size, edges)
        assert topology.check_graph(world_size, [edge[::-1] for edge in edges]) == edges
    assert len(complete(world_size)) == world_size * (world_size - 1) // 2
    assert all(len(each) <= 2 for each in topology.neighbors(world_size, ring(world_size)))
    for degree in range(2, world_size):
        if degree * world_size % 2 == 0:
            edges = topology.regular(world_size, degree)
            assert is_connected(world_size, edges)
            assert {len(each) for each in topology.neighbors(world_size, edges)} == {degree}


@pytest.mark.parametrize(
    ("edges", "count"),
    [(ring(8), 2), (ring(5), 3), (complete(8), 7), (exponential(8), 6), ([], 0)],
)
def test_edges_are_divided_into_matchings(edges, count):
    colors = topology.color_edges(edges)
    assert len(colors) == count
    assert all(map(is_matching, colors))
    assert sorted(edge for matching in colors for edge in matching) == edges


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_random_matchings_are_perfect_and_have_all_pairs_in_time(world_size):
    pairs = complete(world_size)
    found = [topology.maximum_matching(world_size, pairs, 3, round=number) for number in range(60)]
    assert found == [
        topology.maximum_matching(world_size, pairs, 3, round=number) for number in range(60)
    ]
    assert all(is_matching(each) and 2 * len(each) == world_size for each in found)
    assert {edge for matching in found for edge in matching} == set(pairs)
    if world_size > 3:
        assert found != [
            topology.maximum_matching(world_size, pairs, 4, round=number) for number in range(60)
        ]


def test_maximum_matchings_have_the_most_edges():
    # the only perfect matching of a path has its outer edges, which a greedy choice may not take
    path = [(0, 1), (1, 2), (2, 3)]
    for number in range(20):
        assert topology.maximum_matching(4, path, round=number) == [(0, 1), (2, 3)]
    for seed in range(20):
        edges = sorted(tuple(sorted(edge)) for edge in networkx.gnm_random_graph(9, 11, seed).edges)
        expected = networkx.max_weight_matching(networkx.Graph(edges), maxcardinality=True)
        matching = topology.maximum_matching(9, edges, seed)
        assert is_matching(matching)
        assert set(matching) <= set(edges)
        assert len(matching) == len(expected)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 7, 8, 9, 16])
@pytest.mark.parametrize("seed", [0, 1])
def test_pairs_of_two_windows_connect_all_ranks(world_size, seed):
    window = (world_size + 1) // 2
    found = matchings(islands(world_size), window, 40 + 2 * window, seed)
    for number, matching in enumerate(found):
        assert is_matching(matching)
        assert len(matching) == world_size // 2
        met = [edge for each in found[number : number + 2 * window] for edge in each]
        assert number > 40 or is_connected(world_size, met)


def test_fast_pairs_are_preferred_and_broken_ones_never_used():
    bandwidth = islands(8)
    found = matchings(bandwidth, 4, 400)
    bottleneck = np.mean([min(bandwidth[edge] for edge in each) for each in found])
    at_random = np.mean(
        [
            min(bandwidth[e] for e in topology.maximum_matching(8, complete(8), round=number))
            for number in range(400)
        ]
    )
    assert bottleneck >= 4 * at_random
    bandwidth[0, 1] = bandwidth[1, 0] = 0
    assert all((0, 1) not in each for each in matchings(bandwidth, 4, 200))
    bandwidth[2] = bandwidth[:, 2] = 0
    for matching in matchings(bandwidth, 4, 50):
        assert len(matching) == 3
        assert all(2 not in edge for edge in matching)


def test_the_threshold_is_half_of_the_best_bottleneck():
    assert topology.bottleneck_threshold(islands(8)) == 50
    # islands of 3 and 5: a pair must cross
    is_first = np.arange(8) < 3
    bandwidth = np.where(is_first[:, None] == is_first, 100.0, 10.0)
    assert topology.bottleneck_threshold(bandwidth * (1 - np.eye(8))) == 5
    assert topology.bottleneck_threshold(np.zeros((3, 3))) == 0


@pytest.mark.parametrize("edges", [ring(8), exponential(7), [(0, 1), (1, 2), (1, 3), (4, 5)]])
def test_mixing_matrices_keep_the_mean(edges):
    matrix = topology.metropolis_weights(8, edges)
    assert np.array_equal(matrix, matrix.T)
    assert np.allclose(matrix.sum(0), 1, rtol=0, atol=1e-15)
    assert (matrix >= 0).all()


def test_spectra_are_those_of_known_graphs():
    cosine = np.cos(2 * np.pi / 8)
    second = np.linalg.eigvalsh(topology.metropolis_weights(8, ring(8)))[-2]
    assert second == pytest.approx((1 + 2 * cosine) / 3)
    # a ring in which each rank exchanges once in a unit of time
    matrix = topology.laplacian(8, ring(8), 0.5)
    assert np.allclose(matrix, topology.laplacian(8, ring(8), dict.fromkeys(ring(8), 0.5)))
    assert topology.inverse_connectivity(matrix) == pytest.approx(1 / (1 - cosine))
    # 7 edges of 2 ohm in parallel to one: 2 * 7 / 8
    assert topology.maximal_resistance(matrix, ring(8)) == pytest.approx(7 / 8)
    matrix = topology.laplacian(8, complete(8), 1 / 7)
    assert topology.inverse_connectivity(matrix) == pytest.approx(7 / 8)
    assert topology.maximal_resistance(matrix, complete(8)) == pytest.approx(7 / 8)
