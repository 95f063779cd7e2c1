"""Held-out edges are removed from the graph, stored, and loaded."""

import numpy as np
import pytest
import torch
from tiny_graph import tiny

from gcnzc import load, prepare
from gcnzc.graph.edge_split import EdgeShares, split_edges, with_sorted_columns
from gcnzc.graph.graph import Graph
from gcnzc.graph.load import info, verify

PARTS = ("train", "valid", "test")


def pairs(edges):
    return set(zip(*(np.asarray(part).tolist() for part in edges), strict=True))


def either_way(edges):
    return {frozenset(pair) for pair in pairs(edges)}


@pytest.fixture(params=["both ways", "directed"])
def graph(request):
    """200 nodes; 1500 edges, some twice, some loops, and in the directed one some back as well."""
    generator = torch.Generator().manual_seed(0)
    src, dst = torch.randint(0, 200, (2, 1500), generator=generator)
    return Graph.from_edges(src, dst, 200, bidirected=request.param == "both ways")


@pytest.mark.parametrize("shares", [EdgeShares(), EdgeShares(0.2, 0.3, seed=4)])
def test_splits_are_disjoint_and_complete(graph, shares):
    left, links = split_edges(graph, shares)
    whole = {pair for pair in pairs(graph.coo()) if pair[0] != pair[1]}
    ways = [either_way(links.edges[part]) for part in PARTS]
    assert sum(len(part) for part in ways) == len(set.union(*ways))
    assert set.union(*ways) == {frozenset(pair) for pair in whole}
    sizes = [len(part) for part in ways]
    total = sum(sizes)
    assert sizes[1:] == [int(total * shares.valid), int(total * shares.test)]
    listed = [pair for part in PARTS for pair in pairs(links.edges[part])]
    assert set(listed) <= whole
    assert len(listed) == sum(links.edges[part].shape[1] for part in PARTS)
    both_ways = all((target, source) in whole for source, target in whole)
    assert len(listed) == (total if both_ways else len(whole))
    # the graph that is left has the training edges, all copies of them, and the loops
    there = pairs(left.coo())
    assert {frozenset(pair) for pair in there if pair[0] != pair[1]} == ways[0]
    sources, targets = (np.asarray(part) for part in graph.coo())
    stays = [
        s == t or frozenset((s, t)) in ways[0]
        for s, t in zip(sources.tolist(), targets.tolist(), strict=True)
    ]
    assert left.num_edges == sum(stays)
    assert with_sorted_columns(left) is left


# nodes, edges, whether the reverses are added
SMALL = [
    *((12, 30, True), (12, 30, False), (20, 100, True), (30, 300, True), (30, 300, False)),
    *((60, 600, True), (100, 300, True), (100, 2000, True), (200, 1500, False)),
]


@pytest.mark.parametrize(("num_nodes", "num_edges", "both_ways"), SMALL)
def test_negatives_are_distinct_and_never_edges(num_nodes, num_edges, both_ways):
    src, dst = np.random.default_rng(0).integers(0, num_nodes, (2, num_edges))
    graph = Graph.from_edges(src, dst, num_nodes, bidirected=both_ways)
    for seed in range(20):
        _, links = split_edges(graph, EdgeShares(0.1, 0.2, seed))
        drawn = np.concatenate([links.negatives["valid"], links.negatives["test"]], axis=1)
        assert not pairs(drawn) & pairs(graph.coo())
        assert (drawn[0] != drawn[1]).all()
        different = either_way(drawn) if both_ways else pairs(drawn)
        assert len(different) == drawn.shape[1]
        for part in PARTS[1:]:
            assert links.negatives[part].shape == links.edges[part].shape


def nearly_complete(num_nodes, free, both_ways):
    """A graph with edges between all nodes but the pairs in `free`."""
    missing = set(free) | ({(t, s) for s, t in free} if both_ways else set())
    every = {(s, t) for s in range(num_nodes) for t in range(num_nodes) if s != t}
    return Graph.from_edges(*np.array(sorted(every - missing)).T, num_nodes)


