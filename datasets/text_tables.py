"""Read columns of csv and other text files, chunk by chunk, with errors that name the line."""

import csv
import gzip
import io
import re
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gcnzc.datasets.rows import CHUNK_BYTES, Progress, no_progress
from gcnzc.datasets.tables import MISSING, Chunk, Table, Texts, is_number
from gcnzc.datasets.text_format import BLANKS, TextFormat, find_format

if TYPE_CHECKING:
    import pandas as pd

TEXT = (".csv", ".tsv", ".txt", ".tab", ".dat", ".edges", ".edgelist", ".el", ".mtx")
# a chunk of text takes about this much memory for each cell
TEXT_BYTES = 64


class TextTable(Table):
    """A table in a csv file, or in a text file with another separator; also with .gz.

    Args:
        path: of the file.
        separator: of the cells; " " for runs of blanks and tabs. None determines it, see
            `gcnzc.datasets.text_format.find_format`; likewise the next two.
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
        with self._readable(), self._decoded() as (_, file):
            return find_format(self.path, iter(file), *self._given)

    @property
    def has_header(self) -> bool:  # type: ignore[override]
        """Whether the columns have names."""
        return self.format.has_header

    @cached_property
    def columns(self) -> list[str]:
        """See `Table.columns`."""
        return self.check_names(self.format.names)

    def chunks(
        self, texts: Sequence[str], numbers: Sequence[str] = (), progress: Progress = no_progress
    ) -> Iterator[Chunk]:
        """See `Table.chunks`."""
        with self._readable():
            yield from self._chunks(texts, numbers, progress)

    def place(self, row: int, column: str | None = None) -> str:
        """See `Table.place`."""
        with closing(self._records()) as records:
            lines = (line for number, (line, _) in enumerate(records) if number == row)
            where = f"{self.path}, line {next(lines, '?')}"
        return where if column is None else f"{where}, column {column!r}"

    def _chunks(
        self, texts: Sequence[str], numbers: Sequence[str], progress: Progress
    ) -> Iterator[Chunk]:
        import pandas as pd

        step = max(1, CHUNK_BYTES // (8 * len(numbers) + TEXT_BYTES * len(self.columns)) * 4)
        total, last, first = self.path.stat().st_size, self.columns[-1], 0
        is_last_empty, layout = False, self.format
        with self._decoded() as (raw, file):
            reader = pd.read_csv(
                _Lines(self.path, file, layout),
                sep=r"\s+" if layout.separator == BLANKS else layout.separator,
                names=self.columns,
                header=0 if layout.has_header else None,
                # all columns are parsed, since with `usecols` pandas ignores additional cells
                dtype=dict.fromkeys(self.columns, str) | dict.fromkeys(numbers, np.float64),
                keep_default_na=False,
                na_values={name: list(MISSING) for name in numbers},
                skipinitialspace=True,
                chunksize=step,
            )
            with reader:
                for frame in self._frames(reader, numbers):
                    if len(frame.columns) and not isinstance(frame.index, pd.RangeIndex):
                        # pandas takes the first of too many cells as levels of the index
                        raise self._wrong_length(
                            len(self.columns) + frame.index.nlevels, self.place(first)
                        )
                    is_last_empty = is_last_empty or self._has_empty(frame[last])
                    columns = {name: _factorize(frame[name]) for name in texts}
                    values = frame[list(numbers)].to_numpy(np.float64)
                    yield Chunk(first, columns, values)
                    first += len(frame)
                    progress(f"read {self.path.name}", min(raw.tell(), total), total)
        if is_last_empty:
            self._check_lengths()
        if layout.num_rows not in (None, first):
            raise ValueError(
                f"{self.path} has {first:,} entries, but line {layout.skipped} says "
                f"{layout.num_rows:,}\n\nhint: was it written completely?"
            )

    def _frames(self, reader: Any, numbers: Sequence[str]) -> "Iterator[pd.DataFrame]":
        import pandas as pd

        try:
            yield from reader
        except pd.errors.ParserError as error:
            reason = str(error).strip().removeprefix("Error tokenizing data. C error: ")
            raise ValueError(f"{self.path}: {reason}\n\n{self._hint_of_lengths()}") from None
        except ValueError as error:
            if "\n\nhint: " in str(error):
                raise
            raise self._not_a_number(numbers, error) from None

    @staticmethod
    def _has_empty(column: "pd.Series[Any]") -> bool:
        return bool((column.isna() if column.dtype.kind == "f" else column == "").any())

    def _check_lengths(self) -> None:
        """Check that no line has fewer cells than there are columns, which pandas accepts."""
        for line, cells in self._records():
            if len(cells) != len(self.columns):
                raise self._wrong_length(len(cells), f"{self.path}, line {line}")

    def _wrong_length(self, count: int, where: str) -> ValueError:
        return ValueError(
            f"{where}: {count} cells, but there are {len(self.columns)} columns\n\n"
            f"{self._hint_of_lengths()}"
        )

    def _hint_of_lengths(self) -> str:
        separator = self.format.separator
        return (
            "hint: all lines have as many cells as the first one, also if some are empty; a text "
            f"with the separator {separator!r} is in quotes; separator in the .toml sets another"
        )

    def _not_a_number(self, numbers: Sequence[str], error: ValueError) -> ValueError:
        for line, cells in self._records():
            for name, cell in zip(self.columns, cells, strict=False):
                if name in numbers and cell.strip() not in MISSING and not is_number(cell):
                    return ValueError(
                        f"{self.path}, line {line}, column {name!r}: {cell!r} is not a number\n\n"
                        'hint: list the columns of features, such as features = ["age", "x*"]; '
                        "encode texts as numbers, for example with pandas.get_dummies"
                    )
        return ValueError(f"{self.path}: {error}\n\nhint: check the columns of numbers")

    def _records(self) -> Generator[tuple[int, list[str]], None, None]:
        """Yield, for each row, the number of its first line, counted from 1, and its cells."""
        with self._readable(), self._decoded() as (_, file):
            reader = self.format.cells(_Lines(self.path, file, self.format))
            before, is_header = 0, self.has_header
            for cells in reader:
                if cells and not is_header:
                    yield before + 1, cells
                is_header = is_header and not cells
                before = reader.line_num

    @contextmanager
    def _decoded(self) -> Iterator[tuple[Any, Any]]:
        """Open the file; return it as bytes, which may be compressed, and as text."""
        # gzip and TextIOWrapper do not close the file that they read
        with self.path.open("rb") as raw:
            is_gzip = self.path.suffix.lower() == ".gz"
            data: Any = gzip.GzipFile(fileobj=raw) if is_gzip else raw
            with io.TextIOWrapper(data, encoding="utf-8-sig", newline="") as file:
                yield raw, file

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Raise a ValueError with a hint for what a damaged file raises."""
        hint = "hint: write or download it again"
        try:
            yield
        except EOFError:
            raise ValueError(f"{self.path} is truncated\n\n{hint}") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(
                f"{self.path} is not a gzip file, or is damaged: {error}\n\n{hint}"
            ) from None
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.path} is not UTF-8: {error.reason} at byte {error.start}\n\n"
                "hint: convert it, for example with `iconv -t UTF-8`"
            ) from None
        except (ValueError, csv.Error) as error:
            if "\n\nhint: " in str(error):
                raise
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(f"{self.path} cannot be read: {reason}\n\n{hint}") from None


