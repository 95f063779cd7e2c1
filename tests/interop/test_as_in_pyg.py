"""The PyG loaders behave as PyG's with rare arguments and empty epochs."""

import pytest
import torch
from pyg_or_skip import pyg
from pyg_recorded import assert_equal
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE
from torch_geometric.sampler.base import NumNeighbors

import gcnzc.interop.pyg as interop_pyg
from gcnzc import FeatureTable
from gcnzc.interop.pyg import LinkNeighborLoader, NeighborLoader
from gcnzc.interop.pyg.sampler import NeighborSampler

NODES, EDGES = 30, 200
NO_NODES, NO_EDGES = torch.zeros(NODES, dtype=torch.bool), torch.empty(2, 0, dtype=torch.int64)
NO_LINKS = {"edge_label_index": NO_EDGES}


@pytest.fixture(scope="module")
def data():
    numbers = torch.Generator().manual_seed(3)
    return Data(
        x=torch.randn(NODES, 4, generator=numbers),
        edge_index=torch.randint(NODES, (2, EDGES), generator=numbers),
    )


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("Loader", "items"),
    [
        (NeighborLoader, {"input_nodes": torch.arange(3), "batch_size": 4, "drop_last": True}),
        (NeighborLoader, {"input_nodes": NO_NODES}),
        (NeighborLoader, {"input_nodes": []}),
        (LinkNeighborLoader, NO_LINKS),
        (LinkNeighborLoader, NO_LINKS | {"edge_label": NO_EDGES[0], "neg_sampling": "binary"}),
        (LinkNeighborLoader, {"batch_size": EDGES + 1, "drop_last": True}),
    ],
)
def test_an_epoch_without_minibatches_is_no_error(data, Loader, items, shuffle):
    loader = Loader(data, [2], shuffle=shuffle, **items)
    assert len(loader) == 0
    # and the next epoch is as empty
    assert [list(loader) for _ in range(2)] == [[], []]
    other = Loader(data, [2], shuffle=shuffle, **items)
    other.load_state_dict(loader.state_dict())
    assert list(other) == []


def test_num_neighbors_may_be_pygs_class(data):
    plain, named = (
        next(iter(NeighborLoader(data, numbers, batch_size=9, seed=1)))
        for numbers in ([3, 2], NumNeighbors([3, 2]))
    )
    assert torch.equal(plain.e_id, named.e_id)
    with pytest.raises(ValueError, match="a Data has no edge types"):
        NeighborLoader(data, NumNeighbors({("a", "to", "b"): [3]}))


def test_items_may_have_the_type_none_and_no_other(data):
    edges = data.edge_index[:, :4]
    assert NeighborLoader(data, [2], (None, [3, 1])).input_data.node.tolist() == [3, 1]
    links = LinkNeighborLoader(data, [2], (None, edges)).input_data
    assert torch.equal(torch.stack([links.row, links.col]), edges)
    with pytest.raises(
        ValueError, match="input_nodes has the type 'paper', but a Data has no types"
    ):
        NeighborLoader(data, [2], ("paper", [3, 1]))
    with pytest.raises(ValueError, match=r"edge_label_index has the type .*, but a Data has none"):
        LinkNeighborLoader(data, [2], (("paper", "to", "paper"), edges))


def test_data_may_have_no_edges_and_tables_replace_attributes(data):
    table = FeatureTable.quantized(data.x)
    for batch in NeighborLoader(Data(x=data.x, y=data.x), [2], batch_size=9, tables={"x": table}):
        assert batch.edge_index.shape == (2, 0)
        assert torch.equal(batch.x, table.gather(batch.n_id))
        assert torch.equal(batch.y, data.x[batch.n_id])


def test_pygs_layerwise_inference_accepts_the_loader(data):
    model = GraphSAGE(4, hidden_channels=8, num_layers=2, out_channels=3).eval()
    loader = NeighborLoader(data, [-1], batch_size=7)
    with torch.no_grad():
        expected = model(data.x, data.edge_index)
    for cache in (False, True):
        found = model.inference(loader, cache=cache)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_collate_fn_and_filter_fn_give_a_whole_minibatch(data):
    loader = NeighborLoader(data, [2], input_nodes=torch.arange(9, 20))
    batch = loader.filter_fn(loader.collate_fn([3, 1]))
    assert batch.n_id[:2].tolist() == [12, 10]
    assert batch.batch_size == 2
    assert torch.equal(batch.x, data.x[batch.n_id])


