"""The task of link prediction."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gcnzc.exchange import Group
from gcnzc.features.table import FeatureTable
from gcnzc.graph.dataset import Dataset
from gcnzc.models.link import Dot, HadamardMLP, LinkModel
from gcnzc.models.metrics import score_pairs
from gcnzc.sampling.batch import Batch
from gcnzc.sampling.link import LinkSampler
from gcnzc.sampling.neighbor import SamplerProtocol
from gcnzc.train.config import TrainConfig
from gcnzc.train.encoders import build_encoder
from gcnzc.train.inference import inference
from gcnzc.train.tasks.base import EVALUATED, Progress, Scores, broadcast_scores, build_evaluator


class LinkTask:
    """Predict which pairs of nodes have an edge; see `Task`.

    Raises:
        ValueError: the graph has no split of its edges, or an option does not support edges.
    """

    has_accuracy: bool = False
    best_accuracy: float | None = None
    labels: Tensor | None = None

    def __init__(self, config: TrainConfig, data: Dataset) -> None:
        if data.links is None:
            raise ValueError(
                f"the edges of {data.name} have no split, so no edges are held out to predict\n\n"
                f"hint: `gcnzc prepare {data.folder} DEST --task link` holds out edges for "
                "validation and test"
            )
        if config.sampler != "gcnzc":
            raise ValueError(
                f"--sampler {config.sampler} does not support link prediction\n\n"
                "hint: use --sampler gcnzc"
            )
        if config.features == "cached" and config.cache_policy == "presampled":
            raise ValueError(
                "--cache-policy presampled samples the neighbours of training nodes, not of "
                "training edges\n\n"
                "hint: use --cache-policy in-degree"
            )
        if config.negatives == "in-batch" and config.batch_size == 1:
            raise ValueError(
                "--negatives in-batch with --batch-size 1: the negative pairs of an edge have the "
                "targets of the other edges of its minibatch\n\nhint: use a larger --batch-size"
            )
        if config.metric not in ("as-is", data.links.metric):
            raise ValueError(
                f"--metric {config.metric} is of node classification\n\n"
                f"hint: omit --metric; the edges of {data.name} are scored by "
                f"{data.links.metric}"
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
        self.sampler: SamplerProtocol = links
        self.evaluator = build_evaluator(config)
        self.seeds = torch.arange(links.num_items)

    def model(self) -> LinkModel:
        """See `Task`."""
        return build_link_model(self.config, self.data)

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
        *,
        splits: Sequence[str] = EVALUATED,
    ) -> Scores:
        """See `Task`."""
        nodes = self._evaluated_nodes()
        rows = self.evaluator.outputs(
            model.encoder, self.data.graph, table, device, nodes, progress, group
        )
        place = torch.zeros(self.data.graph.num_nodes, dtype=torch.int64)
        place[nodes] = torch.arange(len(nodes))
        return broadcast_scores(self._scores(model, rows, place), group)

    def choose_evaluation(
        self,
        model: Any,
        table: FeatureTable,
        group: Group,
        say: Callable[[str], object],
        *,
        splits: Sequence[str] = EVALUATED,
    ) -> None:
        """See `Task`."""
        nodes = self._evaluated_nodes()
        columns = table.num_columns
        self.evaluator.choose(model.encoder, self.data.graph, nodes, columns, group, say)

    def outputs(
        self,
        model: Any,
        table: FeatureTable,
        device: torch.device,
        progress: Progress,
        group: Group | None = None,
    ) -> tuple[Tensor, Scores]:
        """See `Task`; the outputs are those of the encoder, the inputs of the decoder."""
        rows = inference(
            model.encoder, self.data.graph, table, device, progress=progress, group=group
        )
        return rows, broadcast_scores(self._scores(model, rows, torch.arange(len(rows))), group)

    def _evaluated_nodes(self) -> Tensor:
        """Return the (M,) int64 ids of the nodes of all validation and test pairs, sorted."""
        seen = torch.zeros(self.data.graph.num_nodes, dtype=torch.bool)
        for split in ("valid", "test"):
            for ids in (self.links.edges[split], self.links.negatives[split]):
                seen[ids.flatten().long()] = True
        return seen.nonzero().flatten()

    def _scores(self, model: LinkModel, rows: Tensor, place: Tensor) -> Scores:
        result: Scores = {}
        for split in ("valid", "test"):
            sources, targets = (place[ends.long()] for ends in self.links.edges[split])
            others = place[self.links.negatives[split].long()]
            ends = (sources[:, None], others) if self.metric == "mrr" else others
            positives = model.scores(rows, sources, targets)
            negatives = model.scores(rows, *ends)
            for name, value in score_pairs(positives, negatives, self.metric).items():
                result.setdefault(name, {})[split] = value
        return result


def build_link_model(config: TrainConfig, data: Dataset) -> LinkModel:
    """Build the model of a run on the CPU, for the features of `data`."""
    encoder = build_encoder(config, data, config.hidden)
    if config.decoder == "dot":
        return LinkModel(encoder, Dot())
    return LinkModel(encoder, HadamardMLP(config.hidden, dropout=config.dropout))
