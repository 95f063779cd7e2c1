"""The schema of a prepared folder's `meta.json`: keys, types and consistency.

All values are validated when the folder is opened, so that other code can rely on them.
`gcnzc.datasets.store` compares the description of each file with the file.

Notation: N nodes, E edges, D columns of features, T tasks.
"""

import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from reprlib import repr as shortened
from typing import Any

import numpy as np

from gcnzc.datasets.rows import CODES
from gcnzc.datasets.source import METRICS, SPLITS, max_classes, node_dtype

FORMAT = "gcnzc-graph"
VERSION = 1
# version of folders with coded features, which version 1 readers would misread as plain integers
CODED_VERSION = 2
# data starts at a page boundary, so that whole pages can be mapped, locked and read by a device
HEADER_BYTES = 4096
AGAIN = "hint: prepare the folder again from its source"
# dtypes of features that are not stored as codes, as in the header of a file
PLAIN_DTYPES = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}
VERIFY = "hint: `gcnzc info {} --verify` reports what is damaged; prepare the folder again"

Table = Mapping[str, Any]


@dataclass(frozen=True)
class _Rule:
    """A constraint on a value, and its description for messages."""

    words: str
    # exact types: bool is a subclass of int in Python, but true is not a number in JSON
    types: tuple[type, ...]
    bounds: tuple[float, float] | None = None
    pattern: re.Pattern[str] | None = None  # of a whole string
    is_list: bool = False  # the constraint is on the elements of a list
    is_required: bool = True


def _or_null(rule: _Rule) -> _Rule:
    return replace(rule, words=f"{rule.words} or null", types=(*rule.types, type(None)))


def _optional(rule: _Rule) -> _Rule:
    return replace(rule, is_required=False)


def _one_of(*choices: str) -> _Rule:
    words = " or ".join(json.dumps(choice) for choice in choices)
    return _Rule(words, (str,), pattern=re.compile("|".join(map(re.escape, choices))))


def _integer(least: int = 0) -> _Rule:
    return _Rule(f"an integer of at least {least}", (int,), (least, math.inf))


_COUNT = _integer()
_TEXT = _Rule("a string", (str,))
_BOOL = _Rule("true or false", (bool,))
_OBJECT = _Rule("an object", (dict,))
_FRACTION = _Rule("a number from 0 to 1", (int, float), (0, 1))
_SIZES = _Rule("a list of integers", (int,), (0, math.inf), is_list=True)
_HEX = _Rule("eight hexadecimal digits", (str,), pattern=re.compile("[0-9a-f]{8}"))

_TOP_LEVEL: Mapping[str, _Rule] = {
    "name": _TEXT,
    "num_nodes": _COUNT,
    "num_edges": _COUNT,
    "num_classes": _COUNT,
    "num_tasks": _integer(1),
    "num_labelled": _COUNT,
    "metric": _one_of(*dict.fromkeys(METRICS.values())),
    "best_accuracy": _or_null(_FRACTION),
    "features": _or_null(_OBJECT),
    "split": _OBJECT,
    "options": _OBJECT,
    "origin": _OBJECT,
    "links": _optional(_or_null(_OBJECT)),
    "files": _OBJECT,
    "crc32": _optional(_HEX),
}
_FEATURES: Mapping[str, _Rule] = {
    "kind": _one_of("dense", "codes", "sparse"),
    "columns": _COUNT,
    "dtype": _TEXT,
    "pitch_bytes": _or_null(_COUNT),
    "pitch_reason": _optional(_or_null(_TEXT)),
    "finite": _BOOL,
    "normalized": _optional(_BOOL),
    "scales": _optional(_or_null(_one_of("row", "columns"))),
    "scale_columns": _optional(_or_null(_integer(1))),
}
_SPLIT: Mapping[str, _Rule] = {
    "name": _TEXT,
    **dict.fromkeys(SPLITS, _COUNT),
    "dropped_without_label": _optional(_OBJECT),
}
_OPTIONS: Mapping[str, _Rule] = {
    "bidirected": _BOOL,
    "because": _TEXT,
    "self_loops": _one_of("keep", "add", "remove"),
    "duplicates": _one_of("keep", "remove"),
}
_LINKS: Mapping[str, _Rule] = {
    "name": _TEXT,
    "metric": _Rule(
        '"auc", "mrr" or "hits@K"', (str,), pattern=re.compile(r"auc|mrr|hits@[1-9]\d*")
    ),
    **dict.fromkeys(SPLITS, _COUNT),
}
_FILE: Mapping[str, _Rule] = {
    "shape": _optional(_SIZES),
    "dtype": _optional(_TEXT),
    "bytes": _COUNT,
    "crc32": _HEX,
}


