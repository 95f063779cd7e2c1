"""Graphs are prepared from arrays and from objects of other libraries."""

import networkx
import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse

import gcnzc
from gcnzc.interop.dgl import import_dgl
from gcnzc.interop.pyg.importing import import_pyg

N = 60
RANDOM = np.random.default_rng(7)
EDGES = np.unique(RANDOM.integers(0, N, (2, 400)), axis=1)
FEATURES = RANDOM.random((N, 5), np.float32)
LABELS = RANDOM.integers(0, 3, N)
SPLITS = {"train": np.arange(30), "valid": np.arange(30, 45), "test": np.arange(45, 60)}
MASKS = {part: np.isin(np.arange(N), ids) for part, ids in SPLITS.items()}
WORDS = np.array(["train"] * 30 + ["val"] * 15 + ["test"] * 15)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What an archive of the same arrays gives."""
    folder = tmp_path_factory.mktemp("archive")
    parts = {f"{part}_idx": ids for part, ids in SPLITS.items()}
    np.savez(folder / "mine.npz", edge_index=EDGES, node_feat=FEATURES, node_label=LABELS, **parts)
    gcnzc.prepare(folder / "mine.npz", folder / "data", bidirected=True)
    return gcnzc.load(folder / "data")


def check_equal(data, expected):
    assert torch.equal(data.graph.indptr, expected.graph.indptr)
    # the order within a column is that of the edges, which objects may give in another
    for node in range(N):
        column = slice(*data.graph.indptr[node : node + 2].tolist())
        mine, theirs = (each.graph.indices[column].sort()[0] for each in (data, expected))
        assert torch.equal(mine, theirs)
    assert torch.equal(data.features, expected.features)
    assert torch.equal(data.labels, expected.labels)
    assert all(torch.equal(data.split[part], ids) for part, ids in expected.split.items())
    assert (data.num_classes, data.metric) == (expected.num_classes, expected.metric)


def as_pyg():
    Data = import_pyg().data.Data

    masks = {f"{key}_mask": torch.from_numpy(MASKS[part]) for key, part in KEYS.items()}
    x, y = torch.from_numpy(FEATURES), torch.from_numpy(LABELS)
    return Data(x=x, y=y, edge_index=torch.from_numpy(EDGES), **masks)


def as_dgl():
    graph = import_dgl().graph(tuple(torch.from_numpy(EDGES)), num_nodes=N)
    graph.ndata["feat"] = torch.from_numpy(FEATURES)
    graph.ndata["label"] = torch.from_numpy(LABELS)
    for key, part in KEYS.items():
        graph.ndata[f"{key}_mask"] = torch.from_numpy(MASKS[part])
    return graph


KEYS = {"train": "train", "val": "valid", "test": "test"}
GIVEN = {"features": FEATURES, "labels": LABELS, "splits": SPLITS}
CASES = {
    "numpy": {"edges": EDGES},
    "two lists": {"edges": EDGES.tolist()},
    "torch": {
        "edges": torch.from_numpy(EDGES),
        "features": torch.from_numpy(FEATURES),
        "labels": torch.from_numpy(LABELS),
        "splits": {part: torch.from_numpy(mask) for part, mask in MASKS.items()},
    },
    "pandas": {
        "edges": pd.DataFrame({"weight": 1.0, "source": EDGES[0], "target": EDGES[1]}),
        "features": pd.DataFrame(FEATURES),
        "labels": pd.Series(LABELS),
        "splits": pd.Series(WORDS),
    },
    "two columns": {"edges": pd.DataFrame(EDGES.T), "splits": WORDS},
    "scipy": {
        "edges": sparse.csr_matrix((np.ones(EDGES.shape[1]), EDGES), (N, N)),
        "features": sparse.csr_matrix(FEATURES),
    },
    "networkx": {"edges": networkx.DiGraph()},
    "multigraph": {"edges": networkx.MultiDiGraph()},
    "val": {"edges": EDGES, "splits": {**SPLITS, "Validation_Mask": MASKS["valid"]}},
}
for name in ("networkx", "multigraph"):
    CASES[name]["edges"].add_nodes_from(range(N))
    CASES[name]["edges"].add_edges_from(EDGES.T.tolist())
del CASES["val"]["splits"]["valid"]


@pytest.mark.parametrize("case", CASES)
def test_arrays_and_objects_give_the_same_folder_as_an_archive(case, expected, tmp_path):
    gcnzc.prepare(tmp_path / "data", **{**GIVEN, **CASES[case]}, bidirected=True)
    data = gcnzc.load(tmp_path / "data")
    check_equal(data, expected)
    assert data.name == "data"
    assert data.origin["format"] == "arrays"


@pytest.mark.parametrize("make", [as_pyg, as_dgl])
def test_features_labels_and_masks_of_pyg_and_dgl_objects_are_used(make, expected, tmp_path):
    gcnzc.prepare(make(), tmp_path / "data", bidirected=True)
    check_equal(gcnzc.load(tmp_path / "data"), expected)


def test_a_graph_is_prepared_with_what_its_nodes_have(expected, tmp_path):
    gcnzc.prepare(expected.graph, tmp_path / "data")
    check_equal(gcnzc.load(tmp_path / "data"), expected)
    plain = gcnzc.Graph(expected.graph.indptr, expected.graph.indices)
    gcnzc.prepare(plain, tmp_path / "plain", features=expected.features)
    found = gcnzc.load(tmp_path / "plain")
    assert torch.equal(found.graph.indices, plain.indices)
    assert torch.equal(found.features, expected.features)
    typed = gcnzc.Graph.from_arrays({"u": 3}, {("u", "to", "u"): torch.tensor([[0], [1]])})
    for options in ({"bidirected": True}, {"split": 0}):
        with pytest.raises(ValueError, match="that it was built with"):
            gcnzc.prepare(typed, tmp_path / "typed", **options)


def test_the_order_of_numbered_networkx_nodes_is_not_guessed(tmp_path):
    # edges alone add the nodes in the order in which they occur first
    graph = networkx.DiGraph([(4, 0), (0, 3), (3, 1), (1, 2)])
    splits = {"train": [0, 1], "valid": [2], "test": [3, 4]}
    given = {"features": np.eye(5), "labels": [0, 1, 0, 1, 1], "splits": splits}
    with pytest.raises(
        ValueError, match=r"another order: 4, 0, 3(?s:.*)\n\nhint: .*add_nodes_from"
    ):
        gcnzc.prepare(tmp_path / "data", edges=graph, **given)
    numbered = networkx.convert_node_labels_to_integers(graph)
    gcnzc.prepare(tmp_path / "data", edges=numbered, **given)
    assert gcnzc.load(tmp_path / "data").graph.indices.tolist() == [0, 1, 2, 3]


def test_features_of_bfloat16_are_stored_unchanged(tmp_path):
    rows = torch.from_numpy(FEATURES).bfloat16()
    gcnzc.prepare(tmp_path / "data", **{**GIVEN, "edges": EDGES, "features": rows})
    found = gcnzc.load(tmp_path / "data").features
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, rows)


def test_the_metric_can_be_chosen(tmp_path):
    given = {**GIVEN, "edges": EDGES}
    gcnzc.prepare(tmp_path / "two", **{**given, "labels": LABELS % 2}, metric="rocauc")
    assert gcnzc.load(tmp_path / "two").metric == "rocauc"
    with pytest.raises(ValueError, match="'rocauc' does not fit labels of 3 classes\n\nhint"):
        gcnzc.prepare(tmp_path / "three", **given, metric="rocauc")
    with pytest.raises(ValueError, match="'f1' does not fit"):
        gcnzc.prepare(tmp_path / "three", **given, metric="f1")
    tasks = RANDOM.integers(0, 2, (N, 4))
    gcnzc.prepare(tmp_path / "tasks", **{**given, "labels": tasks})
    assert gcnzc.load(tmp_path / "tasks").metric == "rocauc"
    assert not (tmp_path / "three").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"edges": EDGES.T}, r"edges has shape \(\d+, 2\)"),
        ({"edges": EDGES * 1.0}, "edges has float64"),
        ({"edges": [EDGES[0], EDGES[1][:-1]]}, r"sources and \d+ targets"),
        ({"edges": EDGES + 1}, "has the node 60, but nodes are 0 to 59"),
        ({"edges": pd.DataFrame(np.ones((2, 3), int), columns=list("xyz"))}, "columns x, y, z"),
        ({"edges": sparse.eye(3, 4)}, r"matrix of shape \(3, 4\)"),
        ({"features": FEATURES[:-1]}, "the numbers of nodes differ: 59 features, 60 labels"),
        ({"features": FEATURES[0]}, r"features has shape \(5,\)"),
        ({"labels": None}, "the nodes have no labels"),
        ({"splits": None}, "the nodes have no split"),
        ({"splits": np.where(WORDS == "val", "vale", WORDS)}, "splits has the word 'vale'"),
        ({"labels": LABELS * 0.5}, "which is not a class"),
        ({"splits": {"train": [0]}}, "splits has train\n"),
        ({"splits": {**SPLITS, "test": []}}, "the test split is empty"),
        ({"splits": {**MASKS, "test": MASKS["test"][:9]}}, r"a mask of shape \(9,\)"),
        ({"splits": np.arange(N)}, "hint: a dict with node ids or masks"),
        ({"num_nodes": 61}, "the numbers of nodes differ: 61 num_nodes, 60 features"),
        ({"edges": np.ma.masked_greater(EDGES, 50)}, r"\d+ elements of edges are masked"),
        ({"edges": torch.eye(3).to_sparse()}, "edges is a tensor of torch.float32 and shape"),
        ({"features": torch.ones(N, 2).to(torch.float8_e5m2)}, "features is a tensor of .*float8"),
        ({"splits": [[1, 2], [3]]}, r"splits is (.|\n)*hint: a tensor or an array"),
        ({"feature_dtype": "int32"}, "feature_dtype is 'int32'"),
        ({"scales": "rows"}, "scales is 'rows'"),
    ],
)
def test_arguments_of_inconsistent_shapes_are_rejected(changed, message, tmp_path):
    with pytest.raises((TypeError, ValueError), match=message):
        gcnzc.prepare(tmp_path / "data", **{**GIVEN, "edges": EDGES, **changed})
    assert not (tmp_path / "data").exists()


def test_features_of_a_dgl_graph_by_another_name_are_not_dropped(tmp_path):
    graph = as_dgl()
    graph.ndata["x"] = graph.ndata.pop("feat")
    with pytest.raises(ValueError, match=r"no node data 'feat', but 'x' of shape \(60, 5\)"):
        gcnzc.prepare(graph, tmp_path / "data")
    gcnzc.prepare(graph, tmp_path / "data", features=graph.ndata.pop("x"))
    assert np.array_equal(gcnzc.load(tmp_path / "data").features, FEATURES)
    gcnzc.prepare(graph, tmp_path / "none")
    assert gcnzc.load(tmp_path / "none").features is None


def test_objects_that_are_no_graph_get_their_remedy(tmp_path):
    pyg = import_pyg()
    typed = pyg.data.HeteroData()
    typed["paper"].x = torch.zeros(3, 2)
    typed["paper", "cites", "paper"].edge_index = torch.tensor([[0], [1]])
    with pytest.raises(ValueError, match=r"node types \['paper'\](.|\n)*to_homogeneous"):
        gcnzc.prepare(typed, tmp_path / "data")

    class Own(pyg.data.Dataset):
        def len(self):
            return 1

        def get(self, place):
            return as_pyg()

    with pytest.raises(TypeError, match=r"is a Own, not a graph(.|\n)*dataset\[0\]"):
        gcnzc.prepare(Own(), tmp_path / "data")
    names = pd.DataFrame({"source": ["a", "b"], "target": ["b", "c"]})
    with pytest.raises(ValueError, match="is then ids") as caught:
        gcnzc.prepare(tmp_path / "data", edges=names, **GIVEN)
    assert "numpy.unique(edges, return_inverse=True)" in str(caught.value)


def test_invalid_combinations_of_arguments_are_rejected(tmp_path):
    with pytest.raises(TypeError, match=r"a source, 'a', but no dest, .*\n\nhint: prepare\("):
        gcnzc.prepare("a")
    with pytest.raises(TypeError, match=r"but no dest, .*\n\nhint: prepare\("):
        gcnzc.prepare(edges=EDGES)
    with pytest.raises(TypeError, match=r"neither a source nor edges\n\nhint: prepare\("):
        gcnzc.prepare(dest=tmp_path / "data")
    with pytest.raises(TypeError, match=r"both edges and a source, 'x.npz'\n\nhint: prepare\("):
        gcnzc.prepare("x.npz", tmp_path / "data", edges=EDGES)
    with pytest.raises(TypeError, match="edges is a object"):
        gcnzc.prepare(object(), tmp_path / "data", **GIVEN)
    with pytest.raises(TypeError, match=r"labels is an array of int64 and shape \(\)\n\nhint"):
        gcnzc.prepare(tmp_path / "data", edges=EDGES, **{**GIVEN, "labels": np.array(3)})
    with pytest.raises(ValueError, match="apply to a graph in memory"):
        gcnzc.prepare("x.npz", tmp_path / "data", labels=LABELS)
    with pytest.raises(ValueError, match=r"split is 'random', but a graph .*\n\nhint: splits="):
        gcnzc.prepare(tmp_path / "data", edges=EDGES, **GIVEN, split="random")
    assert not (tmp_path / "data").exists()


def write_pyg(path, extra=None, slices=None, **changed):
    contents = {**as_pyg().to_dict(), **changed}
    Data = import_pyg().data.Data
    torch.save((contents, slices, Data) if extra is None else extra, path)
    return path


def test_processed_files_of_pyg_are_read_without_unpickling(expected, tmp_path):
    path = write_pyg(tmp_path / "data.pt")
    gcnzc.prepare(path, tmp_path / "a", bidirected=True)
    check_equal(gcnzc.load(tmp_path / "a"), expected)
    torch.save({**as_pyg().to_dict()}, path)
    gcnzc.prepare(path, tmp_path / "b", bidirected=True)
    check_equal(gcnzc.load(tmp_path / "b"), expected)
    masks = {
        f"{key}_mask": torch.from_numpy(np.stack([~MASKS[part], MASKS[part]], 1))
        for key, part in KEYS.items()
        if part != "test"
    }
    write_pyg(path, **masks)
    gcnzc.prepare(path, tmp_path / "c", bidirected=True, split=1)
    check_equal(gcnzc.load(tmp_path / "c"), expected)
    with pytest.raises(ValueError, match="has 2 splits, 0 to 1; split is None\n\nhint: choose"):
        gcnzc.prepare(path, tmp_path / "d")


def test_files_of_pyg_that_need_unpickling_or_are_no_graph(tmp_path):
    path = write_pyg(tmp_path / "data.pt", as_pyg())
    with pytest.raises(ValueError, match=r"(?s)cannot be read.*hint: .*gcnzc.prepare\(torch.load"):
        gcnzc.prepare(path, tmp_path / "d")
    write_pyg(path, ({"x": torch.ones(2, 2)}, None))
    with pytest.raises(ValueError, match="is not a graph of PyG: it has x"):
        gcnzc.prepare(path, tmp_path / "d")
    write_pyg(path, slices={"edge_index": torch.tensor([0, 3, 6])})
    with pytest.raises(ValueError, match="has 2 graphs"):
        gcnzc.prepare(path, tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_reverse_edges_that_are_added_by_a_guess_are_noted(tmp_path, caplog):
    ends = np.sort(EDGES, axis=0)
    gcnzc.prepare(tmp_path / "guessed", **{**GIVEN, "edges": ends})
    assert gcnzc.load(tmp_path / "guessed").graph.num_edges == 2 * ends.shape[1]
    (message,) = caplog.messages
    assert message.startswith("the reverse of every edge was added, because all edges point one")
    assert "bidirected=False" in message
    caplog.clear()
    # logged once, and not where there is nothing to guess
    gcnzc.prepare(tmp_path / "guessed", tmp_path / "again")
    cases = {"both": {"bidirected": True}, "no": {"bidirected": False}, "two": {"edges": EDGES}}
    for name, given in cases.items():
        gcnzc.prepare(tmp_path / name, **{**GIVEN, "edges": ends, **given})
    gcnzc.prepare(networkx.Graph([(0, 1), (1, 2)]), tmp_path / "networkx", features=np.eye(3))
    assert caplog.messages == []
    parts = {f"{part}_idx": ids for part, ids in SPLITS.items()}
    np.savez(tmp_path / "mine.npz", edge_index=ends, node_feat=FEATURES, node_label=LABELS, **parts)
    gcnzc.load(tmp_path / "mine.npz")
    assert len(caplog.messages) == 1


def weigh_pyg(weights):
    data = as_pyg()
    data.edge_weight = torch.from_numpy(weights)
    return data


def attribute_pyg(weights):
    data = as_pyg()
    data.edge_attr = torch.from_numpy(weights)
    return data


def weigh_dgl(weights):
    graph = as_dgl()
    graph.edata["w"] = torch.from_numpy(weights)
    return graph


def weigh_networkx(weights):
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(N))
    graph.add_weighted_edges_from(zip(*EDGES.tolist(), weights.tolist(), strict=True))
    return graph


def weigh_pandas(weights):
    return pd.DataFrame({"source": EDGES[0], "target": EDGES[1], "strength": weights})


def weigh_scipy(weights):
    return sparse.csr_matrix((weights, EDGES), (N, N))


WEIGHED = {
    weigh_pyg: "edge_weight",
    attribute_pyg: "edge_attr",
    weigh_dgl: "edata['w']",
    weigh_networkx: "weight",
    weigh_pandas: "column strength",
    weigh_scipy: "the elements of the matrix",
}


@pytest.mark.parametrize("weigh", WEIGHED)
def test_weights_of_edges_that_are_not_stored_are_noted(weigh, tmp_path, caplog):
    count = EDGES.shape[1]
    gcnzc.prepare(tmp_path / "ones", **{**GIVEN, "edges": weigh(np.ones(count))})
    assert caplog.messages == []
    weights = np.where(np.arange(count) == count - 1, 0.5, 1)
    gcnzc.prepare(tmp_path / "some", **{**GIVEN, "edges": weigh(weights)})
    (message,) = caplog.messages
    assert message.startswith(f"not stored: {WEIGHED[weigh]}; a prepared folder has no weights")
    found, plain = (gcnzc.load(tmp_path / name).graph for name in ("some", "ones"))
    assert torch.equal(found.indices, plain.indices)
