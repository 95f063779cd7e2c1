"""The schema of a prepared folder's `meta.json`: keys, types and consistency.

All values are validated when the folder is opened, so that other code can rely on them.
`gcnzc.datasets.store` compares the description of each file with the file.

Notation: N nodes, E edges, D columns of features, T tasks.
"""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import numpy as np

from gcnzc.datasets.meta_features import (
    FEATURES,
    Expected,
    check_features,
    check_pitch,
    expected_features,
)
from gcnzc.datasets.meta_rules import (
    AGAIN,
    BOOL,
    COUNT,
    FILE,
    FRACTION,
    HEX,
    OBJECT,
    TEXT,
    VERIFY,
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
from gcnzc.datasets.source import METRICS, SPLITS, max_classes, node_dtype

FORMAT = "gcnzc-graph"
VERSION = 1
# version of folders with coded features, which version 1 readers would misread as plain integers
CODED_VERSION = 2
# version of folders with several types of nodes and edges, see `gcnzc.datasets.hetero_store`
HETERO_VERSION = 3

_TOP_LEVEL: Mapping[str, Rule] = {
    "name": TEXT,
    "num_nodes": COUNT,
    "num_edges": COUNT,
    "num_classes": COUNT,
    "num_tasks": integer(1),
    "num_labelled": COUNT,
    "metric": one_of(*dict.fromkeys(METRICS.values())),
    "best_accuracy": or_null(FRACTION),
    "features": or_null(OBJECT),
    "split": OBJECT,
    "options": OBJECT,
    "origin": OBJECT,
    "links": optional(or_null(OBJECT)),
    "files": OBJECT,
    "crc32": optional(HEX),
}
_SPLIT: Mapping[str, Rule] = {
    "name": TEXT,
    **dict.fromkeys(SPLITS, COUNT),
    "dropped_without_label": optional(OBJECT),
}
_OPTIONS: Mapping[str, Rule] = {
    "bidirected": BOOL,
    "because": TEXT,
    "self_loops": one_of("keep", "add", "remove"),
    "duplicates": one_of("keep", "remove"),
}
_LINKS: Mapping[str, Rule] = {
    "name": TEXT,
    "metric": Rule(
        '"auc", "mrr" or "hits@K"', (str,), pattern=re.compile(r"auc|mrr|hits@[1-9]\d*")
    ),
    **dict.fromkeys(SPLITS, COUNT),
}


def read_meta(folder: Path) -> dict[str, Any]:
    """Read and validate the `meta.json` of a prepared folder.

    Raises:
        ValueError: the file is damaged, or its format version is not supported.
    """
    path = folder / "meta.json"
    meta = read_versioned(folder, (VERSION, CODED_VERSION))
    check_tables([("", meta, _TOP_LEVEL)], path)
    tables = [("split", meta["split"], _SPLIT), ("options", meta["options"], _OPTIONS)]
    for name, entry in meta["files"].items():
        tables.append((f"files: {name}", entry, FILE))
    for key, rules in (("features", FEATURES), ("links", _LINKS)):
        if meta.get(key) is not None:
            tables.append((key, meta[key], rules))
    check_tables(tables, path)
    check_files(meta["files"], path)
    _check_features(meta, path)
    _check_arrays(meta, path)
    _check_numbers(meta, path)
    return meta


def read_versioned(folder: Path, versions: Sequence[int]) -> dict[str, Any]:
    """Read a `meta.json`, and check its format version and its checksum.

    Raises:
        ValueError: the file is damaged, or its format version is not one of `versions`.
    """
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}\n\n{AGAIN}") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ValueError(f"{path} is not the meta.json of a prepared folder\n\n{AGAIN}")
    version = meta.get("version")
    if type(version) is int and version not in versions:
        if version == HETERO_VERSION:
            raise ValueError(
                f"{folder} has a heterogeneous graph\n\nhint: "
                f"gcnzc.graph.hetero.HeteroGraph.load({str(folder)!r})"
            )
        if HETERO_VERSION in versions and version in (VERSION, CODED_VERSION):
            raise ValueError(
                f"{folder} has a graph of one node type\n\nhint: gcnzc.load({str(folder)!r})"
            )
    if type(version) is not int or version not in versions:
        given = "no format version"
        if version is not None:
            given = f"format version {shortened(version)}"
        raise ValueError(
            f"{path} has {given}, but this version of gcnzc reads {VERSION}, {CODED_VERSION} and "
            f"{HETERO_VERSION}\n\n{AGAIN}, or install the gcnzc that wrote it"
        )
    _check_crc(meta, path)
    return meta


