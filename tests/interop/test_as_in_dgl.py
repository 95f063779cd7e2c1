"""The DGL loader behaves as DGL's with rare arguments and empty epochs."""

import pytest
import torch
from dgl_or_skip import dgl

import gcnzc.interop.dgl as interop_dgl
from gcnzc.interop.dgl import DataLoader, EdgeDataLoader, NodeDataLoader

loading = dgl.dataloading
NODES, EDGES = 30, 200
# DGL's own loader advises to
NOT_PINNED = pytest.mark.filterwarnings("ignore:Dataloader CPU affinity")


@pytest.fixture(scope="module")
def graph():
    numbers = torch.Generator().manual_seed(3)
    src, dst = torch.randint(NODES, (2, EDGES), generator=numbers)
    return dgl.graph((src, dst), num_nodes=NODES)


def sampler(exclude=None, **kwargs):
    return loading.as_edge_prediction_sampler(loading.NeighborSampler([-1]), exclude, **kwargs)


@NOT_PINNED
def test_a_reverse_id_that_is_no_edge_excludes_nothing(graph):
    # as if every edge had a reverse behind all edges, where the graph has none
    reverse = {"exclude": "reverse_id", "reverse_eids": torch.arange(EDGES) + EDGES}
    ours, theirs = (
        Loader(graph, torch.arange(EDGES), sampler(**reverse), batch_size=20)
        for Loader in (DataLoader, loading.DataLoader)
    )
    assert ours.sampler_library == "gcnzc"
    drawn, wanted = (
        [sorted(blocks[0].edata[dgl.EID].tolist()) for _, _, blocks in loader]
        for loader in (ours, theirs)
    )
    assert drawn == wanted


@NOT_PINNED
def test_indices_may_be_a_dictionary_with_the_only_type(graph):
    ids = torch.tensor([5, 2, 9])
    ours, theirs = (
        next(iter(Loader(graph, {"_N": ids}, loading.NeighborSampler([-1]), batch_size=3)))
        for Loader in (DataLoader, loading.DataLoader)
    )
    assert type(ours[0]) is type(theirs[0])
    assert list(ours[1]) == list(theirs[1]) == ["_N"]
    assert torch.equal(ours[1]["_N"], theirs[1]["_N"])
    (pairs,) = [pairs for _, pairs, _ in DataLoader(graph, {"_E": ids}, sampler(), batch_size=3)]
    assert pairs.edata[dgl.EID].tolist() == [5, 2, 9]
    with pytest.raises(ValueError, match="indices has the node type 'paper'"):
        DataLoader(graph, {"paper": ids}, loading.NeighborSampler([2]))


@pytest.mark.processes
def test_worker_processes_return_the_minibatches_of_the_process_that_starts_them(graph):
    # as under Accelerate with num_workers; the worker starts without DGL
    graph = graph.clone()
    graph.ndata["feat"] = torch.arange(2 * NODES).view(NODES, 2)
    drawn = loading.NeighborSampler([3, 2], prefetch_node_feats=["feat"])
    loader = DataLoader(graph, torch.arange(NODES), drawn, batch_size=8, shuffle=True, seed=1)

    def made(epoch, **kwargs):
        loader.set_epoch(epoch)
        given = {"batch_sampler": loader.batch_sampler, "collate_fn": loader.collate_fn}
        batches = torch.utils.data.DataLoader(loader.dataset, **given, **kwargs)
        found = []
        for nodes, outputs, blocks in batches:
            assert torch.equal(blocks[0].srcdata["feat"], graph.ndata["feat"][nodes])
            edges = [block.edata[dgl.EID].tolist() for block in blocks]
            found.append((nodes.tolist(), outputs.tolist(), edges))
        return found

    first, second = made(0), made(1)
    assert first != second
    assert made(1, num_workers=1, multiprocessing_context="forkserver") == second


def test_names_that_are_not_replaced_are_dgls():
    for name in ("NeighborSampler", "LaborSampler", "negative_sampler", "GraphDataLoader"):
        assert getattr(interop_dgl, name) is getattr(loading, name)
    with pytest.raises(ImportError, match="cannot import name 'NoSampler'"):
        from gcnzc.interop.dgl import NoSampler  # noqa: F401


def ids_of(loader):
    return [[block.edata[dgl.EID].tolist() for block in blocks] for *_, blocks in loader]


def test_a_node_data_loader_has_the_arguments_of_older_versions(graph):
    given = graph, torch.arange(NODES), loading.MultiLayerNeighborSampler([3, 2])
    options = {"batch_size": 8, "shuffle": True, "drop_last": True, "num_workers": 1, "seed": 1}
    loader = NodeDataLoader(*given, "cpu", False, 0, **options)
    assert type(loader) is DataLoader
    assert ids_of(loader) == ids_of(DataLoader(*given, **options))
    feat, label = torch.rand(NODES, 3), torch.arange(NODES)
    loaded = {"load_input": {"feat": feat}, "load_output": {"label": label}}
    loader = NodeDataLoader(*given, **loaded, async_load=True)
    inputs, outputs, blocks = next(iter(loader))
    assert torch.equal(blocks[0].srcdata["feat"], feat[inputs])
    assert torch.equal(blocks[-1].dstdata["label"], label[outputs])
    assert not graph.ndata


@pytest.mark.parametrize("is_given", [False, True])
def test_an_edge_data_loader_has_the_arguments_of_older_versions(graph, is_given):
    src, dst = graph.edges()
    graph = dgl.graph((torch.cat([src, dst]), torch.cat([dst, src])))
    reverse = torch.cat([torch.arange(EDGES) + EDGES, torch.arange(EDGES)])
    options = {"batch_size": 50, "shuffle": True, "num_workers": 1, "seed": 1}
    edges = {"exclude": "reverse_id", "reverse_eids": reverse}
    edges["negative_sampler"] = loading.negative_sampler.Uniform(2)
    predicted = loading.as_edge_prediction_sampler(loading.NeighborSampler([3]), **edges)
    if is_given:
        loader = EdgeDataLoader(graph, torch.arange(EDGES), predicted, **options)
    else:
        inner = loading.NeighborSampler([3])
        loader = EdgeDataLoader(graph, torch.arange(EDGES), inner, "cpu", **edges, **options)
    wanted = ids_of(DataLoader(graph, torch.arange(EDGES), predicted, **options))
    assert ids_of(loader) == wanted
    assert len(next(iter(loader))) == 4
    with pytest.raises(ValueError, match="does not support g_sampling"):
        EdgeDataLoader(graph, torch.arange(EDGES), predicted, g_sampling=graph)
