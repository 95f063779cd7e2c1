"""Read csv and other text files in chunks of rows, with errors that name the line.

Lists of edges are published in several formats. Those of SNAP have comments that begin with `#` and
tabs; KONECT and networkrepository have comments that begin with `%` and blanks or commas; Matrix
Market has a line of sizes after the comments. None of them names the columns. `find_format`
determines the format from the first lines. `_Rows` removes comments and blanks around cells, so
that pyarrow parses any of these files as csv.
"""

import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from gcnzc.datasets.rows import CHUNK_BYTES, Array, Progress
from gcnzc.datasets.tables import END_NAMES, MISSING, Table, is_number

TEXT = (".csv", ".tsv", ".txt", ".tab", ".dat", ".edges", ".edgelist", ".el", ".mtx")
_QUOTED = re.compile(b'"[^"]*"')
BLOCK_BYTES = CHUNK_BYTES // 2
_AGAIN = "hint: write or download it again"
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
        "\n\nhint: Graph.from_arrays takes edges between two types of nodes"
    )


class TextTable(Table):
    """A table in a csv file, or in a text file with another separator; also with .gz.

    Args:
        path: of the file.
        separator: of the cells; " " for runs of blanks and tabs. None determines it, see
            `find_format`; likewise the next two.
        has_header: whether the first row has the names of the columns.
        comment: character with which comments begin; "" for no comments.
    """

    def __init__(
        self,
        path: Path,
        separator: str | None = None,
        has_header: bool | None = None,
        comment: str | None = None,
    ) -> None:
        super().__init__(path)
        self._given = separator, has_header, comment

    @cached_property
    def format(self) -> TextFormat:
        """How the file is written."""
        with (
            self._opened() as (_, data),
            io.TextIOWrapper(data, encoding="utf-8-sig", newline="") as file,
        ):
            return find_format(self.path, iter(file), *self._given)

    @property
    def has_header(self) -> bool:  # type: ignore[override]
        """Whether the columns have names."""
        return self.format.has_header

    @cached_property
    def columns(self) -> list[str]:
        """See `Table.columns`."""
        return self.check_names(self.format.names)

    def place(self, row: int, column: str | None = None) -> str:
        """See `Table.place`."""
        line = next((line for line, _ in islice(self._records(), row, None)), "?")
        where = f"{self.path}, line {line}"
        return where if column is None else f"{where}, column {column!r}"

    def _batches(
        self, texts: Sequence[str], numbers: Sequence[str], progress: Progress
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        import pyarrow as pa
        from pyarrow import csv as arrow

        types = dict.fromkeys(texts, pa.dictionary(pa.int32(), pa.string()))
        types |= dict.fromkeys(numbers, pa.float64())
        names = list(types) or self.columns[:1]
        convert = arrow.ConvertOptions(
            column_types=types, include_columns=names, null_values=MISSING
        )
        num_rows, is_header, total = 0, self.has_header, self.path.stat().st_size
        with self._opened() as (raw, data):
            for block in _Rows(self.path, data, self.format).blocks():
                if not block.strip():
                    continue
                read = arrow.ReadOptions(
                    column_names=self.columns, skip_rows_after_names=int(is_header)
                )
                parse = arrow.ParseOptions(
                    delimiter=self.format.separator, newlines_in_values=b'"' in block
                )
                try:
                    found = arrow.read_csv(pa.BufferReader(block), read, parse, convert)
                except pa.ArrowInvalid as error:
                    self._explain(numbers, str(error))
                is_header = False
                arrays = found.unify_dictionaries().combine_chunks().to_batches()
                for batch in arrays:
                    yield batch.num_rows, {name: batch.column(name) for name in names}
                    num_rows += batch.num_rows
                progress(f"read {self.path.name}", min(raw.tell(), total), total)
        if self.format.num_rows not in (None, num_rows):
            raise ValueError(
                f"{self.path} has {num_rows:,} entries, but line {self.format.skipped} says "
                f"{self.format.num_rows:,}\n\nhint: was it written completely?"
            )

    def _explain(self, numbers: Sequence[str], reason: str) -> NoReturn:
        """Raise an error that names the first line that pyarrow cannot read."""
        for line, cells in self._records():
            where = f"{self.path}, line {line}"
            if len(cells) != len(self.columns):
                raise ValueError(
                    f"{where}: {len(cells)} cells, but there are {len(self.columns)} columns\n\n"
                    "hint: all lines have as many cells as the first one, also if some are empty; "
                    f"a text with the separator {self.format.separator!r} is in quotes; separator "
                    "in the .toml sets another"
                )
            for name, cell in zip(self.columns, cells, strict=True):
                if name in numbers and cell.strip() not in MISSING and not is_number(cell):
                    raise ValueError(
                        f"{where}, column {name!r}: {cell!r} is not a number\n\n"
                        'hint: list the columns of features, such as features = ["age", "x*"]; '
                        "encode texts as numbers, for example with pandas.get_dummies"
                    )
        raise ValueError(f"{self.path} cannot be read: {reason}\n\n{_AGAIN}")

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """Yield, for each row, the number of its first line, counted from 1, and its cells."""
        first, is_header = self.format.skipped, self.has_header
        with self._opened() as (_, data):
            for block in _Rows(self.path, data, self.format).blocks():
                reader, before = self.format.cells(io.StringIO(block.decode(), newline="")), first
                for cells in reader:
                    if cells and not is_header:
                        yield before + 1, cells
                    is_header = is_header and not cells
                    before = first + reader.line_num
                first = before

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        """Open the file; yield it as it is and decompressed, and describe damages."""
        is_gzip = self.path.suffix.lower() == ".gz"
        # gzip does not close the file that it reads
        with self.path.open("rb") as raw:
            try:
                yield raw, gzip.GzipFile(fileobj=raw) if is_gzip else raw
            except EOFError:
                raise ValueError(f"{self.path} is truncated\n\n{_AGAIN}") from None
            except (gzip.BadGzipFile, zlib.error, csv.Error) as error:
                raise ValueError(f"{self.path} cannot be read: {error}\n\n{_AGAIN}") from None
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{self.path} is not UTF-8: {error.reason}\n\n"
                    "hint: convert it, for example with `iconv -t UTF-8`"
                ) from None


