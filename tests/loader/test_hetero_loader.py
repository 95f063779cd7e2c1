"""The loader of heterogeneous graphs yields typed minibatches in order, and resumes."""

import numpy as np
import pytest
import torch
from hetero_graphs import pyg_sampler

from gcnzc.features.table import FeatureTable
from gcnzc.graph import Graph
from gcnzc.loader import Loader
from gcnzc.sampling import LinkSampler, build_hetero_blocks
from gcnzc.sampling.link import edge_times
from gcnzc.sampling.reverse_types import find_reverse_types

BUYS, BOUGHT, KNOWS = ("user", "buys", "item"), ("item", "bought", "user"), ("user", "k", "user")
USERS, ITEMS = 90, 70


@pytest.fixture(scope="module")
def graph():
    random = np.random.default_rng(4)
    pairs = np.stack([random.integers(0, USERS, 600), random.integers(0, ITEMS, 600)])
    times = random.integers(0, 50, 600)
    return Graph.from_arrays(
        {
            "user": {"features": random.random((USERS, 5), np.float32)},
            "item": {"num_nodes": ITEMS},
        },
        {
            BUYS: {"edge_index": pairs, "time": times},
            BOUGHT: {"edge_index": pairs[::-1], "time": times},
            KNOWS: {"edge_index": random.integers(0, USERS, (2, 300))},
        },
    )


@pytest.fixture
def make(graph):
    def make(sampler=None, seeds=None, batch_size=16, **options):
        if sampler is None:
            sampler = pyg_sampler(graph, [3, 2], seed=1)
            seeds = ("user", torch.arange(0, USERS, 2)) if seeds is None else seeds
            options = {"labels": torch.arange(45) % 3} | options
        options = {"threads": 2, "sampler": sampler} | options
        return Loader(graph, None, seeds, (), batch_size, **options)

    return make


@pytest.fixture
def links(graph):
    def links(fanouts=(4, 3), temporal=None, edges=None, **options):
        sampler = pyg_sampler(graph, list(fanouts), seed=2, temporal=temporal, time="edge")
        return LinkSampler(sampler, edges, BUYS, **options)

    return links


def test_every_seed_is_used_once_with_its_features_labels_and_blocks(make, graph):
    loader, seen = make(shuffle=True), []
    x = graph.nodes("user").features
    for batch in loader:
        seen += batch.items.tolist()
        assert torch.equal(batch.nodes["user"][: len(batch.items)], batch.items * 2)
        assert torch.equal(batch.y, batch.items % 3)
        assert torch.equal(batch.x["user"], x[batch.nodes["user"]])
        # items have no features
        assert list(batch.x) == ["user"]
        assert len(batch.blocks) == 2
        assert batch.blocks[-1].num_dst == (len(batch.items), 0)
        expected = build_hetero_blocks(batch)
        assert all(
            torch.equal(a.indices, b.indices) for a, b in zip(batch.blocks, expected, strict=True)
        )
        assert batch.times.keys() >= {"sample_s", "gather_s"}
    assert sorted(seen) == list(range(45))
    assert seen != sorted(seen)
    assert len(loader) == 3


def test_seed_times_bound_the_neighbourhoods(make, graph):
    sampler = pyg_sampler(graph, [-1, -1], temporal="uniform", time="edge")
    ids, times = torch.tensor([5, 5, 7, 9]), torch.tensor([10, 30, 20, 0])
    loader = make(sampler, ("user", ids), 2, seed_times=times, labels=torch.eye(4), shuffle=False)
    edge_time = edge_times(graph, BOUGHT)
    for batch in loader:
        assert torch.equal(batch.nodes["user"][:2], ids[batch.items])
        assert torch.equal(batch.y, torch.eye(4)[batch.items])
        seen = batch.subgraphs["user"][batch.col[BOUGHT]]
        assert bool((edge_time[batch.edge_ids[BOUGHT]] <= times[batch.items][seen]).all())
    # the first seed has earlier edges only
    first, second = (
        next(iter(make(sampler, ("user", ids[i : i + 1]), 1, seed_times=times[i : i + 1])))
        for i in (0, 1)
    )
    assert 0 < len(first.row[BOUGHT]) < len(second.row[BOUGHT])


@pytest.mark.parametrize("temporal", [None, "uniform", "last"])
def test_pairs_are_seed_edges_and_negatives(links, make, graph, temporal):
    edges = graph.edges(BUYS).edge_index()
    known = {tuple(pair) for pair in edges.T.tolist()}
    sampler = links(temporal=temporal, num_negatives=2)
    for batch in make(sampler, batch_size=50):
        rows = batch.nodes["user"][batch.pairs[0]], batch.nodes["item"][batch.pairs[1]]
        pairs = torch.stack(rows)
        count = len(batch.items)
        assert torch.equal(pairs[:, :count], edges[:, batch.items])
        assert batch.y.tolist() == [1.0] * count + [0.0] * (2 * count)
        assert torch.equal(pairs[0, count:], edges[0, batch.items].repeat_interleave(2))
        assert not known & {tuple(pair) for pair in pairs[:, count:].T.tolist()}
        # the model returns rows of the seeds only
        assert int(batch.pairs[0].max()) < len(batch.seeds["user"])
        assert int(batch.pairs[1].max()) < len(batch.seeds["item"])


