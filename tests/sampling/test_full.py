"""Blocks with all neighbours, built once for a whole graph."""

from itertools import pairwise

import pytest
import torch
from by_hand import random_graph

from gcnzc.sampling.full import build_full_blocks, find_layer_nodes
from gcnzc.sampling.neighbor import Sampler


def edges_of(block):
    """The edges of each destination as node ids, in stored order."""
    sources = block.nodes[block.indices.long()].split(block.indptr.diff().tolist())
    return {int(node): ids.tolist() for node, ids in zip(block.nodes, sources, strict=False)}


@pytest.mark.parametrize("num_layers", [1, 2, 4])
@pytest.mark.parametrize("seeds", [[59], [3, 0, 59, 17, 55], list(range(60))])
def test_blocks_have_the_nodes_and_edges_of_sampled_ones_with_all_neighbours(seeds, num_layers):
    graph, seeds = random_graph(), torch.tensor(seeds)
    blocks = build_full_blocks(graph, find_layer_nodes(graph, seeds, num_layers))
    batch = Sampler(graph, [-1] * num_layers).sample(seeds, epoch=0)
    assert torch.equal(blocks[-1].nodes[: blocks[-1].num_dst], seeds)
    for found, expected in zip(blocks, batch.blocks, strict=True):
        assert (found.num_src, found.num_dst) == (expected.num_src, expected.num_dst)
        assert sorted(found.nodes.tolist()) == sorted(expected.nodes.tolist())
        assert edges_of(found) == edges_of(expected)
        assert torch.equal(found.in_degrees, graph.in_degrees()[found.nodes])
    # the destinations of a block are the sources of the next one
    for block, following in pairwise(blocks):
        assert torch.equal(block.nodes[: block.num_dst], following.nodes)


def test_all_nodes_in_order_use_the_arrays_of_the_graph():
    graph = random_graph()
    blocks = build_full_blocks(graph, find_layer_nodes(graph, torch.arange(60), 3))
    # one block, so that what is computed for one layer is computed for all
    assert len({id(block) for block in blocks}) == 1
    assert blocks[0].indptr.data_ptr() == graph.indptr.data_ptr()
    assert blocks[0].indices.data_ptr() == graph.indices.data_ptr()
    # another order is renumbered
    (block,) = build_full_blocks(graph, find_layer_nodes(graph, torch.arange(60).flip(0), 1))
    assert block.indices.data_ptr() != graph.indices.data_ptr()
