"""The drop-in loader for DGL: its arguments, its minibatches, and what it rejects."""

import inspect

import pytest
import torch
from dgl_or_skip import dgl
from interop.test_dgl_hetero import check_blocks, check_data

from gcnzc import FeatureTable
from gcnzc.interop.dgl import DataLoader

loading = dgl.dataloading
NODES, EDGES = 400, 2500
PREFETCH = {"prefetch_node_feats": ["feat"], "prefetch_labels": ["label"]}
PREFETCH["prefetch_edge_feats"] = ["weight"]


def make_graph(idtype=torch.int64, num_nodes=NODES):
    numbers = torch.Generator().manual_seed(1)
    src, dst = torch.randint(num_nodes, (2, EDGES), generator=numbers)
    # both ways, so that edge e's reverse is e + EDGES or e - EDGES
    both = torch.cat([src, dst]), torch.cat([dst, src])
    graph = dgl.graph(both, num_nodes=num_nodes, idtype=idtype)
    graph.ndata["feat"] = torch.randn(num_nodes, 6, generator=numbers)
    graph.ndata["label"] = torch.randint(3, (num_nodes,), generator=numbers)
    graph.ndata["cube"] = torch.randn(num_nodes, 2, 3, generator=numbers)
    graph.edata["weight"] = torch.rand(2 * EDGES, generator=numbers)
    return graph


@pytest.fixture(scope="module")
def graph():
    return make_graph()


def test_the_signature_begins_with_dgls():
    theirs = inspect.signature(loading.DataLoader.__init__).parameters
    ours = inspect.signature(DataLoader.__init__).parameters
    given = [name for name in theirs if name != "kwargs"]
    assert list(ours)[: len(given)] == given
    assert all(ours[name].default == theirs[name].default for name in given)
    more = list(ours)[len(given) :]
    assert " ".join(more) == "sampler_library seed rank world_size threads ahead tables kwargs"
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in more[:-1])


@pytest.mark.parametrize(
    ("sampler", "sampler_library"),
    [
        (loading.NeighborSampler([3, 2], **PREFETCH), "gcnzc"),
        (loading.MultiLayerNeighborSampler([3, 2], **PREFETCH), "gcnzc"),
        (loading.NeighborSampler([3, 2], prefetch_node_feats={"_N": ["cube", "feat"]}), "gcnzc"),
        (loading.MultiLayerFullNeighborSampler(2, **PREFETCH), "gcnzc"),
        (loading.NeighborSampler([3, 2], edge_dir="in", prob="weight", **PREFETCH), "gcnzc"),
        (loading.NeighborSampler([3, 2], replace=True, **PREFETCH), "gcnzc"),
        (loading.NeighborSampler([3, 2], fused=False, **PREFETCH), "gcnzc"),
        (loading.LaborSampler([3, 2], **PREFETCH), "dgl"),
        (loading.LaborSampler([3, 2], importance_sampling=1, **PREFETCH), "dgl"),
    ],
)
def test_blocks_have_the_fields_of_dgls_own_loader(graph, sampler, sampler_library):
    kwargs = {"batch_size": 50, "drop_last": False}
    theirs = loading.DataLoader(graph, torch.arange(120), sampler, **kwargs)
    for how in ("gcnzc", "dgl"):
        loader = DataLoader(graph, torch.arange(120), sampler, **kwargs, sampler_library=how)
        assert loader.sampler_library == (sampler_library if how == "gcnzc" else "dgl")
        assert len(loader) == len(theirs) == 3
        with pytest.warns(UserWarning, match="CPU affinity"):
            expected = next(iter(theirs))
        found = next(iter(loader))
        assert [type(part) for part in found] == [type(part) for part in expected]
        assert torch.equal(found[1], expected[1])
        for mine, other in zip(found[2], expected[2], strict=True):
            assert type(mine) is type(other)
            assert mine.canonical_etypes == other.canonical_etypes
            assert (mine.idtype, mine.device) == (other.idtype, other.device)
            for kind in ("srcdata", "dstdata", "edata"):
                assert set(getattr(mine, kind)) == set(getattr(other, kind)), kind
            check_data(graph, mine)


def test_a_subgraph_of_another_graph_can_be_loaded(graph):
    # its data are rows of rows, until they are read
    part = dgl.node_subgraph(graph, torch.arange(50, NODES))
    part = dgl.node_subgraph(part, torch.arange(10, NODES - 50))
    sampler = loading.NeighborSampler([3, 3], prefetch_labels=["label"])
    for inputs, outputs, blocks in DataLoader(part, torch.arange(40), sampler, batch_size=20):
        assert torch.equal(blocks[0].srcdata["feat"], graph.ndata["feat"][inputs + 60])
        assert torch.equal(blocks[-1].dstdata["label"], graph.ndata["label"][outputs + 60])
        edges = blocks[0].edata[dgl.EID]
        assert torch.equal(blocks[0].edata["weight"], part.edata["weight"][edges])


def test_data_that_requires_a_gradient_is_gathered_with_it():
    graph = make_graph()
    learned = torch.randn(NODES, 2, requires_grad=True)
    graph.ndata["learned"] = learned
    inputs, _, blocks = next(iter(DataLoader(graph, torch.arange(5), NEIGHBORS, batch_size=5)))
    blocks[0].srcdata["learned"].sum().backward()
    expected = torch.zeros(NODES, 2)
    expected[inputs] = 1
    assert torch.equal(learned.grad, expected)


