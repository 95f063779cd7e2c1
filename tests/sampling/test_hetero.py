"""Sampling in heterogeneous graphs: equal to the reference, uniform, and without later edges."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hetero_graphs import pyg_sampler
from scipy.stats import chi2

import gcnzc
from gcnzc.graph import EdgeStore, Graph
from gcnzc.kernels import sample as kernels_sample
from gcnzc.kernels.sample.reference import sample_reference
from gcnzc.sampling import LinkSampler, build_full_hetero_blocks
from tests.hetero_graphs import assert_equal, random_graph, random_seeds

FANOUTS = (-1, 0, 1, 2, 3, 5, 70)


def random_options(random, times, weights):
    temporal = None if times == "none" else [None, "uniform", "last"][random.integers(3)]
    return {
        "seed": int(random.integers(0, 2**62)),
        "replace": bool(random.random() < 0.4),
        "weighted": weights,
        "disjoint": bool(random.random() < 0.4),
        "temporal": temporal,
        "once": bool(random.random() < 0.7),
        "subgraph_type": "induced" if random.random() < 0.3 else "directional",
        "edge_ids": bool(random.random() < 0.7),
    }


@pytest.fixture(params=["direct", "hashed"])
def table(request, monkeypatch):
    if request.param == "hashed":
        monkeypatch.setattr(kernels_sample, "DIRECT_NODES", 0)


@pytest.mark.parametrize("times", ["none", "node", "edge", "both"])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.usefixtures("table")
def test_equals_the_reference(times, weights):
    random = np.random.default_rng([len(times), weights])
    num_edges = 0
    for trial in range(5):
        graph = random_graph(trial, times=times, weights=weights)
        if not any(graph.edges(each).num_edges for each in graph.edge_types):
            continue
        num_hops = int(random.integers(1, 4))
        fanouts = {each: random.choice(FANOUTS, num_hops).tolist() for each in graph.edge_types}
        options = random_options(random, times, weights)
        sampler = pyg_sampler(graph, fanouts, **options)
        for epoch in (0, 2**32 - 1):
            seeds, seed_times = random_seeds(graph, trial + epoch)
            seed_times = seed_times if options["temporal"] else None
            drawn = sampler.sample(seeds, epoch, seed_times)
            numbers = graph.node_types
            expected = sample_reference(
                sampler._hops.graph,
                sampler.options,
                [(numbers.index(name), ids) for name, ids in seeds.items()],
                epoch,
                () if seed_times is None else seed_times.tolist(),
            )
            assert_equals_reference(drawn, expected, graph)
            num_edges += sum(map(len, drawn.row.values()))
    assert num_edges > 200


def assert_equals_reference(batch, expected, graph):
    for t, name in enumerate(graph.node_types):
        assert batch.nodes[name].tolist() == expected.nodes[t]
        counts = np.cumsum(batch.num_nodes[name]).tolist()
        assert counts == [own[t] for own in expected.num_nodes]
        if batch.subgraphs is not None:
            assert batch.subgraphs[name].tolist() == expected.subgraphs[t]
    for by_hop, each in zip(expected.edges, graph.edge_types, strict=True):
        edges = [edge for own in by_hop for edge in own]
        assert batch.row[each].tolist() == [row for row, _, _ in edges]
        assert batch.col[each].tolist() == [col for _, col, _ in edges]
        if batch.edge_ids is not None:
            assert batch.edge_ids[each].tolist() == [edge for _, _, edge in edges]
        if batch.num_edges is not None:
            assert list(batch.num_edges[each]) == [len(own) for own in by_hop]


def reachable(graph, batch):
    """Check that each edge of a directional minibatch exists, by its id, between its nodes."""
    for edge_type in graph.edge_types:
        index = graph.edges(edge_type).edge_index()[:, batch.edge_ids[edge_type]]
        assert torch.equal(batch.nodes[edge_type[0]][batch.row[edge_type]], index[0])
        assert torch.equal(batch.nodes[edge_type[2]][batch.col[edge_type]], index[1])
        if batch.subgraphs is not None:
            trees = batch.subgraphs
            assert torch.equal(
                trees[edge_type[0]][batch.row[edge_type]],
                trees[edge_type[2]][batch.col[edge_type]],
            )


@pytest.mark.parametrize("disjoint", [False, True])
def test_edges_counts_and_order_follow_pyg(disjoint):
    for trial in range(20):
        graph = random_graph(trial, edges=80)
        sampler = pyg_sampler(graph, [3, 2], disjoint=disjoint)
        seeds, _ = random_seeds(graph, trial, count=4)
        seeds = {name: ids.unique() for name, ids in seeds.items()}
        batch = sampler.sample(seeds, trial)
        reachable(graph, batch)
        ends = {name: np.cumsum(counts) for name, counts in batch.num_nodes.items()}
        for name, ids in batch.nodes.items():
            assert ends[name][-1] == len(ids)
            assert torch.equal(ids[: ends[name][0]], seeds.get(name, torch.empty(0)))
            pairs = ids if not disjoint else ids + 1000 * batch.subgraphs[name]
            assert len(pairs.unique()) == len(pairs)
        for edge_type in graph.edge_types:
            source, _, target = edge_type
            degrees = graph.edges(edge_type).indptr.diff()[batch.nodes[target]]
            cuts = np.cumsum([0, *batch.num_edges[edge_type]])
            assert cuts[-1] == len(batch.row[edge_type])
            for hop, (begin, end) in enumerate(itertools.pairwise(cuts)):
                # destinations are the nodes that the hop before found
                first = ends[target][hop - 1] if hop else 0
                own = torch.bincount(batch.col[edge_type][begin:end], minlength=len(degrees))
                expected = degrees.clamp(max=[3, 2][hop])
                expected[:first] = expected[ends[target][hop] :] = 0
                assert torch.equal(own, expected)
                assert bool((batch.row[edge_type][begin:end] < ends[source][hop + 1]).all())


def test_disjoint_subgraphs_are_those_of_single_seeds():
    graph = random_graph(5, num_types=2, edges=80)
    sampler = pyg_sampler(graph, [3, 2], disjoint=True)
    name = graph.node_types[0]
    seeds = torch.arange(graph.nodes(name).num_nodes)
    together = sampler.sample((name, seeds), 3)
    for number in range(len(seeds)):
        alone = sampler.sample((name, seeds[number : number + 1]), 3)
        for each, ids in alone.nodes.items():
            mine = together.nodes[each][together.subgraphs[each] == number]
            assert torch.equal(mine.sort().values, ids.sort().values)
        for each, ids in alone.edge_ids.items():
            mask = together.subgraphs[each[2]][together.col[each]] == number
            assert torch.equal(together.edge_ids[each][mask].sort().values, ids.sort().values)


def test_seeds_of_several_types_are_numbered_in_their_order():
    graph = random_graph(3, num_types=3)
    batch = pyg_sampler(graph, [2], disjoint=True).sample({"t2": [0], "t0": [0, 0]}, 0)
    assert batch.subgraphs["t2"][:1].tolist() == [0]
    assert batch.subgraphs["t0"][:2].tolist() == [1, 2]
    assert batch.num_nodes["t1"][0] == 0
    assert repr(batch).startswith("HeteroBatch(nodes: t0=")


@pytest.mark.parametrize(
    ("replace", "weighted"), [(False, False), (True, False), (True, True), (False, True)]
)
def test_choices_are_uniform_or_proportional_to_weights(replace, weighted):
    degrees, fanout, rounds = {"a": 7, "b": 12}, 3, 5000
    # many destinations with the same in-edges
    edges = {
        (name, "r", "x"): {
            "edge_index": [np.tile(np.arange(count), rounds), np.arange(rounds).repeat(count)],
            "weight": np.tile(np.arange(count) % 3, rounds),
        }
        for name, count in degrees.items()
    }
    graph = Graph.from_arrays(degrees | {"x": rounds}, edges)
    sampler = pyg_sampler(graph, [fanout], replace=replace, weighted=weighted)
    batch = sampler.sample(("x", range(rounds)), 0)
    counts = {
        name: np.bincount(batch.nodes[name][batch.row[name, "r", "x"]], minlength=count)
        for name, count in degrees.items()
    }
    for name, count in degrees.items():
        weights = np.arange(count) % 3 if weighted else np.ones(count)
        expected = rounds * inclusion(weights, fanout, replace)
        assert not counts[name][expected == 0].any()
        kept = expected > 0
        error = (counts[name][kept] - expected[kept]) ** 2 / expected[kept]
        # without replacement, the variance of the counts is smaller
        assert error.sum() < chi2.isf(1e-6, kept.sum() - 1)
        assert counts[name].sum() == rounds * fanout


def inclusion(weights, fanout, replace):
    """The expected number of times that each edge is drawn, one after another."""
    if replace:
        return fanout * weights / weights.sum()
    total = np.zeros(len(weights))
    for order in itertools.permutations(np.flatnonzero(weights), fanout):
        chance, rest = 1.0, weights.sum()
        for edge in order:
            chance, rest = chance * weights[edge] / rest, rest - weights[edge]
        total[list(order)] += chance
    return total


@pytest.mark.parametrize("times", ["node", "edge", "both"])
@pytest.mark.parametrize("temporal", ["uniform", "last"])
@pytest.mark.parametrize("subgraph_type", ["directional", "induced", "bidirectional"])
def test_nothing_is_later_than_the_seed(times, temporal, subgraph_type):
    for trial in range(5):
        graph = random_graph(trial, times=times, edges=80)
        sampler = pyg_sampler(
            graph, [3, 3], temporal=temporal, subgraph_type=subgraph_type, replace=trial % 2 == 0
        )
        seeds, seed_times = random_seeds(graph, trial)
        batch = sampler.sample(seeds, 0, seed_times)
        for edge_type in graph.edge_types:
            time = seed_times[batch.subgraphs[edge_type[2]][batch.col[edge_type]]]
            store, source = graph.edges(edge_type), graph.nodes(edge_type[0])
            if source.time is not None and subgraph_type != "bidirectional":
                own = source.time[batch.nodes[edge_type[0]][batch.row[edge_type]]]
                assert bool((own <= time).all())
            if store.time is not None and edge_type in batch.edge_ids:
                by_id = torch.empty_like(store.time)
                by_id[store.edge_ids if store.edge_ids is not None else slice(None)] = store.time
                assert bool((by_id[batch.edge_ids[edge_type]] <= time).all())


def with_other_future(times, seed):
    """Two graphs that are equal up to time 5 and have other edges and times after it."""
    random = np.random.default_rng(seed)
    shared, later = random.integers(0, 40, (2, 200)), random.integers(0, 40, (2, 300))
    early, late = random.integers(0, 6, 200), random.integers(6, 90, 300)
    graphs = []
    for version in range(2):
        count = 300 if version == 0 else 170
        more = later[:, :count] if version == 0 else random.integers(0, 40, (2, count))
        edge_index = np.concatenate([shared, more], axis=1)
        # with node times, each edge has a source of its own, which is as late as the edge
        edge_time = np.concatenate([early, late[:count] + version])
        if times == "edge":
            edges = {("u", "r", "v"): {"edge_index": edge_index, "time": edge_time}}
            edges["v", "rev_r", "u"] = {"edge_index": edge_index[::-1], "time": edge_time}
            graphs.append(Graph.from_arrays({"u": 40, "v": 40}, edges))
        else:
            events = np.arange(edge_index.shape[1])
            edges = {
                ("e", "of", "v"): [events, edge_index[1]],
                ("v", "rev_of", "e"): [edge_index[1], events],
                ("e", "by", "u"): [events, edge_index[0]],
                ("u", "rev_by", "e"): [edge_index[0], events],
            }
            nodes = {"u": 40, "v": 40, "e": {"time": edge_time}}
            graphs.append(Graph.from_arrays(nodes, edges))
    return graphs


@pytest.mark.parametrize("times", ["node", "edge"])
@pytest.mark.parametrize("temporal", ["uniform", "last"])
@pytest.mark.parametrize("subgraph_type", ["directional", "induced"])
def test_minibatches_do_not_depend_on_the_future(times, temporal, subgraph_type):
    for trial in range(5):
        graphs = with_other_future(times, trial)
        batches = [
            pyg_sampler(graph, [2, 3, 2], temporal=temporal, subgraph_type=subgraph_type).sample(
                {"v": np.arange(20)}, trial, np.arange(20) % 6
            )
            for graph in graphs
        ]
        assert sum(map(len, batches[0].row.values())) > 50
        assert_equal(*batches)


def test_seed_times_default_to_the_times_of_the_seeds():
    graph = random_graph(4, times="node", num_types=2)
    name = graph.node_types[0]
    ids = torch.arange(graph.nodes(name).num_nodes)
    sampler = pyg_sampler(graph, [2, 2], temporal="uniform")
    times = graph.nodes(name).time
    assert_equal(sampler.sample((name, ids), 1), sampler.sample((name, ids), 1, times))
    assert_equal(sampler.sample((name, ids), 1), sampler.sample({name: ids}, 1, {name: times}))


def test_bidirectional_subgraphs_equal_those_of_pyg():
    sampler_base = pytest.importorskip("torch_geometric.sampler.base")
    for trial in range(10):
        random = np.random.default_rng(trial)
        pairs = random.integers(0, 15, (2, 60))
        edges = {
            ("u", "r", "v"): pairs,
            ("v", "rev_r", "u"): pairs[::-1].copy(),
            ("u", "f", "u"): random.integers(0, 15, (2, 40)),
            ("v", "only", "w"): random.integers(0, 15, (2, 40)),
            ("w", "back", "v"): random.integers(0, 15, (2, 40)),
        }
        graph = Graph.from_arrays(dict.fromkeys("uvw", 15), edges)
        seeds = ("u", [0, 1, 2])
        plain = pyg_sampler(graph, [3, 2]).sample(seeds, trial)
        batch = pyg_sampler(graph, [3, 2], subgraph_type="bidirectional").sample(seeds, trial)
        expected = sampler_base.HeteroSamplerOutput(
            node=plain.nodes, row=plain.row, col=plain.col, edge=dict(plain.edge_ids)
        ).to_bidirectional()
        for each in graph.edge_types:
            assert torch.equal(batch.row[each], expected.row[each]), each
            assert torch.equal(batch.col[each], expected.col[each]), each
            assert (each in batch.edge_ids) == (expected.edge[each] is not None)


@pytest.mark.parametrize("fanouts", [[2], [-1, -1]])
def test_blocks_have_the_nodes_and_edges_of_dgl(fanouts):
    from gcnzc.interop.dgl.importing import import_dgl

    try:
        dgl = import_dgl()
    except ImportError:
        pytest.skip("DGL is not installed")
    graph = random_graph(2, num_types=3, edges=50)
    edges = {each: tuple(graph.edges(each).edge_index()) for each in graph.edge_types}
    theirs = dgl.heterograph(
        edges, {name: graph.nodes(name).num_nodes for name in graph.node_types}
    )
    name = graph.edge_types[0][2]
    seeds = torch.arange(min(3, graph.nodes(name).num_nodes))
    # DGL numbers layers from the input
    sampler = dgl.dataloading.NeighborSampler(fanouts[::-1])
    nodes, _, blocks = sampler.sample(theirs, {name: seeds})
    batch = pyg_sampler(graph, fanouts, once=False).sample((name, seeds), 0)
    for edge_type in graph.edge_types:
        counts = [block.num_edges(edge_type) for block in reversed(blocks)]
        assert list(batch.num_edges[edge_type]) == counts
    if -1 in fanouts:
        for each in graph.node_types:
            assert torch.equal(nodes[each].sort().values, batch.nodes[each].sort().values)


def test_csc_has_the_edges_of_each_destination():
    graph = random_graph(9, edges=80)
    batch = pyg_sampler(graph, [3, 2]).sample(random_seeds(graph, 9)[0], 0)
    for edge_type in graph.edge_types:
        indptr, indices = batch.csc(edge_type)
        cols = torch.arange(len(indptr) - 1).repeat_interleave(indptr.diff())
        assert torch.equal(cols, batch.col[edge_type])
        assert torch.equal(indices.long(), batch.row[edge_type])


USERS = {"u": {"num_nodes": 4, "time": [1, 2, 3, 4]}, "v": 3}
BUYS = {("u", "r", "v"): {"edge_index": [[0, 1, 2, 3], [0, 0, 1, 2]], "weight": [1, 0, 2, 3]}}
SHOP = Graph.from_arrays(USERS, BUYS)
PLAIN = Graph.from_arrays({"u": 4, "v": 3}, {("u", "r", "v"): [[0], [0]]})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pyg_sampler(SHOP, {("u", "x", "v"): [1]}), r"no edge type with.*'x'"),
        (lambda: pyg_sampler(SHOP, {}), r"no edge type \('u', 'r', 'v'\)"),
        (lambda: pyg_sampler(SHOP, {"r": [1], ("u", "r", "v"): [1]}), "twice"),
        (lambda: pyg_sampler(SHOP, [-2]), r"fanouts\[0\] is -2"),
        (lambda: pyg_sampler(SHOP, []), "no fanout"),
        (lambda: pyg_sampler(PLAIN, [1], temporal="uniform"), "has times"),
        (lambda: pyg_sampler(SHOP, [1], temporal="first"), "temporal is 'first'"),
        (lambda: pyg_sampler(SHOP, [1], temporal="last", time="edge"), "no edge type .* times"),
        (lambda: pyg_sampler(PLAIN, [1], weighted=True), "no edge type .* has weights"),
        (lambda: pyg_sampler(SHOP, [1], subgraph_type="all"), "subgraph_type is 'all'"),
        (lambda: pyg_sampler(SHOP, [1]).sample({"w": [0]}, 0), "no node type 'w'"),
        (lambda: pyg_sampler(SHOP, [1]).sample({"u": [0, 4]}, 0), "seeds of node type 'u'.* 4"),
        (lambda: pyg_sampler(SHOP, [1]).sample({}, 0), "no node types"),
        (lambda: pyg_sampler(SHOP, [1]).sample([0], 0), "seeds is .*, not a dict of ids by node"),
        (lambda: pyg_sampler(SHOP, [1]).sample({"u": [0]}, 0, [3]), "ignores times"),
        (
            lambda: pyg_sampler(SHOP, [1], temporal="last").sample({"v": [0]}, 0),
            "node type 'v' have no times",
        ),
        (
            lambda: pyg_sampler(SHOP, [1], temporal="last").sample({"u": [0]}, 0, [np.nan]),
            r"seed_times\[0\] is nan",
        ),
        (
            lambda: pyg_sampler(SHOP, [1], temporal="last").sample({"u": [0, 1]}, 0, [1]),
            r"seed_times has shape \(1,\)",
        ),
        (
            lambda: pyg_sampler(SHOP, [1], temporal="last").sample({"u": [0]}, 0, {"v": [1]}),
            "seed_times has no times for node type 'u'",
        ),
        (lambda: build_full_hetero_blocks(SHOP, 1, targets=["w"]), "targets has the node type 'w'"),
        (lambda: LinkSampler(pyg_sampler(SHOP, [1]), edge_type="r", times=[1]), "ignores times"),
        (lambda: LinkSampler(pyg_sampler(SHOP, [1]), [[0.5], [1]], "r"), "edges of .* are"),
        (
            lambda: LinkSampler(pyg_sampler(SHOP, [1]), np.empty((2, 0), int), "r"),
            r"edges of .* are empty\n\nhint: is the split empty",
        ),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize("damage", ["offset", "source", "negative"])
@pytest.mark.parametrize("temporal", [None, "uniform"])
def test_a_damaged_graph_is_an_error_and_not_read_outside(damage, temporal):
    store = SHOP.edges("r")
    indptr, indices = store.indptr.clone(), store.indices.clone()
    if damage == "offset":
        indptr[1] = 2**40
    else:
        indices[0] = 2**30 if damage == "source" else -1
    broken = EdgeStore(indptr, indices)
    nodes = {"u": SHOP.nodes("u"), "v": SHOP.nodes("v")}
    with pytest.raises(ValueError, match=r"edge type \('u', 'r', 'v'\)|of edge type"):
        Graph.from_stores(nodes, {("u", "r", "v"): broken})
    graph = Graph.from_stores(nodes, {("u", "r", "v"): broken}, check=False)
    # as if the arrays were damaged after the check
    graph._is_checked = True
    graph._sorted.add((("u", "r", "v"), "both"))
    for subgraph_type in ("directional", "induced"):
        sampler = pyg_sampler(graph, [-1], temporal=temporal, subgraph_type=subgraph_type)
        times = [9] if temporal else None
        with pytest.raises(ValueError, match=r"edge type \('u', 'r', 'v'\): "):
            sampler.sample(("v", [0]), 0, times)


def test_columns_that_are_not_sorted_by_time_are_an_error_and_can_be_sorted(tmp_path):
    store = SHOP.edges("r")
    late_first = replace(store, time=torch.tensor([5, 1, 2, 3]))
    graph = Graph.from_stores(
        {"u": SHOP.nodes("u"), "v": SHOP.nodes("v")}, {("u", "r", "v"): late_first}
    )
    with pytest.raises(ValueError, match=r"not sorted by time: .* node 0 have time 5 before"):
        pyg_sampler(graph, [1], temporal="uniform")
    gcnzc.prepare(graph, tmp_path / "g")
    with pytest.raises(ValueError, match=r"hint: .*, unless `gcnzc info .*g --verify` reports a d"):
        pyg_sampler(gcnzc.load(tmp_path / "g").graph, [1], temporal="uniform")
    found = pyg_sampler(graph.sort_by_time(), [-1], temporal="uniform")
    assert found.sample(("v", [0]), 0, [4]).edge_ids["u", "r", "v"].tolist() == [1]


def test_excluded_edges_are_ids_by_edge_type():
    graph = Graph.from_arrays(
        {"u": 4, "v": 3},
        {
            # edges that are not in the order of their destinations
            ("u", "r", "v"): {"edge_index": [[0, 1, 2, 3, 1], [2, 0, 2, 0, 2]]},
            ("v", "s", "u"): {"edge_index": [[0, 1, 2], [0, 1, 2]]},
        },
    )
    sampler = pyg_sampler(graph, [-1, -1], once=False)
    seeds = {"v": [0, 1, 2], "u": [2]}

    def edges(exclude):
        found = sampler.sample(seeds, 0, exclude=exclude).edge_ids
        return [set(found[each].tolist()) for each in graph.edge_types]

    assert edges(None) == [{0, 1, 2, 3, 4}, {0, 1, 2}]
    assert edges({("u", "r", "v"): [4, 2, 4]}) == [{0, 1, 3}, {0, 1, 2}]
    # node 0 of "u" is not reached, either
    assert edges({"r": [0], ("u", "r", "v"): [3], "s": np.array([1])}) == [{1, 2, 4}, {2}]
    assert edges({"r": []}) == edges({}) == edges(None)
    with pytest.raises(ValueError, match=r"edge ids of exclude\[.*are from 5 to 5.*5 edges"):
        edges({"r": [5]})
    with pytest.raises(ValueError, match="there is no edge type with the name 'q'"):
        edges({"q": [0]})
    with pytest.raises(TypeError, match="exclude is"):
        edges([0])
