"""How a text file of a table is written: its separator, comments, and names of columns.

Lists of edges are published in several formats. Those of SNAP have comments that begin with `#` and
tabs; KONECT and networkrepository have comments that begin with `%` and blanks or commas; Matrix
Market has a line of sizes after the comments. None of them names the columns.
"""

import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from gcnzc.datasets.rows import Array
from gcnzc.datasets.tables import END_NAMES, is_number

COMMENTS = ("#", "%")
# stands for runs of blanks and tabs
BLANKS = " "
# in the order in which they are tried
SEPARATORS = ("\t", ",", ";", "|")
# lines from which the separator is determined
SAMPLE = 20
_BANNER = "%%MatrixMarket"
_KONECT = re.compile(r"%\s*(sym|asym|bip)\b")


@dataclass(frozen=True)
class TextFormat:
    """The format of a text file.

    Attributes:
        separator: of the cells; `BLANKS` for runs of blanks and tabs.
        names: of the columns.
        has_header: whether the first row has the names.
        skipped: the number of lines before the first row.
        comments: prefixes of comment lines after the first row.
        may_be_rows: whether a comment with as many cells as a row is an error.
        num_rows: as the file says; None if it does not.
        num_nodes: as the file says, with ids from 1; None if it does not.
        bidirected: whether the file declares that it has each undirected edge once; None if it
            declares nothing.
        may_be_header: the first row has the numbers 0, 1, ..., which pandas may have written as
            names, and is taken as an edge.
        may_be_edge: the first row is taken as the names of two columns, but later rows have texts,
            too.
    """

    separator: str
    names: list[str]
    has_header: bool
    skipped: int = 0
    comments: tuple[str, ...] = ()
    may_be_rows: bool = False
    num_rows: int | None = None
    num_nodes: int | None = None
    bidirected: bool | None = None
    may_be_header: bool = False
    may_be_edge: bool = False

    def cells(self, lines: Iterable[str]) -> Any:
        """Return a csv reader of lines, whose `line_num` counts them."""
        return _reader(lines, self.separator)

    def node_ids(self) -> Array | None:
        """Return the (N,) ids of the nodes as text, if the file has their number; None if not."""
        if self.num_nodes is None:
            return None
        return np.array([str(number + 1) for number in range(self.num_nodes)], object)


def find_format(
    path: Path,
    lines: Iterator[str],
    separator: str | None,
    has_header: bool | None,
    comment: str | None,
) -> TextFormat:
    """Determine the format from the first lines.

    Args:
        path: of the file, for messages.
        lines: of the file.
        separator: as given; None to determine it.
        has_header: as given; None for a header unless the first row has only numbers.
        comment: with what comments begin, as given; "" for no comments. None: lines before the
            first row are comments if they begin with `#` or `%`; so are later ones if the first
            row has only numbers, or if they begin as those before the first row.

    Raises:
        ValueError: the file has no rows, a comment before the first row may be a row or names, or
            the file has edges between two kinds of nodes.
    """
    marks = COMMENTS if comment is None else tuple(comment)
    skipped, first, heading = 0, "", []
    for line in lines:
        text = line.strip()
        if text and not text.startswith(marks):
            first = line
            break
        heading += [text] if text else []
        skipped += 1
    kind = heading[0] if heading else ""
    if not first:
        hint = 'comment = "" reads lines that begin with # or %' if kind else "was it written?"
        raise ValueError(f"{path} is empty{' but for comments' if kind else ''}\n\nhint: {hint}")
    konect = _KONECT.match(kind)
    if konect and konect[1] == "bip":
        raise _bipartite(path)
    if kind.startswith(_BANNER) or (path.name.endswith((".mtx", ".mtx.gz")) and marks):
        return _matrix_market(path, kind, first, lines, skipped)
    sample = [first, *islice(lines, SAMPLE - 1)]
    separator = separator or _find_separator(path, sample)
    row, *later = [cells for cells in _reader(sample, separator) if cells]
    names = [name.strip() for name in row]
    are_numbers = all(map(is_number, names))
    is_given = has_header is not None
    has_ends = _has_ends(names)
    if not (are_numbers or has_ends or len(names) == 1 or (is_given and comment is not None)):
        for text in heading:
            if len(next(_reader([text.lstrip("#% ")], separator), [])) == len(names):
                raise ValueError(
                    f"{path}: the comment {text!r:.100} may be a row or the names of the columns, "
                    f"since {first.strip()!r:.100} in line {skipped + 1} also has {len(names)} "
                    f'words\n\nhint: comment = "" reads it; comment = "{text[0]}" skips it, with '
                    "header = true or header = false for the next line"
                )
    has_header = not are_numbers if has_header is None else has_header
    wrong = next((name for name in names if not name or (is_number(name) and not is_given)), None)
    if has_header and wrong is not None:
        raise ValueError(
            f"{path}: the first line has {wrong!r}, which is not the name of a column\n\n"
            "hint: add a line with the names of the columns, or set header = false, and name "
            "the columns by their numbers, from 0; pandas writes no index with index=False"
        )
    may_be_rows = comment is None and not are_numbers
    if may_be_rows:
        marks = tuple({text[0] for text in heading})
    numbers = [str(number) for number in range(len(names))]
    rows = [cells for cells in later if not cells[0].startswith(marks)]
    has_texts = any(not is_number(cell) for cells in rows for cell in cells)
    found = None
    if heading and are_numbers and comment is None and not is_given:
        found = _names_in(heading[-1], separator, len(names))
    return TextFormat(
        separator,
        names if has_header else found or numbers,
        has_header,
        skipped,
        marks,
        may_be_rows,
        bidirected=None if konect is None else konect[1] == "sym",
        may_be_header=_has_suffix(path, ".csv") and names == numbers and not (kind or is_given),
        may_be_edge=has_header and not is_given and len(names) == 2 and has_texts,
    )


