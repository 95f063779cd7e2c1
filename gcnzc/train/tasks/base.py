"""A training task: what a run predicts and how it is scored."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from gcnzc.exchange import Group, run
from gcnzc.exchange.sync import all_gather_scalar
from gcnzc.features.table import FeatureTable
from gcnzc.sampling.batch import Batch
from gcnzc.sampling.protocol import Samples

Scores: TypeAlias = dict[str, dict[str, float]]  # metric -> part -> value


Progress: TypeAlias = Callable[[int, int], object]


class Task(Protocol):
    """One thing to learn from a graph."""

    metric: str  # that the best model is chosen by
    seeds: Tensor  # (S,) of a loader
    labels: Tensor | None  # of all nodes, for a loader; None if the sampler gives them
    sampler: Samples
    has_accuracy: bool  # whether the largest logit is what is foretold
    best_accuracy: float | None  # what no model can pass, where it is known

    def model(self) -> nn.Module:
        """A new model, on the CPU, with weights from torch's generator."""

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """What the model gives for a minibatch, one row for each of its labels."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(): the mean over the minibatch."""

    def evaluate(
        self,
        model: nn.Module,
        table: FeatureTable,
        device: torch.device,
        progress: Progress,
        group: Group | None = None,
    ) -> Scores:
        """Score the model on the validation and test parts, with all neighbours.

        The workers of `group` divide the work, and get the same scores.
        """

    def outputs(
        self,
        model: nn.Module,
        table: FeatureTable,
        device: torch.device,
        progress: Progress,
        group: Group | None = None,
    ) -> tuple[Tensor, Scores]:
        """What the model gives for every node, (N, columns) on the CPU, and the scores of parts.

        For `group` see `evaluate`; the workers of one machine share what the model gives.
        """


def agreed_scores(scores: Scores, group: Group | None) -> Scores:
    """The scores of worker 0, on all workers.

    The rows are the same on all, but sums of them may not be, on processors of different kinds.
    """
    if group is None or group.world_size == 1:
        return scores
    values = [value for parts in scores.values() for value in parts.values()]
    agreed = iter([run(all_gather_scalar(float(value)), group)[0] for value in values])
    return {metric: {part: next(agreed) for part in parts} for metric, parts in scores.items()}
