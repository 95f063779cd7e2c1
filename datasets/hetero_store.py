"""Prepared folders of heterogeneous graphs: `.npy` arrays by type, and one `meta.json`.

The files have the format of `gcnzc.datasets.store`, with a folder for each type:

    meta.json                 types, sizes, checksums, origin
    nodes/0/                  the first node type: features*.npy, labels.npy, time.npy and
                              split_*.npy, as far as it has them
    nodes/0/mapping/          nodes.csv and classes.csv, see `gcnzc.datasets.names`, as far as nodes
                              and classes have names
    edges/0/                  the first edge type: indptr.npy and indices.npy, and edge_ids.npy,
                              time.npy, weight.npy and features*.npy, as far as it has them
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gcnzc.datasets import store
from gcnzc.datasets.array_files import map_arrays
from gcnzc.datasets.meta import HETERO_VERSION, check_arrays, read_versioned
from gcnzc.datasets.meta_features import (
    FEATURES,
    Expected,
    check_features,
    check_pitch,
    expected_features,
)
from gcnzc.datasets.meta_rules import (
    BOOL,
    COUNT,
    FILE,
    HEX,
    OBJECT,
    SIZES,
    TEXT,
    Rule,
    Table,
    check_files,
    check_tables,
    integer,
    invalid,
    one_of,
    optional,
    or_null,
)
from gcnzc.datasets.rows import Array, Progress, no_progress
from gcnzc.datasets.source import SPLITS, node_dtype

_NAMES = Rule("a list of strings", (str,), is_list=True)
_TABLES = Rule("a list of objects", (dict,), is_list=True)
_TOP_LEVEL: Mapping[str, Rule] = {
    "name": TEXT,
    "nodes": _TABLES,
    "edges": _TABLES,
    # absent for times of an unknown unit
    "time_unit": optional(one_of("s", "ms", "us", "ns")),
    "origin": OBJECT,
    "files": OBJECT,
    "crc32": optional(HEX),
}
_NODES: Mapping[str, Rule] = {
    "type": TEXT,
    "num_nodes": integer(1),
    "features": or_null(OBJECT),
    "labels": or_null(OBJECT),
    "split": OBJECT,
    "time": BOOL,
}
_LABELS: Mapping[str, Rule] = {"shape": SIZES, "dtype": TEXT}
_EDGES: Mapping[str, Rule] = {
    "type": _NAMES,
    "num_edges": COUNT,
    "features": or_null(OBJECT),
    "edge_ids": BOOL,
    "time": BOOL,
    "weight": BOOL,
}


def is_hetero(folder: Path) -> bool:
    """Whether `folder` is a prepared folder of a heterogeneous graph."""
    if not store.is_prepared(folder):
        return False
    try:
        read_versioned(folder, (HETERO_VERSION,))
    except ValueError:
        return False
    return True


def read_meta(folder: Path) -> dict[str, Any]:
    """Read and validate the `meta.json` of a heterogeneous graph.

    Raises:
        ValueError: the file is damaged, or its format version is not supported.
    """
    path = folder / "meta.json"
    meta = read_versioned(folder, (HETERO_VERSION,))
    check_tables([("", meta, _TOP_LEVEL)], path)
    check_tables([(f"files: {name}", entry, FILE) for name, entry in meta["files"].items()], path)
    check_files(meta["files"], path)
    sizes: dict[str, int] = {}
    for number, own in enumerate(meta["nodes"]):
        where = f"nodes: {number}"
        check_tables([(where, own, _NODES)], path)
        if own["labels"] is not None:
            check_tables([(f"{where}: labels", own["labels"], _LABELS)], path)
        unknown = [part for part in own["split"] if part not in SPLITS]
        if unknown or not all(type(count) is int for count in own["split"].values()):
            raise invalid(path, f"{where}: split", own["split"], "numbers of nodes by split")
        if own["type"] in sizes:
            raise invalid(path, f"{where}: type", own["type"], "a name of its own")
        sizes[own["type"]] = own["num_nodes"]
    for number, own in enumerate(meta["edges"]):
        where = f"edges: {number}"
        check_tables([(where, own, _EDGES)], path)
        ends = [own["type"][0], own["type"][-1]] if len(own["type"]) == 3 else []
        if not ends or not all(each in sizes for each in ends):
            raise invalid(path, f"{where}: type", own["type"], "two node types and a relation")
    for kind, number, own in _entries(meta):
        if own["features"] is not None:
            check_tables([(f"{kind}: {number}: features", own["features"], FEATURES)], path)
            check_features(own["features"], path)
    check_arrays(_expected_arrays(meta, sizes), meta["files"], path)
    for kind, number, own in _entries(meta):
        if own["features"] is not None:
            check_pitch(own["features"], meta["files"], path, front_of(kind, number))
    return meta


def front_of(kind: str, number: int) -> str:
    """Return the begin of the names of the files of a type; `kind` is "nodes" or "edges"."""
    return f"{kind}/{number}/"


def _entries(meta: Table) -> list[tuple[str, int, dict[str, Any]]]:
    return [
        (kind, number, own) for kind in ("nodes", "edges") for number, own in enumerate(meta[kind])
    ]


def _expected_arrays(meta: Table, sizes: Mapping[str, int]) -> Expected:
    expected: Expected = {}
    for kind, number, own in _entries(meta):
        front = front_of(kind, number)
        count = own["num_nodes"] if kind == "nodes" else own["num_edges"]
        if own["features"] is not None:
            expected |= expected_features(own["features"], count, meta["files"], front)
        if own["time"]:
            expected[f"{front}time.npy"] = ((count,), ("<i8",))
        if kind == "nodes":
            if own["labels"] is not None:
                shape = (count, *own["labels"]["shape"][1:])
                expected[f"{front}labels.npy"] = (shape, ("<i8", "<f4"))
            for part, length in own["split"].items():
                expected[f"{front}split_{part}.npy"] = ((length,), ("<i8",))
            continue
        source, _, target = own["type"]
        expected[f"{front}indptr.npy"] = ((sizes[target] + 1,), ("<i8",))
        expected[f"{front}indices.npy"] = ((count,), (node_dtype(sizes[source]).str,))
        if own["edge_ids"]:
            expected[f"{front}edge_ids.npy"] = ((count,), ("<i8",))
        if own["weight"]:
            expected[f"{front}weight.npy"] = ((count,), ("<f4",))
    return expected


def open_folder(
    folder: Path, *, read_only: bool = False
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Memory-map the folder of a heterogeneous graph; see `gcnzc.datasets.store.open_folder`.

    Returns:
        The metadata, and the mapped arrays by the names of their files.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: `meta.json` or the size or dtype of a file is invalid.
    """
    if not store.is_prepared(folder):
        raise FileNotFoundError(f"no prepared folder {folder}\n\nhint: is the path right?")
    meta = read_meta(folder)
    store.check_sizes(folder, meta["files"])
    arrays = map_arrays(folder, meta["files"], read_only)
    for number, own in enumerate(meta["edges"]):
        front = front_of("edges", number)
        store.check_ends(folder, arrays[f"{front}indptr.npy"], own["num_edges"], front)
    return meta, arrays


def verify(folder: Path, progress: Progress = no_progress) -> None:
    """Read every file of the folder and compare its checksum with `meta.json`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a checksum differs; the message names the file.
    """
    store.verify_files(folder, open_folder(folder)[0]["files"], progress)
