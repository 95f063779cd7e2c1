"""The columns of a table of nodes: which are ids, labels, parts and features, and their values.

Notation: N nodes, T tasks.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np

from gcnzc.datasets.rows import Array
from gcnzc.datasets.source import SPLITS, part_of
from gcnzc.datasets.table_options import NodeTable
from gcnzc.datasets.tables import MISSING, Table, Texts, is_number

# names of columns that need no key
ID_NAMES = ("id", "node_id", "nodeid", "node", "nid")
LABEL_NAMES = ("label", "labels", "y", "class")
SPLIT_NAMES = ("split",)
TRUE, FALSE = {"true", "t", "yes", "1", "1.0"}, {"false", "f", "no", "0", "0.0"}
# names that pandas gives to an index that it reads from csv as a column
_UNNAMED = re.compile(r"Unnamed: \d+(\.\d+)?")
# texts that mean no label in a column of numbers
NO_LABEL = {*MISSING, "-1", "-1.0"}


@dataclass(frozen=True)
class NodeColumns:
    """The names of the columns by their role."""

    id: str | None = None
    labels: list[str] = field(default_factory=list)
    split: str | None = None
    masks: dict[str, str] = field(default_factory=dict)  # by part
    features: list[str] = field(default_factory=list)

    @property
    def texts(self) -> list[str]:
        """The columns that are read as texts: all but the features."""
        named = [self.id, *self.labels, self.split, *self.masks.values()]
        return list(dict.fromkeys(name for name in named if name is not None))


def choose_columns(table: Table, options: NodeTable) -> NodeColumns:
    """Return the columns that the options name, and those of common names.

    Raises:
        ValueError: a column is missing or has two roles.
    """
    if options.header is None and not table.has_header:
        raise ValueError(
            f"{table.path}: the first line has only numbers, no names of columns\n\n"
            "hint: add a line with the names of the columns, or set header = false in [nodes], and "
            "name the columns by their numbers, from 0"
        )
    named_id = _named(table, options.id, "id") or _first(table, ID_NAMES)
    if named_id is None and len(table.index) == 1:
        named_id = table.index[0]
    labels = [_require(table, name, "label") for name in options.labels]
    labels = labels or [name for name in [_first(table, LABEL_NAMES)] if name is not None]
    split = _named(table, options.split, "split")
    masks = {part: _require(table, name, part) for part, name in options.masks.items()}
    if split is None and not masks:
        split = _first(table, SPLIT_NAMES)
        masks = _find_masks(table, {named_id, split, *labels})
    if split is not None and masks:
        raise ValueError(
            f"{table.path} has the parts in {split!r} and in {', '.join(masks.values())}\n\n"
            "hint: split in [nodes] names the column of words; or train, valid and test those of "
            "masks"
        )
    roles = [name for name in (named_id, *labels, split, *masks.values()) if name is not None]
    twice = next((name for name in roles if roles.count(name) > 1), None)
    features = _find_features(table, options.features, roles)
    if twice is not None:
        raise ValueError(
            f"{table.path}: the column {twice!r} has two roles\n\n"
            "hint: id, label, split, train, valid and test in [nodes] name different columns"
        )
    return NodeColumns(named_id, labels, split, masks, features)


def _require(table: Table, name: str, key: str) -> str:
    return table.find(name, f"{key} in [nodes]")


def _named(table: Table, name: str | None, key: str) -> str | None:
    return None if name is None else _require(table, name, key)


def _first(table: Table, names: Sequence[str]) -> str | None:
    found = {column.lower(): column for column in reversed(table.columns)}
    return next((found[name] for name in names if name in found), None)


def _find_masks(table: Table, taken: set[str | None]) -> dict[str, str]:
    """Return the columns whose names are those of parts, if there are all three."""
    masks: dict[str, str] = {}
    for column in table.columns:
        part = None if column in taken else part_of(column)
        if part in masks:
            raise ValueError(
                f"{table.path} has two masks of the {part} part: {masks[part]!r} and {column!r}"
                f'\n\nhint: {part} = "{column}" in [nodes] chooses one'
            )
        if part is not None:
            masks[part] = column
    if masks and len(masks) < len(SPLITS):
        missing = ", ".join(part for part in SPLITS if part not in masks)
        raise ValueError(
            f"{table.path} has masks {', '.join(masks.values())}, but none of {missing}\n\n"
            "hint: train, valid and test in [nodes] name the columns of masks"
        )
    return masks


def _find_features(table: Table, wanted: str | list[str] | None, roles: Sequence[str]) -> list[str]:
    """Return the columns that match the patterns; without patterns, all that have no other role.

    An index of pandas is none of them, unless a pattern is its name.
    """
    index = {*table.index, *filter(_UNNAMED.fullmatch, table.columns)}
    others = [name for name in table.columns if name not in roles]
    if wanted is None:
        return [name for name in others if name not in index]
    if isinstance(wanted, str):
        return []
    found: dict[str, None] = {}
    for pattern in wanted:
        if pattern in roles:
            raise ValueError(
                f"{table.path}: the column {pattern!r} is not a feature: it has ids, labels or "
                "parts\n\nhint: remove it from features in [nodes]"
            )
        names = [
            name
            for name in others
            if name == pattern or (fnmatchcase(name, pattern) and name not in index)
        ]
        if not names:
            table.find(pattern, "features in [nodes]")
        found |= dict.fromkeys(names)
    return list(found)


def combine(chunks: Sequence[Texts]) -> Texts:
    """Concatenate the chunks of a column of texts."""
    import pandas as pd

    if not chunks:
        return np.empty(0, np.int64), np.empty(0, object)
    _, uniques = pd.factorize(np.concatenate([each for _, each in chunks]))
    index = pd.Index(uniques, dtype=object)
    codes = [index.get_indexer(pd.Index(each, dtype=object))[codes] for codes, each in chunks]
    return np.concatenate(codes), np.asarray(uniques, object)


def read_labels(
    table: Table, columns: NodeColumns, texts: Mapping[str, Texts], options: NodeTable
) -> tuple[Array | None, list[str] | None]:
    """Convert the columns of labels.

    Args:
        table: of the nodes.
        columns: their roles.
        texts: the columns.
        options: `classes` is the order of the classes; None keeps integers, and sorts names.
            `missing` are texts that mean no label, besides an empty cell, and in a column of
            numbers besides `NO_LABEL`.

    Returns:
        (N,) int64 classes, or (N, T) float64 tasks, -1 or NaN for none; None without labels. And
        the names of the classes; None if they are integers.

    Raises:
        ValueError: a label is not a class.
    """
    if options.classes is not None and len(columns.labels) != 1:
        raise ValueError(
            f"{table.path} has {len(columns.labels)} columns of labels, but [nodes] has classes\n\n"
            "hint: classes are the names in one column, which label names"
        )
    if not columns.labels:
        return None, None
    if len(columns.labels) == 1:
        name = columns.labels[0]
        codes, values = texts[name]
        numbers, names = _classes(table, name, codes, values, options)
        return numbers[codes], names
    tasks = []
    for name in columns.labels:
        codes, values = texts[name]
        tasks.append(_integers(table, name, codes, values, {*options.missing}, np.nan)[codes])
    return np.stack(tasks, axis=1), None


def _classes(
    table: Table, name: str, codes: Array, values: Array, options: NodeTable
) -> tuple[Array, list[str] | None]:
    """Return the class of each different text, and the names of the classes."""
    classes, missing = options.classes, {"", *options.missing}
    if all(is_number(value) for value in {*values} - missing - NO_LABEL):
        if classes is None:
            found = _integers(table, name, codes, values, missing, -1.0)
            return found.astype(np.int64), None
        missing |= NO_LABEL
    known = [value for value in values if value not in missing]
    names = sorted(known) if classes is None else classes
    if len(set(names)) < len(names):
        raise ValueError(
            f"{table.path}: classes in [nodes] has a name twice: {', '.join(names)}\n\n"
            "hint: each class has one name"
        )
    numbers = {value: number for number, value in enumerate(names)}
    wrong = next((value for value in known if value not in numbers), None)
    if wrong is not None:
        raise ValueError(
            f"{_place(table, name, codes, values, wrong)}: {wrong!r} is not a class\n\n"
            f"hint: classes in [nodes] are {', '.join(names)}; an empty cell is for no label, and "
            f"so are the texts that missing in [nodes] lists"
        )
    return np.array([numbers.get(value, -1) for value in values]), list(names)


def _integers(
    table: Table, name: str, codes: Array, values: Array, missing: set[str], absent: float
) -> Array:
    """Return each different text as a class, in float64."""
    found = np.full(len(values), absent)
    # 255 is also 255.0 in a column of numbers with fractions
    numbers = {float(value) for value in missing if is_number(value)}
    for place, value in enumerate(values):
        if value in NO_LABEL | missing or (is_number(value) and float(value) in numbers):
            continue
        if not is_number(value) or float(value) % 1 or float(value) < 0:
            raise ValueError(
                f"{_place(table, name, codes, values, value)}: the label {value!r} is not a class"
                "\n\nhint: classes are integers from 0, or names; an empty cell is for no label, "
                f'and so are the texts that missing in [nodes] lists, such as missing = ["{value}"]'
            )
        found[place] = float(value)
    return found


def read_parts(
    table: Table, columns: NodeColumns, texts: Mapping[str, Texts], missing: Sequence[str]
) -> dict[str, Array] | None:
    """Convert the column of words or the masks to the rows of each part; None if there are none.

    An empty cell, "none" and the texts in `missing` are for nodes in no part.

    Raises:
        ValueError: a word is not the name of a part, or a value of a mask not true or false.
    """
    if columns.split is not None:
        codes, values = texts[columns.split]
        parts = []
        for value in values:
            part = part_of(value)
            if part is None and value.lower() not in ("", "none") and value not in missing:
                raise ValueError(
                    f"{_place(table, columns.split, codes, values, value)}: {value!r} is not a "
                    "part\n\nhint: the parts are train, valid (or val) and test; an empty cell is "
                    "for nodes in none of them, and so are the texts that missing in [nodes] lists"
                )
            parts.append(part)
        of_row = np.array(parts, object)[codes]
        return {part: np.flatnonzero(of_row == part) for part in SPLITS}
    if not columns.masks:
        return None
    return {
        part: np.flatnonzero(_mask(table, columns.masks[part], *texts[columns.masks[part]]))
        for part in SPLITS
    }


def _mask(table: Table, name: str, codes: Array, values: Array) -> Array:
    words = [value.lower() for value in values]
    wrong = next(
        (v for v, word in zip(values, words, strict=True) if word not in TRUE | FALSE), None
    )
    if wrong is not None:
        raise ValueError(
            f"{_place(table, name, codes, values, wrong)}: {wrong!r} is neither true nor false\n\n"
            "hint: a mask has true and false, or 1 and 0, in each row"
        )
    return np.array([word in TRUE for word in words])[codes]


def _place(table: Table, name: str, codes: Array, values: Array, value: str) -> str:
    """Describe where the first cell with a text is."""
    code = next(number for number, each in enumerate(values) if each == value)
    return table.place(int(np.flatnonzero(codes == code)[0]), name)
