"""A heterogeneous graph of users who buy items, for tests of link prediction."""

from dataclasses import replace

import numpy as np

from gcnzc.graph import Graph

USERS, ITEMS, EDGES, GROUPS = 120, 100, 2000, 4
BUYS, BOUGHT = ("user", "buys", "item"), ("item", "bought_by", "user")


def build(*, is_planted=True, has_times=True):
    """Users buy items of their group; or, if nothing is planted, random items."""
    random = np.random.default_rng(0)
    users = random.integers(0, USERS, EDGES)
    items = random.integers(0, ITEMS // GROUPS, EDGES) * GROUPS + users % GROUPS
    if not is_planted:
        items = random.integers(0, ITEMS, EDGES)
    pairs = np.stack([users, items])
    own = {"time": random.integers(0, 400, EDGES)} if has_times else {}
    return Graph.from_arrays(
        {
            "user": {"features": random.normal(size=(USERS, 4)).astype(np.float32)},
            "item": {"features": random.normal(size=(ITEMS, 4)).astype(np.float32)},
        },
        {BUYS: {"edge_index": pairs, **own}, BOUGHT: {"edge_index": pairs[::-1], **own}},
        name="shop",
    )


def without_features(graph, node_type):
    """The graph whose nodes of a type have no features, and so embeddings."""
    nodes = {name: graph.nodes(name) for name in graph.node_types}
    nodes[node_type] = replace(nodes[node_type], features=None)
    edges = {each: graph.edges(each) for each in graph.edge_types}
    return Graph.from_stores(nodes, edges, name=graph.name)