def read_meta(folder: Path) -> dict[str, Any]:
    """Read and validate the `meta.json` of a prepared folder.

    Raises:
        ValueError: the file is damaged, or its format version is not supported.
    """
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}\n\n{AGAIN}") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ValueError(f"{path} is not the meta.json of a prepared folder\n\n{AGAIN}")
    version = meta.get("version")
    if type(version) is not int or version not in (VERSION, CODED_VERSION):
        raise ValueError(
            f"{folder} has format version {shortened(version)}, but this version of gcnzc reads "
            f"{VERSION} and {CODED_VERSION}\n\n{AGAIN}, or install the gcnzc that wrote it"
        )
    _check_crc(meta, path)
    _check_tables([("", meta, _TOP_LEVEL)], path)
    tables = [("split", meta["split"], _SPLIT), ("options", meta["options"], _OPTIONS)]
    for name, entry in meta["files"].items():
        tables.append((f"files: {name}", entry, _FILE))
    for key, rules in (("features", _FEATURES), ("links", _LINKS)):
        if meta.get(key) is not None:
            tables.append((key, meta[key], rules))
    _check_tables(tables, path)
    _check_files(meta["files"], path)
    _check_features(meta, path)
    _check_arrays(meta, path)
    _check_numbers(meta, path)
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


def _check_tables(tables: Sequence[tuple[str, Any, Mapping[str, _Rule]]], path: Path) -> None:
    """Check that tables have the required keys and that their values follow the rules.

    Args:
        tables: name for messages, values and rules of each table.
        path: the file, for messages.
    """
    for where, values, rules in tables:
        if type(values) is not dict:
            raise _invalid(path, where, values, _OBJECT.words)
        missing, wrong = [], []
        for key, rule in rules.items():
            if key not in values:
                if rule.is_required:
                    missing.append(key)
                continue
            value = values[key]
            items = [value]
            if rule.is_list:
                items = value if type(value) is list else [None]
            for item in items:
                is_valid = type(item) in rule.types
                if is_valid and item is not None and rule.bounds is not None:
                    is_valid = rule.bounds[0] <= item <= rule.bounds[1]
                if is_valid and item is not None and rule.pattern is not None:
                    is_valid = rule.pattern.fullmatch(item) is not None
                if not is_valid:
                    wrong.append(key)
        if missing:
            context = f" in {where}" if where else ""
            raise ValueError(f"{path} has no {', '.join(missing)}{context}\n\n{AGAIN}")
        if wrong:
            key = wrong[0]
            name = f"{where}: {key}" if where else key
            raise _invalid(path, name, values[key], rules[key].words)


def _invalid(path: Path, what: str, value: object, words: str) -> ValueError:
    hint = VERIFY.format(path.parent)
    return ValueError(f"{path}: {what} is {shortened(value)}, not {words}\n\n{hint}")


def _check_files(files: Table, path: Path) -> None:
    """Check the names, shapes and sizes of all files."""
    for name, entry in files.items():
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or "\0" in name or not name:
            raise _invalid(path, "a name in files", name, "the name of a file in the folder")
        if ("shape" in entry) != ("dtype" in entry):
            raise ValueError(f"{path} does not have both shape and dtype of {name}\n\n{AGAIN}")
        if "shape" not in entry:
            continue
        if entry["dtype"] not in ("<i8", "<i4", "<f8", "<f4", "<f2", "|i1", "|u1", "<u2"):
            raise _invalid(path, f"files: {name}: dtype", entry["dtype"], "a supported dtype")
        expected = HEADER_BYTES + math.prod(entry["shape"]) * np.dtype(entry["dtype"]).itemsize
        if entry["bytes"] != expected:
            raise _invalid(
                path, f"files: {name}: bytes", entry["bytes"], f"{expected}, the size for its shape"
            )


