"""Link prediction in heterogeneous graphs: held-out edges, scores, resuming and workers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hetero_graphs import pyg_sampler
from processes import results
from training import train_as_worker
from typed_shop import BOUGHT, BUYS, EDGES, ITEMS, USERS, build

import gcnzc
from gcnzc.graph import Graph
from gcnzc.sampling import LinkSampler
from gcnzc.sampling.link import edge_times
from gcnzc.train.config import EvaluateConfig, TrainConfig
from gcnzc.train.evaluation import evaluate
from gcnzc.train.hetero.edge_split import split_edges
from gcnzc.train.prediction import predict_links
from gcnzc.train.run import train


def without_reverse_times():
    """A graph whose nodes have early times, and whose reverse edges have none of their own."""
    whole = build()
    nodes = {
        each: replace(
            whole.nodes(each), time=torch.zeros(whole.nodes(each).num_nodes, dtype=torch.int64)
        )
        for each in whole.node_types
    }
    edges = {BUYS: whole.edges(BUYS), BOUGHT: replace(whole.edges(BOUGHT), time=None)}
    return Graph.from_stores(nodes, edges)


def test_reverses_without_times_do_not_show_held_out_edges():
    graph = without_reverse_times()
    split = split_edges(graph, BUYS, "time", 0.1, 0.1, 0, keep=False)
    kept = {tuple(pair) for pair in split.graph.edges(BOUGHT).edge_index().flip(0).T.tolist()}
    held_out = torch.cat([split.edges["valid"], split.edges["test"]], 1).T.tolist()
    assert kept
    assert not kept & {tuple(pair) for pair in held_out}
    sampler = pyg_sampler(graph, [5], temporal="last")
    with pytest.raises(ValueError, match=r"are the reverses of .* but have no times") as error:
        LinkSampler(sampler, edge_type=BUYS)
    assert "\n\nhint: give" in str(error.value)
    assert LinkSampler(sampler, edge_type=BUYS, exclude="reverse").reverse_types == [BOUGHT]
    LinkSampler(pyg_sampler(build(), [5], temporal="last"), edge_type=BUYS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("link") / "graph"
    gcnzc.prepare(build(), path)
    return path


def link(**options):
    """The task with options."""
    own = {"edge_type": "user,buys,item", "evaluate_negatives": 10} | options
    return "link:" + ",".join(f"{name}={value}" for name, value in own.items())


@pytest.fixture(scope="module")
def config(folder):
    sizes = {"fanouts": (5, 5), "hidden": 16, "batch_size": 256}
    return TrainConfig(
        data=folder, model="hetero-sage", task=link(), **sizes, epochs=3, lr=0.01, dropout=0.0
    )


def pairs_of(edges):
    return {tuple(pair) for pair in edges.T.tolist()}


@pytest.mark.parametrize("kind", ["time", "random"])
def test_held_out_edges_and_their_reverses_are_not_in_the_graph(kind):
    graph = build()
    split = split_edges(graph, BUYS, kind, 0.1, 0.2, 0, keep=False)
    sizes = {name: ids.shape[1] for name, ids in split.edges.items()}
    assert (sizes["valid"], sizes["test"]) == (200, 400)
    assert split.reverse_types == [BOUGHT]
    forward = split.graph.edges(BUYS).edge_index()
    backward = split.graph.edges(BOUGHT).edge_index().flip(0)
    if kind == "time":
        assert sizes["train"] == 1400
        train_times, valid_times, test_times = split.times.values()
        assert bool(
            train_times.max() <= valid_times.min() and valid_times.max() <= test_times.min()
        )
        first = min(split.times[name].min() for name in ("valid", "test"))
        assert bool((split.graph.edges(BOUGHT).time < first).all())
        # the times still belong to their edges
        found = torch.cat([forward, edge_times(split.graph, BUYS)[None]])
        expected = torch.cat([split.edges["train"], train_times[None]])
        assert sorted(found.T.tolist()) == sorted(expected.T.tolist())
    else:
        held_out = pairs_of(split.edges["valid"]) | pairs_of(split.edges["test"])
        for edges in (forward, backward, split.edges["train"]):
            assert not held_out & pairs_of(edges)
        assert pairs_of(forward) == pairs_of(split.edges["train"]) == pairs_of(backward)
    # the original graph is unchanged
    assert graph.edges(BUYS).num_edges == EDGES


@pytest.mark.parametrize(
    "options",
    [
        {"task": link(split="time", decoder="dot")},
        {"temporal": "last", "evaluate": "sampled", "model": "rgcn"},
        {"task": link(split="random"), "model": "hgt:heads=2"},
    ],
)
def test_a_model_ranks_held_out_edges_and_its_evaluation_agrees(options, config, tmp_path):
    line = train(config.replace(epochs=8, evaluate_every=8, **options), tmp_path / "run")
    # a random order has an expected MRR of 0.275
    assert line["metric"] == "mrr"
    assert line["test_mrr"] > 0.35
    assert line["test_hits@3"] > line["test_hits@1"]
    again = evaluate(
        EvaluateConfig(run=tmp_path / "run", evaluate=options.get("evaluate", "needed"))
    )
    assert again["test_mrr"] == line["test_mrr"]
    with pytest.raises(ValueError, match="--predictions is not supported"):
        evaluate(EvaluateConfig(run=tmp_path / "run", predictions=tmp_path / "x.npy"))


@pytest.mark.parametrize("options", [{"task": link(split="random")}, {"temporal": "uniform"}])
def test_nothing_is_learned_from_random_edges(options, config, tmp_path):
    """A model that sees the edges that it predicts would rank them first."""
    gcnzc.prepare(build(is_planted=False), tmp_path / "graph")
    line = train(
        config.replace(data=tmp_path / "graph", epochs=3, evaluate_every=3, **options),
        tmp_path / "run",
    )
    assert line["test_auc"] < 0.6


def test_bad_options_are_rejected_by_name(config, tmp_path):
    def rejected(message, **options):
        with pytest.raises(ValueError, match=message):
            train(config.replace(**options), tmp_path / "run")

    rejected("edge_type=sells: there is no edge type", task=link(edge_type="sells"))
    rejected("has 2 edge types to predict\n\nhint: .*edge_type=user,buys,item or", task="link")
    rejected("leaves no edges to train on", task=link(valid_edges=0.5, test_edges=0.5))
    rejected("none is in the valid split", task=link(valid_edges=0.0))
    rejected("with --temporal last: held-out", task=link(split="random"), temporal="last")
    rejected("there is no 'negatives'", task=link(negatives="both"))
    gcnzc.prepare(build(has_times=False), tmp_path / "untimed")
    rejected("split=time: neither", task=link(split="time"), data=tmp_path / "untimed")
    rejected("--temporal last: neither", temporal="last", data=tmp_path / "untimed")


def scores_of_all_pairs(run):
    users, items = np.divmod(np.arange(USERS * ITEMS), ITEMS)
    return predict_links(run, pairs=(users, items)).scores.reshape(USERS, ITEMS)


def rank_by_hand(scores, edges, known, name):
    """MRR and recall@10 of a split, by comparing the scores of all pairs."""
    known, held_out = pairs_of(known), pairs_of(edges)
    inverse, shares = [], []
    for user in sorted({user for user, _ in held_out}):
        own = [item for item in range(ITEMS) if (user, item) in held_out]
        free = [item for item in range(ITEMS) if (user, item) not in known | held_out]
        row = scores[user]
        whole = [1 + (row[[j for j in free + own if j != i]] > row[i]).sum() for i in own]
        shares.append(np.mean([rank <= 10 for rank in whole]))
        bought = [item for each, item in edges.T.tolist() if each == user]
        inverse += [1 / (1 + (row[free] > row[item]).sum()) for item in bought]
    return {f"{name}_mrr": np.mean(inverse), f"{name}_recall@10": np.mean(shares)}


@pytest.mark.parametrize("kind", ["time", "random"])
def test_edges_are_ranked_among_all_unknown_items(kind, config, tmp_path):
    run = tmp_path / "run"
    own = config.replace(task=link(split=kind, evaluate_negatives="all", decoder="dot"), epochs=2)
    line = train(own, run)
    split = split_edges(build(), BUYS, kind, 0.1, 0.1, 0, keep=False)
    train_edges, valid, test = split.edges.values()
    scores = scores_of_all_pairs(run)
    expected = rank_by_hand(scores, valid, train_edges, "valid")
    expected |= rank_by_hand(scores, test, torch.cat([train_edges, valid], 1), "test")
    again = evaluate(EvaluateConfig(run=run))
    assert again["test_recall@50"] >= again["test_recall@20"] >= again["test_recall@10"]
    assert again["test_hit_rate@10"] >= again["test_recall@10"]
    for name, value in expected.items():
        # a pair of close scores may be in another order after rounding
        assert again[name] == pytest.approx(value, abs=2e-3), name
        assert line[name] == again[name]
    fewer = evaluate(EvaluateConfig(run=run, evaluate_negatives=10))
    assert "test_recall@10" not in fewer
    assert fewer["test_mrr"] > again["test_mrr"]


def test_a_temporal_ranking_reads_nothing_of_the_split(config, tmp_path):
    """Edges of the split and later ones have no influence on the ranks."""
    task = link(evaluate_negatives="all", split="time")
    own = config.replace(temporal="last", task=task, epochs=1)
    train(own, tmp_path / "run")
    first = evaluate(EvaluateConfig(run=tmp_path / "run"))
    graph = build()
    split = split_edges(graph, BUYS, "time", 0.1, 0.1, 0, keep=True)
    start = split.times["valid"].min()
    edges = {}
    for each in (BUYS, BOUGHT):
        ends, time = graph.edges(each).edge_index(), edge_times(graph, each)
        if each == BOUGHT:
            # reverses of edges that are not earlier than the split go elsewhere
            ends = ends.clone()
            ends[0, time >= start] = 0
        edges[each] = {"edge_index": ends, "time": time}
    nodes = {name: {"features": graph.nodes(name).features} for name in graph.node_types}
    gcnzc.prepare(Graph.from_arrays(nodes, edges), tmp_path / "other")
    other = evaluate(EvaluateConfig(run=tmp_path / "run", data=tmp_path / "other"))
    assert other["valid_mrr"] == first["valid_mrr"]
    assert other["test_mrr"] != first["test_mrr"]


@pytest.mark.processes
def test_workers_share_a_ranking(config, tmp_path):
    own = config.replace(task=link(evaluate_negatives="all"), epochs=1, batch_size=128)
    both = results(2, tmp_path, train_as_worker, own, tmp_path / "two")
    alone = evaluate(EvaluateConfig(run=tmp_path / "two"))
    for name in ("test_mrr", "test_recall@10", "valid_hit_rate@20"):
        assert both[0][name] == both[1][name] == alone[name]
