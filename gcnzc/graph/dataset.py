"""Datasets: a graph with features, labels and training, validation and test splits."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from gcnzc.datasets.names import Names, NamesFolder, read_names
from gcnzc.datasets.rows import Array
from gcnzc.datasets.source import Metric
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph


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
    """A graph with node features, labels and splits.

    Tensors are on the host. Those of a prepared folder are memory-mapped copy-on-write: a write to
    one changes the memory of this process, and not the folder. If torch finds a GPU, the features
    and the graph are mapped read-only, since most drivers can then lock their pages without a copy:
    writing to them terminates the process (SIGSEGV), so clone them before you modify them.
    """

    name: str
    graph: Graph
    # (N, D) with contiguous rows, or a sparse CSR tensor; None without features, and for quantized
    # features, which are in `quantized`
    features: Tensor | None
    # (N,) int64, -1 for no label; with T tasks (N, T) int64, or float32 with NaN for no label
    labels: Tensor
    split: dict[str, Tensor]  # "train", "valid", "test": int64 ids of labelled nodes
    num_classes: int  # of each task
    metric: Metric
    best_accuracy: float | None  # upper bound for the accuracy of any model, in [0, 1], if known
    folder: Path
    origin: dict[str, Any]  # the source of the files and the options they were read with
    quantized: FeatureTable | None = None  # the features, if they are stored as codes with scales
    # for link prediction; `graph` then has the training edges (and more, if the dataset's files do)
    links: EdgeSplit | None = None
    own_names: Names | NamesFolder | None = None  # NamesFolder: read when they are needed

    @cached_property
    def names(self) -> Names:
        """Names of classes and features, as far as the source has them."""
        return self._read_names("classes", "features")

    @cached_property
    def node_ids(self) -> Array | None:
        """(N,) ids of the nodes in the source as text; None if they are the numbers from 0."""
        names = self._read_names("nodes")
        if names.nodes is not None and len(names.nodes) != self.graph.num_nodes:
            raise ValueError(
                f"{self.folder} has {len(names.nodes):,} ids for {self.graph.num_nodes:,} nodes\n\n"
                "hint: prepare the folder again from its source"
            )
        return names.nodes

    def _read_names(self, *kinds: str) -> Names:
        names = self.own_names
        return names if isinstance(names, Names) else read_names(names, kinds)

    @cached_property
    def table(self) -> FeatureTable | None:
        """The features as a `FeatureTable`, quantized or not; None if there are none."""
        if self.features is None:
            return self.quantized
        return FeatureTable(self.features)
