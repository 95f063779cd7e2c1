"""The drop-in loaders for PyG: their arguments, their minibatches, and what they reject."""

import copy
import inspect
import sys

import numpy as np
import pytest
import torch
from pyg_or_skip import pyg
from pyg_recorded import Recorded, assert_equal, assert_same
from torch_geometric.data import Data
from torch_geometric.loader import link_loader, node_loader
from torch_geometric.nn import SAGEConv
from torch_geometric.sampler import NegativeSampling
from torch_geometric.utils import trim_to_layer

from gcnzc import FeatureTable
from gcnzc.interop.pyg import LinkNeighborLoader, NeighborLoader, TableStore, importing

NODES, EDGES = 300, 3000
EDGE = torch.tensor([[0], [1]])


@pytest.fixture(scope="module")
def data():
    numbers = torch.Generator().manual_seed(2)
    return Data(
        x=torch.randn(NODES, 6, generator=numbers),
        edge_index=torch.randint(NODES, (2, EDGES), generator=numbers),
        y=torch.randint(4, (NODES,), generator=numbers),
        train_mask=torch.rand(NODES, generator=numbers) < 0.4,
        cube=torch.randn(NODES, 2, 3, generator=numbers),
        near_index=torch.randint(NODES, (NODES,), generator=numbers),
        as_array=np.arange(NODES),
        edge_attr=torch.randn(EDGES, 2, generator=numbers),
        edge_kind=torch.randint(3, (EDGES,), generator=numbers),
        two_index=torch.randint(9, (2, EDGES), generator=numbers),
        name="a graph",
        scale=torch.tensor(0.5),
        table=torch.arange(7),
        num_nodes=NODES,
    )


def counts(batch):
    return batch.num_sampled_nodes, batch.num_sampled_edges


@pytest.mark.parametrize("ours", [NeighborLoader, LinkNeighborLoader])
def test_the_signatures_begin_with_pygs(ours):
    theirs = getattr(pyg.loader, ours.__name__)
    wanted = inspect.signature(theirs.__init__).parameters
    found = inspect.signature(ours.__init__).parameters
    given = [name for name in wanted if name != "kwargs"]
    assert list(found)[: len(given)] == given
    for name in given:
        assert (found[name].default, found[name].kind) == (wanted[name].default, wanted[name].kind)
    more = list(found)[len(given) :]
    assert " ".join(more) == "input_id seed device rank world_size threads ahead tables kwargs"
    assert all(found[name].kind is inspect.Parameter.KEYWORD_ONLY for name in more[:-1])


def test_edge_index_may_have_other_dtypes_and_strides(data):
    data = copy.copy(data)
    plain = data.edge_index
    expected = [batch.e_id for batch in NeighborLoader(data, [3, 2], batch_size=100, seed=0)]
    sized = pyg.EdgeIndex(plain, sparse_size=(NODES, NODES))
    for edges in (plain.int(), sized, plain.T.clone().T):
        data.edge_index = edges
        loader = NeighborLoader(data, [3, 2], batch_size=100, seed=0)
        for batch, wanted in zip(loader, expected, strict=True):
            assert type(batch.edge_index) is torch.Tensor
            assert batch.edge_index.dtype == torch.int64
            assert torch.equal(batch.e_id, wanted)


def test_fields_equal_those_of_pyg_for_the_same_nodes(data):
    split = copy.copy(data)
    split.edge_label_index, split.edge_label = data.edge_index[:, :5], torch.ones(5)
    # attributes that the loader sets replace those of the data
    other = copy.copy(data)
    other.batch, other.input_id = torch.zeros(NODES), torch.zeros(NODES)
    other.e_id = torch.arange(EDGES) + 5
    for given in (data, split, other):
        mine = next(iter(NeighborLoader(given, [3, 2], data.train_mask, batch_size=16)))
        sampled = copy.copy(mine)
        # PyG takes positions in the graph, not what the data calls them
        sampled.e_id = mine.e_id - 5 * (given is other)
        nodes = {"input_nodes": data.train_mask, "batch_size": 16}
        theirs = node_loader.NodeLoader(given, Recorded(sampled), **nodes)
        assert_equal(mine, next(iter(theirs)))


