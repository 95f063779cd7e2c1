"""Write heterogeneous node property datasets in OGB's layout, see `gcnzc.datasets.ogb_hetero`.

Notation: N nodes of a type, E edges of a type.
"""

import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gcnzc.datasets import csvgz, ogb
from gcnzc.datasets.ogb_hetero import JOIN
from gcnzc.datasets.ogb_layout import npz_member
from gcnzc.datasets.rows import (
    CHUNK_BYTES,
    Array,
    Progress,
    Rows,
    allocate_in_memory,
    as_bytes,
    convert_chunks,
    no_progress,
    stored_dtype,
)
from gcnzc.datasets.source import SPLITS, EdgeType, HeteroArrays
from gcnzc.datasets.store import atomic_folder


def write(
    path: str | Path,
    arrays: HeteroArrays,
    *,
    binary: bool = True,
    progress: Progress = no_progress,
) -> None:
    """Write a heterogeneous node property dataset in OGB's layout, atomically.

    Args:
        path: the folder; must not exist.
        arrays: the graph. Features that are not finite are written as they are.
        binary: write uncompressed npz files instead of csv.gz.
        progress: called with counts of edges and feature rows.

    Raises:
        FileExistsError: `path` exists.
        RuntimeError: the disk is full.
        ValueError: a name of a type cannot be part of the name of a file, no type has labels, a
            split is incomplete, or an edge type without edges would be a csv.gz.
    """
    _check(arrays, binary)
    # all edges are in one file
    needed = [16 * sum(len(ends[0]) for ends in arrays.edges.values())] if binary else []
    with atomic_folder(Path(path), needed) as folder:
        split = folder / "split" / arrays.split_name
        for part in (folder / "raw", folder / "processed", split):
            part.mkdir(parents=True)
        (folder / "RELEASE_v1.txt").write_text(f"# Release note for {arrays.name}\n\n### v1\n")
        (folder / "task.json").write_text(json.dumps(_task(arrays, binary), indent=1) + "\n")
        marked = {each for part in SPLITS for each in arrays.split.get(part, {})}
        _write_flags(split / "nodetype-has-split.csv.gz", arrays.num_nodes, marked)
        for each in sorted(marked):
            (split / each).mkdir()
            for name in SPLITS:
                ids = np.asarray(arrays.split[name][each], np.int64)
                csvgz.write(split / each / f"{name}.csv.gz", [ids.reshape(-1, 1)])
        (_write_binary if binary else _write_text)(folder / "raw", arrays, progress)


def meta_dict(path: str | Path) -> dict[str, Any]:
    """Return the `meta_dict` for OGB's `NodePropPredDataset` to open a folder of `write`."""
    task = json.loads((Path(path) / "task.json").read_text())
    files = {key: task[key] for key in ("additional node files", "additional edge files")}
    return ogb.meta_dict(path) | files | {"is hetero": "True"}


def _check(arrays: HeteroArrays, binary: bool) -> None:
    """Check that the layout can hold a graph; names of types are joined by `JOIN`."""
    names = {*arrays.num_nodes, *(relation for _, relation, _ in arrays.edges)}
    for name in names:
        if "/" in name or JOIN in name or name.startswith((".", "_")) or name.endswith("_"):
            raise ValueError(
                f"the type {name!r} cannot be part of the name of a file\n\n"
                f"hint: names without a slash and {JOIN!r}, and without an underscore at an end"
            )
    if not arrays.labels:
        raise ValueError(
            "no node type has labels\n\n"
            "hint: OGB's layout requires labels; Graph.save writes any graph"
        )
    parts = [set(arrays.split.get(part, {})) for part in SPLITS]
    if not parts[0] or any(part != parts[0] for part in parts):
        raise ValueError(
            f"the splits have the node types {', '.join(map(str, map(sorted, parts)))}\n\n"
            "hint: OGB's layout requires train, valid and test of the same types"
        )
    empty = [each for each, ends in arrays.edges.items() if not len(ends[0])]
    if empty and not binary:
        raise ValueError(
            f"edge type {empty[0]} has no edges, which OGB cannot read from a csv.gz\n\n"
            "hint: binary=True, or leave out the edge type"
        )


def _task(arrays: HeteroArrays, binary: bool) -> dict[str, Any]:
    labels = [each.reshape(len(each), -1) for each in arrays.labels.values()]
    largest = max(int(np.nanmax(each, initial=0)) for each in labels)
    times = {"node": bool(arrays.node_time), "edge": bool(arrays.edge_time)}
    additional = {kind: [f"{kind}_time"] if has else [] for kind, has in times.items()}
    additional["edge"] += ["edge_weight"] if arrays.edge_weight else []
    return {
        "name": arrays.name,
        "num tasks": max(each.shape[1] for each in labels),
        "num classes": arrays.num_classes or max(2, largest + 1),
        "task type": "multiclass classification",
        "eval metric": "acc" if arrays.metric == "accuracy" else arrays.metric,
        "add_inverse_edge": "False",
        "split": arrays.split_name,
        "binary": str(binary),
        "additional node files": ",".join(additional["node"]) or "None",
        "additional edge files": ",".join(additional["edge"]) or "None",
        "best_accuracy": arrays.best_accuracy,
        "origin": dict(arrays.origin),
    }


