"""The TOML file that names the tables of a graph and their columns.

    name = "papers"                  # of the graph; that of the file if not given
    metric = "accuracy"              # or "rocauc"

    [edges]
    file = "edges.csv.gz"            # relative to this file; text, Parquet, or a folder of it
    source = "from"                  # columns; may be omitted for source and target, src and dst
    target = "to"
    bidirected = true                # each edge is stored once and means both directions

    [nodes]
    file = "nodes.csv"
    id = "name"                      # column; may be omitted for id, and for row numbers
    features = ["age", "x*"]         # columns; all others if not given; or "features.npy"
    label = "kind"                   # column, or a list of columns for several tasks
    classes = ["cat", "dog"]         # order of the classes; sorted if not given
    split = "part"                   # column of words; or, instead, the columns of masks:
    # train = "is_train"
    # valid = "is_val"
    # test = "is_test"
    missing = ["unknown", 255]       # texts of label and split that mean none

`separator`, `header` and `comment` in either table are of its text file.
"""

import difflib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gcnzc.datasets.source import METRICS, Metric

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")


@dataclass(frozen=True)
class EdgeTable:
    """The table `[edges]`."""

    file: str
    source: str | None = None
    target: str | None = None
    bidirected: bool | None = None
    separator: str | None = None
    header: bool | None = None
    comment: str | None = None


@dataclass(frozen=True)
class NodeTable:
    """The table `[nodes]`."""

    file: str | None = None
    id: str | None = None
    features: str | list[str] | None = None
    label: str | list[str] | None = None
    classes: list[str] | None = None
    split: str | None = None
    train: str | None = None
    valid: str | None = None
    test: str | None = None
    missing: list[str] = field(default_factory=list)
    separator: str | None = None
    header: bool | None = None
    comment: str | None = None

    @property
    def labels(self) -> list[str]:
        """The columns of labels that are named."""
        return [self.label] if isinstance(self.label, str) else list(self.label or [])

    @property
    def masks(self) -> dict[str, str]:
        """The columns of masks that are named, by part."""
        named = {"train": self.train, "valid": self.valid, "test": self.test}
        return {part: column for part, column in named.items() if column is not None}


@dataclass(frozen=True)
class TableOptions:
    """The contents of the file."""

    path: Path
    edges: EdgeTable
    nodes: NodeTable = field(default_factory=NodeTable)
    name: str | None = None
    metric: Metric | None = None


@dataclass(frozen=True)
class _Rule:
    words: str
    is_valid: Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_column(value: Any) -> bool:
    # columns of a file without a header have numbers
    return _is_text(value) or (type(value) is int and value >= 0)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and all(_is_column(item) for item in value)


def _is_features(value: Any) -> bool:
    return _is_list(value) or (isinstance(value, str) and value.endswith(".npy"))


_TEXT = _Rule("a text in quotes", _is_text)
_BOOL = _Rule("true or false", lambda value: isinstance(value, bool))
_COLUMN = _Rule("the name of a column", _is_column)
_FILE = {
    "separator": _Rule("one character", lambda value: _is_text(value) and len(value) == 1),
    "header": _BOOL,
    "comment": _Rule(
        "one character, or an empty text for none",
        lambda value: isinstance(value, str) and len(value) < 2,
    ),
}
_RULES: Mapping[str, Mapping[str, _Rule]] = {
    "": {
        "name": _TEXT,
        "metric": _Rule("accuracy or rocauc", lambda value: value in set(METRICS.values())),
    },
    "edges": {
        "file": _TEXT,
        "source": _COLUMN,
        "target": _COLUMN,
        "bidirected": _BOOL,
        **_FILE,
    },
    "nodes": {
        "file": _TEXT,
        "id": _COLUMN,
        "features": _Rule("a list of columns, or the name of an .npy file", _is_features),
        "label": _Rule(
            "the name of a column, or a list of columns",
            lambda value: _is_column(value) or (_is_list(value) and value != []),
        ),
        "classes": _Rule("a list of at least two names", lambda v: _is_list(v) and len(v) > 1),
        **dict.fromkeys(("split", "train", "valid", "test"), _COLUMN),
        "missing": _Rule(
            "a list of texts and integers",
            lambda value: isinstance(value, list) and all(type(v) in (str, int) for v in value),
        ),
        **_FILE,
    },
}


