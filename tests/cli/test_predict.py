"""`gcnzc predict`: classes of nodes and scores of pairs, from a run."""

import importlib.util
import json

import numpy as np
import pandas as pd
import pytest
import torch
from command_runs import failed, ran

import gcnzc
from gcnzc.cli import main
from gcnzc.graph import EdgeShares
from gcnzc.train import embed_nodes, predict, predict_links

N = 120
OPTIONS = ["--fanouts", "4,4", "--hidden", "8", "--batch-size", "40"]
OPTIONS += ["--epochs", "2", "--device", "cpu"]
RANDOM = np.random.default_rng(0)
KINDS = np.array(["ant", "bee", "cow"])[RANDOM.integers(3, size=N)]
VALUES = RANDOM.standard_normal((N, 3)).round(3)
EDGES = RANDOM.integers(N, size=(2, 500))


def write(folder, *, nodes=slice(None), labels=True, order=("a", "b", "c"), names=KINDS):
    """Write tables of some of the nodes, whose ids are n0, n1, ..., and prepare them."""
    folder.mkdir()
    ids = np.arange(N)[nodes]
    table = pd.DataFrame({"id": [f"n{i}" for i in ids]})
    for column in order:
        table[column] = VALUES[ids, "abc".index(column)]
    if labels:
        table["label"] = names[ids]
        table["split"] = np.array(["train", "train", "valid", "test"])[ids % 4]
    edges = EDGES[:, np.isin(EDGES, ids).all(axis=0)]
    pd.DataFrame({"src": edges[0], "dst": edges[1]}).map("n{}".format).to_csv(
        folder / "edges.csv", index=False
    )
    table.to_csv(folder / "nodes.csv", index=False)
    (folder / "g.toml").write_text('[edges]\nfile = "edges.csv"\n[nodes]\nfile = "nodes.csv"\n')
    gcnzc.prepare(folder / "g.toml", folder / "data", bidirected=True)
    return folder / "data"


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    return write(tmp_path_factory.mktemp("predict") / "in")


@pytest.fixture(scope="module")
def run(graph):
    """A run on the graph; its folder has the logits of all nodes, too."""
    run = graph.parent / "run"
    assert main(["train", str(graph), *OPTIONS, "--out", str(run)]) == 0
    assert main(["evaluate", str(run), "--predictions", str(run / "logits.npy")]) == 0
    return run


def line_of(capsys, *words):
    """The JSON line of `gcnzc predict`."""
    return ran(capsys, "predict", *words)[0]


def error_of(capsys, *words, status=1):
    return "\n".join(failed(capsys, ["predict", *words], status))


def test_predictions_are_those_of_the_evaluation(graph, run, tmp_path, capsys):
    logits = torch.from_numpy(np.load(run / "logits.npy"))
    classes = np.array(["ant", "bee", "cow"])[logits.argmax(1).numpy()]
    probabilities = logits.softmax(1).numpy()
    out = tmp_path / "p.csv"
    line = line_of(capsys, run, "--out", out, "--probabilities")
    assert line["columns"] == ["node", "class", "p_ant", "p_bee", "p_cow"]
    assert (line["predictions"], line["task"], line["out"]) == (N, "node", str(out))
    table = pd.read_csv(out)
    assert table["node"].tolist() == [f"n{i}" for i in range(N)]
    assert table["class"].tolist() == classes.tolist()
    np.testing.assert_allclose(table[["p_ant", "p_bee", "p_cow"]], probabilities, atol=1e-6)
    # the accuracy of the run
    test = gcnzc.load(graph).split["test"].numpy()
    accuracy = json.loads((run / "result.json").read_text())["test_accuracy"]
    assert np.mean(classes[test] == KINDS[test]) == pytest.approx(accuracy)
    # a part, in other formats
    for name in ("p.csv.gz", "p.npy", "p.parquet"):
        if name == "p.parquet" and importlib.util.find_spec("pyarrow") is None:
            assert "pyarrow" in error_of(capsys, run, "--out", tmp_path / name)
            continue
        assert line_of(capsys, run, "--nodes", "test", "--out", tmp_path / name)["predictions"]
        read = {"gz": pd.read_csv, "npy": np.load, "parquet": pd.read_parquet}[name.split(".")[-1]]
        part = pd.DataFrame(read(tmp_path / name))
        assert part["node"].tolist() == [f"n{i}" for i in test]
        assert part["class"].tolist() == classes[test].tolist()
    # ids of a file, in its order: of a column by its name, or of the only one, with or without
    ids = tmp_path / "ids.csv"
    for text in ("other,node\n1,n7\n2,n3\n3,n7\n", "name\nn7\nn3\nn7\n", "n7\nn3\nn7\n"):
        ids.write_text(text)
        assert main(["predict", str(run), "--nodes", str(ids), "--out", str(out)]) == 0
        assert f"replaced {out}" in capsys.readouterr().err
        assert pd.read_csv(out)["class"].tolist() == classes[[7, 3, 7]].tolist()
    found = predict(run, nodes=["n7", "n3"])
    assert found.nodes.tolist() == ["n7", "n3"]
    np.testing.assert_allclose(found.probabilities, probabilities[[7, 3]], atol=1e-6)
    assert len(predict(run, nodes="all").nodes) == len(classes)


