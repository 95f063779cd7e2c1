import gzip
import pickle
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tiny_graph import tiny

from gcnzc.datasets import ogb
from gcnzc.datasets.ogb import OgbGraph
from gcnzc.datasets.ogb_write import meta_dict
from gcnzc.datasets.rows import Rows, allocate_in_memory, convert_chunks, no_progress, stored_dtype

BOTH_FORMS = pytest.mark.parametrize("binary", [False, True], ids=["csv", "binary"])


def features_of(graph, allow_nan=False):
    dtype = stored_dtype(graph.features, None)
    chunks = convert_chunks(graph.features, dtype, allow_nan, allocate_in_memory, no_progress)
    return np.concatenate([chunk.copy() for chunk in chunks])


def edges_of(graph):
    return np.stack(graph.edges(allocate_in_memory, no_progress))


def usual_of(graph):
    defaults = graph.edge_defaults()
    return defaults.bidirected, defaults.duplicates


def assert_same(found, graph):
    assert (edges_of(found) == graph.edge_index).all()
    assert (found.labels().reshape(-1) == graph.labels).all()
    assert all((found.split()[part] == ids).all() for part, ids in graph.split.items())
    if graph.features is None:
        assert found.features is None
    else:
        # float32 comes back bit for bit, from csv too
        assert (features_of(found) == graph.features).all()


@BOTH_FORMS
@pytest.mark.parametrize("columns", [0, 1, 5, 3000])
def test_written_datasets_are_read_back(tmp_path, binary, columns):
    graph = tiny(num_columns=columns) if columns else tiny().but(features=None)
    assert_same(OgbGraph(graph.write(tmp_path / "a", binary=binary)), graph)


@BOTH_FORMS
def test_metadata_is_stored_in_task_json(tmp_path, binary):
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "README.md").write_text("Users.\n")
    path = tiny().write(
        tmp_path / "a",
        binary=binary,
        split_name="time",
        num_classes=9,
        metric="rocauc",
        add_inverse_edge=True,
        best_accuracy=0.75,
        name="mine",
        origin={"seed": 3},
        mapping=tmp_path / "given",
    )
    found = OgbGraph(path)
    assert (found.name, found.num_classes, found.metric) == ("mine", 9, "rocauc")
    assert (found.split_name, found.best_accuracy) == ("time", 0.75)
    assert meta_dict(path)["num classes"] == 9
    assert usual_of(found) == (True, "keep")
    assert found.origin["seed"] == 3
    assert found.origin["release"] == "RELEASE_v1"
    assert (found.mapping / "README.md").read_text() == "Users.\n"


def in_chunks(table, rows):
    def chunks(allocate):
        yield from (table[begin : begin + rows] for begin in range(0, len(table), rows))

    return Rows(40, table.shape[1], table.dtype, chunks, "generated")


def test_too_few_rows_are_an_error_and_leave_nothing(tmp_path):
    rows = tiny().features[:39]
    for features in (rows, in_chunks(rows, 7)):
        with pytest.raises(ValueError, match=r"39 rows of features for 40 nodes"):
            tiny().but(features=features).write(tmp_path / "a")
    assert not list(tmp_path.iterdir())


@BOTH_FORMS
def test_labels_of_every_dtype_and_shape_are_read(tmp_path, binary):
    graph = tiny()
    missing = graph.labels.astype(np.float32)
    missing[5] = np.nan
    several = np.random.default_rng(0).integers(2, size=(40, 4)).astype(np.float32)
    several[3, 2] = np.nan
    for number, labels in enumerate((graph.labels, missing, missing[:, None], several)):
        found = OgbGraph(graph.but(labels=labels).write(tmp_path / f"{number}", binary=binary))
        columns = labels.reshape(40, -1)
        assert np.array_equal(found.labels().astype(np.float64), columns, equal_nan=True)


def test_an_empty_line_is_a_missing_label(tmp_path):
    found = OgbGraph(tiny(4).write(tmp_path / "a", binary=False))
    rewrite(tmp_path / "a/raw/node-label.csv.gz", lambda text: b'1\n\n0\n""\n')
    assert np.array_equal(found.labels()[:, 0], [1, np.nan, 0, np.nan], equal_nan=True)


# what is known of a set


