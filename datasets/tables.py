"""Read columns of csv and parquet files, chunk by chunk, with errors that name the line."""

import csv
import gzip
import io
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gcnzc.datasets.rows import CHUNK_BYTES, Array, Progress, no_progress

if TYPE_CHECKING:
    import pandas as pd

CSV, PARQUET = (".csv", ".tsv", ".txt"), (".parquet", ".pq")
KINDS = ".csv, .tsv, .txt, one of these with .gz, .parquet or .pq"
# texts that mean a missing value in a column of numbers
MISSING = ("", "nan", "NaN", "NAN", "NA", "N/A", "null", "None")
# a chunk of text takes about this much memory for each cell
TEXT_BYTES = 64

Texts: TypeAlias = tuple[Array, Array]
"""A column of n texts: (n,) codes, and the different texts, where "" stands for an empty cell"""


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a table."""

    first: int  # number of the first row
    texts: dict[str, Texts]  # by column
    numbers: Array  # (n, columns) float64; NaN for an empty cell


def is_table(path: Path) -> bool:
    """Whether a file's suffix is one of a table, see `Table`."""
    return _kind(path) is not None


def import_parquet() -> Any:
    """Return `pyarrow.parquet`.

    Raises:
        RuntimeError: pyarrow is not installed.
    """
    try:
        from pyarrow import parquet
    except ImportError:
        raise RuntimeError(
            "parquet files need pyarrow, which is not installed\n\n"
            "hint: `pip install pyarrow`, or `pip install 'gcnzc[parquet]'`; csv needs nothing"
        ) from None
    return parquet


