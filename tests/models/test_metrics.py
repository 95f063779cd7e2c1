"""The metrics equal those of OGB's evaluators."""

import itertools
import sys
import types
import warnings

import numpy as np
import pytest
import sklearn.metrics
import torch
from torch.nn import functional

from gcnzc.models.metrics import compute_loss, score, score_pairs


@pytest.fixture(scope="module")
def evaluate():
    """The results of OGB's evaluator of a dataset."""
    # ogb looks for its newest version on the network while it is imported
    quiet = types.ModuleType("outdated")
    quiet.check_outdated = lambda *_: (False, "")
    quiet.OutdatedPackageWarning = UserWarning
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setitem(sys.modules, "outdated", quiet)
        warnings.simplefilter("ignore")
        from ogb import linkproppred, nodeproppred

    def run(name, **given):
        of = linkproppred if name.startswith("ogbl") else nodeproppred
        return of.Evaluator(name).eval(given)

    return run


def test_accuracy_equals_ogb(evaluate):
    logits, labels = torch.randn(500, 7), torch.randint(7, (500,))
    splits = {"valid": torch.arange(100), "test": torch.arange(100, 500), "none": torch.arange(0)}
    mine = score(logits, labels, splits, "accuracy")
    assert set(mine) == {"accuracy"}
    assert set(mine["accuracy"]) == {"valid", "test"}
    for name in ("valid", "test"):
        rows = splits[name]
        given = {"y_true": labels[rows, None], "y_pred": logits[rows].argmax(1, keepdim=True)}
        assert mine["accuracy"][name] == pytest.approx(evaluate("ogbn-arxiv", **given)["acc"])


def test_rocauc_of_many_label_columns_equals_ogb(evaluate):
    logits = torch.randn(300, 112)
    labels = torch.randint(2, (300, 112)).float()
    labels[:, 5] = 1  # a task with one outcome counts for nothing
    mine = score(logits, labels, {"test": torch.arange(300)}, "rocauc")
    expected = evaluate("ogbn-proteins", y_true=labels.numpy(), y_pred=logits.numpy())
    assert mine == {"rocauc": {"test": pytest.approx(expected["rocauc"])}}


def test_rocauc_of_two_classes_orders_by_their_difference():
    labels = torch.tensor([0, 0, 1, 1])
    logits = torch.tensor([[1.0, 0.0], [5.0, 6.5], [3.0, 4.0], [0.0, 2.0]])
    mine = score(logits, labels, {"test": torch.arange(4)}, "rocauc")
    # differences -1, 1.5 for class 0 and 1, 2 for class 1: three of four pairs in order
    assert mine == {"accuracy": {"test": 0.75}, "rocauc": {"test": 0.75}}


def test_unknown_labels_are_ignored():
    logits = torch.randn(6, 3, requires_grad=True)
    labels = torch.randint(2, (6, 3)).float()
    labels[2], labels[0, 1] = np.nan, np.nan
    loss = compute_loss(logits, labels)
    known = ~torch.isnan(labels)
    expected = functional.binary_cross_entropy_with_logits(logits[known], labels[known])
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert (logits.grad[~known] == 0).all()
    assert (logits.grad[known] != 0).all()


def test_the_loss_is_the_cross_entropy_of_classes():
    logits, labels = torch.randn(5, 4), torch.tensor([0, 3, 1, 1, 2])
    expected = -logits.log_softmax(1)[torch.arange(5), labels].mean()
    torch.testing.assert_close(compute_loss(logits, labels), expected)


HITS = {"ogbl-collab": "hits@50", "ogbl-ppa": "hits@100", "ogbl-ddi": "hits@20"}


@pytest.mark.parametrize("has_equal", [False, True])
def test_metrics_of_pairs_equal_ogb(has_equal, evaluate):
    generator = torch.Generator().manual_seed(0)
    positives = torch.randn(300, generator=generator) + 0.5
    negatives = torch.randn(300, 40, generator=generator)
    if has_equal:
        positives, negatives = positives.round(), negatives.round()
    flat = negatives.flatten()
    for (name, metric), some in itertools.product(HITS.items(), (flat, flat[:15], flat[:20])):
        expected = evaluate(name, y_pred_pos=positives, y_pred_neg=some)
        assert score_pairs(positives, some, metric)[metric] == expected[metric]
    expected = evaluate("ogbl-citation2", y_pred_pos=positives, y_pred_neg=negatives)
    mine = score_pairs(positives, negatives, "mrr")
    assert set(mine) == {"auc", "mrr", "hits@1", "hits@3", "hits@10"}
    for name in mine.keys() - {"auc"}:
        assert mine[name] == pytest.approx(expected[f"{name}_list"].mean().item(), abs=1e-7)
    expected = evaluate("ogbl-vessel", y_pred_pos=positives, y_pred_neg=flat)["rocauc"]
    assert score_pairs(positives, negatives, "auc") == {"auc": pytest.approx(expected)}


