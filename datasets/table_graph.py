"""Graphs in tables: a list of edges and a table of nodes, in csv or parquet files.

A TOML file names the files and the columns, see `gcnzc.datasets.table_options`.

Notation: N nodes, E edges, D columns of features.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gcnzc.datasets.names import Names
from gcnzc.datasets.node_columns import (
    NodeColumns,
    choose_columns,
    combine,
    read_labels,
    read_parts,
)
from gcnzc.datasets.numbering import Numbering, read_ids, read_numbers
from gcnzc.datasets.parquet_tables import PARQUET, ParquetTable
from gcnzc.datasets.rows import (
    Allocate,
    Array,
    Progress,
    Rows,
    chunk_rows,
    no_progress,
    rows_from_array,
)
from gcnzc.datasets.source import SPLITS, EdgeDefaults, Metric, node_dtype
from gcnzc.datasets.table_options import NodeTable, read_options
from gcnzc.datasets.tables import END_NAMES, Table, Texts
from gcnzc.datasets.text_tables import TEXT, TextTable


class TableGraph:
    """A graph in csv or parquet files, as a `gcnzc.datasets.source.Source`.

    Ids, edges, labels and parts are read on construction, which also checks that the columns of
    features are numbers. Features are read again when they are used: in chunks, unless the rows
    must be reordered by id.

    Args:
        path: of the TOML file.
        name: of the graph; None uses the one in the file, or the name of the file.
        progress: called with the bytes or rows read of each file.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is not valid; the message names the line and the column.
    """

    best_accuracy: float | None = None

    def __init__(
        self, path: Path, name: str | None = None, progress: Progress = no_progress
    ) -> None:
        options = read_options(path)
        self.random_split = options.nodes.random_split
        self.split_name = "random" if self.random_split else "given"
        self.path, self.name = path, name or options.name or path.stem
        edges = options.edges
        self._bidirected = edges.bidirected
        self._edges = open_table(
            path.parent / edges.file, edges.separator, edges.header, edges.comment
        )
        self._end_columns = choose_ends(self._edges, edges.source, edges.target)
        self._table, self._columns = _node_table(path, options.nodes)
        texts = _read_texts(self._table, self._columns, progress)
        npy = _open_npy(path, options.nodes.features)
        self._labels: Array | None = None
        self._parts: dict[str, Array] | None = None
        ids, class_names = None, None
        count = None if npy is None else npy.num_rows
        if self._table is not None:
            count = len(next(iter(texts.values()))[0])
            _check_not_empty(self._table, count)
            if self._columns.id is not None:
                ids = read_ids(self._table, self._columns.id, texts[self._columns.id])
            self._labels, class_names = read_labels(
                self._table, self._columns, texts, options.nodes
            )
            self._parts = read_parts(self._table, self._columns, texts, options.nodes.missing)
        elif count is None and isinstance(self._edges, TextTable):
            ids = self._edges.format.node_ids()
        self._numbering = Numbering(ids, count)
        self._ends = read_numbers(self._edges, self._end_columns, self._numbering, progress)
        _check_not_empty(self._edges, len(self._ends[0]))
        self.notes = tuple(_notes(path, self._edges, self._ends, self._numbering))
        self.num_nodes = int(self._numbering.count or 0)
        self.features = self._rows() if npy is None else _rows_of_npy(npy, self._numbering)
        several = self._labels is not None and self._labels.ndim == 2
        self.metric: Metric = options.metric or ("rocauc" if several else "accuracy")
        self.num_classes = None if class_names is None else len(class_names)
        self.mapping = Names(self._numbering.names, class_names, self._columns.features or None)

    @property
    def num_edges(self) -> int:
        """E."""
        return len(self._ends[0])

    @property
    def origin(self) -> dict[str, Any]:
        """Provenance: the files, the columns, and those that are not used."""
        source, target = self._end_columns
        about: dict[str, Any] = {
            "format": "tables",
            "source": str(self.path),
            "edges": {"file": str(self._edges.path), "source": source, "target": target},
        }
        used: dict[Table, tuple[str, ...]] = {self._edges: self._end_columns}
        if self._table is not None:
            columns = self._columns
            about["nodes"] = {
                "file": str(self._table.path),
                "id": columns.id,
                "label": columns.labels,
                "split": columns.split or columns.masks,
            }
            used[self._table] = (*columns.texts, *columns.features)
        unused = {
            table.path.name: [name for name in table.columns if name not in names]
            for table, names in used.items()
        }
        return about | {"unused_columns": {file: names for file, names in unused.items() if names}}

    def edge_defaults(self) -> EdgeDefaults | None:
        """Return what `bidirected` or else the file of edges declares; None if neither does."""
        if self._bidirected is None:
            table = self._edges
            found = table.format.bidirected if isinstance(table, TextTable) else None
            if found is None:
                return None
            kind = "an undirected" if found else "a directed"
            return EdgeDefaults(found, "keep", f"{table.path.name} declares {kind} graph")
        reason = f"bidirected is {str(self._bidirected).lower()} in {self.path.name}"
        return EdgeDefaults(self._bidirected, "keep", reason)

    def edges(self, allocate: Allocate, progress: Progress) -> tuple[Array, Array]:
        """See `Source.edges`."""
        dtype = node_dtype(self.num_nodes)
        found = []
        for which, ids in zip(("sources", "destinations"), self._ends, strict=True):
            out = allocate(which, len(ids), dtype)
            out[:] = ids
            found.append(out)
        progress("edges", self.num_edges, self.num_edges)
        return found[0], found[1]

    def labels(self) -> Array:
        """See `Source.labels`; -1 for all nodes if there are none."""
        if self._labels is None:
            return np.full(self.num_nodes, -1)
        return self._in_order(self._labels)

    def split(self) -> dict[str, Array]:
        """See `Source.split`; without nodes if there are no parts."""
        if self._parts is None:
            return {part: np.empty(0, np.int64) for part in SPLITS}
        numbers = self._numbering.number_of_row
        if numbers is None:
            return self._parts
        return {part: np.sort(numbers[rows]) for part, rows in self._parts.items()}

    def _in_order(self, values: Array) -> Array:
        """Return the values of rows in the order of the nodes."""
        numbers = self._numbering.number_of_row
        if numbers is None:
            return values
        out = np.empty_like(values)
        out[numbers] = values
        return out

    def _rows(self) -> Rows | None:
        """Return the columns of features, which are read when they are used; None without them."""
        table, names = self._table, self._columns.features
        if table is None or not names:
            return None
        numbers = self._numbering.number_of_row

        def read() -> Iterator[tuple[int, Array]]:
            for chunk in table.chunks((), names):
                yield chunk.first, chunk.numbers

        def chunks(allocate: Allocate) -> Iterator[Array]:
            if numbers is None:
                yield from (values for _, values in read())
                return
            size, width = self.num_nodes, len(names)
            whole = allocate("features", size * width, np.float64).reshape(size, width)
            for first, values in read():
                whole[numbers[first : first + len(values)]] = values
            step = chunk_rows(width, 8)
            yield from (whole[begin : begin + step] for begin in range(0, size, step))

        row_of = None if numbers is None else np.argsort(numbers)

        def locate(node: int, column: int) -> str:
            return table.place(int(node if row_of is None else row_of[node]), names[column])

        where = f"{table.path}"
        dtype = np.dtype(np.float64)
        return Rows(self.num_nodes, len(names), dtype, chunks, where, locate=locate)


def is_table(path: Path) -> bool:
    """Whether the name of a file is one of a table, see `open_table`."""
    name = path.name.lower().removesuffix(".gz")
    is_text = name.startswith("out.") or name.endswith(TEXT)
    return is_text or path.suffix.lower() in PARQUET


def open_table(
    path: Path,
    separator: str | None = None,
    has_header: bool | None = None,
    comment: str | None = None,
) -> Table:
    """Open a table: a file in Parquet, a folder of such files, or a text file.

    Args:
        path: ends in .parquet or .pq, is a folder, or is named as a text file; see `TextTable`.
            Files whose names begin with `out.` are those of KONECT.
        separator: of a text file, see `TextTable`; likewise the next two.
        has_header: whether the first row has the names of the columns.
        comment: character with which comments begin.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file does not have the name of a table.
    """
    if path.is_dir() or path.suffix.lower() in PARQUET:
        return ParquetTable(path)
    if not is_table(path):
        raise ValueError(
            f"{path} is not a table\n\nhint: the name of a table ends in "
            f"{', '.join(TEXT)}, one of these with .gz, {' or '.join(PARQUET)}, or begins with out."
        )
    return TextTable(path, separator, has_header, comment)


def choose_ends(
    table: Table, source: str | None = None, target: str | None = None, where: str = "[edges]"
) -> tuple[str, str]:
    """Return the columns of the sources and the targets of a table of edges or pairs.

    Raises:
        ValueError: the table has no such columns, or the first row may be an edge.
    """
    if (source is None) != (target is None):
        raise ValueError(
            f"{where} names one end of the edges, but not the other\n\n"
            "hint: give both source and target, or neither"
        )
    if source is not None and target is not None:
        return table.find(source, f"source in {where}"), table.find(target, f"target in {where}")
    lower = {name.lower(): name for name in table.columns}
    for pair in END_NAMES:
        if set(pair) <= set(lower):
            return lower[pair[0]], lower[pair[1]]
    others = [name for name in table.columns if name not in table.index]
    if not table.has_header and len(others) > 1:
        return others[0], others[1]
    # either the only two columns, or an index of two levels
    pairs = [names for names in (others, list(table.index)) if len(names) == 2]
    if isinstance(table, TextTable) and table.format.may_be_edge:
        raise ValueError(
            f"{table.path}: the first line, {table.format.separator.join(table.columns)}, may be "
            "an edge or the names of the columns\n\nhint: set header = true or header = false in "
            "the .toml, or call the columns source and target"
        )
    if len(pairs) == 1:
        return pairs[0][0], pairs[0][1]
    hint = f"source and target in {where} name them, or call them source and target"
    if len(table.columns) == 1:
        hint = f"separator in {where} is the character between the columns"
    elif isinstance(table, TextTable):
        hint += f"; if the first line is an edge, set header = false in {where}"
    raise ValueError(
        f"{table.path}: cannot determine the endpoint columns among {', '.join(table.columns)}\n\n"
        f"hint: {hint}"
    )


def _node_table(path: Path, options: NodeTable) -> tuple[Table | None, NodeColumns]:
    if options.file is None:
        return None, NodeColumns()
    table = open_table(
        path.parent / options.file, options.separator, options.header, options.comment
    )
    return table, choose_columns(table, options)


def _read_texts(table: Table | None, columns: NodeColumns, progress: Progress) -> dict[str, Texts]:
    """Read the columns of texts of the table of nodes, and check that the features are numbers."""
    if table is None:
        return {}
    wanted = columns.texts or table.columns[:1]
    texts = [name for name in wanted if name not in columns.features]
    chunks: dict[str, list[Texts]] = {name: [] for name in wanted}
    for chunk in table.chunks(texts, columns.features, progress):
        for name in wanted:
            # without columns of texts, only the number of rows is used
            rows = np.zeros(len(chunk.numbers), np.int64), np.array([""], object)
            chunks[name].append(chunk.texts.get(name, rows))
    return {name: combine(parts) for name, parts in chunks.items()}


def _open_npy(path: Path, features: str | list[str] | None) -> Rows | None:
    if not isinstance(features, str):
        return None
    file = path.parent / features
    if not file.is_file():
        raise FileNotFoundError(
            f"`features` in {path.name} refers to {file}, which does not exist\n\n"
            "hint: paths in a .toml are relative to its folder"
        )
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"{file} is not a .npy file of numbers: {error}\n\nhint: `numpy.save` writes one"
        ) from None
    return rows_from_array(array, str(file))


def _rows_of_npy(rows: Rows, numbering: Numbering) -> Rows:
    if numbering.number_of_row is not None:
        raise ValueError(
            f"cannot determine the row order of {rows.where}: by id, or as in the node table\n\n"
            "hint: sort the table of nodes by id, 0 to N - 1, so that both are the same"
        )
    return rows


def _check_not_empty(table: Table, count: int) -> None:
    if count == 0:
        raise ValueError(f"{table.path} has no rows\n\nhint: was it written completely?")


def _notes(path: Path, table: Table, ends: Sequence[Array], numbering: Numbering) -> Iterator[str]:
    """Yield what the user may not expect of the edges, one line each."""
    if not numbering.has_ids and min(ids.min() for ids in ends) == 1:
        yield (
            f"no edge of {path.name} has the node 0: without a column id, nodes are numbered from "
            "0 in the order of the rows; if the edges count from 1, add the column id"
        )
    if isinstance(table, TextTable) and table.format.may_be_header:
        yield (
            f"the first line of {table.path.name}, {','.join(table.columns)}, is read as an edge; "
            "if these are the numbers of columns, as pandas writes them, set header = true"
        )
