"""Datasets in OGB's layout are written and read as the `ogb` package reads and writes them."""

import importlib.util
import json

import numpy as np
import pandas as pd
import pytest
from graph.test_hetero_ogb import CITES, SIZES, WRITES, build, drawn
from programs import output_of
from tiny_graph import tiny

import gcnzc
from bench.ogb_folders import write_links
from gcnzc import load, prepare
from gcnzc.cli import main
from gcnzc.datasets import ogb_write
from gcnzc.datasets.ogb_hetero import OgbHetero
from gcnzc.datasets.source import EdgeSplitArrays
from gcnzc.graph.ogb import to_ogb

# a process imports ogb, and with it DGL and PyG
pytestmark = pytest.mark.processes

PARTS = ("train", "valid", "test")

# graphs that are written here, and read by the package
OURS = {
    "csv": tiny(seed=1),
    "binary": tiny(seed=2),
    "inverse": tiny(seed=3),
    "nofeat": tiny(seed=4).but(features=None),
    "half": tiny(seed=5).but(features=np.arange(200, dtype=np.float16).reshape(40, 5)),
    "several": tiny(seed=6).but(labels=np.eye(40, 3)),
}

THEIRS = """
import json, os, shutil, sys, types
# else the import asks the network for a newer version
sys.modules["outdated"] = types.ModuleType("outdated")
sys.modules["outdated"].check_outdated = lambda *_: (False, None)
import numpy as np
import torch
# the package loads graphs and arrays from its own files, without naming them as safe
plain = torch.load
torch.load = lambda *args, **how: plain(*args, **(how | {"weights_only": False}))
from pathlib import Path
from ogb.io import DatasetSaver
from ogb.linkproppred import LinkPropPredDataset
from ogb.nodeproppred import NodePropPredDataset

here = Path(sys.argv[1])
os.chdir(here)

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


def read(name, meta):
    if meta["task type"] == "link prediction":
        data = LinkPropPredDataset(name, meta_dict=meta)
        found = {"graph": data[0], "split": data.get_edge_split()}
    else:
        data = NodePropPredDataset(name, meta_dict=meta)
        found = {"graph": data[0][0], "labels": data[0][1], "split": data.get_idx_split()}
        found["num_classes"] = data.num_classes
    np.savez(here / f"{name}.npz", **flat(found))


for path in sorted(here.glob("ours-*")):
    read(path.name, json.loads((path / "meta_dict.json").read_text()))


def save(name, graph, split, task, metric, labels=None, num_classes=None):
    is_hetero = "edge_index_dict" in graph
    saver = DatasetSaver(name, is_hetero, version=1)
    saver.save_graph_list([graph])
    if labels is not None:
        saver.save_target_labels(labels)
    saver.save_split(split, "time")
    saver.copy_mapping_dir("mapping")
    saver.save_task_info(task, metric, num_classes=num_classes)
    read(name, saver.get_meta_dict())
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
    "edge_time_dict": {("paper", "cites", "paper"): random.integers(2**60, 2**61, size=(90, 1))},
}
split = {part: {"paper": ids} for part, ids in parts(30, 15, 8).items()}
labels = {"paper": random.integers(2, size=(30, 1))}
for which in split.values():
    labels["paper"][which["paper"][:2], 0] = [0, 1]
save("ogbn-typed", typed, split, "binary classification", "rocauc", labels, 2)
save("ogbl-typed", typed, links("edges"), "link prediction", "mrr")
"""


def write_mag(path, given):
    """Write files as those of ogbn-mag, with pandas."""

    def table(name, values, header=False):
        file = path / f"{name}.csv.gz"
        file.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(values).to_csv(file, header=header, index=False, compression="gzip")

    has = {"author": [False], "paper": [True]}
    table("raw/num-node-dict", {each: [size] for each, size in SIZES.items()}, True)
    table("raw/triplet-type-list", [WRITES, CITES])
    for number, (each, ends) in enumerate(given["edges"].items()):
        folder = f"raw/relations/{'___'.join(each)}"
        table(f"{folder}/edge", ends.T)
        table(f"{folder}/num-edge-list", [[ends.shape[1]]])
        table(f"{folder}/edge_reltype", np.full((ends.shape[1], 1), number))
    table("raw/node-feat/paper/node-feat", given["features"])
    table("raw/node-feat/paper/node_year", given["year"][:, None])
    table("raw/nodetype-has-label", has, True)
    table("raw/node-label/paper/node-label", given["labels"][:, None])
    table("split/time/nodetype-has-split", has, True)
    for part, ids in given["split"].items():
        table(f"split/time/paper/{part}", ids[:, None])
    (path / "processed").mkdir()
    (path / "RELEASE_v2.txt").write_text("# Release note for ogbn-mag\n\n### v2\n")


