"""The task of node classification in heterogeneous graphs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gcnzc.exchange import Group
from gcnzc.features.embedding import EmbeddingTable
from gcnzc.loader.hetero_loader import HeteroLoader
from gcnzc.models.metrics import score
from gcnzc.sampling.hetero import HeteroSampler
from gcnzc.train.config import Metric, TrainConfig
from gcnzc.train.hetero.data import HeteroDataset, TypedTables
from gcnzc.train.hetero.encoder import build_hetero_encoder, build_hetero_sampler, choose_fanouts
from gcnzc.train.hetero.inference import node_outputs, with_embeddings
from gcnzc.train.tasks.base import EVALUATED, Progress, Scores, broadcast_scores
from gcnzc.train.tasks.node import NodeTask


class HeteroNodeTask(NodeTask):
    """The classes of the nodes of one type.

    Args:
        config: options of the run.
        data: the graph.
        target: type of the nodes to classify; by default the only type with labels. `load_hetero`
            has found it.
        metric, label_smoothing, class_weights: see `NodeTask`.
    """

    data: HeteroDataset
    sampler: HeteroSampler

    def __init__(
        self,
        config: TrainConfig,
        data: HeteroDataset,
        *,
        target: str = "",
        metric: Metric = "as-is",
        label_smoothing: float = 0.0,
        class_weights: Literal["none", "balanced"] = "none",
    ) -> None:
        if config.graph.is_temporal and data.graph.nodes(data.target).time is None:
            raise ValueError(
                f"--temporal {config.graph.temporal}: node type {data.target!r} of {data.name} has "
                "no times, which limit the neighbours of its nodes\n\nhint: give these nodes "
                "times, such as those of their labels, before the graph is saved; in Python, "
                "HeteroLoader(seed_times=); or omit --temporal"
            )
        super().__init__(
            config,
            data,
            metric=metric,
            label_smoothing=label_smoothing,
            class_weights=class_weights,
        )
        # of the node types without features; set when the model is known
        self.embeddings: Mapping[str, EmbeddingTable] = {}

    def _build_sampler(self) -> HeteroSampler:
        return build_hetero_sampler(self.config, self.data.graph, self.config.loading.fanouts)

    def model(self) -> nn.Module:
        """See `Task`."""
        return build_hetero_encoder(self.config, self.data, self.num_outputs, self.data.target)

    def logits(self, model: nn.Module, batch: Any) -> Tensor:
        """See `Task`."""
        return model(batch.blocks, with_embeddings(batch, self.embeddings))

    def build_loader(
        self, table: TypedTables, device: torch.device, group: Group, loading: Mapping[str, Any]
    ) -> HeteroLoader:
        """Build the loader of the training minibatches.

        Args:
            table: features, which the device can read.
            device: of the minibatches.
            group: all workers, each of which loads its part of every minibatch.
            loading: arguments of the loader that affect its speed.
        """
        config, data = self.config, self.data
        assert isinstance(config.loading.batch_size, int), "TrainConfig has checked"
        return HeteroLoader(
            self.sampler,
            (data.target, self.seeds),
            config.loading.batch_size,
            labels=data.labels[self.seeds],
            tables=table.tables,
            device=device,
            seed=config.loading.seed,
            rank=group.rank,
            world_size=group.world_size,
            seed_order=config.loading.seed_order,
            **loading,
        )

    def evaluate(
        self,
        model: Any,
        table: Any,
        device: torch.device,
        progress: Progress,
        group: Group | None = None,
        *,
        splits: Sequence[str] = EVALUATED,
    ) -> Scores:
        """See `Task`."""
        data = self.data
        sizes = [len(data.split[name]) for name in splits]
        nodes = torch.cat([data.split[name] for name in splits])
        rows = dict(zip(splits, torch.arange(len(nodes)).split(sizes), strict=True))
        logits = self._outputs(model, nodes, table, device, progress, group)
        return broadcast_scores(score(logits, data.labels[nodes], rows, self.metric), group)

    def choose_evaluation(
        self,
        model: Any,
        table: Any,
        group: Group,
        say: Callable[[str], object],
        *,
        splits: Sequence[str] = EVALUATED,
    ) -> None:
        """See `Task`; there is no choice."""

    def outputs(
        self,
        model: Any,
        table: Any,
        device: torch.device,
        progress: Progress,
        group: Group | None = None,
    ) -> tuple[Tensor, Scores]:
        """See `Task`; the outputs are those of the nodes of the target."""
        data = self.data
        nodes = torch.arange(data.graph.num_nodes(data.target))
        logits = self._outputs(model, nodes, table, device, progress, group)
        scores = score(logits, data.labels, data.split, self.metric)
        return logits, broadcast_scores(scores, group)

    def _outputs(
        self,
        model: Any,
        nodes: Tensor,
        table: TypedTables,
        device: torch.device,
        progress: Progress,
        group: Group | None,
    ) -> Tensor:
        """Return the logits of nodes of the target, with all or sampled neighbours."""
        config, fanouts = self.config, self.evaluator.sampled_fanouts
        return node_outputs(
            model,
            build_hetero_sampler(config, self.data.graph, choose_fanouts(fanouts, config.layers)),
            (self.data.target, nodes),
            table.tables,
            self.logits,
            num_columns=self.num_outputs,
            device=device,
            is_sampled=fanouts is not None,
            threads=config.loading.threads or None,
            progress=progress,
            group=group,
        )
