"""Heterogeneous graphs in OGB's layout, such as ogbn-mag: read, write and convert to arrays."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gcnzc.datasets import ogb_write
from gcnzc.datasets.ogb_hetero import OgbHetero
from gcnzc.datasets.rows import Array, Progress, allocate_in_memory, no_progress
from gcnzc.datasets.source import SPLITS, HeteroArrays, clean_labels, clean_split
from gcnzc.graph.folder import rows_of
from gcnzc.graph.graph import Graph
from gcnzc.graph.stored_features import read_features
from gcnzc.graph.stores import EdgeStore, EdgeType


def info(folder: str | Path) -> dict[str, Any]:
    """Return the metadata of a heterogeneous dataset in OGB's layout, without its arrays.

    Returns:
        A dict with kind, "ogb-hetero", folder, name, num_nodes and num_edges of all types together,
        nodes and edges, a list of dicts by type, num_classes, best_accuracy, split and origin.
    """
    opened = OgbHetero(Path(folder))
    return {
        "kind": "ogb-hetero",
        "folder": str(folder),
        "name": opened.name,
        "num_nodes": sum(opened.num_nodes.values()),
        "num_edges": sum(opened.num_edges.values()),
        "nodes": [{"type": each, "num_nodes": size} for each, size in opened.num_nodes.items()],
        "edges": [
            {"type": list(each), "num_edges": count} for each, count in opened.num_edges.items()
        ],
        "num_classes": opened.num_classes,
        "best_accuracy": opened.best_accuracy,
        "split": {"name": opened.split_name},
        "origin": opened.origin,
    }


def origin_of(arrays: HeteroArrays, reverse: bool) -> dict[str, Any]:
    """Return the source of a graph, and what was chosen, for its metadata."""
    return dict(arrays.origin) | {
        "num_classes": arrays.num_classes,
        "metric": arrays.metric,
        "split": arrays.split_name,
        "best_accuracy": arrays.best_accuracy,
        "reverse": reverse,
    }


def from_hetero_arrays(
    arrays: HeteroArrays, where: str, *, reverse: bool = False, allow_nan: bool = False
) -> Graph:
    """Build a graph from the arrays of a reader or a generator; see `gcnzc.load`.

    Args:
        arrays: the graph.
        where: name of the dataset in messages.
        reverse: add the reverse of every edge type.
        allow_nan: accept features that are not finite.
    """
    nodes: dict[str, Any] = {}
    for each, count in arrays.num_nodes.items():
        features = arrays.node_features.get(each)
        labels = arrays.labels.get(each)
        own = {part: arrays.split[part][each] for part in SPLITS if each in arrays.split[part]}
        if labels is not None:
            place = f"{where}, node type {each!r}"
            labels = clean_labels(labels, count, arrays.num_classes, place)
            own = clean_split(own, labels, place)[0] if own else own
        nodes[each] = {
            "num_nodes": count,
            "features": read_features(features, allow_nan, allocate_in_memory),
            "labels": labels,
            "split": own,
            "time": arrays.node_time.get(each),
        }
    edges: dict[EdgeType, Any] = {}
    for edge_type, ends in arrays.edges.items():
        fields = {
            "features": read_features(
                arrays.edge_features.get(edge_type), allow_nan, allocate_in_memory
            ),
            "time": arrays.edge_time.get(edge_type),
            "weight": arrays.edge_weight.get(edge_type),
        }
        edges[edge_type] = {"edge_index": ends, **fields}
        source, relation, target = edge_type
        if reverse:
            added = (target, f"rev_{relation}", source)
            if added in arrays.edges:
                raise ValueError(
                    f"{where}: the edge type {added} exists, so that it cannot be added as the "
                    f"reverse of {edge_type}\n\nhint: reverse=False, or --bidirected no"
                )
            edges[added] = {"edge_index": ends[::-1], **fields}
    return Graph.from_arrays(nodes, edges, name=arrays.name)


def to_ogb(
    graph: Graph,
    path: str | Path,
    *,
    binary: bool = True,
    split_name: str = "random",
    num_classes: int | None = None,
    progress: Progress = no_progress,
) -> None:
    """Write a graph with labels and splits in OGB's layout, which the `ogb` package reads.

    Quantized features are dequantized. `gcnzc.datasets.ogb_write.meta_dict` returns the
    argument `meta_dict` of OGB's `NodePropPredDataset`.

    Args:
        graph: has labels and train, valid and test splits in at least one node type.
        path: the folder, which appears atomically; must not exist.
        binary: write npz files instead of csv.gz, which is much slower.
        split_name: name of the folder in `split/`.
        num_classes: number of classes; None counts them.
        progress: called with counts of edges and feature rows.

    Raises:
        FileExistsError: `path` exists.
        RuntimeError: the disk is full.
        ValueError: the graph has no labels or splits, or names that cannot be files.
    """
    graph.check()
    nodes = {each: graph.nodes(each) for each in graph.node_types}
    edges = {each: graph.edges(each) for each in graph.edge_types}
    arrays = HeteroArrays(
        graph.name,
        {each: own.num_nodes for each, own in nodes.items()},
        {each: _ends(own) for each, own in edges.items()},
        node_features=_present(
            {each: rows_of(own.features, own.quantized, str(each)) for each, own in nodes.items()}
        ),
        edge_features=_present(
            {each: rows_of(own.features, own.quantized, str(each)) for each, own in edges.items()}
        ),
        labels=_present(
            {
                each: None if own.labels is None else own.labels.numpy()
                for each, own in nodes.items()
            }
        ),
        split={
            part: {
                each: own.split[part].numpy() for each, own in nodes.items() if part in own.split
            }
            for part in SPLITS
        },
        node_time=_present(
            {each: None if own.time is None else own.time.numpy() for each, own in nodes.items()}
        ),
        edge_time=_present({each: _by_id(own, "time") for each, own in edges.items()}),
        edge_weight=_present({each: _by_id(own, "weight") for each, own in edges.items()}),
        num_classes=num_classes,
        split_name=split_name,
    )
    ogb_write.write_typed(path, arrays, binary=binary, progress=progress)


def _present(values: Mapping[Any, Any]) -> dict[Any, Any]:
    return {each: value for each, value in values.items() if value is not None}


def _ends(edges: EdgeStore) -> tuple[Array, Array]:
    src, dst = edges.edge_index().numpy()
    return src, dst


def _by_id(edges: EdgeStore, what: str) -> Array | None:
    """Return times or weights in the order of the edge ids."""
    values = getattr(edges, what)
    if values is None or edges.edge_ids is None:
        return None if values is None else values.numpy()
    ordered = np.empty_like(values.numpy())
    ordered[edges.edge_ids.numpy()] = values.numpy()
    return ordered
