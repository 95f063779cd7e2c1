"""Blocks of heterogeneous minibatches have the sampled edges, by layer and edge type."""

from collections import Counter

import pytest
import torch
from hetero_graphs import pyg_sampler, random_graph, random_seeds

from gcnzc.sampling import build_full_hetero_blocks, build_hetero_blocks


def edges_of(block):
    """Count the edges (edge type, source, destination) of a block, read column by column."""
    found = Counter()
    metadata = block.metadata
    for t, relations in enumerate(metadata.edge_types_in):
        for d in range(block.num_dst[t]):
            for k, r in enumerate(relations):
                column = block.column_offsets[t] + d * len(relations) + k
                source = metadata.node_types.index(metadata.edge_types[r][0])
                begin, end = block.indptr[column : column + 2].tolist()
                for row in block.indices[begin:end].tolist():
                    s = row - block.row_offsets[source]
                    assert 0 <= s < block.num_src[source]
                    found[metadata.edge_types[r], s, d] += 1
    return found


def edges_in(batch, *, hops=None, bounds=None):
    """Count the edges of a minibatch: of some hops, or those into destinations below bounds."""
    found = Counter()
    for each, row in batch.row.items():
        first, last = 0, len(row)
        if hops is not None:
            counts = batch.num_edges[each]
            first, last = sum(counts[: hops[0]]), sum(counts[: hops[1]])
        for s, d in zip(
            row[first:last].tolist(), batch.col[each][first:last].tolist(), strict=True
        ):
            if bounds is None or d < bounds[each[2]]:
                found[each, s, d] += 1
    return found


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("disjoint", [True, False])
def test_a_block_has_the_edges_of_its_hops(once, disjoint):
    for seed in range(8):
        graph = random_graph(seed)
        seeds, _ = random_seeds(graph, seed)
        batch = pyg_sampler(graph, [3, 2, 2], once=once, disjoint=disjoint).sample(seeds, epoch=0)
        blocks = build_hetero_blocks(batch)
        assert len(blocks) == 3
        for i, block in enumerate(blocks):
            hop = 2 - i
            counts = batch.num_nodes.values()
            assert block.num_src == tuple(sum(each[: hop + 2]) for each in counts)
            assert block.num_dst == tuple(sum(each[: hop + 1]) for each in counts)
            assert edges_of(block) == edges_in(batch, hops=(0 if once else hop, hop + 1))


@pytest.mark.parametrize("kind", ["induced", "bidirectional"])
def test_other_subgraphs_have_all_edges_in_each_block_but_the_last(kind):
    for seed in range(8):
        graph = random_graph(seed)
        seeds, _ = random_seeds(graph, seed)
        batch = pyg_sampler(graph, [3, 2, 2], subgraph_type=kind).sample(seeds, epoch=0)
        blocks = build_hetero_blocks(batch)
        assert edges_of(blocks[0]) == edges_of(blocks[1]) == edges_in(batch)
        bounds = {name: counts[0] for name, counts in batch.num_nodes.items()}
        assert edges_of(blocks[2]) == edges_in(batch, bounds=bounds)
        assert blocks[2].num_dst == tuple(bounds.values())
        assert blocks[1].num_src == blocks[0].num_dst == blocks[2].num_src


def test_destination_offsets_cover_all_edge_types():
    graph = random_graph(3)
    (block,) = build_full_hetero_blocks(graph, 1)
    degrees = [
        sum(graph.edges(block.metadata.edge_types[r]).indptr.diff() for r in relations)
        for relations in block.metadata.edge_types_in
        if relations
    ]
    assert torch.equal(block.destination_indptr.diff(), torch.cat(degrees))


def test_full_blocks_have_the_graph():
    graph = random_graph(3)
    blocks = build_full_hetero_blocks(graph, 3, targets=[graph.node_types[0]])
    expected = Counter()
    for each in graph.edge_types:
        pairs = graph.edges(each).edge_index().t().tolist()
        expected.update((each, s, d) for s, d in pairs)
    assert blocks[0] is blocks[1]
    assert edges_of(blocks[0]) == expected
    first = graph.node_types[0]
    assert edges_of(blocks[2]) == Counter({e: n for e, n in expected.items() if e[0][2] == first})
    assert sum(blocks[2].num_dst) == graph.nodes(first).num_nodes
    assert len({id(block) for block in build_full_hetero_blocks(graph, 3)}) == 1


@pytest.mark.parametrize("value", [10**6, -1])
def test_positions_out_of_range_are_errors(value):
    graph = random_graph(3)
    seeds, _ = random_seeds(graph, 3)
    batch = pyg_sampler(graph, [3]).sample(seeds, epoch=0)
    edge_type = next(each for each, own in batch.indices.items() if len(own) > 1)
    batch.indices[edge_type][1] = value
    with pytest.raises(ValueError, match=str(value)) as error:
        build_hetero_blocks(batch)
    assert str(edge_type) in str(error.value)
