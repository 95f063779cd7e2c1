"""Write datasets in OGB's layout from arrays, to test and compare their readers.

Notation: N nodes, E edges, D columns of features.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gcnzc.datasets import csvgz, ogb_write
from gcnzc.datasets.rows import Allocate, Array, Progress, Rows, rows_from_array
from gcnzc.datasets.source import SPLITS, EdgeDefaults, EdgeSplitArrays
from gcnzc.datasets.store import atomic_folder
from gcnzc.graph.arrays import ArrayGraph


class _Unchecked(ArrayGraph):
    """A graph whose edges are written as they are, also invalid ones."""

    def edges(self, allocate: Allocate, progress: Progress) -> tuple[Array, Array]:
        return self.ends


def write_nodes(
    path: str | Path,
    edge_index: Any,
    labels: Array,
    split: Mapping[str, Array],
    *,
    features: Array | Rows | None = None,
    binary: bool = True,
    split_name: str = "random",
    add_inverse_edge: bool = False,
    **fields: Any,
) -> None:
    """Write a node property dataset.

    Args:
        path: the folder; must not exist.
        edge_index: (2, E), or the pair of (E,) sources and (E,) targets.
        labels: (N,) or (N, T) integers or floating point; -1 or NaN for no label.
        split: node ids of "train", "valid" and "test".
        features: (N, D), or `Rows`.
        binary: write uncompressed npz files instead of csv.gz.
        split_name: name of the folder in `split/`.
        add_inverse_edge: each edge is stored once, and readers add its reverse.
        fields: other attributes of `ArrayGraph`: name, num_classes, metric, best_accuracy, origin
            and mapping.
    """
    rows = features if isinstance(features, Rows | None) else rows_from_array(features, "features")
    graph = _Unchecked(
        Path(path).name,
        len(labels),
        (np.asarray(edge_index[0]), np.asarray(edge_index[1])),
        rows,
        labels,
        dict(split),
        "accuracy",
        split_name,
        EdgeDefaults(add_inverse_edge, "keep", "asked for"),
        origin={},
    )
    ogb_write.write_source(path, replace(graph, **fields), binary=binary)


def write_links(
    path: str | Path,
    edge_index: Array,
    num_nodes: int,
    links: EdgeSplitArrays,
    *,
    features: Array | None = None,
    add_inverse_edge: bool = False,
    name: str | None = None,
) -> None:
    """Write a link property dataset in OGB's layout, as csv.gz; the folder is created atomically.

    Args:
        path: the folder; must not exist.
        edge_index: (2, E) sources and targets of the message-passing edges.
        num_nodes: N.
        links: the edge split with its negatives.
        features: (N, D).
        add_inverse_edge: each edge is stored once, and readers add its reverse.
        name: of the dataset; None uses the name of the folder.

    Raises:
        FileExistsError: `path` exists.
        RuntimeError: the disk is full.
    """
    path = Path(path)
    ranked = links.metric == "mrr"
    task = {
        "name": name or path.name,
        "task type": "link prediction",
        "eval metric": "rocauc" if links.metric == "auc" else links.metric,
        "add_inverse_edge": str(add_inverse_edge),
        "split": links.name,
    }
    with atomic_folder(path) as folder:
        for part in ("raw", "processed", f"split/{links.name}"):
            (folder / part).mkdir(parents=True)
        (folder / "RELEASE_v1.txt").write_text(f"# Release note for {task['name']}\n\n### v1\n")
        (folder / "task.json").write_text(json.dumps(task, indent=1) + "\n")
        csvgz.write(folder / "raw/edge.csv.gz", [np.asarray(edge_index).T])
        csvgz.write(folder / "raw/num-node-list.csv.gz", [np.array([[num_nodes]])])
        csvgz.write(folder / "raw/num-edge-list.csv.gz", [np.array([[len(edge_index[0])]])])
        if features is not None:
            csvgz.write(folder / "raw/node-feat.csv.gz", [features])
        for part in SPLITS:
            edges = np.asarray(links.edges[part], np.int64)
            negatives = links.negatives.get(part)
            fields: dict[str, Array]
            if ranked:
                fields = {"source_node": edges[0], "target_node": edges[1]}
                more = (
                    {}
                    if negatives is None
                    else {"target_node_neg": np.asarray(negatives, np.int64)}
                )
            else:
                fields = {"edge": np.ascontiguousarray(edges.T)}
                more = (
                    {}
                    if negatives is None
                    else {"edge_neg": np.asarray(negatives, np.int64).T.copy()}
                )
            torch.save(fields | more, folder / f"split/{links.name}/{part}.pt")
