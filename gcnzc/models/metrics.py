"""Losses, and the metrics of OGB's evaluators."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean loss over the seeds.

    Args:
        logits: (S, C).
        labels: (S,) int64 classes; or (S, C), each 0, 1 or NaN, one task a column.

    Returns:
        (): cross-entropy, or binary cross-entropy over the labels that are not NaN.
    """
    if labels.ndim == 1:
        return functional.cross_entropy(logits, labels)
    known = ~torch.isnan(labels)
    targets = torch.where(known, labels, 0.0).to(logits.dtype)
    losses = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return torch.where(known, losses, 0.0).sum() / known.sum().clamp(min=1)


def score(
    logits: Tensor, labels: Tensor, parts: Mapping[str, Tensor], metric: str
) -> dict[str, dict[str, float]]:
    """Each metric of each part, as OGB's evaluators compute them.

    Args:
        logits: (M, C) on the CPU.
        labels: (M,) int64, or (M, T) with NaN for unknown, of the same nodes.
        parts: name -> rows of `logits`; an empty part gets no value.
        metric: `accuracy`, or `rocauc`, the mean over the tasks.

    Returns:
        Metric -> part -> value in [0, 1]. There is an `accuracy` beside `rocauc` where a node has
        one class.

    Raises:
        ValueError: the metric is `rocauc`, and a value of `logits` is NaN or infinite.
    """
    parts = {name: rows for name, rows in parts.items() if len(rows)}
    result = {}
    if labels.ndim == 1:
        right = (logits.argmax(dim=1) == labels).double()
        result["accuracy"] = {name: right[rows].mean().item() for name, rows in parts.items()}
    if metric == "rocauc":
        if labels.ndim == 1:
            logits, labels = logits[:, 1:2] - logits[:, 0:1], labels[:, None].float()
        result["rocauc"] = {n: _rocauc(logits[rows], labels[rows]) for n, rows in parts.items()}
    return result


def _rocauc(logits: Tensor, labels: Tensor) -> float:
    # a task without both outcomes has no curve, and OGB leaves it out of the mean
    areas = []
    for task in range(labels.shape[1]):
        known = ~torch.isnan(labels[:, task])
        truth = labels[known, task]
        if truth.min() != truth.max():
            _check_finite("logits", logits[known, task])
            areas.append(_roc_area(truth, logits[known, task]))
    return sum(areas) / len(areas) if areas else math.nan


def _roc_area(truth: Tensor, scores: Tensor) -> float:
    # scikit-learn takes a second to import, and most runs need accuracy alone
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(truth.numpy(), scores.numpy()))


def _check_finite(name: str, scores: Tensor) -> None:
    count = int((~torch.isfinite(scores)).sum())
    if count:
        raise ValueError(
            f"{name}: {count:,} of {scores.numel():,} values are NaN or infinite, and have no rank"
            "\n\nhint: has training diverged? A smaller learning rate or clipped gradients may help"
        )


def auc(positives: Tensor, negatives: Tensor) -> float:
    """Area under the ROC curve of pairs' scores, as OGB's link evaluator computes it.

    Args:
        positives: (P,) scores of the edges, on the CPU.
        negatives: (Q,), or of any shape, those of the pairs that are none.
    """
    negatives = negatives.flatten()
    truth = torch.cat([torch.ones(len(positives)), torch.zeros(len(negatives))])
    return _roc_area(truth, torch.cat([positives, negatives]))


def hits(positives: Tensor, negatives: Tensor, k: int) -> float:
    """Hits@K as OGB computes it: the share of edges above the K-th best of all negatives.

    Args:
        positives: (P,) scores of the edges.
        negatives: (Q,) those of the pairs that are none; with fewer than K of them all are hits.
        k: K, 1 or more.
    """
    if len(negatives) < k:
        return 1.0
    bound = negatives.topk(k).values[-1]
    return int((positives > bound).sum()) / len(positives)


def ranks(positives: Tensor, negatives: Tensor) -> Tensor:
    """(P,) float32: the place of each edge among its own negatives, counted from 1.

    Among equal scores it is the mean of the first and the last place.

    Args:
        positives: (P,) scores of the edges.
        negatives: (P, K) those of the pairs that each is set beside.
    """
    better = (negatives > positives[:, None]).sum(dim=1)
    no_worse = (negatives >= positives[:, None]).sum(dim=1)
    return 0.5 * (better + no_worse).float() + 1


def score_pairs(positives: Tensor, negatives: Tensor, metric: str) -> dict[str, float]:
    """The metrics of one part's pairs, as OGB's link evaluators compute them.

    Args:
        positives: (P,) scores of the edges, on the CPU.
        negatives: (Q,) scores of pairs that are no edges; or (P, K), a row for each edge.
        metric: `auc`, `hits@K` for a number K, or `mrr`, which takes a row for each edge.

    Returns:
        Metric -> value in [0, 1]. `auc` is always there; beside `mrr` there are `hits@1`, `hits@3`
        and `hits@10`, the shares of edges with no higher rank.

    Raises:
        ValueError: the metric is not known, or does not fit the negatives; or a score is NaN or
            infinite.
    """
    _check_finite("positives", positives)
    _check_finite("negatives", negatives)
    result = {"auc": auc(positives, negatives)}
    if metric.startswith("hits@"):
        result[metric] = hits(positives, negatives.flatten(), int(metric.removeprefix("hits@")))
    elif metric == "mrr" and negatives.ndim == 2:
        places = ranks(positives, negatives)
        result["mrr"] = (1 / places).mean().item()
        result |= {f"hits@{k}": (places <= k).float().mean().item() for k in (1, 3, 10)}
    elif metric != "auc":
        raise ValueError(
            f"the metric {metric} for negatives of shape {tuple(negatives.shape)}\n\n"
            "hint: auc, hits@K such as hits@50, or mrr with a row of negatives for each edge"
        )
    return result
