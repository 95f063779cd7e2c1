"""Runs on heterogeneous graphs: node classification, resuming, workers and evaluation."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from typed_papers import SIZES, build

import gcnzc
from gcnzc.graph import Graph
from gcnzc.train.config import EvaluateConfig, TrainConfig
from gcnzc.train.evaluation import evaluate
from gcnzc.train.prediction import predict
from gcnzc.train.progress import NullReporter
from gcnzc.train.run import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hetero") / "graph"
    gcnzc.prepare(build(), path)
    return path


@pytest.fixture(scope="module")
def config(folder):
    return TrainConfig(data=folder, model="rgcn", **SIZES)


def test_damaged_files_of_a_run_and_its_graph_name_what_helps(config, folder, tmp_path):
    run, copy = tmp_path / "run", tmp_path / "graph"
    shutil.copytree(folder, copy)
    train(config.replace(epochs=1, data=copy), run)
    found = evaluate(EvaluateConfig(run=run))
    schema, options, meta = run / "schema.json", run / "config.json", copy / "meta.json"
    written = schema.read_text()
    schema.write_text(written[:-20])
    for function in (lambda: evaluate(EvaluateConfig(run=run)), lambda: predict(run)):
        with pytest.raises(ValueError, match=r"schema\.json is damaged(?s:.*)hint: restore it"):
            function()
    schema.unlink()
    for function in (lambda: evaluate(EvaluateConfig(run=run)), lambda: predict(run)):
        with pytest.raises(FileNotFoundError, match=r"has no schema\.json(?s:.*) train again"):
            function()
    schema.write_text(written)
    content = options.read_text()
    options.write_text(content[:-20])
    with pytest.raises(ValueError, match=r"config\.json is not JSON") as error:
        predict(run)
    # the hint has an expression with the options
    expression = re.search(r"torch\.load\(.*\)\['options'\]", str(error.value))[0]
    options.write_text(json.dumps(eval(expression, {"torch": torch})))
    assert evaluate(EvaluateConfig(run=run))["test_accuracy"] == found["test_accuracy"]
    meta.write_text(meta.read_text()[:-20])
    for function in (lambda: evaluate(EvaluateConfig(run=run)), lambda: predict(run)):
        with pytest.raises(ValueError, match=r"meta\.json is not valid JSON"):
            function()
    meta.write_text(json.dumps({"format": "gcnzc-graph", "version": 4}))
    with pytest.raises(ValueError, match=r"format version 4(?s:.*)hint: prepare the folder again"):
        predict(run)
    meta.unlink()
    with pytest.raises(FileNotFoundError, match=r"graph has folders of .*, but no meta\.json"):
        predict(run)


@pytest.mark.parametrize("model", ["rgcn", "hetero-sage"])
def test_a_model_learns_and_its_evaluation_agrees(model, config, tmp_path):
    line = train(config.replace(model=model, epochs=6), tmp_path / "run")
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
    np.testing.assert_array_equal(predict(tmp_path / "run").classes, logits.argmax(1))


def test_a_graph_with_other_classes_is_rejected(config, tmp_path):
    train(config.replace(epochs=1), tmp_path / "run")
    graph = build()
    nodes = {name: graph.nodes(name) for name in graph.node_types}
    nodes["paper"] = replace(nodes["paper"], labels=nodes["paper"].labels + 2)
    gcnzc.prepare(graph.with_nodes(nodes), tmp_path / "five")
    with pytest.raises(
        ValueError, match=r"five has 5 classes or columns of labels, .* with 3"
    ) as error:
        evaluate(EvaluateConfig(run=tmp_path / "run", data=tmp_path / "five"))
    assert "config.json" not in str(error.value)
    # the labels are not read
    assert len(predict(tmp_path / "run", tmp_path / "five").nodes) > 0


def test_a_run_does_not_resume_on_another_graph(config, tmp_path):
    train(config.replace(epochs=1), tmp_path / "run")
    gcnzc.prepare(build(seed=1), tmp_path / "other")
    with pytest.raises(ValueError, match="is not the graph that the run"):
        train(config.replace(data=tmp_path / "other", resume=tmp_path / "run"), tmp_path / "run")


def test_temporal_neighbours_and_sampled_evaluation(config, tmp_path):
    for temporal in ("uniform", "last"):
        own = config.replace(temporal=temporal, evaluate="sampled", epochs=2)
        line = train(own, tmp_path / temporal)
        assert line["evaluation"] == "sampled"
        said = []
        reporter = NullReporter()
        reporter.say = said.append
        again = evaluate(EvaluateConfig(run=tmp_path / temporal, evaluate="sampled"), reporter)
        assert again["test_accuracy"] == line["test_accuracy"]
        assert again["evaluation"] == "sampled"
        assert not said
        assert evaluate(EvaluateConfig(run=tmp_path / temporal), reporter)["evaluation"] == "needed"
        assert "with sampled neighbours; --evaluate sampled repeats that" in said[0]


def test_graphs_that_do_not_fit_are_rejected(config, folder, tmp_path):
    def rejected(message, **options):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            train(config.replace(**options), tmp_path / "run")

    loop = {("a", "r", "a"): {"edge_index": np.zeros((2, 1), int)}}
    rejected(r"--model sage is for graphs of one node type(?s:.*)hint: use --model", model="sage")
    rejected("no folder", data=tmp_path / "absent")
    rejected(
        "has no such node type\n\nhint: the node types are paper, author", task="node:target=venue"
    )
    rejected("have no labels\n\nhint: labels are of paper", task="node:target=author")
    gcnzc.prepare(Graph.from_arrays({"a": 3}, loop), tmp_path / "plain")
    rejected("no node type of (?s:.*) has labels", data=tmp_path / "plain")
    (tmp_path / "empty").mkdir()
    rejected("prepared graph of this kind", data=tmp_path / "empty")
    meta = tmp_path / "plain" / "meta.json"
    meta.write_text(meta.read_text()[:-20])
    rejected(r"meta\.json is not valid JSON", data=tmp_path / "plain")
    nodes = {"a": {"labels": np.zeros(3, int), "split": {"train": [0]}, "features": np.eye(3)}}
    gcnzc.prepare(Graph.from_arrays(nodes, loop), tmp_path / "unsplit")
    rejected("in the valid split of (?s:.*) has a label", data=tmp_path / "unsplit")
    nodes["a"]["split"] = {"train": [0], "valid": [1], "test": [2]}
    gcnzc.prepare(Graph.from_arrays(nodes, loop), tmp_path / "untimed")
    rejected(
        "has no times(?s:.*)hint: give these nodes", data=tmp_path / "untimed", temporal="last"
    )
