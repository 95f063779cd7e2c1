"""Runs on heterogeneous graphs: node classification, resuming, workers and evaluation."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from gcnzc.graph.hetero import HeteroGraph
from gcnzc.train.config import EvaluateConfig, TrainConfig
from gcnzc.train.evaluation import evaluate
from gcnzc.train.prediction import predict
from gcnzc.train.run import train

PAPERS, AUTHORS, CLASSES = 600, 200, 3
WRITES, WRITTEN = ("author", "writes", "paper"), ("paper", "written_by", "author")
CITES = ("paper", "cites", "paper")


def build(seed=0):
    """Papers whose class is that of most of their authors; features of papers are noisy."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, PAPERS)
    topic = np.arange(AUTHORS) % CLASSES
    papers = np.repeat(np.arange(PAPERS), 3)
    # two of three authors have the topic of the paper
    authors = random.integers(0, AUTHORS // CLASSES, 3 * PAPERS) * CLASSES
    authors += np.where(np.arange(3 * PAPERS) % 3, labels[papers], random.integers(0, CLASSES))
    authors %= AUTHORS
    x = np.eye(CLASSES, dtype=np.float32)
    order = random.permutation(PAPERS)
    cites = random.integers(0, PAPERS, (2, 2 * PAPERS))
    return HeteroGraph.from_arrays(
        {
            "paper": {
                "features": x[labels] + 2 * random.normal(size=(PAPERS, CLASSES)),
                "labels": labels,
                "split": {"train": order[:400], "valid": order[400:500], "test": order[500:]},
                "time": np.arange(PAPERS) // 10,
            },
            "author": {"features": x[topic] + random.normal(size=(AUTHORS, CLASSES))},
        },
        {
            WRITES: {"edge_index": np.stack([authors, papers])},
            WRITTEN: {"edge_index": np.stack([papers, authors])},
            CITES: {"edge_index": cites},
        },
        name="papers",
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hetero") / "graph"
    build().save(path)
    return path


@pytest.fixture(scope="module")
def config(folder):
    sizes = {"fanouts": (4, 4), "layers": 2, "hidden": 16, "batch_size": 64}
    return TrainConfig(data=folder, model="rgcn", **sizes, epochs=3, lr=0.01, dropout=0.2)


def parameters(run):
    return torch.load(run / "checkpoint.pt", weights_only=True)["model"]


def assert_same_run(one, other):
    assert all(torch.equal(parameters(other)[name], own) for name, own in parameters(one).items())
    lines = [
        [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
        for run in (one, other)
    ]
    for mine, theirs in zip(*lines, strict=True):
        for name in ("loss", "valid_accuracy", "seeds_checksum", "payload_bytes"):
            assert mine[name] == theirs[name]


@pytest.mark.parametrize("model", ["rgcn", "hetero-sage"])
def test_a_model_learns_and_its_evaluation_agrees(model, config, tmp_path):
    line = train(replace(config, model=model, epochs=6), tmp_path / "run")
    # features of the paper alone suffice for 0.5
    assert line["valid_accuracy"] > 0.6
    assert line["data"] == "papers"
    assert line["evaluation"] == "needed"
    assert line["payload_bytes"] > 0
    predictions = tmp_path / "logits.npy"
    for options in ({}, {"predictions": predictions}):
        again = evaluate(EvaluateConfig(run=tmp_path / "run", **options))
        assert again["test_accuracy"] == line["test_accuracy"]
    logits, graph = np.load(predictions), build()
    test = graph.nodes("paper").split["test"]
    right = logits.argmax(1)[test] == graph.nodes("paper").labels[test].numpy()
    assert right.mean() == pytest.approx(line["test_accuracy"])
    with pytest.raises(ValueError, match="do not support"):
        predict(tmp_path / "run")
