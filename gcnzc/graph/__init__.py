"""Graphs and datasets: load, prepare and split them."""

from typing import TYPE_CHECKING

from gcnzc._lazy import lazy_attributes
from gcnzc.graph.graph import Graph
from gcnzc.graph.stores import EdgeStore, NodeStore

if TYPE_CHECKING:
    from gcnzc.graph.dataset import Dataset
    from gcnzc.graph.edge_split import EdgeShares, split_edges
    from gcnzc.graph.ogb import to_ogb
    from gcnzc.graph.partition import cut_fraction, merge_communities, partition_graph
    from gcnzc.graph.tables import Table, from_tables

__all__ = [
    "Dataset",
    "EdgeShares",
    "EdgeStore",
    "Graph",
    "NodeStore",
    "Table",
    "cut_fraction",
    "from_tables",
    "merge_communities",
    "partition_graph",
    "split_edges",
    "to_ogb",
]

# imported on first use, because they import pandas and SciPy
__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "gcnzc.graph.dataset": ("Dataset",),
        "gcnzc.graph.edge_split": ("EdgeShares", "split_edges"),
        "gcnzc.graph.ogb": ("to_ogb",),
        "gcnzc.graph.partition": ("cut_fraction", "merge_communities", "partition_graph"),
        "gcnzc.graph.tables": ("Table", "from_tables"),
    },
)
