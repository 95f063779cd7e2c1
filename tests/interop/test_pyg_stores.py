"""Pairs of a PyG `FeatureStore` and `GraphStore` as the data of the loaders."""

import copy
import threading

import pyg_or_skip  # noqa: F401
import pytest
import torch
from pyg_recorded import assert_equal, assert_same
from torch_geometric import data as pyg_data

from gcnzc.graph import Graph
from gcnzc.interop import pyg as ours

USERS, ITEMS, LATEST = 40, 30, 20
BUYS, BOUGHT, LIKES = ("user", "buys", "item"), ("item", "of", "user"), ("item", "like", "item")
SIZES = {"user": USERS, "item": ITEMS}
# what only stores have as an attribute
SIZED = ("num_nodes",)


class Features(pyg_data.FeatureStore):
    """Tensors in a dict, which counts its calls and checks that they do not overlap."""

    def __init__(self, tensors):
        super().__init__()
        self.__dict__.update(tensors=tensors, calls=0, lock=threading.Lock())

    def __deepcopy__(self, memo):
        return Features(self.tensors)

    def _get_tensor(self, attr):
        found = self.tensors.get((attr.group_name, attr.attr_name))
        return found if found is None or attr.index is None else found[attr.index]

    def _multi_get_tensor(self, attrs):
        assert self.lock.acquire(blocking=False), "two threads call the store"
        self.__dict__["calls"] += 1
        found = [self._get_tensor(attr) for attr in attrs]
        self.lock.release()
        return found

    def _get_tensor_size(self, attr):
        return tuple(self._get_tensor(attr).shape)

    def get_all_tensor_attrs(self):
        return [pyg_data.TensorAttr(*key) for key in self.tensors]

    # which no loader calls
    _put_tensor = _remove_tensor = None


class Edges(pyg_data.GraphStore):
    """Edges in a dict by edge type and layout."""

    def __init__(self, edges, sizes):
        super().__init__()
        self.__dict__.update(edges=edges, sizes=sizes)

    def _get_edge_index(self, attr):
        return self.edges.get((attr.edge_type, attr.layout.value))

    def get_all_edge_attrs(self):
        return [pyg_data.EdgeAttr(*key, size=self.sizes.get(key[0])) for key in self.edges]

    _put_edge_index = _remove_edge_index = None


def to_layout(edges, layout, num_src, num_dst):
    """Edges in a layout, and the order in which it has them."""
    src, dst = edges
    if layout == "coo":
        return (src, dst), torch.arange(len(src))
    key, number = (dst, num_dst) if layout == "csc" else (src, num_src)
    order = key.argsort(stable=True)
    pointer = torch.zeros(number + 1, dtype=torch.int64)
    pointer[1:] = torch.bincount(key, minlength=number).cumsum(0)
    found = (src[order], pointer) if layout == "csc" else (pointer, dst[order])
    return found, order


def make_data():
    numbers = torch.Generator().manual_seed(3)
    data = pyg_data.HeteroData()
    for name, size in SIZES.items():
        data[name].x = torch.randn(size, 4, generator=numbers)
        data[name].born = torch.randint(LATEST, (size,), generator=numbers)
    data["user"].y = torch.randint(3, (USERS,), generator=numbers)
    for each, count in ((BUYS, 200), (BOUGHT, 150), (LIKES, 90)):
        ends = [torch.randint(SIZES[name], (count,), generator=numbers) for name in each[::2]]
        data[each].edge_index = torch.stack(ends)
        data[each].edge_attr = torch.randn(count, 2, generator=numbers)
        data[each].at = torch.randint(LATEST, (count,), generator=numbers)
        data[each].weight = torch.rand(count, generator=numbers)
    return data


@pytest.fixture
def data():
    return make_data()


def to_stores(data, layouts=("csc", "coo", "csr")):
    """A pair of stores with the values of `data`, and `data` in the order of the stored edges."""
    tensors, edges, sizes, data = {}, {}, {}, copy.copy(data)
    for each, layout in zip(data.edge_types, layouts, strict=True):
        sizes[each] = data[each[0]].num_nodes, data[each[2]].num_nodes
        edges[each, layout], order = to_layout(data[each].edge_index, layout, *sizes[each])
        for name, values in data[each].items():
            data[each][name] = values[..., order] if name == "edge_index" else values[order]
    for store in (*data.node_stores, *data.edge_stores):
        tensors |= {(store._key, name): store[name] for name in store if name != "edge_index"}
    return (Features(tensors), Edges(edges, sizes)), data


