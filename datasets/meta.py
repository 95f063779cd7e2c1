"""The schema of a prepared folder's `meta.json`: keys, types and consistency.

All values are validated when the folder is opened, so that other code can rely on them.
`gcnzc.datasets.store` compares the description of each file with the file.

Letters: N nodes, E edges, D columns of features, T tasks.
"""

import json
import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from reprlib import repr as shortened
from typing import Any

import numpy as np

from gcnzc.datasets.rows import CODES
from gcnzc.datasets.source import METRICS, PARTS, max_classes, node_dtype

FORMAT = "gcnzc-graph"
VERSION = 1
# version of folders with coded features, which version 1 readers would misread as plain integers
CODED_VERSION = 2
# data starts at a page boundary, so that whole pages can be mapped, locked and read by a device
HEADER_BYTES = 4096
AGAIN = "hint: prepare the folder again from its source"
VERIFY = "hint: `gcnzc info {} --verify` reports what is damaged; prepare the folder again"

Table = Mapping[str, Any]


@dataclass(frozen=True)
class _Rule:
    """A constraint on a value, and its description for messages."""

    words: str
    is_valid: Callable[[Any], bool]
    is_required: bool = True


def _or_null(rule: _Rule) -> _Rule:
    is_valid = rule.is_valid
    return _Rule(f"{rule.words} or null", lambda value: value is None or is_valid(value))


def _optional(rule: _Rule) -> _Rule:
    return _Rule(rule.words, rule.is_valid, is_required=False)


def _one_of(*choices: str) -> _Rule:
    words = " or ".join(json.dumps(choice) for choice in choices)
    return _Rule(words, lambda value: isinstance(value, str) and value in choices)


def _integer(least: int = 0) -> _Rule:
    # bool is a subclass of int in Python, but true is not a number in JSON
    return _Rule(
        f"an integer of at least {least}", lambda value: type(value) is int and value >= least
    )


_COUNT = _integer()
_TEXT = _Rule("a string", lambda value: isinstance(value, str))
_BOOL = _Rule("true or false", lambda value: isinstance(value, bool))
_OBJECT = _Rule("an object", lambda value: isinstance(value, dict))
_FRACTION = _Rule(
    "a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1
)
_SIZES = _Rule(
    "a list of integers",
    lambda value: isinstance(value, list) and all(_COUNT.is_valid(size) for size in value),
)
_HEX = _Rule(
    "eight hexadecimal digits",
    lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{8}", value) is not None,
)

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
    **dict.fromkeys(PARTS, _COUNT),
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
        '"auc", "mrr" or "hits@K"',
        lambda value: (
            isinstance(value, str) and re.fullmatch(r"auc|mrr|hits@[1-9]\d*", value) is not None
        ),
    ),
    **dict.fromkeys(PARTS, _COUNT),
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
        meta = json.loads(path.read_text())
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
    _check_table(meta, _TOP_LEVEL, path)
    _check_table(meta["split"], _SPLIT, path, "split")
    _check_table(meta["options"], _OPTIONS, path, "options")
    for name, entry in meta["files"].items():
        if not isinstance(entry, dict):
            raise _invalid(path, f"files: {name}", entry, _OBJECT.words)
        _check_table(entry, _FILE, path, f"files: {name}")
        _check_entry(name, entry, path)
    _check_numbers(meta, path)
    if meta["features"] is not None:
        _check_table(meta["features"], _FEATURES, path, "features")
        _check_features(meta, path)
    if meta.get("links") is not None:
        _check_table(meta["links"], _LINKS, path, "links")
        _check_links(meta, path)
    return meta


def checksum_of(meta: Table) -> str:
    """Return the CRC-32 of all values in `meta` except the checksum itself."""
    rest = {key: value for key, value in meta.items() if key != "crc32"}
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True).encode()):08x}"


def _check_crc(meta: Table, path: Path) -> None:
    # folders of older versions have no checksum
    if "crc32" in meta and meta["crc32"] != checksum_of(meta):
        raise ValueError(
            f"{path} was changed after it was written: its checksum is {checksum_of(meta)}, not "
            f"{shortened(meta['crc32'])}\n\n{AGAIN}; if you edited it on purpose, remove the key "
            "crc32"
        )


def _check_table(values: Table, rules: Mapping[str, _Rule], path: Path, where: str = "") -> None:
    missing = [key for key, rule in rules.items() if rule.is_required and key not in values]
    if missing:
        context = f" in {where}" if where else ""
        raise ValueError(f"{path} has no {', '.join(missing)}{context}\n\n{AGAIN}")
    for key, rule in rules.items():
        if key in values and not rule.is_valid(values[key]):
            raise _invalid(path, f"{where}: {key}" if where else key, values[key], rule.words)


def _invalid(path: Path, what: str, value: object, words: str) -> ValueError:
    hint = VERIFY.format(path.parent)
    return ValueError(f"{path}: {what} is {shortened(value)}, not {words}\n\n{hint}")


def _check_entry(name: str, entry: Table, path: Path) -> None:
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "\0" in name or not name:
        raise _invalid(path, "a name in files", name, "the name of a file in the folder")
    if ("shape" in entry) != ("dtype" in entry):
        raise ValueError(f"{path} does not have both shape and dtype of {name}\n\n{AGAIN}")
    if "shape" not in entry:
        return
    if entry["dtype"] not in ("<i8", "<i4", "<f8", "<f4", "<f2", "|i1", "|u1", "<u2"):
        raise _invalid(path, f"files: {name}: dtype", entry["dtype"], "a supported dtype")
    expected = HEADER_BYTES + math.prod(entry["shape"]) * np.dtype(entry["dtype"]).itemsize
    if entry["bytes"] != expected:
        raise _invalid(
            path, f"files: {name}: bytes", entry["bytes"], f"{expected}, the size for its shape"
        )


