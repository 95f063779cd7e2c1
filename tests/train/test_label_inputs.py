"""Labels as features: no prediction in the loss depends on the label of the same node."""

import numpy as np
import pytest
import torch

from gcnzc import Loader, load, prepare
from gcnzc.train.config import EvaluateConfig, TrainConfig
from gcnzc.train.evaluation import evaluate
from gcnzc.train.models import build_model
from gcnzc.train.prediction import predict
from gcnzc.train.run import train
from gcnzc.train.schema import schema_of
from gcnzc.train.tasks import build_task

LABELS = "node:label_inputs=0.5"


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    folder = tmp_path_factory.mktemp("label_inputs")
    random = np.random.default_rng(0)
    labels, order = np.arange(600) % 3, random.permutation(600)
    sources, targets = random.integers(600, size=(2, 4000))
    is_edge = (labels[sources] == labels[targets]) | (random.random(4000) < 0.1)
    prepare(
        folder / "graph",
        edges=np.stack([sources[is_edge], targets[is_edge]]),
        features=random.standard_normal((600, 4)).astype(np.float32),
        labels=labels,
        splits={"train": order[:300], "valid": order[300:450], "test": order[450:]},
        bidirected=True,
    )
    return folder / "graph"


@pytest.fixture(scope="module")
def config(graph):
    sizes = {"fanouts": (-1, -1), "hidden": 16, "batch_size": 64, "threads": 1}
    return TrainConfig(data=graph, **sizes, epochs=3, lr=0.01, dropout=0.0, task=LABELS)


def losses(config, data, seed, permuted=None):
    """The logits of the predicted seeds of a minibatch, which seeds they are, and the inputs."""
    if permuted is not None:
        labels = data.labels.clone()
        labels[permuted] = (labels[permuted] + 1) % data.num_classes
        data = data.with_nodes(labels=labels)
    task = build_task(config, data)
    torch.manual_seed(0)
    model = build_model(config, data, schema_of(data)).train()
    loader = Loader(
        data.graph, data.table, task.seeds, [-1, -1], 50, labels=data.labels, threads=1, seed=1
    )
    batch = next(iter(loader))
    torch.manual_seed(seed)
    is_selected = task.label_inputs.select(batch.nodes, 50, config.graph.label_inputs)
    torch.manual_seed(seed)
    logits = task.logits(model, batch)
    loss = task.loss(logits, batch.y)
    is_predicted = ~is_selected[:50]
    return logits[is_predicted], batch.nodes[:50][is_predicted], batch.nodes[is_selected], loss


def test_a_predicted_node_never_sees_its_own_label(config):
    data = load(config.graph.data)
    logits, predicted, inputs, loss = losses(config, data, 0)
    assert 10 < len(predicted) < 40
    is_train = torch.zeros(data.graph.num_nodes, dtype=torch.bool)
    is_train[data.split["train"]] = True
    assert is_train[inputs].all()
    assert not set(predicted.tolist()) & set(inputs.tolist())
    # other labels of the predicted nodes change the loss, and not a bit of the logits
    same, _, _, other_loss = losses(config, data, 0, permuted=predicted)
    assert torch.equal(same, logits)
    assert other_loss != loss
    # nor do labels of validation and test nodes
    held_out = torch.cat([data.split["valid"], data.split["test"]])
    same, *_ = losses(config, data, 0, permuted=held_out)
    assert torch.equal(same, logits)
    # the labels of the inputs do
    changed, *_ = losses(config, data, 0, permuted=inputs)
    assert not torch.equal(changed, logits)


def test_the_loss_is_the_mean_over_the_predicted_seeds(config):
    data = load(config.graph.data)
    logits, predicted, _, loss = losses(config, data, 3)
    expected = torch.nn.functional.cross_entropy(logits, data.labels[predicted])
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("model", ["sage", "gat"])
def test_label_inputs_help_and_are_used_by_all_commands(model, config, tmp_path):
    base = config.replace(model=model, epochs=8, lr=0.05, task="node")
    plain = train(base, tmp_path / "plain")
    found = train(base.replace(task=LABELS), tmp_path / "labels")
    # the labels of neighbours are informative, and the features are noise
    assert found["test_accuracy"] > plain["test_accuracy"] + 0.1
    again = evaluate(EvaluateConfig(run=tmp_path / "labels"))
    assert again["test_accuracy"] == found["test_accuracy"]
    assert "train_accuracy" not in again
    data = load(config.graph.data)
    predictions = predict(tmp_path / "labels", nodes="test")
    right = (predictions.classes == data.labels[data.split["test"]].numpy()).mean()
    assert right == pytest.approx(found["test_accuracy"])


def test_columns_of_labels_train_with_every_metric(tmp_path):
    random = np.random.default_rng(0)
    count, columns = 400, 3
    features = random.standard_normal((count, 6)).astype(np.float32)
    labels = (features[:, :columns] + 0.3 * random.standard_normal((count, columns)) > 0).astype(
        np.float32
    )
    labels[random.random((count, columns)) < 0.2] = np.nan
    order = random.permutation(count)
    prepare(
        tmp_path / "graph",
        edges=random.integers(count, size=(2, 1500)),
        features=features,
        labels=labels,
        splits={"train": order[:200], "valid": order[200:300], "test": order[300:]},
        bidirected=True,
    )
    config = TrainConfig(
        data=tmp_path / "graph", fanouts=(5,), epochs=30, lr=0.05, evaluate_every=30
    )
    with pytest.raises(ValueError, match="3 columns of labels, and accuracy as metric"):
        train(config.replace(task="node:metric=accuracy"), tmp_path / "accuracy")
    line = train(config.replace(task="node:metric=f1_micro,label_inputs=0.3"), tmp_path / "run")
    assert line["metric"] == "f1_micro"
    assert line["test_f1_micro"] > 0.75
    for metric in ("rocauc", "average_precision", "f1_macro"):
        other = evaluate(EvaluateConfig(run=tmp_path / "run", metric=metric))
        assert other["metric"] == metric
        assert other[f"test_{metric}"] > 0.75
    smoothed = evaluate(EvaluateConfig(run=tmp_path / "run", postprocess="correct-and-smooth"))
    assert smoothed["valid_f1_micro"] >= line["valid_f1_micro"]
    found = predict(tmp_path / "run", nodes="test")
    assert found.classes.shape == (100, 3)
    assert np.array_equal(found.classes, found.probabilities > 0.5)


@pytest.mark.parametrize("batch_size", [64, "all"])
def test_a_share_that_leaves_no_node_to_predict_is_refused(batch_size, config, tmp_path):
    config = config.replace(batch_size=batch_size, task="node:label_inputs=0.999")
    with pytest.raises(ValueError, match=r"label_inputs=0\.999 leaves less than one of the"):
        train(config, tmp_path / "run")