SAMPLINGS = [
    {},
    {"disjoint": True},
    {"time_attr": "born"},
    {"time_attr": "at", "input_time": torch.arange(USERS) % LATEST},
    {"weight_attr": "weight", "replace": True},
    {"subgraph_type": "induced"},
    {"subgraph_type": "bidirectional"},
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_minibatches_equal_those_of_hetero_data(data, sampling):
    stores, data = to_stores(data)
    options = {"batch_size": 9, "seed": 3, "shuffle": True, "threads": 3, **sampling}
    mine = ours.NeighborLoader(stores, [3, 2], "user", **options)
    assert (repr(mine), mine.data) == ("NeighborLoader()", stores)
    for _ in range(2):
        theirs = ours.NeighborLoader(data, [3, 2], "user", **options)
        theirs.set_epoch(mine.epoch)
        for batch, other in zip(mine, theirs, strict=True):
            assert_equal(batch, other, SIZED)
            assert batch["item"].num_nodes == len(batch["item"].n_id)
    assert stores[0].calls == 2 * len(mine)


@pytest.mark.parametrize("layouts", [("coo",) * 3, ("csr",) * 3, ("csc",) * 3])
@pytest.mark.parametrize("neg_sampling", [None, "binary", "triplet"])
def test_minibatches_of_links_equal_those_of_hetero_data(data, layouts, neg_sampling):
    stores, data = to_stores(data, layouts)
    options = {"batch_size": 30, "seed": 3, "neg_sampling": neg_sampling}
    pairs = data[LIKES].edge_index[:, :50]
    for edges in (BUYS, (LIKES, pairs)):
        mine = ours.LinkNeighborLoader(stores, [3, 2], edges, **options)
        assert_same(mine, ours.LinkNeighborLoader(data, [3, 2], edges, **options), SIZED)
    times = {"time_attr": "born", "edge_label_time": torch.arange(50)}
    mine = ours.LinkNeighborLoader(stores, [3, 2], (LIKES, pairs), **options, **times)
    theirs = ours.LinkNeighborLoader(data, [3, 2], (LIKES, pairs), **options, **times)
    assert_same(mine, theirs, SIZED)


@pytest.mark.parametrize("sampling", [{}, {"time_attr": "born"}, {"disjoint": True}])
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_minibatches_without_types_equal_those_of_data(data, layout, sampling):
    own = pyg_data.Data(x=data["user"].x, born=data["user"].born, y=data["user"].y)
    ends = torch.randint(USERS, (2, 300), generator=torch.Generator().manual_seed(1))
    edges, order = to_layout(ends, layout, USERS, USERS)
    own.edge_index = ends[:, order]
    features = {(None, name): own[name] for name in ("x", "born", "y")}
    features[None, "x"] = own.x.numpy()
    stores = Features(features), Edges({(None, layout): edges}, {None: (USERS, USERS)})
    options = {"batch_size": 9, "seed": 3, **sampling}
    nodes = range(2, USERS)
    for batch, other in zip(
        ours.NeighborLoader(stores, [3, 2], nodes, is_sorted=True, **options),
        ours.NeighborLoader(own, [3, 2], nodes, **options),
        strict=True,
    ):
        assert isinstance(batch, pyg_data.Data)
        assert batch.num_nodes == len(batch.n_id)
        assert_equal(batch, other, SIZED)
    times = {} if "time_attr" not in sampling else {"edge_label_time": torch.arange(300)}
    (mine,) = ours.LinkNeighborLoader(stores, [2], batch_size=300, **sampling, **times)
    assert torch.equal(mine.n_id[mine.edge_label_index], own.edge_index)


def test_the_numbers_of_nodes_come_from_sizes_or_tensors(data):
    (features, edges), _ = to_stores(data)
    wanted = list(ours.NeighborLoader((features, edges), [3], "user", batch_size=9, seed=1))
    unsized = Edges(edges.edges, {})
    assert_same(ours.NeighborLoader((features, unsized), [3], "user", batch_size=9, seed=1), wanted)
    with pytest.raises(ValueError, match="number of nodes of node type 'user' is unknown"):
        ours.NeighborLoader((Features({}), unsized), [3], "user")
    plain = Edges({(None, "coo"): data[LIKES].edge_index}, {})
    with pytest.raises(ValueError, match="number of nodes of the graph is unknown"):
        ours.NeighborLoader((Features({}), plain), [3])
    sized = Edges(edges.edges, {BUYS: (USERS, ITEMS), BOUGHT: (3, 3), LIKES: (ITEMS, ITEMS)})
    assert len(ours.NeighborLoader((Features({}), sized), [3], "user")) == USERS


def test_edges_out_of_range_are_reported(data):
    (features, edges), _ = to_stores(data)
    edges.edges[BOUGHT, "coo"][0][3] = ITEMS
    with pytest.raises(ValueError, match="goes from 30"):
        ours.NeighborLoader((features, edges), [2], "user")


GRAPH_OPTIONS = {"time_attr": "at", "weight_attr": "weight"}


def test_the_stores_of_a_graph_have_its_values(data):
    graph = Graph.from_pyg(data, **GRAPH_OPTIONS)
    features, edges = ours.as_stores(graph)
    assert (type(features), type(edges)) == (ours.HeteroFeatureStore, ours.HeteroGraphStore)
    assert torch.equal(features["user", "x", None], data["user"].x)
    assert torch.equal(features["user", "y", torch.tensor([5, 5, 0])], data["user"].y[[5, 5, 0]])
    assert torch.equal(features["item", "x", slice(2, 9, 3)], data["item"].x[2:9:3])
    assert torch.equal(features["item", "x", 3], data["item"].x[3])
    assert features.get_tensor_size("user", "x") == (USERS, 4)
    assert features.get_tensor_size("user", "y") == (USERS,)
    assert features.get_tensor_size("user", "z") is None
    assert features.get_tensor("user", "z", None) is None
    assert {(attr.group_name, attr.attr_name) for attr in features.get_all_tensor_attrs()} == {
        *(("user", "x"), ("user", "y"), ("item", "x")),
        *((each, name) for each in data.edge_types for name in ("edge_attr", "time", "weight")),
    }
    coo = edges.coo()
    for each in data.edge_types:
        ids = graph.edges(each).edge_ids
        assert torch.equal(torch.stack([coo[0][each], coo[1][each]]), data[each].edge_index[:, ids])
        for name, other in (("edge_attr", "edge_attr"), ("time", "at"), ("weight", "weight")):
            found = features[each, name, torch.tensor([7, 2])]
            assert torch.equal(found, data[each][other][ids[[7, 2]]]), name
    for change, *given in (
        (features.put_tensor, data["user"].x, "user", "x", None),
        (features.remove_tensor, "user", "x", None),
        (edges.put_edge_index, data[BUYS].edge_index, BUYS, "coo"),
        (edges.remove_edge_index, BUYS, "csc"),
    ):
        with pytest.raises(ValueError, match="read-only"):
            change(*given)
    with pytest.raises(KeyError):
        edges.get_edge_index(BUYS, "coo")
    for Store in (ours.HeteroFeatureStore, ours.HeteroGraphStore):
        with pytest.raises(TypeError, match="Graph"):
            Store(data)


def test_loaders_accept_the_stores_of_a_graph(data):
    graph = Graph.from_pyg(data, **GRAPH_OPTIONS)
    loader = ours.NeighborLoader(ours.as_stores(graph), [3, 2], "user", batch_size=9)
    for batch in loader:
        for name in ("user", "item"):
            assert torch.equal(batch[name].x, data[name].x[batch[name].n_id])
        assert torch.equal(batch["user"].y, data["user"].y[batch["user"].n_id])
        for each in data.edge_types:
            ids = graph.edges(each).edge_ids[batch[each].e_id]
            src, dst = batch[each].edge_index
            ends = torch.stack([batch[each[0]].n_id[src], batch[each[2]].n_id[dst]])
            assert torch.equal(ends, data[each].edge_index[:, ids])
            assert torch.equal(batch[each].edge_attr, data[each].edge_attr[ids])
    times = {"time_attr": "time", "input_time": torch.arange(USERS) % LATEST}
    for batch in ours.NeighborLoader(ours.as_stores(graph), [3, 2], "user", batch_size=9, **times):
        for each in data.edge_types:
            target = batch[each[2]]
            limits = batch["user"].seed_time[target.batch[batch[each].edge_index[1]]]
            assert bool((batch[each].time <= limits).all())


def test_a_store_without_a_tensor_is_reported(data):
    (features, edges), _ = to_stores(data)
    loader = ours.NeighborLoader((features, edges), [2], "user")
    features.tensors["user", "x"] = None
    with pytest.raises(ValueError, match="the feature store returned None for user, x, not 1 rows"):
        next(iter(loader))
    for wrong in (torch.rand(9, 2), torch.tensor(1.0)):
        features._get_tensor = lambda attr, rows=wrong: rows
        with pytest.raises(
            ValueError, match=r"the feature store returned .* for user, x, not 1 rows"
        ):
            next(iter(loader))
