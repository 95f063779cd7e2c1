"""What a run learns: what classes nodes are of, or which edges there are.

A task says which seeds a loader takes and who draws for them, what a model gives for a minibatch,
how wrong that is, and how good the model is with all neighbours. `train` knows nothing else of it.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from gcnzc.config import TrainConfig
from gcnzc.data import Dataset
from gcnzc.decoders import Dot, HadamardMLP, LinkModel
from gcnzc.exchange import Group, run
from gcnzc.layerwise import inference
from gcnzc.loader import Samples
from gcnzc.metrics import loss_of, score, score_pairs
from gcnzc.pairs import LinkSampler
from gcnzc.replicas import vote
from gcnzc.sampler import Batch
from gcnzc.stages import build_encoder, build_sampler
from gcnzc.table import FeatureTable

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


class NodeTask:
    """The classes of nodes; a `Task`.

    Raises:
        ValueError: no node of the training part has a label.
    """

    def __init__(self, config: TrainConfig, data: Dataset) -> None:
        if len(data.split["train"]) == 0:
            hint = "--task link foretells its edges" if data.links else "is the split empty?"
            raise ValueError(f"{data.name} has no labelled nodes to train on\n\nhint: {hint}")
        if data.labels.ndim == 2 and data.metric == "accuracy":
            raise ValueError(
                f"{data.name} has {data.labels.shape[1]} columns of labels, and accuracy as "
                "metric\n\n"
                "hint: prepare the folder again, for ROC AUC; one-hot labels become classes with "
                "labels.argmax(axis=1)"
            )
        self.config, self.data = config, data
        self.metric: str = data.metric
        self.seeds = data.split["train"]
        self.labels: Tensor | None = data.labels
        self.sampler: Samples = build_sampler(config, data)
        self.has_accuracy = data.labels.ndim == 1
        self.best_accuracy = data.best_accuracy

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
        return loss_of(logits, labels)

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
        logits = inference(
            model, data.graph, table, device, nodes=nodes, progress=progress, group=group
        )
        return _agreed(score(logits, data.labels[nodes], parts, data.metric), group)

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
        return logits, _agreed(score(logits, data.labels, data.split, data.metric), group)


class LinkTask:
    """Which edges there are; a `Task`.

    Raises:
        ValueError: the graph has no split of edges, or an option is of nodes alone.
    """

    has_accuracy: bool = False
    best_accuracy: float | None = None
    labels: Tensor | None = None

    def __init__(self, config: TrainConfig, data: Dataset) -> None:
        if data.links is None:
            raise ValueError(
                f"the edges of {data.name} are not split, so there are none to foretell\n\n"
                f"hint: `gcnzc prepare {data.folder} DEST --task link` takes some out for "
                "validation and test"
            )
        if config.sampler != "gcnzc":
            raise ValueError(
                f"--sampler {config.sampler} draws for nodes, not for edges\n\n"
                "hint: --sampler gcnzc draws for both"
            )
        if config.features == "cached" and config.hot_by == "presampled":
            raise ValueError(
                "--hot-by presampled counts the neighbours of training nodes, not of edges\n\n"
                "hint: --hot-by in-degree"
            )
        self.config, self.data, self.links = config, data, data.links
        self.metric = self.links.metric
        links = LinkSampler(
            data.graph,
            self.links.edges["train"],
            config.fanouts,
            negatives=config.negatives,
            num_negatives=config.num_negatives,
            strict=config.strict_negatives,
            exclude=config.exclude,
            seed=config.seed,
        )
        self.sampler: Samples = links
        self.seeds = torch.arange(links.num_items)

    def model(self) -> LinkModel:
        """See `Task`."""
        config = self.config
        encoder = build_encoder(config, self.data, config.hidden)
        if config.decoder == "dot":
            return LinkModel(encoder, Dot())
        return LinkModel(encoder, HadamardMLP(config.hidden, dropout=config.dropout))

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """See `Task`."""
        return model(batch.blocks, batch.x, batch.pairs)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """See `Task`."""
        return functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))

    def evaluate(
        self,
        model: Any,
        table: FeatureTable,
        device: torch.device,
        progress: Progress,
        group: Group | None = None,
    ) -> Scores:
        """See `Task`."""
        nodes = self._judged()
        rows = inference(
            model.encoder,
            self.data.graph,
            table,
            device,
            nodes=nodes,
            progress=progress,
            group=group,
        )
        place = torch.zeros(self.data.graph.num_nodes, dtype=torch.int64)
        place[nodes] = torch.arange(len(nodes))
        return _agreed(self._scores(model, rows, place), group)

    def outputs(
        self,
        model: Any,
        table: FeatureTable,
        device: torch.device,
        progress: Progress,
        group: Group | None = None,
    ) -> tuple[Tensor, Scores]:
        """See `Task`; the outputs are the encoder's, which the decoder compares."""
        rows = inference(
            model.encoder, self.data.graph, table, device, progress=progress, group=group
        )
        return rows, _agreed(self._scores(model, rows, torch.arange(len(rows))), group)

    def _judged(self) -> Tensor:
        """(M,) int64 ids of the nodes of all pairs that are judged, ascending."""
        seen = torch.zeros(self.data.graph.num_nodes, dtype=torch.bool)
        for part in ("valid", "test"):
            for ids in (self.links.edges[part], self.links.negatives[part]):
                seen[ids.flatten().long()] = True
        return seen.nonzero().flatten()

    def _scores(self, model: LinkModel, rows: Tensor, place: Tensor) -> Scores:
        result: Scores = {}
        for part in ("valid", "test"):
            sources, targets = (place[ends.long()] for ends in self.links.edges[part])
            others = place[self.links.negatives[part].long()]
            ends = (sources[:, None], others) if self.metric == "mrr" else others
            positives = model.scores(rows, sources, targets)
            negatives = model.scores(rows, *ends)
            for name, value in score_pairs(positives, negatives, self.metric).items():
                result.setdefault(name, {})[part] = value
        return result


def _agreed(scores: Scores, group: Group | None) -> Scores:
    """The scores of worker 0, on all workers.

    The rows are the same on all, but sums of them may not be, on processors of different kinds.
    """
    if group is None or group.world_size == 1:
        return scores
    values = [value for parts in scores.values() for value in parts.values()]
    agreed = iter([run(vote(float(value)), group)[0] for value in values])
    return {metric: {part: next(agreed) for part in parts} for metric, parts in scores.items()}


def build_task(config: TrainConfig, data: Dataset) -> Task:
    """What `config` says is to be learned from `data`.

    Raises:
        ValueError: `data` has nothing of the kind.
    """
    kinds: Mapping[str, Callable[[TrainConfig, Dataset], Task]] = {
        "node": NodeTask,
        "link": LinkTask,
    }
    return kinds[config.task](config, data)
