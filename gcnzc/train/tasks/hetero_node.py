"""The task of node classification in heterogeneous graphs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gcnzc.features.embedding import EmbeddingTable
from gcnzc.sampling.neighbor import Sampler
from gcnzc.train.build import build_hetero_sampler
from gcnzc.train.config import Metric, TrainConfig
from gcnzc.train.hetero.data import HeteroDataset
from gcnzc.train.hetero.inference import typed_outputs, with_embeddings
from gcnzc.train.node_outputs import Evaluated
from gcnzc.train.tasks.base import EVALUATED
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
    sampler: Sampler

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
                "Loader(seed_times=); or omit --temporal"
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

    def _build_sampler(self) -> Sampler:
        return build_hetero_sampler(self.config, self.data.graph, self.config.loading.fanouts)

    def logits(self, model: nn.Module, batch: Any) -> Tensor:
        """See `Task`."""
        return model(batch.blocks, with_embeddings(batch, self.embeddings))

    def choose_evaluation(
        self, of: Evaluated, say: Callable[[str], object], splits: Sequence[str] = EVALUATED
    ) -> None:
        """See `Task`; there is no choice."""

    def _outputs(self, of: Evaluated, nodes: Tensor | None) -> Tensor:
        """Return the logits of nodes of the target, or of all of them if None."""
        target, graph = self.data.target, self.data.graph
        seeds = target, torch.arange(graph.nodes(target).num_nodes) if nodes is None else nodes
        fanouts = self.evaluator.sampled_fanouts
        return typed_outputs(of, self.config, graph, self.embeddings, seeds, fanouts=fanouts)
