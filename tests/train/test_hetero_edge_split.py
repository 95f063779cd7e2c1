"""The split of edges whose type has both directions, and the reverse types of a run."""

import numpy as np
import pytest
import torch
from typed_shop import BOUGHT, BUYS, build

import gcnzc
from gcnzc.graph import Graph
from gcnzc.train.config import TrainConfig
from gcnzc.train.hetero.data import load_hetero
from gcnzc.train.hetero.edge_split import split_edges, split_edges_of_run
from gcnzc.train.tasks.hetero_link import HeteroLinkTask

KNOWS = ("user", "knows", "user")
USERS = 40


def symmetric(times=None, count=300):
    """Edges between users in both directions, which have the same time."""
    random = np.random.default_rng(0)
    keys = random.choice(USERS * (USERS - 1) // 2, count, replace=False)
    pairs = np.stack(np.triu_indices(USERS, 1))[:, keys]
    store = {"edge_index": np.concatenate([pairs, pairs[::-1]], axis=1)}
    if times is not None:
        own = random.integers(0, times, count)
        store["time"] = np.concatenate([own, own])
    return Graph.from_arrays({"user": USERS}, {KNOWS: store})


def pairs_of(edges, times=None):
    rows = edges.T.tolist() if times is None else torch.cat([edges, times[None]]).T.tolist()
    return {tuple(row) for row in rows}


def flipped(pairs):
    return {(second, first, *time) for first, second, *time in pairs}


@pytest.mark.parametrize("seed", range(4))
def test_both_directions_are_held_out_together(seed):
    graph = symmetric()
    # an odd number of edges in each split, so that the boundary is between two directions
    split = split_edges(graph, KNOWS, "random", 0.125, 0.125, seed, keep=False)
    train, valid, test = (pairs_of(split.edges[name]) for name in ("train", "valid", "test"))
    assert split.reverse_types == [KNOWS]
    assert len(test) == 75
    assert 74 <= len(valid) <= 75
    assert 449 <= len(train) <= 450
    assert not (train | flipped(train)) & (valid | test)
    assert not flipped(valid) & test
    remaining = pairs_of(split.graph.edges(KNOWS).edge_index())
    assert remaining == train
    other = split_edges(graph, KNOWS, "random", 0.125, 0.125, seed + 1, keep=False)
    assert pairs_of(other.edges["test"]) != test


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("times", [1, 3, 1000])
def test_reverses_of_the_same_time_are_in_one_split(times, keep):
    graph = symmetric(times)
    split = split_edges(graph, KNOWS, "time", 0.125, 0.125, 0, keep=keep)
    train, valid, test = (
        pairs_of(split.edges[name], split.times[name]) for name in ("train", "valid", "test")
    )
    assert not flipped(train) & (valid | test)
    assert not flipped(valid) & test
    if times == 1000:
        # only edges whose directions are on both sides of a boundary lose one
        assert len(train) + len(valid) + len(test) >= 595


def shop(*, has_times):
    """A shop in which 70 % of the purchases have a reverse edge, which has no time."""
    whole = build(has_times=has_times)
    edges = whole.edges(BUYS).edge_index()
    nodes = {name: {"features": whole.nodes(name).features} for name in whole.node_types}
    own = {"edge_index": edges} | ({"time": whole.edges(BUYS).time} if has_times else {})
    reverse = edges.flip(0)[:, : int(0.7 * edges.shape[1])]
    return Graph.from_arrays(nodes, {BUYS: own, BOUGHT: reverse})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("split") / "shop"
    gcnzc.prepare(shop(has_times=False), path)
    return path


@pytest.mark.parametrize(
    "given", ["bought_by", "item,bought_by,user", " item, bought_by,user,bought_by"]
)
def test_given_reverse_types_are_held_out_and_excluded(folder, given):
    task = f"link:edge_type=buys,reverse_types={given}"
    config = TrainConfig(data=folder, task=task, model="hetero-sage", fanouts=(5,), hidden=8)
    data = load_hetero(config, folder)
    split = split_edges_of_run(config, data)
    assert split.reverse_types == [BOUGHT]
    held_out = pairs_of(torch.cat([split.edges["valid"], split.edges["test"]], 1))
    remaining = flipped(pairs_of(split.graph.edges(BOUGHT).edge_index()))
    assert remaining
    assert not remaining & held_out
    assert HeteroLinkTask(config, data).sampler.reverse_types == [BOUGHT]
