"""Sampling in which the neighbours of every node are sampled once."""

import pytest
import torch
from bits import same_tensors

from gcnzc.graph.graph import Graph
from gcnzc.kernels.sample import sample, sample_reference


@pytest.mark.parametrize("num_nodes", [300, 2**24 + 5], ids=["table", "hash"])
@pytest.mark.parametrize("fanouts", [[3, 4, 5], [-1, 2], [5, -1, -1], [0, 3], [2]])
def test_equals_the_reference(num_nodes, fanouts):
    graph = Graph.from_edges(*torch.randint(300, (2, 4000)), num_nodes)
    seeds = torch.randperm(300)[:20]
    arguments = (graph.indptr, graph.indices, seeds, fanouts, 7, 3)
    found = sample(*arguments, edge_ids=True, once=True)
    expected = sample_reference(*arguments, once=True)
    assert found.num_nodes == expected.num_nodes
    assert same_tensors(found, expected)


def test_no_node_has_edges_at_two_hops():
    graph = Graph.from_edges(*torch.randint(100, (2, 2000)), 100)
    seeds = torch.arange(5)
    drawn = sample(graph.indptr, graph.indices, seeds, [3, 3, 3], 0, 0, once=True)
    degrees = torch.zeros(3, len(drawn.nodes), dtype=torch.int64)
    for hop, indptr in enumerate(drawn.indptr):
        degrees[hop, : len(indptr) - 1] = indptr.diff()
    assert bool(((degrees > 0).sum(0) <= 1).all())
    # the others draw again, and edges would come twice
    again = sample(graph.indptr, graph.indices, seeds, [3, 3, 3], 0, 0)
    assert bool((again.indptr[1].diff()[:5] > 0).all())
