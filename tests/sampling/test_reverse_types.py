"""Reverse edge types: found by their pairs and names, and excluded as far as they are there."""

import warnings

import numpy as np
import pytest
import torch
from hetero_graphs import pyg_sampler

from gcnzc.graph import Graph
from gcnzc.sampling import LinkSampler
from gcnzc.sampling.reverse_types import find_reverse_types
from gcnzc.train.hetero.edge_split import split_edges

BUYS = ("user", "buys", "item")
USERS, ITEMS, EDGES = 60, 80, 300


def pairs_of(seed=0, count=EDGES):
    random = np.random.default_rng(seed)
    keys = random.choice(USERS * ITEMS, count, replace=False)
    return np.stack([keys // ITEMS, keys % ITEMS])


def graph_of(reverse, relation="rev_buys", pairs=None):
    edges = {BUYS: pairs_of() if pairs is None else pairs, ("item", relation, "user"): reverse}
    return Graph.from_arrays({"user": USERS, "item": ITEMS}, edges)


def found(graph, edge_type=BUYS):
    return [relation for _, relation, _ in find_reverse_types(graph, edge_type)]


def mixed(share, more=0):
    """Some reverses of the edges, and other edges."""
    return np.concatenate([pairs_of()[::-1, : int(share * EDGES)], pairs_of(1, more)[::-1]], axis=1)


@pytest.mark.parametrize(
    ("relation", "share", "more", "is_reverse"),
    [
        # all of them, whatever the name
        ("bought_by", 1.0, 0, True),
        # almost all of them
        ("bought_by", 0.97, 0, True),
        ("bought_by", 1.0, 5, True),
        # other edges that happen to be reverses
        ("shown_to", 1.0, 300, False),
        ("shown_to", 0.5, 0, False),
        ("shown_to", 0.5, 150, False),
        # by their name, as far as they are there
        ("rev_buys", 0.3, 0, True),
        ("rev_buys", 1.0, 300, True),
        ("buys_rev", 0.6, 30, True),
        ("reverse_buys", 0.3, 0, True),
        ("buys_inverse", 0.3, 0, True),
        ("Rev-buys", 0.3, 0, True),
        ("rev_buys2", 0.3, 0, False),
        ("revbuys", 0.3, 0, False),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is not treated as a reverse type")
def test_reverses_are_found_by_their_pairs_and_names(relation, share, more, is_reverse):
    graph = graph_of(mixed(share, more), relation)
    assert found(graph) == [relation] * is_reverse
    # and from the other side
    other = ("item", relation, "user")
    assert found(graph, other) == ["buys"] * is_reverse


def test_a_name_without_reverses_causes_a_warning():
    graph = graph_of(mixed(0.01, 297))
    with pytest.warns(
        UserWarning, match=r"'rev_buys'.* treated as such, but only \d+ of 300 pairs"
    ) as caught:
        assert found(graph) == ["rev_buys"]
    assert "\n\nhint: reverse_types=[]" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # half of the pairs of the smaller type are reverses
        assert found(graph_of(mixed(0.5, 150))) == ["rev_buys"]
        assert found(graph_of(mixed(0.5, 1000))) == ["rev_buys"]
        # no pair to exclude
        others = pairs_of(2, 2000)
        own = {tuple(pair) for pair in pairs_of().T.tolist()}
        is_other = [tuple(pair) not in own for pair in others.T.tolist()]
        assert found(graph_of(others[::-1, is_other])) == []
        assert found(graph_of(np.empty((2, 0), np.int64))) == []
        sampler = pyg_sampler(graph, [2])
        assert LinkSampler(sampler, edge_type=BUYS, reverse_types=[]).reverse_types == []


@pytest.mark.parametrize("kind", ["missing", "more"])
def test_existing_reverses_are_excluded_and_held_out(kind):
    reverse = mixed(0.6) if kind == "missing" else mixed(1.0, 200)
    graph = graph_of(reverse)
    rev = ("item", "rev_buys", "user")
    pairs = {tuple(pair) for pair in pairs_of().T.tolist()}
    sampler = LinkSampler(pyg_sampler(graph, [-1, -1]), edge_type=BUYS)
    assert sampler.reverse_types == [rev]
    kept = 0
    for items in torch.arange(EDGES).split(50):
        batch = sampler.sample(items, 0)
        seeds = {tuple(pair) for pair in sampler.edges[:, items].T.tolist()}
        row, col = batch.edge_index(rev)
        seen = set(
            zip(batch.nodes["user"][col].tolist(), batch.nodes["item"][row].tolist(), strict=True)
        )
        assert not seen & seeds
        kept += len(seen & pairs)
    assert kept > 0
    split = split_edges(graph, BUYS, "random", 0.2, 0.2, 0, keep=False)
    assert split.reverse_types == [rev]
    held_out = torch.cat([split.edges["valid"], split.edges["test"]], 1).T.tolist()
    seen = {tuple(pair) for pair in split.graph.edges(rev).edge_index().flip(0).T.tolist()}
    assert not seen & {tuple(pair) for pair in held_out}
    assert seen
