"""The protocol of training tasks: seeds, model, loss and evaluation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn

from gcnzc.exchange import Group, run
from gcnzc.exchange.sync import all_gather_scalar
from gcnzc.train.config import TrainConfig
from gcnzc.train.evaluator import Evaluator
from gcnzc.train.node_outputs import Evaluated

Scores: TypeAlias = dict[str, dict[str, float]]  # metric -> split -> value

# The validation split selects the best model, and the test split is reported for it. The training
# split is not scored after an epoch, as its nodes would have to be computed as well.
EVALUATED = ("valid", "test")


class Task(Protocol):
    """A training task: node classification or link prediction.

    The tables and minibatches are those of the task's graphs: a `FeatureTable` and `Batch`, or
    `TypedTables` and `HeteroBatch`.
    """

    metric: str  # selects the best model, by its value on the validation split
    seeds: Tensor  # (S,) int64 training nodes, or numbers of training edges
    labels: Tensor | None  # of all nodes; None if the sampler returns the labels
    sampler: Any  # a `SamplerProtocol`, or a sampler of heterogeneous graphs
    has_accuracy: bool  # whether the largest logit is the predicted class
    best_accuracy: float | None  # the best possible accuracy, if it is known
    evaluator: Evaluator  # computes the outputs of the evaluated nodes

    def logits(self, model: nn.Module, batch: Any) -> Tensor:
        """Compute the logits of a minibatch.

        Args:
            model: the model of the run, on the device of the minibatch.
            batch: S seed nodes, or P pairs of nodes in link prediction.

        Returns:
            (S, C) of nodes, or (P,) of pairs.
        """

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean loss over the minibatch; a call follows each call of `logits`.

        Args:
            logits: (S, C) or (P,) floating point, the result of `logits`.
            labels: (S,) int64 classes, (S, C) of 0, 1 or NaN for unknown; or (P,) of pairs, 0 or 1.

        Returns:
            () on the device of the logits.
        """

    def evaluate(self, of: Evaluated, splits: Sequence[str] = EVALUATED) -> Scores:
        """Score the model on splits, by the method of `evaluator`.

        All workers return the same scores. Link prediction has scores of the validation and test
        splits only.
        """

    def choose_evaluation(
        self, of: Evaluated, say: Callable[[str], object], splits: Sequence[str] = EVALUATED
    ) -> None:
        """Choose the method of `evaluator` for splits if it is "auto", and say why.

        A collective call, before the first call of `evaluate`.
        """

    def outputs(self, of: Evaluated) -> tuple[Tensor, Scores]:
        """Compute the outputs of the model for all nodes, and the scores of the splits.

        Returns:
            (N, columns) on the CPU, in memory that the workers of a machine share; and the scores.
        """


def build_evaluator(config: TrainConfig) -> Evaluator:
    """Build the evaluator of a run."""
    chosen = config.training.evaluate
    evaluator: Evaluator = chosen.load()(config.loading, **chosen.given)
    return evaluator


def broadcast_scores(scores: Scores, group: Group) -> Scores:
    """Broadcast the scores of worker 0 to all workers.

    The outputs are the same on all workers, but sums of them may differ between processor models.
    """
    if group.world_size == 1:
        return scores
    values = [value for by_split in scores.values() for value in by_split.values()]
    first = iter([run(all_gather_scalar(float(value)), group)[0] for value in values])
    return {
        metric: {split: next(first) for split in by_split} for metric, by_split in scores.items()
    }


def flatten_scores(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Flatten scores by metric and split to keys such as `valid_accuracy`."""
    return {
        f"{split}_{metric}": value
        for metric, values in scores.items()
        for split, value in values.items()
    }
