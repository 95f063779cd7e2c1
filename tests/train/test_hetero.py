"""Runs on heterogeneous graphs: node classification, resuming, workers and evaluation."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from processes import results
from training import train_as_worker

from gcnzc.features.embedding import EmbeddingTable
from gcnzc.graph.hetero import HeteroGraph
from gcnzc.optim import Averaged
from gcnzc.train.config import EvaluateConfig, TrainConfig
from gcnzc.train.evaluation import evaluate
from gcnzc.train.mixed_seed import mixed_seed
from gcnzc.train.prediction import predict
from gcnzc.train.run import train
from gcnzc.train.trainer import Interrupted

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


def test_results_do_not_depend_on_threads(config, tmp_path):
    train(config, tmp_path / "one")
    train(replace(config, threads=4), tmp_path / "four")
    assert_same_run(tmp_path / "one", tmp_path / "four")


def stop_after(steps, monkeypatch):
    """Let a run in this process receive a stop request in a step."""
    step, taken = Averaged.step, []

    def watched(self, closure=None):
        taken.append(self)
        self.signals[0] = len(taken) == steps
        return step(self, closure)

    monkeypatch.setattr(Averaged, "step", watched)


# an epoch has 7 steps
@pytest.mark.parametrize("steps", [3, 7, 10])
def test_a_stopped_run_resumes_bit_for_bit(steps, config, tmp_path, monkeypatch):
    whole = train(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(steps, patch)
        with pytest.raises(Interrupted):
            train(config, tmp_path / "stopped")
    line = train(replace(config, resume=tmp_path / "stopped"), tmp_path / "stopped")
    assert line["test_accuracy"] == whole["test_accuracy"]
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_a_run_does_not_resume_on_another_graph(config, tmp_path):
    train(replace(config, epochs=1), tmp_path / "run")
    build(seed=1).save(tmp_path / "other")
    with pytest.raises(ValueError, match="is not the graph that the run"):
        train(replace(config, data=tmp_path / "other", resume=tmp_path / "run"), tmp_path / "run")


def embeddings(run):
    last = max((run / "embeddings").glob("state-*.npz"))
    return {name: value.copy() for name, value in np.load(last).items() if "/" in name}


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """The graph without the features of authors."""
    path, graph = tmp_path_factory.mktemp("embedded") / "graph", build()
    author = replace(graph.nodes("author"), features=None)
    edges = {each: graph.edges(each) for each in graph.edge_types}
    HeteroGraph({"paper": graph.nodes("paper"), "author": author}, edges).save(path)
    return path


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_embeddings_are_trained_resumed_and_evaluated(
    optimizer, config, embedded, tmp_path, monkeypatch
):
    config = replace(config, data=embedded, embedding_dim=8, embedding_optimizer=optimizer)
    config = replace(config, embedding_lr=0.1, epochs=4)
    whole = train(config, tmp_path / "whole")
    assert whole["valid_accuracy"] > 0.6
    rows = embeddings(tmp_path / "whole")
    first = EmbeddingTable(AUTHORS, 8, scale=8**-0.5, seed=mixed_seed(0, 1)).rows.numpy()
    assert rows["author/rows"].shape == (AUTHORS, 8)
    assert (rows["author/rows"] != first).any(axis=1).mean() > 0.9
    again = evaluate(EvaluateConfig(run=tmp_path / "whole"))
    assert again["test_accuracy"] == whole["test_accuracy"]
    with monkeypatch.context() as patch:
        stop_after(10, patch)
        with pytest.raises(Interrupted):
            train(config, tmp_path / "stopped")
    train(replace(config, resume=tmp_path / "stopped"), tmp_path / "stopped")
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    for name, value in embeddings(tmp_path / "stopped").items():
        assert np.array_equal(value, rows[name]), name
    # the last two checkpoints, and the best model
    assert len(list((tmp_path / "stopped" / "embeddings").iterdir())) <= 4


def test_two_workers_compute_the_result_of_one(config, embedded, tmp_path):
    # without dropout and sampling, the gradient does not depend on the division into minibatches
    config = replace(config, data=embedded, embedding_dim=8, dropout=0.0, fanouts=(-1, -1))
    config = replace(config, optimizer="sgd", lr=0.05, epochs=2)
    one = train(replace(config, batch_size=100), tmp_path / "one")
    both = results(2, tmp_path, train_as_worker, replace(config, batch_size=50), tmp_path / "two")
    assert both[0]["workers"] == 2
    assert both[0]["test_accuracy"] == both[1]["test_accuracy"]
    assert both[0]["test_accuracy"] == pytest.approx(one["test_accuracy"], abs=0.02)
    for name, value in parameters(tmp_path / "one").items():
        assert torch.allclose(parameters(tmp_path / "two")[name], value, atol=1e-3), name
    found = embeddings(tmp_path / "two")
    for name, value in embeddings(tmp_path / "one").items():
        np.testing.assert_allclose(found[name], value, atol=1e-3, err_msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "local-sgd", "local_steps": "2"},
        {"strategy": "selsync"},
        {"optimizer": "onebit-adam", "warmup": "2"},
        {"accumulate": 2, "precision": "bf16"},
        {"strategy": "dropcompute", "compute_threshold": "1000"},
    ],
)
def test_optimizers_and_strategies_train_the_other_parameters(options, config, embedded, tmp_path):
    config = replace(config, data=embedded, embedding_dim=8, embedding_lr=0.1, epochs=4, **options)
    if config.strategy == "dropcompute":
        with pytest.raises(ValueError, match="--strategy dropcompute: node type author"):
            train(config, tmp_path / "run")
        return
    assert train(config, tmp_path / "run")["valid_accuracy"] > 0.5


def test_a_lost_file_of_embeddings_is_named(config, embedded, tmp_path):
    config = replace(config, data=embedded, embedding_dim=4, epochs=1)
    train(config, tmp_path / "run")
    nodes = {"author": {"num_nodes": AUTHORS + 1}}
    graph = HeteroGraph.load(embedded)
    paper = graph.nodes("paper")
    nodes["paper"] = {"features": paper.features, "labels": paper.labels, "split": paper.split}
    edges = {each: {"edge_index": graph.edges(each).edge_index()} for each in graph.edge_types}
    HeteroGraph.from_arrays({name: nodes[name] for name in graph.node_types}, edges).save(
        tmp_path / "more"
    )
    with pytest.raises(ValueError, match=r"201 nodes of type 'author', but the model has .* 200"):
        evaluate(EvaluateConfig(run=tmp_path / "run", data=tmp_path / "more"))
    for path in (tmp_path / "run" / "embeddings").iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match="embeddings of the best model"):
        evaluate(EvaluateConfig(run=tmp_path / "run"))
    with pytest.raises(FileNotFoundError, match="embeddings of the checkpoint"):
        train(replace(config, epochs=2, resume=tmp_path / "run"), tmp_path / "run")
    with pytest.raises(ValueError, match="--precision fp16: node type author without features"):
        train(replace(config, precision="fp16"), tmp_path / "other")


def test_temporal_neighbours_and_sampled_evaluation(config, tmp_path):
    for temporal in ("uniform", "last"):
        own = replace(config, temporal=temporal, evaluate="sampled", epochs=2)
        line = train(own, tmp_path / temporal)
        assert line["evaluation"] == "sampled"
        again = evaluate(EvaluateConfig(run=tmp_path / temporal, evaluate="sampled"))
        assert again["test_accuracy"] == line["test_accuracy"]


def test_early_stopping_and_averaged_weights(config, tmp_path):
    line = train(replace(config, epochs=30, lr=0.1, patience=2, average="ema"), tmp_path / "run")
    assert line["epochs"] < 30
    assert line["best_epoch"] == line["epochs"] - 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": "all"}, "--batch-size all with --model rgcn"),
        ({"sampler": "dgl"}, "--sampler dgl with --model rgcn"),
        ({"seed_order": "local"}, "--seed-order local with --model rgcn"),
        ({"features": "device"}, "--features device with --model rgcn"),
        ({"label_inputs": 0.5}, r"--label-inputs 0\.5 with --model rgcn"),
        ({"evaluate": "exact"}, "use --evaluate needed or sampled"),
        ({"pre_norm": True, "norm": "batch"}, "--pre-norm with --model rgcn"),
    ],
)
def test_options_of_other_graphs_are_rejected_by_name(config, options, message):
    with pytest.raises(ValueError, match=message):
        replace(config, **options)


def test_graphs_that_do_not_fit_are_rejected(config, folder, tmp_path):
    def rejected(message, **options):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            train(replace(config, **options), tmp_path / "run")

    loop = {("a", "r", "a"): {"edge_index": np.zeros((2, 1), int)}}
    rejected(r"--model sage is for graphs of one node type(?s:.*)hint: use --model", model="sage")
    rejected("no folder", data=tmp_path / "absent")
    rejected("has no such node type\n\nhint: the node types are paper, author", target="venue")
    rejected("have no labels\n\nhint: labels are of paper", target="author")
    HeteroGraph.from_arrays({"a": 3}, loop).save(tmp_path / "plain")
    rejected("no node type of (?s:.*) has labels", data=tmp_path / "plain")
    (tmp_path / "empty").mkdir()
    rejected("prepared graph of this kind", data=tmp_path / "empty")
    nodes = {"a": {"labels": np.zeros(3, int), "split": {"train": [0]}, "features": np.eye(3)}}
    HeteroGraph.from_arrays(nodes, loop).save(tmp_path / "unsplit")
    rejected("in the valid split of (?s:.*) has a label", data=tmp_path / "unsplit")
    nodes["a"]["split"] = {"train": [0], "valid": [1], "test": [2]}
    HeteroGraph.from_arrays(nodes, loop).save(tmp_path / "untimed")
    rejected("has no times", data=tmp_path / "untimed", temporal="last")
