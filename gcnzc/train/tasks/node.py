"""The task of node classification."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gcnzc.datasets.source import SPLITS
from gcnzc.graph.dataset import Dataset
from gcnzc.loader.full_batch import FullBatchLoader
from gcnzc.models.metrics import RANKING, compute_loss, score
from gcnzc.sampling.batch import Batch
from gcnzc.train.build import build_sampler
from gcnzc.train.config import Metric, TrainConfig
from gcnzc.train.full_batch import compute_logits
from gcnzc.train.label_inputs import LabelInputs, append_labels
from gcnzc.train.node_outputs import Evaluated
from gcnzc.train.tasks.base import EVALUATED, Scores, broadcast_scores, build_evaluator


def balanced_weights(labels: Tensor, num_classes: int) -> Tensor:
    """Return the weights with which all classes contribute equally to the loss.

    Args:
        labels: labels of the training nodes: (S,) int64 classes; or (S, T) of 0, 1 or NaN for
            unknown, T label columns.
        num_classes: C, the number of classes; not used for (S, T) labels.

    Returns:
        For classes, (C,) float32: the weight of a class is inversely proportional to its number of
        nodes, and the mean weight of all nodes is 1; a class without a node has weight 0. For
        label columns, (T,) float32 weights of the label 1: the number of zeros divided by the
        number of ones; 1 if a column has no zeros or no ones.
    """
    if labels.ndim == 1:
        counts = torch.bincount(labels, minlength=num_classes).double()
        present = counts > 0
        weights = len(labels) / (present.sum() * counts.clamp(min=1))
        return torch.where(present, weights, 0.0).float()
    ones, zeros = (labels == 1).sum(dim=0), (labels == 0).sum(dim=0)
    has_both = (ones > 0) & (zeros > 0)
    return torch.where(has_both, zeros / ones.clamp(min=1), 1.0).float()


class NodeTask:
    """The classes of nodes, or their columns of labels.

    Args:
        config: options of the run.
        data: the graph.
        metric: selects the best model; as-is: that of the graph. With several columns of labels,
            rocauc and average_precision are means over the columns, and the F1 scores are of
            predictions with a probability above 0.5.
        label_smoothing: fraction of the target probability that is spread evenly over all classes.
        class_weights: weights of the classes in the loss; balanced: inversely proportional to their
            numbers of training nodes, or with several columns of labels, the weight of the label 1
            is the number of zeros divided by that of ones.
        label_inputs: fraction of the training nodes whose labels are input features in a training
            step; the loss is over the other training nodes. In evaluation, the labels of all
            training nodes are features. 0: no labels are features; 0.5 is common.

    Raises:
        ValueError: no node of the training split has a label, or the labels do not match an option.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: Any,
        *,
        metric: Metric = "as-is",
        label_smoothing: float = 0.0,
        class_weights: Literal["none", "balanced"] = "none",
        label_inputs: float = 0.0,
    ) -> None:
        if len(data.split["train"]) == 0:
            hint = "use --task link" if data.links else "check the training split of the graph"
            raise ValueError(f"{data.name} has no labelled nodes to train on\n\nhint: {hint}")
        _check_label_columns(data)
        name: str = data.metric if metric == "as-is" else metric
        _check_metric(name, data)
        if data.labels.ndim == 2 and label_smoothing:
            raise ValueError(
                f"label_smoothing={label_smoothing:g} is for classes, and {data.name} has "
                f"{data.labels.shape[1]} columns of labels\n\nhint: omit label_smoothing of --task"
            )
        self.config, self.data = config, data
        self.metric: str = name
        self.label_smoothing, self.label_share = label_smoothing, label_inputs
        self.seeds = data.split["train"]
        self.labels: Tensor | None = data.labels
        self.sampler: Any = self._build_sampler()
        self.class_weights: Tensor | None = None
        if class_weights == "balanced":
            self.class_weights = balanced_weights(data.labels[self.seeds], data.num_classes)
        # of several columns of labels
        self.known_per_seed: float | None = None
        if data.labels.ndim == 2:
            num_known = int((~torch.isnan(data.labels[self.seeds])).sum())
            self.known_per_seed = num_known / len(self.seeds)
        # each label column has one logit
        self.num_outputs = data.num_classes if data.labels.ndim == 1 else data.labels.shape[1]
        self.label_inputs: LabelInputs | None = None
        if label_inputs:
            _check_label_inputs(config, label_inputs, len(self.seeds))
            self.label_inputs = LabelInputs(data, self.num_outputs, data.labels.ndim == 2)
        # with label inputs, the outputs of some seeds depend on their own labels
        self.has_accuracy = data.labels.ndim == 1 and self.label_inputs is None
        self.best_accuracy = data.best_accuracy
        self.evaluator = build_evaluator(config)
        # of a full-batch run: evaluates all nodes in one pass instead of layer by layer
        self.whole_graph: FullBatchLoader | None = None

    def _build_sampler(self) -> Any:
        return build_sampler(self.config.loading, self.data)

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """See `Task.logits`."""
        if self.label_inputs is None:
            return model(batch.blocks, batch.x)
        assert batch.x is not None, "the loader has no table"
        num_seeds, share = len(batch.seeds), self.label_share
        is_selected = self.label_inputs.select(batch.nodes, num_seeds, share)
        # read by `loss`, which is called next
        self._is_predicted = ~is_selected[:num_seeds]
        return model(batch.blocks, self.label_inputs.extend(batch.x, batch.nodes, is_selected))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """See `Task`."""
        if self.class_weights is not None:
            self.class_weights = self.class_weights.to(logits.device)
        if self.label_inputs is not None:
            logits, labels = logits[self._is_predicted], labels[self._is_predicted]
        return compute_loss(
            logits,
            labels,
            label_smoothing=self.label_smoothing,
            class_weights=self.class_weights,
            known_per_seed=self.known_per_seed,
        )

    def evaluate(self, of: Evaluated, splits: Sequence[str] = EVALUATED) -> Scores:
        """See `Task`; labels that are features are not scored."""
        data, splits = self.data, self._scored(splits)
        nodes, sizes = self._nodes_of(splits), [len(data.split[name]) for name in splits]
        rows = dict(zip(splits, torch.arange(len(nodes)).split(sizes), strict=True))
        logits = self._outputs(of, nodes)
        return broadcast_scores(score(logits, data.labels[nodes], rows, self.metric), of.group)

    def outputs(self, of: Evaluated) -> tuple[Tensor, Scores]:
        """See `Task`; the training split is scored as well, unless its labels are features."""
        data, logits = self.data, self._outputs(of, None)
        splits = {name: data.split[name] for name in self._scored(SPLITS)}
        return logits, broadcast_scores(score(logits, data.labels, splits, self.metric), of.group)

    def _outputs(self, of: Evaluated, nodes: Tensor | None) -> Tensor:
        """Return the logits of nodes, or of all nodes if None."""
        if nodes is not None and self._has_single_pass:
            assert self.whole_graph is not None, "as `_has_single_pass` says"
            return compute_logits(of.model, self.whole_graph, nodes)
        return self.evaluator.outputs(self._with_labels(of), self.data.graph, nodes)

    def _with_labels(self, of: Evaluated) -> Evaluated:
        return replace(of, table=append_labels(of.table, self.label_inputs))

    def choose_evaluation(
        self, of: Evaluated, say: Callable[[str], object], splits: Sequence[str] = EVALUATED
    ) -> None:
        """See `Task`."""
        if not self._has_single_pass:
            nodes = self._nodes_of(self._scored(splits))
            self.evaluator.choose(self._with_labels(of), self.data.graph, nodes, say)
        elif self.evaluator.method == "auto":
            say("evaluation: needed, in one pass over the whole graph, which fits into memory")
            self.evaluator.method = "needed"

    @property
    def _has_single_pass(self) -> bool:
        """Whether one pass over the whole graph is used, which has no columns of label inputs."""
        has_rows = self.whole_graph is not None and self.label_inputs is None
        return has_rows and self.evaluator.method in ("needed", "auto")

    def _scored(self, splits: Sequence[str]) -> list[str]:
        return [name for name in splits if name != "train" or self.label_inputs is None]

    def _nodes_of(self, splits: Sequence[str]) -> Tensor:
        return torch.cat([self.data.split[name] for name in splits])


