"""Pairs for link prediction in heterogeneous graphs: negatives by time, and reverse edges."""

import numpy as np
import pytest
import torch
from hetero_graphs import pyg_sampler

from gcnzc.graph import Graph
from gcnzc.kernels.sample.negatives import TRIES, sample_negative_reference
from gcnzc.sampling import LinkSampler

BUYS, BOUGHT = ("user", "buys", "item"), ("item", "bought", "user")
KNOWS = ("user", "knows", "user")
USERS, ITEMS, EDGES = 30, 40, 200


def shop(seed=0, *, dense=False, **changes):
    """Users buy items after the items exist."""
    random = np.random.default_rng(seed)
    item_time = random.integers(0, 50, ITEMS)
    item_time[:2] = 0
    users, items = random.integers(0, USERS, EDGES), random.integers(0, ITEMS, EDGES)
    if dense:
        users = users % 3
    times = item_time[items] + random.integers(0, 40, EDGES)
    nodes = {
        "user": {"num_nodes": USERS},
        "item": {"num_nodes": ITEMS, "time": item_time} | changes,
    }
    edges = {BUYS: {"edge_index": np.stack([users, items]), "time": times}}
    edges[BOUGHT] = {"edge_index": np.stack([items, users]), "time": times}
    return Graph.from_arrays(nodes, edges)


def links(graph, *, time="both", seed=7, **options):
    sampler = pyg_sampler(graph.sort_by_time(time), [3, 2], temporal="uniform", time=time)
    return LinkSampler(sampler, edge_type=BUYS, seed=seed, **options)


def negatives(sampler, items, epoch=0):
    """The (S, K) negative items of some edges."""
    batch = sampler.sample(items, epoch)
    ends = batch.nodes["item"][batch.pairs[1, len(items) :]]
    return ends.view(len(items), sampler.num_negatives)


@pytest.mark.parametrize("strict", [False, True])
def test_negatives_are_not_later_than_their_edge(strict):
    graph = shop()
    sampler = links(graph, num_negatives=5, strict=strict)
    items, item_time = torch.arange(EDGES), graph.nodes("item").time
    known = {tuple(pair) for pair in graph.edges(BUYS).edge_index().T.tolist()}
    has_ties = False
    sampler.check_negatives()
    for epoch in range(3):
        found = negatives(sampler, items, epoch)
        times = sampler.times[:, None]
        assert bool((item_time[found] <= times).all())
        has_ties |= bool((item_time[found] == times).any())
        if strict:
            sources = sampler.edges[0].repeat_interleave(5).tolist()
            assert not known & set(zip(sources, found.flatten().tolist(), strict=True))
    assert has_ties
    # without the times of nodes, later ones are sampled
    assert bool(
        (item_time[negatives(links(graph, time="edge"), items)] > sampler.times[:, None]).any()
    )


def test_an_edge_without_a_negative_is_found_in_advance():
    nodes = {"user": {"num_nodes": 3}, "item": {"num_nodes": 2}}
    pairs = np.array([[0, 1, 1, 1, 2], [0, 0, 1, 1, 1]])
    graph = Graph.from_arrays(nodes, {BUYS: {"edge_index": pairs}})

    def sampler(edges, **options):
        return LinkSampler(pyg_sampler(graph, [2]), edges, BUYS, **options)

    with pytest.raises(ValueError, match="edges between node 1 and all others"):
        sampler(pairs).check_negatives()
    sampler(pairs[:, [0, 4]]).check_negatives()
    sampler(pairs, strict=False).check_negatives()
    # a doubled edge is one destination
    nodes["item"]["num_nodes"] = 3
    graph = Graph.from_arrays(nodes, {BUYS: {"edge_index": pairs}})
    sampler(pairs).check_negatives()
    # a user is no negative of its own
    knows = {KNOWS: {"edge_index": np.array([[0], [1]])}}
    graph = Graph.from_arrays({"user": {"num_nodes": 2}}, knows)
    with pytest.raises(ValueError, match="edges between node 0 and all others"):
        LinkSampler(pyg_sampler(graph, [2]), edge_type=KNOWS).check_negatives()
    # without times, the ends of pairs are the same nodes
    batch = LinkSampler(pyg_sampler(graph, [2]), edge_type=KNOWS, num_negatives=0).sample([0], 0)
    assert batch.nodes["user"][batch.pairs].tolist() == [[0], [1]]


def test_negatives_equal_the_reference():
    graph = shop()
    sampler = links(graph, num_negatives=3)
    order = sorted(range(ITEMS), key=lambda item: (int(graph.nodes("item").time[item]), item))
    known = {tuple(pair) for pair in graph.edges(BUYS).edge_index().T.tolist()}
    items = torch.tensor([5, 0, 199, 31])
    for epoch in (0, 4):
        found = negatives(sampler, items, epoch)
        for item, row in zip(items.tolist(), found.tolist(), strict=True):
            source, time = int(sampler.edges[0, item]), int(sampler.times[item])
            eligible = [each for each in order if graph.nodes("item").time[each] <= time]
            for draw, own in enumerate(row):
                tries = (
                    eligible[
                        sample_negative_reference(item, draw, attempt, len(eligible), 7, epoch)[0]
                    ]
                    for attempt in range(TRIES)
                )
                assert own == next(each for each in tries if (source, each) not in known)


