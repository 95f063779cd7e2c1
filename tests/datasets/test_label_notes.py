"""Labels that are missing, and gaps in the class numbers."""

import re

import numpy as np
import pytest

import gcnzc
from gcnzc.datasets.source import describe_gap, describe_missing
from gcnzc.graph.hetero import HeteroGraph
from gcnzc.train.config import TrainConfig
from gcnzc.train.progress import NullReporter
from gcnzc.train.run import train


class Listener(NullReporter):
    def __init__(self):
        self.said = []

    def say(self, text):
        self.said.append(text)


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        # the usual labels for none
        ([*range(10), 255], "11 different classes, and none from 10 to 254, but the model predi"),
        ([*range(40), 255], "41 different classes, and none from 40 to 254"),
        ([*range(150), 255], "151 different classes, and none from 150 to 254"),
        ([*range(19), 254, 255], "if 254 means no label"),
        ([0, 1, 999], "1,000; if 999 means no label, .* missing = \\[999\\]; otherwise number"),
        ([2013, 2014, 2020], r"3 different .* 0 to 2012, .* predicts 2,021; number the .* from 0$"),
        (range(0, 1000, 11), "91 different classes, but the model predicts 991; if 990 means"),
        # a part of the classes of a graph
        (range(0, 349, 4), ""),
        ([0, 1, 5, 9], ""),
        (range(47), ""),
        ([-1], ""),
    ],
)
def test_gaps_in_the_class_numbers(classes, expected):
    labels = np.repeat(np.array([-1, *classes]), 2)
    found = describe_gap(labels)
    assert bool(found) == bool(expected)
    assert re.search(expected, found)


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
    config = TrainConfig(data=tmp_path / "data", fanouts=(2,), layers=1, epochs=1, hidden=4)
    train(config, tmp_path / "run", listener)
    assert "3 of 24 labels are missing" in listener.said
    assert any(said.startswith("warning: the labels have 3 different") for said in listener.said)
    # a number of classes of the source is not doubted
    named = HeteroGraph.from_arrays(
        {"a": {"features": X, "labels": LABELS, "classes": map(str, range(256))}}, {}
    )
    assert named.nodes("a").classes[255] == "255"
    assert "node type 'a'" not in caplog.text
