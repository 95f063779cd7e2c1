"""The drop-in loader for DGL with heterogeneous graphs, compared with DGL's own loader."""

import copy
import gc
import itertools
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from dgl_or_skip import dgl
from scipy.stats import chi2

from gcnzc import FeatureTable
from gcnzc.interop.dgl import DataLoader

loading = dgl.dataloading
# DGL's own loader advises to
NOT_PINNED = pytest.mark.filterwarnings("ignore:Dataloader CPU affinity")
NUM_NODES = {"author": 50, "paper": 150, "venue": 6}
WRITES, WRITTEN = ("author", "writes", "paper"), ("paper", "written-by", "author")
CITES, IN, HAS = ("paper", "cites", "paper"), ("paper", "in", "venue"), ("venue", "has", "paper")
TYPES = [WRITES, WRITTEN, CITES, IN, HAS]
SEEDS = {"paper": torch.randperm(150)[:40], "author": torch.arange(20, 35)}
PREFETCH = {
    "prefetch_node_feats": {"paper": ["feat", "cube"], "author": ["feat"]},
    "prefetch_labels": {"paper": ["label"]},
    "prefetch_edge_feats": {"cites": ["weight"], WRITES: ["weight"]},
}
REVERSE_TYPES = {"writes": "written-by", "written-by": "writes", IN: HAS, HAS: IN}


def make_graph(idtype=torch.int64):
    numbers = torch.Generator().manual_seed(1)

    def edges(*kinds, count):
        return tuple(torch.randint(NUM_NODES[k], (count,), generator=numbers) for k in kinds)

    writes, cites = edges("author", "paper", count=500), edges("paper", "paper", count=400)
    # edge e of CITES has the reverse e + 400 or e - 400
    cites = torch.cat(cites), torch.cat(cites[::-1])
    has = edges("venue", "paper", count=150)
    graph = dgl.heterograph(
        {WRITES: writes, WRITTEN: writes[::-1], CITES: cites, IN: has[::-1], HAS: has},
        num_nodes_dict=NUM_NODES,
        idtype=idtype,
    )
    for kind, count in NUM_NODES.items():
        width = 3 + len(kind)
        graph.nodes[kind].data["feat"] = torch.randn(count, width, generator=numbers)
    graph.nodes["paper"].data["cube"] = torch.randn(150, 2, 3, generator=numbers)
    graph.nodes["paper"].data["label"] = torch.randint(3, (150,), generator=numbers)
    for each in TYPES:
        rows = torch.rand(graph.num_edges(each), generator=numbers)
        graph.edges[each].data["weight"] = rows
    return graph


REVERSE_IDS = {"cites": torch.cat([torch.arange(400, 800), torch.arange(400)])}


@pytest.fixture(scope="module")
def graph():
    return make_graph()


def check_data(graph, subgraph):
    """All data of a subgraph is that of its nodes and edges."""
    nodes = [subgraph.nodes] if not subgraph.is_block else [subgraph.srcnodes, subgraph.dstnodes]
    for view in nodes:
        for kind in graph.ntypes:
            data, whole = view[kind].data, graph.nodes[kind].data
            assert set(data) == {*whole, dgl.NID}
            for name, rows in whole.items():
                assert torch.equal(data[name], rows[data[dgl.NID].long()])
    for each in graph.canonical_etypes:
        data, whole = subgraph.edges[each].data, graph.edges[each].data
        # those of the samplers that draw by importance
        assert set(data) - {"edge_weights"} == {*whole, dgl.EID}
        for name, rows in whole.items():
            assert torch.equal(data[name], rows[data[dgl.EID].long()])


def check_edges(graph, block, each):
    """The edges of a block connect the nodes that they connect in the graph."""
    src, dst = block.edges(etype=each, order="eid")
    ends = graph.find_edges(block.edges[each].data[dgl.EID], etype=each)
    assert torch.equal(block.srcnodes[each[0]].data[dgl.NID][src.long()], ends[0])
    assert torch.equal(block.dstnodes[each[2]].data[dgl.NID][dst.long()], ends[1])


