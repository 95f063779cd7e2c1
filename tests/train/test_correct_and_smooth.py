"""Correct & Smooth computes what PyG's does, and reads only the labels of training nodes."""

import numpy as np
import pytest
import torch
from torch.nn import functional

import gcnzc
from gcnzc import Graph, prepare
from gcnzc.train.config import EvaluateConfig, TrainConfig
from gcnzc.train.correct_and_smooth import Propagation, correct, correct_and_smooth, smooth
from gcnzc.train.evaluation import evaluate
from gcnzc.train.run import train
from gcnzc.train.tasks.node import NodeTask

NODES, CLASSES = 80, 4


@pytest.fixture
def case():
    """A graph with isolated nodes, predictions, labels and training nodes."""
    generator = torch.Generator().manual_seed(0)
    sources, targets = torch.randint(NODES - 5, (2, 200), generator=generator)
    graph = Graph.from_edges(sources, targets, NODES, duplicates="remove")
    predicted = torch.randn(NODES, CLASSES, generator=generator).softmax(1)
    labels = torch.randint(CLASSES, (NODES,), generator=generator)
    nodes = torch.randperm(NODES, generator=generator)[:25]
    return graph, predicted, labels, nodes


@pytest.mark.parametrize("scale", [None, 2.0])
@pytest.mark.parametrize("steps", [1, 12])
def test_as_in_pyg(case, scale, steps):
    models = pytest.importorskip("torch_geometric.nn.models")
    graph, predicted, labels, nodes = case
    edges = torch.stack(
        [graph.indices.long(), torch.arange(NODES).repeat_interleave(graph.indptr.diff())]
    )
    options = {"autoscale": True} if scale is None else {"autoscale": False, "scale": scale}
    other = models.CorrectAndSmooth(steps, 0.8, steps, 0.6, **options)
    expected = other.correct(predicted.clone(), labels[nodes], nodes, edges)
    propagate, truth = Propagation(graph), functional.one_hot(labels[nodes], CLASSES).float()
    found = correct(propagate, predicted, truth, nodes, steps, 0.8, scale)
    torch.testing.assert_close(found, expected)
    expected = other.smooth(expected, labels[nodes], nodes, edges)
    torch.testing.assert_close(smooth(propagate, found, truth, nodes, steps, 0.6), expected)


def test_limits(case):
    graph, predicted, labels, nodes = case
    propagate, truth = Propagation(graph), functional.one_hot(labels[nodes], CLASSES).float()
    assert correct(propagate, predicted, truth, nodes, 0, 0.8) is predicted
    assert smooth(propagate, predicted, truth, nodes, 0, 0.8) is predicted
    # without weight of the neighbours, only the training nodes change
    kept = smooth(propagate, predicted, truth, nodes, 5, 0.0)
    torch.testing.assert_close(kept[nodes], truth)
    others = torch.ones(NODES, dtype=torch.bool)
    others[nodes] = False
    torch.testing.assert_close(kept[others], predicted[others])
    # of predictions without an error, nothing is corrected
    exact = predicted.clone()
    exact[nodes] = truth
    assert torch.equal(correct(propagate, exact, truth, nodes, 5, 0.8), exact)
    # an unknown label is neither an error nor replaces a prediction
    unknown = torch.full_like(truth, torch.nan)
    assert torch.equal(correct(propagate, predicted, unknown, nodes, 5, 0.8), predicted)
    torch.testing.assert_close(smooth(propagate, predicted, unknown, nodes, 5, 0.0), predicted)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on a graph whose labels follow its edges, and whose features say little."""
    folder = tmp_path_factory.mktemp("smooth")
    random = np.random.default_rng(0)
    count, classes = 600, 4
    labels = np.arange(count) % classes
    sources = random.integers(count, size=6000)
    targets = random.integers(count, size=6000)
    keep = (labels[sources] == labels[targets]) | (random.random(6000) < 0.1)
    features = np.eye(classes)[labels] * 0.3 + random.standard_normal((count, classes))
    order = random.permutation(count)
    splits = dict(zip(("train", "valid", "test"), np.split(order, 3), strict=True))
    prepare(
        folder / "graph",
        edges=np.stack([sources[keep], targets[keep]]),
        features=features.astype(np.float32),
        labels=labels,
        splits=splits,
        bidirected=True,
    )
    config = TrainConfig(data=folder / "graph", fanouts=(1,), epochs=2, hidden=8)
    train(config, folder / "run")
    return folder / "run"


def test_the_validation_split_alone_chooses(run, tmp_path, monkeypatch):
    plain = evaluate(EvaluateConfig(run=run))

    def evaluated(**options):
        own = {"correct_steps": 10, "smooth_steps": 10} | options
        words = ",".join(f"{name}={value}" for name, value in own.items())
        return evaluate(
            EvaluateConfig(
                run=run,
                postprocess=f"correct-and-smooth:{words}",
                predictions=tmp_path / "p.npy",
            )
        )

    line = evaluated()
    choice = line["correct_and_smooth"]
    assert choice["is_used"]
    assert choice["before"]["valid"] == plain["valid_accuracy"]
    assert line["valid_accuracy"] == choice["after"]["valid"] > plain["valid_accuracy"] + 0.02
    assert line["test_accuracy"] == choice["after"]["test"] > plain["test_accuracy"]
    assert "train_accuracy" not in line
    assert np.load(tmp_path / "p.npy").shape == (600, 4)
    # every pair of values by itself: the chosen one has the best validation score
    each = {}
    for pair in ((first, second) for first in (0.5, 0.95) for second in (0.5, 0.8)):
        alphas = {"correct_alpha": pair[0], "smooth_alpha": pair[1]}
        each[pair] = evaluated(**alphas)["valid_accuracy"]
    chosen = evaluated(correct_alpha="0.5,0.95", smooth_alpha="0.5,0.8")["correct_and_smooth"]
    pair = chosen["correct_alpha"], chosen["smooth_alpha"]
    assert each[pair] == max(each.values())
    # labels of other nodes than training nodes have no effect on the predictions
    data = gcnzc.load(run.parent / "graph")
    outputs = torch.randn(600, 4)
    task = NodeTask(TrainConfig(data=run.parent / "graph", fanouts=(1,)), data)
    options = {"correct_steps": 3, "correct_alpha": (0.8,), "smooth_alpha": (0.8,)}
    found = correct_and_smooth(outputs, data, task, lambda *_: None, **options)
    labels = data.labels.clone()
    labels[data.split["test"]] = (labels[data.split["test"]] + 1) % 4
    other = data.with_nodes(labels=labels)
    again = correct_and_smooth(outputs, other, task, lambda *_: None, **options)
    assert torch.equal(found.probabilities, again.probabilities)
    assert found.choice["after"]["test"] != again.choice["after"]["test"]
