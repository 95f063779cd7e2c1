"""Embeddings of node types without features: training, resuming, workers and evaluation."""

import errno
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from processes import results
from training import Interrupting, assert_same_run, train_as_worker
from typed_papers import AUTHORS, SIZES, build, parameters

import gcnzc
from gcnzc.features.embedding import EmbeddingTable
from gcnzc.graph import Graph
from gcnzc.train.config import EvaluateConfig, TrainConfig
from gcnzc.train.errors import Interrupted
from gcnzc.train.evaluation import evaluate
from gcnzc.train.hetero import embeddings as embeddings_module
from gcnzc.train.mixed_seed import mixed_seed
from gcnzc.train.progress import NullReporter
from gcnzc.train.run import train


def embeddings(run):
    last = max((run / "checkpoints").glob("*-rows.npz"))
    return {name: value.copy() for name, value in np.load(last).items() if "/" in name}


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """The graph without the features of authors."""
    path, graph = tmp_path_factory.mktemp("embedded") / "graph", build()
    author = replace(graph.nodes("author"), features=None)
    edges = {each: graph.edges(each) for each in graph.edge_types}
    gcnzc.prepare(Graph.from_stores({"paper": graph.nodes("paper"), "author": author}, edges), path)
    return path


@pytest.fixture(scope="module")
def config(embedded):
    return TrainConfig(data=embedded, model="rgcn", **SIZES, embeddings="adagrad:dim=8")


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_embeddings_are_trained_resumed_and_evaluated(optimizer, config, tmp_path):
    config = config.replace(embeddings=f"{optimizer}:dim=8,lr=0.1", epochs=4)
    whole = train(config, tmp_path / "whole")
    assert whole["valid_accuracy"] > 0.6
    rows = embeddings(tmp_path / "whole")
    first = EmbeddingTable(AUTHORS, 8, scale=8**-0.5, seed=mixed_seed(0, 1)).rows.numpy()
    assert rows["author/rows"].shape == (AUTHORS, 8)
    assert (rows["author/rows"] != first).any(axis=1).mean() > 0.9
    again = evaluate(EvaluateConfig(run=tmp_path / "whole"))
    assert again["test_accuracy"] == whole["test_accuracy"]
    with pytest.raises(Interrupted):
        train(config, tmp_path / "stopped", callbacks=[Interrupting(10)])
    train(config.replace(resume=tmp_path / "stopped"), tmp_path / "stopped")
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    for name, value in embeddings(tmp_path / "stopped").items():
        assert np.array_equal(value, rows[name]), name
    # of the last checkpoint, and of the best model
    assert len(list((tmp_path / "stopped").rglob("*.npz"))) == 2


def test_two_workers_compute_the_result_of_one(config, tmp_path):
    # without dropout and sampling, the gradient does not depend on the division into minibatches
    config = config.replace(dropout=0.0, fanouts=(-1, -1), optimizer="sgd", lr=0.05, epochs=2)
    one = train(config.replace(batch_size=100), tmp_path / "one")
    both = results(2, tmp_path, train_as_worker, config.replace(batch_size=50), tmp_path / "two")
    assert both[0]["workers"] == 2
    assert both[0]["test_accuracy"] == both[1]["test_accuracy"]
    assert both[0]["test_accuracy"] == pytest.approx(one["test_accuracy"], abs=0.02)
    for name, value in parameters(tmp_path / "one").items():
        assert torch.allclose(parameters(tmp_path / "two")[name], value, atol=1e-3), name
    found = embeddings(tmp_path / "two")
    for name, value in embeddings(tmp_path / "one").items():
        np.testing.assert_allclose(found[name], value, atol=1e-3, err_msg=name)


def test_a_disk_that_is_full_for_the_rows_of_a_better_model_keeps_the_files_of_the_last_one(
    config, tmp_path, monkeypatch
):
    write_arrays, epochs = embeddings_module.write_arrays, []

    def write(path, arrays, meta):
        epochs.append(meta["epoch"])
        if len(epochs) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_arrays(path, arrays, meta)

    monkeypatch.setattr(embeddings_module, "write_arrays", write)
    result = train(config, tmp_path / "run")
    assert len(epochs) > 1
    assert "best-*.npz" in result["unsaved"]
    assert evaluate(EvaluateConfig(run=tmp_path / "run"))["best_epoch"] == epochs[0] + 1


def test_the_best_rows_of_all_kept_checkpoints_remain(config, tmp_path):
    config = config.replace(epochs=3, keep=100, checkpoint_every_s=0)
    train(config, tmp_path / "run")
    best = {*(tmp_path / "run").glob("best-*.npz")}
    assert len(best) > 1
    train(config.replace(resume=tmp_path / "run"), tmp_path / "run")
    assert {*(tmp_path / "run").glob("best-*.npz")} == best


def test_a_lost_file_of_embeddings_is_named(config, embedded, tmp_path):
    config = config.replace(epochs=1)
    train(config, tmp_path / "run")
    nodes = {"author": {"num_nodes": AUTHORS + 1}}
    graph = gcnzc.load(embedded).graph
    paper = graph.nodes("paper")
    nodes["paper"] = {"features": paper.features, "labels": paper.labels, "split": paper.split}
    edges = {each: {"edge_index": graph.edges(each).edge_index()} for each in graph.edge_types}
    more = Graph.from_arrays({name: nodes[name] for name in graph.node_types}, edges)
    gcnzc.prepare(more, tmp_path / "more")
    with pytest.raises(ValueError, match=r"201 nodes of type 'author', but the model has .* 200"):
        evaluate(EvaluateConfig(run=tmp_path / "run", data=tmp_path / "more"))
    (best,) = (tmp_path / "run").glob("best-*.npz")
    whole = best.read_bytes()
    best.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=f"{best.name}(?s:.*)hint: .*otherwise start the run"):
        evaluate(EvaluateConfig(run=tmp_path / "run"))
    content = bytearray(whole)
    content[len(content) // 2] ^= 1
    best.write_bytes(content)
    shutil.copytree(tmp_path / "run", tmp_path / "resumed")
    said, reporter = [], NullReporter()
    reporter.say = said.append
    train(config.replace(epochs=2, resume=tmp_path / "resumed"), tmp_path / "resumed", reporter)
    assert any(text.startswith("warning: the best model is lost: ") for text in said)
    (state,) = (tmp_path / "run" / "checkpoints").glob("*-rows.npz")
    content = state.read_bytes()
    state.write_bytes(content[:-20])
    with pytest.raises(
        ValueError, match=r"-rows.npz is damaged(?s:.*)or start another run with --out"
    ):
        train(config.replace(epochs=2, resume=tmp_path / "run"), tmp_path / "run")
    for path in (tmp_path / "run").rglob("*.npz"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match="embeddings of the best model"):
        evaluate(EvaluateConfig(run=tmp_path / "run"))
    with pytest.raises(FileNotFoundError, match="embeddings of the checkpoint"):
        train(config.replace(epochs=2, resume=tmp_path / "run"), tmp_path / "run")
    with pytest.raises(ValueError, match="--precision fp16: node type author without features"):
        train(config.replace(precision="fp16"), tmp_path / "other")