def test_real_ogb_datasets_are_read(shared_data):
    cora = OgbGraph(shared_data / "ogb/cora")
    assert (cora.num_nodes, cora.num_edges, cora.num_classes) == (2708, 10556, 7)
    assert cora.split_name == "planetoid"
    archive = np.load(shared_data / "cora/cora.npz")
    assert (cora.labels()[:, 0] == archive["node_label"]).all()
    table = features_of(cora)
    assert table.dtype == np.float32
    rows = np.repeat(np.arange(2708), np.diff(archive["feat_indptr"]))
    assert (table[rows, archive["feat_indices"]] == archive["feat_data"]).all()
    assert np.count_nonzero(table) == len(rows)
    tolokers = OgbGraph(shared_data / "ogb/tolokers")
    archive = np.load(shared_data / "tolokers/tolokers.npz")
    assert (features_of(tolokers) == archive["node_feat"]).all()
    assert tolokers.metric == "rocauc"
    assert usual_of(tolokers) == (True, "keep")
    arxiv = OgbGraph(shared_data / "ogb/arxiv_nofeat")
    assert arxiv.features is None
    assert usual_of(arxiv) == (True, "remove")


def test_a_name_selects_metadata_of_the_catalogue(tmp_path):
    path = tiny().write(tmp_path / "a", split_name="sales_ranking")
    (path / "task.json").unlink()
    assert OgbGraph(path, "ogbn-products").num_classes == 47
    assert usual_of(OgbGraph(path, "ogbn-products")) == (True, "keep")
    assert usual_of(OgbGraph(path, "ogbn-papers100M")) == (False, "keep")
    assert usual_of(OgbGraph(path, "ogbn-arxiv")) == (True, "remove")
    assert OgbGraph(path).num_classes is None
    assert OgbGraph(path).edge_defaults() is None


def test_the_name_is_read_from_the_release_file(shared_data, tmp_path):
    path = tmp_path / "a"
    shutil.copytree(shared_data / "ogb/arxiv_nofeat", path)
    assert OgbGraph(path).edge_defaults() is None
    (path / "RELEASE_v1.txt").write_text("# Release note for ogbn-arxiv\n\n### v1: today")
    assert OgbGraph(path).name == "ogbn-arxiv"
    assert usual_of(OgbGraph(path)) == (True, "remove")


def test_the_split_is_the_default_the_only_or_the_requested_one(tmp_path):
    path = tiny().write(tmp_path / "a", split_name="time")
    (path / "split/time").rename(path / "split/odd")
    assert OgbGraph(path).split_name == "odd"
    (path / "split/even").mkdir()
    with pytest.raises(ValueError, match="several splits\n\nhint: choose one of even, odd"):
        OgbGraph(path)
    assert OgbGraph(path, split="even").split_name == "even"
    with pytest.raises(ValueError, match="no split prime\n\nhint: it has even, odd"):
        OgbGraph(path, split="prime")
    (path / "split/time").mkdir()
    assert OgbGraph(path).split_name == "time"
    for folder in (path / "split").iterdir():
        folder.rename(tmp_path / folder.name)
    with pytest.raises(FileNotFoundError, match=r"no split in .*split\n\nhint: "):
        OgbGraph(path)


# sets of other kinds


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("raw/triplet-type-list.csv.gz", "is heterogeneous: it has raw/triplet"),
        ("raw/num-node-dict.csv.gz", "is heterogeneous"),
        ("raw/edge_index_dict.npz", "is heterogeneous"),
        ("processed/paper/node_feat.npy", "is heterogeneous"),
        ("raw/graph-label.npz", "is a graph-level dataset"),
        ("split/time/train.pt", "is a link property dataset"),
    ],
)
def test_other_kinds_of_datasets_are_detected_by_their_files(tmp_path, file, words):
    path = tmp_path / "a" / file
    path.parent.mkdir(parents=True)
    path.write_text("")
    assert ogb.is_layout(tmp_path / "a") == (not file.startswith("split"))
    with pytest.raises(ValueError, match=words + "(.|\n)*\n\nhint: "):
        OgbGraph(tmp_path / "a")


def test_several_graphs_are_reported_as_a_graph_level_dataset(tmp_path):
    path = tiny().write(tmp_path / "a", binary=False)
    rewrite(path / "raw/num-node-list.csv.gz", lambda text: text + b"7\n")
    with pytest.raises(ValueError, match="contains 2 graphs: it is a graph-level dataset"):
        OgbGraph(path)