def _check_features(meta: Table, path: Path) -> None:
    """Check that the values of the features are consistent."""
    fields = meta["features"]
    if fields is None:
        return
    kind, scales, per = fields["kind"], fields.get("scales"), fields.get("scale_columns")
    is_coded = kind == "codes"
    if is_coded != (meta["version"] == CODED_VERSION):
        raise _invalid(
            path, "features: kind", kind, f"a kind that format version {meta['version']} has"
        )
    if kind == "sparse" and fields["pitch_bytes"] is not None:
        raise _invalid(path, "features: pitch_bytes", fields["pitch_bytes"], "null for sparse")
    dtypes = CODES if is_coded else PLAIN_DTYPES
    if fields["dtype"] not in dtypes:
        words = " or ".join(CODES) if is_coded else "float32 or float16"
        raise _invalid(path, "features: dtype", fields["dtype"], words)
    # bfloat16 codes are values without a scale; all other codes need one
    if is_coded and (fields["dtype"] == "bfloat16") != (scales is None):
        raise _invalid(path, "features: scales", scales, f"valid for {fields['dtype']}")
    if (scales is not None and not is_coded) or (per is not None) != (scales == "columns"):
        raise _invalid(
            path, "features: scale_columns", per, f"valid for {kind} with scales {scales!r}"
        )


def _expected_arrays(meta: Table) -> dict[str, tuple[tuple[int | None, ...], tuple[str, ...]]]:
    """Return the shape and the dtypes of each array; None in a shape stands for any size."""
    num_nodes, num_tasks, fields = meta["num_nodes"], meta["num_tasks"], meta["features"]
    ids = (node_dtype(num_nodes).str,)
    expected: dict[str, tuple[tuple[int | None, ...], tuple[str, ...]]] = {
        "indptr.npy": ((num_nodes + 1,), ("<i8",)),
        "indices.npy": ((meta["num_edges"],), ids),
        "labels.npy": ((num_nodes,), ("<i8",)),
    }
    if num_tasks != 1:
        expected["labels.npy"] = ((num_nodes, num_tasks), ("<i8", "<f4"))
    for part in SPLITS:
        expected[f"split/{part}.npy"] = ((meta["split"][part],), ("<i8",))
    if fields is not None and fields["kind"] == "sparse":
        indices = meta["files"].get("features_indices.npy", {}).get("shape") or [None]
        expected["features_indptr.npy"] = ((num_nodes + 1,), ("<i4", "<i8"))
        expected["features_indices.npy"] = ((None,), ("<i4", "<i8"))
        expected["features_values.npy"] = ((indices[0],), (PLAIN_DTYPES[fields["dtype"]],))
    elif fields is not None:
        name = fields["dtype"]
        dtype = np.dtype(CODES[name]).str if name in CODES else PLAIN_DTYPES[name]
        expected["features.npy"] = ((num_nodes, None), (dtype,))
        if fields.get("scales") is not None:
            per = fields.get("scale_columns")
            count = num_nodes if per is None else -(-fields["columns"] // per)
            expected["features_scales.npy"] = ((count,), ("<f4",))
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
    for name, (shape, dtypes) in _expected_arrays(meta).items():
        entry = meta["files"].get(name)
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
            raise _invalid(path, key, meta[key], f"at most {most}, with {num_nodes} nodes")
    if fields is None or fields["kind"] == "sparse":
        return
    entry = meta["files"]["features.npy"]
    columns, width = fields["columns"], entry["shape"][1]
    if columns > width:
        raise _invalid(
            path, "features: columns", columns, f"at most {width}, which features.npy has"
        )
    pitch = width * np.dtype(entry["dtype"]).itemsize
    if fields["pitch_bytes"] != pitch:
        expected = f"{pitch}, the row pitch of features.npy"
        raise _invalid(path, "features: pitch_bytes", fields["pitch_bytes"], expected)
