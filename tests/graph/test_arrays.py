"""Graphs in memory that are prepared: arrays, and the objects of other libraries."""

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
    "networkx": {"edges": networkx.DiGraph(EDGES.T.tolist())},
    "val": {"edges": EDGES, "splits": {**SPLITS, "val": SPLITS["valid"]}},
}
CASES["networkx"]["edges"] = networkx.DiGraph()
CASES["networkx"]["edges"].add_nodes_from(range(N))
CASES["networkx"]["edges"].add_edges_from(EDGES.T.tolist())
del CASES["val"]["splits"]["valid"]


@pytest.mark.parametrize("case", CASES)
def test_arrays_and_objects_give_what_an_archive_gives(case, expected, tmp_path):
    gcnzc.prepare(tmp_path / "data", **{**GIVEN, **CASES[case]}, bidirected=True)
    data = gcnzc.load(tmp_path / "data")
    check_equal(data, expected)
    assert data.name == "data"
    assert data.origin["format"] == "arrays"


@pytest.mark.parametrize("make", [as_pyg, as_dgl])
def test_objects_of_pyg_and_dgl_bring_features_labels_and_masks(make, expected, tmp_path):
    gcnzc.prepare(make(), tmp_path / "data", bidirected=True)
    check_equal(gcnzc.load(tmp_path / "data"), expected)


def test_a_graph_without_directions_is_stored_in_both(tmp_path):
    graph = networkx.Graph([("a", "b"), ("b", "c"), ("c", "d"), ("d", "a")])
    splits = {"train": [0, 1], "valid": [2], "test": [3]}
    gcnzc.prepare(graph, tmp_path / "data", features=np.eye(4), labels=[0, 1, 0, 1], splits=splits)
    data = gcnzc.load(tmp_path / "data")
    assert data.graph.num_edges == 8
    assert data.graph.in_degrees().tolist() == [2] * 4


def test_the_metric_is_chosen(tmp_path):
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
        ({"labels": None}, "has no labels"),
        ({"labels": None, "splits": None}, "has no labels and splits"),
        ({"labels": LABELS * 0.5}, "which is not a class"),
        ({"splits": {"train": [0]}}, "splits has train\n"),
        ({"splits": {**SPLITS, "test": []}}, "the test split is empty"),
        ({"splits": {**MASKS, "test": MASKS["test"][:9]}}, r"a mask of shape \(9,\)"),
        ({"splits": np.arange(N)}, "hint: a dict with node ids or masks"),
        ({"num_nodes": 61}, "the numbers of nodes differ: 61 num_nodes, 60 features"),
    ],
)
def test_arguments_that_do_not_fit(changed, message, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        gcnzc.prepare(tmp_path / "data", **{**GIVEN, "edges": EDGES, **changed})
    assert "\n\nhint: " in str(caught.value)
    assert not (tmp_path / "data").exists()


def test_wrong_ways_to_call(tmp_path):
    with pytest.raises(TypeError, match="takes a source and the folder to write"):
        gcnzc.prepare(tmp_path / "data")
    with pytest.raises(TypeError, match="takes a source and the folder to write"):
        gcnzc.prepare("x.npz", tmp_path / "data", edges=EDGES)
    with pytest.raises(TypeError, match="edges is a object"):
        gcnzc.prepare(object(), tmp_path / "data", **GIVEN)
    with pytest.raises(ValueError, match="are of a graph in memory"):
        gcnzc.prepare("x.npz", tmp_path / "data", labels=LABELS)
