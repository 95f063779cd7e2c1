"""Exported runs on heterogeneous graphs, executed with torch and NumPy alone."""

import json

import numpy as np
import pytest
import torch
from typed_papers import AUTHORS, PAPERS, SIZES, build
from typed_shop import ITEMS, USERS, without_features
from typed_shop import build as build_shop

import gcnzc
from gcnzc.cli import main
from gcnzc.features.embedding import EmbeddingTable
from gcnzc.train import embed_nodes, predict, train
from gcnzc.train.config import TrainConfig
from gcnzc.train.export import check_difference

# to export a layer takes seconds
ONE_LAYER = SIZES | {"fanouts": (4,), "epochs": 1}


def exported(path):
    """The program and its description."""
    extra = {"gcnzc.json": ""}
    program = torch.export.load(path, extra_files=extra).module()
    return program, json.loads(extra["gcnzc.json"])


def whole_graph(graph, about, path):
    """The arguments of a program for all nodes and all edges, from plain arrays."""
    sizes = {name: graph.nodes(name).num_nodes for name in about["node_types"]}
    embeddings = {}
    if about["embeddings"]:
        embeddings = np.load(path.with_name(about["embeddings"]["file"]))
        assert set(about["embeddings"]["node_types"]) <= set(embeddings)
    x = {}
    for name in about["arguments"]["x"]:
        rows = embeddings[name] if name in embeddings else graph.nodes(name).table.rows
        x[name] = torch.as_tensor(rows).float()
    destinations = [
        {name: torch.arange(sizes[name]) for name in names}
        for names in about["arguments"]["destinations"]
    ]
    edge_types = {"__".join(each): tuple(each) for each in about["edge_types"]}
    indptr, indices = [], []
    for names in about["arguments"]["edges"]:
        offsets, sources = {}, {}
        for name in names:
            row, col = graph.edges(edge_types[name]).edge_index().numpy()
            counts = np.bincount(col, minlength=sizes[edge_types[name][2]])
            offsets[name] = torch.from_numpy(np.concatenate([[0], counts.cumsum()]))
            sources[name] = torch.from_numpy(row[np.argsort(col, kind="stable")])
        indptr.append(offsets)
        indices.append(sources)
    return x, destinations, indptr, indices


def test_an_exported_run_predicts_what_gcnzc_predicts(tmp_path, capsys):
    graph = without_features(build(), "author")
    gcnzc.prepare(graph, tmp_path / "graph")
    config = TrainConfig(data=tmp_path / "graph", model="rgcn", **SIZES, embeddings="adagrad:dim=8")
    train(config.replace(epochs=1), tmp_path / "run")
    path = tmp_path / "model.pt2"
    assert main(["export", str(tmp_path / "run"), "--out", str(path)]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    program, about = exported(path)
    assert about.items() <= line.items()
    assert about["in_features"] == {"paper": 3, "author": 8}
    assert (about["output_types"], about["outputs"], about["num_tasks"]) == (["paper"], 3, 1)
    assert about["largest_difference"] < 1e-4
    assert about["embeddings"]["node_types"] == ["author"]
    with torch.no_grad():
        logits = program(*whole_graph(graph, about, path))
    assert logits.shape == (PAPERS, 3)
    expected = predict(tmp_path / "run").probabilities
    np.testing.assert_allclose(logits.softmax(1), expected, atol=1e-5)
    table = EmbeddingTable.load(path.with_name("model.embeddings.npz"), "author")
    assert table.rows.shape == (AUTHORS, 8)


def test_the_encoder_of_link_prediction_is_exported(tmp_path, capsys):
    graph = build_shop(has_times=False)
    gcnzc.prepare(graph, tmp_path / "graph")
    config = TrainConfig(
        data=tmp_path / "graph", model="rgat:heads=2", task="link:edge_type=buys", **ONE_LAYER
    )
    train(config, tmp_path / "run")
    path = tmp_path / "model.pt2"
    # all edges of the graph are used, as it is given
    words = [str(tmp_path / "run"), str(tmp_path / "graph"), "--out", str(path)]
    assert main(["export", *words]) == 0
    program, about = exported(path)
    assert about["embeddings"] is None
    assert not path.with_name("model.embeddings.npz").exists()
    assert about["output_types"] == ["user", "item"]
    with torch.no_grad():
        found = program(*whole_graph(graph, about, path))
    for name, count in (("user", USERS), ("item", ITEMS)):
        rows = embed_nodes(tmp_path / "run", tmp_path / "graph", node_type=name).rows
        assert found[name].shape == (count, 16)
        np.testing.assert_allclose(found[name], rows, atol=1e-5)


def test_outputs_that_differ_are_an_error():
    rows = torch.ones(3, 2)
    assert check_difference(rows + 1e-5, rows) < 1e-4
    for wrong in (rows + 0.1, rows * torch.nan):
        with pytest.raises(RuntimeError, match="outputs of the exported program differ"):
            check_difference(wrong, rows)
