"""The node loader for PyG's `HeteroData`: its arguments, its minibatches, and what it rejects."""

import copy

import numpy as np
import pyg_or_skip  # noqa: F401
import pytest
import torch
from pyg_recorded import Recorded, assert_equal, assert_same
from torch_geometric import typing as pyg_typing
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import node_loader
from torch_geometric.sampler import NumNeighbors

from gcnzc import FeatureTable
from gcnzc.interop.pyg import LinkNeighborLoader, NeighborLoader

USERS, ITEMS, TAGS = 60, 40, 9
BUYS, BOUGHT, HAS = ("user", "buys", "item"), ("item", "rev_buys", "user"), ("tag", "on", "item")
LIKES = ("item", "like", "item")
LATEST = 20  # times are below this


def make_data():
    numbers = torch.Generator().manual_seed(3)

    def edges(sources, targets, count):
        ends = [torch.randint(each, (count,), generator=numbers) for each in (sources, targets)]
        return torch.stack(ends)

    data = HeteroData(name="shop")
    data["user"].x = torch.randn(USERS, 5, generator=numbers)
    data["user"].y = torch.randint(3, (USERS,), generator=numbers)
    data["user"].train_mask = torch.rand(USERS, generator=numbers) < 0.5
    data["user"].born = torch.randint(LATEST, (USERS,), generator=numbers)
    data["item"].x = torch.randn(ITEMS, 7, generator=numbers).double()
    data["item"].image = torch.randn(ITEMS, 2, 3, generator=numbers)
    data["item"].price = np.arange(ITEMS)
    data["item"].born = torch.randint(LATEST, (ITEMS,), generator=numbers)
    data["item"].kinds = torch.arange(4)
    data["tag"].num_nodes = TAGS
    data[BUYS].edge_index = edges(USERS, ITEMS, 300)
    data[BUYS].edge_attr = torch.randn(300, 2, generator=numbers)
    data[BUYS].pair_index = torch.randint(9, (2, 300), generator=numbers)
    data[BUYS].at = torch.randint(LATEST, (300,), generator=numbers)
    data[BOUGHT].edge_index = data[BUYS].edge_index.flip(0)
    data[BOUGHT].at = data[BUYS].at
    data[HAS].edge_index = edges(TAGS, ITEMS, 100)
    data[HAS].weight = torch.rand(100, generator=numbers) * (torch.arange(100) % 2)
    data[LIKES].edge_index = edges(ITEMS, ITEMS, 120)
    return data


@pytest.fixture
def data():
    return make_data()


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"disjoint": True},
        {"subgraph_type": "bidirectional"},
        {"subgraph_type": "induced"},
        {"directed": False},
        {"time_attr": "born", "input_time": torch.full((USERS,), 9, dtype=torch.int32)},
    ],
)
def test_fields_equal_those_of_pyg_for_the_same_nodes(data, sampling):
    nodes = ("user", data["user"].train_mask)
    times = sampling.get("input_time")
    if times is not None:
        sampling["input_time"] = times = times[: int(nodes[1].sum())]
    data["user"].n_id = torch.arange(USERS)
    mine = list(NeighborLoader(data, [3, 2], nodes, batch_size=8, **sampling))
    options = {"input_nodes": nodes, "input_time": times, "batch_size": 8}
    theirs = node_loader.NodeLoader(data, Recorded(*mine), **options)
    for batch, other in zip(mine, theirs, strict=True):
        assert batch.metadata() == other.metadata()
        assert_equal(batch, other)


@pytest.mark.parametrize(
    ("num_neighbors", "buys", "default"),
    [
        (NumNeighbors([4, 3]), [4, 3], [4, 3]),
        ({"buys": [3, 3], "default": [2, 1]}, [3, 3], [2, 1]),
        (NumNeighbors({BUYS: [1, -1]}, default=[2, 2]), [1, -1], [2, 2]),
    ],
)
def test_num_neighbors_may_be_by_type(data, num_neighbors, buys, default):
    by_type = {BUYS: buys} | dict.fromkeys((BOUGHT, HAS, LIKES), default)
    options = {"input_nodes": ("item", None), "batch_size": 7, "seed": 1}
    found, expected = (NeighborLoader(data, n, **options) for n in (num_neighbors, by_type))
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"replace": True}, "replace 0, not 1"),
        ({"time_attr": None}, "disjoint 1, not 0"),
        ({"num_neighbors": [3, 1]}, "num_neighbors"),
        ({"input_time": torch.arange(USERS)}, "input_time_crc32"),
    ],
)
def test_the_state_of_other_options_is_rejected(data, change, message):
    options = {"num_neighbors": [3, 2], "input_nodes": "user", "seed": 3, "time_attr": "born"}
    state = NeighborLoader(data, **options).state_dict()
    with pytest.raises(ValueError, match=message):
        NeighborLoader(data, **options | change).load_state_dict(state)