def test_data_may_be_replaced_between_epochs_and_by_tables():
    graph, sampler = make_graph(), loading.NeighborSampler([3], prefetch_node_feats=["feat"])
    loader = DataLoader(graph, torch.arange(50), sampler, batch_size=20)
    for _ in range(2):
        graph.ndata["feat"] = torch.rand(NODES, 6)
        for _, _, blocks in loader:
            check_data(graph, blocks[0])
    tables = {"feat": FeatureTable.quantized(graph.ndata["feat"])}
    for inputs, _, blocks in DataLoader(graph, torch.arange(50), sampler, tables=tables):
        assert torch.equal(blocks[0].srcdata["feat"], tables["feat"].gather(inputs))


def test_use_ddp_shares_the_items_among_the_default_process_group(graph):
    import torch.distributed as dist

    with pytest.raises((RuntimeError, ValueError), match="process group"):
        DataLoader(graph, torch.arange(9), loading.NeighborSampler([3]), use_ddp=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        loader = DataLoader(graph, torch.arange(9), loading.NeighborSampler([3]), use_ddp=True)
    finally:
        dist.destroy_process_group()
    assert (loader.options.rank, loader.options.world_size) == (0, 1)


NEIGHBORS = loading.NeighborSampler([3])
HETERO = dgl.heterograph({("a", "x", "b"): ([0, 1], [1, 0]), ("b", "y", "a"): ([0], [1])})


def sampler(**options):
    return {"graph_sampler": loading.NeighborSampler([3], **options)}


def predicted(**options):
    return {"graph_sampler": loading.as_edge_prediction_sampler(NEIGHBORS, **options)}


def test_negatives_may_be_those_of_a_user(graph):
    drawn = predicted(negative_sampler=lambda g, edges: (g.find_edges(edges)[0], edges % NODES))
    for _, pairs, negatives, _ in DataLoader(graph, torch.arange(50), **drawn, batch_size=20):
        edges = pairs.edata[dgl.EID]
        src, dst = (negatives.ndata[dgl.NID][ids] for ids in negatives.edges(order="eid"))
        assert torch.equal(src, graph.find_edges(edges)[0])
        assert torch.equal(dst, edges % NODES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"graph": HETERO}, r"indices is a tensor(.|\n)*the graph has several node types"),
        ({"graph": 5}, r"graph: DataLoader does not support 5"),
        ({"graph_sampler": loading.ShaDowKHopSampler([3])}, "does not support a ShaDowKHopSampler"),
        ({"graph_sampler": loading.SAINTSampler("node", 9)}, "does not support a SAINTSampler"),
        (sampler(output_device="cuda"), "does not support a sampler's output_device cuda"),
        (sampler(prefetch_node_feats=["no"]), "prefetch_node_feats has 'no', .* '_N' has 'feat'"),
        (sampler(prefetch_labels=["no"]), r"prefetch_labels has 'no'"),
        (sampler(prefetch_edge_feats=["feat"]), "edge_feats has 'feat', .* has 'weight'"),
        (
            predicted(exclude="reverse_types", reverse_etypes={}),
            "exclude is 'reverse_types', but reverse_etypes is",
        ),
        ({"gpu_cache": {"node": {"feat": 9}}}, "does not support gpu_cache"),
        ({"sampler": "dgl"}, "sampler is 'dgl', not an order"),
        ({"sampler_library": "pyg"}, "sampler_library is 'pyg'"),
        ({"collate_fn": print}, "does not support collate_fn"),
        ({"batchsize": 3}, "DataLoader has no argument batchsize"),
        (predicted(negative_sampler=lambda *_: 5), "returned int"),
        ({"sampler": [1], "shuffle": True}, "mutually exclusive with shuffle"),
        ({"sampler": [1], "rank": 0, "world_size": 2}, "a sampler was given as well"),
        ({"rank": 0}, "rank 0 and world_size None"),
        ({"indices": {"_U": torch.arange(3)}}, "indices has the node type '_U'"),
        ({"indices": torch.ones(NODES, dtype=torch.bool)}, "torch.bool(.|\n)*nonzero"),
        ({"indices": torch.tensor([1, NODES])}, "reach from 1 to 400, but the graph has 400 nodes"),
        ({"indices": torch.tensor([-1])}, "reach from -1 to -1"),
        ({"indices": torch.tensor([3, 4, 3])}, "index 3 occurs twice"),
        ({"device": "meta"}, "device meta"),
    ],
)
def test_unsupported_arguments_are_rejected_by_name(graph, change, message):
    arguments = {"graph": graph, "indices": torch.arange(9), "graph_sampler": NEIGHBORS}
    with pytest.raises((TypeError, ValueError), match=message):
        next(iter(DataLoader(**(arguments | change))))


def test_fanouts_may_be_by_edge_type(graph):
    sampler = loading.NeighborSampler([{("_N", "_E", "_N"): 3}])
    loader = DataLoader(graph, torch.arange(9), sampler, batch_size=9)
    check_blocks(graph, next(iter(loader))[2], [3])


def test_a_gpu_that_dgl_does_not_support_is_reported(graph):
    if torch.cuda.is_available():
        pytest.skip("torch has CUDA, and DGL may")
    with pytest.raises(RuntimeError, match=r"does not support blocks on cuda(.|\n)*gcnzc\.Loader"):
        DataLoader(graph, torch.arange(9), NEIGHBORS, use_uva=True)
