"""Heterogeneous graphs: node and edge types with features, labels, times and weights."""

from gcnzc.graph.hetero.graph import EdgeStore, EdgeType, HeteroGraph, NodeStore

__all__ = ["EdgeStore", "EdgeType", "HeteroGraph", "NodeStore"]
