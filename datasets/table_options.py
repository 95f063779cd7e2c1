"""The TOML file that names the tables of a graph and their columns.

    [edges]
    file = "edges.csv.gz"
    source = "from"
    target = "to"

    [nodes]
    file = "nodes.csv"
    label = "kind"
    random_split = [60, 20, 20]

`KEYS` has all keys.
"""

import difflib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gcnzc.datasets.generated import are_percentages
from gcnzc.datasets.source import METRICS, SPLITS, Metric

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
    random_split: list[int] | None = None
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
        return {part: name for part in SPLITS if (name := getattr(self, part)) is not None}


@dataclass(frozen=True)
class TableOptions:
    """The contents of the file."""

    path: Path
    edges: EdgeTable
    nodes: NodeTable = field(default_factory=NodeTable)
    name: str | None = None
    metric: Metric | None = None


@dataclass(frozen=True)
class Key:
    """A key of the file: its value, and what holds without it."""

    value: str
    is_valid: Callable[[Any], bool]
    without: str


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_column(value: Any) -> bool:
    # columns of a file without a header have numbers
    return _is_text(value) or (type(value) is int and value >= 0)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and all(_is_column(item) for item in value)


def _is_features(value: Any) -> bool:
    return _is_list(value) or (isinstance(value, str) and value.endswith(".npy"))


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


_FROM_FILE = "determined from the text file"
_FORMAT = {
    "separator": Key(
        "the character between cells; a blank is a run of blanks and tabs",
        lambda value: _is_text(value) and len(value) == 1,
        _FROM_FILE,
    ),
    "header": Key(
        "true if the first row has the names of columns, else false", _is_bool, _FROM_FILE
    ),
    "comment": Key(
        "the character with which comments begin; an empty text for none",
        lambda value: isinstance(value, str) and len(value) < 2,
        _FROM_FILE,
    ),
}
_ENDS = (
    "source and target, src and dst, from and to, or u and v; or the only two columns; or the "
    "first two if columns have no names"
)
_MASK = "a column of this part's name, such as {0}_mask, is_{0} or {0}"
KEYS: Mapping[str, Mapping[str, Key]] = {
    "": {
        "name": Key("a name of the graph, in quotes", _is_text, "the name of the file"),
        "metric": Key(
            "accuracy or rocauc, in quotes",
            lambda value: value in set(METRICS.values()),
            "accuracy; rocauc for several columns of labels",
        ),
    },
    "edges": {
        "file": Key(
            "the path of the table of edges, relative to this file",
            _is_text,
            "an error",
        ),
        "source": Key("the column of the sources", _is_column, _ENDS),
        "target": Key("the column of the targets", _is_column, "as for source"),
        "bidirected": Key(
            "true if each edge is stored once and means both directions, else false",
            _is_bool,
            "as the text file declares; else true if all edges go from lower to higher numbers of "
            "nodes, or all the other way",
        ),
        **_FORMAT,
    },
    "nodes": {
        "file": Key("the path of the table of nodes", _is_text, "the nodes are those of the edges"),
        "id": Key(
            "the column of ids",
            _is_column,
            "id, node_id, node or nid; else the index of pandas in a Parquet file; else the number "
            "of the row, from 0",
        ),
        "features": Key(
            "a list of columns, or patterns such as x*; or the path of an .npy file",
            _is_features,
            "all columns of nodes that have no other use; [] for none",
        ),
        "label": Key(
            "the column of labels, or a list of columns",
            lambda value: _is_column(value) or (_is_list(value) and value != []),
            "label, labels, y or class",
        ),
        "classes": Key(
            "a list of at least two names of classes, in their order",
            lambda value: _is_list(value) and len(value) > 1,
            "integers are the classes; names are sorted, and numbered in this order",
        ),
        "split": Key(
            "the column of the words train, valid (or val) and test",
            _is_column,
            "the column split; else the columns train, valid and test",
        ),
        **{
            part: Key(f"the column of the mask of {part}", _is_column, _MASK.format(part))
            for part in SPLITS
        },
        "random_split": Key(
            "percentages of the nodes with a label in train, valid and test, such as [60, 20, 20]",
            are_percentages,
            "the split of the columns",
        ),
        "missing": Key(
            "a list of texts and integers that mean no label, or no part",
            lambda value: isinstance(value, list) and all(type(v) in (str, int) for v in value),
            "an empty cell; in a column of numbers also -1, nan, NA, N/A, null and None",
        ),
        **_FORMAT,
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
    keys = KEYS[table]
    for key, value in values.items():
        where = _place(path, text, table, key)
        if key not in keys:
            known = [*keys, *([] if table else ["[edges]", "[nodes]"])]
            near = difflib.get_close_matches(key, known, 1)
            suggestion = f"did you mean {near[0]}? " if near else ""
            raise ValueError(
                f"{where}: no key named {key!r}{f' in [{table}]' if table else ''}\n\n"
                f"hint: {suggestion}the keys are {', '.join(known)}"
            )
        if not keys[key].is_valid(value):
            raise ValueError(
                f"{where}: {key} is {value!r:.100}\n\nhint: {key} is {keys[key].value}"
            )


def _check_nodes(path: Path, text: str, nodes: NodeTable) -> None:
    """Check that the keys of `[nodes]` fit each other."""
    if nodes.file is None:
        for key in ("id", "label", "split", *SPLITS):
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
    if nodes.random_split is not None and (nodes.masks or nodes.split is not None):
        raise ValueError(
            f"{_place(path, text, 'nodes', 'random_split')}: random_split, but also columns of the "
            "split\n\nhint: omit one of them"
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

    return kind(
        **{k: value if k == "random_split" else text_of(value) for k, value in values.items()}
    )


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
