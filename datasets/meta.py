"""The schema of a prepared folder's `meta.json`: keys, types and consistency.

Everything is checked on opening, so that the rest of the code need not doubt a number of it. What
`meta.json` says of each file is held against the file by `gcnzc.datasets.store`.

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
from gcnzc.datasets.source import METRICS, PARTS, most_classes, node_dtype

FORMAT = "gcnzc-graph"
VERSION = 1
# of folders whose features are codes, which readers of version 1 would take for numbers
CODED_VERSION = 2
# data begins on a page, so that it can be mapped, locked and read by a device in whole pages
HEADER_BYTES = 4096
AGAIN = "hint: prepare the folder again from its source"
VERIFY = "hint: `gcnzc info {} --verify` says what is damaged; prepare the folder again"

Table = Mapping[str, Any]


@dataclass(frozen=True)
class _Rule:
    """What a value must be."""

    words: str
    is_right: Callable[[Any], bool]
    is_required: bool = True


def _or_null(rule: _Rule) -> _Rule:
    is_right = rule.is_right
    return _Rule(f"{rule.words} or null", lambda value: value is None or is_right(value))


def _optional(rule: _Rule) -> _Rule:
    return _Rule(rule.words, rule.is_right, is_required=False)


def _one_of(*choices: str) -> _Rule:
    words = " or ".join(json.dumps(choice) for choice in choices)
    return _Rule(words, lambda value: isinstance(value, str) and value in choices)


def _whole(least: int = 0) -> _Rule:
    # True is an int to Python, and no number to JSON
    return _Rule(
        f"a whole number of at least {least}", lambda value: type(value) is int and value >= least
    )


_COUNT = _whole()
_TEXT = _Rule("a string", lambda value: isinstance(value, str))
_TRUTH = _Rule("true or false", lambda value: isinstance(value, bool))
_TABLE = _Rule("a table", lambda value: isinstance(value, dict))
_SHARE = _Rule(
    "a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1
)
_SIZES = _Rule(
    "a list of whole numbers",
    lambda value: isinstance(value, list) and all(_COUNT.is_right(size) for size in value),
)
_HEX = _Rule(
    "eight hexadecimal digits",
    lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{8}", value) is not None,
)

_WHOLE: Mapping[str, _Rule] = {
    "name": _TEXT,
    "num_nodes": _COUNT,
    "num_edges": _COUNT,
    "num_classes": _COUNT,
    "num_tasks": _whole(1),
    "num_labelled": _COUNT,
    "metric": _one_of(*dict.fromkeys(METRICS.values())),
    "best_accuracy": _or_null(_SHARE),
    "features": _or_null(_TABLE),
    "split": _TABLE,
    "options": _TABLE,
    "origin": _TABLE,
    "links": _optional(_or_null(_TABLE)),
    "files": _TABLE,
    "crc32": _optional(_HEX),
}
_FEATURES: Mapping[str, _Rule] = {
    "kind": _one_of("dense", "codes", "sparse"),
    "columns": _COUNT,
    "dtype": _TEXT,
    "pitch_bytes": _or_null(_COUNT),
    "pitch_reason": _optional(_or_null(_TEXT)),
    "finite": _TRUTH,
    "normalized": _optional(_TRUTH),
    "scales": _optional(_or_null(_one_of("row", "columns"))),
    "scale_columns": _optional(_or_null(_whole(1))),
}
_SPLIT: Mapping[str, _Rule] = {
    "name": _TEXT,
    **dict.fromkeys(PARTS, _COUNT),
    "dropped_without_label": _optional(_TABLE),
}
_OPTIONS: Mapping[str, _Rule] = {
    "bidirected": _TRUTH,
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
    """The `meta.json` of a prepared folder, every value of it checked.

    Raises:
        ValueError: it is damaged, or of a version that cannot be read here.
    """
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}\n\n{AGAIN}") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ValueError(f"{path} is not that of a prepared graph\n\n{AGAIN}")
    version = meta.get("version")
    if type(version) is not int or version not in (VERSION, CODED_VERSION):
        raise ValueError(
            f"{folder} is of format version {shortened(version)}, but this gcnzc reads version "
            f"{VERSION} and {CODED_VERSION}\n\n{AGAIN}, or install the gcnzc that wrote it"
        )
    _check_crc(meta, path)
    _check_table(meta, _WHOLE, path)
    _check_table(meta["split"], _SPLIT, path, "split")
    _check_table(meta["options"], _OPTIONS, path, "options")
    for name, entry in meta["files"].items():
        if not isinstance(entry, dict):
            raise _wrong(path, f"files: {name}", entry, _TABLE.words)
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
    """CRC-32 of everything in `meta` but its own checksum."""
    rest = {key: value for key, value in meta.items() if key != "crc32"}
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True).encode()):08x}"


def _check_crc(meta: Table, path: Path) -> None:
    # folders that older versions wrote have none
    if "crc32" in meta and meta["crc32"] != checksum_of(meta):
        raise ValueError(
            f"{path} was changed after it was written: its checksum is {checksum_of(meta)}, not "
            f"{shortened(meta['crc32'])}\n\n{AGAIN}; if you edited it on purpose, remove its last "
            "line, crc32"
        )


def _check_table(values: Table, rules: Mapping[str, _Rule], path: Path, where: str = "") -> None:
    missing = [key for key, rule in rules.items() if rule.is_required and key not in values]
    if missing:
        of = f" of {where}" if where else ""
        raise ValueError(f"{path} does not say {', '.join(missing)}{of}\n\n{AGAIN}")
    for key, rule in rules.items():
        if key in values and not rule.is_right(values[key]):
            raise _wrong(path, f"{where}: {key}" if where else key, values[key], rule.words)


def _wrong(path: Path, what: str, value: object, words: str) -> ValueError:
    hint = VERIFY.format(path.parent)
    return ValueError(f"{path}: {what} is {shortened(value)}, not {words}\n\n{hint}")


def _check_entry(name: str, entry: Table, path: Path) -> None:
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "\0" in name or not name:
        raise _wrong(path, "a name in files", name, "that of a file in the folder")
    if ("shape" in entry) != ("dtype" in entry):
        raise ValueError(f"{path} does not say shape and dtype of {name}\n\n{AGAIN}")
    if "shape" not in entry:
        return
    if entry["dtype"] not in ("<i8", "<i4", "<f8", "<f4", "<f2", "|i1", "|u1", "<u2"):
        raise _wrong(path, f"files: {name}: dtype", entry["dtype"], "a type of numbers")
    wanted = HEADER_BYTES + math.prod(entry["shape"]) * np.dtype(entry["dtype"]).itemsize
    if entry["bytes"] != wanted:
        raise _wrong(path, f"files: {name}: bytes", entry["bytes"], f"{wanted}, as its shape takes")


def _check_file(
    meta: Table, path: Path, name: str, shape: tuple[int | None, ...], *dtypes: Any
) -> tuple[int, ...]:
    """The shape that a file has, which must be `shape` where that is known, and its type."""
    entry = meta["files"].get(name)
    if entry is None or "shape" not in entry:
        raise ValueError(f"{path} does not name {name!r}\n\n{AGAIN}")
    found, dtype = tuple(entry["shape"]), np.dtype(entry["dtype"])
    fits = len(found) == len(shape) and all(
        wanted in (None, size) for size, wanted in zip(found, shape, strict=True)
    )
    if not fits or dtype not in [np.dtype(each) for each in dtypes]:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        kinds = " or ".join(str(np.dtype(each)) for each in dtypes)
        raise ValueError(
            f"{path}: {name} has shape {found} and type {dtype}, which do not fit the other values:"
            f" ({sizes}) and {kinds} would\n\n{VERIFY.format(path.parent)}"
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
    for key, most in (("num_labelled", num_nodes), ("num_classes", most_classes(num_nodes))):
        if meta[key] > most:
            raise _wrong(path, key, meta[key], f"at most {most}, with {num_nodes} nodes")


def _check_features(meta: Table, path: Path) -> None:
    told, num_nodes = meta["features"], meta["num_nodes"]
    kind, columns = told["kind"], told["columns"]
    is_coded = kind == "codes"
    if is_coded != (meta["version"] == CODED_VERSION):
        raise _wrong(path, "features: kind", kind, f"a kind of format version {meta['version']}")
    if kind == "sparse":
        if told["pitch_bytes"] is not None:
            raise _wrong(path, "features: pitch_bytes", told["pitch_bytes"], "null, as of sparse")
        numbers = [np.int32, np.int64]
        _check_file(meta, path, "features_indptr.npy", (num_nodes + 1,), *numbers)
        (count,) = _check_file(meta, path, "features_indices.npy", (None,), *numbers)
        _check_file(meta, path, "features_values.npy", (count,), _plain_dtype(told, path))
        return
    dtype = _code_dtype(told, path) if is_coded else _plain_dtype(told, path)
    _, width = _check_file(meta, path, "features.npy", (num_nodes, None), dtype)
    if columns > width:
        raise _wrong(path, "features: columns", columns, f"at most {width}, which features.npy has")
    if told["pitch_bytes"] != width * dtype.itemsize:
        wanted = f"{width * dtype.itemsize}, as rows of features.npy lie apart"
        raise _wrong(path, "features: pitch_bytes", told["pitch_bytes"], wanted)
    scales, per = told.get("scales"), told.get("scale_columns")
    if (scales is not None and not is_coded) or (per is not None) != (scales == "columns"):
        raise _wrong(path, "features: scale_columns", per, f"that of {kind} with scales {scales!r}")
    if scales is not None:
        count = num_nodes if per is None else -(-columns // per)
        _check_file(meta, path, "features_scales.npy", (count,), np.float32)


def _plain_dtype(told: Table, path: Path) -> np.dtype[Any]:
    if told["dtype"] not in ("float16", "float32", "float64"):
        raise _wrong(path, "features: dtype", told["dtype"], "float32 or float16")
    return np.dtype(told["dtype"])


def _code_dtype(told: Table, path: Path) -> np.dtype[Any]:
    if told["dtype"] not in CODES:
        raise _wrong(path, "features: dtype", told["dtype"], " or ".join(CODES))
    # bfloat16 is its own value, and all others are nothing without a scale
    if (told["dtype"] == "bfloat16") != (told.get("scales") is None):
        raise _wrong(path, "features: scales", told.get("scales"), f"that of {told['dtype']}")
    return np.dtype(CODES[told["dtype"]])


def _check_links(meta: Table, path: Path) -> None:
    told, ids = meta["links"], node_dtype(meta["num_nodes"])
    for part in PARTS:
        _check_file(meta, path, f"links/{part}.npy", (2, told[part]), ids)
    for part in PARTS[1:]:
        rows = told[part] if told["metric"] == "mrr" else 2
        _check_file(meta, path, f"links/{part}_negatives.npy", (rows, None), ids)
