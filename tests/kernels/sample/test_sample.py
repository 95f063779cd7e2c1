"""`HopSampler` equals its reference, and is uniform."""

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from scipy.stats import chi2, chi2_contingency

from gcnzc.kernels import sample as kernels_sample
from gcnzc.kernels.philox import philox4x32_reference, split_key
from gcnzc.kernels.sample import LIMITS, HopSampler, Options, Workspace, choose, hops, layout
from gcnzc.kernels.sample import graph as sample_graph
from gcnzc.kernels.sample.graph import GraphTables, Relation
from gcnzc.kernels.sample.reference import sample_reference

# from the seeds outward: few, more than are compared at once, all, none
FANOUTS = [[5], [3, 4, 2], [64, 65], [-1, 0, 7], [130, -1], [0], [1, 1, 1, 1], [127, 128]]
NUM_NODES = [700, 300]


def one_type_tables(indptr, indices, seed):
    """The tables of a graph without types."""
    return GraphTables([len(indptr) - 1], [Relation(0, 0, indptr, indices, split_key(seed))])


def graph_of_columns(columns, seed=0):
    """A graph of one type with these lists of sources."""
    ends = np.cumsum([0] + [len(column) for column in columns])
    indices = np.concatenate([np.asarray(column, np.int64) for column in columns])
    return one_type_tables(torch.from_numpy(ends), torch.from_numpy(indices), seed)


@pytest.fixture(scope="module")
def uneven():
    """500 nodes: degrees 0 to 40, one of 3000 and some around 64 and 128, loops and twins."""
    random = np.random.default_rng(0)
    degrees = random.integers(0, 40, 500)
    degrees[:9] = [3000, 0, 63, 64, 65, 66, 127, 128, 129]
    return graph_of_columns([random.integers(0, 500, degree) for degree in degrees], 2**64 - 3)


@pytest.fixture(scope="module")
def typed():
    """Columns of 0 to 60 edges with times and weights, and some longer than fanouts' bitmaps."""
    random = np.random.default_rng(0)
    found = []
    for src, dst in ((0, 1), (1, 0), (0, 0)):
        degrees = random.integers(0, 60, NUM_NODES[dst])
        degrees[:8] = [0, 63, 64, 65, 66, 130, 131, 900]
        indptr = np.concatenate([[0], degrees.cumsum()])
        num_edges = int(indptr[-1])
        indices = random.integers(0, NUM_NODES[src], num_edges).astype(np.int32)
        times = np.concatenate([np.sort(random.integers(0, 50, count)) for count in degrees])
        weights = (random.random(num_edges) * random.integers(0, 2, num_edges)).astype(np.float32)
        arrays = (indptr, indices, random.permutation(num_edges), times, weights)
        indptr, indices, edge_ids, times, weights = map(torch.from_numpy, arrays)
        key = (11 + src, 5 + dst)
        found.append(Relation(src, dst, indptr, indices, key, edge_ids, times, None, weights))
    return GraphTables(NUM_NODES, found, [(1, 2), (3, 4)])


def without_weights(graph):
    relations = [replace(each, weight=None) for each in graph.relations]
    return GraphTables(graph.num_nodes, relations, graph.type_keys)


def poisoned(length, dtype):
    return torch.full((length,), -7, dtype=dtype)


def one_type(fanouts, **options):
    return Options(tuple((fanout,) for fanout in fanouts), own_loops=True, **options)


def columns_of(sampled, r, dst):
    """The column of each edge, from the offsets of one or several hops."""
    ends = [len(sampled.indptr[r])]
    if not sampled.is_prefix:
        ends = np.cumsum([own[dst] + 1 for own in sampled.num_nodes[:-1]]).tolist()
    parts = [sampled.indptr[r][begin:end] for begin, end in pairwise([0, *ends])]
    assert all(int(part[0]) == 0 for part in parts)
    return [c for p in parts for c in torch.arange(len(p) - 1).repeat_interleave(p.diff()).tolist()]


def assert_same(drawn, expected, graph, options):
    assert drawn.num_nodes == expected.num_nodes
    assert [own.tolist() for own in drawn.nodes] == expected.nodes
    if options.disjoint:
        assert [own.tolist() for own in drawn.subgraphs] == expected.subgraphs
    for r, by_hop in enumerate(expected.edges):
        edges = [edge for own in by_hop for edge in own]
        ends = np.cumsum([0, *map(len, by_hop)]).tolist()
        assert [own[r] for own in drawn.num_edges] == ends
        assert drawn.indices[r].tolist() == [row for row, _, _ in edges]
        assert columns_of(drawn, r, graph.relations[r].dst) == [col for _, col, _ in edges]
        if options.edge_ids:
            assert drawn.edge_ids[r].tolist() == [edge for _, _, edge in edges]