NEGATIVES = [None, "binary", ("binary", 2.5), ("binary", 0.3), ("triplet", 1), ("triplet", 3)]


@pytest.mark.parametrize("neg_sampling", NEGATIVES)
@pytest.mark.parametrize("first", [None, 0, 1])
def test_fields_of_links_equal_those_of_pyg_for_the_same_samples(data, neg_sampling, first):
    if isinstance(neg_sampling, tuple):
        neg_sampling = NegativeSampling(*neg_sampling)
    links = {"edge_label_index": data.edge_index[:, :100], "neg_sampling": neg_sampling}
    is_triplet = neg_sampling is not None and NegativeSampling.cast(neg_sampling).is_triplet()
    if first is not None and not is_triplet:
        # those that begin with 0 are shifted, if negatives have label 0
        links["edge_label"] = torch.arange(100) % 3 + first
    mine = list(LinkNeighborLoader(data, [3, 2], batch_size=64, **links))
    theirs = link_loader.LinkLoader(data, Recorded(*mine), batch_size=64, **links)
    assert_same(mine, theirs)


def test_all_edges_are_seeds_if_none_are_named(data):
    (batch,) = LinkNeighborLoader(data, [1], neg_sampling_ratio=2.0, batch_size=EDGES)
    assert torch.equal(batch.n_id[batch.edge_label_index][:, :EDGES], data.edge_index)
    assert batch.edge_label.tolist() == [1.0] * EDGES + [0.0] * (2 * EDGES)


# of what PyG uses of `typing`, on Python 3.13
@pytest.mark.filterwarnings("ignore:Failing to pass a value to the 'type_params'")
def test_full_neighbourhoods_give_the_outputs_of_the_whole_graph(data):
    layers = [SAGEConv(6, 5).double(), SAGEConv(5, 4).double()]
    hidden = data.x.double()
    for layer in layers:
        hidden = layer(hidden, data.edge_index)
    loader = NeighborLoader(data, [-1, -1], torch.randperm(NODES), batch_size=64)
    for batch in loader:
        for trims in (False, True):
            out, edges = batch.x.double(), batch.edge_index
            for depth, layer in enumerate(layers):
                if trims:
                    out, edges, _ = trim_to_layer(depth, *counts(batch), out, edges)
                out = layer(out, edges)
            expected = hidden[batch.n_id[: batch.batch_size]]
            # sums may be in another order
            torch.testing.assert_close(out[: batch.batch_size], expected, rtol=1e-12, atol=1e-12)


def test_a_failed_import_of_pyg_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_geometric.sampler", None)
    with pytest.raises(ImportError, match=r"the import of PyG failed: .*\n\nhint: pip install"):
        importing.import_pyg()


def test_negatives_are_sampled_by_weight(data):
    only = torch.zeros(NODES)
    only[[5, 6]] = 1
    sampling = NegativeSampling("binary", 4, src_weight=only, dst_weight=only.roll(1))
    edges = data.edge_index[:, :50]
    batch = next(iter(LinkNeighborLoader(data, [2], edges, batch_size=50, neg_sampling=sampling)))
    src, dst = batch.n_id[batch.edge_label_index][:, 50:]
    assert (set(src.tolist()), set(dst.tolist())) == ({5, 6}, {6, 7})
    sampling = NegativeSampling("binary", 4, src_weight=only[:9], dst_weight=only)
    with pytest.raises(ValueError, match="neg_sampling has 9 weights for 300 nodes"):
        LinkNeighborLoader(data, [2], neg_sampling=sampling)


@pytest.mark.parametrize("Loader", [NeighborLoader, LinkNeighborLoader])
def test_transform_is_applied_to_each_minibatch_and_does_not_end_an_epoch(data, Loader):
    loader = Loader(data, [2], batch_size=500, transform=lambda batch: len(batch.n_id))
    assert all(isinstance(each, int) for each in loader)
    loader = Loader(data, [2], batch_size=500, transform=lambda batch: next(iter(())))
    with pytest.raises(RuntimeError, match=r"(?s)transform raised StopIteration.*\n\nhint: "):
        list(loader)