def test_negatives_depend_neither_on_the_minibatch_nor_on_later_nodes():
    graph, items = shop(), torch.arange(EDGES)
    sampler = links(graph, num_negatives=2)
    whole = negatives(sampler, items)
    assert torch.equal(negatives(sampler, items.flip(0)), whole.flip(0))
    assert torch.equal(torch.cat([negatives(sampler, items[i : i + 1]) for i in items]), whole)
    assert not torch.equal(negatives(links(graph, num_negatives=2, seed=8), items), whole)
    # later nodes get other times: early edges do not see them
    limit = 20
    time = graph.nodes("item").time
    changed = torch.where(time > limit, 30 + (time * 7919) % 17, time)
    early = items[sampler.times <= limit]
    assert 0 < len(early) < EDGES
    other = links(shop(time=changed.numpy()), num_negatives=2)
    assert torch.equal(negatives(other, early), whole[early])


def test_negatives_are_uniform_among_eligible_nodes():
    graph = shop()
    sampler = links(graph, num_negatives=1, strict=False)
    item = int(sampler.times.argsort()[EDGES // 2])
    num_eligible = int((graph.nodes("item").time <= sampler.times[item]).sum())
    counts = torch.zeros(ITEMS)
    draws = 4000
    own = links(graph, num_negatives=draws, strict=False)
    counts = torch.bincount(negatives(own, torch.tensor([item])).flatten(), minlength=ITEMS)
    assert int((counts > 0).sum()) == num_eligible
    expected = draws / num_eligible
    chi = float(((counts[counts > 0] - expected) ** 2 / expected).sum())
    # mean k - 1, standard deviation sqrt(2 (k - 1))
    assert abs(chi - (num_eligible - 1)) < 5 * (2 * (num_eligible - 1)) ** 0.5


def test_the_only_valid_negative_is_found():
    # user 0 has edges to items 0 and 1, item 3 is later: only item 2 remains
    graph = Graph.from_arrays(
        {"user": 1, "item": {"num_nodes": 4, "time": [0, 1, 2, 9]}},
        {BUYS: {"edge_index": [[0, 0], [0, 1]], "time": [5, 5]}},
    )
    sampler = pyg_sampler(graph, [1], temporal="uniform")
    found = negatives(LinkSampler(sampler, edge_type=BUYS, num_negatives=50), torch.tensor([0, 1]))
    assert set(found.flatten().tolist()) == {2}
    late = LinkSampler(sampler, [[0], [1]], BUYS, times=[1])
    with pytest.raises(ValueError, match=r"from 0 to 1 of .*whose time is 1, has no negative") as e:
        late.sample([0], 0)
    assert "each of the 2 nodes of type 'item' that are not later\n\nhint: strict=False" in str(
        e.value
    )
    loose = LinkSampler(sampler, [[0], [1]], BUYS, times=[1], strict=False)
    assert int(negatives(loose, torch.tensor([0]))) in (0, 1)


def test_negatives_of_one_node_type_are_neither_later_nor_self_loops():
    random = np.random.default_rng(3)
    time = np.array([0, 0, 1, 1, 2, 3, 4, 5])
    pairs = np.stack([np.arange(8), (np.arange(8) + 1) % 8])
    edges = {KNOWS: {"edge_index": pairs, "time": time[pairs].max(0) + random.integers(0, 2, 8)}}
    graph = Graph.from_arrays({"user": {"time": time}}, edges)
    sampler = pyg_sampler(graph, [2], temporal="last")
    sampler = LinkSampler(sampler, edge_type=KNOWS, num_negatives=20, strict=False)
    strict = LinkSampler(
        pyg_sampler(graph, [2], temporal="last"), [[7, 6], [0, 7]], KNOWS, times=[5, 6]
    )
    for own in (sampler, strict):
        items = torch.arange(own.num_items)
        batch = own.sample(items, 0)
        pairs = batch.nodes["user"][batch.pairs[:, len(items) :]]
        limit = own.times.repeat_interleave(own.num_negatives)
        assert bool((graph.nodes("user").time[pairs[1]] <= limit).all())
    assert bool((pairs[0] != pairs[1]).all())


@pytest.mark.parametrize(("time", "hidden"), [("both", "bn"), ("edge", "b"), ("node", "n")])
def test_edges_without_times_that_count_are_visible_beside_others(time, hidden):
    """Edges of "b" have times, sources of "n" have times, and those of "a" have none."""
    found = torch.tensor([[0, 1], [0, 0]])
    nodes = {"user": 1, "item": 2, "shop": {"time": [5, 6]}}
    edges = {("item", "a", "user"): {"edge_index": found}}
    edges["item", "b", "user"] = {"edge_index": found, "time": [5, 6]}
    edges["shop", "n", "user"] = {"edge_index": found}
    graph = Graph.from_arrays(nodes, edges).sort_by_time(time)
    for strategy in ("uniform", "last"):
        sampler = pyg_sampler(graph, [-1], temporal=strategy, time=time)
        batch = sampler.sample(("user", [0]), 0, [4])
        visible = {relation for (_, relation, _), rows in batch.row.items() if len(rows) == 2}
        assert visible == set("abn") - set(hidden)
        assert all(len(rows) in (0, 2) for rows in batch.row.values())


def test_reverses_without_times_are_an_error_unless_they_are_none():
    graph = shop()
    stores = {each: graph.edges(each).edge_index() for each in graph.edge_types}
    edges = {BUYS: {"edge_index": stores[BUYS], "time": links(graph).times}, BOUGHT: stores[BOUGHT]}
    nodes = {"user": USERS, "item": {"time": graph.nodes("item").time}}
    sampler = pyg_sampler(Graph.from_arrays(nodes, edges), [2], temporal="uniform")
    for given in (None, [BOUGHT]):
        with pytest.raises(ValueError, match=r"'bought'.* are the reverses .* but have no times"):
            LinkSampler(sampler, edge_type=BUYS, reverse_types=given)
    assert LinkSampler(sampler, edge_type=BUYS, reverse_types=[]).exclude == "none"