def test_seed_edges_and_their_reverses_are_not_in_the_neighbourhoods(links, make, graph):
    assert find_reverse_types(graph, BUYS) == [BOUGHT]
    edges = graph.edges(BUYS).edge_index()

    def visible(exclude):
        found = {BUYS: 0, BOUGHT: 0}
        for batch in make(links((-1, -1), exclude=exclude), batch_size=60):
            seeds = {tuple(pair) for pair in edges[:, batch.items].T.tolist()}
            for edge_type in found:
                row = batch.nodes[edge_type[0]][batch.row[edge_type]].tolist()
                col = batch.nodes[edge_type[2]][batch.col[edge_type]].tolist()
                ends = (row, col) if edge_type == BUYS else (col, row)
                found[edge_type] += len(seeds & set(zip(*ends, strict=True)))
                assert sum(batch.num_edges[edge_type]) == len(batch.row[edge_type])
        return found

    assert all(visible("none").values())
    assert visible("self")[BUYS] == 0
    assert visible("self")[BOUGHT] > 0
    assert visible("reverse") == {BUYS: 0, BOUGHT: 0}


def test_the_neighbourhood_of_an_edge_is_earlier_than_the_edge(links, make, graph):
    time = edge_times(graph, BUYS)
    for batch in make(links((-1, -1), temporal="uniform"), batch_size=50):
        own = time[batch.items]
        pair_times = torch.cat([own, own, own, own])
        for edge_type in (BUYS, BOUGHT):
            seen = batch.subgraphs[edge_type[2]][batch.col[edge_type]]
            edge_time = edge_times(graph, edge_type)[batch.edge_ids[edge_type]]
            assert bool((edge_time < pair_times[seen]).all())


def test_bad_input_is_rejected_by_name(make, graph, links):
    def load(seeds, table=None, **options):
        return Loader(graph, table, seeds, [2], 1, **options)

    with pytest.raises(TypeError, match="sampler is"):
        load(("user", [0]), sampler=graph)
    with pytest.raises(TypeError, match="pair of a node type and ids"):
        load(torch.arange(3))
    with pytest.raises(ValueError, match="no node type 'shop'"):
        load(("shop", [0]))
    with pytest.raises(ValueError, match=r"from 0 to 70.*70 nodes"):
        load(("item", [0, 70]))
    with pytest.raises(ValueError, match="are empty"):
        load(("item", []))
    with pytest.raises(ValueError, match=r"labels of shape \(3,\) for 2 seeds"):
        load(("item", [0, 1]), labels=torch.zeros(3))
    with pytest.raises(ValueError, match="ignores times"):
        load(("item", [0, 1]), seed_times=[1, 2])
    with pytest.raises(ValueError, match="has 3 rows, but the type has 70"):
        load(("item", [0]), {"item": FeatureTable(torch.zeros(3, 1))})
    with pytest.raises(TypeError, match="table is a FeatureTable"):
        load(("item", [0]), FeatureTable(torch.zeros(70, 1)))
    timed = pyg_sampler(graph, [2], temporal="last", time="edge")
    with pytest.raises(ValueError, match="'item' have no times"):
        load(("item", [0]), sampler=timed)
    with pytest.raises(ValueError, match="labels are of seed nodes"):
        load(None, sampler=links(), labels=torch.zeros(600))
    with pytest.raises(ValueError, match="occurs twice"):
        load([3, 3], sampler=links())
    with pytest.raises(ValueError, match="from 99 to 99"):
        links(edges=[[0], [99]])
    with pytest.raises(ValueError, match="time of each seed edge"):
        links(edges=[[0], [9]], temporal="last")
    with pytest.raises(ValueError, match="does not go from 'item' to 'user'"):
        links(reverse_types=[KNOWS])


def test_a_sampler_without_times_needs_no_argument_for_them(make, graph):
    class Own:
        def sample(self, seeds, epoch):
            return pyg_sampler(graph, [3, 2]).sample(seeds, epoch)

    assert sum(len(batch.seeds["user"]) for batch in make(Own(), ("user", [*range(20)]))) == 20


def test_in_degrees_are_of_graphs_without_types(make):
    with pytest.raises(ValueError, match="in_degrees is True"):
        make(in_degrees=True)