def test_new_nodes_without_labels_are_predicted(run, tmp_path, capsys):
    new = write(tmp_path / "new", nodes=slice(0, None, 2), labels=False)
    # a run needs no graph that it was trained on
    config = json.loads((run / "config.json").read_text())
    copy = tmp_path / "run"
    copy.mkdir()
    for name in ("best.pt", "schema.json"):
        (copy / name).write_bytes((run / name).read_bytes())
    (copy / "config.json").write_text(json.dumps(config | {"data": "/nowhere"}))
    line = line_of(capsys, copy, new, "--out", tmp_path / "p.csv")
    assert line["predictions"] == N // 2
    table = pd.read_csv(tmp_path / "p.csv")
    assert table["node"].tolist() == [f"n{i}" for i in range(0, N, 2)]
    assert set(table["class"]) <= set(KINDS)
    assert "has no test nodes" in error_of(
        capsys, copy, new, "--nodes", "test", "--out", tmp_path / "q.csv"
    )


def test_graphs_and_ids_that_do_not_fit(run, tmp_path, capsys):
    out, ids, pairs = tmp_path / "p.csv", tmp_path / "ids.csv", tmp_path / "pairs.csv"
    other = write(tmp_path / "other", order=("a", "c", "b"))
    narrow = write(tmp_path / "narrow", order=("a", "b"))
    renamed = write(tmp_path / "renamed", names=np.where(KINDS == "bee", "asp", KINDS))
    swapped = "column of features 1 is 'c', but the model was trained with 'b'"
    for data, message in (
        (other, swapped),
        (renamed, "class 1 is 'asp', but the model was trained with 'bee'"),
    ):
        assert message in failed(capsys, ["evaluate", run, data], 1)[0]
    np.save(tmp_path / "mask.npy", np.ones(N, bool))
    np.save(tmp_path / "ids.npy", np.array([3]))
    pairs.write_text("source,target\nn1,n2\n")
    for words, message in (
        ([other], swapped),
        ([narrow], "column of features 2 is 'absent'"),
        (["--nodes", tmp_path / "mask.npy"], "has the type bool"),
        (["--nodes", tmp_path / "ids.npy"], "row 0: no node has the id"),
        (["--nodes", tmp_path / "no.csv"], "no file"),
        (["--nodes", "tset"], "did you mean test?"),
        (["--nodes", tmp_path], "is not a folder of Parquet files"),
        (["--pairs", pairs], "is a node-classification run"),
    ):
        assert message in error_of(capsys, run, *words, "--out", out)
    # before the run is read
    assert "no file" in error_of(capsys, tmp_path / "none", "--nodes", "no.csv", "--out", out)
    for text, message in (
        ("node\nn1\nx\n", "ids.csv, line 3, column 'node': no node has the id 'x'"),
        ("name\nx\n", f"hint: correct {ids}: ids are those of the graph's source"),
        ("name,age\nn1,3\n", "has no column of ids; its columns are name, age"),
    ):
        ids.write_text(text)
        assert message in error_of(capsys, run, "--nodes", ids, "--out", out)
    with pytest.raises(ValueError, match=r"row 1: no node has the id 'n999'"):
        predict(run, nodes=["n1", "n999"])
    assert not out.exists()


def test_scores_of_pairs(graph, tmp_path, capsys):
    gcnzc.prepare(graph, tmp_path / "links", edge_split=EdgeShares())
    run, out, pairs = tmp_path / "run", tmp_path / "p.csv", tmp_path / "pairs.csv"
    words = [tmp_path / "links", "--task", "link", *OPTIONS, "--epochs", 1, "--out", run]
    assert main(["train", *map(str, words)]) == 0
    data = gcnzc.load(tmp_path / "links")
    ends = torch.cat([data.links.edges["test"], data.links.negatives["test"]], dim=1).numpy()
    table = pd.DataFrame({"source": ends[0], "target": ends[1]}).map("n{}".format)
    table.to_csv(pairs, index=False)
    line = line_of(capsys, run, "--pairs", pairs, "--out", out, "--probabilities")
    assert line["columns"] == ["source", "target", "score", "probability"]
    found = pd.read_csv(out)
    assert found[["source", "target"]].equals(table)
    # the order of the scores is what the AUC of the run measures
    positives = data.links.edges["test"].shape[1]
    auc = gcnzc.models.metrics.auc(
        *(
            torch.tensor(found["score"].to_numpy()[part])
            for part in (slice(positives), slice(positives, None))
        )
    )
    assert auc == pytest.approx(json.loads((run / "result.json").read_text())["test_auc"], abs=1e-3)
    again = predict_links(run, pairs=(table["source"][:2], table["target"][:2]))
    np.testing.assert_allclose(again.scores, found["score"][:2], rtol=1e-4)
    assert "this is a link-prediction run" in error_of(capsys, run, "--out", tmp_path / "q.csv")
    pairs.write_text("source,target\n")
    assert line_of(capsys, run, "--pairs", pairs, "--out", out)["predictions"] == 0
    assert out.read_text() == "source,target,score\n"
    pairs.write_text("source,target\nn1,n2000\n")
    message = "line 2, column 'target': no node has the id 'n2000'"
    assert message in error_of(capsys, run, "--pairs", pairs, "--out", tmp_path / "q.csv")
    words = [run, "--pairs", pairs, "--out", tmp_path / "." / "pairs.csv"]
    assert "--out and --pairs are the same file" in error_of(capsys, *words, status=2)
    words[1] = "--nodes"
    assert "--out and --nodes are the same file" in error_of(capsys, *words, status=2)


