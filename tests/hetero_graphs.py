"""Small random heterogeneous graphs for tests."""

import numpy as np
import torch
from bits import same_tensors

from gcnzc.graph import Graph
from gcnzc.sampling import Sampler

TIMES = 12  # times are below this


def pyg_sampler(graph, num_neighbors, **options):
    """A sampler with fanouts from the seeds outward, as PyG's, and edge ids."""
    if isinstance(num_neighbors, dict):
        fanouts = {each: own[::-1] for each, own in num_neighbors.items()}
    else:
        fanouts = num_neighbors[::-1]
    return Sampler(graph, fanouts, **{"once": True, "edge_ids": True} | options)


def random_graph(seed, *, times="none", weights=False, num_types=None, num_nodes=12, edges=60):
    """A graph of up to 3 node types and 5 edge types; `times` is none, node, edge or both."""
    random = np.random.default_rng(seed)
    types = [f"t{i}" for i in range(num_types or random.integers(1, 4))]
    nodes = {}
    for name in types:
        count = int(random.integers(1, num_nodes + 1))
        nodes[name] = {"num_nodes": count}
        if times in ("node", "both") and (random.random() < 0.8 or name == types[0]):
            nodes[name]["time"] = random.integers(0, TIMES, count)
    found = {}
    for r in range(int(random.integers(1, 6))):
        source, target = (types[int(i)] for i in random.integers(0, len(types), 2))
        count = int(random.integers(0, edges))
        ends = [random.integers(0, nodes[each]["num_nodes"], count) for each in (source, target)]
        own = {"edge_index": np.stack(ends)}
        if times in ("edge", "both") and (random.random() < 0.8 or r == 0):
            own["time"] = random.integers(0, TIMES, count)
        if weights:
            own["weight"] = random.random(count) * (random.random(count) < 0.7)
        found[source, f"r{r}", target] = own
    if times in ("node", "both"):
        # at least one edge type has a source with times
        found[types[0], "dated", types[-1]] = {"edge_index": np.zeros((2, 1), np.int64)}
    return Graph.from_arrays(nodes, found)


def random_seeds(graph, seed, count=5):
    """Seeds of some types, and their times."""
    random = np.random.default_rng(seed)
    types = random.permutation(graph.node_types)[: int(random.integers(1, 3))].tolist()
    drawn = {name: random.integers(0, graph.nodes(name).num_nodes, count) for name in types}
    seeds = {name: torch.from_numpy(ids) for name, ids in drawn.items()}
    return seeds, torch.from_numpy(random.integers(0, TIMES, count * len(seeds)))


def assert_equal(batch, other):
    """Check that two minibatches are equal bit for bit."""
    assert same_tensors(batch, other)
    assert (batch.num_nodes, batch.num_edges) == (other.num_nodes, other.num_edges)


def assert_same_graph(found, expected):
    """Check that two graphs have the same nodes, edges and values."""
    assert found.metadata() == expected.metadata()
    for name in expected.node_types:
        mine, theirs = found.nodes(name), expected.nodes(name)
        assert mine.num_nodes == theirs.num_nodes
        assert mine.split.keys() == theirs.split.keys()
        assert all(torch.equal(mine.split[part], theirs.split[part]) for part in mine.split)
        assert_same_values(mine, theirs, "features", "labels", "time")
    for edge_type in expected.edge_types:
        mine, theirs = found.edges(edge_type), expected.edges(edge_type)
        assert torch.equal(mine.edge_index(), theirs.edge_index())
        assert_same_values(mine, theirs, "indptr", "indices", "features", "time", "weight")


def assert_same_values(store, other, *names):
    """Check that nodes or edges have the same values, or none."""
    for name in names:
        mine, theirs = getattr(store, name), getattr(other, name)
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine.to_dense(), theirs.to_dense()), name
