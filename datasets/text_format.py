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

from gcnzc.datasets.tables import END_NAMES, is_number

COMMENTS = ("#", "%")
# stands for runs of blanks and tabs
BLANKS = " "
# in the order in which they are tried
SEPARATORS = ("\t", ",", ";", "|")
# lines from which the separator is determined
SAMPLE = 20
_BANNER = "%%MatrixMarket"
_BIPARTITE = re.compile(r"%\s*bip\b")


@dataclass(frozen=True)
class TextFormat:
    """The format of a text file.

    Attributes:
        separator: of the cells; `BLANKS` for runs of blanks and tabs.
        names: of the columns.
        has_header: whether the first row has the names.
        skipped: the number of lines before the first row.
        comments: with what later lines begin that are no rows.
        may_be_rows: such lines may be rows if they have as many cells.
        num_rows: as the file says; None if it does not.
        may_be_header: the first row has the numbers 0, 1, ..., which pandas may have written as
            names, and is taken as an edge.
    """

    separator: str
    names: list[str]
    has_header: bool
    skipped: int = 0
    comments: tuple[str, ...] = ()
    may_be_rows: bool = False
    num_rows: int | None = None
    may_be_header: bool = False

    def cells(self, lines: Iterable[str]) -> Any:
        """Return a csv reader of lines, whose `line_num` counts them."""
        return _reader(lines, self.separator)


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
        ValueError: the file has no rows, the first row may be names or not, or the file has edges
            between two kinds of nodes.
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
    kind, last = (heading[0], heading[-1]) if heading else ("", "")
    if not first:
        hint = 'comment = "" reads lines that begin with # or %' if last else "was it written?"
        raise ValueError(f"{path} is empty{' but for comments' if last else ''}\n\nhint: {hint}")
    if _BIPARTITE.match(kind):
        raise _bipartite(path)
    if kind.startswith(_BANNER) or (path.name.endswith((".mtx", ".mtx.gz")) and marks):
        return _matrix_market(path, kind, first, next(lines, "1 1"), skipped)
    sample = [first, *islice(lines, SAMPLE - 1)]
    separator = separator or _find_separator(path, sample)
    names = [name.strip() for name in next(cells for cells in _reader(sample, separator) if cells)]
    are_numbers = all(map(is_number, names))
    has_ends = any({*pair} <= {name.lower() for name in names} for pair in END_NAMES)
    if has_header is None and last and not (are_numbers or has_ends) and len(names) > 1:
        in_comment: list[str] = next(_reader([last.lstrip("#% ")], separator), [])
        if len(in_comment) == len(names):
            raise ValueError(
                f"{path}, line {skipped + 1}: {first.strip()!r:.100} may be a row or the names of "
                f"the columns, since the comment before it has {len(names)} words, too\n\n"
                "hint: set header = true or header = false"
            )
    is_given = has_header is not None
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
    is_csv = ".csv" in [suffix.lower() for suffix in path.suffixes]
    may_be_header = is_csv and names == numbers and not (last or is_given)
    return TextFormat(
        separator,
        names if has_header else numbers,
        has_header,
        skipped,
        marks,
        may_be_rows,
        may_be_header=may_be_header,
    )


def _find_separator(path: Path, sample: list[str]) -> str:
    """Return the separator that gives each of the first rows as many cells, at least two."""
    if ".tsv" in [suffix.lower() for suffix in path.suffixes]:
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
    is_csv = ".csv" in [suffix.lower() for suffix in path.suffixes]
    if is_even and not is_csv:
        return BLANKS
    # rows have different numbers of cells: the reader names the first such row
    known = SEPARATORS if is_csv else (*SEPARATORS, BLANKS)
    return next((each for each in known if each in sample[0].strip()), ",")


def _reader(lines: Iterable[str], separator: str) -> Any:
    if separator == BLANKS:
        lines = (line.strip().replace("\t", " ") for line in lines)
    return csv.reader(lines, delimiter=separator, skipinitialspace=True)


def _matrix_market(path: Path, banner: str, sizes: str, row: str, skipped: int) -> TextFormat:
    """Return the format of a file of the Matrix Market, whose first row has sizes."""
    cells = sizes.split()
    if " array" in banner.lower() or len(cells) != 3 or not all(map(str.isdecimal, cells)):
        raise ValueError(
            f"{path}, line {skipped + 1}: {sizes.strip()!r:.100} has not the sizes of a sparse "
            "matrix\n\nhint: after the comments, the format coordinate of the Matrix Market has "
            "the numbers of rows, columns and entries"
        )
    if cells[0] != cells[1]:
        raise _bipartite(path)
    names = [str(number) for number in range(len(row.split()))]
    return TextFormat(BLANKS, names, False, skipped + 1, COMMENTS, num_rows=int(cells[2]))


def _bipartite(path: Path) -> ValueError:
    return ValueError(
        f"{path} has edges between two kinds of nodes, and equal ids of both are different nodes"
        "\n\nhint: HeteroGraph.from_arrays takes edges between two types of nodes"
    )