def test_num_workers_sets_the_number_of_threads(data):
    assert NeighborLoader(data, [2], num_workers=3).threads == 3
    assert LinkNeighborLoader(data, [2], num_workers=3, threads=1).threads == 1
    quiet = {"num_workers": 1, "persistent_workers": True, "pin_memory": True}
    quiet |= {"filter_per_worker": True, "worker_init_fn": print}
    loader = NeighborLoader(data, [2], batch_size=100, **quiet)
    with loader.enable_cpu_affinity(loader_cores=[0]), loader.enable_multithreading():
        assert len(list(loader)) == 3


@pytest.mark.parametrize("Loader", [NeighborLoader, LinkNeighborLoader])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": Data(adj_t=object(), num_nodes=3)}, "does not support adj_t"),
        ({"data": (EDGE, EDGE)}, "a tuple that is not a pair of stores(.|\n)*hint: .*GraphStore"),
        ({"data": Data(torch.rand(2, 2).requires_grad_(), EDGE)}, "x requires a gradient"),
        ({"data": Data(torch.eye(2).to_sparse_coo(), EDGE)}, "x is of torch.sparse_coo"),
        ({"data": Data(torch.eye(2), EDGE, names=["a", "b"])}, r"data.names is \['a', 'b'\], w"),
        ({"num_neighbors": {("a", "to", "b"): [2]}}, "a Data has no edge types"),
        ({"transform_sampler_output": print}, "does not support transform_sampler_output"),
        ({"neighbor_sampler": object()}, "does not support neighbor_sampler(.|\n)*pyg-lib"),
        ({"sampler": [1], "shuffle": True}, "mutually exclusive with shuffle"),
        ({"sampler": [1], "rank": 0, "world_size": 2}, "a sampler was given as well"),
    ],
)
def test_unsupported_arguments_are_rejected_by_name(data, Loader, change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Loader(**({"data": data, "num_neighbors": [2]} | change))


def test_a_closed_loader_cannot_be_used(data):
    with NeighborLoader(data, [2], batch_size=10) as loader:
        iterator = iter(loader)
        next(iterator)
    for use in (lambda: next(iterator), lambda: iter(loader), lambda: loader([1])):
        with pytest.raises(RuntimeError, match="this loader is closed"):
            use()


def test_a_table_store_is_a_feature_store(data):
    store = TableStore({"x": FeatureTable(data.x), ("author", "x"): FeatureTable(data.x[:9])})
    ids = torch.tensor([5, 5, 0])
    assert torch.equal(store.get_tensor(None, "x", ids), data.x[ids])
    assert torch.equal(store.get_tensor("author", "x", None), data.x[:9])
    assert torch.equal(store["author", "x", slice(2, 6, 2)], data.x[2:6:2])
    assert torch.equal(store["author", "x", 3], data.x[3])
    assert store.get_tensor_size("author", "x") == (9, 6)
    assert store.get_tensor_size("author", "y") is None
    attrs = store.get_all_tensor_attrs()
    assert [(attr.group_name, attr.attr_name) for attr in attrs] == [(None, "x"), ("author", "x")]
    assert store.put_tensor(data.x.numpy() * 2, None, "z", None)
    assert torch.equal(store.get_tensor(None, "z", ids), data.x[ids] * 2)
    assert store.remove_tensor(None, "z", None)
    assert not store.remove_tensor(None, "z", None)
    assert store.get_tensor(None, "z", ids) is None
    with pytest.raises(ValueError, match="None, x was given with an index"):
        store.put_tensor(data.x, None, "x", ids)
    with pytest.raises(ValueError, match="is a list"):
        store.put_tensor([1, 2], None, "x", None)
    with pytest.raises(IndexError):
        store.get_tensor(None, "x", torch.tensor([NODES]))
