"""Keys of tables and names of classes: in graphs, prepared folders and predictions."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest

import gcnzc
from gcnzc._files import checksum
from gcnzc.datasets.store import checksum_of
from gcnzc.graph import Table, from_tables
from gcnzc.graph.load import verify
from gcnzc.train import embed_nodes, evaluate, predict, train
from gcnzc.train.config import EvaluateConfig, TrainConfig

USERS, ITEMS = 60, 40
EMAILS = np.array([f'u{number:02},"{number % 7}"@x' for number in range(USERS)], object)
CODES = np.random.default_rng(0).permutation(1000)[:ITEMS] + 7
LEVELS = ["gold", "silver", "0", "unused"]


def tables(**more):
    random = np.random.default_rng(1)
    groups = np.arange(USERS) % 3
    users = pd.DataFrame(
        {
            "email": EMAILS,
            "level": pd.Categorical(np.array(LEVELS)[groups], LEVELS),
            "x": groups + random.normal(size=USERS),
            "vip": groups == 0,
            "part": np.array(["train", "train", "train", "valid", "test"])[np.arange(USERS) % 5],
        }
    )
    items = pd.DataFrame({"code": CODES, "x": random.normal(size=ITEMS)})
    chosen = random.integers(0, USERS, 400), random.integers(0, ITEMS, 400)
    orders = pd.DataFrame({"user": EMAILS[chosen[0]], "item": CODES[chosen[1]], "x": 1.0})
    keys = {"user": "user", "item": "item"}
    return {
        "user": Table(users, "email", features=["x"]),
        "item": Table(items, "code", features=["x"]),
        "order": Table(orders, foreign_keys=keys, features=["x"]),
    } | more


def build(labels="level"):
    return from_tables(tables(), labels={"user": labels}, splits={"user": "part"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("names") / "graph"
    gcnzc.prepare(build(), path)
    return path


SIZES = {"fanouts": (4, 4), "hidden": 8, "batch_size": 32, "epochs": 2}


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run"
    train(TrainConfig(data=folder, model="rgcn", **SIZES), path)
    return path


def test_graphs_and_folders_have_keys_and_names_of_classes(folder, tmp_path):
    built = build()
    # a copy of a folder has the names too, without a read of the whole
    gcnzc.prepare(gcnzc.load(folder).graph, tmp_path / "copy")
    gcnzc.prepare(folder, tmp_path / "again")
    for graph in (
        built,
        built.sort_by_time("both"),
        *(gcnzc.load(path).graph for path in (folder, tmp_path / "copy", tmp_path / "again")),
    ):
        user, item, order = (graph.nodes(name) for name in ("user", "item", "order"))
        assert user.keys.dtype.kind == "U"
        assert user.keys.tolist() == EMAILS.tolist()
        assert item.keys.dtype == np.int64
        assert item.keys.tolist() == CODES.tolist()
        assert order.keys is None
        assert list(user.classes) == LEVELS
        assert item.classes is None
    for name in ("copy", "again"):
        verify(tmp_path / name)
        text = (tmp_path / name / "nodes/0/mapping/nodes.csv").read_text()
        assert text == (folder / "nodes/0/mapping/nodes.csv").read_text()


def test_damaged_names_are_found(folder, tmp_path):
    path = tmp_path / "graph"
    shutil.copytree(folder, path)
    names = path / "nodes/1/mapping/nodes.csv"
    content = names.read_text()
    names.write_text(content[:-2] + ("1" if content[-2] == "2" else "2") + "\n")
    with pytest.raises(ValueError, match=r"nodes/1/mapping/nodes\.csv"):
        verify(path)
    # also without `verify`: predictions would have wrong ids
    with pytest.raises(ValueError, match=r"nodes\.csv is damaged: its checksum is not"):
        gcnzc.load(path).graph.nodes("item").keys  # noqa: B018
    # a copy would have a valid checksum of the wrong ids
    with pytest.raises(ValueError, match=r"nodes\.csv is damaged"):
        gcnzc.prepare(gcnzc.load(path).graph, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    lines = content.splitlines()
    # of another graph, with a checksum of its own
    for changed, message in ((lines[:-1], "39 ids for 40 nodes"), (lines[::-1], "is damaged: '")):
        names.write_text("\n".join(changed) + "\n")
        meta = json.loads((path / "meta.json").read_text())
        entry = {"bytes": names.stat().st_size, "crc32": checksum(names)}
        meta["files"]["nodes/1/mapping/nodes.csv"] = entry
        meta["crc32"] = checksum_of(meta)
        (path / "meta.json").write_text(json.dumps(meta))
        with pytest.raises(ValueError, match=message):
            gcnzc.load(path).graph.nodes("item").keys  # noqa: B018


def test_predictions_have_keys_and_names(run, folder):
    found = predict(run)
    assert found.nodes.tolist() == EMAILS.tolist()
    assert found.columns == LEVELS
    assert found.probabilities.shape == (USERS, len(LEVELS))
    assert found.classes.tolist() == [LEVELS[i] for i in found.probabilities.argmax(1)]
    few = predict(run, nodes=EMAILS[[5, 2, 5]])
    assert few.nodes.tolist() == EMAILS[[5, 2, 5]].tolist()
    np.testing.assert_allclose(few.probabilities, found.probabilities[[5, 2, 5]], atol=1e-6)
    with pytest.raises(ValueError, match=r"no node has the id '5'"):
        predict(run, nodes=[5])
    test = predict(run, nodes="test")
    assert test.nodes.tolist() == EMAILS[4::5].tolist()
    labels = np.array(LEVELS)[np.arange(USERS) % 3]
    accuracy = (test.classes == labels[4::5]).mean()
    assert accuracy == pytest.approx(evaluate(EvaluateConfig(run=run))["test_accuracy"])
    assert embed_nodes(run).nodes.tolist() == EMAILS.tolist()
    assert embed_nodes(run, node_type="order").nodes.tolist() == list(range(400))


def test_a_graph_with_other_names_of_classes_is_rejected(run, tmp_path):
    frame = tables()["user"].frame
    frame = frame.assign(level=frame["level"].cat.rename_categories({"gold": "first"}))
    own = tables(user=Table(frame, "email", features=["x"]))
    gcnzc.prepare(from_tables(own, labels={"user": "level"}), tmp_path / "other")
    with pytest.raises(ValueError, match=r"class 0 is 'first', but the model was .* 'gold'"):
        predict(run, tmp_path / "other")