@pytest.mark.parametrize("kind", ["user", None])
def test_input_nodes_may_be_a_type_ids_or_a_mask(data, kind):
    if kind is None:
        users = torch.stack([torch.arange(USERS), torch.arange(USERS).flip(0)])
        data = Data(x=data["user"].x, edge_index=users)

    def first(nodes, **options):
        batch = next(iter(NeighborLoader(data, [1], nodes, batch_size=3, **options)))
        batch = batch if kind is None else batch[kind]
        return batch.n_id[: batch.batch_size].tolist(), batch.input_id.tolist()

    ids = torch.tensor([7, 3, 50])
    for nodes in (kind, (kind, None), [kind, None]):
        assert first(nodes) == ([0, 1, 2], [0, 1, 2])
    for own in (ids, ids.int(), ids.tolist(), ids.numpy()):
        assert first((kind, own)) == ([7, 3, 50], [0, 1, 2])
    mask = torch.zeros(USERS, dtype=torch.bool)
    mask[ids] = True
    assert first((kind, mask)) == first((kind, mask.tolist())) == ([3, 7, 50], [3, 7, 50])
    assert first((kind, ids), input_id=ids * 2) == ([7, 3, 50], [14, 6, 100])
    loader = NeighborLoader(data, [1], (kind, ids))
    batch = loader([2, 0])
    assert (batch if kind is None else batch[kind]).n_id[:2].tolist() == [50, 7]
    assert loader.input_data[torch.tensor([1])].node.tolist() == [3]
    assert loader.input_data.input_type == loader.input_type == kind


@pytest.mark.parametrize("num_neighbors", [[], [2, 1]])
def test_minibatches_of_data_without_edges_have_only_the_seeds(num_neighbors):
    data = HeteroData({"user": {"x": torch.rand(3, 2)}, "item": {"num_nodes": 4}})
    for sampling in ({}, {"disjoint": True}, {"subgraph_type": "induced"}):
        first, second = NeighborLoader(data, num_neighbors, "user", batch_size=2, **sampling)
        assert first["user"].n_id.tolist() == [0, 1]
        assert second["user"].n_id.tolist() == [2]
        assert torch.equal(first["user"].x, data["user"].x[:2])
        assert (first["item"].num_nodes, first.edge_types) == (0, [])


def test_tables_replace_attributes(data):
    tables = {
        ("user", "x"): FeatureTable.quantized(data["user"].x),
        ("tag", "more"): FeatureTable(torch.rand(TAGS, 2)),
        (BUYS, "edge_attr"): FeatureTable(torch.rand(300, 3)),
    }
    for batch in NeighborLoader(data, [2], "item", batch_size=20, tables=tables):
        for (kind, name), table in tables.items():
            ids = batch[kind].n_id if isinstance(kind, str) else batch[kind].e_id
            assert torch.equal(batch[kind][name], table.gather(ids))


def test_features_read_in_place_are_those_gathered_on_the_host(data):
    data[LIKES].x = torch.randn(120, 3)
    options = {"batch_size": 9, "seed": 3}
    loader = NeighborLoader(data, [3, 2], "item", **options)
    found = loader._found
    # as if a GPU read them; one of each type is prefetched
    for key in (("user", "x"), ("item", "image"), (LIKES, "x"), ("item", "x")):
        found.read_in_place[key] = found.columns.pop(key)
    assert_same(loader, NeighborLoader(data, [3, 2], "item", **options))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["item", None])
@pytest.mark.parametrize("sampling", [{}, {"time_attr": "born"}])
def test_minibatches_on_a_gpu_equal_those_on_the_host(data, kind, sampling):
    data = data if kind else data.node_type_subgraph(["item"]).to_homogeneous()
    options = {"input_nodes": kind, "batch_size": 9, "seed": 3, **sampling}
    other = NeighborLoader(data, [3, 2], **options)
    with NeighborLoader(data, [3, 2], device="cuda", **options) as loader:
        read = {("user", "x"), ("item", "x")} if kind else {("node", "x")}
        assert set(loader._found.read_in_place) == read
        for mine, wanted in zip(loader, other, strict=True):
            assert all(store.x.is_cuda for store in mine.stores if "x" in store)
            assert all(store.edge_index.is_cuda for store in mine.edge_stores)
            assert_equal(mine, wanted)
        assert not loader([3]).node_stores[0].x.is_cuda