# broken files


def rewrite(path, change):
    path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()))))


def read_all(path):
    graph = OgbGraph(path)
    edges_of(graph)
    graph.labels()
    graph.split()
    features_of(graph)


def line(number, words):
    def change(text):
        lines = text.splitlines(keepends=True)
        return b"".join([*lines[:number], words + b"\n", *lines[number + 1 :]])

    return change


FILES = ("raw/edge", "raw/node-feat", "raw/node-label", "raw/num-node-list", "split/random/valid")


@pytest.mark.parametrize("file", [f"{name}.csv.gz" for name in FILES])
def test_a_damaged_file_is_reported_by_name(tmp_path, file):
    path = tiny(num_nodes=400).write(tmp_path / "a", binary=False)
    whole = (path / file).read_bytes()
    cut = whole[: len(whole) // 2]
    wrong = bytearray(whole)
    wrong[-6] ^= 1
    for broken, words in (
        (cut, "is truncated"),
        (b"words", "not a gzip file"),
        (wrong, "not a gzip file, or is damaged: CRC check failed"),
    ):
        (path / file).write_bytes(broken)
        with pytest.raises(ValueError, match=rf"{file} .*{words}.*\n\nhint: "):
            read_all(path)
    if "node-feat" not in file:
        (path / file).unlink()
        with pytest.raises(FileNotFoundError, match=rf"no file .*{file}\n\nhint: "):
            read_all(path)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("raw/edge", line(0, b"1,2,3"), "has 3 columns, not 2"),
        ("raw/edge", line(3, b"1"), "edge.csv.gz is not a table of numbers: .*Row #4: Expected 2"),
        ("raw/edge", line(3, b"1,2,3"), "Row #4: Expected 2 columns, got 3"),
        ("raw/edge", line(3, b"1,2.5"), "has 2.5 in line 4, which is not an integer"),
        (
            "raw/edge",
            line(3, b"1,9999999999999999999"),
            r"has 1e\+19 in line 4, which is not an integer",
        ),
        ("raw/edge", line(3, b"1,40"), "edge 3 has the node 40, but nodes are 0 to 39"),
        ("raw/edge", lambda text: text + b"1,2\n", "has 201 edges, but the stored number"),
        ("raw/edge", line(199, b""), "has 199 edges, but the stored number of edges is 200"),
        ("raw/node-feat", line(3, b"1,2,nan,4,5"), "nan in row 3, column 2"),
        ("raw/node-feat", line(39, b""), "has 39 rows of features for 40 nodes"),
        ("raw/node-feat", lambda text: text + b"1,2,3,4,5\n", "has more than 0 rows of features"),
        ("raw/node-label", line(3, b"one"), "node-label.csv.gz is not a table of numbers"),
        (
            "split/random/valid",
            line(0, b"0.5"),
            "valid.csv.gz has 0.5 in line 1, which is not an integer",
        ),
    ],
)
def test_wrong_content_is_reported_by_file(tmp_path, file, change, words):
    path = tiny().write(tmp_path / "a", binary=False)
    rewrite(path / f"{file}.csv.gz", change)
    with pytest.raises(ValueError, match=words + "(.|\n)*\n\nhint: "):
        read_all(path)


def test_a_wrong_number_of_edges_is_rejected(tmp_path):
    path = tiny().write(tmp_path / "a")
    with np.load(path / "raw/data.npz") as archive:
        arrays = dict(archive)
    np.savez(path / "raw/data.npz", **(arrays | {"num_edges_list": np.array([7])}))
    with pytest.raises(ValueError, match=r"has 200 edges, but the stored number of edges is 7"):
        edges_of(OgbGraph(path))


TASK = '{"task type": "%s", "eval metric": "%s", "num classes": 2, "add_inverse_edge": "False"}'


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "does not describe a task: it is no dict"),
        ("{}", "does not describe a task: KeyError"),
        (TASK % ("regression", "rmse"), "the task is regression"),
        (TASK % ("binary classification", "ap"), "unknown metric ap"),
    ],
)
def test_unsupported_tasks_are_rejected(tmp_path, task, words):
    path = tiny().write(tmp_path / "a")
    (path / "task.json").write_text(task)
    with pytest.raises(ValueError, match=words + "(.|\n)*\n\nhint: "):
        OgbGraph(path)