def _write_flags(path: Path, names: Mapping[str, int], marked: set[str]) -> None:
    csvgz.write_lines(path, [list(names), [each in marked for each in names]])


def _write_binary(raw: Path, arrays: HeteroArrays, progress: Progress) -> None:
    def save(name: str, values: Mapping[Any, Array]) -> None:
        if values:
            with _open(raw / f"{name}.npz") as archive:
                for each, own in values.items():
                    with npz_member(archive, _key(each), own.shape, own.dtype) as file:
                        file.write(as_bytes(own))

    def columns(values: Mapping[Any, Array]) -> dict[Any, Array]:
        return {each: own.reshape(len(own), -1) for each, own in values.items()}

    counts = {each: np.array([len(ends[0])]) for each, ends in arrays.edges.items()}
    save("num_nodes_dict", {each: np.array([size]) for each, size in arrays.num_nodes.items()})
    save("num_edges_dict", counts)
    with _open(raw / "edge_index_dict.npz") as archive:
        for each, ends in arrays.edges.items():
            shape = (2, len(ends[0]))
            with npz_member(archive, _key(each), shape, np.dtype(np.int64)) as file:
                for end in ends:
                    for begin in range(0, len(end), CHUNK_BYTES // 8):
                        ids = np.asarray(end[begin : begin + CHUNK_BYTES // 8], np.int64)
                        file.write(as_bytes(ids))
            progress(f"edges {each[1]}", shape[1], shape[1])
    for name, features in (
        ("node_feat_dict", arrays.node_features),
        ("edge_feat_dict", arrays.edge_features),
    ):
        if features:
            with _open(raw / f"{name}.npz") as archive:
                for own, rows in features.items():
                    shape, dtype = (rows.num_rows, rows.num_columns), _dtype(rows)
                    with npz_member(archive, _key(own), shape, dtype) as file:
                        for chunk in _chunks(rows, progress):
                            file.write(as_bytes(chunk))
    save("node_time_dict", columns(arrays.node_time))
    save("edge_time_dict", columns(arrays.edge_time))
    save("edge_weight_dict", columns(arrays.edge_weight))
    save("node-label", columns(arrays.labels))


def _open(path: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True)


def _key(name: str | EdgeType) -> str:
    return name if isinstance(name, str) else JOIN.join(name)


def _dtype(rows: Rows) -> np.dtype:
    return rows.dtype if rows.dtype.kind in "iu" else stored_dtype(rows, None)


def _chunks(rows: Rows, progress: Progress) -> Iterator[Array]:
    return convert_chunks(rows, _dtype(rows), True, allocate_in_memory, progress)


def _write_text(raw: Path, arrays: HeteroArrays, progress: Progress) -> None:
    csvgz.write_lines(
        raw / "num-node-dict.csv.gz", [list(arrays.num_nodes), list(arrays.num_nodes.values())]
    )
    csvgz.write_lines(raw / "triplet-type-list.csv.gz", arrays.edges)
    step = CHUNK_BYTES // 16
    for each, ends in arrays.edges.items():
        folder = raw / "relations" / _key(each)
        folder.mkdir(parents=True)
        count = len(ends[0])
        csvgz.write(
            folder / "edge.csv.gz",
            (
                np.stack([end[begin : begin + step] for end in ends], axis=1)
                for begin in range(0, count, step)
            ),
        )
        csvgz.write(folder / "num-edge-list.csv.gz", [np.array([[count]])])
        if each in arrays.edge_features:
            csvgz.write(folder / "edge-feat.csv.gz", _chunks(arrays.edge_features[each], progress))
        if each in arrays.edge_time:
            csvgz.write(folder / "edge_time.csv.gz", [arrays.edge_time[each][:, None]])
        if each in arrays.edge_weight:
            csvgz.write(folder / "edge_weight.csv.gz", [arrays.edge_weight[each][:, None]])
        progress(f"edges {each[1]}", count, count)
    for name in arrays.num_nodes:
        folder = raw / "node-feat" / name
        folder.mkdir(parents=True)
        if name in arrays.node_features:
            csvgz.write(folder / "node-feat.csv.gz", _chunks(arrays.node_features[name], progress))
        if name in arrays.node_time:
            csvgz.write(folder / "node_time.csv.gz", [arrays.node_time[name][:, None]])
    _write_flags(raw / "nodetype-has-label.csv.gz", arrays.num_nodes, set(arrays.labels))
    for name, labels in arrays.labels.items():
        folder = raw / "node-label" / name
        folder.mkdir(parents=True)
        csvgz.write(folder / "node-label.csv.gz", [labels.reshape(len(labels), -1)])