def _has_ends(names: list[str]) -> bool:
    return any({*pair} <= {name.lower() for name in names} for pair in END_NAMES)


def _names_in(comment: str, separator: str, count: int) -> list[str] | None:
    """Return the names of all columns in a comment; None unless both ends are among them."""
    for each in (separator, BLANKS, ","):
        names = [name.strip() for name in next(_reader([comment.lstrip("#% ")], each), [])]
        if len(names) == count and _has_ends(names):
            return names
    return None


def _find_separator(path: Path, sample: list[str]) -> str:
    """Return the separator that gives each of the first rows as many cells, at least two."""
    if _has_suffix(path, ".tsv"):
        return "\t"
    rows = [line.split() for line in sample if line.strip()]
    # with a single row, no header is above the numbers
    are_numbers = all(is_number(cell) for row in rows[1:] or rows for cell in row)
    is_even = len(rows[0]) > 1 and len({len(row) for row in rows}) == 1
    if is_even and are_numbers and any(" " in line.strip() for line in sample):
        return BLANKS
    # the last row may be the beginning of a longer one
    for each in SEPARATORS:
        lengths = [len(cells) for cells in _reader(sample, each) if cells]
        if lengths[0] > 1 and len({*lengths[:-1], lengths[0]}) == 1:
            return each
    is_csv = _has_suffix(path, ".csv")
    if is_even and not is_csv:
        return BLANKS
    # rows have different numbers of cells: the reader names the first such row
    known = SEPARATORS if is_csv else (*SEPARATORS, BLANKS)
    return next((each for each in known if each in sample[0].strip()), ",")


def _has_suffix(path: Path, suffix: str) -> bool:
    """Whether a name has a suffix, also before .gz."""
    return suffix in [each.lower() for each in path.suffixes]


def _reader(lines: Iterable[str], separator: str) -> Any:
    if separator == BLANKS:
        lines = (line.strip().replace("\t", " ") for line in lines)
    return csv.reader(lines, delimiter=separator, skipinitialspace=True)


def _matrix_market(
    path: Path, banner: str, sizes: str, lines: Iterable[str], skipped: int
) -> TextFormat:
    """Return the format of a file of the Matrix Market, whose first row has sizes."""
    cells = sizes.split()
    if " array" in banner.lower() or len(cells) != 3 or not all(map(str.isdecimal, cells)):
        raise ValueError(
            f"{path}, line {skipped + 1}: {sizes.strip()!r:.100} does not have the sizes of a "
            "sparse matrix\n\nhint: after the comments, the format coordinate of the Matrix Market "
            "has the numbers of rows, columns and entries"
        )
    if cells[0] != cells[1]:
        raise _bipartite(path)
    rows = (line.split() for line in lines if not line.lstrip().startswith(COMMENTS))
    row = next(filter(None, rows), ["1", "1"])
    return TextFormat(
        BLANKS,
        [str(number) for number in range(len(row))],
        has_header=False,
        skipped=skipped + 1,
        comments=COMMENTS,
        num_rows=int(cells[2]),
        num_nodes=int(cells[0]),
        # of a skew-symmetric or Hermitian matrix, too, one half is stored
        bidirected=banner.lower().endswith(("symmetric", "hermitian")) or None,
    )


def _bipartite(path: Path) -> ValueError:
    return ValueError(
        f"{path} has edges between two kinds of nodes, and equal ids of both are different nodes"
        "\n\nhint: HeteroGraph.from_arrays takes edges between two types of nodes"
    )
