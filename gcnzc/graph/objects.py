"""Read the arrays of PyG's `HeteroData` and of DGL graphs."""

from collections.abc import Mapping
from typing import Any

import torch

from gcnzc.datasets.source import part_of
from gcnzc.graph.times import TimeUnit


def read_pyg(
    data: Any,
    *,
    time_attr: str | None = None,
    weight_attr: str | None = None,
    feature_attr: str = "x",
    label_attr: str = "y",
    edge_feature_attr: str = "edge_attr",
    time_unit: TimeUnit | None = None,
    name: str = "graph",
) -> dict[str, Any]:
    """Return the arguments of `Graph.from_arrays` for a `HeteroData`; see `Graph.from_pyg`."""
    _check_attribute("time_attr", time_attr, [*data.node_stores, *data.edge_stores])
    _check_attribute("weight_attr", weight_attr, data.edge_stores)
    nodes = {}
    for node_type in data.node_types:
        own = data[node_type]
        nodes[node_type] = {
            "num_nodes": _num_nodes_of_pyg(node_type, own),
            "features": _get(own, feature_attr),
            "labels": _get(own, label_attr),
            "split": _masks(dict(own.items())),
            "time": _get(own, time_attr),
        }
    edges = {}
    for edge_type in data.edge_types:
        own = data[edge_type]
        edges[edge_type] = {
            "edge_index": _edge_index_of_pyg(edge_type, own),
            "features": _get(own, edge_feature_attr),
            "time": _get(own, time_attr),
            "weight": _get(own, weight_attr),
        }
    return {"nodes": nodes, "edges": edges, "name": name, "time_unit": time_unit}


def _get(store: Any, key: str | None) -> Any:
    return store[key] if key is not None and key in store else None


def _check_attribute(argument: str, name: str | None, stores: list[Any]) -> None:
    if name is not None and not any(name in store for store in stores):
        raise ValueError(
            f"{argument} is {name!r:.100}, which no type of the data has\n\n"
            "hint: data['paper'].time = ... or data['user', 'buys', 'item'].time = ..."
        )


def _num_nodes_of_pyg(node_type: str, store: Any) -> int | None:
    """Return the number of nodes, as far as the node type itself tells it.

    PyG otherwise infers it from the edges, with a warning: nodes without edges are lost.
    """
    if "num_nodes" in store:
        return int(store["num_nodes"])
    if not store.can_infer_num_nodes:
        raise ValueError(
            f"the number of nodes of node type {node_type!r} is unknown: it has no attribute with "
            f"one row for each node"
        )
    return int(store.num_nodes)


def _edge_index_of_pyg(edge_type: tuple[str, str, str], store: Any) -> Any:
    if "edge_index" in store:
        return store["edge_index"]
    if "adj_t" not in store:
        raise ValueError(f"edge type {edge_type} has neither edge_index nor adj_t")
    adjacency = store["adj_t"]
    if hasattr(adjacency, "coo"):
        row, col, _ = adjacency.coo()
        return col, row
    if adjacency.layout == torch.sparse_csr:
        counts = adjacency.crow_indices().diff()
        return adjacency.col_indices(), torch.arange(len(counts)).repeat_interleave(counts)
    row, col = adjacency.coalesce().indices()
    return col, row


def read_dgl(
    graph: Any,
    *,
    time: str | None = None,
    weight: str | None = None,
    features: str = "feat",
    labels: str = "label",
    time_unit: TimeUnit | None = None,
    name: str = "graph",
) -> dict[str, Any]:
    """Return the arguments of `Graph.from_arrays` for a DGL graph; see `Graph.from_dgl`."""
    frames = {each: dict(graph.nodes[each].data) for each in graph.ntypes}
    edge_frames = {each: dict(graph.edges[each].data) for each in graph.canonical_etypes}
    everywhere = [*frames.values(), *edge_frames.values()]
    _check_data("time", time, everywhere)
    _check_data("weight", weight, list(edge_frames.values()))
    nodes = {
        each: {
            "num_nodes": graph.num_nodes(each),
            "features": own.get(features),
            "labels": own.get(labels),
            "split": _masks(own),
            "time": _get(own, time),
        }
        for each, own in frames.items()
    }
    edges = {
        each: {
            "edge_index": graph.edges(etype=each, order="eid"),
            "features": own.get(features),
            "time": _get(own, time),
            "weight": _get(own, weight),
        }
        for each, own in edge_frames.items()
    }
    return {"nodes": nodes, "edges": edges, "name": name, "time_unit": time_unit}


def _check_data(argument: str, name: str | None, frames: list[dict[str, Any]]) -> None:
    if name is not None and not any(name in frame for frame in frames):
        raise ValueError(f"{argument} is {name!r:.100}, which no type of the graph has")


def _masks(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        part: value
        for key, value in attributes.items()
        if key.endswith("_mask")
        and (part := part_of(key)) is not None
        and value is not None
        # masks of several splits have a column for each
        and getattr(value, "ndim", 1) == 1
    }