def test_all_pairs_without_an_edge_are_drawn_if_they_are_just_enough():
    # 51 of 66 pairs have edges: 5 are held out for validation, and 10 for test
    free = [(s, t) for s in range(3) for t in range(s + 1, 12)][:15]
    _, links = split_edges(nearly_complete(12, free, True), EdgeShares(0.1, 0.2))
    drawn = np.concatenate([links.negatives[part] for part in PARTS[1:]], axis=1)
    assert either_way(drawn) == {frozenset(pair) for pair in free}
    assert (drawn[0] < drawn[1]).any()
    assert (drawn[0] > drawn[1]).any()
    # of a directed graph, two pairs with edges in both directions are held out
    free = [(0, 1), (2, 3), (4, 5), (6, 7)]
    _, links = split_edges(nearly_complete(8, free, False), EdgeShares(0.05, 0.05, seed=0))
    assert sum(links.edges[part].shape[1] for part in PARTS[1:]) == 4
    assert pairs(links.negatives["valid"]) | pairs(links.negatives["test"]) == set(free)


@pytest.mark.parametrize("density", ["sparse", "dense"])
def test_negatives_are_uniform(density):
    free = [(s, t) for s in range(12) for t in range(s + 1, 12)]
    if density == "dense":
        graph = nearly_complete(12, free := free[:33], True)
    else:
        path = [(s, s + 1) for s in range(11)]
        free = sorted(set(free) - set(path))
        graph = Graph.from_edges(*np.array(path).T, 12, bidirected=True)
    seeds, counts = 400, dict.fromkeys(free, 0)
    for seed in range(seeds):
        _, links = split_edges(graph, EdgeShares(0.1, 0.1, seed))
        per_seed = links.negatives["test"].shape[1]
        for s, t in links.negatives["test"].T.tolist():
            counts[min(s, t), max(s, t)] += 1
    share = per_seed / len(free)
    found = np.array(list(counts.values())) / seeds
    assert abs(found - share).max() < 5 * (share * (1 - share) / seeds) ** 0.5


def test_graphs_that_are_too_small_or_too_dense_are_rejected():
    few = Graph.from_edges(torch.tensor([0, 1]), torch.tensor([1, 2]), 3)
    with pytest.raises(ValueError, match="edges between 2 pairs of nodes, which gives 0 for"):
        split_edges(few, EdgeShares())
    with pytest.raises(ValueError, match="has 0 pairs of nodes without an edge, fewer than the 6 "):
        split_edges(nearly_complete(6, [], True), EdgeShares(0.2, 0.2))
    with pytest.raises(ValueError, match=r"has 3 pairs .* than the 4 negatives (.|\n)*smaller"):
        split_edges(nearly_complete(6, [(0, 1), (2, 3), (4, 5)], True), EdgeShares(0.2, 0.2))


def test_a_split_is_stored_and_opened(tmp_path):
    source = tiny(num_edges=400).write(tmp_path / "source")
    prepare(source, tmp_path / "whole", bidirected=True)
    prepare(source, tmp_path / "split", bidirected=True, edge_split=EdgeShares(0.1, 0.2, seed=3))
    whole, data = load(tmp_path / "whole"), load(tmp_path / "split")
    assert whole.links is None
    left, links = split_edges(whole.graph, EdgeShares(0.1, 0.2, seed=3))
    assert torch.equal(data.graph.indptr, left.indptr)
    assert torch.equal(data.graph.indices, left.indices)
    for part in PARTS:
        assert np.array_equal(data.links.edges[part], links.edges[part])
    for part in ("valid", "test"):
        assert np.array_equal(data.links.negatives[part], links.negatives[part])
    assert data.links.metric == "auc"
    # what is known of the nodes stays
    assert torch.equal(data.labels, whole.labels)
    assert torch.equal(data.features, whole.features)
    verify(tmp_path / "split")
    told = info(tmp_path / "split")["links"]
    assert told == {
        "name": "valid 0.1, test 0.2, seed 3",
        "metric": "auc",
        **{part: links.edges[part].shape[1] for part in PARTS},
        "valid_in_graph": 0,
        "test_in_graph": 0,
    }
    # a folder that is prepared again keeps its split
    prepare(tmp_path / "split", tmp_path / "again", edge_split=EdgeShares(0.3, 0.3))
    again = load(tmp_path / "again")
    assert torch.equal(again.graph.indices, data.graph.indices)
    assert all(torch.equal(again.links.edges[p], data.links.edges[p]) for p in PARTS)
