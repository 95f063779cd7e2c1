"""`sample` equals its reference, and is uniform."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from bits import same_tensors
from scipy.stats import chi2, chi2_contingency

from gcnzc.kernels import sample as kernels_sample
from gcnzc.kernels.philox import philox4x32_reference, split_key
from gcnzc.kernels.sample import Workspace, cpu, sample, sample_reference

# from the seeds outward: few, more than are compared at once, all, none
FANOUTS = [[5], [3, 4, 2], [64, 65], [-1, 0, 7], [130, -1], [0], [1, 1, 1, 1], [127, 128]]


def graph_of_columns(columns):
    """CSC with these lists of sources."""
    ends = np.cumsum([0] + [len(column) for column in columns])
    indices = np.concatenate([np.asarray(column, np.int64) for column in columns])
    return torch.from_numpy(ends), torch.from_numpy(indices)


@pytest.fixture(scope="module")
def uneven():
    """500 nodes: degrees 0 to 40, one of 3000 and some around 64 and 128, loops and twins."""
    random = np.random.default_rng(0)
    degrees = random.integers(0, 40, 500)
    degrees[:9] = [3000, 0, 63, 64, 65, 66, 127, 128, 129]
    return graph_of_columns([random.integers(0, 500, degree) for degree in degrees])


def poisoned(length, dtype):
    return torch.full((length,), -7, dtype=dtype)


def assert_same(drawn, expected):
    assert drawn.num_nodes == expected.num_nodes
    if drawn.edge_ids is None:
        expected = replace(expected, edge_ids=None)
    assert same_tensors(drawn, expected)


@pytest.mark.parametrize("fanouts", FANOUTS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_equals_reference(fanouts, dtype, table, uneven):
    indptr, indices = uneven
    workspace = Workspace()
    for epoch, edge_ids, once in [(0, True, False), (2**32 - 1, False, False), (5, True, True)]:
        given = torch.randperm(500)[:30], fanouts, 2**64 - 3, epoch
        drawn = sample(
            indptr,
            indices.to(dtype),
            *given,
            edge_ids=edge_ids,
            workspace=workspace,
            empty=poisoned,
            once=once,
        )
        assert (drawn.edge_ids is not None) == edge_ids
        assert_same(drawn, sample_reference(indptr, indices, *given, once=once))


def test_fanouts_of_every_size_equal_the_reference(uneven, table):
    seeds = torch.arange(9)
    for fanout in [1, 62, 63, 64, 65, 66, 126, 127, 128, 129, 2999, 3000, 2**40]:
        assert_same(
            sample(*uneven, seeds, [fanout], 1, 0, edge_ids=True),
            sample_reference(*uneven, seeds, [fanout], 1, 0),
        )


def test_a_sample_may_have_no_seeds(uneven, table):
    drawn = sample(*uneven, torch.empty(0, dtype=torch.int64), [3, 2], 0, 0)
    assert_same(drawn, sample_reference(*uneven, torch.empty(0, dtype=torch.int64), [3, 2], 0, 0))
    assert drawn.num_nodes == (0, 0, 0)
    assert drawn.nodes.shape == drawn.indices[0].shape == (0,)


def test_nodes_without_neighbours_have_no_edges(table):
    indptr, indices = graph_of_columns([[], [], [0]])
    drawn = sample(indptr, indices, torch.tensor([1, 2, 0]), [4, 4], 0, 0)
    assert drawn.nodes.tolist() == [1, 2, 0]
    assert [block.tolist() for block in drawn.indptr] == [[0, 0, 1, 1]] * 2
    assert [block.tolist() for block in drawn.indices] == [[2]] * 2


def test_seeds_may_occur_twice(uneven, table):
    seeds = torch.tensor([40, 7, 40, 40, 9])
    drawn = sample(*uneven, seeds, [3, 2], 5, 0)
    assert_same(drawn, sample_reference(*uneven, seeds, [3, 2], 5, 0))
    assert drawn.nodes[:5].tolist() == seeds.tolist()
    rows = drawn.indices[0].tensor_split(drawn.indptr[0][1:-1])
    assert rows[0].tolist() == rows[2].tolist() == rows[3].tolist()
    # an edge from a node that occurs twice comes from its first place
    assert not set(torch.cat(drawn.indices).tolist()) & {2, 3}


def test_the_self_loops_of_a_seed_that_occurs_twice_are_its_own(table):
    graph = graph_of_columns([[0, 1, 0], [0], [2, 0]])
    seeds = torch.tensor([2, 0, 2, 0, 1])
    drawn = sample(*graph, seeds, [-1, -1], 5, 0)
    assert_same(drawn, sample_reference(*graph, seeds, [-1, -1], 5, 0))
    rows = [row.tolist() for row in drawn.indices[0].tensor_split(drawn.indptr[0][1:-1])]
    assert rows == [[0, 1], [1, 4, 1], [2, 1], [3, 4, 3], [1]]


def test_no_node_has_edges_at_two_hops():
    graph = graph_of_columns(np.random.default_rng(0).integers(0, 100, (100, 20)))
    seeds = torch.arange(5)
    drawn = sample(*graph, seeds, [3, 3, 3], 0, 0, once=True)
    degrees = torch.zeros(3, len(drawn.nodes), dtype=torch.int64)
    for hop, indptr in enumerate(drawn.indptr):
        degrees[hop, : len(indptr) - 1] = indptr.diff()
    assert bool(((degrees > 0).sum(0) <= 1).all())
    # the others draw again, and edges would come twice
    again = sample(*graph, seeds, [3, 3, 3], 0, 0)
    assert bool((again.indptr[1].diff()[:5] > 0).all())


def test_all_neighbours_stay_in_stored_order(uneven):
    indptr, indices = uneven
    drawn = sample(*uneven, torch.arange(500), [-1], 0, 0)
    assert torch.equal(drawn.nodes, torch.arange(500))
    assert torch.equal(drawn.indptr[0], indptr)
    assert torch.equal(drawn.indices[0].long(), indices)


def test_other_nodes_come_in_order_of_appearance():
    indptr, indices = graph_of_columns([[5, 4], [4, 3, 0], [1], [6], [0], [2], []])
    drawn = sample(indptr, indices, torch.tensor([1, 0]), [-1, -1], 0, 0)
    # 1 brings 4 and 3 (0 is a seed), 0 brings 5; then 3 brings 6, and 5 brings 2
    assert drawn.nodes.tolist() == [1, 0, 4, 3, 5, 6, 2]
    assert drawn.num_nodes == (2, 5, 7)


def test_sets_of_neighbours_are_uniform():
    # 20 sets of 3 of 6 neighbours, drawn for 40,000 nodes
    edges = sample(
        *graph_of_columns([[i] * 6 for i in range(40_000)]),
        torch.arange(40_000),
        [3],
        2,
        0,
        edge_ids=True,
    ).edge_ids[0]
    numbers = {chosen: i for i, chosen in enumerate(combinations(range(6), 3))}
    drawn = [numbers[tuple(row)] for row in np.sort(edges.numpy().reshape(-1, 3) % 6).tolist()]
    counts = np.bincount(drawn, minlength=20)
    statistic = ((counts - 2000) ** 2 / 2000).sum()
    assert 1e-3 < chi2.sf(statistic, 19) < 1 - 1e-3


@pytest.mark.parametrize("pair", ["hops", "epochs", "seeds", "neighbouring nodes"])
def test_choices_are_independent(pair):
    # which of 5 neighbours is kept first, here and there
    num = 20_000
    columns = graph_of_columns([[i] * 5 for i in range(num)])
    nodes = torch.arange(num)

    def first(hops, seed, epoch):
        drawn = sample(*columns, nodes, [1] * hops, seed, epoch, edge_ids=True)
        return drawn.edge_ids[hops - 1].numpy() % 5

    here = first(1, 0, 0)
    there = {
        "hops": lambda: first(2, 0, 0),
        "epochs": lambda: first(1, 0, 1),
        "seeds": lambda: first(1, 1, 0),
        "neighbouring nodes": lambda: np.roll(here, 1),
    }[pair]()
    table_of_pairs = np.bincount(5 * here + there, minlength=25).reshape(5, 5)
    assert 1e-3 < chi2_contingency(table_of_pairs).pvalue < 1 - 1e-3


def test_random_words_are_those_of_the_counter():
    # a column of 2**20 neighbours, of which the word of (draw, node, hop, epoch) picks one
    node, degree = 3, 2**20
    indptr = torch.tensor([0, 0, 0, 0, degree])
    indices = torch.full((degree,), node)
    drawn = sample(indptr, indices, torch.tensor([node]), [1, 6], 77, 11, edge_ids=True)
    words = [
        word
        for quad in range(2)
        for word in philox4x32_reference(quad, node, 1 << 16, 11, *split_key(77))
    ]
    positions = [int(word) * (degree - 6 + draw + 1) >> 32 for draw, word in enumerate(words[:6])]
    assert drawn.edge_ids[1].tolist() == positions


@pytest.mark.parametrize("fanout", [7, 64, 65, 100])
def test_node_ids_beyond_32_bits_are_supported(fanout):
    # the formula alone: a graph of so many nodes has offsets of 32 GB and more
    nodes = np.array([5, 2**31 + 5, 2**32 + 5, 2**47 + 5], np.int64)
    degrees, begins = np.full(4, 1000), np.array([0, 10, 20, 30])
    lot = cpu.CHUNK_DESTINATIONS
    words = np.empty((cpu.MAX_COMPARED, lot), np.uint32)
    low, high, drawn, clash = (np.empty(lot, np.uint32) for _ in range(4))
    scratch = low, high, drawn, words, clash
    positions, ends = np.empty(4 * fanout, np.int64), np.empty(4, np.int64)
    key, bits = np.array([*split_key(9), 4], np.uint64), np.zeros(16, np.uint64)
    cpu._sample_chunk(
        nodes, begins, degrees, 2, fanout, key, scratch, bits, begins, positions, ends
    )
    expected = [
        begin + np.array(kernels_sample._sample_positions(1000, fanout, node, 2, 9, 4))
        for begin, node in zip(begins, nodes.tolist(), strict=True)
    ]
    assert np.array_equal(positions.reshape(4, fanout), expected)
    assert not bits.any()
    # other nodes draw others, although the low halves are equal
    assert len({tuple(row) for row in positions.reshape(4, fanout) - begins[:, None]}) == 4


def test_ids_with_equal_low_halves_are_distinguished():
    sources = np.array([5, 2**32 + 5, 5, 2**33 + 5, 2**32 + 5, 0, 2**32], np.int64)
    nodes, places = np.zeros(16, np.int64), np.zeros(7, np.int32)
    count = cpu._relabel_hashed(sources, np.zeros(16, np.int64), 1, nodes, 0, places, True)
    assert places.tolist() == [0, 1, 0, 2, 1, 3, 4]
    assert nodes[:count].tolist() == [5, 2**32 + 5, 2**33 + 5, 0, 2**32]


def test_small_buffers_grow(uneven, table):
    seeds = torch.randperm(500)[:50]
    workspace = Workspace()
    workspace.capacity_indptr = workspace.capacity_nodes = workspace.capacity_edges = 1
    workspace.hash_table = np.zeros(2, np.int64)
    requests = []

    def empty(length, dtype):
        requests.append(length)
        return poisoned(length, dtype)

    drawn = sample(
        *uneven, seeds, [9, 8, 70], 3, 0, edge_ids=True, workspace=workspace, empty=empty
    )
    assert_same(drawn, sample_reference(*uneven, seeds, [9, 8, 70], 3, 0))
    assert len(requests) > 8
    requests.clear()
    sample(*uneven, seeds, [9, 8, 70], 3, 1, workspace=workspace, empty=empty)
    assert len(requests) == 4


def test_stamps_are_reset_before_they_overflow(uneven, table):
    seeds = torch.arange(100, 140)
    workspace = Workspace()
    sample(*uneven, seeds, [5, 5], 0, 0, workspace=workspace)
    bits = 31 if table == "direct" else 32
    workspace.base = 2**bits - 700
    for epoch in range(3):
        drawn = sample(*uneven, seeds, [5, 5], 0, epoch, workspace=workspace)
        assert_same(drawn, sample_reference(*uneven, seeds, [5, 5], 0, epoch))
    assert workspace.base < 2**bits - 700


def test_one_workspace_serves_graphs_with_hash_tables_and_direct_tables(uneven, monkeypatch):
    monkeypatch.setattr(kernels_sample, "DIRECT_NODES", 3)
    workspace = Workspace()
    small, seeds = graph_of_columns([[1, 2], [0], [0, 1]]), torch.arange(400)
    sample(*uneven, seeds, [5], 0, 0, workspace=workspace)
    assert len(workspace.direct_table) == 0
    sample(*small, torch.arange(2), [2], 0, 0, workspace=workspace)
    assert len(workspace.direct_table) == 3
    # other positions of the same nodes than in the first batch
    drawn = sample(*uneven, seeds.flip(0), [5], 0, 0, workspace=workspace)
    assert_same(drawn, sample_reference(*uneven, seeds.flip(0), [5], 0, 0))


def test_a_batch_of_too_many_nodes_is_rejected(uneven, table, monkeypatch):
    workspace = Workspace()
    with monkeypatch.context() as patch:
        patch.setattr(kernels_sample, "MAX_NODES", 100)
        with pytest.raises(ValueError, match="may reach more than 100 nodes"):
            sample(*uneven, torch.arange(9, 39), [5, -1], 0, 0, workspace=workspace)
    # what the failed batch numbered does not count in the next
    drawn = sample(*uneven, torch.arange(20), [5, -1], 0, 0, workspace=workspace)
    assert_same(drawn, sample_reference(*uneven, torch.arange(20), [5, -1], 0, 0))


@pytest.mark.parametrize("epoch", [-1, 2**32])
def test_an_epoch_out_of_range_is_rejected(uneven, epoch):
    with pytest.raises(ValueError, match="epoch"):
        sample(*uneven, torch.arange(9), [3], 0, epoch)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_neighbour_out_of_range_is_rejected_and_not_read(table, dtype):
    indptr = torch.arange(0, 3001, 3)
    for wrong in (1000, -1, 2**31 - 1, -(2**31)):
        indices = torch.arange(3000, dtype=dtype) % 1000
        indices[1234] = wrong
        workspace = Workspace()
        with pytest.raises(ValueError, match=rf"node 411 has the in-neighbours \[{wrong}\]"):
            sample(indptr, indices, torch.arange(1000), [3, 2], 0, 0, workspace=workspace)
        # the workspace is as good as new
        indices[1234] = 0
        seeds = torch.arange(50)
        again = sample(indptr, indices, seeds, [3, 2], 0, 0, workspace=workspace)
        fresh = sample(indptr, indices, seeds, [3, 2], 0, 0)
        assert torch.equal(again.nodes, fresh.nodes)


@pytest.mark.parametrize("wrong", [3001, -1, 2**62, -(2**63), 5])
def test_columns_out_of_range_are_rejected_and_not_read(wrong):
    indptr, indices = torch.arange(0, 3001, 3), torch.arange(3000) % 1000
    indptr[412] = wrong
    with pytest.raises(ValueError, match=rf"edges into node 41[12] are .*{wrong}(.|\n)*hint: "):
        sample(indptr, indices, torch.arange(1000), [-1], 0, 0)