def test_loaders_have_the_attributes_of_pygs_loaders(data):
    kwargs = {"batch_size": 5, "num_workers": 2, "pin_memory": True, "drop_last": True}
    mask = NO_NODES.clone()
    mask[[3, 8]] = True
    loader = NeighborLoader(data, [3, 2], mask, **kwargs)
    assert isinstance(loader, pyg.loader.NeighborLoader)
    assert repr(loader) == "NeighborLoader()"
    assert {name: getattr(loader, name) for name in kwargs} == kwargs
    assert loader.input_type is None
    assert loader.input_data.node.tolist() == [3, 8]
    assert loader.input_data[torch.tensor([1])].input_id.tolist() == [8]
    assert loader.node_sampler.num_neighbors.get_values() == [3, 2]
    assert len(loader.node_sampler.num_neighbors) == 2
    links = LinkNeighborLoader(data, [3], data.edge_index[:, :9], torch.arange(9), **kwargs)
    assert isinstance(links, pyg.loader.LinkNeighborLoader)
    assert repr(links) == "LinkNeighborLoader()"
    assert links.input_type is None
    assert torch.equal(links.input_data.row, data.edge_index[0, :9])
    assert torch.equal(links.input_data.col, data.edge_index[1, :9])
    assert links.input_data[[4, 2]].label.tolist() == [4, 2]
    assert links.link_sampler.num_neighbors.get_values() == [3]


def test_names_that_are_not_replaced_are_pygs(data, monkeypatch):
    replaced = {"NeighborLoader", "LinkNeighborLoader"}
    for name in {*pyg.loader.__all__} - replaced:
        assert getattr(interop_pyg, name) is getattr(pyg.loader, name)
    monkeypatch.setattr(pyg.loader, "_private", 1, raising=False)
    assert not hasattr(interop_pyg, "_private")
    from gcnzc.interop.pyg import LinkNeighborLoader, RandomNodeLoader

    assert LinkNeighborLoader is interop_pyg.LinkNeighborLoader
    assert sum(batch.num_nodes for batch in RandomNodeLoader(data, 4)) == NODES
    with pytest.raises(ImportError, match="cannot import name 'NoLoader'"):
        from gcnzc.interop.pyg import NoLoader  # noqa: F401


@pytest.mark.parametrize("subgraph_type", ["directional", "bidirectional", "induced"])
def test_pygs_loaders_of_nodes_and_edges_accept_the_sampler(data, subgraph_type):
    data = data.clone()
    data.edge_attr = torch.arange(EDGES)
    typed = data.to_heterogeneous(
        node_type_names=["user"], edge_type_names=[("user", "to", "user")]
    )
    for given, kind in ((data, None), (typed, "user")):
        sampler = NeighborSampler(given, [3, 2], subgraph_type, seed=3)
        edge_type = kind and (kind, "to", kind)
        links = {"edge_label_index": (edge_type, data.edge_index), "neg_sampling": "binary"}
        for Loader, items in (
            (pyg.loader.NodeLoader, {"input_nodes": kind}),
            (pyg.loader.LinkLoader, links if kind else {"neg_sampling": "triplet"}),
        ):
            torch.manual_seed(1)
            first, second = (list(Loader(given, sampler, batch_size=9, **items)) for _ in range(2))
            torch.manual_seed(1)
            for batch, other in zip(
                first, Loader(given, sampler, batch_size=9, **items), strict=True
            ):
                assert_equal(batch, other)
                nodes, edges = batch if kind is None else batch[kind], batch
                edges = batch if kind is None else batch[edge_type]
                assert torch.equal(nodes.x, data.x[nodes.n_id])
                if "e_id" in edges:
                    found = nodes.n_id[edges.edge_index]
                    reverse = subgraph_type == "bidirectional"
                    ends = data.edge_index[:, edges.e_id]
                    is_own = (found == ends).all(0)
                    assert bool((is_own | (reverse & (found == ends.flip(0)).all(0))).all())
            assert any(len(one.n_id if kind is None else one[kind].n_id) for one in second)


def test_the_sampler_samples_by_time_in_subgraphs_of_their_own(data):
    data = data.clone()
    data.born = torch.arange(NODES)
    sampler = NeighborSampler(data, [3, 2], time_attr="born")
    times = data.born[data.edge_index].amax(0)
    edges = {"edge_label_index": data.edge_index, "edge_label_time": times}
    for batch in pyg.loader.LinkLoader(data, sampler, batch_size=9, **edges):
        limits = batch.edge_label_time.repeat(2)[batch.batch]
        assert bool((data.born[batch.n_id] <= limits).all())
    times = torch.arange(NODES).clamp(min=9)
    for batch in pyg.loader.NodeLoader(data, sampler, input_time=times, batch_size=7):
        assert bool((batch.born <= batch.seed_time[batch.batch]).all())
    assert NeighborSampler(data, [3], disjoint=True).disjoint
