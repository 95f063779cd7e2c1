"""The description of features in a prepared folder's `meta.json`: rules, shapes and consistency.

Notation: N rows, D columns.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from gcnzc.datasets.meta_rules import (
    BOOL,
    COUNT,
    TEXT,
    Rule,
    Table,
    integer,
    invalid,
    one_of,
    optional,
    or_null,
)
from gcnzc.datasets.rows import CODES

# dtypes of features that are not stored as codes, as in the header of a file
PLAIN_DTYPES = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}
Expected = dict[str, tuple[tuple[int | None, ...], tuple[str, ...]]]

FEATURES: Mapping[str, Rule] = {
    "kind": one_of("dense", "codes", "sparse"),
    "columns": COUNT,
    "dtype": TEXT,
    "pitch_bytes": or_null(COUNT),
    "pitch_reason": optional(or_null(TEXT)),
    "finite": BOOL,
    "normalized": optional(BOOL),
    "scales": optional(or_null(one_of("row", "columns"))),
    "scale_columns": optional(or_null(integer(1))),
}


def check_features(fields: Table, path: Path) -> None:
    """Check that the values of the features are consistent."""
    kind, scales, per = fields["kind"], fields.get("scales"), fields.get("scale_columns")
    is_coded = kind == "codes"
    if kind == "sparse" and fields["pitch_bytes"] is not None:
        raise invalid(path, "features: pitch_bytes", fields["pitch_bytes"], "null for sparse")
    dtypes = CODES if is_coded else PLAIN_DTYPES
    if fields["dtype"] not in dtypes:
        words = " or ".join(CODES) if is_coded else "float32 or float16"
        raise invalid(path, "features: dtype", fields["dtype"], words)
    # bfloat16 codes are values without a scale; all other codes need one
    if is_coded and (fields["dtype"] == "bfloat16") != (scales is None):
        raise invalid(path, "features: scales", scales, f"valid for {fields['dtype']}")
    if (scales is not None and not is_coded) or (per is not None) != (scales == "columns"):
        raise invalid(
            path, "features: scale_columns", per, f"valid for {kind} with scales {scales!r}"
        )


def expected_features(fields: Table, num_rows: int, files: Table, front: str = "") -> Expected:
    """Return the shape and the dtypes of each array of features; None stands for any size.

    Args:
        fields: description of the features.
        num_rows: N.
        files: the files that `meta.json` describes.
        front: begin of the names of the arrays.
    """
    if fields["kind"] == "sparse":
        indices = files.get(f"{front}features_indices.npy", {}).get("shape") or [None]
        return {
            f"{front}features_indptr.npy": ((num_rows + 1,), ("<i4", "<i8")),
            f"{front}features_indices.npy": ((None,), ("<i4", "<i8")),
            f"{front}features_values.npy": ((indices[0],), (PLAIN_DTYPES[fields["dtype"]],)),
        }
    name = fields["dtype"]
    dtype = np.dtype(CODES[name]).str if name in CODES else PLAIN_DTYPES[name]
    expected: Expected = {f"{front}features.npy": ((num_rows, None), (dtype,))}
    if fields.get("scales") is not None:
        per = fields.get("scale_columns")
        count = num_rows if per is None else -(-fields["columns"] // per)
        expected[f"{front}features_scales.npy"] = ((count,), ("<f4",))
    return expected


def check_pitch(fields: Table, files: Table, path: Path, front: str = "") -> None:
    """Check the number of columns and the row pitch of dense features; see `expected_features`."""
    if fields["kind"] == "sparse":
        return
    name = f"{front}features.npy"
    entry = files[name]
    columns, width = fields["columns"], entry["shape"][1]
    if columns > width:
        raise invalid(path, "features: columns", columns, f"at most {width}, which {name} has")
    pitch = width * np.dtype(entry["dtype"]).itemsize
    if fields["pitch_bytes"] != pitch:
        expected = f"{pitch}, the row pitch of {name}"
        raise invalid(path, "features: pitch_bytes", fields["pitch_bytes"], expected)