CHANGES = {
    "another value": lambda data: data["item"].update({"x": data["item"].x + 1}),
    "another width": lambda data: data["item"].update({"x": data["item"].x[:, :3].contiguous()}),
    "another shape": lambda data: data["item"].update({"x": data["item"].x[:, :, None]}),
    "removed": lambda data: delattr(data["item"], "image"),
    "of the data": lambda data: setattr(data, "name", "other"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("Loader", [NeighborLoader, LinkNeighborLoader])
def test_an_iterator_keeps_the_data_of_when_it_began(Loader, change, data):
    seeds = "item" if Loader is NeighborLoader else BUYS
    options = {"batch_size": 9, "seed": 3, "threads": 2}
    old = list(Loader(copy.copy(data), [3, 2], seeds, **options))
    own = copy.copy(data)
    loader = Loader(own, [3, 2], seeds, **options)
    first = iter(loader)
    found = [next(first)]
    change(own)
    second = list(loader)
    found += first
    assert_same(found, old)
    wanted = Loader(own, [3, 2], seeds, **options)
    wanted.set_epoch(1)
    assert_same(second, wanted)


def test_a_type_added_or_removed_between_epochs_is_named(data):
    loader = NeighborLoader(data, [2], "user")
    list(loader)
    data["shop"].x = torch.rand(3, 2)
    for _ in range(2):
        message = "data has gained or lost the type 'shop'"
        with pytest.raises(ValueError, match=message):
            iter(loader)
    del data["shop"]
    list(loader)
    del data[BUYS]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"gained or lost the type .*'buys'"):
            iter(loader)


class Frame(pyg_typing.TensorFrame):
    """A table with columns of several types, as of `torch_frame`."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, ids):
        return Frame(self.rows[ids])


@pytest.mark.skipif(pyg_typing.WITH_TORCH_FRAME, reason="torch_frame has other constructors")
def test_tensor_frames_are_sliced(data):
    data["tag"].tf = Frame(torch.arange(TAGS) * 3)
    for batch in NeighborLoader(data, [2], "item", batch_size=20):
        assert torch.equal(batch["tag"].tf.rows, batch["tag"].n_id * 3)


def changed(kind, **values):
    data = make_data()
    for name, value in values.items():
        data[kind][name] = value
    return data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_nodes": None}, "input_nodes is None, without a node type"),
        ({"input_nodes": "shop"}, "node type 'shop', which the data does not have"),
        ({"input_nodes": ("user", [USERS])}, "nodes"),
        ({"input_nodes": ("user", torch.ones(5, dtype=torch.bool))}, r"mask of shape \(5,\)"),
        ({"input_id": torch.arange(3)}, "input_id is .* of 60 items"),
        ({"num_neighbors": {BUYS: [2]}}, "num_neighbors has no edge type"),
        ({"num_neighbors": {("a", "to", "b"): [2]}}, "no edge type with the name"),
        ({"subgraph_type": "forward"}, "subgraph_type is 'forward'"),
        ({"temporal_strategy": "first"}, "temporal_strategy is 'first'"),
        ({"time_attr": "day"}, "time_attr is 'day', which no nodes or edges of the data have"),
        ({"time_attr": 3}, "time_attr is 3, not the name of an attribute"),
        ({"time_attr": "at"}, "the nodes of type 'user' have no times"),
        ({"weight_attr": "x"}, "weight_attr is 'x', which no nodes"),
        ({"input_time": torch.arange(USERS)}, "input_time was given without time_attr"),
        ({"input_time": torch.arange(3), "time_attr": "born"}, r"input_time has shape \(3,\)"),
        ({"tables": {"x": FeatureTable(torch.rand(USERS, 2))}}, "tables has the key 'x'"),
        ({"tables": {("user", "x"): FeatureTable(torch.rand(3, 2))}}, "60 rows are needed"),
        ({"data": changed(BUYS, edge_index=torch.full((2, 300), USERS))}, "goes from 60 to 60"),
        ({"data": changed(("user", "to", "user"), weight=torch.ones(3))}, "has no edge_index"),
        ({"data": changed("empty", x=torch.ones(0, 2))}, "'empty' has no nodes"),
        ({"data": changed("user", names=["a"] * USERS)}, r"\['user'\].names is \['a', .*, which"),
        ({"data": changed("user", at=torch.rand(USERS)), "time_attr": "at"}, "times are integers"),
    ],
)
def test_invalid_and_unsupported_arguments_are_rejected_by_name(change, message):
    options = {"data": make_data(), "num_neighbors": [2], "input_nodes": "user"} | change
    with pytest.raises((TypeError, ValueError), match=message) as error:
        NeighborLoader(**options)
    assert "tensor(" not in str(error.value)
