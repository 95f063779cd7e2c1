"""Losses, and the metrics of OGB's evaluators for nodes and links."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

# metrics that order the nodes by one column of logits, and have no value for several classes; with
# the functions of scikit-learn
RANKING = {"rocauc": "roc_auc_score", "average_precision": "average_precision_score"}

F1 = ("f1_micro", "f1_macro")

# K of hits@K that are computed with mrr
HITS_K = (1, 3, 10)


def compute_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    label_smoothing: float = 0.0,
    class_weights: Tensor | None = None,
    known_per_seed: float | None = None,
) -> Tensor:
    """Return the mean loss over the seed nodes.

    Args:
        logits: (S, C).
        labels: (S,) int64 classes; or (S, C) of 0, 1 or NaN for unknown, C label columns.
        label_smoothing: see `torch.nn.functional.cross_entropy`; not used for (S, C) labels.
        class_weights: (C,) weights of the classes, whose mean over the training nodes should be 1:
            the sum of the weighted losses is divided by S, not by the sum of the weights, so that
            the mean over ranks equals the loss of one rank with all seeds. With label
            columns, weights of the label 1. None: all weights are 1.
        known_per_seed: for (S, C) labels, the mean number of known labels of a training node, K:
            the sum of the losses is divided by S K, so that the mean over ranks equals the loss of
            one rank with all seeds. None: it is divided by the number of known labels.

    Returns:
        () cross-entropy, or binary cross-entropy over the labels that are not NaN; 0 if all are.
    """
    if labels.ndim == 1:
        if class_weights is None:
            return functional.cross_entropy(logits, labels, label_smoothing=label_smoothing)
        total = functional.cross_entropy(
            logits, labels, class_weights, reduction="sum", label_smoothing=label_smoothing
        )
        return total / len(labels)
    known = ~torch.isnan(labels)
    targets = torch.where(known, labels, 0.0).to(logits.dtype)
    losses = functional.binary_cross_entropy_with_logits(
        logits, targets, reduction="none", pos_weight=class_weights
    )
    total = torch.where(known, losses, 0.0).sum()
    if known_per_seed is None:
        return total / known.sum().clamp(min=1)
    return total / (len(labels) * known_per_seed)


def score(
    logits: Tensor, labels: Tensor, splits: Mapping[str, Tensor], metric: str
) -> dict[str, dict[str, float]]:
    """Compute node-classification metrics of each split, as OGB's evaluators and scikit-learn do.

    Labels that are not known are left out of every metric. In a label column, the
    predicted label is 1 if the logit is above 0.

    Args:
        logits: (M, C) on the CPU.
        labels: (M,) int64 classes; or (M, T) of 0, 1 or NaN for unknown, T label columns.
        splits: row indices of `logits` by name of the split; empty splits are omitted from the
            result.
        metric: one of

            - `accuracy`, of classes;
            - `rocauc`, the area under the ROC curve: the mean over the label columns that have
              both labels, or of two classes;
            - `average_precision`, for the same labels, and the same mean;
            - `f1_micro`: the F1 score of all label columns together; for classes, the accuracy;
            - `f1_macro`: the mean of the F1 scores of the label columns that have a known label, or
              of the classes that are labels or predictions.

    Returns:
        Values in [0, 1] by metric and name of the split; NaN if no label column has both labels.
        The accuracy of (M,) labels is included with every metric.

    Raises:
        ValueError: the metric is unknown, or does not fit the labels; or it ranks nodes, and a
            value of `logits` is NaN or infinite.
    """
    if metric not in (*RANKING, *F1) and (metric != "accuracy" or labels.ndim == 2):
        raise ValueError(
            f"the metric {metric} does not fit labels of shape {tuple(labels.shape)}\n\n"
            f"hint: use {', '.join((*RANKING, *F1))}, or accuracy for classes"
        )
    splits = {name: rows for name, rows in splits.items() if len(rows)}
    result = {}
    if labels.ndim == 1:
        is_correct = (logits.argmax(dim=1) == labels).double()
        result["accuracy"] = {name: is_correct[rows].mean().item() for name, rows in splits.items()}
    if metric in RANKING:
        if labels.ndim == 1:
            logits, labels = logits[:, 1:2] - logits[:, 0:1], labels[:, None].float()
        result[metric] = {
            name: _mean_over_columns(logits[rows], labels[rows], metric)
            for name, rows in splits.items()
        }
    elif metric in F1:
        result[metric] = {
            name: _f1(logits[rows], labels[rows], metric) for name, rows in splits.items()
        }
    return result


def _mean_over_columns(logits: Tensor, labels: Tensor, metric: str) -> float:
    # OGB excludes columns whose labels are all equal from the mean, since they have no ranking
    values = []
    for column in range(labels.shape[1]):
        known = ~torch.isnan(labels[:, column])
        truth = labels[known, column]
        if len(truth) and truth.min() != truth.max():
            check_rankable("logits", logits[known, column])
            values.append(_measure(RANKING[metric], truth, logits[known, column]))
    return sum(values) / len(values) if values else math.nan


def _f1(logits: Tensor, labels: Tensor, metric: str) -> float:
    """Return the F1 score 2 TP / (2 TP + FP + FN), of all columns together or as their mean."""
    if labels.ndim == 1:
        predicted = functional.one_hot(logits.argmax(dim=1), logits.shape[1]).bool()
        truth = functional.one_hot(labels, logits.shape[1]).bool()
        is_counted = torch.ones_like(truth)
        has_score = (predicted | truth).any(dim=0)
    else:
        is_counted = ~torch.isnan(labels)
        predicted, truth = (logits > 0) & is_counted, labels == 1
        has_score = is_counted.any(dim=0)
    both = (predicted & truth).sum(dim=0).double()
    either = (predicted.sum(dim=0) + truth.sum(dim=0)).double()
    if metric == "f1_micro":
        both, either = both.sum(), either.sum()
    else:
        both, either = both[has_score], either[has_score]
    # as in scikit-learn, a column without positive labels and predictions has the score 0
    return (2 * both / either.clamp(min=1)).mean().item()


def _measure(name: str, truth: Tensor, scores: Tensor) -> float:
    """Return a metric of scikit-learn, given the name of its function."""
    # importing scikit-learn takes a second, and most runs only compute the accuracy
    from sklearn import metrics

    return float(getattr(metrics, name)(truth.numpy(), scores.numpy()))


def check_rankable(name: str, scores: Tensor) -> None:
    """Raise a ValueError if a score is NaN or infinite."""
    count = int((~torch.isfinite(scores)).sum())
    if count:
        raise ValueError(
            f"{name}: {count:,} of {scores.numel():,} values are NaN or infinite, and have no rank"
            "\n\nhint: has training diverged? A smaller learning rate or clipped gradients may help"
        )


def auc(positives: Tensor, negatives: Tensor) -> float:
    """Return the area under the ROC curve of scored pairs, as OGB's link evaluator does.

    Args:
        positives: (P,) scores of the edges, on the CPU.
        negatives: (Q,), or of any shape, scores of the negative pairs.
    """
    negatives = negatives.flatten()
    truth = torch.cat([torch.ones(len(positives)), torch.zeros(len(negatives))])
    return _measure("roc_auc_score", truth, torch.cat([positives, negatives]))


def hits(positives: Tensor, negatives: Tensor, k: int) -> float:
    """Return Hits@K as OGB does: the fraction of edges that score above the K-th best negative.

    Args:
        positives: (P,) scores of the edges.
        negatives: (Q,) scores of the negative pairs; with fewer than K, all edges are hits.
        k: K, at least 1.
    """
    if len(negatives) < k:
        return 1.0
    bound = negatives.topk(k).values[-1]
    return int((positives > bound).sum()) / len(positives)


def ranks(positives: Tensor, negatives: Tensor) -> Tensor:
    """Return the (P,) float32 rank of each edge among its negatives, from 1.

    With ties, it is the mean of the best and the worst possible rank.

    Args:
        positives: (P,) scores of the edges.
        negatives: (P, K) scores of the negatives of each edge.
    """
    return count_better(negatives, positives).float() + 1


def count_better(scores: Tensor, own: Tensor) -> Tensor:
    """Return (P,) float64: the number of better scores plus half the number of equal scores.

    Args:
        scores: (P, K).
        own: (P,) scores with which each row is compared.
    """
    better = (scores > own[:, None]).sum(dim=1)
    no_worse = (scores >= own[:, None]).sum(dim=1)
    return 0.5 * (better + no_worse).double()


def score_pairs(positives: Tensor, negatives: Tensor, metric: str) -> dict[str, float]:
    """Compute link-prediction metrics of one split, as OGB's link evaluators do.

    Args:
        positives: (P,) scores of the edges, on the CPU.
        negatives: (Q,) scores of negative pairs; or (P, K), a row of negatives for each edge.
        metric: `auc`, `hits@K` for a number K, or `mrr`, which needs a row for each edge.

    Returns:
        Values in [0, 1] by metric. `auc` is always included; `mrr` also includes `hits@1`, `hits@3`
        and `hits@10`, the fractions of edges with at most that rank.

    Raises:
        ValueError: the metric is unknown, or does not match the shape of the negatives; there are
            no positives or no negatives; or a score is NaN or infinite.
    """
    if not len(positives) or not negatives.numel():
        raise ValueError("a score needs at least one positive and one negative pair")
    k = metric.removeprefix("hits@")
    is_hits = k != metric and k.isdecimal() and int(k) > 0
    check_rankable("positives", positives)
    check_rankable("negatives", negatives)
    result = {"auc": auc(positives, negatives)}
    if is_hits:
        result[metric] = hits(positives, negatives.flatten(), int(k))
    elif metric == "mrr" and negatives.ndim == 2:
        positions = ranks(positives, negatives)
        result["mrr"] = (1 / positions).mean().item()
        result |= {f"hits@{k}": (positions <= k).float().mean().item() for k in HITS_K}
    elif metric != "auc":
        raise ValueError(
            f"the metric {metric} does not fit negatives of shape {tuple(negatives.shape)}\n\n"
            "hint: use auc, hits@K such as hits@50, or mrr with a row of negatives for each edge"
        )
    return result