def _check_label_columns(data: Dataset) -> None:
    """Raise a ValueError if a column of labels has other classes than 0 and 1."""
    if data.labels.ndim == 2 and bool((data.labels > 1).any()):
        raise ValueError(
            f"{data.name} has {data.labels.shape[1]} columns of labels, with labels up to "
            f"{float(data.labels.nan_to_num().max()):g}\n\n"
            "hint: labels of several columns are 0, 1 or missing; for classes, give one column"
        )


def _check_label_inputs(config: TrainConfig, share: float, num_seeds: int) -> None:
    batch_size = config.loading.batch_size
    batch = num_seeds if batch_size == "all" else min(batch_size, num_seeds)
    # not batch * (1 - share) < 1, which is rounded to below 1 for 10 nodes and a share of 0.9
    if batch * share > batch - 1:
        raise ValueError(
            f"label_inputs={share} leaves less than one of the {batch:,} training nodes of a "
            "minibatch to predict\n\nhint: use a smaller one, or a larger --batch-size"
        )


def _check_metric(metric: str, data: Dataset) -> None:
    """Raise a ValueError if a metric does not fit the labels of a graph."""
    several = data.labels.ndim == 2
    if several and metric == "accuracy":
        raise ValueError(
            f"{data.name} has {data.labels.shape[1]} columns of labels, and accuracy as metric"
            "\n\nhint: --task node:metric=rocauc, average_precision, f1_micro or f1_macro; convert "
            "one-hot labels to classes by labels.argmax(axis=1)"
        )
    if not several and metric in RANKING and data.num_classes != 2:
        raise ValueError(
            f"the metric {metric} does not fit {data.name} with {data.num_classes} classes\n\n"
            f"hint: {metric} is of two classes or of several columns of labels; use --task "
            "node:metric=accuracy or f1_macro"
        )
