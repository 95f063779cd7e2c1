"""Parts have equal numbers of seeds and few edges between them."""

import numpy as np
import pytest
import torch

from gcnzc import load
from gcnzc.graph import Graph, cut_fraction, merge_communities, partition_graph


def planted(num_communities, size, degree, share_inside, seed=0):
    """A graph whose nodes have most edges within their community, and the communities."""
    rng = np.random.default_rng(seed)
    num_nodes = num_communities * size
    community = rng.permutation(num_nodes) % num_communities
    members = [np.flatnonzero(community == c) for c in range(num_communities)]
    sources = np.repeat(np.arange(num_nodes), degree // 2)
    inside = rng.random(len(sources)) < share_inside
    targets = rng.integers(0, num_nodes, len(sources))
    pick = rng.integers(0, size, len(sources))
    targets[inside] = np.stack(members)[community[sources[inside]], pick[inside]]
    graph = Graph.from_edges(
        torch.from_numpy(sources), torch.from_numpy(targets), num_nodes, bidirected=True
    )
    return graph, torch.from_numpy(community)


def agreement(parts, communities):
    """The fraction of nodes whose part is the most common one of their community."""
    table = np.zeros((int(communities.max()) + 1, int(parts.max()) + 1))
    np.add.at(table, (communities.numpy(), parts.numpy()), 1)
    return table.max(axis=1).sum() / len(parts)


@pytest.mark.parametrize(("num_parts", "share_inside"), [(2, 0.7), (3, 0.8), (4, 0.8), (8, 0.9)])
def test_planted_communities_are_recovered(num_parts, share_inside):
    graph, communities = planted(num_parts, 4000 // num_parts, 16, share_inside)
    parts = partition_graph(graph, num_parts)
    assert agreement(parts, communities) > 0.95
    assert cut_fraction(graph, parts) < 1.1 * cut_fraction(graph, communities)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("share", [1.0, 0.3, 0.02])
def test_parts_have_equally_many_seeds(num_parts, share):
    graph, _ = planted(6, 300, 10, 0.8)
    seeds = torch.arange(graph.num_nodes)[: int(share * graph.num_nodes)]
    parts = partition_graph(graph, num_parts, seeds)
    assert parts.shape == (graph.num_nodes,)
    counts = parts[seeds].bincount(minlength=num_parts)
    assert counts.max() - counts.min() <= 1
    sizes = parts.bincount(minlength=num_parts)
    assert sizes.max() <= 1.15 * graph.num_nodes / num_parts + 1


@pytest.mark.parametrize("kind", ["random", "star", "path", "empty", "directed", "loops"])
@pytest.mark.parametrize("num_parts", [2, 5])
def test_the_cut_is_at_most_that_of_random_parts(kind, num_parts):
    rng = np.random.default_rng(1)
    n = 500
    ends = {
        "random": rng.integers(0, n, (2, 4000)),
        "star": np.stack([np.zeros(n - 1, np.int64), np.arange(1, n)]),
        "path": np.stack([np.arange(n - 1), np.arange(1, n)]),
        "empty": np.empty((2, 0), np.int64),
        "directed": np.sort(rng.integers(0, n, (2, 2000)) // 10 * 10 + 3, axis=0),
        "loops": np.stack([np.arange(n), np.arange(n)]),
    }[kind]
    graph = Graph.from_edges(*torch.from_numpy(ends), n, bidirected=kind != "directed")
    parts = partition_graph(graph, num_parts)
    random_cuts = [cut_fraction(graph, rng.permutation(n) % num_parts) for _ in range(5)]
    assert cut_fraction(graph, parts) <= min(random_cuts)
    if kind == "path":
        assert cut_fraction(graph, parts) < 0.2
    counts = parts.bincount(minlength=num_parts)
    assert counts.max() - counts.min() <= 1


def test_duplicates_and_directions_of_edges_do_not_matter():
    graph, _ = planted(4, 200, 10, 0.8)
    twice = Graph.from_edges(*(torch.cat([e, e]) for e in graph.coo()), graph.num_nodes)
    assert torch.equal(partition_graph(twice, 4), partition_graph(graph, 4))


@pytest.mark.parametrize("name", ["cora", "amazon_photo"])
@pytest.mark.parametrize("num_parts", [2, 8])
def test_real_graphs_have_a_small_cut(name, num_parts, shared_data):
    graph = load(shared_data / name / f"{name}.npz").graph
    parts = partition_graph(graph, num_parts)
    # random parts cut 1 - 1 / P of the edges
    assert cut_fraction(graph, parts) < 0.3 * (1 - 1 / num_parts)


# cut_fraction, merge_communities, count_seeds


def test_communities_are_merged_whole_and_evenly():
    communities = torch.tensor([9, 9, 9, 4, 4, 7, 7, 2])
    parts = merge_communities(communities, 2)
    assert [len(set(parts[communities == c].tolist())) for c in (9, 4, 7, 2)] == [1] * 4
    assert parts.bincount().tolist() == [4, 4]
    assert merge_communities(communities, 2, seeds=[3, 5])[[3, 5]].sort().values.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda graph: partition_graph(graph, 0), "num_parts is 0"),
        (lambda graph: partition_graph(graph, 2, [1]), "2 for 1 seeds"),
        (lambda graph: partition_graph(graph, 2, [1, 4]), "from 1 to 4, but there are 4 nodes"),
        (lambda graph: partition_graph(graph, 2, torch.ones(4)), "seeds is a tensor"),
        (lambda graph: cut_fraction(graph, [0]), "1 elements, but the graph has 4"),
        (lambda graph: merge_communities([0, -1], 2), "value -1"),
        (lambda graph: merge_communities([0, 1], 0), "num_parts is 0"),
    ],
)
def test_invalid_arguments_are_rejected(call, words):
    graph = Graph.from_edges(torch.tensor([0, 1]), torch.tensor([1, 2]), 4)
    with pytest.raises(ValueError, match=words):
        call(graph)