class _Lines:
    """A file whose comments are empty lines, so that the other lines keep their numbers."""

    def __init__(self, path: Path, file: Any, layout: TextFormat) -> None:
        self._path, self._file, self._layout = path, file, layout
        marks = "|".join(map(re.escape, layout.comments))
        self._comment = re.compile(rf"^[ \t]*(?:{marks})[^\r\n]*", re.M)
        # a cell in quotes may have several lines, which are no comments
        begin = rf"(?:^|[{re.escape(layout.separator)}])[ \t]*"
        self._quoted_cell = re.compile(rf"""{begin}"(?:[^"]|"")*"(?!")""")
        self._open_quote = re.compile(rf'{begin}"')
        self._in_quotes = False
        self._start = "".join(re.sub("[^\r\n]", "", next(file)) for _ in range(layout.skipped))

    def read(self, size: int = -1) -> str:
        """Return about `size` characters; "" at the end."""
        text, self._start = self._start, ""
        text = text or self._file.read(size)
        if self._layout.comments and text and not text.endswith("\n"):
            # a comment at the end is read as a whole
            text += self._file.readline()
        return self._without_comments(text)

    def __iter__(self) -> Iterator[str]:
        yield from self._start.splitlines(keepends=True)
        yield from map(self._without_comments, self._file)

    def _without_comments(self, text: str) -> str:
        has_comment = any(mark in text for mark in self._layout.comments)
        if not self._in_quotes and '"' not in text:
            return self._comment.sub(self._check_comment, text) if has_comment else text
        if not self._layout.comments or not (has_comment or self._in_quotes or text.count('"') % 2):
            return text
        return "".join(map(self._without_comment, re.findall("[^\n]*\n|[^\n]+", text)))

    def _without_comment(self, line: str) -> str:
        rest = line
        if self._in_quotes:
            before, _, rest = line.replace('""', "").partition('"')
            self._in_quotes = before == line.replace('""', "")
        elif self._comment.match(line):
            return self._comment.sub(self._check_comment, line)
        if not self._in_quotes:
            self._in_quotes = bool(self._open_quote.search(self._quoted_cell.sub("", rest)))
        return line

    def _check_comment(self, found: "re.Match[str]") -> str:
        """Return "" for a comment, and raise a ValueError for a line that may be a row."""
        layout = self._layout
        cells: list[str] = next(layout.cells([found[0]]), [])
        if layout.may_be_rows and len(cells) == len(layout.names):
            raise ValueError(
                f"{self._path}: the line {found[0]!r:.100} may be a row or a comment\n\n"
                f'hint: comment = "{found[0].lstrip()[0]}" in the .toml skips such lines; quotes '
                "around the first text make it a row"
            )
        return ""


def _factorize(column: "pd.Series[Any]") -> Texts:
    import pandas as pd

    codes, found = pd.factorize(column, use_na_sentinel=False)
    # spaces before a cell are skipped by the parser
    stripped = ["" if pd.isna(text) else text.rstrip() for text in found]
    merged, uniques = pd.factorize(np.array(stripped, object))
    return merged[codes], np.asarray(uniques, object)
