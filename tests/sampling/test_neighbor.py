"""A batch is the sampled neighbourhood of its seeds, and does not depend on threads."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from bits import same_tensors

from gcnzc.graph.graph import EDGE, Graph
from gcnzc.kernels.sample.reference import sample_reference
from gcnzc.sampling.batch import Block
from gcnzc.sampling.hetero import build_hetero_blocks
from gcnzc.sampling.neighbor import Sampler


@pytest.fixture(scope="module")
def graph():
    generator = torch.Generator().manual_seed(0)
    src = (torch.rand(30_000, generator=generator) ** 3 * 2000).long()
    dst = torch.randint(0, 2000, (30_000,), generator=generator)
    return Graph.from_edges(src, dst, 2000)


def test_a_batch_equals_the_reference_with_the_input_layer_first(graph):
    seeds = torch.tensor([7, 0, 1999])
    sampler = Sampler(graph, [4, 3, 2], seed=5)
    batch = sampler.sample(seeds, epoch=6)
    drawn = sample_reference(sampler._hops.graph, sampler._hops.options, [(0, seeds)], 6)
    assert batch.nodes.tolist() == drawn.nodes[0]
    assert torch.equal(batch.seeds, seeds)
    shapes = f"seeds=(3,), nodes=({len(batch.nodes)},)"
    assert repr(batch).startswith(f"Batch({shapes}, blocks=(Block(num_src={len(batch.nodes)}, num")
    assert batch.x is None
    assert batch.y is None
    assert batch.times["sample_s"] > 0
    for hop, block in enumerate(reversed(batch.blocks)):
        rows, cols, _ = zip(*drawn.edges[0][hop], strict=True)
        assert block.indices.tolist() == list(rows)
        targets = torch.arange(block.num_dst).repeat_interleave(block.indptr.diff())
        assert targets.tolist() == list(cols)
        assert [[block.num_dst], [block.num_src]] == drawn.num_nodes[hop : hop + 2]
        assert torch.equal(block.nodes, batch.nodes[: block.num_src])
        assert block.num_edges == len(block.indices)
        assert block.edge_ids is None
    assert batch.blocks[0].num_src == len(batch.nodes)
    assert batch.blocks[-1].num_dst == len(seeds)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_batches_do_not_depend_on_threads_or_order(graph, threads):
    order = torch.randperm(2000)
    asked = [(order[i : i + 100], epoch) for epoch in range(2) for i in range(0, 2000, 100)]
    expected = [Sampler(graph, [5, 10]).sample(*one) for one in asked]
    sampler = Sampler(graph, [5, 10])
    for turn in [slice(None), slice(None, None, -1)]:
        with ThreadPoolExecutor(threads) as pool:
            drawn = list(pool.map(lambda one: sampler.sample(*one), asked[turn]))
        for mine, theirs in zip(drawn, expected[turn], strict=True):
            assert same_tensors(mine, theirs)


def test_neighbours_of_a_node_do_not_depend_on_its_batch(graph):
    sampler = Sampler(graph, [3], edge_ids=True)
    alone = sampler.sample(torch.tensor([8]), 2).blocks[0].edge_ids
    block = sampler.sample(torch.tensor([5, 8, 9]), 2).blocks[0]
    assert torch.equal(block.edge_ids[block.indptr[1] : block.indptr[2]], alone)


def test_edge_ids_are_positions_in_the_graph(graph):
    batch = Sampler(graph, [4, -1], edge_ids=True).sample(torch.arange(50), 0)
    for block in batch.blocks:
        sources = block.nodes[block.indices.long()]
        assert torch.equal(graph.indices[block.edge_ids].long(), sources)


def test_in_degrees_are_those_of_the_graph(graph):
    block = Sampler(graph, [3, 2]).sample(torch.arange(20), 0).blocks[0]
    assert torch.equal(block.in_degrees, graph.in_degrees()[block.nodes])
    assert block.in_degrees is block.in_degrees


def test_a_block_without_a_graph_has_no_degrees():
    block = Block(torch.tensor([0, 0]), torch.empty(0, dtype=torch.int32), 1, 1, torch.tensor([4]))
    with pytest.raises(RuntimeError, match="has no graph"):
        _ = block.in_degrees


def test_blocks_can_be_moved_to_a_device(graph, device):
    block = Sampler(graph, [3], edge_ids=True).sample(torch.arange(20), 0).blocks[0]
    moved = block.to(device)
    assert {moved.indptr.device.type, moved.nodes.device.type, moved.device.type} == {device.type}
    assert moved.edge_ids.device.type == moved.in_degrees.device.type == device.type
    assert moved.graph is graph
    assert block.to("meta").indices.is_meta


@pytest.mark.parametrize("seed", [-1, 2000])
def test_a_seed_out_of_range_is_rejected(graph, seed):
    with pytest.raises(ValueError, match=r"2000 nodes\n\nhint: "):
        Sampler(graph, [2]).sample(torch.tensor([5, seed]), 0)


def test_excluded_edges_are_positions_in_the_graph(graph):
    sampler, seeds = Sampler(graph, [-1, -1], edge_ids=True), torch.arange(50)
    excluded = torch.randperm(graph.num_edges)[:20_000]
    met = torch.cat([block.edge_ids for block in sampler.sample(seeds, 0, exclude=excluded).blocks])
    assert not bool(torch.isin(met, excluded).any())
    met = sampler.sample(seeds, 0, exclude=excluded).blocks[-1].edge_ids
    every = sampler.sample(seeds, 0).blocks[-1].edge_ids
    assert torch.equal(met, every[~torch.isin(every, excluded)])
    with pytest.raises(ValueError, match=r"exclude are from 5 to 30000.*30000 edges"):
        sampler.sample(seeds, 0, exclude=[5, 30_000])


def test_a_copy_samples_the_same(graph):
    sampler = Sampler(graph, [4, 3], seed=5)
    copied = pickle.loads(pickle.dumps(sampler))
    assert copied.graph.nodes("node").features is None
    assert same_tensors(copied.sample(torch.arange(9), 1), sampler.sample(torch.arange(9), 1))


def test_a_pickled_minibatch_has_only_its_own_elements(graph):
    batch = Sampler(graph, [4, 3]).sample(torch.arange(9), 1)
    copied = pickle.loads(pickle.dumps(batch))
    assert same_tensors(copied.nodes, batch.nodes)
    for before, after in zip(batch.blocks, copied.blocks, strict=True):
        assert after.graph is None
        assert same_tensors(replace(after, degrees=None), replace(before, degrees=None))
        assert torch.equal(after.in_degrees, before.in_degrees)
    for own in (copied.nodes, copied.seeds, copied.blocks[1].nodes, copied.blocks[1].indptr):
        assert own.untyped_storage().nbytes() == own.nbytes


def test_a_graph_that_torch_moves_to_shared_memory_is_read_there():
    """As when it is sent to another process; the memory before is free."""
    graph = Graph.from_edges(torch.tensor([1, 2, 3, 4]), torch.tensor([0, 0, 0, 0]), 5)
    sampler = Sampler(graph, [-1])
    assert sampler.sample([0], 0).nodes.tolist() == [0, 1, 2, 3, 4]
    graph.indptr.share_memory_()
    graph.indices.share_memory_().fill_(4)
    assert sampler.sample([0], 0).nodes.tolist() == [0, 4]


@pytest.mark.parametrize("edge_ids", [False, True])
def test_bidirectional_subgraphs_have_both_directions_in_all_formats(edge_ids, graph):
    sampler = Sampler(graph, [2, 2], edge_ids=edge_ids, subgraph_type="bidirectional")
    batch = sampler.sample({"node": [4, 5]}, 0)
    row, col = batch.edge_index(EDGE)
    indptr, indices = batch.csc(EDGE)
    assert torch.equal(indices.long(), row)
    assert torch.equal(torch.repeat_interleave(indptr.diff()), col)
    pairs = set(zip(row.tolist(), col.tolist(), strict=True))
    assert pairs == {pair[::-1] for pair in pairs}
    assert build_hetero_blocks(batch)[0].num_edges == len(row)


def test_excluded_edges_by_type_are_a_dict(graph):
    with pytest.raises(TypeError, match="exclude"):
        Sampler(graph, [2]).sample({"node": [4]}, 0, exclude=torch.tensor([0]))