def read_options(path: Path) -> TableOptions:
    """Read and check the file.

    Raises:
        ValueError: the file is not TOML, or a key or a value is not valid; the message names the
            line.
    """
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(
            f"{path} is not TOML: {error}\n\n"
            'hint: write a key and a value on each line, such as file = "edges.csv"'
        ) from None
    top = {key: value for key, value in values.items() if key not in ("edges", "nodes")}
    for table, found in (("", top), *((name, values.get(name, {})) for name in ("edges", "nodes"))):
        if not isinstance(found, dict):
            raise ValueError(
                f"{_place(path, text, '', table)}: {table} is not a table\n\n"
                f"hint: write [{table}] on a line of its own, and its keys below"
            )
        _check(path, text, table, found)
    if "file" not in values.get("edges", {}):
        raise ValueError(
            f'{path} names no file of edges\n\nhint: write [edges], and below it file = "edges.csv"'
        )
    nodes = _build(NodeTable, values.get("nodes", {}))
    _check_nodes(path, text, nodes)
    return TableOptions(path, _build(EdgeTable, values["edges"]), nodes, **top)


def _check(path: Path, text: str, table: str, values: Mapping[str, Any]) -> None:
    """Check the keys and the values of one table."""
    rules = _RULES[table]
    for key, value in values.items():
        where = _place(path, text, table, key)
        if key not in rules:
            known = [*rules, *([] if table else ["[edges]", "[nodes]"])]
            near = difflib.get_close_matches(key, known, 1)
            suggestion = f"did you mean {near[0]}? " if near else ""
            raise ValueError(
                f"{where}: no key named {key!r}{f' in [{table}]' if table else ''}\n\n"
                f"hint: {suggestion}the keys are {', '.join(known)}"
            )
        if not rules[key].is_valid(value):
            raise ValueError(
                f"{where}: {key} is {value!r:.100}\n\nhint: {key} is {rules[key].words}"
            )


def _check_nodes(path: Path, text: str, nodes: NodeTable) -> None:
    """Check that the keys of `[nodes]` fit each other."""
    if nodes.file is None:
        for key in ("id", "label", "split", "train", "valid", "test"):
            if getattr(nodes, key) is not None:
                raise ValueError(
                    f"{_place(path, text, 'nodes', key)}: {key} names a column, but [nodes] has no "
                    'file\n\nhint: file = "nodes.csv" names the table of nodes'
                )
        if isinstance(nodes.features, list) and nodes.features:
            raise ValueError(
                f"{_place(path, text, 'nodes', 'features')}: features names columns, but [nodes] "
                'has no file\n\nhint: add the file, or give features = "features.npy"'
            )
    if nodes.masks and (nodes.split is not None or len(nodes.masks) < 3):
        raise ValueError(
            f"{_place(path, text, 'nodes', next(iter(nodes.masks)))}: the parts are not determined"
            "\n\nhint: give split, a column of words, or all of train, valid and test"
        )


def _build(kind: type[T], values: Mapping[str, Any]) -> T:
    """Build a table; columns of files without a header are numbers, and become texts."""

    def text_of(value: Any) -> Any:
        if isinstance(value, list):
            return [str(item) for item in value]
        return str(value) if type(value) is int else value

    return kind(**{key: text_of(value) for key, value in values.items()})


def _place(path: Path, text: str, table: str, key: str) -> str:
    """Return the file, and the line of a key, as far as it is written on a line of its own."""
    inside = ""
    pattern = re.compile(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]")
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[+\s*([^\]]+?)\s*\]", line)
        if header:
            inside = header[1].strip("\"'")
            if not table and inside == key:
                return f"{path}, line {number}"
        elif (inside == table and pattern.match(line)) or (
            not inside and table and re.match(rf"\s*{table}\s*\.\s*{re.escape(key)}\b", line)
        ):
            return f"{path}, line {number}"
    return str(path)
