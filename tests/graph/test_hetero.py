"""Heterogeneous graphs: from arrays, PyG and DGL, and in prepared folders."""

import json
import warnings

import numpy as np
import pytest
import torch

import gcnzc
from gcnzc import FeatureTable
from gcnzc.graph import EdgeStore, Graph, NodeStore, folder
from tests.hetero_graphs import assert_same_graph, assert_same_values, random_graph

BUYS = ("user", "buys", "item")
RATED = ("item", "rated_by", "user")


def shop(**more):
    """A graph with every kind of value."""
    random = np.random.default_rng(0)
    users = {
        "features": torch.from_numpy(random.random((6, 3), np.float32)),
        "labels": [0, 1, 2, 0, 1, -1],
        "split": {"train_mask": np.arange(6) < 3, "val": [3], "test": torch.tensor([4])},
    }
    items = {"num_nodes": 4, "time": [10, 40, 20, 30], "features": np.eye(4, dtype=np.float32)}
    buys = {
        "edge_index": random.integers(0, 4, (2, 20)),
        "features": random.random((20, 2), np.float32),
        "time": random.integers(0, 50, 20),
        "weight": random.random(20),
    }
    rated = random.integers(0, 4, (2, 9))
    return Graph.from_arrays({"user": users, "item": items}, {BUYS: buys, RATED: rated}, **more)


def test_values_of_edges_stay_with_their_edges():
    graph = shop()
    random = np.random.default_rng(0)
    random.random((6, 3), np.float32)
    index = random.integers(0, 4, (2, 20))
    features = random.random((20, 2), np.float32)
    times, weights = random.integers(0, 50, 20), random.random(20)
    store = graph.edges(BUYS)
    assert torch.equal(store.edge_index(), torch.from_numpy(index))
    assert torch.equal(store.features, torch.from_numpy(features))
    assert torch.equal(store.time, torch.from_numpy(times)[store.edge_ids])
    np.testing.assert_array_equal(store.weight, weights.astype(np.float32)[store.edge_ids])
    assert graph.nodes("user").split["train"].tolist() == [0, 1, 2]
    assert graph.nodes("item").num_nodes == 4
    assert graph.edges("buys").num_edges == 20
    assert graph.edge_type("item__rated_by__user") == RATED
    assert torch.equal(graph.nodes("user").table.rows, graph.nodes("user").features)


@pytest.mark.parametrize("times", ["node", "edge", "both"])
def test_columns_are_sorted_by_the_later_time_and_else_as_listed(times):
    for seed in range(10):
        graph = random_graph(seed, times=times)
        for edge_type in graph.edge_types:
            store, source = graph.edges(edge_type), graph.nodes(edge_type[0])
            ids = torch.arange(store.num_edges) if store.edge_ids is None else store.edge_ids
            keys = torch.zeros(store.num_edges, dtype=torch.int64)
            if store.time is not None:
                keys = store.time
            if source.time is not None:
                own = source.time[store.indices]
                keys = own if store.time is None else torch.maximum(keys, own)
            for begin, end in zip(store.indptr[:-1], store.indptr[1:], strict=True):
                pairs = list(zip(keys[begin:end].tolist(), ids[begin:end].tolist(), strict=True))
                assert pairs == sorted(pairs)


