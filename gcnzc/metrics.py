"""How good a model is: the loss it trains on, and the metrics that OGB's evaluators compute."""

import math
from collections.abc import Mapping

import torch
from sklearn.metrics import roc_auc_score
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
            areas.append(float(roc_auc_score(truth.numpy(), logits[known, task].numpy())))
    return sum(areas) / len(areas) if areas else math.nan