def _check_file(
    meta: Table, path: Path, name: str, shape: tuple[int | None, ...], *dtypes: Any
) -> tuple[int, ...]:
    """Check the shape and dtype of a file; return the shape. None in `shape` accepts any size."""
    entry = meta["files"].get(name)
    if entry is None or "shape" not in entry:
        raise ValueError(f"{path} does not list {name!r}\n\n{AGAIN}")
    found, dtype = tuple(entry["shape"]), np.dtype(entry["dtype"])
    fits = len(found) == len(shape) and all(
        wanted in (None, size) for size, wanted in zip(found, shape, strict=True)
    )
    if not fits or dtype not in [np.dtype(each) for each in dtypes]:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        kinds = " or ".join(str(np.dtype(each)) for each in dtypes)
        raise ValueError(
            f"{path}: {name} has shape {found} and type {dtype}, not ({sizes}) and {kinds}, as "
            f"the other values require\n\n{VERIFY.format(path.parent)}"
        )
    return found


def _check_numbers(meta: Table, path: Path) -> None:
    num_nodes, num_tasks = meta["num_nodes"], meta["num_tasks"]
    ids = node_dtype(num_nodes)
    _check_file(meta, path, "indptr.npy", (num_nodes + 1,), np.int64)
    _check_file(meta, path, "indices.npy", (meta["num_edges"],), ids)
    if num_tasks == 1:
        _check_file(meta, path, "labels.npy", (num_nodes,), np.int64)
    else:
        _check_file(meta, path, "labels.npy", (num_nodes, num_tasks), np.int64, np.float32)
    for part in PARTS:
        _check_file(meta, path, f"split/{part}.npy", (meta["split"][part],), np.int64)
    for key, most in (("num_labelled", num_nodes), ("num_classes", max_classes(num_nodes))):
        if meta[key] > most:
            raise _invalid(path, key, meta[key], f"at most {most}, with {num_nodes} nodes")


def _check_features(meta: Table, path: Path) -> None:
    fields, num_nodes = meta["features"], meta["num_nodes"]
    kind, columns = fields["kind"], fields["columns"]
    is_coded = kind == "codes"
    if is_coded != (meta["version"] == CODED_VERSION):
        raise _invalid(
            path, "features: kind", kind, f"a kind that format version {meta['version']} has"
        )
    if kind == "sparse":
        if fields["pitch_bytes"] is not None:
            raise _invalid(path, "features: pitch_bytes", fields["pitch_bytes"], "null for sparse")
        numbers = [np.int32, np.int64]
        _check_file(meta, path, "features_indptr.npy", (num_nodes + 1,), *numbers)
        (count,) = _check_file(meta, path, "features_indices.npy", (None,), *numbers)
        _check_file(meta, path, "features_values.npy", (count,), _plain_dtype(fields, path))
        return
    dtype = _code_dtype(fields, path) if is_coded else _plain_dtype(fields, path)
    _, width = _check_file(meta, path, "features.npy", (num_nodes, None), dtype)
    if columns > width:
        raise _invalid(
            path, "features: columns", columns, f"at most {width}, which features.npy has"
        )
    if fields["pitch_bytes"] != width * dtype.itemsize:
        expected = f"{width * dtype.itemsize}, the row pitch of features.npy"
        raise _invalid(path, "features: pitch_bytes", fields["pitch_bytes"], expected)
    scales, per = fields.get("scales"), fields.get("scale_columns")
    if (scales is not None and not is_coded) or (per is not None) != (scales == "columns"):
        raise _invalid(
            path, "features: scale_columns", per, f"valid for {kind} with scales {scales!r}"
        )
    if scales is not None:
        count = num_nodes if per is None else -(-columns // per)
        _check_file(meta, path, "features_scales.npy", (count,), np.float32)


def _plain_dtype(fields: Table, path: Path) -> np.dtype[Any]:
    if fields["dtype"] not in ("float16", "float32", "float64"):
        raise _invalid(path, "features: dtype", fields["dtype"], "float32 or float16")
    return np.dtype(fields["dtype"])


def _code_dtype(fields: Table, path: Path) -> np.dtype[Any]:
    if fields["dtype"] not in CODES:
        raise _invalid(path, "features: dtype", fields["dtype"], " or ".join(CODES))
    # bfloat16 codes are values without a scale; all other codes need one
    if (fields["dtype"] == "bfloat16") != (fields.get("scales") is None):
        raise _invalid(
            path, "features: scales", fields.get("scales"), f"valid for {fields['dtype']}"
        )
    return np.dtype(CODES[fields["dtype"]])


def _check_links(meta: Table, path: Path) -> None:
    fields, ids = meta["links"], node_dtype(meta["num_nodes"])
    for part in PARTS:
        _check_file(meta, path, f"links/{part}.npy", (2, fields[part]), ids)
    for part in PARTS[1:]:
        rows = fields[part] if fields["metric"] == "mrr" else 2
        _check_file(meta, path, f"links/{part}_negatives.npy", (rows, None), ids)