@pytest.mark.parametrize("metric", ["auc", "hits@3", "mrr"])
def test_scores_that_are_not_finite_have_no_rank(metric):
    finite = torch.rand(5), torch.rand(5, 4)
    for number, name in enumerate(("positives", "negatives")):
        for value in (torch.nan, torch.inf):
            scores = [part.clone() for part in finite]
            scores[number].view(-1)[1] = value
            total = scores[number].numel()
            with pytest.raises(ValueError, match=rf"{name}: 1 of {total} values are(?s:.*)hint: "):
                score_pairs(*scores, metric)
    with pytest.raises(ValueError, match="logits: 2 of 2 values are NaN"):
        score(torch.full((2, 2), torch.nan), torch.tensor([0, 1]), {"a": torch.arange(2)}, "rocauc")


def test_losses_of_shares_have_the_mean_of_the_whole_with_unknown_labels():
    logits, labels = torch.randn(50, 3), torch.randint(2, (50, 3)).float()
    labels[torch.rand(50, 3) < 0.3] = torch.nan
    options = {"class_weights": torch.tensor([1.0, 2.0, 0.5]), "known_per_seed": 2.1}
    whole = compute_loss(logits, labels, **options)
    shares = [slice(0, 17), slice(17, 50)]
    losses = [compute_loss(logits[rows], labels[rows], **options) for rows in shares]
    mean = (17 * losses[0] + 33 * losses[1]) / 50
    torch.testing.assert_close(mean, whole)
    # without unknown labels, it is torch's mean over all elements
    labels = torch.randint(2, (50, 3)).float()
    expected = functional.binary_cross_entropy_with_logits(logits, labels)
    torch.testing.assert_close(compute_loss(logits, labels, known_per_seed=3.0), expected)


def test_metrics_that_are_unknown_or_do_not_fit_are_rejected():
    rows = {"f1": 2, "mrr": 1, "hits@0": 1, "hits@x": 1, "hits@-1": 2}
    for metric, dimensions in rows.items():
        with pytest.raises(ValueError, match=rf"{metric}(?s:.*)hint: "):
            score_pairs(torch.randn(3), torch.randn((3, 4)[:dimensions]), metric)
    for shapes in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="a score needs at least one positive"):
            score_pairs(*map(torch.randn, shapes), "hits@1")
    logits = torch.randn(4, 3)
    for labels, metric in ((torch.arange(4) % 3, "f1"), (torch.ones(4, 3), "accuracy")):
        with pytest.raises(ValueError, match=rf"the metric {metric} does not fit(?s:.*)hint: use"):
            score(logits, labels, {"test": torch.arange(4)}, metric)


@pytest.mark.parametrize("metric", ["f1_micro", "f1_macro", "average_precision"])
def test_metrics_of_label_columns_equal_scikit_learn(metric):
    torch.manual_seed(1)
    logits, labels = torch.randn(300, 6), torch.randint(2, (300, 6)).float()
    rows = {"test": torch.arange(300)}
    measure = {
        "f1_micro": lambda truth, row: sklearn.metrics.f1_score(truth, row > 0, average="micro"),
        "f1_macro": lambda truth, row: sklearn.metrics.f1_score(truth, row > 0, average="macro"),
        "average_precision": sklearn.metrics.average_precision_score,
    }[metric]
    expected = measure(labels.numpy(), logits.numpy())
    assert score(logits, labels, rows, metric) == {metric: {"test": pytest.approx(expected)}}
    # unknown labels are left out, as if their nodes were not there, and a task without labels too
    labels[:40, 0], labels[:, 5] = torch.nan, torch.nan
    found = score(logits, labels, rows, metric)[metric]["test"]
    if metric == "f1_micro":
        known = ~labels.isnan()
        expected = sklearn.metrics.f1_score(labels[known].numpy(), (logits[known] > 0).numpy())
    else:
        of_task = [measure(labels[40:, :1].numpy(), logits[40:, :1].numpy())]
        of_task += [measure(labels[:, [i]].numpy(), logits[:, [i]].numpy()) for i in range(1, 5)]
        if metric == "f1_macro":
            of_task = [
                sklearn.metrics.f1_score(labels[known, i].numpy(), (logits[known, i] > 0).numpy())
                for i in range(5)
                if len(known := (~labels[:, i].isnan()).nonzero().flatten())
            ]
        expected = np.mean(of_task)
    assert found == pytest.approx(expected)


def test_f1_of_classes_equals_scikit_learn():
    torch.manual_seed(1)
    logits, labels = torch.randn(200, 5), torch.randint(4, (200,))
    logits[:, 4] -= 100  # a class that is neither a label nor a prediction
    rows = {"test": torch.arange(200)}
    predicted = logits.argmax(1).numpy()
    for metric, average in (("f1_micro", "micro"), ("f1_macro", "macro")):
        expected = sklearn.metrics.f1_score(labels.numpy(), predicted, average=average)
        found = score(logits, labels, rows, metric)
        assert found[metric]["test"] == pytest.approx(expected)
    assert score(logits, labels, rows, "f1_micro")["accuracy"] == found["accuracy"]
    two = score(logits[:, :2], labels % 2, rows, "average_precision")["average_precision"]
    difference = (logits[:, 1] - logits[:, 0]).numpy()
    expected = sklearn.metrics.average_precision_score((labels % 2).numpy(), difference)
    assert two["test"] == pytest.approx(expected)
