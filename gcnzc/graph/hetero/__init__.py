"""Heterogeneous graphs: node and edge types with features, labels, times and weights."""

from gcnzc.graph.hetero.graph import HeteroGraph
from gcnzc.graph.hetero.stores import EdgeStore, NodeStore

__all__ = ["EdgeStore", "HeteroGraph", "NodeStore"]
