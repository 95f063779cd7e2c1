"""The task of link prediction."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from gcnzc.graph.dataset import Dataset
from gcnzc.models.link import LinkModel
from gcnzc.models.metrics import score_pairs
from gcnzc.sampling.batch import Batch
from gcnzc.sampling.link import Exclude, LinkSampler
from gcnzc.sampling.negatives import Negatives
from gcnzc.sampling.neighbor import Sampler, SamplerProtocol
from gcnzc.train.config import TrainConfig
from gcnzc.train.node_outputs import Evaluated
from gcnzc.train.tasks.base import EVALUATED, Scores, broadcast_scores, build_evaluator

Decoder: TypeAlias = Literal["mlp", "dot"]


class LinkTask:
    """Which pairs of nodes have an edge.

    Args:
        config: options of the run.
        data: the graph.
        decoder: scores a pair from the elementwise product of its embeddings: mlp applies three
            linear layers, dot sums.
        negatives: how negative pairs are sampled for an edge: with a random target (uniform), with
            two random nodes (both), or with the targets of other edges of the minibatch (in-batch).
        num_negatives: negative pairs per edge.
        strict: reject negative pairs that are edges of the graph or self loops.
        exclude: edges excluded from the sampled neighbourhoods: none, those of the minibatch
            (self), or these and their reverse edges (reverse).

    Raises:
        ValueError: the graph has no split of its edges, or an option does not support edges.
    """

    has_accuracy: bool = False
    best_accuracy: float | None = None
    labels: Tensor | None = None

    def __init__(
        self,
        config: TrainConfig,
        data: Dataset,
        *,
        decoder: Decoder = "mlp",
        negatives: Negatives = "uniform",
        num_negatives: int = 1,
        strict: bool = True,
        exclude: Exclude = "reverse",
    ) -> None:
        if data.links is None:
            raise ValueError(
                f"the edges of {data.name} have no split, so no edges are held out to predict\n\n"
                f"hint: `gcnzc prepare {data.folder} DEST --task link` holds out edges for "
                "validation and test"
            )
        if config.loading.sampler != "gcnzc":
            raise ValueError(
                f"--sampler {config.loading.sampler} does not support link prediction\n\n"
                "hint: use --sampler gcnzc"
            )
        features = config.loading.features
        if features.name == "cached" and features["policy"] == "presampled":
            raise ValueError(
                "--features cached:policy=presampled samples the neighbours of training nodes, not "
                "of training edges\n\nhint: use --features cached:policy=in-degree"
            )
        if negatives == "in-batch" and config.loading.batch_size == 1:
            raise ValueError(
                "negatives=in-batch with --batch-size 1: the negative pairs of an edge have the "
                "targets of the other edges of its minibatch\n\nhint: use a larger --batch-size"
            )
        self.config, self.data, self.links = config, data, data.links
        self.metric = self.links.metric
        seed = config.loading.seed
        links = LinkSampler(
            Sampler(data.graph, config.loading.fanouts, seed),
            self.links.edges["train"],
            negatives=negatives,
            num_negatives=num_negatives,
            strict=strict,
            exclude=exclude,
            seed=seed,
        )
        self.sampler: SamplerProtocol = links
        self.evaluator = build_evaluator(config)
        self.seeds = torch.arange(links.num_items)

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """See `Task`."""
        return model(batch.blocks, batch.x, batch.pairs)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """See `Task`."""
        return functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))

    def evaluate(self, of: Evaluated, splits: Sequence[str] = EVALUATED) -> Scores:
        """See `Task`."""
        return self._outputs(of, self._evaluated_nodes())[1]

    def outputs(self, of: Evaluated) -> tuple[Tensor, Scores]:
        """See `Task`; the outputs are those of the encoder, the inputs of the decoder."""
        return self._outputs(of, None)

    def _outputs(self, of: Evaluated, nodes: Tensor | None) -> tuple[Tensor, Scores]:
        """Return the outputs of nodes, or of all nodes if None, and the scores of the splits."""
        graph, place = self.data.graph, torch.arange(self.data.graph.num_nodes)
        rows = self.evaluator.outputs(replace(of, model=of.model.encoder), graph, nodes)
        if nodes is not None:
            place[nodes] = torch.arange(len(nodes))
        return rows, broadcast_scores(self._scores(of.model, rows, place), of.group)

    def choose_evaluation(
        self, of: Evaluated, say: Callable[[str], object], splits: Sequence[str] = EVALUATED
    ) -> None:
        """See `Task`."""
        encoder = replace(of, model=of.model.encoder)
        self.evaluator.choose(encoder, self.data.graph, self._evaluated_nodes(), say)

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