def write_ours(here):
    """Write folders and what the package must be told of them."""
    metas = {}
    for name, graph in OURS.items():
        how = {"binary": name in ("binary", "half", "several")}
        path = graph.write(here / f"ours-{name}", add_inverse_edge=name == "inverse", **how)
        metas[path] = ogb_write.meta_dict(path)
    random, path = np.random.default_rng(0), here / "ours-links"
    sizes = {"train": 60, "valid": 7, "test": 9}
    edges = {part: random.integers(0, 40, (2, count)) for part, count in sizes.items()}
    negatives = {part: random.integers(0, 40, (2, 30)) for part in PARTS[1:]}
    links = EdgeSplitArrays(edges, negatives, "hits@50", "time")
    features = random.random((40, 3)).astype(np.float32)
    write_links(path, edges["train"], 40, links, features=features, add_inverse_edge=True)
    metas[path] = ogb_write.meta_dict(here / "ours-csv")
    metas[path] |= {"task type": "link prediction", "eval metric": "hits@50", "split": "time"}
    metas[path] |= {"dir_path": str(path), "add_inverse_edge": "True"}
    for name in ("csv", "binary"):
        path = here / f"ours-typed-{name}"
        to_ogb(build(drawn(1)), path, binary=name == "binary", split_name="time", num_classes=6)
        metas[path] = ogb_write.meta_dict(path)
    mag = here / "ours-mag"
    write_mag(mag, drawn(2))
    metas[mag] = metas[here / "ours-typed-csv"] | {"version": 2, "dir_path": str(mag)}
    metas[mag] |= {"additional node files": "node_year", "additional edge files": "edge_reltype"}
    for path, meta in metas.items():
        (path / "meta_dict.json").write_text(json.dumps(meta))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of all datasets, with the arrays that OGB reads in NAME.npz."""
    if importlib.util.find_spec("ogb") is None:
        pytest.skip("ogb is not installed")
    here = tmp_path_factory.mktemp("ogb")
    write_ours(here)
    output_of("-W", "ignore", "-c", THEIRS, here, PYTHONWARNINGS="ignore")
    return here


def folder_of(here, name):
    prefix, suffix = name.split("-")
    return here / f"submission_{prefix}_{suffix}" / suffix


def read_both_ways(path, tmp_path):
    prepare(path, tmp_path / "prepared")
    return load(path), load(tmp_path / "prepared")


def check_graph(data, read):
    mine = sorted(zip(*(ends.tolist() for ends in data.graph.coo()), strict=True))
    assert mine == sorted(zip(*read["graph/edge_index"].tolist(), strict=True))
    if "graph/node_feat" in read:
        assert np.array_equal(data.features, read["graph/node_feat"])
    else:
        assert data.features is None


@pytest.mark.parametrize("name", ["classes", "tasks"])
def test_node_property_datasets(written, tmp_path, name):
    read = np.load(written / f"ogbn-{name}.npz")
    for data in read_both_ways(folder_of(written, f"ogbn-{name}"), tmp_path):
        check_graph(data, read)
        labels = read["labels"][:, 0] if name == "classes" else read["labels"]
        assert np.array_equal(data.labels, labels, equal_nan=True)
        for part in PARTS:
            assert np.array_equal(data.split[part], read[f"split/{part}"])
        expected = ("accuracy", 4) if name == "classes" else ("rocauc", 2)
        assert (data.name, data.metric, data.num_classes) == (name, *expected)
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


def check_typed(graph, read):
    """Check all that a graph of `drawn` and a typed dataset of the package have."""
    for each in graph.edge_types:
        ends = graph.edges(each).edge_index()
        assert np.array_equal(ends, read[f"graph/edge_index_dict/{'___'.join(each)}"])
    paper = graph.nodes("paper")
    assert np.array_equal(paper.features, read["graph/node_feat_dict/paper"])
    assert np.array_equal(paper.labels, read["labels/paper"][:, 0])
    for part in PARTS:
        assert np.array_equal(paper.split[part], read[f"split/{part}/paper"])


def test_heterogeneous_node_property_datasets(written):
    read = np.load(written / "ogbn-typed.npz")
    graph = gcnzc.load(folder_of(written, "ogbn-typed")).graph
    check_typed(graph, read)
    paper, cites = graph.nodes("paper"), graph.edges(CITES)
    assert np.array_equal(paper.time, read["graph/node_year_dict/paper"][:, 0])
    times = read["graph/edge_time_dict/paper___cites___paper"][:, 0]
    assert np.array_equal(cites.time, times[cites.edge_ids])
    assert OgbHetero(folder_of(written, "ogbn-typed")).num_classes == 2


# what is written here


@pytest.mark.parametrize("name", OURS)
def test_ogb_reads_node_property_datasets(written, name):
    graph, read = OURS[name], np.load(written / f"ours-{name}.npz")
    edges = graph.edge_index
    if name == "inverse":
        # OGB puts the reverse of an edge behind it
        edges = np.stack([edges, edges[::-1]], axis=2).reshape(2, -1)
    assert np.array_equal(read["graph/edge_index"], edges)
    assert np.array_equal(read["labels"].reshape(graph.labels.shape), graph.labels)
    assert read["graph/num_nodes"] == 40
    assert read["num_classes"] == (2 if name == "several" else 3)
    assert all(np.array_equal(read[f"split/{part}"], ids) for part, ids in graph.split.items())
    assert ("graph/node_feat" in read) == (graph.features is not None)
    if graph.features is not None:
        assert np.array_equal(read["graph/node_feat"], graph.features)


def test_ogb_reads_link_property_datasets(written):
    read, data = np.load(written / "ours-links.npz"), load(written / "ours-links")
    for part in PARTS:
        assert np.array_equal(read[f"split/{part}/edge"].T, data.links.edges[part])
    for part in PARTS[1:]:
        assert np.array_equal(read[f"split/{part}/edge_neg"].T, data.links.negatives[part])
    check_graph(data, read)


@pytest.mark.parametrize("form", ["csv", "binary"])
def test_ogb_reads_heterogeneous_datasets(written, form):
    given, read = drawn(1), np.load(written / f"ours-typed-{form}.npz")
    check_typed(build(given), read)
    assert read["num_classes"] == 6
    # OGB keys additional files of csv datasets by the name of the file
    suffix = "_dict" if form == "binary" else ""
    cites, writes = "___".join(CITES), "___".join(WRITES)
    for key, name in (
        (f"node_time{suffix}/paper", "year"),
        (f"edge_time{suffix}/{cites}", "time"),
        (f"edge_weight{suffix}/{writes}", "weight"),
    ):
        assert np.array_equal(read[f"graph/{key}"][:, 0], given[name])
    # from csv, OGB 1.3.6 takes the rows of edge features from the number of edges on: none
    if form == "binary":
        assert np.array_equal(read[f"graph/edge_feat_dict/{cites}"], given["edge_features"])


def test_files_like_those_of_ogbn_mag_are_read_as_ogb_reads_them(written):
    path, read = written / "ours-mag", np.load(written / "ours-mag.npz")
    graph = gcnzc.load(path).graph
    check_typed(graph, read)
    for each, size in SIZES.items():
        assert graph.nodes(each).num_nodes == read[f"graph/num_nodes_dict/{each}"] == size
    assert np.array_equal(graph.nodes("paper").time, read["graph/node_year/paper"][:, 0])
    opened = OgbHetero(path, "ogbn-mag")
    assert (opened.name, opened.num_classes, opened.split_name) == ("ogbn-mag", 349, "time")
    # the name in the release file is that of another dataset, with other sizes
    assert OgbHetero(path).num_classes is None


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
        ("ogbl-f1", "unknown metric f1"),
        ("ogbl-typed", "is a heterogeneous link property dataset"),
    ],
)
def test_other_tasks_and_metrics_are_rejected(written, tmp_path, name, message):
    with pytest.raises(ValueError, match=rf"{message}(.|\n)*\n\nhint: "):
        prepare(folder_of(written, name), tmp_path / "data")