def checksum_of(meta: Table) -> str:
    """Return the CRC-32 of all values in `meta` except the checksum itself."""
    rest = dict(meta)
    rest.pop("crc32", None)
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True).encode()):08x}"


def _check_crc(meta: Table, path: Path) -> None:
    # folders of older versions have no checksum
    if "crc32" in meta and meta["crc32"] != checksum_of(meta):
        raise ValueError(
            f"{path} was changed after it was written: its checksum is {checksum_of(meta)}, not "
            f"{shortened(meta['crc32'])}\n\n{AGAIN}; if you edited it on purpose, remove the key "
            "crc32"
        )


def _check_features(meta: Table, path: Path) -> None:
    """Check that the values of the features are consistent, and that the version has their kind."""
    fields = meta["features"]
    if fields is None:
        return
    if (fields["kind"] == "codes") != (meta["version"] == CODED_VERSION):
        wanted = f"a kind that format version {meta['version']} has"
        raise invalid(path, "features: kind", fields["kind"], wanted)
    check_features(fields, path)


def _expected_arrays(meta: Table) -> Expected:
    """Return the shape and the dtypes of each array; None in a shape stands for any size."""
    num_nodes, num_tasks, fields = meta["num_nodes"], meta["num_tasks"], meta["features"]
    ids = (node_dtype(num_nodes).str,)
    expected: Expected = {
        "indptr.npy": ((num_nodes + 1,), ("<i8",)),
        "indices.npy": ((meta["num_edges"],), ids),
        "labels.npy": ((num_nodes,), ("<i8",)),
    }
    if num_tasks != 1:
        expected["labels.npy"] = ((num_nodes, num_tasks), ("<i8", "<f4"))
    for part in SPLITS:
        expected[f"split/{part}.npy"] = ((meta["split"][part],), ("<i8",))
    if fields is not None:
        expected |= expected_features(fields, num_nodes, meta["files"])
    links = meta.get("links")
    if links is not None:
        for part in SPLITS:
            expected[f"links/{part}.npy"] = ((2, links[part]), ids)
        for part in SPLITS[1:]:
            rows = links[part] if links["metric"] == "mrr" else 2
            expected[f"links/{part}_negatives.npy"] = ((rows, None), ids)
    return expected


def _check_arrays(meta: Table, path: Path) -> None:
    """Check that all arrays are listed, with the shapes and dtypes that other values require."""
    check_arrays(_expected_arrays(meta), meta["files"], path)


def check_arrays(expected: Expected, files: Table, path: Path) -> None:
    """Check that all expected arrays are listed, with their shapes and dtypes."""
    for name, (shape, dtypes) in expected.items():
        entry = files.get(name)
        if entry is None or "shape" not in entry:
            raise ValueError(f"{path} does not list {name!r}\n\n{AGAIN}")
        found = entry["shape"]
        has_dtype = entry["dtype"] in dtypes
        fits = len(found) == len(shape)
        for size, wanted in zip(found, shape, strict=False):
            fits = fits and wanted in (None, size)
        if not fits or not has_dtype:
            sizes = ", ".join("any" if size is None else str(size) for size in shape)
            kinds = " or ".join(str(np.dtype(each)) for each in dtypes)
            raise ValueError(
                f"{path}: {name} has shape {tuple(found)} and type {np.dtype(entry['dtype'])}, not "
                f"({sizes}) and {kinds}, as the other values require\n\n"
                f"{VERIFY.format(path.parent)}"
            )


def _check_numbers(meta: Table, path: Path) -> None:
    """Check the numbers that have an upper bound, and the pitch."""
    num_nodes, fields = meta["num_nodes"], meta["features"]
    for key, most in (("num_labelled", num_nodes), ("num_classes", max_classes(num_nodes))):
        if meta[key] > most:
            raise invalid(path, key, meta[key], f"at most {most}, with {num_nodes} nodes")
    if fields is not None:
        check_pitch(fields, meta["files"], path)