def check(graph, options, seeds, epoch=1, times=None, excluded=None, sampler=None):
    """Check that a sample equals the reference, and return it."""
    if isinstance(seeds, torch.Tensor):
        seeds = [(0, seeds)]
    drawn = (sampler or HopSampler(graph, options)).sample(
        seeds, epoch, seed_times=times, excluded=excluded, empty=poisoned
    )
    expected = sample_reference(
        graph,
        options,
        [(t, ids.tolist()) for t, ids in seeds],
        epoch,
        () if times is None else times.tolist(),
        {r: set(positions.tolist()) for r, positions in (excluded or {}).items()},
    )
    assert_same(drawn, expected, graph, options)
    return drawn


@pytest.mark.parametrize("fanouts", FANOUTS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_equals_reference(fanouts, dtype, table, uneven):
    relation = uneven.relations[0]
    graph = GraphTables([500], [replace(relation, indices=relation.indices.to(dtype))])
    for once, edge_ids in [(False, True), (True, False)]:
        options = one_type(fanouts, once=once, edge_ids=edge_ids)
        sampler = HopSampler(graph, options)
        for epoch in (0, 2**32 - 1):
            check(graph, options, torch.randperm(500)[:30], epoch, sampler=sampler)


def test_fanouts_of_every_size_equal_the_reference(uneven, table):
    for fanout in [1, 62, 63, 64, 65, 66, 126, 127, 128, 129, 2999, 3000, 2**40]:
        check(uneven, one_type([fanout]), torch.arange(9))


@pytest.mark.parametrize(
    "fanouts", [((64, 64, 0),), ((65, 3, 2), (2, 130, 1)), ((-1, -1, 3), (1, 0, -1))]
)
@pytest.mark.parametrize("replace_", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_several_types_equal_the_reference(typed, fanouts, replace_, weighted, table):
    graph = typed if weighted else without_weights(typed)
    seeds = [(1, torch.arange(300)), (0, torch.arange(0, 700, 7))]
    drawn = check(graph, Options(fanouts, replace=replace_), seeds)
    assert sum(map(len, drawn.indices)) > 4096


@pytest.mark.parametrize("temporal", ["uniform", "last"])
@pytest.mark.parametrize("weighted", [False, True])
def test_long_columns_with_times(typed, temporal, weighted):
    graph = typed if weighted else without_weights(typed)
    options = Options(((66, 66, 2), (3, 3, 1)), temporal=temporal, disjoint=True)
    check(graph, options, [(1, torch.arange(12))], times=torch.arange(12) * 5)


@pytest.fixture(scope="module", params=["some", "few", "all of a column"])
def excluded(typed, request):
    random = np.random.default_rng(2)
    found = {}
    for r, relation in enumerate(
        typed.relations[:1] if request.param == "few" else typed.relations
    ):
        share = 0.02 if request.param == "few" else 0.4
        is_excluded = random.random(len(relation.indices)) < share
        if request.param == "all of a column":
            is_excluded[: int(relation.indptr[5])] = True
        found[r] = torch.from_numpy(np.flatnonzero(is_excluded))
    return found


@pytest.mark.parametrize(
    "fanouts", [((5, 64, 2),), ((3, 3, 3), (130, 2, 0)), ((-1, -1, 2), (1, 0, -1))]
)
@pytest.mark.parametrize("replace_", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_excluded_edges_are_as_if_they_did_not_exist(typed, excluded, fanouts, replace_, weighted):
    graph = typed if weighted else without_weights(typed)
    seeds = [(1, torch.arange(0, 300, 5)), (0, torch.arange(0, 700, 70))]
    options = Options(fanouts, replace=replace_, once=False)
    drawn = check(graph, options, seeds, excluded=excluded)
    for r, positions in excluded.items():
        ids = graph.relations[r].edge_ids[positions]
        assert not bool(torch.isin(drawn.edge_ids[r], ids).any())


@pytest.mark.parametrize("temporal", ["uniform", "last"])
@pytest.mark.parametrize("induced", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_excluded_edges_with_times_and_induced_subgraphs(
    typed, excluded, temporal, induced, weighted
):
    graph = typed if weighted else without_weights(typed)
    options = Options(((6, 66, 1), (3, 3, 2)), temporal=temporal, disjoint=True, induced=induced)
    seeds, times = [(1, torch.arange(12))], torch.arange(12) * 5
    check(graph, options, seeds, times=times, excluded=excluded)


@pytest.mark.parametrize("disjoint", [False, True])
def test_induced_subgraphs_have_all_edges_among_the_nodes(typed, disjoint, table):
    options = Options(((2, 2, 1), (1, 1, 1)), disjoint=disjoint, induced=True)
    check(without_weights(typed), options, [(0, torch.arange(40)), (1, torch.arange(9))])


def test_one_sampler_serves_batches_of_any_size(typed, table):
    graph = without_weights(typed)
    random = np.random.default_rng(1)
    for disjoint in (False, True):
        options = Options(((4, 5, 1), (3, 2, 1)), disjoint=disjoint)
        sampler = HopSampler(graph, options)
        for epoch, count in enumerate((1, 250, 3, 0, 120)):
            seeds = [(1, torch.from_numpy(random.integers(0, 300, count)))]
            check(graph, options, seeds, epoch, sampler=sampler)
        assert len(sampler._idle) == 1


def test_a_sample_may_have_no_seeds(uneven, table):
    drawn = check(uneven, one_type([3, 2]), torch.empty(0, dtype=torch.int64))
    assert drawn.num_nodes == [[0], [0], [0]]
    assert drawn.nodes[0].shape == drawn.indices[0].shape == (0,)


def test_nodes_without_neighbours_have_no_edges(table):
    graph = graph_of_columns([[], [], [0]])
    drawn = check(graph, one_type([4, 4], once=False), torch.tensor([1, 2, 0]))
    assert drawn.nodes[0].tolist() == [1, 2, 0]
    assert drawn.indptr[0].tolist() == [0, 0, 1, 1] * 2
    assert drawn.indices[0].tolist() == [2] * 2


def test_seeds_may_occur_twice(uneven, table):
    seeds = torch.tensor([40, 7, 40, 40, 9])
    drawn = check(uneven, one_type([3, 2], once=False), seeds)
    assert drawn.nodes[0][:5].tolist() == seeds.tolist()
    num_edges = drawn.num_edges[1][0]
    rows = drawn.indices[0][:num_edges].tensor_split(drawn.indptr[0][1:5])
    assert rows[0].tolist() == rows[2].tolist() == rows[3].tolist()
    # an edge from a node that occurs twice comes from its first place
    assert not set(drawn.indices[0].tolist()) & {2, 3}


@pytest.mark.parametrize("own_loops", [True, False])
def test_the_self_loops_of_a_seed_that_occurs_twice_are_its_own(table, own_loops):
    graph = graph_of_columns([[0, 1, 0], [0], [2, 0]])
    options = replace(one_type([-1]), own_loops=own_loops)
    drawn = check(graph, options, torch.tensor([2, 0, 2, 0, 1]))
    rows = [row.tolist() for row in drawn.indices[0].tensor_split(drawn.indptr[0][1:-1])]
    own = [[0, 1], [1, 4, 1], [2, 1], [3, 4, 3], [1]]
    assert rows == (own if own_loops else [[0, 1], [1, 4, 1], [0, 1], [1, 4, 1], [1]])


def test_no_node_has_edges_at_two_hops():
    graph = graph_of_columns(np.random.default_rng(0).integers(0, 100, (100, 20)))
    drawn = check(graph, one_type([3, 3, 3]), torch.arange(5))
    assert bool((drawn.indptr[0].diff() <= 3).all())
    # the others draw again, and edges come twice
    again = check(graph, one_type([3, 3, 3], once=False), torch.arange(5))
    assert bool((again.indptr[0][6:12].diff() > 0).all())


def test_all_neighbours_stay_in_stored_order(uneven):
    drawn = check(uneven, one_type([-1]), torch.arange(500))
    assert torch.equal(drawn.nodes[0], torch.arange(500))
    assert torch.equal(drawn.indptr[0], uneven.relations[0].indptr)
    assert torch.equal(drawn.indices[0].long(), uneven.relations[0].indices)


def test_other_nodes_come_in_order_of_appearance():
    graph = graph_of_columns([[5, 4], [4, 3, 0], [1], [6], [0], [2], []])
    drawn = check(graph, one_type([-1, -1]), torch.tensor([1, 0]))
    # 1 brings 4 and 3 (0 is a seed), 0 brings 5; then 3 brings 6, and 5 brings 2
    assert drawn.nodes[0].tolist() == [1, 0, 4, 3, 5, 6, 2]
    assert drawn.num_nodes == [[2], [5], [7]]


def test_sets_of_neighbours_are_uniform():
    # 20 sets of 3 of 6 neighbours, drawn for 40,000 nodes
    graph = graph_of_columns([[i] * 6 for i in range(40_000)], 2)
    drawn = HopSampler(graph, one_type([3])).sample([(0, torch.arange(40_000))], 0)
    numbers = {chosen: i for i, chosen in enumerate(combinations(range(6), 3))}
    rows = np.sort(drawn.edge_ids[0].numpy().reshape(-1, 3) % 6).tolist()
    counts = np.bincount([numbers[tuple(row)] for row in rows], minlength=20)
    statistic = ((counts - 2000) ** 2 / 2000).sum()
    assert 1e-3 < chi2.sf(statistic, 19) < 1 - 1e-3


@pytest.mark.parametrize("pair", ["hops", "epochs", "seeds", "neighbouring nodes"])
def test_choices_are_independent(pair):
    # which of 5 neighbours is kept first, here and there
    num = 20_000

    def first(num_hops, seed, epoch):
        graph = graph_of_columns([[i] * 5 for i in range(num)], seed)
        options = one_type([1] * num_hops, once=False)
        drawn = HopSampler(graph, options).sample([(0, torch.arange(num))], epoch)
        return drawn.edge_ids[0][-num:].numpy() % 5

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
    graph = one_type_tables(indptr, torch.full((degree,), node), 77)
    options = one_type([1, 6], once=False)
    drawn = HopSampler(graph, options).sample([(0, torch.tensor([node]))], 11)
    words = [
        word
        for quad in range(2)
        for word in philox4x32_reference(quad, node, 1 << 16, 11, *split_key(77))
    ]
    positions = [int(word) * (degree - 6 + draw + 1) >> 32 for draw, word in enumerate(words[:6])]
    assert drawn.edge_ids[0][1:].tolist() == positions


@pytest.mark.parametrize("fanout", [7, 64, 65, 100])
@pytest.mark.parametrize("is_disjoint", [False, True])
def test_node_ids_beyond_32_bits_are_supported(fanout, is_disjoint):
    # the formula alone: a graph of so many nodes has offsets of 32 GB and more
    nodes = np.array([5, 2**31 + 5, 2**32 + 5, 2**47 + 5], np.int64)
    degrees, begins = np.full(4, 1000), np.array([0, 10, 20, 30])
    positions, ends = np.empty(4 * fanout, np.int64), np.empty(4, np.int64)
    options = np.zeros(layout.NUM_OPTIONS, np.int64)
    options[layout.EPOCH] = 4
    relation = np.zeros(layout.NUM_RELATION_COLUMNS, np.int64)
    relation[[layout.KEY_0, layout.KEY_1]] = split_key(9)
    trees = np.zeros(4 if is_disjoint else 0, np.int64)
    bits = np.zeros(16, np.uint64)
    choose.sample_chunk(
        *(nodes, begins, degrees, trees, np.zeros((1, 2), np.int64), 2, fanout, options, relation),
        *(choose.new_scratch(is_disjoint), bits, positions, ends),
    )
    assert not bits.any()
    chosen = positions.reshape(4, fanout) - begins[:, None]
    for node, own in zip(nodes.tolist(), chosen.tolist(), strict=True):
        counter = (np.arange((fanout + 3) // 4), node & 0xFFFFFFFF, (node >> 32) | (2 << 16), 4)
        words = np.stack(philox4x32_reference(*counter, *split_key(9)), axis=1).ravel().tolist()
        expected = []
        for word, last in zip(words, range(1000 - fanout, 1000), strict=False):
            position = word * (last + 1) >> 32
            expected.append(last if position in expected else position)
        assert own == expected
    # other nodes draw others, although the low halves are equal
    assert len(set(map(tuple, chosen))) == 4


def test_ids_with_equal_low_halves_are_distinguished():
    sources = np.array([5, 2**32 + 5, 5, 2**33 + 5, 2**32 + 5, 0, 2**32], np.int64)
    nodes, places, none = np.zeros(16, np.int64), np.zeros(7, np.int32), np.zeros(0, np.int64)
    count = hops._relabel_wide(
        *(sources, np.zeros((16, 2), np.int64), 0, 2**34, 1, nodes, none, 0, places),
        *(np.array([7]), 1, none),
    )
    assert places.tolist() == [0, 1, 0, 2, 1, 3, 4]
    assert nodes[:count].tolist() == [5, 2**32 + 5, 2**33 + 5, 0, 2**32]


def test_small_regions_grow(uneven, table):
    options, requests = one_type([9, 8, 70]), []
    sampler = HopSampler(uneven, options)
    seeds = [(0, torch.randperm(500)[:50])]

    def empty(length, dtype):
        requests.append(length)
        return poisoned(length, dtype)

    sampler.sample(seeds, 0, empty=empty)
    assert len(requests) > 10
    requests.clear()
    sampler.sample(seeds, 1, empty=empty)
    assert len(requests) == 3


def test_stamps_are_reset_before_they_overflow(uneven, table):
    options = one_type([5, 5])
    sampler = HopSampler(uneven, options)
    seeds = torch.arange(100, 140)
    check(uneven, options, seeds, sampler=sampler)
    (workspace,) = sampler._idle
    assert workspace.end == {"direct": 2**31, "hashed": 2**32, "wide": 2**62}[table]
    workspace.base = workspace.end - 700
    for epoch in range(3):
        check(uneven, options, seeds, epoch, sampler=sampler)
    assert workspace.base < workspace.end - 700


@pytest.mark.parametrize("region", [layout.NEED_NODES, layout.NEED_EDGES])
def test_a_batch_of_too_many_nodes_or_edges_is_rejected(region, uneven, table, monkeypatch):
    options = one_type([5, -1])
    sampler = HopSampler(uneven, options)
    with monkeypatch.context() as patch:
        patch.setitem(LIMITS, region, 101)
        with pytest.raises(ValueError, match="30 seeds may reach more than 2147483647 nodes"):
            sampler.sample([(0, torch.arange(9, 39))], 0)
    check(uneven, options, torch.arange(20), sampler=sampler)


def test_wrong_options_are_errors(typed):
    seeds = [(1, torch.arange(2))]
    for epoch in (-1, 2**32):
        with pytest.raises(ValueError, match=f"epoch {epoch} is outside"):
            HopSampler(typed, Options(((1, 1, 1),))).sample(seeds, epoch)
    options = Options(((1, 1, 1),), temporal="last", disjoint=True)
    with pytest.raises(ValueError, match="without disjoint subgraphs or their times"):
        HopSampler(typed, options).sample(seeds, 0)


def test_a_degree_beyond_32_bits_is_rejected(monkeypatch):
    monkeypatch.setattr(sample_graph, "MAX_DEGREE", 3)
    graph_of_columns([[0, 0, 0], [0, 0]])
    with pytest.raises(ValueError, match="a node has more than 3 in-edges"):
        graph_of_columns([[0, 0, 0, 0], [0]])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("induced", [False, True])
def test_a_neighbour_out_of_range_is_rejected_and_not_read(table, dtype, induced):
    indptr = torch.arange(0, 3001, 3)
    for wrong in (1000, -1, 2**31 - 1, -(2**31)):
        indices = torch.arange(3000, dtype=dtype) % 1000
        graph = one_type_tables(indptr, indices, 0)
        sampler = HopSampler(graph, one_type([0 if induced else 3, 2], induced=induced))
        fresh = sampler.sample([(0, torch.arange(50))], 0)
        indices[1234] = wrong
        with pytest.raises(ValueError, match=rf"node 411 has the in-neighbours \[{wrong}\]"):
            sampler.sample([(0, torch.arange(1000))], 0)
        indices[1234] = 1234 % 1000
        again = sampler.sample([(0, torch.arange(50))], 0)
        assert torch.equal(again.nodes[0], fresh.nodes[0])


@pytest.mark.parametrize("wrong", [3001, -1, 2**62, -(2**63), 5])
@pytest.mark.parametrize("induced", [False, True])
def test_columns_out_of_range_are_rejected_and_not_read(wrong, induced):
    indptr, indices = torch.arange(0, 3001, 3), torch.arange(3000) % 1000
    graph = one_type_tables(indptr, indices, 0)
    indptr[412] = wrong
    options = one_type([0 if induced else -1], induced=induced)
    with pytest.raises(ValueError, match=rf"edges into node 41[12] are .*{wrong}(.|\n)*hint: "):
        HopSampler(graph, options).sample([(0, torch.arange(1000))], 0)


def test_regions_of_all_types_are_apart(typed):
    workspace = Workspace(typed, True)
    workspace.set_capacities(np.array([1, 17]), np.array([5, 0, 3]), np.array([16, 1, 33]))
    assert workspace.sizes == [16 + 32, 16 + 0 + 16, 16 + 16 + 48]
    assert workspace.first == [
        [0, 16],
        [48, 64, 64],
        [0, 16, 32],
    ]
    assert kernels_sample.LINE_ELEMENTS == 16
