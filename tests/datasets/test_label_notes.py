"""Labels that are missing, and gaps in the class numbers."""

import numpy as np
from training import Listener

import gcnzc
from gcnzc.datasets.source import describe_missing
from gcnzc.graph import Graph
from gcnzc.train.config import TrainConfig
from gcnzc.train.run import train


def test_missing_labels_are_counted():
    assert describe_missing(np.array([0, -1, 1, -1])) == "2 of 4 labels are missing"
    assert describe_missing(np.array([[0, np.nan], [1, 1]])) == "1 of 4 labels are missing"
    assert describe_missing(np.array([0, 1])) == ""


LABELS = np.array([0, 1, 255, 1] * 6)
EDGES = np.stack([np.arange(24), np.roll(np.arange(24), 1)])
SPLITS = {"train": np.arange(12), "valid": np.arange(12, 18), "test": np.arange(18, 24)}
X = np.ones((24, 2), np.float32)


def test_a_run_reports_missing_labels_and_distant_classes_of_a_folder(tmp_path, caplog):
    labels = LABELS.copy()
    labels[:3] = -1
    gcnzc.prepare(dest=tmp_path / "data", edges=EDGES, features=X, labels=labels, splits=SPLITS)
    assert "data: the labels have 3 different classes, and none from 2 to 254" in caplog.text
    listener = Listener()
    config = TrainConfig(data=tmp_path / "data", fanouts=(2,), epochs=1, hidden=4)
    train(config, tmp_path / "run", listener)
    assert "3 of 24 labels are missing" in listener.said
    assert any(said.startswith("warning: the labels have 3 different") for said in listener.said)
    # a number of classes of the source is not doubted
    nodes = {"features": X, "labels": LABELS, "classes": map(str, range(256))}
    named = Graph.from_arrays({"a": nodes}, {})
    assert named.nodes("a").classes[255] == "255"
    assert "node type 'a'" not in caplog.text
