"""Write node property datasets of one node type or of many in OGB's layout.

`gcnzc.datasets.ogb` and `gcnzc.datasets.ogb_hetero` describe the layout.

Notation: N nodes of a type, E edges of a type.
"""

import json
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gcnzc.datasets import csvgz
from gcnzc.datasets.names import Names
from gcnzc.datasets.ogb_hetero import JOIN
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
from gcnzc.datasets.source import SPLITS, EdgeType, HeteroArrays, Source, guess_edge_defaults
from gcnzc.datasets.store import atomic_folder, scratch_allocator

# key, shape and dtype of an array, and its consecutive parts
Member = tuple[str, tuple[int, ...], np.dtype, Iterable[Array]]


def write_source(
    path: str | Path, source: Source, *, binary: bool = True, progress: Progress = no_progress
) -> None:
    """Write a node property dataset of one node type; the folder is created atomically.

    Features are written in chunks and edges are buffered in temporary files, so that neither has to
    fit into memory. OGB's own reader does not support edges that are stored once in binary
    datasets.

    Args:
        path: the folder; must not exist.
        source: the dataset.
        binary: write uncompressed npz files instead of csv.gz.
        progress: called with counts of edges and feature rows.

    Raises:
        FileExistsError: `path` exists.
        RuntimeError: the disk is full.
        ValueError: the number of feature rows is not N.
    """
    features = source.features
    if features is not None and features.num_rows != source.num_nodes:
        raise ValueError(
            f"write: {features.num_rows:,} rows of features for {source.num_nodes:,} nodes"
        )
    # edges and features are in one file
    needed = 16 * source.num_edges
    if features is not None:
        needed += source.num_nodes * features.num_columns * features.dtype.itemsize
    with atomic_folder(Path(path), [needed] if binary else []) as folder:
        allocate = scratch_allocator(folder)
        labels = source.labels().reshape(source.num_nodes, -1)
        ends = source.edges(allocate, progress)
        defaults = source.edge_defaults() or guess_edge_defaults(ends)
        split = _write_metadata(folder, source, [labels], binary, defaults.bidirected)
        if isinstance(source.mapping, Names):
            (folder / "mapping").mkdir()
            for file, table in source.mapping.files().items():
                table.to_csv(folder / "mapping" / file, index=False)
        elif source.mapping is not None:
            shutil.copytree(source.mapping, folder / "mapping")
        for part, ids in source.split().items():
            csvgz.write(split / f"{part}.csv.gz", [ids.reshape(-1, 1)])
        rows: Iterator[Array] = iter(())
        if features is not None:
            rows = convert_chunks(features, features.dtype, True, allocate, progress)
        raw, counts = folder / "raw", (len(labels), len(ends[0]))
        if binary:
            members = [_edge_member("edge_index", ends)]
            for key, count in zip(("num_nodes_list", "num_edges_list"), counts, strict=True):
                members.append(_member(key, np.array([count])))
            if features is not None:
                shape = features.num_rows, features.num_columns
                members.append(("node_feat", shape, features.dtype, rows))
            _write_npz(raw / "data.npz", members)
            np.savez_compressed(raw / "node-label.npz", node_label=labels)
            return
        _write_edges(raw / "edge.csv.gz", ends)
        for kind, count in zip(("node", "edge"), counts, strict=True):
            csvgz.write(raw / f"num-{kind}-list.csv.gz", [np.array([[count]])])
        csvgz.write(raw / "node-label.csv.gz", [labels])
        if features is not None:
            csvgz.write(raw / "node-feat.csv.gz", rows)


def write_typed(
    path: str | Path,
    arrays: HeteroArrays,
    *,
    binary: bool = True,
    progress: Progress = no_progress,
) -> None:
    """Write a heterogeneous node property dataset; the folder is created atomically.

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
        split = _write_metadata(folder, arrays, arrays.labels.values(), binary, False)
        marked = {each for part in SPLITS for each in arrays.split.get(part, {})}
        _write_flags(split / "nodetype-has-split.csv.gz", arrays.num_nodes, marked)
        for each in sorted(marked):
            (split / each).mkdir()
            for name in SPLITS:
                ids = np.asarray(arrays.split[name][each], np.int64)
                csvgz.write(split / each / f"{name}.csv.gz", [ids.reshape(-1, 1)])
        (_write_binary if binary else _write_text)(folder / "raw", arrays, progress)


def meta_dict(path: str | Path) -> dict[str, Any]:
    """Return the `meta_dict` for OGB's `NodePropPredDataset` to open a folder of this module."""
    task = json.loads((Path(path) / "task.json").read_text())
    kept = ("num tasks", "num classes", "task type", "eval metric", "add_inverse_edge", "split")
    files = ("additional node files", "additional edge files")
    return {
        **{key: task[key] for key in (*kept, "binary", "is hetero", *files)},
        "version": 1,
        "dir_path": str(path),
        "download_name": Path(path).name,
        "url": "",
        "has_node_attr": "True",
        "has_edge_attr": "False",
    }


