"""The link loader for PyG's `HeteroData`: its arguments, its minibatches, and what it rejects."""

import copy

import pytest
import torch
from interop import test_pyg_hetero
from interop.test_pyg_hetero import BUYS, ITEMS, LATEST, LIKES, USERS
from pyg_or_skip import pyg
from pyg_recorded import Recorded, assert_equal
from torch_geometric.data import HeteroData
from torch_geometric.loader import link_loader
from torch_geometric.sampler import NegativeSampling

from gcnzc.interop.pyg import LinkNeighborLoader

EDGES = 300


def make_data():
    data = test_pyg_hetero.make_data()
    data[BUYS].edge_label_index = data[BUYS].edge_index.flip(1)
    data[BUYS].edge_label = torch.ones(EDGES)
    return data


@pytest.fixture
def data():
    return make_data()


@pytest.mark.parametrize("edge_type", [BUYS, LIKES, ("item", "unseen", "user")])
@pytest.mark.parametrize(
    "neg_sampling",
    [None, "binary", ("binary", 0.5), ("binary", 2.5), ("triplet", 1), ("triplet", 3)],
)
@pytest.mark.parametrize("sampling", ["plain", "disjoint", "temporal"])
def test_fields_equal_those_of_pyg_for_the_same_samples(data, edge_type, neg_sampling, sampling):
    edges = torch.stack([torch.arange(20) % data[kind].num_nodes for kind in edge_type[::2]])
    options = {"edge_label_index": (edge_type, edges), "batch_size": 6}
    if isinstance(neg_sampling, tuple):
        neg_sampling = NegativeSampling(*neg_sampling)
    options["neg_sampling"] = neg_sampling
    is_triplet = neg_sampling is not None and NegativeSampling.cast(neg_sampling).is_triplet()
    if not is_triplet:
        options["edge_label"] = torch.arange(20) % 3
    ours = {"disjoint": True} if sampling == "disjoint" else {}
    if sampling == "temporal":
        options["edge_label_time"] = torch.arange(20, dtype=torch.int32) + 5
        ours["time_attr"] = "at"
    mine = list(LinkNeighborLoader(data, [3, 2], **ours, **options))
    sampler = Recorded(*mine, edge_type=edge_type)
    for batch, other in zip(mine, link_loader.LinkLoader(data, sampler, **options), strict=True):
        assert batch.metadata() == other.metadata()
        assert_equal(batch, other)


def test_weighted_negatives_are_not_later_than_their_edge(data):
    weight, times = torch.arange(ITEMS) % 2.0, torch.arange(EDGES) % LATEST
    data["item"].born[1] = 0
    sampling = NegativeSampling("triplet", 3, dst_weight=weight)
    options = {"time_attr": "born", "edge_label_time": times, "neg_sampling": sampling}
    for batch in LinkNeighborLoader(data, [2], BUYS, batch_size=50, **options):
        found = batch["item"].n_id[batch["item"].dst_neg_index]
        assert bool((weight[found] > 0).all())
        assert bool((data["item"].born[found] <= times[batch[BUYS].input_id, None]).all())


def test_edges_may_be_given_by_type(data):
    edges = data[BUYS].edge_index
    for given in (BUYS, list(BUYS), (BUYS, None), (("user", "item"), None), (BUYS, edges.int())):
        loader = LinkNeighborLoader(data, [2], given)
        assert loader.input_data.input_type == loader.input_type == BUYS
        assert torch.equal(torch.stack([loader.input_data.row, loader.input_data.col]), edges)
    loader = LinkNeighborLoader(data, [2], (BUYS, edges[:, :9]), input_id=torch.arange(9) * 2)
    assert isinstance(loader, pyg.loader.LinkNeighborLoader)
    assert loader([4])[BUYS].input_id.tolist() == [8]
    empty = torch.empty(2, 0, dtype=torch.int64)
    sampling = NegativeSampling("triplet", 2)
    assert list(LinkNeighborLoader(data, [2], (BUYS, empty), neg_sampling=sampling)) == []
    copied = copy.deepcopy(loader)
    assert len(copied) == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edge_label_index": None}, "edge_label_index is None, without an edge type"),
        ({"edge_label_index": torch.ones(2, 3).long()}, "without an edge type"),
        ({"edge_label_index": (None, torch.ones(2, 3).long())}, "without an edge type"),
        ({"edge_label_index": ("user",)}, "without an edge type"),
        ({"edge_label_index": (BUYS, None, None)}, "without an edge type"),
        ({"edge_label_index": ("user", "sells", "item")}, "no edge type with the name"),
        ({"edge_label_index": (("shop", "sells", "item"), None)}, "node type 'shop'"),
        (
            {"edge_label_index": (BUYS, torch.full((2, 3), ITEMS))},
            "from 40 to 40, but .* 40 nodes of type 'item'",
        ),
        ({"edge_label_index": (BUYS, torch.full((2, 3), USERS))}, "from 60 to 60"),
        ({"edge_label_index": (BUYS, torch.rand(2, 3))}, "float32"),
        ({"edge_label": torch.ones(5)}, "edge_label is .* for 300 edges"),
        ({"edge_label": torch.ones(EDGES), "neg_sampling": "triplet"}, "triplets have no labels"),
        ({"input_id": torch.arange(3)}, "input_id is .* of 300 items"),
        ({"time_attr": "at"}, "time_attr was given, but .edge_label_time. is not set"),
        ({"edge_label_time": torch.ones(EDGES)}, "edge_label_time was given without time_attr"),
        ({"edge_label_time": torch.ones(3), "time_attr": "at"}, r"label_time has shape \(3,\)"),
        ({"neg_sampling": "some"}, "neg_sampling is 'some'"),
        ({"neg_sampling_ratio": -1}, "neg_sampling_ratio"),
        ({"custom_cls": HeteroData}, "does not support custom_cls"),
        ({"batchsize": 5}, "LinkNeighborLoader has no argument batchsize"),
    ],
)
def test_invalid_and_unsupported_arguments_are_rejected_by_name(change, message):
    options = {"data": make_data(), "num_neighbors": [2], "edge_label_index": BUYS} | change
    with pytest.raises((TypeError, ValueError), match=message) as error:
        LinkNeighborLoader(**options)
    assert "tensor(" not in str(error.value)
