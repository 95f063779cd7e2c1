"""Predictions and embeddings of the best model of a run on a heterogeneous graph."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from typed_papers import AUTHORS, CLASSES, PAPERS, SIZES, build
from typed_shop import BOUGHT, BUYS, ITEMS, USERS, without_features
from typed_shop import build as build_shop

import gcnzc
from gcnzc.cli import main
from gcnzc.graph import Graph
from gcnzc.models.layer_edges import TypedEdges
from gcnzc.sampling import build_full_hetero_blocks
from gcnzc.sampling.link import edge_times
from gcnzc.train import embed_nodes, evaluate, predict, predict_links, train
from gcnzc.train.config import EvaluateConfig, TrainConfig
from gcnzc.train.hetero.edge_split import split_edges
from gcnzc.train.trained import open_trained


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Authors have embeddings."""
    path = tmp_path_factory.mktemp("papers") / "graph"
    gcnzc.prepare(without_features(build(), "author"), path)
    return TrainConfig(data=path, model="rgcn:norm=batch", **SIZES)


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    train(config, folder)
    return folder


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    path = tmp_path_factory.mktemp("shop") / "graph"
    gcnzc.prepare(without_features(build_shop(), "user"), path)
    return path


@pytest.fixture(scope="module")
def link_config(shop):
    options = {"fanouts": (5, 5), "hidden": 16, "batch_size": 256, "epochs": 1}
    return TrainConfig(
        data=shop, model="hetero-sage", task="link:edge_type=buys,decoder=dot", **options
    )