def test_from_pyg():
    HeteroData = pytest.importorskip("torch_geometric.data").HeteroData
    data = HeteroData()
    data["user"].x = torch.rand(4, 3)
    data["user"].y = torch.tensor([0, 1, 0, 1])
    data["user"].train_mask = torch.tensor([True, False, True, False])
    data["item"].num_nodes = 3
    data[BUYS].edge_index = torch.tensor([[3, 0, 1, 3], [2, 1, 2, 2]])
    data[BUYS].edge_attr = torch.rand(4, 2)
    data[BUYS].time = torch.tensor([4, 3, 2, 1])
    data[BUYS].w = torch.tensor([1.0, 0, 2, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adjacency = torch.sparse_coo_tensor([[0, 2], [1, 0]], torch.ones(2), (4, 3))
        data[RATED].adj_t = adjacency.to_sparse_csr()
    graph = Graph.from_pyg(data, time_attr="time", weight_attr="w")
    assert graph.metadata() == data.metadata()
    assert graph.nodes("user").features.data_ptr() == data["user"].x.data_ptr()
    assert graph.nodes("user").split["train"].tolist() == [0, 2]
    store = graph.edges(BUYS)
    assert torch.equal(store.edge_index(), data[BUYS].edge_index)
    assert torch.equal(store.features, data[BUYS].edge_attr)
    assert torch.equal(store.time, data[BUYS].time[store.edge_ids])
    assert torch.equal(store.weight, data[BUYS].w[store.edge_ids])
    # rows of adj_t are destinations
    assert graph.edges(RATED).edge_index().tolist() == [[1, 0], [0, 2]]
    data[RATED].adj_t = adjacency
    assert Graph.from_pyg(data).edges(RATED).edge_index().tolist() == [[1, 0], [0, 2]]
    assert Graph.from_pyg(data).edges(BUYS).time is None
    with pytest.raises(ValueError, match="time_attr is 'when'"):
        Graph.from_pyg(data, time_attr="when")
    del data["item"].num_nodes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="number of nodes of node type 'item' is unknown"):
            Graph.from_pyg(data)


def test_from_dgl():
    pytest.importorskip("torch_geometric")
    from gcnzc.interop.dgl.importing import import_dgl

    try:
        dgl = import_dgl()
    except ImportError:
        pytest.skip("DGL is not installed")
    src, dst = torch.tensor([3, 0, 1, 3]), torch.tensor([2, 1, 2, 2])
    own = dgl.heterograph(
        {BUYS: (src, dst), ("user", "knows", "user"): ([0], [1])}, {"user": 5, "item": 4}
    )
    own.nodes["user"].data["feat"] = torch.rand(5, 2)
    own.nodes["item"].data["label"] = torch.arange(4)
    own.nodes["item"].data["test_mask"] = torch.arange(4) == 3
    own.edges[BUYS].data["w"] = torch.tensor([1.0, 2, 3, 4])
    own.edges[BUYS].data["when"] = torch.tensor([9, 1, 2, 3])
    graph = Graph.from_dgl(own, time="when", weight="w")
    assert graph.node_types == own.ntypes
    assert graph.edge_types == own.canonical_etypes
    assert graph.nodes("user").num_nodes == 5
    assert torch.equal(graph.edges("buys").edge_index(), torch.stack([src, dst]))
    assert torch.equal(graph.nodes("user").features, own.nodes["user"].data["feat"])
    assert graph.nodes("item").split["test"].tolist() == [3]
    assert graph.edges("buys").time.tolist() == [1, 2, 3, 9]
    with pytest.raises(ValueError, match=r"time is 'then', which no type of the graph has"):
        Graph.from_dgl(own, time="then")
    with pytest.raises(TypeError, match=r"graph is .*, not a dgl\.DGLGraph"):
        Graph.from_dgl(torch.ones(2))


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        ({"u": 0}, {}, "node type 'u' has no nodes"),
        ({}, {}, "no node types"),
        ({"u": 2}, {("u", "r", "w"): [[0], [0]]}, "has the node type 'w'"),
        (
            {"u": 2},
            {("u", "r", "u"): [[0, 1], [0, 2]]},
            r"edge 1 of .*'r'.* from 1 to 2, but 'u' has 2",
        ),
        ({"u": {"num_nodes": 2, "time": [1.0, np.nan]}}, {}, r"time of node type 'u'\[1\] is nan"),
        ({"u": {"num_nodes": 2, "features": np.ones((3, 1))}}, {}, r"features of node type 'u'"),
        ({"u": {"num_nodes": 2, "split": {"train": [2]}}}, {}, "contains the node 2"),
        ({"u": {"num_nodes": 2, "split": {"odd": [1]}}}, {}, "has the key 'odd'"),
        ({"u": 2}, {("u", "r", "u"): {"edge_index": [[0], [1]], "weight": [-1]}}, r"\[0\] is -1"),
        (
            {"u": 2},
            {("u", "r", "u"): {"edge_index": [[0], [1]], "features": [[1], [2]]}},
            "features of edge",
        ),
        ({7: 2}, {}, "a node type is .*7, not a name"),
        ({"u": 2}, {("u", "r"): [[0], [1]]}, "an edge type is .*, not three strings"),
        ({"u": 2}, {("u", "r", "u"): np.zeros((3, 2), int)}, r"has shape \(3, 2\), not \(2, E\)"),
        ({"u": 2}, {("u", "r", "u"): [[0, 1], [0]]}, "has 2 sources and 1 destinations"),
        ({"u": {"num_nodes": 2, "name": "x"}}, {}, "node type 'u' has the key 'name', not of num"),
        ({"u": {"features": [["a"], ["b"]]}}, {}, "features of node type 'u' has type <U1"),
        ({"u": {"features": torch.ones(2, 2, 2).to_sparse()}}, {}, "of torch.sparse_coo, not d"),
        ({"u": {}}, {}, "the number of nodes of node type 'u' is unknown"),
        (
            {"u": {"time": [1]}, "v": {"time": np.array(["2020"], "M8[Y]")}},
            {},
            "times of node type 'v' are dates, but those of node type 'u' are integers of an unk",
        ),
        ({"u": 2}, {("u", "r", "u"): torch.eye(2).to_sparse()}, "of layout torch.sparse_coo"),
        (
            {"u": 2},
            {("u", "r", "u"): {"edge_index": [[0], [1]], "weight": ["a"]}},
            r"weight of edge type .* has type <U1\n\nhint: weights are numbers",
        ),
        (
            {"u": {"labels": ["a", "b"]}},
            {},
            r"labels of node type 'u' has type <U1(.|\n)*factorize",
        ),
        ({"u": {"labels": [0, -2]}}, {}, "node 1 has the label -2, which is not a class"),
        ({"u": {"labels": [0, 10**9]}}, {}, "node 1 has the label 1000000000, which is not a cl"),
        # names
        ({"u": {"keys": "ab"}}, {}, "keys of node type 'u' are .*, not one key for each node"),
        ({"u": {"keys": ["a", None]}}, {}, "keys of node type 'u' have missing values"),
        ({"u": {"keys": ["a", "a"]}}, {}, "keys of node type 'u' have 'a' twice"),
        ({"u": {"keys": ["a", "b\0"]}}, {}, "which has a NUL character"),
        ({"u": {"num_nodes": 2, "classes": ["a"]}}, {}, "the nodes have no class labels"),
        ({"u": {"labels": [0, 1], "classes": "ab"}}, {}, "not a list of names"),
        ({"u": {"labels": [0, 1], "classes": ["a", "a"]}}, {}, "have 'a' twice"),
        ({"u": {"labels": [0, 1], "classes": ["a"]}}, {}, "1 names are given .* for 2 or more cl"),
    ],
)
def test_wrong_arrays_are_rejected_with_a_message_that_names_them(nodes, edges, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Graph.from_arrays(nodes, edges)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indptr": torch.tensor([0, 1, 1])}, "goes from 0 to 1, with 2 edges"),
        ({"indptr": torch.tensor([0, 3, 2])}, "decreases from 3 to 2 at node 1"),
        ({"indices": torch.tensor([0, 2], dtype=torch.int32)}, r"indices\[1\] is 2, but 'u' has 2"),
        ({"edge_ids": torch.tensor([0, 2])}, r"edge_ids\[1\] is 2"),
        ({"time": torch.tensor([0.0, 1.0])}, "time of edge type"),
        ({"weight": torch.tensor([0.0, -1.0])}, "weight of the edge at position 1 is -1"),
        ({"features": torch.ones(3, 1)}, "2 edges, but 3 rows"),
    ],
)
def test_wrong_stores_are_rejected_with_a_message_that_names_them(change, message):
    good = {"indptr": torch.tensor([0, 1, 2]), "indices": torch.tensor([0, 1], dtype=torch.int32)}
    nodes = {"u": NodeStore(2)}
    Graph.from_stores(nodes, {("u", "r", "u"): EdgeStore(**good)})
    with pytest.raises(ValueError, match="node type 'u' has 2 nodes, but 3 rows of features"):
        Graph.from_stores({"u": NodeStore(2, torch.ones(3, 1))}, {})
    with pytest.raises(ValueError, match=message):
        Graph.from_stores(nodes, {("u", "r", "u"): EdgeStore(**(good | change))})


