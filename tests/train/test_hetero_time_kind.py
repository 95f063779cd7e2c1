"""Runs in which only the times of edges or only those of nodes count."""

import json

import numpy as np
import pytest
import torch
from typed_shop import BOUGHT, BUYS, EDGES, ITEMS, USERS, build

import gcnzc
from gcnzc.graph import Graph
from gcnzc.train import embed_nodes, evaluate, predict_links, train
from gcnzc.train.checkpointing import check_resumed_options
from gcnzc.train.config import EvaluateConfig, TrainConfig
from gcnzc.train.hetero.data import load_hetero
from gcnzc.train.hetero.edge_split import split_edges_of_run
from gcnzc.train.tasks.hetero_link import HeteroLinkTask

LAST = 10_000  # later than every edge


def with_times(*, of_edges=True, of_users=None, of_items=None):
    """The shop, with times of some types."""
    whole, random = build(), np.random.default_rng(5)
    # all different, so that an order by time is unique
    time = random.permutation(EDGES)
    nodes = {name: {"features": whole.nodes(name).features} for name in whole.node_types}
    for name, times in (("user", of_users), ("item", of_items)):
        if times is not None:
            nodes[name]["time"] = times
    edges = {}
    for each in (BUYS, BOUGHT):
        edges[each] = {"edge_index": whole.edges(each).edge_index()}
        if of_edges:
            edges[each]["time"] = time
    return Graph.from_arrays(nodes, edges, name="shop")


def config_of(folder, **options):
    sizes = {"fanouts": (5,), "hidden": 16, "batch_size": 256, "epochs": 1}
    own = {"task": "link:edge_type=buys,evaluate_negatives=10", "evaluate": "sampled"}
    own |= {"model": "hetero-sage", "temporal": "last"}
    return TrainConfig(data=folder, **(sizes | own | options))


def saved(path, **times):
    gcnzc.prepare(with_times(**times), path)
    return path


def test_edges_earlier_than_their_nodes_need_the_times_of_edges(tmp_path):
    """The times of nodes are those of their labels, and later than all edges."""
    times = torch.arange(USERS) + LAST
    folder = saved(tmp_path / "graph", of_users=times, of_items=torch.arange(ITEMS) + LAST)
    with pytest.raises(ValueError, match="later than the edge"):
        train(config_of(folder), tmp_path / "both")
    run, bare = tmp_path / "edge", saved(tmp_path / "bare")
    for options, message in (
        ({"temporal": "last:time=node"}, "--temporal last:time=node: no source .*bare has a time"),
        ({"task": "link:edge_type=buys,reverse_types=sold"}, "there is no edge type"),
    ):
        with pytest.raises(ValueError, match=message):
            train(config_of(bare, **options), tmp_path / "wrong")
    line = train(config_of(folder, temporal="last:time=edge"), run)
    # as if nodes had no times
    expected = train(config_of(bare), tmp_path / "expected")
    for name in ("valid_mrr", "test_mrr", "valid_auc"):
        assert line[name] == expected[name], name
    assert json.loads((run / "config.json").read_text())["temporal"] == "last:time=edge"
    again = evaluate(EvaluateConfig(run=run, evaluate="sampled"))
    assert again["test_mrr"] == line["test_mrr"]
    pairs = np.random.default_rng(0).integers(0, [[USERS], [ITEMS]], (2, 20))
    for own in (None, 1000):
        scores = predict_links(run, pairs=pairs, times=own).scores
        other = predict_links(tmp_path / "expected", pairs=pairs, times=own).scores
        np.testing.assert_array_equal(scores, other)
        rows = embed_nodes(run, node_type="item", time=own).rows
        other = embed_nodes(tmp_path / "expected", node_type="item", time=own).rows
        np.testing.assert_array_equal(rows, other)
    resumed = config_of(folder, temporal="last:time=edge", resume=run, epochs=2)
    options = json.loads((run / "config.json").read_text())
    with pytest.raises(ValueError, match="has --temporal last:time=edge, not last\n"):
        check_resumed_options(resumed.replace(temporal="last"), options, run)
    check_resumed_options(resumed, options, run)


@pytest.mark.parametrize("times", ["node", "both"])
def test_edges_that_are_as_late_as_their_nodes_do_not_show_themselves(times, tmp_path):
    """Items are later than users, so that all edges of an item are visible before it."""
    folder = saved(
        tmp_path / "graph",
        of_edges=times == "node",
        of_users=torch.zeros(USERS, dtype=torch.int64),
        of_items=torch.arange(ITEMS) // 50 + 1,
    )
    config = config_of(folder, temporal=f"last:time={times}", fanouts=(-1,), evaluate="needed")
    data = load_hetero(config, folder)
    task = HeteroLinkTask(config, data)
    assert task.split.kind == "time"
    expected = torch.arange(ITEMS) // 50 + 1
    for name, edges in task.split.edges.items():
        assert torch.equal(task.split.times[name], expected[edges[1]]), name
    graph = split_edges_of_run(config, data).graph
    left = graph.edges(BUYS).edge_index().T.tolist()
    assert sorted(left) == sorted(task.split.edges["train"].T.tolist())
    first = min(int(task.split.times[name].min()) for name in ("valid", "test"))
    assert bool((expected[graph.edges(BOUGHT).edge_index()[0]] < first).all())
    for item in range(0, task.sampler.num_items, 50):
        batch = task.sampler.sample([item], 0)
        pair = task.sampler.edges[:, item].tolist()
        for each, is_flipped in ((BUYS, False), (BOUGHT, True)):
            rows = batch.nodes[each[0]][batch.row[each]], batch.nodes[each[2]][batch.col[each]]
            assert is_flipped or len(rows[0])
            found = set(zip(*(own.tolist() for own in rows), strict=True))
            assert tuple(pair[::-1] if is_flipped else pair) not in found
