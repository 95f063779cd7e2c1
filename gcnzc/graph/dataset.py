"""Datasets: a graph with features, labels and training, validation and test splits."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from gcnzc.datasets.names import Names
from gcnzc.datasets.rows import Array
from gcnzc.datasets.source import Metric
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.graph.stores import NodeStore


@dataclass(frozen=True)
class EdgeSplit:
    """Training, validation and test edges for link prediction, with negative edges.

    Tensors have the dtype of the graph's `indices` and are on the host.

    Attributes:
        edges: "train", "valid" and "test": (2, E of the split) sources and targets.
        negatives: "valid" and "test": (2, Q) pairs of nodes without an edge. If the metric is mrr,
            (E of the split, K) negative targets: row `i` is for the source of edge `i`.
        metric: "auc", "mrr", or "hits@K" with an integer K.
    """

    edges: dict[str, Tensor]
    negatives: dict[str, Tensor]
    metric: str


@dataclass(frozen=True)
class Dataset:
    """A graph, and what models predict on it.

    Tensors are on the host. Those of a prepared folder are memory-mapped copy-on-write: a write to
    one changes the memory of this process, and not the folder. If torch finds a GPU, the features
    and the graph are mapped read-only, since most drivers can then lock their pages without a copy:
    writing to them terminates the process (SIGSEGV), so clone them before you modify them.

    `features`, `labels`, `split` and the names are those of the nodes of `target`.

    Attributes:
        graph: of one node type, or of several.
        target: the only node type, or the only one with labels; empty if there is no such type.
        num_classes: of each task.
        metric: that selects the best model.
        best_accuracy: upper bound for the accuracy of any model, in [0, 1]; None if not known.
        folder: the path that was loaded.
        origin: the source of the files and the options they were read with.
        links: for link prediction; `graph` then has the training edges (and more, if the dataset's
            files do).
    """

    graph: Graph
    target: str
    num_classes: int
    metric: Metric
    best_accuracy: float | None
    folder: Path
    origin: dict[str, Any]
    links: EdgeSplit | None = None

    @property
    def name(self) -> str:
        """Name of the graph."""
        return self.graph.name

    @property
    def nodes(self) -> NodeStore:
        """The nodes of the type `target`."""
        return self.graph.nodes(self.target or None)

    def with_nodes(self, **values: Any) -> "Dataset":
        """Return a dataset in which some attributes of `nodes`, such as `labels`, are others."""
        graph, own = self.graph, self.nodes
        nodes = {each: graph.nodes(each) for each in graph.node_types}
        nodes = {
            each: replace(store, **values) if store is own else store
            for each, store in nodes.items()
        }
        return replace(self, graph=graph.with_nodes(nodes))

    @property
    def features(self) -> Tensor | None:
        """(N, D) with contiguous rows, or a sparse CSR tensor; None without features, and for
        quantized features, which are in `quantized`.
        """
        return self.nodes.features

    @property
    def quantized(self) -> FeatureTable | None:
        """The features, if they are stored as codes with scales."""
        return self.nodes.quantized

    @property
    def labels(self) -> Tensor:
        """(N,) int64, -1 for no label; with T tasks (N, T) int64, or float32 with NaN for no label.

        Raises:
            ValueError: there are no labels.
        """
        labels = self.nodes.labels
        if labels is None:
            raise ValueError(f"the nodes of {self.folder} have no labels")
        return labels

    @property
    def split(self) -> Mapping[str, Tensor]:
        """ "train", "valid", "test": int64 ids of labelled nodes."""
        return self.nodes.split

    @property
    def table(self) -> FeatureTable | None:
        """The features as a `FeatureTable`, quantized or not; None if there are none."""
        return self.nodes.table

    @cached_property
    def names(self) -> Names:
        """Names of classes and features, as far as the source has them."""
        return self.nodes.read_names("classes", "features")

    @cached_property
    def node_ids(self) -> Array | None:
        """(N,) ids of the nodes in the source as text; None if they are the numbers from 0."""
        return self.nodes.read_names("nodes").nodes
