"""Warn about neighbours that are later than what a run predicts."""

from typing import Any

from gcnzc.train.config import TrainConfig
from gcnzc.train.hetero.data import HeteroDataset


def format_time_warning(config: TrainConfig, data: Any) -> str:
    """Return a warning if the graph has times, and neighbours are sampled at any time; else ""."""
    if not isinstance(data, HeteroDataset) or config.temporal != "none":
        return ""
    graph = data.graph
    has_times = data.target and graph.nodes(data.target).time is not None
    if config.task == "link":
        has_times = any(graph.edges(each).time is not None for each in graph.edge_types)
    if not has_times:
        return ""
    return (
        "the graph has times, and neighbours may be later than what is predicted, which raises "
        "scores if they depend on it; --temporal uniform samples earlier ones only"
    )