# split_dict.pt


def with_split_dict(tmp_path, split, **how):
    path = tiny().write(tmp_path / "a")
    torch.save(split, path / "split/random/split_dict.pt", **how)
    return OgbGraph(path)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_split_of_numpy_arrays_is_read(tmp_path, dtype, zipped):
    split = {part: np.arange(3, dtype=dtype) + len(part) for part in ("train", "valid", "test")}
    graph = with_split_dict(tmp_path, split, _use_new_zipfile_serialization=zipped)
    found = graph.split()
    assert list(found) == list(split)
    assert all((found[part] == ids).all() for part, ids in split.items())


@pytest.mark.parametrize("module", ["numpy.core.multiarray", "numpy._core.multiarray"])
def test_a_split_pickled_by_numpy_1_or_2_is_read(tmp_path, module):
    split = {part: np.arange(3) for part in ("train", "valid", "test")}
    graph = with_split_dict(tmp_path, split, _use_new_zipfile_serialization=False)
    rebuild = np.arange(3).__reduce__()[0]
    assert callable(rebuild)
    ours = f"{rebuild.__module__}\n{rebuild.__name__}".encode()
    path = graph.folder / "split/random/split_dict.pt"
    data = path.read_bytes()
    assert ours in data
    path.write_bytes(data.replace(ours, f"{module}\n{rebuild.__name__}".encode()))
    assert graph.split()["test"].tolist() == [0, 1, 2]


class Harmful:
    def __reduce__(self):
        return (Path.touch, (Path(tempfile.gettempdir()) / "gcnzc-was-here",))


@pytest.mark.parametrize(
    "split",
    [
        Harmful(),
        [Harmful()],
        {"train": Harmful()},
        {"train": np.array([{}], dtype=object), "valid": np.arange(1), "test": np.arange(1)},
        None,
    ],
)
def test_other_pickled_objects_are_rejected_and_other_unpicklers_not_affected(tmp_path, split):
    graph = with_split_dict(tmp_path, {part: np.arange(3) for part in ("train", "valid", "test")})
    # torch keeps them in no order
    before = set(torch.serialization.get_safe_globals())
    graph.split()
    path = graph.folder / "split/random/split_dict.pt"
    path.write_bytes(b"words") if split is None else torch.save(split, path)
    with pytest.raises(ValueError, match=r"split_dict.pt cannot be read as numbers(.|\n)*hint: "):
        graph.split()
    assert not (Path(tempfile.gettempdir()) / "gcnzc-was-here").exists()
    assert set(torch.serialization.get_safe_globals()) == before


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ({"train": np.arange(3)}, "is not a dict of train, valid, test"),
        ([1, 2, 3], "is not a dict of train, valid, test"),
        ({part: {"paper": np.arange(3)} for part in ("train", "valid", "test")}, "by node types"),
    ],
)
def test_a_split_of_another_form_is_rejected(tmp_path, split, words):
    graph = with_split_dict(tmp_path, split)
    with pytest.raises(ValueError, match=words):
        graph.split()


def test_features_are_rounded_as_by_ogb(shared_data):
    # of csv that neither wrote: OGB's parser, then float32
    path = shared_data / "ogb/tolokers/raw/node-feat.csv.gz"
    expected = pd.read_csv(path, compression="gzip", header=None).values.astype(np.float32)
    assert (features_of(OgbGraph(shared_data / "ogb/tolokers")) == expected).all()


def test_meta_dict_of_another_folder_is_ignored(tmp_path):
    path = tiny().write(tmp_path / "a")
    (path / "task.json").unlink()
    told = {"task type": "classification", "eval metric": "rocauc", "add_inverse_edge": "True"}
    for folder, num_classes in (("x/b", None), ("x/a", 7)):
        torch.save(told | {"num classes": 7, "dir_path": folder}, tmp_path / "meta_dict.pt")
        assert OgbGraph(path).num_classes == num_classes
    with (tmp_path / "meta_dict.pt").open("wb") as file:
        pickle.dump(Harmful(), file)
    with pytest.raises(ValueError, match="cannot be read as numbers"):
        OgbGraph(path)
