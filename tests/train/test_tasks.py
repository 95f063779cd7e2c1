"""Link prediction: every model learns, no held-out edge leaks, random edges are not predicted."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from slow_cases import mark_slow
from training import lines

from gcnzc import load, prepare
from gcnzc.datasets.generate import Shape, make
from gcnzc.features.table import FeatureTable
from gcnzc.graph.edge_split import EdgeShares
from gcnzc.models.metrics import auc
from gcnzc.train.config import EvaluateConfig, TrainConfig
from gcnzc.train.evaluation import evaluate
from gcnzc.train.inference import inference
from gcnzc.train.models import build_model
from gcnzc.train.node_outputs import Evaluated
from gcnzc.train.run import train
from gcnzc.train.schema import schema_of
from gcnzc.train.tasks import build_task
from gcnzc.train.tasks.link import LinkTask
from gcnzc.train.tasks.node import NodeTask


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("links")
    make(folder / "raw", "planted", Shape(800, 5000, 24, 6), seed=3)
    prepare(folder / "raw", folder / "graph", edge_split=EdgeShares())
    return folder / "graph"


@pytest.fixture(scope="module")
def config(graph) -> TrainConfig:
    sizes = {"fanouts": (5, 5), "hidden": 16, "batch_size": 512}
    return TrainConfig(data=graph, task="link", **sizes, epochs=2, lr=0.01, dropout=0.2)


@pytest.mark.parametrize(
    ("model", "decoder"),
    # each model with one of the decoders, and one with both
    mark_slow(
        itertools.product(("sage", "gcn", "gat", "gatv2"), ("dot", "mlp")),
        lambda model, decoder: (model, decoder) not in (("sage", "dot"), ("gat", "mlp")),
    ),
)
def test_every_model_learns(model, decoder, config, tmp_path):
    norm = "none" if model in ("gat", "gatv2") else "batch"
    own = {"model": f"{model}:norm={norm}", "task": f"link:decoder={decoder}"}
    run = tmp_path / "run"
    line = train(config.replace(**own, epochs=6, dropout=0.0), run)
    assert line["metric"] == "auc"
    assert line["task"] == "link"
    # edges within six communities, and 24 noisy features
    assert line["test_auc"] > 0.65
    again = evaluate(EvaluateConfig(run=run, predictions=tmp_path / "rows.npy"))
    for part in ("valid", "test"):
        assert again[f"{part}_auc"] == pytest.approx(line[f"{part}_auc"], abs=1e-3)
    assert np.load(tmp_path / "rows.npy").shape == (800, 16)


def test_scores_equal_those_of_all_pairs_one_by_one(config):
    data = load(config.graph.data)
    task = LinkTask(config, data)
    model = build_model(config, data, schema_of(data))
    table = FeatureTable(data.features)
    found = task.evaluate(Evaluated(model, table, torch.device("cpu")))
    rows = inference(model.encoder, data.graph, table)
    model.eval()
    for part in ("valid", "test"):
        positives, negatives = (
            model.decoder(*rows[pairs.long()])
            for pairs in (data.links.edges[part], data.links.negatives[part])
        )
        expected = auc(positives.detach(), negatives.detach())
        assert found["auc"][part] == pytest.approx(expected, abs=1e-6)
    outputs, scores = task.outputs(Evaluated(model, table, torch.device("cpu")))
    torch.testing.assert_close(outputs, rows)
    assert scores["auc"]["test"] == pytest.approx(found["auc"]["test"], abs=1e-6)


@pytest.fixture(scope="module")
def chance(tmp_path_factory) -> Path:
    """A graph whose edges are drawn at random from all pairs, so that nothing predicts them."""
    random = np.random.default_rng(0)
    num_nodes, num_edges = 1000, 5000
    folder = tmp_path_factory.mktemp("chance")
    prepare(
        folder / "graph",
        edges=random.integers(0, num_nodes, (2, num_edges)),
        features=random.standard_normal((num_nodes, 16)).astype(np.float32),
        bidirected=True,
        edge_split=EdgeShares(0.1, 0.3),
    )
    return folder / "graph"


def test_random_edges_cannot_be_predicted(chance, config, tmp_path):
    config = config.replace(data=chance, epochs=10, model="sage:norm=batch", dropout=0.0)
    line = train(config, tmp_path / "run")
    judged = load(chance).links.edges["test"].shape[1]
    # the standard deviation of the area with as many pairs of either kind, if there is no signal
    deviation = (1 / (6 * judged)) ** 0.5
    assert abs(line["test_auc"] - 0.5) < 3 * deviation
    # nor those it was trained with, as long as their own edges are kept out
    assert lines(tmp_path / "run")[-1]["loss"] > 0.6


def test_a_graph_without_an_edge_split_is_rejected(config, graph, tmp_path):
    data = load(graph.parent / "raw")
    with pytest.raises(ValueError, match=r"edges of .* have no split(.|\n)*--task link` holds"):
        build_task(config, data)
    assert isinstance(build_task(config.replace(task="node"), data), NodeTask)
