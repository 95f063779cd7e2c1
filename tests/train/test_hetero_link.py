"""Link prediction in heterogeneous graphs: held-out edges, scores, resuming and workers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from processes import results
from training import saved, train_as_worker
from typed_shop import BOUGHT, BUYS, EDGES, ITEMS, USERS, build

from gcnzc.graph.hetero import HeteroGraph
from gcnzc.optim import Averaged
from gcnzc.sampling import HeteroLinkSampler, HeteroSampler
from gcnzc.sampling.hetero_link import edge_times
from gcnzc.train.config import EvaluateConfig, TrainConfig
from gcnzc.train.evaluation import evaluate
from gcnzc.train.hetero.edge_split import split_edges
from gcnzc.train.run import train
from gcnzc.train.trainer import Interrupted


def without_reverse_times():
    """A graph whose nodes have early times, and whose reverse edges have none of their own."""
    whole = build()
    nodes = {
        each: replace(whole.nodes(each), time=torch.zeros(whole.num_nodes(each), dtype=torch.int64))
        for each in whole.node_types
    }
    edges = {BUYS: whole.edges(BUYS), BOUGHT: replace(whole.edges(BOUGHT), time=None)}
    return HeteroGraph(nodes, edges)


def test_reverses_without_times_do_not_show_held_out_edges():
    graph = without_reverse_times()
    split = split_edges(graph, BUYS, "time", 0.1, 0.1, 0, keep=False)
    kept = {tuple(pair) for pair in split.graph.edges(BOUGHT).edge_index().flip(0).T.tolist()}
    held_out = torch.cat([split.edges["valid"], split.edges["test"]], 1).T.tolist()
    assert kept
    assert not kept & {tuple(pair) for pair in held_out}
    sampler = HeteroSampler(graph, [5], temporal="last")
    with pytest.raises(ValueError, match=r"are the reverses of .* but have no times") as error:
        HeteroLinkSampler(sampler, BUYS)
    assert "\n\nhint: give" in str(error.value)
    assert HeteroLinkSampler(sampler, BUYS, exclude="reverse").reverse_types == [BOUGHT]
    HeteroLinkSampler(HeteroSampler(build(), [5], temporal="last"), BUYS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("link") / "graph"
    build().save(path)
    return path


@pytest.fixture(scope="module")
def config(folder):
    sizes = {"fanouts": (5, 5), "layers": 2, "hidden": 16, "batch_size": 256}
    options = {"task": "link", "edge_type": "user,buys,item", "evaluate_negatives": 10}
    return TrainConfig(
        data=folder, model="hetero-sage", **sizes, **options, epochs=3, lr=0.01, dropout=0.0
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
    assert graph.num_edges(BUYS) == EDGES


@pytest.mark.parametrize(
    "options",
    [
        {"edge_split": "random"},
        {"edge_split": "time", "decoder": "dot"},
        {"temporal": "last", "evaluate": "sampled", "model": "rgcn"},
        {"temporal": "uniform", "evaluate": "sampled", "model": "rgat", "heads": 2},
        {"edge_split": "random", "model": "hgt", "heads": 2},
    ],
)
def test_a_model_ranks_held_out_edges_and_its_evaluation_agrees(options, config, tmp_path):
    line = train(replace(config, epochs=8, evaluate_every=8, **options), tmp_path / "run")
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


@pytest.mark.parametrize("options", [{"edge_split": "random"}, {"temporal": "uniform"}])
def test_nothing_is_learned_from_random_edges(options, config, tmp_path):
    """A model that sees the edges that it predicts would rank them first."""
    build(is_planted=False).save(tmp_path / "graph")
    line = train(
        replace(config, data=tmp_path / "graph", epochs=3, evaluate_every=3, **options),
        tmp_path / "run",
    )
    assert line["test_auc"] < 0.6


def test_a_stopped_run_resumes_bit_for_bit(config, tmp_path, monkeypatch):
    train(config, tmp_path / "whole")
    step, taken = Averaged.step, []

    def watched(self, closure=None):
        taken.append(self)
        self.signals[0] = len(taken) == 8
        return step(self, closure)

    with monkeypatch.context() as patch:
        patch.setattr(Averaged, "step", watched)
        with pytest.raises(Interrupted):
            train(config, tmp_path / "stopped")
    train(replace(config, resume=tmp_path / "stopped"), tmp_path / "stopped")
    whole, stopped = saved(tmp_path / "whole"), saved(tmp_path / "stopped")
    assert all(torch.equal(stopped["model"][name], own) for name, own in whole["model"].items())
    assert [line["valid_mrr"] for line in stopped["lines"]] == [
        line["valid_mrr"] for line in whole["lines"]
    ]


@pytest.mark.processes
def test_two_workers_agree_on_the_scores(config, tmp_path):
    both = results(2, tmp_path, train_as_worker, replace(config, batch_size=128), tmp_path / "two")
    one = train(config, tmp_path / "one")
    assert both[0]["test_mrr"] == both[1]["test_mrr"]
    assert both[0]["test_mrr"] == pytest.approx(one["test_mrr"], abs=0.03)


def test_bad_options_are_rejected_by_name(config, tmp_path):
    def rejected(message, **options):
        with pytest.raises(ValueError, match=message):
            train(replace(config, **options), tmp_path / "run")

    rejected("--edge-type sells: there is no edge type", edge_type="sells")
    rejected("has 2 edge types to predict\n\nhint: --edge-type user,buys,item or", edge_type="")
    rejected("leave no edges to train on", valid_edges=0.5, test_edges=0.5)
    rejected("none is in the valid split", valid_edges=0.0)
    rejected("--edge-split random with --temporal last", edge_split="random", temporal="last")
    rejected("--negatives both with --model hetero-sage", negatives="both")
    rejected("--metric accuracy is of node classification", metric="accuracy")
    build(has_times=False).save(tmp_path / "untimed")
    rejected("--edge-split time: neither", edge_split="time", data=tmp_path / "untimed")
    rejected("--temporal last: neither", temporal="last", data=tmp_path / "untimed")
