"""Typed graphs with times, and their best possible accuracy."""

import numpy as np
import pytest
from tiny_graph import rows_of

from gcnzc.datasets import typed
from gcnzc.datasets.typed import ASKED, BOUGHT, BUYS, MAKES, MET, VIEWED, YEAR

SIZES = (4000, 60_000, 16, 5)
NOISE, SEPARATION = 0.05, 1.0


@pytest.fixture(scope="module")
def graph():
    return typed.typed(*SIZES, seed=3)


@pytest.fixture(scope="module")
def model():
    return typed.draw_model(*SIZES, 3, NOISE, SEPARATION, 1.0)


def features_of(graph, node_type):
    return rows_of(graph.node_features[node_type])


def test_sizes_types_and_ids(graph):
    assert list(graph.num_nodes) == ["user", "item", "query", "brand"]
    assert sum(graph.num_nodes.values()) == SIZES[0]
    assert list(graph.edges) == [BOUGHT, VIEWED, ASKED, BUYS, MAKES, MET]
    assert sum(len(ends[0]) for ends in graph.edges.values()) == SIZES[1]
    for each, ends in graph.edges.items():
        for ids, name in zip(ends, (each[0], each[2]), strict=True):
            assert ids.min() >= 0
            assert ids.max() < graph.num_nodes[name]
        assert graph.edge_time[each].shape == ends[0].shape
    assert np.array_equal(graph.edges[BUYS], graph.edges[BOUGHT][::-1])
    assert graph.edge_time[BUYS] is graph.edge_time[BOUGHT]
    for name, rows in graph.node_features.items():
        assert features_of(graph, name).shape == (graph.num_nodes[name], 16) == (rows.num_rows, 16)


def test_the_split_is_by_time(graph):
    time = graph.node_time["user"]
    ids = [graph.split[part]["user"] for part in ("train", "valid", "test")]
    assert sorted(np.concatenate(ids).tolist()) == list(range(graph.num_nodes["user"]))
    assert time[ids[0]].max() <= time[ids[1]].min()
    assert time[ids[1]].max() <= time[ids[2]].min()
    assert [len(each) for each in ids] == [1200, 400, 400]


@pytest.mark.parametrize("threads", [2, 8])
def test_the_result_does_not_depend_on_the_number_of_threads(graph, threads, monkeypatch):
    monkeypatch.setattr(typed, "CHUNK_EDGES", 1 << 10)
    one, many = (typed.typed(*SIZES, seed=3, threads=count) for count in (1, threads))
    assert one.best_accuracy == many.best_accuracy
    for each in graph.edges:
        assert np.array_equal(one.edges[each], many.edges[each])
        assert np.array_equal(one.edge_time[each], many.edge_time[each])
    assert np.array_equal(one.labels["user"], many.labels["user"])
    assert np.array_equal(features_of(one, "user"), features_of(many, "user"))


def test_edges_before_the_label_have_the_shares_of_the_model(graph, model):
    for each, affinity in model.affinity.items():
        src, dst = graph.edges[each]
        own = model.classes[each[0]][src] == model.classes["user"][dst]
        is_past = graph.edge_time[each] <= model.label_time[dst]
        count = is_past.sum()
        assert abs(is_past.mean() - typed.PAST) < 5 * 0.5 / len(src) ** 0.5
        expected = affinity + (1 - affinity) / SIZES[3]
        assert abs(own[is_past].mean() - expected) < 5 * 0.5 / count**0.5
        # what comes after the label shows the label
        shown = model.classes[each[0]][src] == graph.labels["user"][dst]
        assert shown[~is_past].all()


def test_only_later_edges_of_makes_change_the_class_of_an_item(graph, model):
    brand, item = graph.edges[MAKES]
    time = graph.edge_time[MAKES]
    early = time <= graph.node_time["user"].max()
    assert (time[~early] > YEAR).all()
    assert np.array_equal(np.sort(item[early]), np.arange(graph.num_nodes["item"]))
    assert (model.classes["item"][item[early]] == model.classes["brand"][brand[early]]).all()
    assert (model.classes["item"][item[~early]] != model.classes["brand"][brand[~early]]).any()


def test_features_of_brands_and_queries_show_their_class_and_those_of_items_do_not(graph, model):
    for name in ("brand", "query"):
        shown = (features_of(graph, name) @ model.means.T).argmax(axis=1)
        assert (shown == model.classes[name]).mean() > 0.99
    shown = (features_of(graph, "item") @ model.means.T).argmax(axis=1)
    assert abs((shown == model.classes["item"]).mean() - 1 / SIZES[3]) < 0.06


def test_the_best_accuracy_is_that_of_the_posterior_by_definition(graph, model):
    users = graph.split["test"]["user"]
    x = features_of(graph, "user").astype(np.float64)
    right = 0
    for user in users:
        scores = np.empty(SIZES[3])
        for k in range(SIZES[3]):
            scores[k] = -((x[user] - SEPARATION * model.means[k]) ** 2).sum() / 2
            for each, affinity in model.affinity.items():
                src, dst = graph.edges[each]
                is_own = (dst == user) & (graph.edge_time[each] <= model.label_time[user])
                same = model.classes[each[0]][src[is_own]] == k
                chance = (1 - affinity) / SIZES[3]
                scores[k] += np.log(np.where(same, affinity + chance, chance)).sum()
        right += scores.argmax() == graph.labels["user"][user]
    assert graph.best_accuracy == right / len(users)
    # the expected accuracy is at most 1 - noise
    assert 0.5 < graph.best_accuracy < 0.95 + 3 * 0.22 / len(users) ** 0.5


def test_later_edges_would_raise_the_accuracy_above_the_best(graph, model):
    everything = {each: np.zeros_like(time) for each, time in graph.edge_time.items()}
    users = graph.split["test"]["user"]
    scores = typed.log_posterior(model, graph.edges, everything, users, graph.node_features["user"])
    leaked = (scores.argmax(axis=1) == graph.labels["user"][users]).mean()
    assert leaked > graph.best_accuracy + 0.02


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ((100, 5000, 4, 8), {}, "8 classes for 100 nodes, of which 5 are brands"),
        ((1000, 300, 4, 4), {}, "300 edges for 1000 nodes"),
        ((1000, 9000, 0, 4), {}, "num_features is 0"),
        ((1000, 9000, 4, 4), {"noise": 0.9}, "noise is 0.9"),
        ((1000, 9000, 4, 4), {"strength": -1.0}, "strength -1.0"),
    ],
)
def test_wrong_arguments(sizes, options, words):
    with pytest.raises(ValueError, match=f"{words}(.|\n)*\n\nhint: "):
        typed.typed(*sizes, **options)