@pytest.fixture(scope="module")
def link_run(link_config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("link_run") / "run"
    train(link_config, folder)
    return folder


def test_predictions_are_those_of_the_evaluation(run, tmp_path):
    evaluate(EvaluateConfig(run=run, predictions=tmp_path / "x.npy"))
    logits = torch.from_numpy(np.load(tmp_path / "x.npy"))
    found = predict(run)
    assert found.nodes.tolist() == list(range(PAPERS))
    assert found.probabilities.shape == (PAPERS, CLASSES)
    np.testing.assert_array_equal(found.probabilities, logits.softmax(1))
    np.testing.assert_array_equal(found.classes, logits.argmax(1))
    few = predict(run, nodes=[3, 500, 3])
    assert few.nodes.tolist() == [3, 500, 3]
    np.testing.assert_allclose(few.probabilities, found.probabilities[[3, 500, 3]], atol=1e-6)
    test = predict(run, nodes="test")
    labels = build().nodes("paper").labels.numpy()
    accuracy = (test.classes == labels[test.nodes]).mean()
    scores = evaluate(EvaluateConfig(run=run))
    assert accuracy == pytest.approx(scores["test_accuracy"])


def test_a_graph_without_labels_and_with_other_papers(run, tmp_path):
    graph = build()
    features = graph.nodes("paper").table.rows
    more = np.concatenate([features, features[:50]])
    edges = {each: {"edge_index": graph.edges(each).edge_index()} for each in graph.edge_types}
    nodes = {"paper": {"features": more}, "author": {"num_nodes": AUTHORS}}
    gcnzc.prepare(Graph.from_arrays(nodes, edges), tmp_path / "more")
    found = predict(run, tmp_path / "more")
    assert len(found.nodes) == PAPERS + 50
    np.testing.assert_allclose(found.probabilities[:PAPERS], predict(run).probabilities, atol=1e-6)
    with pytest.raises(ValueError, match="has no test nodes"):
        predict(run, tmp_path / "more", nodes="test")

    def rejected(message, **changes):
        path = tmp_path / next(iter(changes))
        gcnzc.prepare(Graph.from_arrays(nodes | changes, edges), path)
        with pytest.raises(ValueError, match=message):
            predict(run, path)

    rejected(
        "has 4 columns of features of node type 'paper', but the model was trained with 3",
        paper={"features": np.ones((PAPERS, 4))},
    )
    rejected(
        "has 201 nodes of type 'author', but the model has embeddings of 200",
        author={"num_nodes": AUTHORS + 1},
    )
    gcnzc.prepare(Graph.from_arrays({"paper": {"features": more}}, {}), tmp_path / "one")
    with pytest.raises(ValueError, match="has the types"):
        predict(run, tmp_path / "one")


def test_embeddings_are_the_outputs_of_layers(run, config, tmp_path):
    loaded, graph = open_trained(run), gcnzc.load(config.graph.data).graph
    model = loaded.model.eval()
    inner, _ = build_full_hetero_blocks(graph, 2, targets=["paper"])
    x = {name: table.gather(torch.arange(len(table))) for name, table in loaded.embeddings.items()}
    x["paper"] = graph.nodes("paper").table.gather(torch.arange(PAPERS))
    with torch.no_grad():
        first, second = model.input_linears
        inputs = [first(x["paper"]), second(x["author"])]
        outs = model.layers[0](TypedEdges(inner), torch.cat(inputs))
        hidden = [norm(outs[t]).relu() for t, norm in zip(outs, model.norms[0], strict=True)]
    for name, rows in zip(("paper", "author"), hidden, strict=True):
        found = embed_nodes(run, node_type=name)
        assert (found.node_type, found.layer) == (name, 1)
        np.testing.assert_allclose(found.rows, rows, atol=1e-5)
    assert embed_nodes(run).node_type == "paper"
    logits = embed_nodes(run, layer=2).rows
    probabilities = torch.from_numpy(logits).softmax(1)
    np.testing.assert_allclose(probabilities, predict(run).probabilities, atol=1e-6)
    sampled = embed_nodes(run, layer=1, fanouts=(1, 1)).rows
    assert np.abs(sampled - hidden[0].numpy()).max() > 1e-3


def test_layers_and_types_that_do_not_exist(run):
    def rejected(message, **options):
        with pytest.raises(ValueError, match=message):
            embed_nodes(run, **options)

    rejected("no node type 'venue'\n\nhint: the node types are paper, author", node_type="venue")
    rejected(
        "layer 2 of a model of 2 layers does not .* type 'author'\n\nhint: layers that do: 1",
        layer=2,
        node_type="author",
    )
    rejected("layer 3 of a model of 2 layers", layer=3)
    rejected("has --temporal none", time=3)
    rejected("heterogeneous graphs are not stored", scratch="somewhere")
    rejected(r"1 fanouts \(2\) for 2 layers", fanouts=(2,))


def test_scores_of_pairs_are_those_of_embeddings_without_held_out_edges(link_run, shop):
    random = np.random.default_rng(0)
    pairs = random.integers(0, [[USERS], [ITEMS]], (2, 300))
    found = predict_links(link_run, pairs=pairs)
    users = embed_nodes(link_run, node_type="user").rows
    items = embed_nodes(link_run, node_type="item").rows
    expected = (users[pairs[0]] * items[pairs[1]]).sum(1)
    np.testing.assert_allclose(found.scores, expected, rtol=1e-4, atol=1e-5)
    # the whole graph without held-out edges and their reverses
    loaded, graph = open_trained(link_run), gcnzc.load(shop).graph
    kept = split_edges(graph, BUYS, "auto", 0.1, 0.1, 0, keep=False).graph
    for has_all, used in ((False, kept), (True, graph)):
        blocks = build_full_hetero_blocks(used, 2, targets=["user", "item"])
        x = {"user": loaded.embeddings["user"].rows, "item": graph.nodes("item").table.rows}
        with torch.no_grad():
            whole = loaded.model.encoder.eval()(blocks, x)
        source = shop if has_all else None
        rows = embed_nodes(link_run, source, node_type="item").rows
        np.testing.assert_allclose(rows, whole["item"], atol=1e-5)
    with pytest.raises(ValueError, match=r"embeddings of the node types user, item"):
        embed_nodes(link_run)
    with pytest.raises(ValueError, match="has --temporal none"):
        predict_links(link_run, pairs=pairs, times=3)
    with pytest.raises(ValueError, match="no node has the id '100'"):
        predict_links(link_run, pairs=([0], [ITEMS]))
    assert len(predict_links(link_run, pairs=([], [])).scores) == 0


def test_scores_at_a_time_are_those_of_the_graph_before_it(link_config, shop, tmp_path):
    run, graph = tmp_path / "run", gcnzc.load(shop).graph
    train(link_config.replace(temporal="last"), run)
    pairs = np.random.default_rng(1).integers(0, [[USERS], [ITEMS]], (2, 40))
    times = np.where(np.arange(40) % 2, 200, 300)
    found = predict_links(run, pairs=pairs, times=times)
    for time in (200, 300):
        edges = {}
        for each in (BUYS, BOUGHT):
            own = edge_times(graph, each)
            is_earlier = own < time
            ends = graph.edges(each).edge_index()[:, is_earlier]
            edges[each] = {"edge_index": ends, "time": own[is_earlier]}
        nodes = {"user": {"num_nodes": USERS}, "item": {"features": graph.nodes("item").features}}
        gcnzc.prepare(Graph.from_arrays(nodes, edges), tmp_path / f"{time}")
        # after everything in this graph
        before = predict_links(run, tmp_path / f"{time}", pairs=pairs)
        own = times == time
        np.testing.assert_allclose(before.scores[own], found.scores[own], rtol=1e-4, atol=1e-5)
        assert np.abs(before.scores[~own] - found.scores[~own]).max() > 1e-3
        same = predict_links(run, pairs=pairs, times=time)
        np.testing.assert_allclose(same.scores, before.scores, rtol=1e-4, atol=1e-5)
        rows = embed_nodes(run, node_type="item", time=time).rows
        other = embed_nodes(run, tmp_path / f"{time}", node_type="item").rows
        np.testing.assert_allclose(rows, other, atol=1e-5)


@pytest.fixture(scope="module")
def dated(link_config, tmp_path_factory):
    """A temporal run on a graph whose times are days since 2024 as seconds."""
    path = tmp_path_factory.mktemp("dated")
    graph = without_features(build_shop(), "user")
    edges = {}
    for each in (BUYS, BOUGHT):
        days = edge_times(graph, each).numpy()
        time = np.datetime64("2024-01-01", "s") + days.astype("timedelta64[D]")
        edges[each] = {"edge_index": graph.edges(each).edge_index(), "time": time}
    nodes = {"user": {"num_nodes": USERS}, "item": {"features": graph.nodes("item").features}}
    gcnzc.prepare(Graph.from_arrays(nodes, edges), path / "graph")
    train(link_config.replace(data=path / "graph", temporal="uniform"), path / "run")
    return path / "run"


def test_times_of_pairs_and_nodes_are_dates(dated, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pairs = pd.DataFrame({"source": [0, 1, 119], "target": [99, 3, 3]})
    ends = pairs.to_numpy().T
    dates = ["2024-03-01", "2024-06-01T02:00:00+02:00", "2024-07-01 00:00:00.5"]
    seconds = np.array(["2024-03-01", "2024-06-01", "2024-07-01"], "datetime64[s]").astype(int)
    expected = predict_links(dated, pairs=ends, times=seconds).scores
    assert len(set(expected)) == 3
    pairs.assign(time=dates).to_csv("dates.csv", index=False)
    moments = np.array(["2024-03-01", "2024-06-01", "2024-07-01T00:00:00.5"], "datetime64[ns]")
    pairs.assign(time=moments).to_parquet("dates.parquet")
    pairs.assign(time=[pd.Timestamp(each).date() for each in moments]).to_parquet("days.parquet")
    pairs.assign(time=seconds).to_csv("seconds.csv", index=False)
    for name in ("dates.csv", "dates.parquet", "days.parquet", "seconds.csv"):
        np.testing.assert_array_equal(predicted(dated, "--pairs", name)["score"], expected, name)
    pairs.to_csv("pairs.csv", index=False)
    expected = predict_links(dated, pairs=ends, times=int(seconds[0])).scores
    words = ["--pairs", "pairs.csv", "--time"]
    for text in ("2024-03-01", str(seconds[0])):
        np.testing.assert_array_equal(predicted(dated, *words, text)["score"], expected)
    for own in (pd.Timestamp("2024-03-01"), np.datetime64("2024-03-01")):
        np.testing.assert_array_equal(predict_links(dated, pairs=ends, times=own).scores, expected)
    rows = embed_nodes(dated, node_type="item", time=int(seconds[0])).rows
    words = ["--embeddings", "--node-type", "item", "--time", "2024-03-01T00:00"]
    np.testing.assert_array_equal(predicted(dated, *words), rows)
    assert np.abs(rows - embed_nodes(dated, node_type="item").rows).max() > 1e-3
    capsys.readouterr()
    for text in ("2024-13-01", "March", "now", "2024-03-01T99:00"):
        words = ["--out", "x.npy", "--pairs", "pairs.csv", "--time", text]
        assert main(["predict", str(dated), *words]) != 0
        message = capsys.readouterr().err
        assert f"--time {text} is not a time" in message
        assert "dates such as 2024-03-01 (UTC), or integers in s since 1970" in message
    pairs.assign(time=["2024-03-01", "soon", ""]).to_csv("wrong.csv", index=False)
    assert main(["predict", str(dated), "--out", "x.npy", "--pairs", "wrong.csv"]) == 1
    assert "wrong.csv, line 3, column 'time': 'soon' is not a time" in capsys.readouterr().err


def predicted(run, *words, out="x.npy"):
    """What `gcnzc predict` writes."""
    assert main(["predict", str(run), "--out", out, *words]) == 0
    read = {"npy": np.load, "csv": pd.read_csv, "parquet": pd.read_parquet}
    return read[out.split(".")[-1]](out)


def printed(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_commands_write_files(run, link_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = predicted(run, "--nodes", "valid", "--probabilities", out="papers.csv")
    line = printed(capsys)
    assert line["columns"] == list(table) == ["node", "class", "p_0", "p_1", "p_2"]
    assert len(table) == line["predictions"] == 100
    expected = predict(run, nodes=table["node"].to_numpy())
    assert table["class"].tolist() == expected.classes.tolist()
    rows = predicted(run, "--embeddings", "--node-type", "author")
    assert printed(capsys)["node_type"] == "author"
    np.testing.assert_array_equal(rows, embed_nodes(run, node_type="author").rows)
    ends = np.array([[0, 1, 119], [99, 3, 3]])
    pd.DataFrame(ends.T, columns=["source", "target"]).to_csv("pairs.csv", index=False)
    np.save("ends.npy", ends)
    expected = predict_links(link_run, pairs=ends, fanouts=(3, 3)).scores
    for source, out in (("pairs.csv", "links.parquet"), ("ends.npy", "links.npy")):
        found = predicted(link_run, "--pairs", source, "--fanouts", "3,3", out=out)
        assert printed(capsys)["columns"] == ["source", "target", "score"]
        np.testing.assert_array_equal(found["score"], expected)
    capsys.readouterr()
    for words, message in (
        (["--out", "x.csv", "--scratch", "here"], "heterogeneous graphs are not stored"),
        (["--out", "x.csv", "--time", "3"], "--time has no effect without --pairs"),
        (["--out", "x.csv", "--fanouts", "3"], "1 fanouts (3) for 2 layers"),
    ):
        assert main(["predict", str(run), *words]) != 0
        assert message in capsys.readouterr().err
