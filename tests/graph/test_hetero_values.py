"""Labels, splits and other values of nodes and edges: what is accepted, and what is named."""

import numpy as np
import pytest
import scipy.sparse
import torch

import gcnzc
from gcnzc.graph import Graph
from gcnzc.loader import Loader

LOOP = ("user", "knows", "user")


def graph_of(nodes, edges=None):
    edges = {LOOP: [[0, 1], [1, 0]]} if edges is None else edges
    return Graph.from_arrays({"user": nodes}, edges)


def test_classes_and_numbers_are_kept():
    for labels, dtype in (
        ([0, -1, 65535], torch.int64),
        (np.array([0, 3, 2], np.uint64), torch.int64),
        (np.array([0, 3, 2], np.uint8), torch.int64),
        ([True, False, True], torch.int64),
        ([0.5, -3.0, 1e9], torch.float32),
        (torch.tensor([0.5, 1.0, 2.0], dtype=torch.bfloat16), torch.float32),
        ([[0, -1], [1, 0], [1, 1]], torch.int64),
    ):
        found = graph_of({"labels": labels}).nodes("user").labels
        assert found.dtype == dtype
        expected = labels.float() if isinstance(labels, torch.Tensor) else torch.tensor(labels)
        assert torch.equal(found, expected.to(dtype))
    # a larger graph may have more classes
    many = graph_of({"labels": np.arange(70_000)})
    assert int(many.nodes("user").labels.max()) == 69_999


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"train": [0, 1], "test": [1, 2]}, "node 1 is in the train split and in the test split"),
        (
            {"train_mask": [True, True, False, False], "val_mask": [False, True, False, False]},
            "node 1 is in the train split and in the valid split",
        ),
        ({"train": [0, 3, 3]}, "the train split contains node 3 twice"),
        ({"train": [1, 0, 0, 1]}, "may be ids or a mask"),
        ({"train": [0.0, 1.0]}, "type float64"),
        (["train", "test", "other", None], "has the word 'other'"),
        (["train", "test"], r"has shape \(2,\)"),
    ],
)
def test_wrong_splits_are_rejected_with_a_message_that_names_them(split, message):
    with pytest.raises(ValueError, match="^split of node type 'user'(?s:.*)" + message):
        graph_of({"num_nodes": 4, "split": split})


def test_a_split_may_be_words():
    words = ["train", "val", None, "test", "Train", "", float("nan")]
    split = graph_of({"num_nodes": 7, "split": words}).nodes("user").split
    assert {part: ids.tolist() for part, ids in split.items()} == {
        "train": [0, 4],
        "valid": [1],
        "test": [3],
    }


SPARSE = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]])


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("kind", ["csr_matrix", "csc_matrix", "coo_array", "dok_matrix", "torch"])
def test_features_may_be_sparse_matrices(kind, tmp_path):
    is_torch = kind == "torch"
    matrix = SPARSE.to_sparse() if is_torch else getattr(scipy.sparse, kind)(SPARSE.numpy())
    graph = graph_of({"features": matrix})
    gcnzc.prepare(graph, tmp_path / "g")
    for own in (graph, gcnzc.load(tmp_path / "g").graph):
        assert torch.equal(own.nodes("user").features.to_dense(), SPARSE)
        loader = Loader(own, None, ("user", [1]), [-1], 1)
        batch = next(iter(loader))
        assert torch.equal(batch.x["user"], SPARSE[batch.nodes["user"]])
