"""Graphs and datasets: load, prepare and split them."""

from typing import TYPE_CHECKING

from gcnzc._lazy import lazy_attributes
from gcnzc.graph.graph import Graph

if TYPE_CHECKING:
    from gcnzc.graph.dataset import Dataset
    from gcnzc.graph.edge_split import EdgeShares, split_edges
    from gcnzc.graph.partition import cut_fraction, merge_communities, partition_graph

__all__ = [
    "Dataset",
    "EdgeShares",
    "Graph",
    "cut_fraction",
    "merge_communities",
    "partition_graph",
    "split_edges",
]

# imported on first use, because they import pandas and SciPy
__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "gcnzc.graph.dataset": ("Dataset",),
        "gcnzc.graph.edge_split": ("EdgeShares", "split_edges"),
        "gcnzc.graph.partition": ("cut_fraction", "merge_communities", "partition_graph"),
    },
)
