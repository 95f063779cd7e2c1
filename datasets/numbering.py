"""The numbers of nodes whose ids are texts or any integers.

Notation: N nodes, E edges.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gcnzc.datasets.names import as_integers
from gcnzc.datasets.rows import Array, Progress, no_progress
from gcnzc.datasets.tables import Table, Texts


class Numbering:
    """The ids of nodes, and the numbers 0 to N - 1 that they get.

    Ids that are the integers 0 to N - 1, in any order, are the numbers. Other ids are numbered in
    the order of their rows; without a table of nodes, in ascending order of the ids.

    Args:
        ids: (N,) ids in the order of the rows of the table of nodes; None without them.
        count: N without ids, if the number of nodes is known.
    """

    def __init__(self, ids: Array | None, count: int | None) -> None:
        self.count = count if ids is None else len(ids)
        self.has_ids = ids is not None or count is None
        """whether ids are given, by the nodes or by the edges; otherwise, they are the numbers"""
        self.names: Array | None = None
        """(N,) ids as text, by number; None if the ids are the numbers"""
        self.number_of_row: Array | None = None
        """(N,) number of the node of each row; None if they are equal"""
        self._index: Any = None
        self._found: dict[str, int] = {}
        """ids of edges in the order of their appearance, if nothing else determines the nodes"""
        if ids is not None:
            self._index = _index(ids)
            numbers = dense_integers(ids)
            if numbers is None:
                self.names = ids
            elif (numbers != np.arange(len(ids))).any():
                self.number_of_row = numbers

    def numbers_of(self, texts: Array) -> Array:
        """Return the (n,) int64 numbers of ids, -1 for unknown ones.

        Without a table of nodes all ids are known, and `finish` gives the numbers.
        """
        if self._index is not None:
            rows = self._index.get_indexer(_index(texts)).astype(np.int64)
            if self.number_of_row is None:
                return rows
            return np.where(rows < 0, -1, self.number_of_row[rows])
        if self.count is not None:
            return _integer_numbers(texts, self.count)
        found = self._found
        return np.array([found.setdefault(text, len(found)) for text in texts], np.int64)

    def finish(self, numbers: Array) -> Array:
        """Return the final numbers of those of `numbers_of`, when all edges have been read."""
        if self.count is not None and not self._found:
            return numbers
        ids = np.array(list(self._found), object)
        integers = as_integers(ids)
        order = np.argsort(ids if integers is None else integers, kind="stable")
        self.count = len(ids)
        if dense_integers(ids) is None:
            self.names = ids[order]
        place = np.empty(len(ids), np.int64)
        place[order] = np.arange(len(ids))
        return place[numbers]


def read_ids(table: Table, column: str, texts: Texts) -> Array:
    """Return the (N,) ids of the table of nodes.

    Raises:
        ValueError: an id is missing or there twice; the message names the lines.
    """
    import pandas as pd

    codes, values = texts
    ids = values[codes]
    empty = np.flatnonzero(ids == "")
    if len(empty):
        raise ValueError(
            f"{table.place(int(empty[0]), column)}: the id is missing\n\nhint: each node has an id"
        )
    twice = np.flatnonzero(pd.Series(ids).duplicated().to_numpy())
    if len(twice):
        second = int(twice[0])
        first = int(np.flatnonzero(codes == codes[second])[0])
        raise ValueError(
            f"{table.place(second, column)}: the id {ids[second]!r} is also in "
            f"{table.place(first).rpartition(', ')[2]} ({len(twice):,} rows repeat an id)\n\n"
            "hint: each node has one row; remove the duplicates"
        )
    return ids


class KnownNodes:
    """The numbers of the nodes of a prepared graph.

    Args:
        ids: (N,) ids of the nodes as text, by number; None if the ids are the numbers.
        count: N.
    """

    def __init__(self, ids: Array | None, count: int) -> None:
        self.count: int | None = count
        self._index = None if ids is None else _index(ids)

    def numbers_of(self, texts: Array) -> Array:
        """Return the (n,) int64 numbers of ids, -1 for unknown ones."""
        if self._index is None:
            return _integer_numbers(texts, self.count or 0)
        return self._index.get_indexer(_index(texts)).astype(np.int64)

    def finish(self, numbers: Array) -> Array:
        """Return `numbers`."""
        return numbers


def read_numbers(
    table: Table,
    columns: Sequence[str],
    numbering: Numbering | KnownNodes,
    progress: Progress = no_progress,
    hint: str = "add the node, or remove the line; ids are compared as text, so that 7, 07 and 7.0 "
    "differ. Without a column id, nodes are numbered from 0; if the edges count from 1, add this "
    "column",
) -> list[Array]:
    """Read columns of ids, such as the ends of edges, as (E,) arrays of node numbers.

    Args:
        table: of edges, pairs or nodes.
        columns: names of columns.
        numbering: of the nodes.
        progress: see `Table.chunks`.
        hint: of the error for an unknown id.

    Raises:
        ValueError: an id is missing or unknown; the message names the line.
    """
    ends: list[list[Array]] = [[] for _ in columns]
    for chunk in table.chunks(columns, progress=progress):
        for column, found in zip(columns, ends, strict=True):
            codes, values = chunk.texts[column]
            numbers = np.where(values == "", -1, 0) if len(values) else np.empty(0, np.int64)
            known = np.flatnonzero(numbers == 0)
            numbers[known] = numbering.numbers_of(values[known])
            rows = numbers[codes]
            wrong = np.flatnonzero(rows < 0)
            if len(wrong):
                row = int(wrong[0])
                where = table.place(chunk.first + row, column)
                text = str(values[codes[row]])
                raise ValueError(_unknown(where, text, numbering.count, hint))
            found.append(rows)
    empty = np.empty(0, np.int64)
    return [numbering.finish(np.concatenate([empty, *found])) for found in ends]


def _index(texts: Array) -> Any:
    """Return a pandas index, whose `get_indexer` finds the places of texts."""
    import pandas as pd

    return pd.Index(texts, dtype=object)


def _unknown(where: str, text: str, count: int | None, hint: str) -> str:
    if text == "":
        return f"{where}: the id is missing\n\nhint: fill the cell, or remove the line"
    return f"{where}: no node has the id {text!r}; there are {count or 0:,} nodes\n\nhint: {hint}"


def dense_integers(ids: Array) -> Array | None:
    """Return ids as integers if they are 0 to N - 1 in any order, otherwise None."""
    numbers = as_integers(ids)
    if numbers is None or len(numbers) == 0 or numbers.min() != 0:
        return None
    return numbers if numbers.max() == len(ids) - 1 == len(np.unique(numbers)) - 1 else None


def _integer_numbers(texts: Array, count: int) -> Array:
    numbers = np.array([int(text) if _is_canonical(text) else -1 for text in texts], np.int64)
    return np.where(numbers < count, numbers, -1)


def _is_canonical(text: str) -> bool:
    return text.isdecimal() and text.isascii() and str(int(text)) == text and len(text) < 19