def test_unknown_types_are_named():
    graph = shop()
    with pytest.raises(ValueError, match=r"no node type 'shop'\n\nhint: user, item"):
        graph.nodes("shop")
    with pytest.raises(ValueError, match="no edge type with the name 'sells'"):
        graph.edges("sells")


def test_a_folder_has_the_same_graph(tmp_path):
    graph = shop(name="shop")
    gcnzc.prepare(graph, tmp_path / "shop")
    found = gcnzc.load(tmp_path / "shop").graph
    folder.verify(tmp_path / "shop")
    assert_same_graph(found, graph)
    assert found.name == "shop"
    found.check_time_order()
    gcnzc.prepare(found, tmp_path / "again")
    for path in sorted((tmp_path / "shop").rglob("*.npy")):
        other = tmp_path / "again" / path.relative_to(tmp_path / "shop")
        assert path.read_bytes() == other.read_bytes()
    with pytest.raises(FileExistsError):
        gcnzc.prepare(graph, tmp_path / "again")


@pytest.mark.parametrize("kind", ["bfloat16", "sparse", "int8", "none"])
def test_folders_keep_the_kind_of_features(tmp_path, kind):
    rows = torch.randn(6, 5)
    store = NodeStore(6)
    if kind == "bfloat16":
        store = NodeStore(6, rows.bfloat16())
    elif kind == "sparse":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            store = NodeStore(6, rows.relu().to_sparse_csr())
    elif kind == "int8":
        store = NodeStore(6, quantized=FeatureTable.quantized(rows))
    gcnzc.prepare(Graph.from_stores({"u": store}, {}), tmp_path / "g")
    found = gcnzc.load(tmp_path / "g").graph.nodes("u")
    assert_same_values(found, store, "features")
    if kind == "int8":
        ids = torch.arange(6)
        assert torch.equal(found.table.gather(ids), store.table.gather(ids))
    assert (found.table is None) == (kind == "none")