def _write_metadata(
    folder: Path,
    graph: Source | HeteroArrays,
    labels: Iterable[Array],
    binary: bool,
    bidirected: bool,
) -> Path:
    """Write the release file and `task.json`, and return the folder of the split."""
    split = folder / "split" / graph.split_name
    for part in (folder / "raw", folder / "processed", split):
        part.mkdir(parents=True)
    tables = [each.reshape(len(each), -1) for each in labels]
    additional: dict[str, list[str]] = {"node": [], "edge": []}
    if isinstance(graph, HeteroArrays):
        additional["node"] += ["node_time"] if graph.node_time else []
        additional["edge"] += ["edge_time"] if graph.edge_time else []
        additional["edge"] += ["edge_weight"] if graph.edge_weight else []
    largest = max(int(np.nanmax(each, initial=0)) for each in tables)
    task = {
        "name": graph.name,
        "num tasks": max(each.shape[1] for each in tables),
        "num classes": graph.num_classes or max(2, largest + 1),
        "task type": "multiclass classification",
        "eval metric": "acc" if graph.metric == "accuracy" else graph.metric,
        "add_inverse_edge": str(bidirected),
        "split": graph.split_name,
        "binary": str(binary),
        "is hetero": str(isinstance(graph, HeteroArrays)),
        **{f"additional {kind} files": ",".join(own) or "None" for kind, own in additional.items()},
        "best_accuracy": graph.best_accuracy,
        "origin": dict(graph.origin),
    }
    (folder / "RELEASE_v1.txt").write_text(f"# Release note for {graph.name}\n\n### v1\n")
    (folder / "task.json").write_text(json.dumps(task, indent=1) + "\n")
    return split


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
            "hint: OGB's layout requires labels; gcnzc.prepare(graph, dest) writes any graph"
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


def _write_flags(path: Path, names: Mapping[str, int], marked: set[str]) -> None:
    csvgz.write_lines(path, [list(names), [each in marked for each in names]])


def _write_binary(raw: Path, arrays: HeteroArrays, progress: Progress) -> None:
    def save(name: str, values: Mapping[Any, Any], make: Callable[[str, Any], Member]) -> None:
        if values:
            _write_npz(raw / f"{name}.npz", (make(_key(each), own) for each, own in values.items()))

    def column(key: str, values: Array) -> Member:
        return _member(key, values.reshape(len(values), -1))

    def features(key: str, rows: Rows) -> Member:
        return key, (rows.num_rows, rows.num_columns), _dtype(rows), _chunks(rows, progress)

    def edges(key: str, ends: tuple[Array, Array]) -> Member:
        progress(f"edges {key.split(JOIN)[1]}", len(ends[0]), len(ends[0]))
        return _edge_member(key, ends)

    counts = {each: np.array([len(ends[0])]) for each, ends in arrays.edges.items()}
    save("num_nodes_dict", {each: np.array([n]) for each, n in arrays.num_nodes.items()}, _member)
    save("num_edges_dict", counts, _member)
    save("edge_index_dict", arrays.edges, edges)
    save("node_feat_dict", arrays.node_features, features)
    save("edge_feat_dict", arrays.edge_features, features)
    save("node_time_dict", arrays.node_time, column)
    save("edge_time_dict", arrays.edge_time, column)
    save("edge_weight_dict", arrays.edge_weight, column)
    save("node-label", arrays.labels, column)


def _write_npz(path: Path, members: Iterable[Member]) -> None:
    """Write an uncompressed npz file."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for key, shape, dtype, parts in members:
            with archive.open(zipfile.ZipInfo(f"{key}.npy"), "w", force_zip64=True) as file:
                fields = {"descr": dtype.str, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, fields)
                for part in parts:
                    file.write(as_bytes(part))


def _member(key: str, values: Array) -> Member:
    return key, values.shape, values.dtype, [values]


def _edge_member(key: str, ends: Sequence[Array]) -> Member:
    step = CHUNK_BYTES // 8
    parts = (
        np.asarray(end[begin : begin + step], np.int64)
        for end in ends
        for begin in range(0, len(end), step)
    )
    return key, (2, len(ends[0])), np.dtype(np.int64), parts


def _write_edges(path: Path, ends: Sequence[Array]) -> None:
    """Write a csv.gz with one edge in each line."""
    step = CHUNK_BYTES // 16
    begins = range(0, len(ends[0]), step)
    csvgz.write(
        path, (np.stack([e[begin : begin + step] for e in ends], axis=1) for begin in begins)
    )


def _key(name: str | EdgeType) -> str:
    return name if isinstance(name, str) else JOIN.join(name)


def _dtype(rows: Rows) -> np.dtype:
    return rows.dtype if rows.dtype.kind in "iu" else stored_dtype(rows, None)


def _chunks(rows: Rows, progress: Progress) -> Iterator[Array]:
    return convert_chunks(rows, _dtype(rows), True, allocate_in_memory, progress)


def _write_text(raw: Path, arrays: HeteroArrays, progress: Progress) -> None:
    csvgz.write_lines(raw / "num-node-dict.csv.gz", [arrays.num_nodes, arrays.num_nodes.values()])
    csvgz.write_lines(raw / "triplet-type-list.csv.gz", arrays.edges)
    for each, ends in arrays.edges.items():
        folder = raw / "relations" / _key(each)
        folder.mkdir(parents=True)
        count = len(ends[0])
        _write_edges(folder / "edge.csv.gz", ends)
        csvgz.write(folder / "num-edge-list.csv.gz", [np.array([[count]])])
        if each in arrays.edge_features:
            csvgz.write(folder / "edge-feat.csv.gz", _chunks(arrays.edge_features[each], progress))
        for name, values in (("time", arrays.edge_time), ("weight", arrays.edge_weight)):
            if each in values:
                csvgz.write(folder / f"edge_{name}.csv.gz", [values[each][:, None]])
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