def test_scores_that_are_not_defined_are_null_and_reported(tmp_path, capsys):
    labels = np.ones((N, 2), np.int64)
    parts = np.array(["train", "train", "valid", "test"], object)[np.arange(N) % 4]
    gcnzc.prepare(tmp_path / "data", edges=EDGES, features=VALUES, labels=labels, splits=parts)
    capsys.readouterr()
    run = tmp_path / "run"
    assert main(["train", str(tmp_path / "data"), *OPTIONS, "--out", str(run)]) == 0
    out, err = capsys.readouterr()

    def no_constants(name):
        raise AssertionError(name)

    texts = [
        out,
        (run / "result.json").read_text(),
        *(run / "record.jsonl").read_text().split("\n"),
    ]
    lines = [json.loads(text, parse_constant=no_constants) for text in texts if text]
    assert lines[0]["valid_rocauc"] is None
    assert err.count("the validation rocauc is not defined") == 1
    assert main(["plot", str(run)]) == 0
    assert main(["evaluate", str(run)]) == 0
    assert '"test_rocauc": null' in capsys.readouterr().out
    # columns of labels, and ids that are numbers
    np.save(tmp_path / "ids.npy", np.array([5, 3]))
    words = [run, "--nodes", tmp_path / "ids.npy", "--out", tmp_path / "p.csv"]
    assert line_of(capsys, *words)["columns"] == ["node", "class_0", "class_1"]
    assert pd.read_csv(tmp_path / "p.csv")["node"].tolist() == [5, 3]


def test_scratch_folders_change_no_prediction(run, tmp_path, capsys):
    scratch = tmp_path / "scratch"
    expected = predict(run)
    line = line_of(
        capsys, run, "--out", tmp_path / "p.npy", "--scratch", scratch, "--memory", "1MiB"
    )
    assert line["predictions"] == N
    assert np.load(tmp_path / "p.npy")["class"].tolist() == expected.classes.tolist()
    # the command has deleted it
    assert not scratch.exists()
    found = predict(run, scratch=scratch)
    assert np.array_equal(found.probabilities, expected.probabilities)
    out = ["--out", tmp_path / "q.npy"]
    # the rows that `predict` has left are of all nodes
    assert "nodes differ" in error_of(capsys, run, *out, "--nodes", "test", "--scratch", scratch)


def test_embeddings_are_outputs_of_layers(graph, run, tmp_path, capsys):
    out = tmp_path / "rows.npy"
    rows = {}
    for layer in (None, 1, 2):
        words = [str(run), "--out", str(out)] + (["--layer", str(layer)] if layer else [])
        if layer != 2:
            words += ["--scratch", str(tmp_path / "scratch"), "--memory", "1MiB"]
        line = line_of(capsys, *words, "--embeddings")
        rows[layer] = np.load(out)
        assert (line["nodes"], line["columns"]) == rows[layer].shape
        assert line["layer"] == (layer or 1)
        assert not (tmp_path / "scratch").exists()
    assert np.array_equal(rows[None], rows[1])
    assert rows[1].shape == (N, 8)
    # the second of two layers computes the logits
    assert np.array_equal(rows[2], np.load(run / "logits.npy"))
    found = embed_nodes(run, graph)
    assert np.array_equal(found.rows, rows[1])
    assert (found.nodes[3], found.layer) == ("n3", 1)
    message = error_of(capsys, run, "--embeddings", "--layer", 3, "--out", out)
    assert "layer is 3, but must be at most 2" in message


def test_options_of_heterogeneous_graphs_are_rejected(run):
    with pytest.raises(ValueError, match=r"--fanouts \(in Python `fanouts`\) is given"):
        predict(run, fanouts=(2, 2))
    with pytest.raises(ValueError, match=r"--node-type .* for graphs of one node type"):
        embed_nodes(run, node_type="paper")
    with pytest.raises(ValueError, match="--time "):
        embed_nodes(run, time=3)
