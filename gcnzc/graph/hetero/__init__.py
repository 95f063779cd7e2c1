"""Heterogeneous graphs: node and edge types with features, labels, times and weights."""

from gcnzc.graph.hetero.graph import EdgeStore, HeteroGraph, NodeStore

__all__ = ["EdgeStore", "HeteroGraph", "NodeStore"]
