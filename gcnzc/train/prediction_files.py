"""Find nodes by their ids, read ids of nodes and pairs from files, and write predictions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from gcnzc._files import replacing
from gcnzc.datasets.node_columns import ID_NAMES
from gcnzc.datasets.numbering import KnownNodes, read_numbers
from gcnzc.datasets.parquet_tables import ParquetTable
from gcnzc.datasets.rows import Array
from gcnzc.datasets.table_graph import choose_ends, open_table
from gcnzc.datasets.text_tables import TextTable
from gcnzc.graph.times import as_times, describe_wrong_time, parse_times, to_dates
from gcnzc.system import files

# rows are converted to text in chunks: the text of all takes several times their memory
CHUNK_ROWS = 1 << 16
# name of the column of times in a file of pairs
TIME = "time"

_SOURCE_IDS = (
    "ids are those of the graph's source, see mapping/nodes.csv in its folder, or in nodes/0 and "
    "the like for several node types; without that file they are the numbers from 0"
)


def find_nodes(known: KnownNodes, ids: Any, source: str | Path) -> Array:
    """Return the (M,) int64 node indices (0 to N - 1) of nodes, given their ids.

    Args:
        known: the nodes of the graph.
        ids: (M,) ids: a tensor, an array or a list of integers or strings.
        source: what has the ids, for messages.

    Raises:
        ValueError: an id is unknown.
    """
    values = ids.tolist() if isinstance(ids, Tensor | np.ndarray) else ids
    texts = np.array([str(each) for each in values], object)
    indices = known.numbers_of(texts)
    wrong = np.flatnonzero(indices < 0)
    if len(wrong):
        raise ValueError(
            f"{source}, row {wrong[0]}: no node has the id {texts[wrong[0]]!r}; there are "
            f"{known.count or 0:,} nodes\n\nhint: {_SOURCE_IDS}"
        )
    return indices


def read_nodes(path: Path, known: KnownNodes) -> Array:
    """Read the (M,) int64 node indices of a file of ids.

    It is a table with a column `node` or `id`, or with only one column, whose name may be missing;
    or a .npy file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has no such column, or an id is unknown; the message names the line.
    """
    if path.suffix == ".npy":
        return find_nodes(known, _load_npy(path).reshape(-1), path)
    table = open_table(path)
    names = {name.lower(): name for name in table.columns}
    found = next((names[name] for name in ID_NAMES if name in names), None)
    others = [name for name in table.columns if name not in table.index] or table.columns
    if found is None and len(others) == 1:
        found = others[0]
        is_id = known.numbers_of(np.array([found], object))[0] >= 0
        if is_id and table.has_header and isinstance(table, TextTable) and len(names) == 1:
            # the first line is an id
            table, found = open_table(path, has_header=False), "0"
    if found is None:
        raise ValueError(
            f"{path} has no column of ids; its columns are {', '.join(table.columns)}\n\n"
            "hint: the first line names the columns; call that of the ids `node` or `id`"
        )
    return read_numbers(table, [found], known, hint=_hint_of(path))[0]


def _hint_of(path: Path) -> str:
    """Return the hint for an id in a file that no node has."""
    return f"correct {path}: {_SOURCE_IDS}. Ids are compared as text, so that 7, 07 and 7.0 differ"


def read_pairs(path: Path, known: Sequence[KnownNodes]) -> tuple[Array, Array]:
    """Read pairs of nodes from a file of ids: columns `source` and `target`, or (2, M) .npy.

    Args:
        path: of the file.
        known: the nodes that are sources, and those that are targets.

    Returns:
        (M,) int64 node indices (0 to N - 1) of the sources, and (M,) of the targets.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has no such columns, or an id is unknown; the message names the line.
    """
    if path.suffix == ".npy":
        array = _load_npy(path)
        if array.ndim != 2 or len(array) != 2:
            raise ValueError(
                f"{path} has the shape {array.shape}\n\nhint: pairs are (2, M): sources, targets"
            )
        return find_nodes(known[0], array[0], path), find_nodes(known[1], array[1], path)
    table = open_table(path)
    ends, hint = choose_ends(table, where=path.name), _hint_of(path)
    if known[0] is known[1]:
        # the file is read once
        sources, targets = read_numbers(table, ends, known[0], hint=hint)
    else:
        sources, targets = (
            read_numbers(table, [column], own, hint=hint)[0]
            for column, own in zip(ends, known, strict=True)
        )
    return sources, targets


def read_times(path: Path, unit: str | None) -> Array | None:
    """Read the column `time` of a file of pairs; None if it has none.

    Args:
        path: of the file.
        unit: `time_unit` of the graph, in which dates become integers; None if it is not known.

    Returns:
        (M,) int64; dates are rounded down.

    Raises:
        ValueError: a time is missing or invalid, or it is a date and there is no unit, or it could
            be two times, see `parse_times`; the message names the line.
    """
    if path.suffix == ".npy":
        return None
    table = open_table(path)
    found = next((name for name in table.columns if name.lower() == TIME), None)
    if found is None:
        return None
    if isinstance(table, ParquetTable):
        dates = table.column(found)
        # a column of integers has no dates, also where an integer looks like one
        if dates.dtype.kind in "iu" or to_dates(dates) is not None:
            name = f"{path}: {found}"
            return as_times(name, dates, len(dates), unit, is_limit=True).numpy()
    times = [np.empty(0, np.int64)]
    for chunk in table.chunks([found]):
        codes, values = chunk.texts[found]
        own, wrong = parse_times(values.tolist(), unit)
        if wrong is not None:
            place = int(np.flatnonzero(codes == wrong)[0])
            where = f"{table.place(chunk.first + place, found)}: {values[wrong]!r}"
            raise describe_wrong_time(where, values[wrong], unit)
        times.append(own[codes])
    return np.concatenate(times)


def _load_npy(path: Path) -> Array:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}\n\nhint: give the path of a file of ids")
    try:
        array: Array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"{path} is not a .npy file: {error}\n\nhint: `numpy.save` writes one"
        ) from None
    if array.dtype.kind not in "iuU":
        raise ValueError(
            f"{path} has the type {array.dtype}\n\nhint: ids are integers or strings; "
            "numpy.flatnonzero(mask) turns a mask into ids"
        )
    return array


def write_predictions(
    path: Path, fields: Mapping[str, Array], names: Sequence[str] = ()
) -> list[str]:
    """Write a table atomically, and return the names of its columns.

    Args:
        path: of the file: .npy for a structured array, .parquet, or text.
        fields: (M,) or (M, C) columns.
        names: C names, from which a table has the names of the columns of (M, C).
    """
    if path.suffix == ".npy":
        types = [(name, value.dtype, value.shape[1:]) for name, value in fields.items()]
        whole = np.empty(len(next(iter(fields.values()))), types)
        for name, value in fields.items():
            whole[name] = value
        files.write_array(path, whole)
        return list(fields)
    columns: dict[str, Array] = {}
    for field, value in fields.items():
        if value.ndim == 1:
            columns[field] = value
        else:
            columns |= {f"{field}_{name}": value[:, i] for i, name in enumerate(names)}
    import pandas as pd

    with replacing(path) as partial:
        if path.suffix == ".parquet":
            # one table: predictions are in memory already
            pd.DataFrame(columns).to_parquet(partial, index=False)
            return list(columns)
        compression: Any = "gzip" if path.suffix == ".gz" else None
        for begin in range(0, max(len(next(iter(columns.values()))), 1), CHUNK_ROWS):
            end, mode = begin + CHUNK_ROWS, "a" if begin else "w"
            chunk = pd.DataFrame({name: value[begin:end] for name, value in columns.items()})
            chunk.to_csv(partial, index=False, header=not begin, mode=mode, compression=compression)
    return list(columns)
