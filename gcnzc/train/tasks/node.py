"""The task of node classification."""

from typing import Any

import torch
from torch import Tensor, nn

from gcnzc.exchange import Group
from gcnzc.features.table import FeatureTable
from gcnzc.graph.dataset import Dataset
from gcnzc.loader.full_batch import FullBatchLoader
from gcnzc.models.metrics import RANKING, compute_loss, score
from gcnzc.sampling.batch import Batch
from gcnzc.sampling.protocol import SamplerProtocol
from gcnzc.train.class_weights import balanced_weights
from gcnzc.train.config import TrainConfig
from gcnzc.train.encoders import build_encoder, build_sampler
from gcnzc.train.full_batch import compute_logits
from gcnzc.train.inference import inference
from gcnzc.train.tasks.base import Progress, Scores, agreed_scores


class NodeTask:
    """The classes of nodes; a `Task`.

    Raises:
        ValueError: no node of the training part has a label, or the labels do not match an option.
    """

    def __init__(self, config: TrainConfig, data: Dataset) -> None:
        if len(data.split["train"]) == 0:
            hint = "use --task link" if data.links else "check the training split of the graph"
            raise ValueError(f"{data.name} has no labelled nodes to train on\n\nhint: {hint}")
        metric = data.metric if config.metric == "as-is" else config.metric
        _check_metric(metric, data)
        if data.labels.ndim == 2 and config.label_smoothing:
            raise ValueError(
                f"--label-smoothing {config.label_smoothing:g} is for classes, and {data.name} has "
                f"{data.labels.shape[1]} columns of labels\n\nhint: leave --label-smoothing out"
            )
        self.config, self.data = config, data
        self.metric: str = metric
        self.seeds = data.split["train"]
        self.labels: Tensor | None = data.labels
        self.sampler: SamplerProtocol = build_sampler(config, data)
        self.class_weights: Tensor | None = None
        if config.class_weights == "balanced":
            self.class_weights = balanced_weights(data.labels[self.seeds], data.num_classes)
        self.has_accuracy = data.labels.ndim == 1
        self.best_accuracy = data.best_accuracy
        # of a full-batch run: evaluates all nodes in one pass instead of layer by layer
        self.whole_graph: FullBatchLoader | None = None

    def model(self) -> nn.Module:
        """See `Task`."""
        labels = self.data.labels
        # several tasks have one logit each
        return build_encoder(
            self.config, self.data, self.data.num_classes if labels.ndim == 1 else labels.shape[1]
        )

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """See `Task`."""
        return model(batch.blocks, batch.x)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """See `Task`."""
        if self.class_weights is not None:
            self.class_weights = self.class_weights.to(logits.device)
        return compute_loss(
            logits,
            labels,
            label_smoothing=self.config.label_smoothing,
            class_weights=self.class_weights,
        )

    def evaluate(
        self,
        model: Any,
        table: FeatureTable,
        device: torch.device,
        progress: Progress,
        group: Group | None = None,
    ) -> Scores:
        """See `Task`."""
        split, data = self.data.split, self.data
        nodes = torch.cat([split["valid"], split["test"]])
        rows = torch.arange(len(nodes))
        parts = {"valid": rows[: len(split["valid"])], "test": rows[len(split["valid"]) :]}
        if self.whole_graph is not None:
            logits = compute_logits(model, self.whole_graph, nodes)
        else:
            logits = inference(
                model, data.graph, table, device, nodes=nodes, progress=progress, group=group
            )
        return agreed_scores(score(logits, data.labels[nodes], parts, self.metric), group)

    def outputs(
        self,
        model: Any,
        table: FeatureTable,
        device: torch.device,
        progress: Progress,
        group: Group | None = None,
    ) -> tuple[Tensor, Scores]:
        """See `Task`; the training part is scored as well."""
        data = self.data
        logits = inference(model, data.graph, table, device, progress=progress, group=group)
        return logits, agreed_scores(score(logits, data.labels, data.split, self.metric), group)


def _check_metric(metric: str, data: Dataset) -> None:
    """Raise a ValueError if a metric does not fit the labels of a graph."""
    several = data.labels.ndim == 2
    if several and metric == "accuracy":
        raise ValueError(
            f"{data.name} has {data.labels.shape[1]} columns of labels, and accuracy as metric"
            "\n\nhint: --metric rocauc, average_precision, f1_micro or f1_macro; convert one-hot "
            "labels to classes by labels.argmax(axis=1)"
        )
    if not several and metric in RANKING and data.num_classes != 2:
        raise ValueError(
            f"the metric {metric} does not fit {data.name} with {data.num_classes} classes\n\n"
            f"hint: {metric} is of two classes or of several columns of labels; use --metric "
            "accuracy or f1_macro"
        )
