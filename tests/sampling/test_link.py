"""A batch of pairs has edges, negatives, and a neighbourhood without the excluded edges."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from bits import same_tensors

from gcnzc.graph.graph import Graph
from gcnzc.sampling.link import LinkSampler
from gcnzc.sampling.neighbor import Sampler


@pytest.fixture(scope="module")
def graph():
    """300 nodes, both directions of 3000 edges, some of which are there twice."""
    generator = torch.Generator().manual_seed(0)
    src = (torch.rand(3000, generator=generator) ** 2 * 300).long()
    dst = torch.randint(0, 300, (3000,), generator=generator)
    return Graph.from_edges(src, dst, 300, bidirected=True)


@pytest.fixture(scope="module")
def edges(graph):
    sources, targets = graph.coo()
    return torch.stack([sources, targets])[:, sources < targets].long()


def ids(batch):
    """(2, P) ids of the nodes of the pairs."""
    return batch.seeds[batch.pairs]


def met(batch):
    """The set of (source, destination) in any block."""
    found = set()
    for block in batch.blocks:
        targets = block.nodes[: block.num_dst].repeat_interleave(block.indptr.diff())
        sources = block.nodes[block.indices.long()]
        found |= set(zip(sources.tolist(), targets.tolist(), strict=True))
    return found


def all_of(graph):
    """The set of (source, destination) of a graph."""
    return set(zip(*(part.tolist() for part in graph.coo()), strict=True))


@pytest.mark.parametrize("kind", ["uniform", "both", "in-batch"])
def test_pairs_are_the_edges_then_the_negatives(kind, graph, edges):
    sampler = LinkSampler(
        Sampler(graph, [4, 3]), edges, negatives=kind, num_negatives=3, strict=False
    )
    items = torch.tensor([7, 2000, 0, 33])
    batch = sampler.sample(items, 5)
    assert torch.equal(ids(batch)[:, :4], edges[:, items])
    assert batch.y.tolist() == [1.0] * 4 + [0.0] * (batch.pairs.shape[1] - 4)
    assert batch.y.dtype == torch.float32
    assert torch.equal(batch.seeds, ids(batch).unique())
    assert torch.equal(batch.nodes[: len(batch.seeds)], batch.seeds)
    assert batch.blocks[-1].num_dst == len(batch.seeds)
    negatives = ids(batch)[:, 4:]
    if kind == "in-batch":
        expected = [
            (edges[0, a], edges[1, b]) for a in items for b in items if edges[1, a] != edges[1, b]
        ]
        assert set(map(tuple, negatives.T.tolist())) == {(int(s), int(t)) for s, t in expected}
    else:
        assert negatives.shape == (2, 12)
    if kind == "uniform":
        assert torch.equal(negatives[0], edges[0, items].repeat_interleave(3))


@pytest.mark.parametrize("kind", ["uniform", "both", "in-batch"])
def test_strict_negatives_are_no_edges_and_loose_ones_may_be(kind, graph, edges):
    there = all_of(graph)
    for strict in (True, False):
        sampler = LinkSampler(
            Sampler(graph, [1]), edges, negatives=kind, num_negatives=20, strict=strict
        )
        batch = sampler.sample(torch.arange(0, edges.shape[1], 9), 0)
        drawn = set(map(tuple, ids(batch)[:, batch.y == 0].T.tolist()))
        assert bool(drawn & there) != strict
        if strict:
            assert all(source != target for source, target in drawn)


def test_negatives_are_no_known_edges(graph, edges):
    few = Graph.from_edges(*edges[:, ::2], 300)
    sampler = LinkSampler(Sampler(few, [1]), edges[:, ::2], num_negatives=50, known=graph)
    batch = sampler.sample(torch.arange(500), 0)
    there = all_of(graph)
    assert not there & set(map(tuple, ids(batch)[:, batch.y == 0].T.tolist()))


@pytest.mark.parametrize("fanouts", [[-1, -1], [3, 5], [40, 70]])
@pytest.mark.parametrize("stored", ["sorted", "as listed"])
def test_excluded_edges_are_in_no_block(fanouts, stored, graph, edges):
    if stored == "as listed":
        order = torch.randperm(graph.num_edges, generator=torch.Generator().manual_seed(1))
        sources, targets = (part[order] for part in graph.coo())
        graph = Graph.from_edges(sources, targets, 300)
    items = torch.arange(0, edges.shape[1], 11)
    target = set(map(tuple, edges[:, items].T.tolist()))
    reverse = {(t, s) for s, t in target}
    seen = {}
    for exclude in ("none", "self", "reverse"):
        sampler = LinkSampler(Sampler(graph, fanouts, edge_ids=True), edges, exclude=exclude)
        batch = sampler.sample(items, 0)
        seen[exclude] = met(batch)
        for block in batch.blocks:
            assert block.graph is graph
            sources = block.nodes[block.indices.long()]
            assert torch.equal(graph.indices[block.edge_ids].long(), sources)
            begins = graph.indptr[block.nodes[: block.num_dst]].repeat_interleave(
                block.indptr.diff()
            )
            ends = graph.indptr[block.nodes[: block.num_dst] + 1].repeat_interleave(
                block.indptr.diff()
            )
            assert bool(((begins <= block.edge_ids) & (block.edge_ids < ends)).all())
    assert seen["none"] & target
    assert seen["none"] & reverse
    assert not seen["self"] & target
    assert seen["self"] & reverse
    assert not seen["reverse"] & (target | reverse)
    if fanouts == [-1, -1]:
        # everything else is still there
        assert seen["none"] - target - reverse <= seen["reverse"]


def test_without_exclusion_neighbours_equal_those_of_the_sampler(graph, edges):
    batch = LinkSampler(Sampler(graph, [4, 3], seed=9), edges, exclude="none").sample(
        torch.arange(40), 2
    )
    plain = Sampler(graph, [4, 3], seed=9).sample(batch.seeds, 2)
    assert torch.equal(batch.nodes, plain.nodes)


def test_a_node_that_loses_all_its_edges_has_none():
    graph = Graph.from_edges(torch.tensor([0, 1]), torch.tensor([1, 0]), 3)
    batch = LinkSampler(Sampler(graph, [2, 2]), torch.tensor([[0], [1]])).sample(
        torch.tensor([0]), 0
    )
    assert batch.nodes.tolist() == [0, 1, 2]
    assert [block.num_edges for block in batch.blocks] == [0, 0]


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_batches_do_not_depend_on_threads_or_order(threads, graph, edges):
    order = torch.randperm(edges.shape[1])
    asked = [(order[i : i + 200], epoch) for epoch in range(2) for i in range(0, len(order), 200)]
    expected = [LinkSampler(Sampler(graph, [5, 5]), edges).sample(*one) for one in asked]
    sampler = LinkSampler(Sampler(graph, [5, 5]), edges)
    with ThreadPoolExecutor(threads) as pool:
        drawn = list(pool.map(lambda one: sampler.sample(*one), asked))
    for mine, theirs in zip(drawn, expected, strict=True):
        assert same_tensors(mine, theirs)


def test_known_edges_of_another_graph_are_rejected(graph, edges):
    other = Graph.from_edges(torch.tensor([0]), torch.tensor([1]), 2)
    with pytest.raises(ValueError, match="known has 2 nodes of type 'node', not 300"):
        LinkSampler(Sampler(graph, [2]), edges, known=other)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros(5, 2).long(), r"shape \(5, 2\)"),
        (torch.zeros(2, 5), "torch.float32"),
        (torch.zeros(2, 0).long(), "are empty"),
        (torch.tensor([[0], [300]]), "300 nodes"),
        (torch.tensor([[-1], [3]]), "300 nodes"),
    ],
)
def test_edges_that_are_not_in_the_graph_are_rejected(wrong, message, graph):
    with pytest.raises(ValueError, match=message):
        LinkSampler(Sampler(graph, [2]), wrong)


def test_reverses_that_exist_are_excluded_by_any_sampler():
    # 1 -> 2 has no reverse
    graph = Graph.from_edges(torch.tensor([0, 1, 1, 2]), torch.tensor([1, 0, 2, 3]), 4)
    sampler = LinkSampler(
        Sampler(graph, [9, 9], disjoint=True), torch.tensor([[0], [1]]), num_negatives=0
    )
    batch = sampler.sample([0], 0)
    assert [len(own) for own in batch.indices.values()] == [0]
