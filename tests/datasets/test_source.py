import numpy as np
import pytest

from gcnzc.datasets import source

NAN = np.nan


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        (np.array([0, 2, 1]), [0, 2, 1]),
        (np.array([[0], [2], [1]], np.int8), [0, 2, 1]),
        (np.array([[0], [NAN], [1]], np.float32), [0, -1, 1]),
        (np.array([True, False, True]), [1, 0, 1]),
        (np.array([[0, 1], [1, 1], [1, 0]]), [[0, 1], [1, 1], [1, 0]]),
        (np.array([[0.0, 1], [1, 1], [1, 0]]), [[0, 1], [1, 1], [1, 0]]),
    ],
)
def test_labels_must_be_classes(raw, clean):
    found = source.clean_labels(raw, 3, 3, "here")
    assert found.dtype == np.int64
    assert found.tolist() == clean


def test_missing_labels_of_several_tasks_are_kept():
    raw = np.array([[0, NAN], [NAN, NAN], [1, 1]])
    found = source.clean_labels(raw, 3, 2, "here")
    assert found.dtype == np.float32
    assert np.array_equal(found, raw, equal_nan=True)
    assert source.has_label(found).tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("raw", "num_classes", "words"),
    [
        ([0, 3, 1], 3, r"node 1 has the label 3, which is not a class \(0 to 2\)"),
        ([0, 2**40, 1], None, "node 1 has the label 1099511627776, which is not a class"),
        ([0, 1, 1], 2**40, "1,099,511,627,776 classes for 3 nodes"),
        ([0, 0.5, 1], None, "node 1 has the label 0.5"),
        ([[0, 0], [0, 2], [0, 0]], 2, "node 1 has the label 2"),
        ([0, 1], 2, r"the labels have the shape \(2,\) for 3 nodes"),
    ],
)
def test_labels_that_are_no_classes_are_rejected(raw, num_classes, words):
    with pytest.raises(ValueError, match=f"here.*{words}(.|\n)*\n\nhint: "):
        source.clean_labels(np.array(raw), 3, num_classes, "here")


def test_classes_are_counted():
    for labels in ([-1, -1], [[0, 1], [1, 1]], [[NAN, NAN]]):
        assert source.count_classes(np.array(labels)) == 2
    assert source.count_classes(np.array([0, 4, -1])) == 5
    assert source.count_classes(np.array([[0, NAN], [3, NAN]])) == 4


LABELS = np.array([0, 1, -1, 1, 0, 1])


def parts(train=(0,), valid=(1,), test=(3,)):
    return {"train": np.array(train), "valid": np.array(valid), "test": np.array(test)}


def test_nodes_without_a_label_are_removed_from_the_split():
    clean, lost = source.clean_split(parts((4, 0, 2), [[1]], (3,)), LABELS, "here")
    assert clean["train"].tolist() == [4, 0]
    assert clean["valid"].tolist() == [1]
    assert clean["train"].dtype == np.int64
    assert lost == {"train": 1, "valid": 0, "test": 0}


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (parts(test=np.empty(0, int)), r"the test split is empty\n\nhint: "),
        (parts(valid=(2,)), "the valid split is empty: its 1 nodes have no label"),
        (parts(train=(0, 3)), "node 3 is in the train split and in the test split .1 overlapping"),
        (parts(train=(0, 4, 0)), "the train split contains node 0 twice"),
        (parts(train=(0, 6)), "the train split contains node 6, but nodes are 0 to 5"),
        (parts(valid=np.eye(6)[1] == 1), "the valid split is a mask of .*\n\nhint: .*flatnonzero"),
        (parts(train=(0, 0.5)), "the train split has ids of type float64"),
    ],
)
def test_invalid_splits_are_rejected(split, words):
    with pytest.raises(ValueError, match=f"here: {words}"):
        source.clean_split(split, LABELS, "here")


def test_edges_to_unknown_nodes_are_rejected():
    source.check_ends(np.array([0, 9]), 10, "here")
    source.check_ends(np.array([], int), 0, "here")
    with pytest.raises(ValueError, match=r"here: edge 101 has the node 10, but nodes are 0 to 9"):
        source.check_ends(np.array([0, 10, -1]), 10, "here", first=100)


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_edges_that_all_point_one_way_are_stored_once(monkeypatch, chunk):
    monkeypatch.setattr(source, "CHUNK_BYTES", chunk)
    one_way = ([0, 1, 2], [1, 2, 2]), ([5, 5, 2], [1, 2, 0])
    for ends in (*one_way, ([0, 1, 2], [1, 2, 0]), ([], [])):
        found = source.guess_edge_defaults(tuple(map(np.array, ends)))
        assert (found.bidirected, found.duplicates) == (ends in one_way, "keep")
