"""The arrays of a heterogeneous graph, as readers and generators return them.

Notation: N nodes of a type, E edges of a type, D columns of features, T tasks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gcnzc.datasets.rows import Array, Rows
from gcnzc.datasets.source import Metric

EdgeType: TypeAlias = tuple[str, str, str]


@dataclass(frozen=True)
class HeteroArrays:
    """A heterogeneous graph as arrays by node type and by edge type.

    Attributes:
        name: of the dataset.
        num_nodes: N of each node type, in the order of the types.
        edges: (E,) sources and (E,) destinations of each edge type, in the order of the types.
        node_features: (N, D) of node types.
        edge_features: (E, D) of edge types.
        labels: (N,) or (N, T) labels of node types; -1 or NaN for no label.
        split: for "train", "valid" and "test" node ids by node type.
        node_time: (N,) integers of node types.
        edge_time: (E,) integers of edge types.
        edge_weight: (E,) sampling weights of edge types.
        num_classes: number of classes of each task; None if it is not known.
        metric: of the predictions.
        split_name: name of the split.
        best_accuracy: upper bound for the accuracy of any model, if known.
        origin: provenance of the dataset.
    """

    name: str
    num_nodes: Mapping[str, int]
    edges: Mapping[EdgeType, tuple[Array, Array]]
    node_features: Mapping[str, Rows] = field(default_factory=dict)
    edge_features: Mapping[EdgeType, Rows] = field(default_factory=dict)
    labels: Mapping[str, Array] = field(default_factory=dict)
    split: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)
    node_time: Mapping[str, Array] = field(default_factory=dict)
    edge_time: Mapping[EdgeType, Array] = field(default_factory=dict)
    edge_weight: Mapping[EdgeType, Array] = field(default_factory=dict)
    num_classes: int | None = None
    metric: Metric = "accuracy"
    split_name: str = "random"
    best_accuracy: float | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)