def check_blocks(graph, blocks, fanouts, replace=False):
    """Every edge is one of the graph, in the number of the fanouts, and every node is reached."""
    for outer, inner in itertools.pairwise(blocks):
        for kind in graph.ntypes:
            ids = outer.dstnodes[kind].data[dgl.NID]
            assert torch.equal(ids, inner.srcnodes[kind].data[dgl.NID])
    for block, fanout in zip(blocks, fanouts, strict=True):
        assert block.is_block
        assert (block.idtype, block.canonical_etypes) == (graph.idtype, graph.canonical_etypes)
        reached = {kind: [torch.arange(block.num_dst_nodes(kind))] for kind in graph.ntypes}
        for each in graph.canonical_etypes:
            check_edges(graph, block, each)
            own = fanout if isinstance(fanout, int) else fanout[each]
            degrees = graph.in_degrees(block.dstnodes[each[2]].data[dgl.NID], etype=each)
            kept = degrees if own == -1 else degrees.clamp(max=own)
            if replace and own >= 0:
                kept = torch.where(degrees > 0, own, 0)
            found = block.in_degrees(etype=each)
            assert torch.equal(found.long(), kept.long()), each
            ids = block.edges[each].data[dgl.EID]
            assert replace or len(ids.unique()) == len(ids)
            reached[each[0]].append(block.edges(etype=each)[0].long())
        for kind, parts in reached.items():
            sources = block.srcnodes[kind].data[dgl.NID]
            assert len(sources.unique()) == len(sources) == len(torch.cat(parts).unique())
            targets = block.dstnodes[kind].data[dgl.NID]
            assert torch.equal(sources[: len(targets)], targets)


def is_pending(block, each):
    """Whether the ids of a block's edges have not been read."""
    return block._edge_frames[block.get_etype_id(each)]._columns[dgl.EID].index is not None


