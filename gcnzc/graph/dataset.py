"""A dataset: graph, features, labels and splits."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from gcnzc.datasets.source import Metric
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph


@dataclass(frozen=True)
class Links:
    """Edges to be foretold, part by part, and the pairs that they are judged against.

    Tensors are of the type of the graph's `indices`, and lie on the host.
    """

    edges: dict[str, Tensor]  # "train", "valid", "test": (2, E of the part) from, and to
    # "valid", "test": (2, Q) pairs that are no edges; if the metric is mrr, (E of the part, K)
    # destinations, each row for the source of one edge
    negatives: dict[str, Tensor]
    metric: str  # auc, mrr, or hits@K for a number K


@dataclass(frozen=True)
class Dataset:
    """A graph, what is known of its nodes, and which of them are for what.

    Tensors lie on the host. Those of a prepared folder are read-only maps of its files: writing to
    one ends the process, so copy first.
    """

    name: str
    graph: Graph
    # (N, D), rows contiguous; sparse CSR if kept so; None if there are none, or if they are codes
    # with scales, which only `table` turns into numbers
    features: Tensor | None
    labels: Tensor  # (N,) int64, -1 for none; several tasks: (N, T) int64, or float32 with NaN
    split: dict[str, Tensor]  # "train", "valid", "test": int64 ids of labelled nodes
    num_classes: int  # of each task
    metric: Metric
    best_accuracy: float | None  # what no model can pass, in [0, 1], where it is known
    folder: Path
    origin: dict[str, Any]  # where the files came from, and the choices made
    quantized: FeatureTable | None = None  # the features, if they are codes with scales
    # a split of edges; `graph` then has those of its training part, and others where the set does
    links: Links | None = None

    @cached_property
    def table(self) -> FeatureTable | None:
        """The features as a table, however they are stored; None if there are none."""
        if self.features is None:
            return self.quantized
        return FeatureTable(self.features)
