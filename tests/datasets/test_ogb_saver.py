"""Datasets that `ogb.io.DatasetSaver` writes are read as the `ogb` package reads them."""

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from ogb_programs import IMPORT_OGB

from gcnzc import HeteroGraph, load, prepare
from gcnzc.cli import main

# a process imports ogb, and with it DGL and PyG
pytestmark = pytest.mark.processes

PARTS = ("train", "valid", "test")

THEIRS = (
    IMPORT_OGB
    + """
Path("mapping").mkdir()
Path("mapping/README.md").write_text("Nodes.")
random = np.random.default_rng(0)


def flat(values, key=""):
    if not isinstance(values, dict):
        return {key: np.asarray(values)} if values is not None else {}
    found = {}
    for name, value in values.items():
        name = name if isinstance(name, str) else "___".join(name)
        found |= flat(value, f"{key}/{name}" if key else name)
    return found


def save(name, graph, split, task, metric, labels=None, num_classes=None):
    is_hetero = "edge_index_dict" in graph
    saver = DatasetSaver(name, is_hetero, version=1)
    saver.save_graph_list([graph])
    if labels is not None:
        saver.save_target_labels(labels)
    saver.save_split(split, "time")
    saver.copy_mapping_dir("mapping")
    saver.save_task_info(task, metric, num_classes=num_classes)
    meta = saver.get_meta_dict()
    if labels is None:
        read = LinkPropPredDataset(name, meta_dict=meta)
        found = {"graph": read[0], "split": read.get_edge_split()}
    else:
        read = NodePropPredDataset(name, meta_dict=meta)
        found = {"graph": read[0][0], "labels": read[0][1], "split": read.get_idx_split()}
    np.savez(here / f"{name}.npz", **flat(found))
    shutil.rmtree(saver.dataset_dir + "/processed")
    saver.zip()


def graph(features):
    return {"edge_index": random.integers(60, size=(2, 400)), "num_nodes": 60,
            "node_feat": features, "edge_feat": None,
            "node_year": random.integers(2000, 2020, size=(60, 1)),
            "edge_weight": random.random((400, 1))}


def parts(count, *sizes):
    ids = np.split(random.permutation(count), np.cumsum(sizes))
    return dict(zip(("train", "valid", "test"), ids[:3]))


floats, integers = random.standard_normal((60, 5)), random.integers(9, size=(60, 3))
save("ogbn-classes", graph(floats.astype(np.float32)), parts(60, 40, 10),
     "multiclass classification", "acc", random.integers(3, size=(60, 1)), 4)
tasks = random.integers(2, size=(60, 6)).astype(np.float32)
tasks[random.random((60, 6)) < 0.2] = np.nan
save("ogbn-tasks", graph(integers), parts(60, 40, 10), "binary classification", "rocauc", tasks, 2)
save("ogbn-rmse", graph(None), parts(60, 40, 10), "regression", "rmse", floats[:, :1])
save("ogbn-ap", graph(None), parts(60, 40, 10), "binary classification", "ap", tasks, 2)


def links(form):
    split = {}
    for part, count in (("train", 300), ("valid", 8), ("test", 9)):
        edges, held_out = random.integers(60, size=(2, count)), part != "train"
        if form == "ranked":
            split[part] = {"source_node": edges[0], "target_node": edges[1]}
            if held_out:
                split[part]["target_node_neg"] = random.integers(60, size=(count, 20))
        else:
            split[part] = {"edge": edges.T, "year": np.full(count, 2000)}
            if held_out:
                split[part]["edge_neg"] = random.integers(60, size=(30, 2))
    return split


for name, metric in (("hits", "hits@20"), ("auc", "rocauc"), ("mrr", "mrr"), ("f1", "f1")):
    form = "ranked" if metric == "mrr" else "edges"
    features = floats.astype(np.float32) if name != "auc" else None
    save(f"ogbl-{name}", graph(features), links(form), "link prediction", metric)

ends = {("author", "writes", "paper"): (7, 30), ("paper", "cites", "paper"): (30, 30)}
typed = {
    "edge_index_dict": {
        each: np.stack([random.integers(size, size=90) for size in sizes])
        for each, sizes in ends.items()
    },
    "num_nodes_dict": {"author": 7, "paper": 30},
    "node_feat_dict": {"paper": random.standard_normal((30, 4)).astype(np.float32)},
    "edge_feat_dict": None,
    "node_year_dict": {"paper": random.integers(2000, 2020, size=(30, 1))},
}
split = {part: {"paper": ids} for part, ids in parts(30, 15, 8).items()}
labels = {"paper": random.integers(2, size=(30, 1))}
for which in split.values():
    labels["paper"][which["paper"][:2], 0] = [0, 1]
save("ogbn-typed", typed, split, "binary classification", "rocauc", labels, 2)
save("ogbl-typed", typed, links("edges"), "link prediction", "mrr")
"""
)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of all datasets, with the arrays that OGB reads in NAME.npz."""
    if importlib.util.find_spec("ogb") is None:
        pytest.skip("ogb is not installed")
    here = tmp_path_factory.mktemp("ogb")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", THEIRS, str(here)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr
    return here


def folder_of(here, name):
    prefix, suffix = name.split("-")
    return here / f"submission_{prefix}_{suffix}" / suffix


def read_both_ways(path, tmp_path):
    prepare(path, tmp_path / "prepared")
    return load(path), load(tmp_path / "prepared")


def check_graph(data, read):
    mine = sorted(zip(*(ends.tolist() for ends in data.graph.edges()), strict=True))
    assert mine == sorted(zip(*read["graph/edge_index"].tolist(), strict=True))
    if "graph/node_feat" in read:
        assert np.array_equal(data.features, read["graph/node_feat"])
    else:
        assert data.features is None


@pytest.mark.parametrize(
    ("name", "metric", "num_classes"), [("classes", "accuracy", 4), ("tasks", "rocauc", 2)]
)
def test_node_property_datasets(written, tmp_path, name, metric, num_classes):
    read = np.load(written / f"ogbn-{name}.npz")
    for data in read_both_ways(folder_of(written, f"ogbn-{name}"), tmp_path):
        check_graph(data, read)
        labels = read["labels"][:, 0] if name == "classes" else read["labels"]
        assert np.array_equal(data.labels, labels, equal_nan=True)
        for part in PARTS:
            assert np.array_equal(data.split[part], read[f"split/{part}"])
        assert (data.name, data.metric, data.num_classes) == (name, metric, num_classes)
        assert data.origin["options"]["because"] == "add_inverse_edge is False"


@pytest.mark.parametrize(("name", "metric"), [("hits", "hits@20"), ("auc", "auc"), ("mrr", "mrr")])
def test_link_property_datasets(written, tmp_path, name, metric):
    read = np.load(written / f"ogbl-{name}.npz")
    for data in read_both_ways(folder_of(written, f"ogbl-{name}"), tmp_path):
        check_graph(data, read)
        for part in PARTS:
            if name == "mrr":
                ends = [read[f"split/{part}/{end}_node"] for end in ("source", "target")]
                assert np.array_equal(data.links.edges[part], np.stack(ends))
            else:
                assert np.array_equal(data.links.edges[part], read[f"split/{part}/edge"].T)
        for part in PARTS[1:]:
            negatives = data.links.negatives[part]
            if name == "mrr":
                assert np.array_equal(negatives, read[f"split/{part}/target_node_neg"])
            else:
                assert np.array_equal(negatives, read[f"split/{part}/edge_neg"].T)
        assert (data.name, data.links.metric) == (name, metric)
        assert data.origin["options"]["because"] == "add_inverse_edge is False"


def test_heterogeneous_node_property_datasets(written):
    read = np.load(written / "ogbn-typed.npz")
    graph = HeteroGraph.from_ogb(folder_of(written, "ogbn-typed"))
    for each in graph.edge_types:
        ends = graph.edges(each).edge_index()
        assert np.array_equal(ends, read[f"graph/edge_index_dict/{'___'.join(each)}"])
    paper = graph.nodes("paper")
    assert np.array_equal(paper.features, read["graph/node_feat_dict/paper"])
    assert np.array_equal(paper.time, read["graph/node_year_dict/paper"][:, 0])
    assert np.array_equal(paper.labels, read["labels/paper"][:, 0])
    for part in PARTS:
        assert np.array_equal(paper.split[part], read[f"split/{part}/paper"])


@pytest.mark.parametrize(
    ("name", "metric", "options"),
    [
        ("ogbn-classes", "accuracy", []),
        ("ogbn-tasks", "rocauc", []),
        ("ogbn-typed", "rocauc", ["--model", "rgcn"]),
        ("ogbl-hits", "hits@20", ["--task", "link"]),
        ("ogbl-mrr", "mrr", ["--task", "link"]),
    ],
)
def test_runs_are_scored_by_the_stored_metric(written, tmp_path, capsys, name, metric, options):
    assert main(["prepare", str(folder_of(written, name)), str(tmp_path / "data")]) == 0
    sizes = ["--fanouts", "4", "--hidden", "8", "--epochs", "1"]
    capsys.readouterr()
    run = ["train", str(tmp_path / "data"), "--out", str(tmp_path / "run"), *sizes, *options]
    assert main(run) == 0
    assert f"test_{metric}" in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ogbn-rmse", "the task is regression"),
        ("ogbn-ap", "unknown metric ap"),
        ("ogbl-f1", "unknown metric f1"),
        ("ogbl-typed", "is a heterogeneous link property dataset"),
    ],
)
def test_other_tasks_and_metrics_are_rejected(written, tmp_path, name, message):
    with pytest.raises(ValueError, match=rf"{message}(.|\n)*\n\nhint: "):
        prepare(folder_of(written, name), tmp_path / "data")