@pytest.mark.parametrize("idtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("is_typed", [True, False])
def test_edge_ids_are_gathered_when_they_are_read(idtype, is_typed):
    whole = make_graph(idtype)
    whole = whole if is_typed else dgl.to_homogeneous(whole, store_type=False)
    each = CITES if is_typed else whole.canonical_etypes[0]
    seeds = {"paper": SEEDS["paper"]} if is_typed else SEEDS["paper"]

    def blocks(**edge_data):
        whole.edges[each].data.update(edge_data)
        options = {"batch_size": 8, "seed": 1, "threads": 1}
        loader = DataLoader(whole, seeds, loading.NeighborSampler([3, 2]), **options)
        found = [blocks for _, _, blocks in loader]
        for name in edge_data:
            del whole.edges[each].data[name]
        return found

    for own in whole.canonical_etypes:
        for name in [*whole.edges[own].data]:
            del whole.edges[own].data[name]
    wanted = blocks(number=torch.arange(whole.num_edges(each), dtype=idtype))
    uses = {
        "read": lambda block: block,
        "copied": lambda block: block.to("cpu"),
        "pickled": lambda block: pickle.loads(pickle.dumps(block)),
        "local": lambda block: block.local_var(),
        "as a graph": dgl.block_to_graph,
    }
    for name, change in uses.items():
        for own, other in zip(blocks(), wanted, strict=True):
            for block, other_block in zip(own, other, strict=True):
                assert is_pending(block, each)
                ids = change(block).edges[each[1]].data[dgl.EID]
                assert is_pending(block, each) == (name in ("copied", "local"))
                assert ids.dtype == idtype
                assert torch.equal(ids, other_block.edges[each].data["number"])
                check_edges(whole, block, each)


def ids_of(blocks, each):
    return [block.edges[each].data[dgl.EID].sort().values.tolist() for block in blocks]


@NOT_PINNED
@pytest.mark.parametrize("idtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("prefetch", [PREFETCH, {}], ids=["prefetched", "lazy"])
def test_full_neighbourhoods_equal_those_of_dgls_loader(idtype, prefetch):
    graph = make_graph(idtype)
    seeds = {kind: ids.to(idtype) for kind, ids in SEEDS.items()}
    sampler = loading.MultiLayerFullNeighborSampler(2, **prefetch)
    kwargs = {"batch_size": 16, "shuffle": False, "drop_last": True}
    loader = DataLoader(graph, seeds, sampler, **kwargs)
    # with ids of 32 bits and several threads, DGL 2.1 loses nodes of a block and repeats others
    theirs = loading.DataLoader(make_graph(torch.int64), SEEDS, sampler, **kwargs)
    assert loader.sampler_library == "gcnzc"
    assert len(loader) == len(theirs) == 3
    for mine, other in zip(loader, theirs, strict=True):
        assert listed(mine[1]) == listed(other[1])
        assert all(ids.dtype == idtype for ids in mine[1].values())
        assert set(mine[0]) == set(other[0]) == set(graph.ntypes)
        for kind, ids in mine[0].items():
            assert torch.equal(ids.long().sort().values, other[0][kind].sort().values)
            assert torch.equal(ids, mine[2][0].srcnodes[kind].data[dgl.NID])
        check_blocks(graph, mine[2], [-1, -1])
        for each in TYPES:
            assert ids_of(mine[2], each) == ids_of(other[2], each)
        for block, wanted in zip(mine[2], other[2], strict=True):
            check_data(graph, block)
            for data in ("srcdata", "dstdata", "edata"):
                own, whole = getattr(block, data), getattr(wanted, data)
                assert own.keys() == whole.keys()
                assert all(list(rows) == list(whole[name]) for name, rows in own.items())
    # paper 32 to 39 and authors are in one minibatch
    assert {kind: len(ids) for kind, ids in mine[1].items()} == {"paper": 8, "author": 8}


BY_TYPE = {WRITES: 2, WRITTEN: -1, CITES: 3, IN: 0, HAS: 1}


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanouts", [[3, 2], [BY_TYPE, 4], [BY_TYPE, BY_TYPE, BY_TYPE]])
def test_fanouts_by_edge_type(graph, fanouts, replace):
    # the names of relations are the keys, too
    names = {each[1]: own for each, own in BY_TYPE.items()}
    given = [names if layer is BY_TYPE else layer for layer in fanouts]
    sampler = loading.NeighborSampler(given, replace=replace)
    loader = DataLoader(graph, SEEDS, sampler, batch_size=20, shuffle=True)
    assert loader.sampler_library == "gcnzc"
    seen = {kind: [] for kind in SEEDS}
    for _, outputs, blocks in loader:
        check_blocks(graph, blocks, fanouts, replace)
        for kind, ids in outputs.items():
            assert torch.equal(ids, blocks[-1].dstnodes[kind].data[dgl.NID])
            seen[kind].append(ids)
    for kind, parts in seen.items():
        assert torch.equal(torch.cat(parts).sort().values, SEEDS[kind].sort().values)
    # types are shuffled together
    assert len(seen["author"]) == len(seen["paper"]) == 3


@pytest.mark.parametrize(("replace", "prob"), [(False, None), (True, None), (True, "p")])
def test_neighbours_of_each_type_are_uniform_or_by_weight(replace, prob):
    rounds, fanout, degrees = 3000, 3, {"a": 7, "b": 12}
    graph = dgl.heterograph(
        {
            (name, "r" + name, "x"): (
                torch.arange(count).repeat(rounds),
                torch.arange(rounds).repeat_interleave(count),
            )
            for name, count in degrees.items()
        }
    )
    # types without weights are sampled uniformly
    graph.edges["ra"].data["p"] = torch.arange(7.0).repeat(rounds) / 21
    sampler = loading.NeighborSampler([fanout], replace=replace, prob=prob)
    loader = DataLoader(graph, {"x": torch.arange(rounds)}, sampler, batch_size=rounds, seed=5)
    ((_, _, (block,)),) = loader
    for name, count in degrees.items():
        src, _ = block.edges(etype="r" + name)
        chosen = block.srcnodes[name].data[dgl.NID][src]
        counts = np.bincount(chosen.numpy(), minlength=count)
        expected = np.full(count, rounds * fanout / count)
        if prob is not None and name == "a":
            expected = rounds * fanout * np.arange(7) / 21
        assert not counts[expected == 0].any()
        counts, expected = counts[expected > 0], expected[expected > 0]
        # without replacement, the variance of the counts is smaller
        assert ((counts - expected) ** 2 / expected).sum() < chi2.isf(1e-6, len(counts) - 1)


@NOT_PINNED
@pytest.mark.parametrize("argument", ["prob", "mask"])
def test_edges_of_weight_0_are_those_that_dgl_does_not_sample(argument):
    graph = make_graph()
    for each in (CITES, WRITES):
        is_kept = torch.rand(graph.num_edges(each)) < 0.5
        graph.edges[each].data["kept"] = is_kept if argument == "mask" else is_kept.float()
    sampler = loading.NeighborSampler([-1, -1], **{argument: "kept"})
    loader = DataLoader(graph, SEEDS, sampler, batch_size=16)
    assert loader.sampler_library == "gcnzc"
    for _ in range(2):
        theirs = loading.DataLoader(graph, SEEDS, sampler, batch_size=16)
        for mine, other in zip(loader, theirs, strict=True):
            for each in TYPES:
                assert ids_of(mine[2], each) == ids_of(other[2], each)
        # weights are read when an epoch begins
        graph.edges[CITES].data["kept"].fill_(0)
    graph.edges[CITES].data["kept"] = torch.full((800,), float("nan"))
    with pytest.raises(ValueError, match=r"'kept' of \('paper', 'cites', 'paper'\)\[0\] is nan"):
        iter(loader)


EDGES = {"writes": torch.arange(0, 500, 5), CITES: torch.arange(350, 450), "in": torch.arange(40)}


def edge_sampler(exclude, fanouts=(-1, -1), **kwargs):
    inner = loading.NeighborSampler(list(fanouts), **PREFETCH)
    names = {"reverse_types": "reverse_etypes", "reverse_id": "reverse_eids"}
    if exclude in names:
        reverse = REVERSE_TYPES if exclude == "reverse_types" else REVERSE_IDS
        kwargs[names[exclude]] = reverse
    return loading.as_edge_prediction_sampler(inner, exclude=exclude, **kwargs)


def excluded_edges(exclude, pairs):
    """What is excluded, by DGL's documentation."""
    own = {each: pairs.edges[each].data[dgl.EID].long() for each in TYPES}
    gone = {each: set(ids.tolist()) for each, ids in own.items()}
    if exclude is None:
        return {each: set() for each in TYPES}
    if exclude == "reverse_id":
        gone[CITES] |= set(REVERSE_IDS["cites"][own[CITES]].tolist())
    if exclude == "reverse_types":
        for each, other in ((WRITES, WRITTEN), (WRITTEN, WRITES), (IN, HAS), (HAS, IN)):
            gone[other] |= set(own[each].tolist())
    return gone


@NOT_PINNED
@pytest.mark.parametrize("exclude", [None, "self", "reverse_types", "reverse_id"])
@pytest.mark.parametrize("idtype", [torch.int64, torch.int32])
def test_minibatches_of_edges_equal_those_of_dgls_loader(exclude, idtype):
    graph = make_graph(idtype)
    edges = {key: ids.to(idtype) for key, ids in EDGES.items()}
    if exclude == "reverse_id":
        edges, reverse = {CITES: edges[CITES]}, {CITES: REVERSE_IDS["cites"].to(idtype)}
        inner = loading.NeighborSampler([-1, -1], **PREFETCH)
        sampler = loading.as_edge_prediction_sampler(inner, "reverse_id", reverse_eids=reverse)
    else:
        sampler = edge_sampler(exclude, prefetch_labels={"writes": ["weight"]})
    loader = DataLoader(graph, edges, sampler, batch_size=48)
    theirs = loading.DataLoader(graph, edges, sampler, batch_size=48)
    assert loader.sampler_library == "gcnzc"
    for mine, other in zip(loader, theirs, strict=True):
        (inputs, pairs, blocks), (wanted_inputs, wanted, wanted_blocks) = mine, other
        check_data(graph, pairs)
        for kind, ids in inputs.items():
            assert torch.equal(ids.sort().values, wanted_inputs[kind].sort().values)
        gone = excluded_edges(exclude, pairs)
        for each in TYPES:
            assert torch.equal(pairs.edges[each].data[dgl.EID], wanted.edges[each].data[dgl.EID])
            ends = graph.find_edges(pairs.edges[each].data[dgl.EID], etype=each)
            found = pairs.edges(etype=each, order="eid")
            for ids, kind, local in zip(ends, each[::2], found, strict=True):
                assert torch.equal(pairs.nodes[kind].data[dgl.NID][local.long()], ids)
            assert ids_of(blocks, each) == ids_of(wanted_blocks, each)
            assert not any(gone[each].intersection(ids) for ids in ids_of(blocks, each))
        for block in blocks:
            check_data(graph, block)
            for each in TYPES:
                check_edges(graph, block, each)
        for kind in graph.ntypes:
            nodes = pairs.nodes[kind].data[dgl.NID]
            assert torch.equal(nodes, blocks[-1].dstnodes[kind].data[dgl.NID])


@NOT_PINNED
@pytest.mark.parametrize("negative", ["uniform", "global", "own"])
def test_negatives_have_the_types_of_their_edges(graph, negative):
    def own(g, edges):
        heads = {each: g.find_edges(ids, etype=each)[0] for each, ids in edges.items()}
        return {each: (heads[each], ids % g.num_nodes(each[2])) for each, ids in edges.items()}

    uniform, of_graph = (
        loading.negative_sampler.Uniform(3),
        loading.negative_sampler.GlobalUniform(2),
    )
    drawn = {"uniform": uniform, "global": of_graph, "own": own}
    sampler = edge_sampler("self", negative_sampler=drawn[negative])
    loader = DataLoader(graph, EDGES, sampler, batch_size=50, shuffle=True)
    assert loader.sampler_library == "gcnzc"
    theirs = next(iter(loading.DataLoader(graph, EDGES, sampler, batch_size=50)))
    for _, pairs, negatives, blocks in loader:
        assert set(negatives.edata) == set(theirs[2].edata) == set()
        assert set(negatives.ndata) == set(theirs[2].ndata) == {dgl.NID}
        assert negatives.canonical_etypes == graph.canonical_etypes
        for kind in graph.ntypes:
            nodes = negatives.nodes[kind].data[dgl.NID]
            assert torch.equal(nodes, pairs.nodes[kind].data[dgl.NID])
            assert torch.equal(nodes, blocks[-1].dstnodes[kind].data[dgl.NID])
        for each in TYPES:
            ends = zip(each[::2], negatives.edges(etype=each, order="eid"), strict=True)
            src, dst = (negatives.nodes[kind].data[dgl.NID][ids] for kind, ids in ends)
            edges = pairs.edges[each].data[dgl.EID]
            heads = graph.find_edges(edges, etype=each)[0]
            if negative == "uniform":
                assert torch.equal(src, heads.repeat_interleave(3))
            if negative == "own":
                assert torch.equal(src, heads)
                assert torch.equal(dst, edges % graph.num_nodes(each[2]))
            if negative == "global" and len(edges):
                assert not bool(graph.has_edges_between(src, dst, etype=each).any())


def drawn(loader, count=None):
    """All values of minibatches, to compare them."""
    return [listed(list(parts)) for parts in itertools.islice(loader, count)]


def listed(part):
    if isinstance(part, torch.Tensor):
        return part.tolist()
    if isinstance(part, dict):
        return {key: listed(own) for key, own in part.items()}
    if isinstance(part, (list, tuple)):
        return [listed(own) for own in part]
    ends = [part.edges(etype=each) for each in part.canonical_etypes]
    frames = [dict(frame) for frame in (*part._node_frames, *part._edge_frames)]
    return listed(ends), listed(frames)


NODE_SAMPLER = loading.NeighborSampler([4, 3], **PREFETCH)
PAIRS = loading.negative_sampler.Uniform(2)
SAMPLERS = {
    "nodes": (SEEDS, NODE_SAMPLER),
    "edges": (EDGES, edge_sampler("reverse_types", (3, 2), negative_sampler=PAIRS)),
    "weighted": (SEEDS, loading.NeighborSampler([4, 3], prob="weight")),
    "labor": (SEEDS, loading.LaborSampler([4, 3])),
    "edges sampled by dgl": (EDGES, edge_sampler(lambda edges: edges, (3, 2))),
    "one type": (torch.arange(100), loading.NeighborSampler([4, 3])),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_minibatches_are_reproducible_and_a_loader_resumes(name):
    # a graph of its own: DGL sorts the edges of a graph when it searches them, and copies of the
    # graph then have another order than loaders that were constructed before
    graph = plain(make_graph()) if name == "one type" else make_graph()
    indices, sampler = SAMPLERS[name]

    def make(threads, **other):
        kwargs = {"batch_size": 16, "shuffle": True, "seed": 9} | other
        return DataLoader(graph, indices, sampler, threads=threads, **kwargs)

    whole = make(1)
    is_ours = name not in ("labor", "edges sampled by dgl")
    assert whole.sampler_library == ("gcnzc" if is_ours else "dgl")
    first, second = drawn(whole), drawn(whole)
    assert first != second
    assert drawn(make(3)) == first
    loader = make(2)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    for other in (make(3, seed=None), copy.deepcopy(loader)):
        other.load_state_dict(loader.state_dict())
        assert drawn(other) == first[2:]
        assert drawn(other) == second
    assert drawn(make(1, seed=10), 2) != first[:2]
    with pytest.raises(ValueError, match="seed 9, not 10"):
        make(1, seed=10).load_state_dict(loader.state_dict())


@NOT_PINNED
def test_a_graph_with_one_node_type_takes_tensors():
    one, other = torch.randint(30, (2, 2, 100), generator=torch.Generator().manual_seed(0))
    graph = dgl.heterograph({("n", "a", "n"): tuple(one), ("n", "b", "n"): tuple(other)})
    graph.ndata["feat"] = torch.randn(30, 4)
    sampler = loading.NeighborSampler([-1], prefetch_node_feats=["feat"])
    for indices in (torch.arange(20), {"n": torch.arange(20)}):
        mine, theirs = (
            next(iter(Loader(graph, indices, sampler, batch_size=8)))
            for Loader in (DataLoader, loading.DataLoader)
        )
        for own, other in zip(mine[:2], theirs[:2], strict=True):
            assert type(own) is type(other)
        found = mine[1]["n"] if isinstance(mine[1], dict) else mine[1]
        assert found.tolist() == list(range(8))
        assert torch.equal(mine[0].sort().values, theirs[0].sort().values)
        assert torch.equal(mine[2][0].srcdata["feat"], graph.ndata["feat"][mine[0]])


def test_tables_replace_data_by_type(graph):
    table = FeatureTable.quantized(graph.nodes["paper"].data["feat"])
    more = FeatureTable(torch.arange(50.0).view(-1, 1))
    feats = {"paper": ["feat"], "author": ["more", "feat"]}
    sampler = loading.NeighborSampler([2], prefetch_node_feats=feats)
    tables = {("paper", "feat"): table, ("author", "more"): more}
    for inputs, _, blocks in DataLoader(graph, SEEDS, sampler, batch_size=20, tables=tables):
        found = blocks[0].srcdata
        assert torch.equal(found["feat"]["paper"], table.gather(inputs["paper"]))
        author = graph.nodes["author"].data["feat"][inputs["author"]]
        assert torch.equal(found["feat"]["author"], author)
        assert torch.equal(found["more"]["author"], inputs["author"].float().view(-1, 1))
    with pytest.raises(ValueError, match="tables has the key 'feat'"):
        DataLoader(graph, SEEDS, sampler, tables={"feat": table})


@pytest.mark.parametrize("sampler_library", ["gcnzc", "dgl"])
@pytest.mark.parametrize("is_typed", [True, False])
def test_an_epoch_in_progress_keeps_the_data_it_began_with(is_typed, sampler_library):
    whole = make_graph()
    whole = whole if is_typed else dgl.to_homogeneous(whole, store_type=False)
    kind, each = ("paper", CITES) if is_typed else (whole.ntypes[0], whole.canonical_etypes[0])
    loader = DataLoader(
        *(whole, SEEDS if is_typed else SEEDS["paper"], loading.NeighborSampler([3, 2])),
        **{"batch_size": 2, "ahead": 1, "threads": 1, "sampler_library": sampler_library},
    )

    def change(number):
        whole.nodes[kind].data["number"] = torch.full((whole.num_nodes(kind),), number)
        whole.edges[each].data["number"] = torch.full((whole.num_edges(each),), number)

    def numbers(minibatches):
        return {
            number
            for _, _, (first, *_) in minibatches
            for rows in (first.srcnodes[kind].data["number"], first.edges[each].data["number"])
            for number in rows.tolist()
        }

    change(1)
    early = iter(loader)
    seen = numbers([next(early)])
    late = iter(loader)
    change(2)
    assert numbers([next(late)]) == {2}
    assert (seen | numbers(early), numbers(late)) == ({1}, {2})


def plain(whole):
    """The same nodes and edges without types, and the data `weight` of edges."""
    return dgl.to_homogeneous(whole, edata=["weight"], store_type=False)


@pytest.mark.parametrize("sampler_library", ["gcnzc", "dgl"])
@pytest.mark.parametrize("is_typed", [True, False])
def test_a_graph_whose_edges_change_is_sampled_as_it_is(is_typed, sampler_library):
    whole = make_graph() if is_typed else plain(make_graph())
    each = CITES if is_typed else whole.canonical_etypes[0]
    seeds = {"paper": torch.arange(150)} if is_typed else torch.arange(200)
    loader = DataLoader(
        *(whole, seeds, loading.NeighborSampler([-1])),
        **{"batch_size": 50, "threads": 1, "ahead": 1, "sampler_library": sampler_library},
    )

    def numbers(minibatches):
        found = [block.edges[each].data["weight"] for _, _, (block,) in minibatches]
        return torch.cat(found).sort().values.tolist()

    def of_graph():
        nodes = seeds[each[2]] if is_typed else seeds
        return sorted(whole.edges[each].data["weight"][whole.in_edges(nodes, "eid", each)].tolist())

    first = of_graph()
    assert numbers(loader) == first
    early = iter(loader)
    seen = [next(early)]
    whole.remove_edges(torch.arange(0, whole.num_edges(each), 3), etype=each)
    second = of_graph()
    assert second != first
    assert numbers(loader) == second
    # the epoch in progress keeps its edges
    assert numbers([*seen, *early]) == first
    ends = torch.arange(100), torch.arange(100).flip(0)
    whole.add_edges(*ends, data={"weight": torch.full((100,), 2.0)}, etype=each)
    third = of_graph()
    assert third.count(2.0) == 100
    assert numbers(loader) == third
    whole.remove_nodes(torch.arange(140, 150) if is_typed else torch.arange(190, 206), each[2])
    with pytest.raises(ValueError, match=r"indices.* reach from 0 to 1[49]9, but the graph has"):
        iter(loader)


@pytest.mark.parametrize("is_typed", [True, False])
def test_minibatches_do_not_depend_on_how_dgl_sorts_its_edges(is_typed):
    whole = make_graph() if is_typed else plain(make_graph())
    each = CITES if is_typed else whole.canonical_etypes[0]
    items = {"paper": SEEDS["paper"]} if is_typed else SEEDS["paper"]

    def edges():
        loader = DataLoader(whole, items, loading.NeighborSampler([3, 2]), batch_size=7, seed=5)
        found = [[block.edges[each].data[dgl.EID].tolist() for block in b] for _, _, b in loader]
        loader.close()
        return found

    before, order = edges(), whole.adj_tensors("csc", etype=each)[2].clone()
    # it sorts the sources of each column
    whole.global_uniform_negative_sampling(10, etype=each)
    assert not torch.equal(whole.adj_tensors("csc", etype=each)[2], order)
    gc.collect()
    assert edges() == before


INNER, FIVE = loading.NeighborSampler([2]), {CITES: torch.arange(5)}
predict = partial(loading.as_edge_prediction_sampler, INNER)
# indices and sampler with a value of an argument
GIVEN = {
    "indices": lambda value: (value, INNER),
    "edges": lambda value: (value, predict()),
    "fanouts": lambda value: (SEEDS, loading.NeighborSampler(value)),
    "prob": lambda value: (SEEDS, loading.NeighborSampler([2], prob=value)),
    "feats": lambda value: (SEEDS, loading.NeighborSampler([2], prefetch_node_feats=value)),
    "reverse": lambda value: (FIVE, predict("reverse_types", reverse_etypes=value)),
    "eids": lambda value: (FIVE, predict("reverse_id", reverse_eids=value)),
    "negatives": lambda value: (FIVE, predict(negative_sampler=lambda g, edges: value)),
}
PAIR = torch.tensor([3]), torch.tensor([6])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("indices", torch.arange(3), "a tensor.*, but the graph has several node types"),
        ("indices", {"topic": torch.arange(3)}, "indices has the node type 'topic'"),
        ("indices", {"venue": torch.arange(7)}, "has 6 nodes of type venue"),
        ("fanouts", [{**BY_TYPE, "likes": 2}], r"fanouts\[0\] has the edge type 'likes'"),
        ("fanouts", [2, {WRITES: 2}], r"fanouts\[1\] has no edge type \('paper', 'cites'"),
        ("prob", "p", "prob or mask is 'p', which no edge type of the graph has"),
        ("feats", ["feat"], "prefetch_node_feats is .*the graph has several node types"),
        ("feats", {"paper": ["no"]}, "has 'no', but the graph's data of type 'paper' has 'f"),
        ("edges", {"likes": torch.arange(2)}, "indices has the edge type 'likes'"),
        ("edges", torch.arange(2), "the graph has several edge types"),
        ("edges", {"writes": [0], WRITES: [0]}, "indices has the type .* twice"),
        ("edges", {"in": torch.tensor([150])}, r"has 150 edges of type \('paper', 'in'"),
        ("reverse", None, "exclude is 'reverse_types', but reverse_etypes is None"),
        ("reverse", {"in": "writes"}, "is not the reverse of .*other types of nodes"),
        ("reverse", {"cites": "cites"}, "edge .* of type .* is not the reverse of edge"),
        ("eids", torch.arange(800), "exclude is 'reverse_id', but reverse_eids is a tensor"),
        ("eids", {"in": torch.arange(150)}, "reverse_eids has no id for each"),
        ("eids", {CITES: torch.arange(800)}, "edge .* is not the reverse of edge"),
        ("negatives", 5, "returned a int"),
        ("negatives", {IN: PAIR}, "returned nodes from 6 to 6 for .*but 'venue' has 6 nodes"),
    ],
)
def test_wrong_arguments_are_rejected_by_name(graph, name, value, message):
    with pytest.raises(ValueError, match=message):
        next(iter(DataLoader(graph, *GIVEN[name](value))))


def test_reverse_types_need_as_many_edges():
    graph = make_graph()
    graph.add_edges([0], [0], etype="writes")
    sampler = edge_sampler("reverse_types", (2,))
    with pytest.raises(ValueError, match="another number of edges"):
        DataLoader(graph, {"writes": torch.arange(3)}, sampler)


def test_graphs_that_cannot_be_sampled_are_rejected():
    empty = dgl.heterograph({("a", "x", "b"): ([], [])}, num_nodes_dict={"a": 3, "b": 0})
    with pytest.raises(ValueError, match="node types without nodes, as 'b'"):
        DataLoader(empty, {"a": [0]}, NODE_SAMPLER)
    block = dgl.to_block(make_graph(), {"paper": torch.arange(3)})
    with pytest.raises(ValueError, match="DataLoader does not support a DGLBlock"):
        DataLoader(block, {"paper": [0]}, NODE_SAMPLER)