@pytest.mark.parametrize(
    "name", ["edges/0/indices.npy", "nodes/1/time.npy", "nodes/0/features.npy"]
)
def test_damaged_folders_are_named(tmp_path, name):
    gcnzc.prepare(shop(), tmp_path / "shop")
    path = tmp_path / "shop" / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=name):
        folder.verify(tmp_path / "shop")
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=name):
        gcnzc.load(tmp_path / "shop")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=name):
        gcnzc.load(tmp_path / "shop")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda meta: meta["nodes"][0].update(num_nodes=7), r"meta\.json was changed after"),
        (lambda meta: meta.pop("crc32"), r"meta\.json was changed after"),
        (lambda meta: meta.update(version=9), "format version 9(?s:.*)hint: prepare the folder"),
    ],
)
def test_changed_metadata_are_rejected(tmp_path, edit, message):
    gcnzc.prepare(shop(), tmp_path / "shop")
    path = tmp_path / "shop" / "meta.json"
    meta = json.loads(path.read_text())
    edit(meta)
    path.write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=message):
        gcnzc.load(tmp_path / "shop")


@pytest.mark.parametrize(
    ("dates", "unit", "expected"),
    [
        (np.array(["1970-01-02"], "M8[D]"), "s", 86400),
        (np.array(["1969-12-31T23:59:59.5"], "M8[ms]"), "s", 0),
        (np.array([1], "M8[ns]"), "us", 1),
        (np.array(["2400-01-01"], "M8[s]"), "ms", 13569465600000),
        (np.array(["1971"], "M8[Y]"), "s", 365 * 86400),
        (np.array([7.0]), "s", 7),
    ],
)
def test_dates_become_integers(dates, unit, expected):
    graph = Graph.from_arrays({"u": {"time": dates}}, {}, time_unit=unit)
    assert graph.nodes("u").time.tolist() == [expected]


@pytest.mark.parametrize(
    ("times", "unit", "message"),
    [
        (
            np.array([0, 2**63 + 5], np.uint64),
            "s",
            r"\[1\] is 9223372036854775813, which does not fit in int64",
        ),
        (np.array(["2000-01-01", "2400-01-01"], "datetime64[s]"), "ns", "2400-01-01.* position 1"),
        (np.array(["1600-01-01", "2000-01-01"], "datetime64[D]"), "ns", "1600-01-01 at position 0"),
    ],
)
def test_times_that_int64_does_not_have_are_rejected(times, unit, message):
    edges = {("a", "r", "a"): {"edge_index": [[0, 1], [1, 0]], "time": times}}
    with pytest.raises(ValueError, match=message) as error:
        Graph.from_arrays({"a": 2}, edges, time_unit=unit)
    assert "\n\nhint: " in str(error.value)