class Table:
    """A csv or parquet file with named columns.

    Args:
        path: ends in .csv, .tsv, .txt, one of these with .gz, .parquet or .pq.
        separator: of the cells of a csv file; None takes a tab for .tsv, and otherwise a comma.
        has_header: whether the first line has the names of the columns, which otherwise are their
            numbers, "0", "1", ...

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file does not have the suffix of a table.
    """

    def __init__(self, path: Path, separator: str | None = None, has_header: bool = True) -> None:
        self.path, self.has_header = path, has_header
        kind = _kind(path)
        if kind is None:
            raise ValueError(f"{path} is not a table\n\nhint: the name of a table ends in {KINDS}")
        if not path.is_file():
            raise FileNotFoundError(
                f"no file {path}\n\nhint: paths in a .toml are relative to its folder"
            )
        self.is_parquet = kind in PARQUET
        self.separator = separator or ("\t" if kind == ".tsv" else ",")

    @cached_property
    def columns(self) -> list[str]:
        """The names of the columns.

        Raises:
            ValueError: the header is not valid, or the file is damaged.
            RuntimeError: the file is parquet, and pyarrow is not installed.
        """
        if self.is_parquet:
            with self._readable():
                names = list(import_parquet().read_schema(self.path).names)
        else:
            names = self._csv_columns()
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(
                f"{self.path} has several columns {twice!r}\n\nhint: give each its own name"
            )
        return names

    def find(self, name: str, what: str) -> str:
        """Return `name` if the table has such a column.

        Args:
            name: of the column.
            what: the key that names it, for the message.

        Raises:
            ValueError: there is no such column.
        """
        if name not in self.columns:
            raise ValueError(
                f"{self.path} has no column {name!r}, which {what} names\n\n"
                f"hint: its columns are {', '.join(self.columns)}"
            )
        return name

    def chunks(
        self, texts: Sequence[str], numbers: Sequence[str] = (), progress: Progress = no_progress
    ) -> Iterator[Chunk]:
        """Read columns, as texts or as numbers.

        Args:
            texts: names of columns to read as texts.
            numbers: names of columns to read as numbers; empty cells are NaN.
            progress: called with the bytes read, or the rows of a parquet file.

        Raises:
            ValueError: the file is damaged, a row has another number of cells than the header, or a
                cell is not a number. For such a cell of a csv file, the message names the line and
                the column; for a parquet file, the column.
            RuntimeError: the file is parquet, and pyarrow is not installed.
        """
        read = self._parquet_chunks if self.is_parquet else self._csv_chunks
        with self._readable():
            yield from read(texts, numbers, progress)

    def place(self, row: int, column: str | None = None) -> str:
        """Describe where a cell or a row is: the file, the line or the row, and the column."""
        if self.is_parquet:
            where = f"{self.path}, row {row}"
        else:
            with closing(self._records()) as records:
                lines = (line for number, (line, _) in enumerate(records) if number == row)
                where = f"{self.path}, line {next(lines, '?')}"
        return where if column is None else f"{where}, column {column!r}"

    def _csv_columns(self) -> list[str]:
        with self._readable(), self._open() as file:
            reader = csv.reader(file, delimiter=self.separator, skipinitialspace=True)
            first = next((row for row in reader if row), [])
        names = [name.strip() for name in first]
        if not names:
            raise ValueError(f"{self.path} is empty\n\nhint: was it written completely?")
        if not self.has_header:
            return [str(number) for number in range(len(names))]
        wrong = next((name for name in names if not name or _is_number(name)), None)
        if wrong is not None:
            raise ValueError(
                f"{self.path}: the first line has {wrong!r}, which is not the name of a column\n\n"
                "hint: add a line with the names of the columns, or set header = false, and name "
                "the columns by their numbers, from 0"
            )
        return names

    def _csv_chunks(
        self, texts: Sequence[str], numbers: Sequence[str], progress: Progress
    ) -> Iterator[Chunk]:
        import pandas as pd

        step = max(1, CHUNK_BYTES // (8 * len(numbers) + TEXT_BYTES * len(self.columns)) * 4)
        total, last, first = self.path.stat().st_size, self.columns[-1], 0
        is_last_empty = False
        with self.path.open("rb") as raw, self._decoded(raw) as file:
            reader = pd.read_csv(
                file,
                sep=self.separator,
                names=self.columns,
                header=0 if self.has_header else None,
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

    def _frames(self, reader: Any, numbers: Sequence[str]) -> "Iterator[pd.DataFrame]":
        import pandas as pd

        try:
            yield from reader
        except pd.errors.ParserError as error:
            reason = str(error).strip().removeprefix("Error tokenizing data. C error: ")
            raise ValueError(
                f"{self.path}: {reason}"
                "\n\nhint: all lines have as many cells as the first one; a text that has the "
                f"separator {self.separator!r} is in quotes"
            ) from None
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
            "hint: all lines have as many cells as the first one; an empty cell needs its "
            f"separator {self.separator!r}, too"
        )

    def _not_a_number(self, numbers: Sequence[str], error: ValueError) -> ValueError:
        for line, cells in self._records():
            for name, cell in zip(self.columns, cells, strict=False):
                if name in numbers and cell.strip() not in MISSING and not _is_number(cell):
                    return ValueError(
                        f"{self.path}, line {line}, column {name!r}: {cell!r} is not a number\n\n"
                        'hint: list the columns of features, such as features = ["age", "x*"]; '
                        "encode texts as numbers, for example with pandas.get_dummies"
                    )
        return ValueError(f"{self.path}: {error}\n\nhint: check the columns of numbers")

    def _records(self) -> Generator[tuple[int, list[str]], None, None]:
        """Yield, for each row, the number of its first line, counted from 1, and its cells."""
        with self._readable(), self._open() as file:
            reader = csv.reader(file, delimiter=self.separator, skipinitialspace=True)
            before, is_header = 0, self.has_header
            for cells in reader:
                if cells and not is_header:
                    yield before + 1, cells
                is_header = is_header and not cells
                before = reader.line_num

    @contextmanager
    def _open(self) -> Iterator[Any]:
        # gzip and TextIOWrapper do not close the file that they read
        with self.path.open("rb") as raw, self._decoded(raw) as file:
            yield file

    def _decoded(self, raw: Any) -> Any:
        data = gzip.GzipFile(fileobj=raw) if self.path.suffix.lower() == ".gz" else raw
        return io.TextIOWrapper(data, encoding="utf-8-sig", newline="")

    def _parquet_chunks(
        self, texts: Sequence[str], numbers: Sequence[str], progress: Progress
    ) -> Iterator[Chunk]:
        step = max(1, CHUNK_BYTES // (8 * (len(numbers) + 2 * len(texts) + 1)) * 4)
        file, first = import_parquet().ParquetFile(self.path), 0
        total = file.metadata.num_rows
        with file:
            for batch in file.iter_batches(step, columns=[*texts, *numbers]):
                frame = batch.to_pandas()
                columns = {name: self._parquet_texts(frame[name]) for name in texts}
                values = np.empty((len(frame), len(numbers)), np.float64)
                for number, name in enumerate(numbers):
                    values[:, number] = self._parquet_numbers(frame[name])
                yield Chunk(first, columns, values)
                first += len(frame)
                progress(f"read {self.path.name}", first, total)

    def _parquet_texts(self, column: "pd.Series[Any]") -> Texts:
        import pandas as pd

        kinds = (pd.api.types.is_integer_dtype, pd.api.types.is_bool_dtype)
        is_text = isinstance(column.dtype, pd.StringDtype) or column.dtype == object
        codes, uniques = pd.factorize(column)
        values = [str(value) for value in uniques]
        if not (is_text or any(is_kind(column.dtype) for is_kind in kinds)):
            # integers with missing values are floating point in pandas
            whole = [not float(value) % 1 for value in uniques if _is_number(str(value))]
            if len(whole) < len(values) or not all(whole):
                raise ValueError(
                    f"{self.path}: the column {column.name!r} has the type {column.dtype}\n\n"
                    "hint: ids, labels and parts are integers, texts, or true and false"
                )
            values = [str(int(value)) for value in uniques]
        if (codes == -1).any():
            # a missing value has the code -1: the last of the texts
            values.append("")
        return codes, np.array(values, object)

    def _parquet_numbers(self, column: "pd.Series[Any]") -> Array:
        import pandas as pd

        if not pd.api.types.is_numeric_dtype(column.dtype):
            # a column of booleans with missing values, or of texts
            known = column.dropna()
            if not all(isinstance(value, bool | np.bool_) for value in known):
                example = f", such as {str(known.iloc[0])!r:.40}" if len(known) else ""
                raise ValueError(
                    f"{self.path}: the column {column.name!r} has the type {column.dtype}"
                    f"{example}, which is not a number\n\n"
                    "hint: list the columns of features; give a column of lists as several columns"
                )
        return column.astype(np.float64).to_numpy()

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
        except (ValueError, csv.Error, OSError) as error:
            # pyarrow raises OSError for damaged files, too
            is_of_system = isinstance(error, OSError) and not self.is_parquet
            if "\n\nhint: " in str(error) or is_of_system:
                raise
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(f"{self.path} cannot be read: {reason}\n\n{hint}") from None


def _kind(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        return suffixes[-2] if len(suffixes) > 1 and suffixes[-2] in CSV else None
    return suffixes[-1] if suffixes and suffixes[-1] in (*CSV, *PARQUET) else None


def _factorize(column: "pd.Series[Any]") -> Texts:
    import pandas as pd

    codes, found = pd.factorize(column, use_na_sentinel=False)
    # spaces before a cell are skipped by the parser
    stripped = ["" if pd.isna(text) else text.rstrip() for text in found]
    merged, uniques = pd.factorize(np.array(stripped, object))
    return merged[codes], np.asarray(uniques, object)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text