class _Rows:
    """The rows of a file in blocks, without comments and without blanks around cells.

    A comment leaves an empty line, so that the others keep their numbers.
    """

    def __init__(self, path: Path, file: Any, layout: TextFormat) -> None:
        self._path, self._file, self._layout = path, file, layout
        mark = layout.separator.encode()
        blank = b" " if mark == b"\t" else b"[ \t]"
        begin, after = rb"(?:(?<=%s)|^)" % re.escape(mark), rb"(?=%s|[\r\n]|\Z)" % re.escape(mark)
        around = rb"%s%s+|%s+%s" % (begin, blank, blank, after)
        if mark == b" ":
            around = rb"^%s+|%s+(?=[\r\n]|\Z)" % (blank, blank)
        # a cell in quotes may have several lines, which are no comments
        quoted = rb'%s%s*"[^"]*(?:""[^"]*)*' % (begin, blank)
        self._comments = [each.encode() for each in layout.comments]
        # without comments, nothing matches
        comment = rb"^[ \t]*(?:%s)[^\r\n]*" % (b"|".join(map(re.escape, self._comments)) or b"(?!)")
        self._pattern = re.compile(
            rb'(?P<cell>%s"(?=%s*%s))|(?P<open>%s\Z)|(?P<comment>%s)|(?P<around>%s)|(?P<run>%s)'
            % (
                quoted,
                blank,
                after,
                quoted,
                comment,
                around,
                rb"[ \t]+" if mark == b" " else b"(?!)",
            ),
            re.M,
        )
        self._comment = re.compile(rb"(?P<comment>%s)" % comment, re.M)
        self._around, self._run = re.compile(around, re.M), re.compile(b"[ \t]+")
        # what a block without blanks around cells does not have, by blank
        near = {mark, b"\n", b"\r", b'"'}
        if mark == b" ":
            near -= {b'"'}
        self._signs = {}
        for each in (b" ", b"\t"):
            pairs = [pair for other in near for pair in (each + other, other + each)]
            self._signs[each] = [b"\t"] if mark == b" " and each != mark else pairs
        if mark == b"\t":
            del self._signs[mark]

    def blocks(self) -> Iterator[bytes]:
        """Yield blocks of whole rows, which begin with the header if there is one."""
        for _ in range(self._layout.skipped):
            self._file.readline()
        while block := self._whole_lines(BLOCK_BYTES):
            clean = self._clean(block)
            # a cell in quotes goes on in the next lines
            while clean is None and (rest := self._whole_lines(len(block))):
                block += rest
                clean = self._clean(block)
            yield block if clean is None else clean

    def _whole_lines(self, size: int) -> bytes:
        found: bytes = self._file.read(size)
        return found if found.endswith(b"\n") else found + self._file.readline()

    def _clean(self, block: bytes) -> bytes | None:
        """Remove comments and blanks around cells; return None if a quote is not closed."""
        if not self._needs_cleaning(block):
            return block
        if b'"' not in block:
            if any(each in block for each in self._comments):
                block = self._comment.sub(self._replace, block)
            block = self._around.sub(b"", block)
            return self._run.sub(b" ", block) if self._layout.separator == BLANKS else block
        self._is_open = False
        clean = self._pattern.sub(self._replace, block)
        return None if self._is_open else clean

    def _needs_cleaning(self, block: bytes) -> bool:
        """Whether there may be comments, blanks around cells, or a quote that is not closed."""
        if b'"' in block:
            if block.count(b'"') % 2 or any(blank + b'"' in block for blank in self._signs):
                return True
            block = b"\n" + _QUOTED.sub(b'""', block)
            begins = (self._layout.separator.encode(), b"\n")
            # other quotes are within cells
            if block.count(b'""') != sum(block.count(each + b'""') for each in begins):
                return True
            block = block[1:]
        return any(each in block for each in self._comments) or any(
            block.startswith(blank)
            or block.endswith(blank)
            or (blank in block and any(pair in block for pair in pairs))
            for blank, pairs in self._signs.items()
        )

    def _replace(self, found: "re.Match[bytes]") -> bytes:
        kind, text = found.lastgroup, found[0]
        if kind == "cell":
            return text.lstrip(b" \t")[:-1].rstrip(b" \t") + b'"'
        if kind == "comment":
            self._check_comment(text.decode())
        if kind == "open":
            self._is_open = True
        return b" " if kind == "run" else b""

    def _check_comment(self, text: str) -> None:
        """Raise a ValueError for a line that may be a row."""
        layout = self._layout
        cells: list[str] = next(layout.cells([text]), [])
        if layout.may_be_rows and len(cells) == len(layout.names):
            raise ValueError(
                f"{self._path}: the line {text!r:.100} may be a row or a comment\n\n"
                f'hint: comment = "{text.lstrip()[0]}" in the .toml skips such lines; quotes '
                "around the first text make it a row"
            )
