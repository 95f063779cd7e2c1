"""Correct & Smooth: improve predictions of nodes by propagating errors and labels along edges.

The method of Huang et al., "Combining Label Propagation and Simple Models Out-performs Graph Neural
Networks", 2021 (https://arxiv.org/abs/2010.13993), as in PyG's `CorrectAndSmooth`. The errors on
the training nodes are propagated and added to the predictions; then the labels of the training
nodes replace their predictions, and are propagated as well. Only labels of training nodes are read;
the parameters are chosen by the score on the validation split.

Notation: N nodes, C classes or label columns, K training nodes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gcnzc.graph.dataset import Dataset
from gcnzc.graph.graph import Graph
from gcnzc.kernels.aggregate import aggregate
from gcnzc.models.metrics import score
from gcnzc.train.inference import Progress
from gcnzc.train.tasks.base import Scores, Task

# limit of the factor that scales a node's propagated errors: nodes far from all training nodes have
# tiny propagated errors, so their factor would explode
MAX_SCALE = 1000


@dataclass(frozen=True)
class CorrectedScores:
    """The result of Correct & Smooth.

    Attributes:
        probabilities: (N, C) float32 class probabilities, or those of label 1 in each label column;
            those of the model if their validation score is at least as good. Smoothed rows need not
            sum to 1.
        scores: of `probabilities` on the validation and test splits.
        choice: the chosen parameters, `is_used`, and the scores before and after.
    """

    probabilities: Tensor
    scores: Scores
    choice: dict[str, Any]


class Propagation:
    """Propagation along the edges of a graph, with symmetric normalization by in-degrees.

    Args:
        graph: a graph of N nodes, on the host; its self loops are ordinary edges.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        degrees = graph.in_degrees().float()
        self.norms = torch.where(degrees > 0, degrees.clamp(min=1).rsqrt(), 0.0)

    def __call__(
        self, start: Tensor, steps: int, alpha: float, fix: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Repeat `x = fix(alpha * A x + (1 - alpha) * start)`, where A is the normalized adjacency.

        Args:
            start: (N, C) float32, the first x.
            steps: number of propagations.
            alpha: weight of the neighbours, in [0, 1].
            fix: changes x in place after each propagation, and returns it.
        """
        x, kept, graph = start, (1 - alpha) * start, self.graph
        for _ in range(steps):
            x = aggregate(graph.indptr, graph.indices, x, self.norms, self.norms)
            x = fix(x.mul_(alpha).add_(kept))
        return x


def correct(
    propagate: Propagation,
    predicted: Tensor,
    labels: Tensor,
    nodes: Tensor,
    steps: int,
    alpha: float,
    scale: float | None = None,
) -> Tensor:
    """Add the propagated errors of the training nodes to predictions.

    Args:
        propagate: of the graph.
        predicted: (N, C) float32 probabilities.
        labels: (K, C) float32 of 0, 1 or NaN for unknown: the labels of the training nodes.
        nodes: (K,) int64 training nodes.
        steps: number of propagations; 0 returns `predicted`.
        alpha: weight of the neighbours.
        scale: factor of the propagated errors; the errors of training nodes are then kept in each
            propagation. None: each node's errors are scaled to the mean of the training nodes'.

    Returns:
        (N, C).
    """
    if steps == 0:
        return predicted
    error = torch.zeros_like(predicted)
    error[nodes] = torch.where(labels.isnan(), 0.0, labels - predicted[nodes])
    if scale is not None:

        def keep(x: Tensor) -> Tensor:
            x[nodes] = torch.where(labels.isnan(), x[nodes], error[nodes])
            return x

        return predicted + scale * propagate(error, steps, alpha, keep)
    smoothed = propagate(error, steps, alpha, lambda x: x.clamp_(-1.0, 1.0))
    mean = error[nodes].abs().sum() / len(nodes)
    factor = mean / smoothed.abs().sum(dim=1, keepdim=True)
    # 1 if the factor exceeds the limit or is NaN (0 / 0)
    factor = torch.where(factor <= MAX_SCALE, factor, 1.0)
    return predicted + factor * smoothed


def smooth(
    propagate: Propagation,
    predicted: Tensor,
    labels: Tensor,
    nodes: Tensor,
    steps: int,
    alpha: float,
) -> Tensor:
    """Propagate predictions, after those of the training nodes are replaced by their labels.

    Args:
        propagate: of the graph.
        predicted: (N, C) float32 probabilities.
        labels: (K, C) float32 of 0, 1 or NaN for unknown: the labels of the training nodes.
        nodes: (K,) int64 training nodes.
        steps: number of propagations; 0 returns `predicted`.
        alpha: weight of the neighbours.

    Returns:
        (N, C), between 0 and 1 after at least one step.
    """
    if steps == 0:
        return predicted
    start = predicted.clone()
    start[nodes] = torch.where(labels.isnan(), start[nodes], labels)
    return propagate(start, steps, alpha, lambda x: x.clamp_(0.0, 1.0))


def correct_and_smooth(
    logits: Tensor,
    data: Dataset,
    task: Task,
    progress: Progress,
    *,
    correct_steps: int = 50,
    correct_alpha: tuple[float, ...] = (0.5, 0.8, 0.95),
    smooth_steps: int = 50,
    smooth_alpha: tuple[float, ...] = (0.5, 0.8, 0.95),
    error_scale: float | None = None,
) -> CorrectedScores:
    """Apply Correct & Smooth to the logits of all nodes, with the best of the given parameters.

    Args:
        logits: (N, C) on the host.
        data: the graph, whose training labels are read.
        task: the task of node classification, whose metric selects the parameters by the score on
            the validation split.
        progress: called with (done, total) combinations of parameters.
        correct_steps: propagations of the errors; 0 does not correct.
        correct_alpha: weights of the neighbours in a propagation of the errors; all combinations
            with `smooth_alpha` are tried, and the best validation score wins.
        smooth_steps: propagations of the labels; 0 does not smooth.
        smooth_alpha: weights of the neighbours in a propagation of the labels.
        error_scale: factor of the propagated errors, which are then exact on the training nodes;
            none scales them to the mean error of the training nodes (autoscale).
    """
    logits, nodes = logits.float(), data.split["train"]
    predicted = logits.sigmoid() if data.labels.ndim == 2 else logits.softmax(dim=1)
    labels = data.labels[nodes]
    truth = labels.float() if labels.ndim == 2 else functional.one_hot(labels, logits.shape[1])
    truth, propagate = truth.float(), Propagation(data.graph)
    splits = {name: data.split[name] for name in ("valid", "test")}
    before = score(logits, data.labels, splits, task.metric)
    best: tuple[float, Tensor, Scores, dict[str, Any]] | None = None
    # without propagations, their weight has no effect
    first_alphas = correct_alpha[: None if correct_steps else 1]
    second_alphas = smooth_alpha[: None if smooth_steps else 1]
    pairs = [(first, second) for first in first_alphas for second in second_alphas]
    corrected, last = predicted, None
    for done, (first, second) in enumerate(pairs):
        if first != last:
            steps, scale = correct_steps, error_scale
            corrected = correct(propagate, predicted, truth, nodes, steps, first, scale)
            last = first
        rows = smooth(propagate, corrected, truth, nodes, smooth_steps, second)
        # the label of a label column is 1 above 0.5; of classes, only the order matters
        shifted = rows - 0.5 if data.labels.ndim == 2 else rows
        found = score(shifted, data.labels, splits, task.metric)
        valid = found[task.metric]["valid"]
        if best is None or valid > best[0]:
            best = valid, rows, found, {"correct_alpha": first, "smooth_alpha": second}
        progress(done + 1, len(pairs))
    assert best is not None, "the options have at least one value"
    valid, rows, found, chosen = best
    is_used = valid > before[task.metric]["valid"]
    choice = {
        "is_used": is_used,
        **chosen,
        "correct_steps": correct_steps,
        "smooth_steps": smooth_steps,
        "error_scale": error_scale,
        "before": before[task.metric],
        "after": found[task.metric],
    }
    if not is_used:
        rows, found = predicted, before
    return CorrectedScores(rows, found, choice)
